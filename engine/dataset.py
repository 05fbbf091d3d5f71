"""data/<name>/: a manifest, a tokenizer and memory-mapped shards of token ids; written, opened, verified, merged."""

import contextlib
import hashlib
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.files import inside, new_directory, parse_json, read_json, sha256, write_json
from engine.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1
SPLITS = ("train", "val")
EXAMPLES_DTYPE, LENGTHS_DTYPE = "int32", "uint32"  # of examples' tokens, as no text's are, and of their lengths
SHARD_TOKENS = 2**27  # 256 MiB of uint16
OURS = re.compile(r"(manifest|tokenizer|verified)\.json|(train|val)(-lengths)?-[0-9]{5,}\.npy")  # a dataset's files
HEADER = 128  # bytes of a shard's header: NumPy leaves room for an array of any length


class ShardedTokens:
    """Several arrays, end to end, as one; only what is sliced is read."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.starts = np.cumsum([0] + [len(array) for array in arrays]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        spanned = slice(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))
        arrays = zip(self.arrays[spanned], self.starts[spanned], strict=True)
        found = [array[max(0, start - offset) : stop - offset] for array, offset in arrays]
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, np.uint16)])


Tokens = np.ndarray | ShardedTokens  # token ids (N,)


@dataclass(frozen=True)
class Examples:
    """A split of examples. Its length is its number of tokens, as text's is."""

    tokens: Tokens  # int32, all examples end to end: an id where it counts as a target, ~id where it does not
    starts: np.ndarray  # int64 (N,), of each example in tokens
    lengths: np.ndarray  # int64 (N,), of each in tokens
    too_long: int = 0  # how many :meth:`fitting` has left out or cut

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_examples(self) -> int:
        return len(self.lengths)

    def example(self, index: int) -> np.ndarray:
        """One example's tokens, int32, read from the disk."""
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]

    def fitting(self, context_length: int, cut: bool) -> "Examples":
        """Those of at most context_length + 1 tokens; if cut, others' starts that have a target; ValueError if none."""
        most = context_length + 1
        long = np.flatnonzero(self.lengths > most)
        cut_to = replace(self, lengths=np.minimum(self.lengths, most))
        left_out = [i for i in long.tolist() if not (cut and (cut_to.example(i)[1:] >= 0).any())]
        if len(left_out) == self.num_examples:
            found = f"all {len(long):,} examples have more than --context-length {context_length} + 1 tokens"
            least = f"; raise it to at least {self.lengths.min() - 1}, or use --long-examples cut"
            raise ValueError(f"{found}{', and cut off they have nothing to learn; raise it' if cut else least}")
        starts, lengths = np.delete(self.starts, left_out), np.delete(cut_to.lengths, left_out)
        return replace(self, starts=starts, lengths=lengths, too_long=len(long))


@dataclass(frozen=True)
class Dataset:
    """What ``prepare.py`` made: two splits of text, or of examples, as token ids, and the tokenizer that made them."""

    path: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: Tokens | Examples
    val: Tokens | Examples
    sha256: str  # of the manifest that was opened, whatever is at path by now

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text that one token of the split stands for, on average; of examples, what counts of both."""
        counts = self.manifest["splits"][split]
        return counts["bytes"] / counts.get("targets", counts["tokens"])


def open_dataset(path: Path) -> Dataset:
    """Map the dataset in a folder into memory. Raises ValueError for what is missing, damaged or of another version."""
    if not (path / "manifest.json").is_file():
        raise ValueError(f"{path} holds no dataset; make it with: python prepare.py INPUT --out {path}")
    try:
        content = (path / "manifest.json").read_bytes()
        manifest = parse_json(content, path / "manifest.json")
        if manifest["format"] != FORMAT:
            raise ValueError(f"it has format {manifest['format']}, but this version reads {FORMAT}")
        if sha256(path / "tokenizer.json") != manifest["tokenizer"]["sha256"]:
            raise ValueError("tokenizer.json is not the one that made the tokens beside it")
        splits = {split: open_split(path, manifest, split) for split in SPLITS}
        tokenizer = load_tokenizer(path / "tokenizer.json")
        if manifest["vocab_size"] != tokenizer.vocab_size:
            raise ValueError(f"it has {manifest['vocab_size']} tokens, but tokenizer.json {tokenizer.vocab_size}")
        return Dataset(path, manifest, tokenizer, **splits, sha256=hashlib.sha256(content).hexdigest())
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise _unusable(path, error) from None


def open_split(path: Path, manifest: dict[str, Any], split: str) -> Tokens | Examples:
    """Map one split into memory. Raises all sorts of errors if it is not as the manifest says, or empty."""
    counts = manifest["splits"][split]
    tokens, *lengths = (
        ShardedTokens([_open_shard(inside(path, shard["file"]), shard["tokens"], dtype) for shard in counts[series]])
        for series, dtype in _series(manifest).items()
    )
    if len(tokens) != counts["tokens"] or min(counts["tokens"], counts["bytes"], counts.get("targets", 1)) < 1:
        raise ValueError(f"its {split} split counts {counts['tokens']} tokens and {counts['bytes']} bytes")
    if not lengths:
        return tokens
    ends = np.cumsum(lengths[0][:], dtype=np.int64)
    if len(ends) != counts["documents"] or ends[-1] != len(tokens) or not lengths[0][:].all():
        raise ValueError(f"its {split} split's examples don't have the lengths that it counts")
    return Examples(tokens, np.append(0, ends[:-1]), np.diff(ends, prepend=0))


def _series(manifest: dict[str, Any]) -> dict[str, str]:
    """The series of shards that each split has, and their dtypes."""
    examples = manifest["dtype"] == EXAMPLES_DTYPE
    return {"shards": manifest["dtype"]} | ({"lengths": LENGTHS_DTYPE} if examples else {})


def _unusable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ValueError(f"{path} can't be used ({reason}); prepare it again with --force --out {path}")


def _open_shard(path: Path, tokens: int, dtype: str) -> np.ndarray:
    array = np.load(path, mmap_mode="r")
    if dtype not in ("uint16", "uint32", EXAMPLES_DTYPE) or array.shape != (tokens,) or array.dtype != dtype:
        raise ValueError(f"{path.name} holds {array.dtype} {array.shape}, not {dtype} ({tokens},)")
    if path.stat().st_size != array.offset + array.nbytes:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {array.offset + array.nbytes}")
    return array


def verify_dataset(dataset: Dataset, again: bool) -> None:
    """Check every token: the shards' hashes, and that each id is in the vocabulary. Raises ValueError if not so.

    Once is enough for files that have not been touched since, unless again: ``verified.json`` beside them remembers.
    """
    path, known = dataset.path, dataset.path / "verified.json"
    splits, series = dataset.manifest["splits"], _series(dataset.manifest)
    shards = [shard for one in series for split in SPLITS for shard in splits[split][one]]  # those of tokens first
    stats = [(path / name).stat() for name in ("manifest.json", *(shard["file"] for shard in shards))]
    now = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
    with contextlib.suppress(OSError, ValueError):
        if not again and read_json(known) == now:
            return
    arrays = [array for split in (dataset.train, dataset.val) for array in getattr(split, "tokens", split).arrays]
    for shard, array in itertools.zip_longest(shards, arrays, fillvalue=np.empty(0, np.int32)):
        if sha256(path / shard["file"]) != shard["sha256"]:
            raise _unusable(path, ValueError(f"{shard['file']} is not as it was written"))
        blocks = (array[i : i + 2**24] for i in range(0, len(array), 2**24))
        largest = max((max(int(block.max()), ~int(block.min())) for block in blocks), default=0)  # ~id is one too
        if largest >= dataset.tokenizer.vocab_size:
            raise _unusable(path, ValueError(f"{shard['file']} has token {largest} of {dataset.tokenizer.vocab_size}"))
    with contextlib.suppress(OSError):  # a folder that is only read is verified each time
        write_json(known, now)


class ShardWriter:
    """Writes a series of tokens as ``NAME-00000.npy``, … in a directory, in memory of one piece at a time."""

    def __init__(self, directory: Path, name: str, dtype: str, counted: Sequence[str] = ("bytes", "documents")):
        self.directory, self.name, self.dtype, self.counted = directory, name, np.dtype(dtype), counted
        self.counts = {"tokens": 0} | dict.fromkeys(counted, 0) | {"shards": []}
        self.file = None  # the shard that is open
        self.room = 0  # tokens that it has room for

    def write(self, ids: np.ndarray, *amounts: int) -> None:
        """Append token ids (N,), and how much is in them of what is counted: UTF-8 bytes, documents that end, …"""
        for what, amount in zip(self.counted, amounts, strict=False):
            self.counts[what] += amount
        while len(ids):
            if self.file is None:
                self.file = open(self.directory / f"{self.name}-{len(self.counts['shards']):05d}.npy", "wb")  # noqa: SIM115
                self.file.seek(HEADER)
                self.room = SHARD_TOKENS
            piece, ids = ids[: self.room], ids[self.room :]
            self.file.write(piece.astype(self.dtype, copy=False).data)
            self.room -= len(piece)
            self.counts["tokens"] += len(piece)
            if not self.room:
                self.close()

    def close(self) -> dict[str, Any]:
        """Complete the shard that is open, if any; return the counts and shards as the manifest has them."""
        if self.file is not None:
            tokens = SHARD_TOKENS - self.room
            header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (tokens,)}
            self.file.seek(0)
            np.lib.format.write_array_header_1_0(self.file, header)
            assert self.file.tell() == HEADER
            self.file.close()
            path = Path(self.file.name)
            self.counts["shards"].append({"file": path.name, "tokens": tokens, "sha256": sha256(path)})
            self.file = None
        return self.counts


@contextlib.contextmanager
def new_dataset(out: Path, tokenizer: Tokenizer, origin: dict[str, Any]) -> Iterator[dict[str, ShardWriter]]:
    """Fill the writers, one a split, that this yields; leaving it without an error makes ``out``, at once.

    origin says what it is made from, and for a part which one. Of examples it yields writers of their lengths too,
    ``SPLIT-lengths``. Raises ValueError if a split of a whole is too short.
    """
    examples = "examples" in origin
    with new_directory(out) as directory:
        tokenizer.save(directory / "tokenizer.json")
        dtype = EXAMPLES_DTYPE if examples else "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        counted = ("bytes", "documents", "targets")[: 2 + examples]
        writers = {split: ShardWriter(directory, split, dtype, counted) for split in SPLITS}
        lengths = {split: ShardWriter(directory, f"{split}-lengths", LENGTHS_DTYPE, ()) for split in SPLITS * examples}
        yield writers | {writer.name: writer for writer in lengths.values()}
        splits = {split: writer.close() for split, writer in writers.items()}
        for split, writer in lengths.items():
            splits[split]["lengths"] = writer.close()["shards"]
        documents = sum(counts["documents"] for counts in splits.values())
        for split, counts in splits.items():
            if counts["tokens"] < 2 and "part" not in origin:
                found = f"{counts['tokens']} tokens of {documents} {'examples' if examples else 'documents'}"
                raise ValueError(f"the {split} split has {found}, too few; give more, or change --val-fraction")
        identity = {"kind": tokenizer.kind, "sha256": sha256(directory / "tokenizer.json")}
        manifest = {"format": FORMAT, "tokenizer": identity, "vocab_size": tokenizer.vocab_size, "dtype": dtype}
        write_json(directory / "manifest.json", manifest | {"splits": splits, "origin": origin})


def is_made(out: Path, origin: dict[str, Any], force: bool) -> bool:
    """Whether out holds this very dataset, whole, and may keep it. Raises ValueError for what must not be replaced."""
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else [""] * out.exists()
    if not names:
        return False
    if not {"manifest.json", "tokenizer.json"} <= {*names}:
        raise ValueError(f"{out} exists and is not a dataset; choose another directory with --out")
    if foreign := [name for name in names if not OURS.fullmatch(name)]:
        raise ValueError(f"{out} holds {foreign[0]}, which is no part of a dataset; move it, or choose another --out")
    manifest = manifest_of(out)
    other = _differences(manifest, manifest | {"origin": origin}) if manifest else "a manifest.json that is damaged"
    if other and not force:
        raise ValueError(f"{out} was made with {other}; use --force to replace it, or another --out")
    return not force and _is_whole(out, manifest)


def _is_whole(out: Path, manifest: dict[str, Any]) -> bool:
    """Whether the files that a manifest names are there, in their lengths."""
    try:
        for series, dtype in _series(manifest).items():
            for shard in (shard for split in manifest["splits"].values() for shard in split[series]):
                _open_shard(inside(out, shard["file"]), shard["tokens"], dtype)
        return sha256(out / "tokenizer.json") == manifest["tokenizer"]["sha256"]
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return False


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a dataset or a part of one; empty where there is none that can be read."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        found = read_json(path / "manifest.json")
        keys = ("origin", "tokenizer", "splits")  # checkpoints have a manifest too, with others
        if isinstance(found, dict) and all(isinstance(found.get(key), dict) for key in keys):
            return found
    return {}


def _differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What a manifest's dataset was made with that another's was not; empty if with the same."""
    names = {"content": "other text", "sha256": "another tokenizer.json"}
    found, expected = (manifest["origin"] | manifest["tokenizer"] for manifest in (found, expected))
    keys = [key for key in found.keys() | expected if found.get(key) != expected.get(key)]
    return ", ".join(sorted(names.get(key, f"{key} {found[key]}" if key in found else f"no {key}") for key in keys))


def parts_of(out: Path) -> Path:
    """The folder of a dataset's parts."""
    return out.parent / f"{out.name}.parts"


def _remedy(part: Path) -> str:
    return f"python prepare.py INPUT --out {part.parent.with_suffix('')} --part {part.name.replace('-of-', '/')}"


def find_parts(out: Path) -> dict[Path, dict[str, Any]]:
    """The folders and manifests of a dataset's parts, in order. Raises ValueError if they don't make a whole."""
    folder = parts_of(out)
    matches = [re.fullmatch("[0-9]+-of-([0-9]+)", path.name) for path in folder.glob("*")]
    counts = sorted({int(match[1]) for match in matches if match})
    if not counts:
        raise ValueError(f"{folder} holds no parts; make each with: {_remedy(folder / '1-of-N')}")
    if len(counts) > 1:
        sorts = " and ".join(f"{folder}/*-of-{count}" for count in counts)
        raise ValueError(f"there are parts of different counts, {sorts}; remove those that you don't want")
    parts = {}
    for number in range(1, counts[0] + 1):
        part = folder / f"{number}-of-{counts[0]}"
        parts[part] = manifest_of(part)
        if not parts[part]:
            state = "damaged; remove it, and" if part.exists() else "missing;"
            raise ValueError(f"{part} is {state} make it with: {_remedy(part)}")
        first, expected = next(iter(parts.items()))
        expected = expected | {"origin": expected["origin"] | {"part": f"{number}/{counts[0]}"}}
        if other := _differences(parts[part], expected):
            raise ValueError(f"{part} was made with {other}, unlike {first}; make it again: {_remedy(part)} --force")
    return parts


def merge_parts(out: Path, parts: dict[Path, dict], origin: dict[str, Any], advance: Callable[[int], Any]) -> None:
    """Join parts to the dataset that one run makes, byte for byte; advance is told the bytes of text.

    Raises ValueError for a file that is not what was written.
    """

    def intact(part: Path, file: str, expected_sha256: str) -> Path:
        path = inside(part, file)
        if not path.is_file() or sha256(path) != expected_sha256:
            raise ValueError(f"{path} is damaged; make it again: {_remedy(part)} --force")
        return path

    first, manifest = next(iter(parts.items()))
    tokenizer = load_tokenizer(intact(first, "tokenizer.json", manifest["tokenizer"]["sha256"]))
    with new_dataset(out, tokenizer, origin) as writers:
        for part, found in parts.items():
            for split, counts in found["splits"].items():
                for series in _series(found):
                    writer = writers[split if series == "shards" else f"{split}-{series}"]
                    for shard in counts[series]:
                        writer.write(np.load(intact(part, shard["file"], shard["sha256"]), mmap_mode="r"))
                writers[split].write(np.empty(0), *(counts[what] for what in writers[split].counted))
                advance(counts["bytes"])
