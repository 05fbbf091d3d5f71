"""Texts → token ids for each split, and their ledger, on all cores."""

import collections
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.core.cli import progress
from engine.core.errors import UserError
from engine.data.chat import encode_example, is_target, learned_bytes
from engine.data.ledger import ENDS, LAST, SPLITS, VAL
from engine.data.readers import Text
from engine.data.splits import RECORDED, Corpus, Piece, Rule, digest_of
from engine.data.tokenizer import Tokenizer
from engine.data.writer import new_dataset

BATCH_CHARACTERS = 2**19  # about what one thread encodes at a time: enough to do, were documents ever so short


class Encoded(NamedTuple):
    """What some texts become."""

    ids: dict[str, np.ndarray]  # tokens (N,) of each split
    rows: np.ndarray  # the ledger, uint64 (pieces, COLUMNS)
    size: int  # characters of the texts


def encode_batch(texts: Iterable[Text], rule: Rule, encode: Callable[[Piece], tuple[np.ndarray, int, int]]) -> Encoded:
    """Texts, split, hashed and encoded; encode gives a piece's ids, UTF-8 bytes and, of an example, targets."""
    ids, digests, numbers, total = {split: [np.empty(0, np.uint32)] for split in SPLITS}, [], [], 0
    for text in texts:
        total += len(text.text)
        digest = digest_of(text)
        for index, piece in enumerate(rule.pieces(text, digest)):
            found, size, targets = encode(piece)
            ids[piece.split].append(found)
            digests.append(bytes(16) if index else digest[RECORDED])
            flags = VAL * (piece.split == "val") + ENDS * piece.ends + LAST * piece.last
            numbers.append((size, len(found), targets, flags))
    columns = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2), np.array(numbers, np.uint64).reshape(-1, 4)
    joined = {split: np.concatenate(found[1:] or found) for split, found in ids.items()}
    return Encoded(joined, np.concatenate(columns, axis=1), total)


def text_encoder(tokenizer: Tokenizer, separator: str) -> Callable[[Piece], tuple[np.ndarray, int, int]]:
    """Encodes text; a document ends with the end of text or, where there is none, with the separator."""
    end = tokenizer.end_of_text
    ending = tokenizer.encode(separator) if end is None else np.array([end], np.uint32)

    def encode(piece: Piece) -> tuple[np.ndarray, int, int]:
        ids = tokenizer.encode(piece.text)
        size = len(piece.text.encode()) + piece.ends * len(separator)
        return np.concatenate((ids, ending)) if piece.ends else ids, size, 0

    return encode


def example_encoder(tokenizer: Tokenizer) -> Callable[[Piece], tuple[np.ndarray, int, int]]:
    """Encodes examples; their bytes are those of what counts."""

    def encode(piece: Piece) -> tuple[np.ndarray, int, int]:
        turns = json.loads(piece.text)
        ids = encode_example(tokenizer, turns)
        return ids, learned_bytes(turns), int(is_target(ids).sum())

    return encode


def encoded(texts: Iterable[Text], rule: Rule, encode: Callable, threads: int | None) -> Iterator[Encoded]:
    """Texts in batches, each encoded by one of so many threads (None: one a core), in order.

    Threads are enough: tiktoken and NumPy work outside Python's lock. A few batches wait, never the whole corpus.
    """
    characters, waiting = 0, collections.deque()

    def batch_of(text: Text) -> int:
        nonlocal characters
        characters += len(text.text) + 1
        return characters // BATCH_CHARACTERS

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(threads or cores) as pool:
        for _, batch in itertools.groupby(texts, batch_of):
            waiting.append(pool.submit(encode_batch, list(batch), rule, encode))
            if len(waiting) > 2 * (threads or cores):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def make_dataset(
    out: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    origin: dict[str, Any],
    stretch: tuple[int, int],
    threads: int | None,
) -> None:
    """Make a dataset, or a part, of the texts that begin in a stretch of the corpus's bytes: see :func:`new_dataset`.

    Raises UserError if a whole has no text.
    """
    encode = example_encoder(tokenizer) if corpus.examples else text_encoder(tokenizer, origin.get("separator", ""))
    total = 0
    with (
        new_dataset(out, tokenizer, origin, corpus.stamp) as writer,
        progress("encoding", min(stretch[1], corpus.bytes) - stretch[0] if corpus.counted else None) as bar,
    ):
        for found in encoded(corpus.texts(*stretch), corpus.rule, encode, threads):
            for split, ids in found.ids.items():
                writer.write(split, ids)
            writer.record(found.rows)
            bar.update(found.size)
            total += found.size
        if not total and origin.get("part", "1/1") == "1/1":
            names = " ".join(dict.fromkeys(source.name for source in corpus.sources[:3]))
            raise UserError(f"{names}: no text in there; an empty corpus can't be prepared")
