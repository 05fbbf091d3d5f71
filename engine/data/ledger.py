"""What is known of each document while a dataset is made: a row of six numbers for each of its pieces, in order."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

SPLITS = ("train", "val")
# Columns of a ledger, uint64 (N, 6). A document's digest is the sum of its pieces'.
DIGEST, BYTES, TOKENS, TARGETS, FLAGS = slice(0, 2), 2, 3, 4, 5
COLUMNS = 6
VAL, ENDS, LAST = 1, 2, 4  # flags: its split is val; what the split has of the document ends; the document ends
ROWS = 2**18  # looked at at a time
COMPARED, PASSES = 2**20, 16  # documents compared at a time, unless that takes more passes than so many


class Ledgers:
    """Ledgers in files, end to end, a piece at a time: mapped into memory they would fill it."""

    def __init__(self, files: Iterable[Path]):
        self.files = list(files)

    def __iter__(self) -> Iterator[np.ndarray]:
        for path in self.files:
            with open(path, "rb") as file:
                np.lib.format.read_magic(file)
                np.lib.format.read_array_header_1_0(file)
                while len(numbers := np.fromfile(file, np.uint64, ROWS * COLUMNS)):
                    yield numbers.reshape(-1, COLUMNS)


def content_of(ledgers: Iterable[np.ndarray]) -> str:
    """The digest of all text of some ledgers, in hexadecimal: in this order, however it was cut into parts."""
    found = hashlib.blake2b(digest_size=16)
    for digests in (rows[:, DIGEST] for rows in ledgers):
        found.update(digests[digests.any(1)].tobytes())  # a text's second piece has none
    return found.hexdigest()


def is_of(rows: np.ndarray, split: str) -> np.ndarray:
    """Which rows are of a split, bool (N,)."""
    return (rows[:, FLAGS] & np.uint64(VAL) > 0) == (split == "val")


def per_document(ledgers: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Digest, in two numbers, and tokens of each document, uint64 (D, 3), some at a time, of ledgers end to end."""
    left = np.empty((0, COLUMNS), np.uint64)
    for rows in (ledger[i : i + ROWS] for ledger in ledgers for i in range(0, len(ledger), ROWS)):
        rows = np.concatenate((left, rows))
        ends = np.flatnonzero(rows[:, FLAGS] & np.uint64(LAST))
        known = ends[-1] + 1 if len(ends) else 0
        if known:
            yield np.add.reduceat(rows[:known, [0, 1, TOKENS]], np.append(0, ends[:-1] + 1))
        left = rows[known:]


def first_of_their_kind(ledgers: Iterable[np.ndarray]) -> np.ndarray:
    """Which documents, bool (D,), are no repeats of an earlier one; ledgers are gone through as often as need be.

    At a time only those are compared whose digests leave the same remainder, so that memory grows slowly with them.
    """
    count = sum(map(len, per_document(ledgers)))
    passes, is_first = min(PASSES, -(-count // COMPARED)), np.ones(count, bool)
    for remainder in range(passes):
        found, before = [], 0
        for documents in per_document(ledgers):
            own = np.flatnonzero(documents[:, 0] % np.uint64(passes) == remainder)
            found.append(np.column_stack((documents[own, :2], own.astype(np.uint64) + np.uint64(before))))
            before += len(documents)
        some = np.concatenate(found)
        some = some[np.lexsort((some[:, 1], some[:, 0]))]  # stable: of repeats the first comes first
        repeated = (some[1:, :2] == some[:-1, :2]).all(1)
        is_first[some[1:][repeated, 2].astype(np.int64)] = False
    return is_first


def facts_of(ledgers: Iterable[np.ndarray]) -> dict[str, int]:
    """How many documents there are, how many of them are repeats, and the tokens of the longest."""
    is_first = first_of_their_kind(ledgers)
    longest = max((int(documents[:, 2].max()) for documents in per_document(ledgers)), default=0)
    return {"documents": len(is_first), "repeats": len(is_first) - int(is_first.sum()), "longest": longest}
