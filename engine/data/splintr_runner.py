"""splintr, which runs a byte-level BPE faster than ``tokenizers``."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Sequence

import numpy as np
import splintr

from engine.data.tokenizer_json import (
    SPLIT_PATTERNS,
    UNSET_STEPS,
    Document,
    pattern_of,
    spell_cases,
    text_vocab,
)

LARGE_BOUND = re.compile(r"\{\d*,\d{2,}\}")  # in a regex: splintr 0.22 is 300 times slower
MAX_SLOW_CHARACTERS = 2**16  # of texts that ``tokenizers`` encodes before splintr is loaded
EncodeBatch = Callable[[Sequence[str]], list[np.ndarray]]


def splintr_document(document: Document) -> Document:
    """Remove special tokens, which splintr finds in text, and spell regexes as it reads them."""
    words = json.dumps(document["pre_tokenizer"])
    if pattern_of(document) not in SPLIT_PATTERNS.values():
        words = spell_cases(words)
    model = document["model"] | {"vocab": text_vocab(document), "unk_token": None}
    steps = {"pre_tokenizer": json.loads(words), "added_tokens": [], "model": model}
    return {**document, **UNSET_STEPS, **steps}


def load_encoder(document: Document, text: str, ids: np.ndarray) -> EncodeBatch | None:
    """Return the function that encodes texts by a byte-level BPE.

    None if it is slow, or does not give a text its ids where words that are tokens are merged too:
    splintr merges every pair of tokens that forms a token, also where the file has no such merge.
    """
    document = splintr_document(document)
    merged = document | {"model": document["model"] | {"ignore_merges": False}}
    with contextlib.suppress(ValueError):  # of a regex that splintr does not run, or slowly
        encode = run_by_splintr(merged)
        if np.array_equal(encode([text])[0], ids):
            is_merged = not document["model"].get("ignore_merges")
            return encode if is_merged else run_by_splintr(document)
    return None


def run_by_splintr(document: Document) -> EncodeBatch:
    """Return the function that encodes texts by a byte-level BPE.

    Raises ValueError for a regex that splintr does not run, or slowly.
    """
    if LARGE_BOUND.search(json.dumps(document["pre_tokenizer"])):
        raise ValueError("a large bound")
    # The method for a batch lets other threads run.
    runner = splintr.from_json_bytes(json.dumps(document).encode()).encode_batch_flat

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        ids, offsets = runner([*texts])
        edges = np.frombuffer(offsets, np.uint64).tolist()
        array = np.frombuffer(ids, np.uint32)
        return [array[start:end] for start, end in itertools.pairwise(edges)]

    return encode_batch
