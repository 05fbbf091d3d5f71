"""Token shards on disk as one memory-mapped array, and which windows of it make up batch t."""

import contextlib
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.files import inside, read_json, sha256, write_json
from engine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

FORMAT = 1
SHARD_TOKENS = 2**27  # 256 MiB of uint16
FEISTEL_ROUNDS = 6
IGNORED = -1  # a target that is not scored


class Tokens(Protocol):
    """A one-dimensional array of token ids: anything with a length that slices to NumPy arrays."""

    def __len__(self) -> int: ...
    def __getitem__(self, span: slice) -> np.ndarray: ...


class ShardedTokens:
    """Several arrays, end to end, as one; only what is sliced is read."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.starts = np.cumsum([0] + [len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        pieces = []
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self.starts[index + 1]))
            pieces.append(self.arrays[index][start - self.starts[index] : end - self.starts[index]])
            start, index = end, index + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.uint16)])


@dataclass(frozen=True)
class Dataset:
    """What ``prepare.py`` made: two splits of token ids, and the tokenizer that made them."""

    path: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: Tokens
    val: Tokens

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text that one token of the split stands for, on average."""
        counts = self.manifest["splits"][split]
        return counts["bytes"] / counts["tokens"]


def open_dataset(path: Path) -> Dataset:
    """Map the dataset in a folder into memory. Raises ValueError for what is missing, damaged or of another version."""
    if not (path / "manifest.json").is_file():
        raise ValueError(f"{path} holds no dataset; make it with: python prepare.py INPUT --out {path}")
    try:
        manifest = read_json(path / "manifest.json")
        if manifest["format"] != FORMAT:
            raise ValueError(f"it has format {manifest['format']}, but this version reads {FORMAT}")
        if sha256(path / "tokenizer.json") != manifest["tokenizer"]["sha256"]:
            raise ValueError("tokenizer.json is not the one that made the tokens beside it")
        splits = {}
        for split in ("train", "val"):
            counts = manifest["splits"][split]
            shards = [_open_shard(inside(path, s["file"]), s["tokens"], manifest["dtype"]) for s in counts["shards"]]
            splits[split] = ShardedTokens(shards)
            if len(splits[split]) != counts["tokens"] or not all(counts[what] > 0 for what in ("tokens", "bytes")):
                raise ValueError(f"its {split} split counts {counts['tokens']} tokens and {counts['bytes']} bytes")
        tokenizer = load_tokenizer(path / "tokenizer.json")
        if manifest["vocab_size"] != tokenizer.vocab_size:
            raise ValueError(f"it has {manifest['vocab_size']} tokens, but tokenizer.json {tokenizer.vocab_size}")
        return Dataset(path, manifest, tokenizer, splits["train"], splits["val"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ValueError(f"{path} can't be used ({reason}); prepare it again with --force --out {path}")


def _open_shard(path: Path, tokens: int, dtype: str) -> np.ndarray:
    array = np.load(path, mmap_mode="r")
    if dtype not in ("uint16", "uint32") or array.shape != (tokens,) or array.dtype != dtype:
        raise ValueError(f"{path.name} holds {array.dtype} {array.shape}, not {dtype} ({tokens},)")
    if path.stat().st_size != array.offset + array.nbytes:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {array.offset + array.nbytes}")
    return array


def verify_dataset(dataset: Dataset, again: bool) -> None:
    """Check every token: the shards' hashes, and that each id is in the vocabulary. Raises ValueError if not so.

    Once is enough for files that have not been touched since, unless again: ``verified.json`` beside them remembers.
    """
    path, known = dataset.path, dataset.path / "verified.json"
    shards = [shard for split in ("train", "val") for shard in dataset.manifest["splits"][split]["shards"]]
    stats = [(path / name).stat() for name in ("manifest.json", *(shard["file"] for shard in shards))]
    now = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
    with contextlib.suppress(OSError, ValueError):
        if not again and read_json(known) == now:
            return
    try:
        for shard, array in zip(shards, (*dataset.train.arrays, *dataset.val.arrays), strict=True):
            if sha256(path / shard["file"]) != shard["sha256"]:
                raise ValueError(f"{shard['file']} is not as it was written")
            largest = max((int(array[i : i + 2**24].max()) for i in range(0, len(array), 2**24)), default=0)
            if largest >= dataset.tokenizer.vocab_size:
                raise ValueError(f"{shard['file']} has token {largest} of {dataset.tokenizer.vocab_size}")
    except ValueError as error:
        raise _unusable(path, error) from None
    with contextlib.suppress(OSError):  # a folder that is only read is verified each time
        write_json(known, now)


class ShardWriter:
    """Writes one split's tokens as ``SPLIT-00000.npy``, … in a folder, in memory of one piece at a time."""

    def __init__(self, directory: Path, split: str, dtype: str, shard_tokens: int = SHARD_TOKENS):
        self.directory, self.split, self.dtype, self.shard_tokens = directory, split, np.dtype(dtype), shard_tokens
        self.counts = {"tokens": 0, "bytes": 0, "documents": 0, "shards": []}
        self.file = None
        self.room = 0

    def write(self, ids: np.ndarray) -> None:
        """Append token ids (N,), opening a new shard wherever one is full."""
        while len(ids):
            if not self.room:
                self._finish_shard()
                self.file = open(self.directory / f"{self.split}-{len(self.counts['shards']):05d}.npy", "wb")  # noqa: SIM115
                self._write_header(0)
                self.room = self.shard_tokens
            piece, ids = ids[: self.room], ids[self.room :]
            self.file.write(piece.astype(self.dtype, copy=False).data)
            self.room -= len(piece)
            self.counts["tokens"] += len(piece)

    def close(self) -> dict[str, Any]:
        """Complete the last shard; return the split's counts and shards as the manifest has them."""
        self._finish_shard()
        return self.counts

    def _write_header(self, tokens: int) -> None:
        """NumPy leaves room in the header for any length, so a second, true one fits over the first."""
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (tokens,)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def _finish_shard(self) -> None:
        if self.file is None:
            return
        tokens = self.shard_tokens - self.room
        self.file.seek(0)
        self._write_header(tokens)
        self.file.close()
        path = Path(self.file.name)
        self.counts["shards"].append({"file": path.name, "tokens": tokens, "sha256": sha256(path)})
        self.file = None


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64s so that every bit depends on every bit: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derived_seed(*parts: int) -> int:
    """A seed for a random generator: another for each sequence of whole numbers."""
    seed = np.zeros(1, np.uint64)
    for part in parts:
        seed = mix(seed + mix(np.array([part % 2**64], np.uint64) + np.uint64(1)))
    return int(seed[0])


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where a pseudo-random permutation of 0…size-1 sends each index; ``key`` (same shape, uint64) chooses which.

    A Feistel network (Luby & Rackoff 1988) permutes the next power of four; whoever lands outside walks on until
    inside (Black & Rogaway 2002). No list is ever shuffled: the cost does not depend on size.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    result = index.astype(np.uint64)
    walking = np.ones(len(result), bool)
    while walking.any():
        left, right = result[walking] >> half, result[walking] & mask
        for round_number in range(FEISTEL_ROUNDS):
            scrambled = mix(right ^ mix(key[walking] + np.uint64(round_number)))
            left, right = right, left ^ (scrambled & mask)
        result[walking] = (left << half) | right
        walking &= result >= size
    return result


def windows_per_epoch(num_tokens: int, context_length: int) -> int:
    """How many windows of context_length + 1 tokens, stride context_length, one epoch visits.

    One fewer than would fit from the start, where there are two, so that any offset below context_length has as many.
    Raises ValueError if not even one fits.
    """
    fitting = (num_tokens - 1) // context_length
    if fitting < 1:
        raise ValueError(
            f"{num_tokens} tokens are too few for one window of context_length {context_length} + 1; "
            f"prepare more text, or lower --context-length to at most {num_tokens - 1}"
        )
    return max(1, fitting - 1)


def window_starts(num_tokens: int, context_length: int, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Where each of batch ``step``'s windows starts, (batch_size,): a pure function, in O(1) memory."""
    size = windows_per_epoch(num_tokens, context_length)
    serial = step * batch_size + np.arange(batch_size, dtype=np.uint64)
    epoch, index = serial // np.uint64(size), serial % np.uint64(size)
    key = mix(epoch + np.uint64(derived_seed(seed)))
    slack = min(context_length, num_tokens - size * context_length)
    offset = mix(key) % np.uint64(slack)
    return offset + permute(index, size, key) * np.uint64(context_length)


def gather(tokens: Tokens, starts: np.ndarray, length: int) -> np.ndarray:
    """The windows of ``length`` tokens at starts (N,): (N, length), int64 as embeddings want them."""
    windows = np.empty((len(starts), length), np.int64)
    for row, start in zip(windows, starts.tolist(), strict=True):
        row[:] = tokens[start : start + length]
    return windows


class Batches:
    """The training batches of one process, each assembled by a thread while the one before is worked on."""

    def __init__(
        self, tokens: Tokens, context_length: int, seed: int, batch_size: int, share: slice, device: "torch.device"
    ):
        """share is which of a batch's batch_size windows are this process's; batches come to the device."""
        self.tokens, self.context_length, self.seed = tokens, context_length, seed
        self.batch_size, self.share, self.device = batch_size, share, device
        self.thread = ThreadPoolExecutor(1)
        self.next: tuple[int, Future] | None = None
        self.digest = 0  # of the windows given last; summed over processes it tells whether two runs saw the same

    def get(self, step: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Inputs and targets of a step, (B, T) each."""
        ready = self.next[1] if self.next and self.next[0] == step else self.thread.submit(self._assemble, step)
        windows, self.digest = ready.result()
        self.next = (step + 1, self.thread.submit(self._assemble, step + 1))
        windows = windows.to(self.device, non_blocking=True)
        return windows[0], windows[1]

    def _assemble(self, step: int) -> "tuple[torch.Tensor, int]":
        import torch  # not above: prepare.py needs none, and starts several times faster without

        starts = window_starts(len(self.tokens), self.context_length, self.seed, step, self.batch_size)[self.share]
        windows = gather(self.tokens, starts, self.context_length + 1)
        places = range(self.batch_size)[self.share]
        digest = sum(zlib.crc32(window.data, place) for window, place in zip(windows, places, strict=True))
        pair = torch.from_numpy(np.stack((windows[:, :-1], windows[:, 1:])))
        return pair.pin_memory() if self.device.type == "cuda" else pair, digest


def evaluation_windows(num_tokens: int, context_length: int, limit: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Starts of fixed windows, and how many leading targets of each another window scores already: (N,) each.

    Together they score every token but the first once, the last window reaching back to be full; or, with a limit,
    about that many tokens in windows spread evenly. Raises ValueError if not even one window fits.
    """
    windows_per_epoch(num_tokens, context_length)
    count = -(-(num_tokens - 1) // context_length)
    starts = np.arange(count, dtype=np.int64) * context_length
    starts[-1] = num_tokens - 1 - context_length
    scored_before = np.zeros(count, np.int64)
    if count > 1:
        scored_before[-1] = starts[-2] + context_length - starts[-1]
    if limit and limit < num_tokens:
        chosen = np.linspace(0, count - 1, max(1, limit // context_length)).astype(np.int64)
        starts, scored_before = starts[chosen], scored_before[chosen]
    return starts, scored_before


def evaluation_batch(tokens: Tokens, starts: np.ndarray, scored_before: np.ndarray, context_length: int) -> np.ndarray:
    """Inputs and targets, (2, N, context_length), of evaluation windows; targets scored elsewhere are IGNORED."""
    windows = gather(tokens, starts, context_length + 1)
    inputs, targets = windows[:, :-1], windows[:, 1:]
    ignored = np.arange(context_length) < scored_before[:, None]
    return np.stack((inputs, np.where(ignored, IGNORED, targets)))
