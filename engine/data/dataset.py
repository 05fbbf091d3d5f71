"""A dataset, data/<name>/: write its shards, open it, verify it."""

import contextlib
import hashlib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import files
from engine.core.cli import count_noun, shell_command
from engine.core.errors import UserError
from engine.core.values import convert
from engine.data.chats.chat import count_targets
from engine.data.split import EXAMPLES_DTYPE, Examples, ShardedTokens, Split
from engine.data.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 6
SPLIT_NAMES = ("train", "val")
MIN_VAL_DOCUMENTS = 6  # with fewer different ones, a validation loss says little
LENGTHS_DTYPE = "uint32"
SHARD_HEADER_BYTES = 128  # NumPy's header with room for an array of any length
MAX_LISTED_SOURCES = 10_000  # in a split; with more, none are listed
VERSION_FILE = "prepared_from.json"  # holds Corpus.version
DATASET_FILE_PATTERN = re.compile(
    r"(manifest|tokenizer|verified|prepared_from|yardsticks|\.yardsticks)\.json(\.partial)?"
    r"|(train|val)(-lengths)?-[0-9]{5,}(-[0-9]+)?\.npy"  # earlier: several of a unit
)


def hash_manifest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own, which is its last value."""
    content = files.to_json({**manifest, "sha256": ""})
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()


def dataset_name(first_input: str) -> str:
    """Return the default name of a dataset's folder."""
    if first_input == "-":
        return "stdin"
    path = re.sub(r"[*?#].*", "", first_input.removeprefix("hf:")).rstrip("/")
    return Path(os.path.abspath(path)).name.split(".")[0] or "text"


@dataclass(frozen=True)
class Dataset:
    """A folder made by ``prepare.py``: two splits of text or of examples, and their tokenizer."""

    path: Path
    manifest: dict[str, Any]
    tokenizer: Tokenizer
    train: Split
    val: Split
    sha256: str  # of the manifest as it was opened

    def bytes_per_token(self, split: str) -> float:
        """Return the mean UTF-8 bytes of text of one token; of examples, of one target."""
        counts = self.manifest["splits"][split]
        return counts["bytes"] / counts.get("targets", counts["tokens"])

    def drop_long_examples(self, context_length: int, cut: bool) -> "Dataset":
        """Apply Examples.drop_long to both splits, and correct the manifest's counts of val."""
        train = self.train.drop_long(context_length, cut)
        val = self.val.drop_long(context_length, cut)
        splits = self.manifest["splits"]
        if val.num_examples and (val.num_cut or val.num_removed):
            counts = [count_targets(self.tokenizer, example) for example in val.examples()]
            num_targets, num_bytes = map(sum, zip(*counts, strict=True))
            counted = {"targets": num_targets, "bytes": num_bytes}
            splits = {**splits, "val": {**splits["val"], **counted}}
        return replace(self, train=train, val=val, manifest={**self.manifest, "splits": splits})

    def find_val_problems(self) -> list[str]:
        """Return a sentence for each problem that makes the validation loss meaningless."""
        statistics = self.manifest["statistics"]
        num_val = self.manifest["splits"]["val"]["documents"]
        problems = []
        if statistics["val_copies"]:
            percent = f"{statistics['val_copies'] / max(1, num_val):.0%}"
            problems.append(f"{percent} of the validation documents are copies of training ones.")
        if statistics["val_distinct"] < min(MIN_VAL_DOCUMENTS, num_val):
            texts = count_noun(statistics["val_distinct"], "different text")
            problems.append(f"The {num_val} validation documents have only {texts}.")
        origin = self.manifest["origin"]
        expected = round(origin["val_fraction"] * statistics["documents"])
        limit = max(3 * expected**0.5, expected / 4)
        if "examples" in origin and abs(num_val - expected) > limit > 0:
            problems.append(f"{num_val:,} examples validate, not {expected:,}: many begin alike.")
        return problems


def open_dataset(path: Path) -> Dataset:
    """Map a dataset into memory. Raises UserError if it is missing, corrupted or unsupported."""
    if not (path / "manifest.json").is_file():
        similar = files.find_similar(path, Path("data"), "*.npy")
        is_input = path.exists() and not (path / "checkpoints").exists()
        options = () if path.exists() else ("--out", path)
        command = shell_command("python", "prepare.py", path if is_input else "INPUT", *options)
        advice = f"Did you mean {similar}?" if similar else f"Make it with: {command}"
        raise UserError(f"{path}: is not a dataset. {advice}")
    content = (path / "manifest.json").read_bytes()
    try:
        manifest = files.parse_json(content, path / "manifest.json")
        version = manifest.get("format") if isinstance(manifest, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(f"its format must be {FORMAT_VERSION} (got {version})")
        if manifest.get("sha256") != hash_manifest(manifest):
            raise UserError("manifest.json: SHA-256 mismatch")
        if files.sha256(path / "tokenizer.json") != manifest["tokenizer"].get("sha256"):
            raise UserError("tokenizer.json is not the one that encoded the text")
        splits = {split: _open_split(path, manifest, split) for split in SPLIT_NAMES}
        tokenizer = load_tokenizer(path / "tokenizer.json")
    except (OSError, UserError) as error:
        raise _dataset_error(path, error) from None
    return Dataset(path, manifest, tokenizer, **splits, sha256=hashlib.sha256(content).hexdigest())


def is_usable(path: Path) -> bool:
    """Return whether open_dataset() succeeds."""
    with contextlib.suppress(UserError):
        open_dataset(path)
        return True
    return False


def _open_split(path: Path, manifest: dict[str, Any], split: str) -> Split:
    """Map a split into memory. Raises UserError or OSError unless it matches the manifest."""
    counts = manifest["splits"][split]
    tokens = _open_shards(path, counts["shards"], manifest["dtype"])
    if manifest["dtype"] != EXAMPLES_DTYPE:
        return Split(tokens)
    lengths = _open_shards(path, counts.get("lengths", []), LENGTHS_DTYPE)[:].astype(np.int64)
    is_valid = len(lengths) == counts["documents"] and lengths.sum() == len(tokens)
    if not is_valid or not lengths.all() or not counts.get("targets"):
        raise UserError(f"the lengths of the examples of its {split} split are wrong")
    return Examples(tokens, np.cumsum(lengths) - lengths, lengths)


def _open_shards(folder: Path, shards: list[dict[str, Any]], dtype: str) -> ShardedTokens:
    """Map shards into memory. Raises UserError or OSError unless they match the manifest."""
    arrays = []
    for shard in shards:
        path = files.safe_child_path(folder, shard["file"])
        header = make_shard_header(np.dtype(dtype), shard["tokens"])
        num_bytes = len(header) + shard["tokens"] * np.dtype(dtype).itemsize
        with open(path, "rb") as file:  # NumPy's parser of headers may raise anything
            files.check_pointer(file.peek(), path)
            if file.read(len(header)) != header or path.stat().st_size != num_bytes:
                raise UserError(f"{path.name} is not a shard of {shard['tokens']} {dtype}")
        arrays.append(np.load(path, mmap_mode="r"))
    return ShardedTokens(arrays)


def make_shard_header(dtype: np.dtype, num_tokens: int) -> bytes:
    """Return NumPy's header of a shard, which np.save() writes too."""
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": (num_tokens,)}
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def _dataset_error(path: Path, problem: object) -> UserError:
    reason = " ".join(str(problem).removesuffix(".").split())
    return UserError(f"{path}: can't be used ({reason}). Prepare it again with --force.")


def list_shards(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each shard of tokens and of lengths, by file name."""
    counts = [manifest["splits"][split] for split in SPLIT_NAMES]
    shards = [shard for count in counts for shard in (*count["shards"], *count.get("lengths", ()))]
    return {shard["file"]: shard["sha256"] for shard in shards}


def merge_sources(sources: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the tokens of neighbors, {source, tokens} each, that are of one source."""
    merged: list[dict[str, Any]] = []
    for entry in sources:
        if merged and merged[-1]["source"] == entry["source"]:
            merged[-1]["tokens"] += entry["tokens"]
        elif entry["tokens"]:
            merged.append({**entry})
    return merged


def add_up(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts of a split in all units; join their lists of shards and of sources."""
    totals: dict[str, Any] = {}
    for name, first in entries[0].items():
        values = [entry[name] for entry in entries]
        totals[name] = [*itertools.chain(*values)] if isinstance(first, list) else sum(values)
    sources = merge_sources(totals["sources"])
    totals["sources"] = sources if len(sources) <= MAX_LISTED_SOURCES else []
    return totals


def verify_dataset(dataset: Dataset, force: bool) -> None:
    """Check the hash of every shard, and that every token id is in the vocabulary.

    Unless ``force``, files that are unchanged since the last check, by verified.json, are skipped.
    Raises UserError for a corrupted shard.
    """
    record = dataset.path / "verified.json"
    hashes = list_shards(dataset.manifest)
    stats = [(dataset.path / name).stat() for name in ("manifest.json", *hashes)]
    state = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
    with contextlib.suppress(OSError, UserError):
        if not force and files.read_json(record) == state:
            return
    vocab_size = dataset.tokenizer.vocab_size
    for name, expected_hash in hashes.items():
        if files.sha256(dataset.path / name) != expected_hash:
            raise _dataset_error(dataset.path, f"{name}: SHA-256 mismatch")
        if "-lengths-" not in name:
            tokens = np.load(dataset.path / name, mmap_mode="r")
            largest = max(int(tokens.max()), ~int(tokens.min()))
            if largest >= vocab_size:
                raise _dataset_error(dataset.path, f"{name} has token {largest} of {vocab_size}")
    with contextlib.suppress(OSError):  # a read-only folder is verified each time
        files.write_json(record, state)


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
        manifest = convert(files.read_json(out / "manifest.json"), dict, "manifest")
        old = convert(manifest.get("origin"), dict, "origin")
    except (OSError, UserError):
        raise UserError(f"{out}: manifest.json is corrupted. Use --force to replace it.") from None
    content = old.pop("content", None)
    changed = {key for key in old.keys() | origin.keys() if old.get(key) != origin.get(key)}
    settings = sorted(changed - {"split", "separator"})  # these two depend on the text
    differences = [f"{key} {old.get(key)}" for key in settings]
    is_same_version = False
    with contextlib.suppress(OSError, UserError):
        is_same_version = files.read_json(out / VERSION_FILE) == version
    if not settings and (changed or not (is_same_version or hash_content() == content)):
        differences = ["other text"]
    if differences:
        advice = "Use --force to replace it (docs/data.md: My text has grown), or another --out"
        raise UserError(f"{out}: was made with {', '.join(differences)}. {advice}.")
    return is_usable(out)


class ShardWriter:
    """Writes a shard piece by piece: a one-dimensional array, as NumPy saves it."""

    def __init__(self, path: Path):
        self.path = path
        self.num_tokens = 0
        self.file = io.BufferedWriter(files.NamedFile(path, "wb"))
        self.file.seek(SHARD_HEADER_BYTES)

    def write(self, values: np.ndarray) -> None:
        """Append values, ids or lengths (N,), whose dtype must not change between calls."""
        self.file.write(values.data)
        self.dtype = values.dtype
        self.num_tokens += len(values)

    def close(self) -> list[dict[str, Any]]:
        """Complete the file, and return its entry in the manifest; an empty file is removed."""
        if not self.num_tokens:
            self.file.close()
            self.path.unlink()
            return []
        self.file.seek(0)
        self.file.write(make_shard_header(self.dtype, self.num_tokens))
        assert self.file.tell() == SHARD_HEADER_BYTES
        self.file.close()
        files.fsync(self.path)
        name = self.path.name
        return [{"file": name, "tokens": self.num_tokens, "sha256": files.sha256(self.path)}]
