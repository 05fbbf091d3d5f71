"""data/<name>/: a manifest, a tokenizer and memory-mapped shards of token ids; opened and verified."""

import contextlib
import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.core.files import inside, parse_json, read_json, sha256, write_json
from engine.data.chat import is_target
from engine.data.ledger import SPLITS
from engine.data.tokenizer import Tokenizer, load_tokenizer

FORMAT = 1
EXAMPLES_DTYPE, LENGTHS_DTYPE = "int32", "uint32"  # of examples' tokens, as no text's are, and of their lengths


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
            raise UserError(f"{found}{', and cut off they have nothing to learn; raise it' if cut else least}")
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

    def fitting(self, context_length: int, cut: bool) -> "Dataset":
        """With the examples that fit alone: see :meth:`Examples.fitting`. What is left of val is counted anew."""
        train, val = (split.fitting(context_length, cut) for split in (self.train, self.val))
        splits = self.manifest["splits"]
        if val.too_long:
            splits = splits | {"val": splits["val"] | _counted(val, self.tokenizer)}
        return replace(self, train=train, val=val, manifest=self.manifest | {"splits": splits})


def _counted(examples: Examples, tokenizer: Tokenizer) -> dict[str, int]:
    """The targets of examples, and the UTF-8 bytes of their text."""
    counts = np.zeros(tokenizer.vocab_size, np.int64)  # of each id
    for index in range(examples.num_examples):
        example = examples.example(index)
        np.add.at(counts, example[is_target(example)], 1)
    text = np.setdiff1d(np.flatnonzero(counts), [*tokenizer.special_tokens.values()]).tolist()
    return {"targets": int(counts.sum()), "bytes": sum(int(counts[i]) * len(tokenizer.decode_bytes([i])) for i in text)}


def open_dataset(path: Path) -> Dataset:
    """Map the dataset in a folder into memory. Raises UserError for what is missing, damaged or of another version."""
    if not (path / "manifest.json").is_file():
        raise UserError(f"{path} holds no dataset; make it with: python prepare.py INPUT --out {path}")
    try:
        content = (path / "manifest.json").read_bytes()
        manifest = parse_json(content, path / "manifest.json")
        if manifest["format"] != FORMAT:
            raise UserError(f"it has format {manifest['format']}, but this version reads {FORMAT}")
        if sha256(path / "tokenizer.json") != manifest["tokenizer"]["sha256"]:
            raise UserError("tokenizer.json is not the one that made the tokens beside it")
        splits = {split: open_split(path, manifest, split) for split in SPLITS}
        tokenizer = load_tokenizer(path / "tokenizer.json")
        if manifest["vocab_size"] != tokenizer.vocab_size:
            raise UserError(f"it has {manifest['vocab_size']} tokens, but tokenizer.json {tokenizer.vocab_size}")
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
        raise UserError(f"its {split} split counts {counts['tokens']} tokens and {counts['bytes']} bytes")
    if not lengths:
        return tokens
    ends = np.cumsum(lengths[0][:], dtype=np.int64)
    if len(ends) != counts["documents"] or ends[-1] != len(tokens) or not lengths[0][:].all():
        raise UserError(f"its {split} split's examples don't have the lengths that it counts")
    return Examples(tokens, np.append(0, ends[:-1]), np.diff(ends, prepend=0))


def _series(manifest: dict[str, Any]) -> dict[str, str]:
    """The series of shards that each split has, and their dtypes."""
    examples = manifest["dtype"] == EXAMPLES_DTYPE
    return {"shards": manifest["dtype"]} | ({"lengths": LENGTHS_DTYPE} if examples else {})


def _unusable(path: Path, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{path} can't be used ({reason}); prepare it again with --force --out {path}")


def _open_shard(path: Path, tokens: int, dtype: str) -> np.ndarray:
    array = np.load(path, mmap_mode="r")
    if dtype not in ("uint16", "uint32", EXAMPLES_DTYPE) or array.shape != (tokens,) or array.dtype != dtype:
        raise UserError(f"{path.name} holds {array.dtype} {array.shape}, not {dtype} ({tokens},)")
    if path.stat().st_size != array.offset + array.nbytes:
        raise UserError(f"{path.name} has {path.stat().st_size} bytes, not {array.offset + array.nbytes}")
    return array


def verify_dataset(dataset: Dataset, again: bool) -> None:
    """Check every token: the shards' hashes, and that each id is in the vocabulary. Raises UserError if not so.

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
            raise _unusable(path, UserError(f"{shard['file']} is not as it was written"))
        blocks = (array[i : i + 2**24] for i in range(0, len(array), 2**24))
        largest = max((max(int(block.max()), ~int(block.min())) for block in blocks), default=0)  # ~id is one too
        if largest >= dataset.tokenizer.vocab_size:
            raise _unusable(path, UserError(f"{shard['file']} has token {largest} of {dataset.tokenizer.vocab_size}"))
    with contextlib.suppress(OSError):  # a folder that is only read is verified each time
        write_json(known, now)


def is_whole(out: Path, manifest: dict[str, Any]) -> bool:
    """Whether the files that a manifest names are there, in their lengths."""
    try:
        for series, dtype in _series(manifest).items():
            for shard in (shard for split in manifest["splits"].values() for shard in split[series]):
                _open_shard(inside(out, shard["file"]), shard["tokens"], dtype)
        ledger = manifest.get("ledger", [])  # a part's
        if not all(inside(out, shard["file"]).is_file() for shard in ledger):
            return False
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
