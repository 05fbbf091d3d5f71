"""A dataset, or a part of one, as it is written: its shards, its ledger, its manifest; and what it may replace."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.core.files import new_directory, read_json, sha256, write_json
from engine.data.dataset import EXAMPLES_DTYPE, FORMAT, LENGTHS_DTYPE, is_whole, manifest_of
from engine.data.ledger import (
    BYTES,
    COLUMNS,
    ENDS,
    FLAGS,
    SPLITS,
    TARGETS,
    TOKENS,
    Ledgers,
    content_of,
    facts_of,
    is_of,
)
from engine.data.tokenizer import AnyCharacter, Tokenizer

SHARD_TOKENS = 2**27  # 256 MiB of uint16
STAMP = "prepared_from.json"  # says whether the files that a dataset was made from have changed since
# A dataset's files, or a part's.
OURS = re.compile(r"(manifest|tokenizer|verified|prepared_from)\.json|((train|val)(-lengths)?|ledger)-[0-9]{5,}\.npy")
COUNTED = ("bytes", "documents", "targets")  # what a manifest says of each split besides its tokens
NAMES = {"content": "other text", "listing": "other text", "sha256": "another tokenizer.json"}  # of what may differ
HEADER = 128  # bytes of a shard's header: NumPy leaves room for an array of any length


class ShardWriter:
    """Writes a series of numbers as ``NAME-00000.npy``, … in a directory, in memory of one piece at a time."""

    def __init__(self, directory: Path, name: str, dtype: str, vocab_size: int = 0, width: int = 1):
        self.directory, self.name, self.dtype = directory, name, np.dtype(dtype)
        self.most = max(1, SHARD_TOKENS // width) * width  # numbers in a shard, which holds whole rows
        self.tokens, self.shards = 0, []  # the shards as the manifest has them
        self.used = np.zeros(vocab_size, bool)  # which token ids occur
        self.file = None  # the shard that is open
        self.room = 0  # numbers that it has room for

    def write(self, ids: np.ndarray) -> None:
        """Append numbers (N,), such as token ids; of examples negative, ~id, where they don't count."""
        if len(self.used) and len(ids):
            self.used[np.maximum(ids, ~ids) if ids.dtype.kind == "i" else ids] = True
        self.tokens += len(ids)
        while len(ids):
            if self.file is None:
                self.file = open(self.directory / f"{self.name}-{len(self.shards):05d}.npy", "wb")  # noqa: SIM115
                self.file.seek(HEADER)
                self.room = self.most
            piece, ids = ids[: self.room], ids[self.room :]
            self.file.write(piece.astype(self.dtype, copy=False).data)
            self.room -= len(piece)
            if not self.room:
                self.close()

    def close(self) -> list[dict[str, Any]]:
        """Complete the shard that is open, if any; return all shards as the manifest has them."""
        if self.file is not None:
            tokens = self.most - self.room
            header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (tokens,)}
            self.file.seek(0)
            np.lib.format.write_array_header_1_0(self.file, header)
            assert self.file.tell() == HEADER
            self.file.close()
            path = Path(self.file.name)
            self.shards.append({"file": path.name, "tokens": tokens, "sha256": sha256(path)})
            self.file = None
        return self.shards


class DatasetWriter:
    """Takes the token ids and the ledger of a dataset, or of a part of one, and completes it with a manifest."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, origin: dict[str, Any]):
        self.directory, self.tokenizer, self.origin, self.examples = directory, tokenizer, origin, "examples" in origin
        self.dtype = EXAMPLES_DTYPE if self.examples else "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self.tokens = {split: ShardWriter(directory, split, self.dtype, tokenizer.vocab_size) for split in SPLITS}
        self.lengths = {split: ShardWriter(directory, f"{split}-lengths", LENGTHS_DTYPE) for split in SPLITS}
        self.ledger = ShardWriter(directory, "ledger", "uint64", width=COLUMNS)
        self.counts = {split: Counter() for split in SPLITS}
        self.facts: dict[str, int] = {}  # for the manifest

    def write(self, split: str, ids: np.ndarray) -> None:
        """Append token ids (N,) to a split."""
        self.tokens[split].write(ids)

    def record(self, rows: np.ndarray) -> None:
        """Append what the ledger says of the token ids, (pieces, COLUMNS)."""
        self.ledger.write(rows.ravel())
        for split in SPLITS:
            own = rows[is_of(rows, split)]
            amounts = {"bytes": own[:, BYTES].sum(), "documents": np.count_nonzero(own[:, FLAGS] & np.uint64(ENDS))}
            self.counts[split].update(amounts | {"targets": own[:, TARGETS].sum()})
            if self.examples:
                self.lengths[split].write(own[:, TOKENS])

    def close(self) -> None:
        """Complete all files. Raises UserError if a split of a whole is too short."""
        is_part, splits = "part" in self.origin, {}
        ledger = self.ledger.close()
        rows = Ledgers(self.directory / shard["file"] for shard in ledger)
        facts = self.facts | facts_of(rows)
        for split in SPLITS:
            counts = {name: int(self.counts[split][name]) for name in COUNTED[: 2 + self.examples]}
            splits[split] = {"tokens": self.tokens[split].tokens} | counts | {"shards": self.tokens[split].close()}
            if self.examples:
                splits[split]["lengths"] = self.lengths[split].close()
            if splits[split]["tokens"] < 2 and not is_part:
                what = f"{facts['documents']} {'examples' if self.examples else 'documents'}"
                found = f"{splits[split]['tokens']} tokens of {what}"
                raise UserError(f"the {split} split has {found}, too few; give more, or change --val-fraction")
        used = np.logical_or(*(writer.used for writer in self.tokens.values()))
        tokenizer = self.tokenizer.seen(used) if isinstance(self.tokenizer, AnyCharacter) else self.tokenizer
        tokenizer.save(self.directory / "tokenizer.json")
        identity = {"kind": tokenizer.kind, "sha256": sha256(self.directory / "tokenizer.json")}
        manifest = {"format": FORMAT, "tokenizer": identity, "vocab_size": tokenizer.vocab_size, "dtype": self.dtype}
        manifest |= {"splits": splits, "origin": {"content": content_of(rows)} | self.origin}
        manifest |= {"ledger": ledger} if is_part else {"facts": facts | {"vocabulary": int(used.sum())}}
        write_json(self.directory / "manifest.json", manifest)
        for shard in [] if is_part else ledger:
            (self.directory / shard["file"]).unlink()


@contextlib.contextmanager
def new_dataset(out: Path, tokenizer: Tokenizer, origin: dict[str, Any], stamp: str) -> Iterator[DatasetWriter]:
    """Fill the writer that this yields; leaving it without an error makes ``out``, at once.

    origin says what it is made from, and for a part which one; stamp changes when a file that it is made from does.
    Raises UserError if a split of a whole is too short.
    """
    with new_directory(out) as directory:
        writer = DatasetWriter(directory, tokenizer, origin)
        yield writer
        writer.close()
        if stamp:
            write_json(directory / STAMP, stamp)


def is_made(out: Path, origin: dict[str, Any], force: bool, stamp: str, content: Callable[[], str]) -> bool:
    """Whether out holds this very dataset, whole, and may keep it. Raises UserError for what must not be replaced.

    content gives the digest of the text, and is only asked if the stamp can't tell that the files are the same.
    """
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else [""] * out.exists()
    if not names:
        return False
    if not {"manifest.json", "tokenizer.json"} <= {*names}:
        raise UserError(f"{out} exists and is not a dataset; choose another directory with --out")
    if foreign := [name for name in names if not OURS.fullmatch(name)]:
        raise UserError(f"{out} holds {foreign[0]}, which is no part of a dataset; move it, or choose another --out")
    manifest = manifest_of(out)
    if force:
        return False
    if not manifest:
        other = "a manifest.json that is damaged"
    else:
        known = manifest["origin"].get("content")
        other = differences(manifest, manifest | {"origin": origin | {"content": known}})
        if not other and not (stamp and stamp_of(out) == stamp) and content() != known:
            other = NAMES["content"]
    if other:
        raise UserError(f"{out} was made with {other}; use --force to replace it, or another --out")
    if not (whole := is_whole(out, manifest)) or not stamp or stamp_of(out) == stamp:
        return whole
    with contextlib.suppress(OSError):  # a folder that is only read is compared each time
        write_json(out / STAMP, stamp)  # the same text in files that are newer
    return True


def stamp_of(out: Path) -> Any:
    """What the files that a dataset was made from looked like; None if that is not known."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(out / STAMP)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What a manifest's dataset was made with that another's was not; empty if with the same."""
    found, expected = (manifest["origin"] | manifest["tokenizer"] for manifest in (found, expected))
    keys = [key for key in found.keys() | expected if found.get(key) != expected.get(key)]
    return ", ".join(sorted(NAMES.get(key, f"{key} {found[key]}" if key in found else f"no {key}") for key in keys))
