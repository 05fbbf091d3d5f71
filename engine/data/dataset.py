"""A dataset, data/<name>/: write its shards, open it, verify it."""

import contextlib
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.cli import shell_command
from engine.core.errors import UserError
from engine.core.files import (
    check_types,
    fsync,
    parse_json,
    read_json,
    safe_child_path,
    sha256,
    write_json,
)
from engine.data.chat import count_targets
from engine.data.splits import SPLIT_NAMES
from engine.data.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 2
EXAMPLES_DTYPE = "int32"  # of token shards of examples: ~id is negative
LENGTHS_DTYPE = "uint32"
MAX_SHARD_TOKENS = 2**27  # 256 MiB of uint16
SHARD_HEADER_BYTES = 128  # NumPy's header with room for an array of any length
VERSION_FILE = "prepared_from.json"  # holds Corpus.version
FACT_NAMES = ("documents", "repeats", "longest", "vocabulary", "val_distinct", "val_copies")
SHARD_SCHEMA = {"file": str, "tokens": int, "sha256": str}
COUNTS_SCHEMA = {"tokens": int, "bytes": int, "documents": int, "shards": list}
MANIFEST_SCHEMA = {
    "vocab_size": int,
    "dtype": str,
    "tokenizer": {"sha256": str},
    "splits": dict.fromkeys(SPLIT_NAMES, COUNTS_SCHEMA),
    "origin": {"content": str},
    "facts": dict.fromkeys(FACT_NAMES, int),
}
OPTIONAL_FACTS_SCHEMA = {"dropped": int, "notes": {"*": int}}
DATASET_FILE_PATTERN = re.compile(
    r"(manifest|tokenizer|verified|prepared_from)\.json"
    r"|(train|val)(-lengths)?-[0-9]{5,}(-[0-9]+)?\.npy"
)


class ShardedTokens:
    """Several arrays, read as one by slices."""

    def __init__(self, arrays: Sequence[np.ndarray]):
        self.arrays = arrays
        self.starts = np.cumsum([0] + [len(array) for array in arrays]).tolist()

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        touched = slice(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))
        arrays = zip(self.arrays[touched], self.starts[touched], strict=True)
        slices = [array[max(0, start - offset) : stop - offset] for array, offset in arrays]
        if len(slices) == 1:
            return slices[0]
        return np.concatenate(slices or [np.empty(0, np.uint16)])


Tokens = np.ndarray | ShardedTokens  # token ids (N,)


@dataclass(frozen=True)
class Examples:
    """A split of examples. Its length is its number of tokens, as for a split of text."""

    tokens: Tokens  # int32, all examples: an id where it is a target, ~id elsewhere
    starts: np.ndarray  # int64 (N,), of each example in tokens
    lengths: np.ndarray  # int64 (N,), of each example
    num_cut: int = 0  # by drop_long
    num_removed: int = 0  # by drop_long

    def __len__(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_examples(self) -> int:
        return len(self.lengths)

    def example(self, index: int) -> np.ndarray:
        """Read the tokens of one example, int32."""
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]

    def drop_long(self, context_length: int, cut: bool) -> "Examples":
        """Remove the examples of more than context_length + 1 tokens, or cut them.

        An example without a target after the cut is removed. Raises UserError if none remains.
        """
        max_length = context_length + 1
        long = np.flatnonzero(self.lengths > max_length).tolist()
        shortened = replace(self, lengths=np.minimum(self.lengths, max_length))
        removed = [i for i in long if not (cut and (shortened.example(i)[1:] >= 0).any())]
        if len(removed) == self.num_examples:
            reason = f"no example has a target within {max_length} tokens"
            min_context = int(self.lengths.min()) - 1
            advice = "Raise it" if cut else f"Raise it to {min_context}, or use --long-examples cut"
            raise UserError(f"--context-length: {reason} (got {context_length}). {advice}.")
        return replace(
            self,
            starts=np.delete(self.starts, removed),
            lengths=np.delete(shortened.lengths, removed),
            num_cut=len(long) - len(removed),
            num_removed=len(removed),
        )


@dataclass(frozen=True)
class Dataset:
    """A folder made by ``prepare.py``: two splits of text or of examples, and their tokenizer."""

    path: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: Tokens | Examples
    val: Tokens | Examples
    sha256: str  # of the manifest as it was opened

    @property
    def num_documents(self) -> int:
        """Number of documents; one that was cut is counted once."""
        return self.manifest["facts"]["documents"]

    def bytes_per_token(self, split: str) -> float:
        """Return the mean UTF-8 bytes of text of one token; of examples, of one target."""
        counts = self.manifest["splits"][split]
        return counts["bytes"] / counts.get("targets", counts["tokens"])

    def drop_long_examples(self, context_length: int, cut: bool) -> "Dataset":
        """Apply Examples.drop_long to both splits, and correct the manifest's counts of val."""
        if not isinstance(self.train, Examples) or not isinstance(self.val, Examples):
            return self
        train = self.train.drop_long(context_length, cut)
        val = self.val.drop_long(context_length, cut)
        splits = self.manifest["splits"]
        if val.num_cut or val.num_removed:
            kept = map(val.example, range(val.num_examples))
            counts = [count_targets(self.tokenizer, example) for example in kept]
            num_targets, num_bytes = map(sum, zip(*counts, strict=True))
            counted = {"targets": num_targets, "bytes": num_bytes}
            splits = {**splits, "val": {**splits["val"], **counted}}
        return replace(self, train=train, val=val, manifest={**self.manifest, "splits": splits})


def open_dataset(path: Path) -> Dataset:
    """Map a dataset into memory. Raises UserError if it is missing, corrupted or unsupported."""
    if not (path / "manifest.json").is_file():
        command = shell_command("python", "prepare.py", "INPUT", "--out", path)
        raise UserError(f"{path}: is not a dataset. Make it with: {command}")
    try:
        content = (path / "manifest.json").read_bytes()
        manifest = parse_json(content, path / "manifest.json")
        if manifest["format"] != FORMAT_VERSION:
            raise UserError(f"its format must be {FORMAT_VERSION} (got {manifest['format']})")
        check_types(manifest, MANIFEST_SCHEMA, "manifest")
        for name in OPTIONAL_FACTS_SCHEMA.keys() & manifest["facts"].keys():
            fact = manifest["facts"][name]
            check_types(fact, OPTIONAL_FACTS_SCHEMA[name], f"manifest.facts.{name}")
        if sha256(path / "tokenizer.json") != manifest["tokenizer"]["sha256"]:
            raise UserError("tokenizer.json is not the one that encoded the text")
        splits = {split: _open_split(path, manifest, split) for split in SPLIT_NAMES}
        tokenizer = load_tokenizer(path / "tokenizer.json")
        if manifest["vocab_size"] != tokenizer.vocab_size:
            sizes = f"{tokenizer.vocab_size} (got {manifest['vocab_size']})"
            raise UserError(f"its vocabulary size must be {sizes}")
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError) as error:
        raise _dataset_error(path, error) from None
    return Dataset(path, manifest, tokenizer, **splits, sha256=hashlib.sha256(content).hexdigest())


def _open_split(path: Path, manifest: dict[str, Any], split: str) -> Tokens | Examples:
    """Map a split into memory. Raises various errors unless it matches the manifest."""
    counts = manifest["splits"][split]
    tokens = _open_shards(path, counts["shards"], manifest["dtype"])
    if len(tokens) != counts["tokens"] or min(len(tokens), counts["bytes"]) < 1:
        sizes = f"{counts['tokens']} tokens and {counts['bytes']} bytes"
        raise UserError(f"its {split} split must have the tokens of its shards (got {sizes})")
    if manifest["dtype"] != EXAMPLES_DTYPE:
        return tokens
    lengths = _open_shards(path, counts["lengths"], LENGTHS_DTYPE)[:].astype(np.int64)
    is_valid = len(lengths) == counts["documents"] and lengths.sum() == len(tokens)
    if not is_valid or not lengths.all() or counts["targets"] < 1:
        raise UserError(f"the lengths of the examples of its {split} split are wrong")
    return Examples(tokens, np.cumsum(lengths) - lengths, lengths)


def _open_shards(folder: Path, shards: list[dict[str, Any]], dtype: str) -> ShardedTokens:
    """Map shards into memory. Raises various errors unless they match the manifest."""
    check_types(shards, [SHARD_SCHEMA], "shards")
    arrays = []
    for shard in shards:
        path = safe_child_path(folder, shard["file"])
        array = np.load(path, mmap_mode="r")
        shape = (shard["tokens"],)
        if array.shape != shape or array.dtype != dtype:
            actual = f"{array.dtype} {array.shape}"
            raise UserError(f"{path.name} must be {dtype} {shape} (got {actual})")
        num_bytes = array.offset + array.nbytes
        if path.stat().st_size != num_bytes:
            raise UserError(f"{path.name} must have {num_bytes} bytes")
        arrays.append(array)
    return ShardedTokens(arrays)


def _dataset_error(path: Path, error: Exception) -> UserError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return UserError(f"{path}: can't be used ({reason}). Prepare it again with --force.")


def verify_dataset(dataset: Dataset, force: bool) -> None:
    """Check the hash of every shard, and that every token id is in the vocabulary.

    Unless ``force``, files that are unchanged since the last check, by verified.json, are skipped.
    Raises UserError for a corrupted shard.
    """
    record = dataset.path / "verified.json"
    splits = [dataset.manifest["splits"][split] for split in SPLIT_NAMES]
    token_shards = [shard for counts in splits for shard in counts["shards"]]
    length_shards = [shard for counts in splits for shard in counts.get("lengths", [])]
    hashes = {shard["file"]: shard["sha256"] for shard in token_shards + length_shards}
    stats = [(dataset.path / name).stat() for name in ("manifest.json", *hashes)]
    state = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
    with contextlib.suppress(OSError, ValueError):
        if not force and read_json(record) == state:
            return
    vocab_size = dataset.tokenizer.vocab_size
    for number, (name, expected_hash) in enumerate(hashes.items()):
        if sha256(dataset.path / name) != expected_hash:
            raise _dataset_error(dataset.path, UserError(f"{name}: SHA-256 mismatch"))
        if number < len(token_shards):
            tokens = np.load(dataset.path / name, mmap_mode="r")
            largest = max(int(tokens.max()), ~int(tokens.min()))
            if largest >= vocab_size:
                error = UserError(f"{name} has token {largest} of {vocab_size}")
                raise _dataset_error(dataset.path, error)
    with contextlib.suppress(OSError):  # a read-only folder is verified each time
        write_json(record, state)


def is_up_to_date(
    out: Path, origin: dict[str, Any], force: bool, version: str, hash_content: Callable[[], str]
) -> bool:
    """Return whether ``out`` is a complete dataset of this origin and text.

    ``version`` changes with the input files; only if it differs is their content hashed. Raises
    UserError for a folder that must not be replaced.
    """
    names = sorted(path.name for path in out.glob("*"))
    if not names and not out.is_file():
        return False
    if not {"manifest.json", "tokenizer.json"} <= {*names}:
        raise UserError(f"--out: {out} exists and is not a dataset. Choose another folder.")
    foreign_names = [name for name in names if not DATASET_FILE_PATTERN.fullmatch(name)]
    if foreign_names:
        advice = "Move it, or choose another --out"
        raise UserError(f"{out}: contains {foreign_names[0]}, not a file of a dataset. {advice}.")
    if force:
        return False
    try:
        old_origin = read_json(out / "manifest.json")["origin"]
        content = old_origin.pop("content")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{out}: manifest.json is corrupted. Use --force to replace it.") from None
    keys = sorted(old_origin.keys() | origin.keys())
    changed = [key for key in keys if old_origin.get(key) != origin.get(key)]
    settings = [key for key in changed if key not in ("split", "separator")]  # others: of the text
    differences = [f"{key} {old_origin.get(key)}" for key in settings]
    is_same_version = False
    with contextlib.suppress(OSError, ValueError):
        is_same_version = read_json(out / VERSION_FILE) == version
    if not settings and (changed or not (is_same_version or hash_content() == content)):
        differences = ["other text"]
    if differences:
        advice = "Use --force to replace it (docs/data.md: My text has grown), or another --out"
        raise UserError(f"{out}: was made with {', '.join(differences)}. {advice}.")
    with contextlib.suppress(UserError):
        open_dataset(out)
        return True
    return False


class ShardWriter:
    """Writes an array piece by piece, to files of at most MAX_SHARD_TOKENS numbers."""

    def __init__(self, folder: Path, name: str):
        self.folder = folder
        self.name = name
        self.shards: list[dict[str, Any]] = []  # as the manifest lists them
        self.file: Any = None
        self.num_tokens = 0  # in the open file

    def write(self, ids: np.ndarray) -> None:
        """Append ids, or lengths, (N,), whose dtype must not change between calls."""
        while len(ids):
            if self.file is None:
                suffix = f"-{len(self.shards)}" if self.shards else ""
                self.file = (self.folder / f"{self.name}{suffix}.npy").open("wb")
                self.file.seek(SHARD_HEADER_BYTES)
                self.num_tokens = 0
                self.descr = np.lib.format.dtype_to_descr(ids.dtype)
            head = ids[: MAX_SHARD_TOKENS - self.num_tokens]
            self.file.write(head.data)
            self.num_tokens += len(head)
            ids = ids[len(head) :]
            if self.num_tokens == MAX_SHARD_TOKENS:
                self.close()

    def close(self) -> list[dict[str, Any]]:
        """Complete the open file, if any, and return all shards."""
        if self.file is not None:
            self.file.seek(0)
            header = {"descr": self.descr, "fortran_order": False, "shape": (self.num_tokens,)}
            np.lib.format.write_array_header_1_0(self.file, header)
            assert self.file.tell() == SHARD_HEADER_BYTES
            self.file.close()
            path = Path(self.file.name)
            fsync(path)
            shard = {"file": path.name, "tokens": self.num_tokens, "sha256": sha256(path)}
            self.shards.append(shard)
            self.file = None
        return self.shards
