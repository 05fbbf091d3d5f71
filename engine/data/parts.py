"""The parts of a dataset, made apart by any number of machines, and their merge to what one makes, byte for byte."""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.core.files import inside, sha256
from engine.data.dataset import ShardedTokens, manifest_of
from engine.data.ledger import FLAGS, LAST, SPLITS, TOKENS, Ledgers, first_of_their_kind, is_of
from engine.data.tokenizer import CODE_POINTS, CharTokenizer, Tokenizer, load_tokenizer
from engine.data.writer import DatasetWriter, differences, new_dataset

PART = re.compile("[0-9]+-of-([0-9]+)")


def parts_of(out: Path) -> Path:
    """The folder of a dataset's parts."""
    return out.parent / f"{out.name}.parts"


def _remedy(part: Path) -> str:
    return f"python prepare.py INPUT --out {part.parent.with_suffix('')} --part {part.name.replace('-of-', '/')}"


def count_parts(out: Path) -> int:
    """Of how many parts there are some, 0 if there is none. Raises UserError for parts of different counts."""
    matches = [PART.fullmatch(path.name) for path in parts_of(out).glob("*")]
    counts = sorted({int(match[1]) for match in matches if match})
    if len(counts) > 1:
        sorts = " and ".join(f"{parts_of(out)}/*-of-{count}" for count in counts)
        raise UserError(f"there are parts of different counts, {sorts}; remove those that you don't want")
    return counts[0] if counts else 0


def find_parts(out: Path) -> dict[Path, dict[str, Any]]:
    """The folders and manifests of a dataset's parts, in order. Raises UserError if they don't make a whole."""
    folder, count = parts_of(out), count_parts(out)
    if not count:
        raise UserError(f"{folder} holds no parts; make each with: {_remedy(folder / '1-of-N')}")
    parts = {}
    for number in range(1, count + 1):
        part = folder / f"{number}-of-{count}"
        parts[part] = manifest_of(part)
        if not parts[part]:
            state = "damaged; remove it, and" if part.exists() else "missing;"
            raise UserError(f"{part} is {state} make it with: {_remedy(part)}")
        first, expected = next(iter(parts.items()))
        own = {"part": f"{number}/{count}", "content": parts[part]["origin"].get("content")}
        expected = expected | {"origin": expected["origin"] | own}
        if expected["tokenizer"]["kind"] == "char":  # each knows its own characters
            expected["tokenizer"] = parts[part]["tokenizer"]
        if other := differences(parts[part], expected):
            raise UserError(f"{part} was made with {other}, unlike {first}; make it again: {_remedy(part)} --force")
    return parts


def ledger_files(part: Path, found: dict[str, Any]) -> list[Path]:
    """The files of a part's ledger. Raises UserError for one that is damaged."""
    return [_intact(part, shard["file"], shard["sha256"]) for shard in found["ledger"]]


def ledgers_of(parts: dict[Path, dict[str, Any]]) -> Ledgers:
    """What all parts have recorded."""
    return Ledgers(file for part in parts.items() for file in ledger_files(*part))


def merge_parts(
    out: Path, parts: dict[Path, dict], origin: dict[str, Any], stamp: str, advance: Callable[[int], Any]
) -> None:
    """Join parts to the dataset that one run makes, byte for byte; advance is told the tokens.

    If origin says so, a document that is a repeat of an earlier one is left out. Raises UserError for a file that is
    not what was written.
    """
    tokenizer, ids_of = _common_tokenizer(parts)
    kept = first_of_their_kind(ledgers_of(parts)) if origin.get("deduplicate") else None
    number = 0  # of the document that comes next
    with new_dataset(out, tokenizer, origin, stamp) as writer:
        for part, found in parts.items():
            readers = {split: partial(_read, _tokens(part, found, split)) for split in SPLITS}
            offsets = dict.fromkeys(SPLITS, 0)
            for rows in Ledgers(ledger_files(part, found)):
                last = (rows[:, FLAGS] & np.uint64(LAST)) > 0
                documents = number + np.append(0, np.cumsum(last)[:-1])
                number += int(last.sum())
                keep = np.ones(len(rows), bool) if kept is None else kept[documents]
                _copy(writer, rows, keep, readers, offsets, ids_of, advance)
                writer.record(rows[keep])
        if kept is not None:
            writer.facts["dropped"] = int(len(kept) - kept.sum())


def remove_parts(out: Path) -> None:
    """Remove a dataset's parts, and the tokenizer that they share; what else is in their folder stays."""
    for path in parts_of(out).iterdir() if parts_of(out).is_dir() else ():
        if PART.fullmatch(path.name):
            shutil.rmtree(path)
        elif re.fullmatch(r"tokenizer-[0-9a-f]{16}\.(json|lock)", path.name):
            path.unlink()
    with contextlib.suppress(OSError):  # not empty
        parts_of(out).rmdir()


def _copy(
    writer: DatasetWriter,
    rows: np.ndarray,
    keep: np.ndarray,
    readers: dict[str, Callable],
    offsets: dict[str, int],
    ids_of: np.ndarray | None,
    advance: Callable[[int], Any],
) -> None:
    """Copy the tokens of the rows that are kept; offsets, where each split's begin, go on to their end."""
    for split in SPLITS:
        own = is_of(rows, split)
        ends = offsets[split] + np.cumsum(rows[own, TOKENS]).astype(np.int64)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], keep[own].view(np.int8), [0]))))
        starts = np.append(offsets[split], ends)
        for first, after in edges.reshape(-1, 2).tolist():  # runs of rows that are kept
            for ids in readers[split](int(starts[first]), int(starts[after])):
                if ids_of is not None:
                    ids = np.where(ids < 0, ~ids_of[~ids], ids_of[ids]) if ids.dtype.kind == "i" else ids_of[ids]
                writer.write(split, ids)
                advance(len(ids))
        offsets[split] = int(starts[-1])


def _read(tokens: ShardedTokens, start: int, end: int, block: int = 2**22) -> Iterator[np.ndarray]:
    yield from (tokens[i : min(i + block, end)] for i in range(start, end, block))


def _intact(part: Path, file: str, expected_sha256: str) -> Path:
    path = inside(part, file)
    if not path.is_file() or sha256(path) != expected_sha256:
        raise UserError(f"{path} is damaged; make it again: {_remedy(part)} --force")
    return path


def _tokens(part: Path, found: dict[str, Any], split: str) -> ShardedTokens:
    for shard in found["splits"][split].get("lengths", []):  # which the ledger has too
        _intact(part, shard["file"], shard["sha256"])
    files = [_intact(part, shard["file"], shard["sha256"]) for shard in found["splits"][split]["shards"]]
    return ShardedTokens([np.load(file, mmap_mode="r") for file in files])


def _common_tokenizer(parts: dict[Path, dict[str, Any]]) -> tuple[Tokenizer, np.ndarray | None]:
    """The tokenizer of all parts and, where they wrote code points, the ids that these become."""
    saved = {
        part: load_tokenizer(_intact(part, "tokenizer.json", found["tokenizer"]["sha256"]))
        for part, found in parts.items()
    }
    first = next(iter(saved.values()))
    if not isinstance(first, CharTokenizer) or next(iter(parts.values()))["origin"]["tokenizer"] != "char":
        return first, None
    characters = "".join(sorted(set().union(*(tokenizer.characters for tokenizer in saved.values()))))
    common = CharTokenizer(characters).with_special([*first.special_tokens])
    ids_of = np.zeros(CODE_POINTS + len(common.special_tokens), np.int32)
    ids_of[: len(common.ids) - 1] = common.ids[:-1]
    ids_of[CODE_POINTS:] = [*common.special_tokens.values()]
    return common, ids_of
