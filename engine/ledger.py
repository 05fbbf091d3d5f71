"""What is known of each document while a dataset is made: a row of six numbers for each of its pieces, in order."""

from collections.abc import Iterable

import numpy as np

# Columns of a ledger, uint64 (N, 6). A document's digest is the sum of its pieces', and a corpus's that of all.
DIGEST, BYTES, TOKENS, TARGETS, FLAGS = slice(0, 2), 2, 3, 4, 5
COLUMNS = 6
VAL, ENDS, LAST = 1, 2, 4  # flags: its split is val; what the split has of the document ends; the document ends
ROWS = 2**20  # looked at at a time


def content_of(ledgers: Iterable[np.ndarray]) -> str:
    """The digest of all text of some ledgers, in hexadecimal: the same however it was cut into parts."""
    total = sum((rows[:, DIGEST].sum(0) for rows in ledgers), np.zeros(2, np.uint64))
    return "".join(f"{int(number):016x}" for number in total)


def of_split(rows: np.ndarray, split: str) -> np.ndarray:
    """The rows of a split."""
    return rows[(rows[:, FLAGS] & np.uint64(VAL)) == (VAL if split == "val" else 0)]


def per_document(ledgers: Iterable[np.ndarray]) -> np.ndarray:
    """Digest, in two numbers, and tokens of each document, uint64 (D, 3), of ledgers end to end."""
    found, left = [], np.empty((0, COLUMNS), np.uint64)
    for rows in (ledger[i : i + ROWS] for ledger in ledgers for i in range(0, len(ledger), ROWS)):
        rows = np.concatenate((left, rows))
        ends = np.flatnonzero(rows[:, FLAGS] & np.uint64(LAST))
        known = ends[-1] + 1 if len(ends) else 0
        if known:
            starts = np.append(0, ends[:-1] + 1)
            found.append(np.add.reduceat(rows[:known, [0, 1, TOKENS]], starts))
        left = rows[known:]
    return np.concatenate([np.empty((0, 3), np.uint64), *found])


def first_of_their_kind(documents: np.ndarray) -> np.ndarray:
    """Which documents, bool (D,), are no repeats of an earlier one; of what :func:`per_document` gives."""
    order = np.lexsort((documents[:, 1], documents[:, 0]))  # stable: of repeats the first comes first
    ordered = documents[order, :2]
    is_first = np.empty(len(documents), bool)
    is_first[order] = np.append(True, (ordered[1:] != ordered[:-1]).any(1))[: len(documents)]
    return is_first


def facts_of(ledgers: Iterable[np.ndarray]) -> dict[str, int]:
    """How many documents there are, how many of them are repeats, and the tokens of the longest."""
    documents = per_document(ledgers)
    repeats = len(documents) - int(first_of_their_kind(documents).sum())
    return {"documents": len(documents), "repeats": repeats, "longest": int(documents[:, 2].max(initial=0))}
