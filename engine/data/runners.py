"""The libraries that encode text: ``tokenizers``, and splintr, a faster one for byte-level BPE."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Sequence

import numpy as np
import splintr
import tokenizers

from engine.core.errors import wrap_library_errors
from engine.data.tokenizer_json import (
    SPLIT_PATTERNS,
    UNSET_STEPS,
    Document,
    from_byte_level,
    pattern_of,
    possible_merges,
    spell_cases,
    text_vocab,
    without_special,
)

LARGE_BOUND = re.compile(r"\{\d*,\d{2,}\}")  # in a regex: splintr 0.22 is 300 times slower
EncodeBatch = Callable[[Sequence[str]], list[np.ndarray]]


def load_tokenizers(document: Document) -> tokenizers.Tokenizer:
    """Return the runner of ``tokenizers``, for which special tokens in text are ordinary text."""
    content = json.dumps(without_special(document))
    with wrap_library_errors("tokenizers cannot read it", Exception):
        runner = tokenizers.Tokenizer.from_str(content)
    runner.encode_special_tokens = True
    return runner


def encode_by_tokenizers(runner: tokenizers.Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of texts, uint32 (N,) each. Raises ValueError if one cannot be encoded."""
    "".join(texts).encode()
    try:
        encodings = runner.encode_batch_fast([*texts], add_special_tokens=False)
    except Exception as error:  # tokenizers has no class of its own
        raise ValueError(error) from None
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def load_splintr(document: Document) -> EncodeBatch | None:
    """Return splintr's function for a byte-level BPE; None if it is slow, or its ids may differ.

    splintr merges every pair of tokens that forms a token, also where the file has no such merge.
    """
    model = document["model"]
    vocab = text_vocab(document)
    with contextlib.suppress(ValueError):  # of a regex that splintr does not run, or slowly
        encode = _run_by_splintr(document)
        if model["merges"] == possible_merges(vocab):
            return encode
        # Without this option, words that are tokens are merged, too.
        merging = document | {"model": model | {"ignore_merges": False}}
        text = b"\n".join(map(from_byte_level, vocab)).decode(errors="replace")
        ids = encode_by_tokenizers(load_tokenizers(merging), [text])
        if np.array_equal(_run_by_splintr(merging)([text]), ids):
            return encode
    return None


def _run_by_splintr(document: Document) -> EncodeBatch:
    """Return the function that encodes texts by a byte-level BPE.

    Raises ValueError for a regex that splintr does not run, or slowly.
    """
    words = json.dumps(document["pre_tokenizer"])
    if LARGE_BOUND.search(words):
        raise ValueError("a large bound")
    if pattern_of(document) not in SPLIT_PATTERNS.values():
        words = spell_cases(words)
    # splintr would find special tokens in text.
    model = document["model"] | {"vocab": text_vocab(document), "unk_token": None}
    steps = {"pre_tokenizer": json.loads(words), "added_tokens": [], "model": model}
    content = json.dumps({**document, **UNSET_STEPS, **steps})
    runner = splintr.from_json_bytes(content.encode())

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        ids, offsets = runner.encode_batch_flat([*texts])  # lets other threads run
        edges = np.frombuffer(offsets, np.uint64).tolist()
        array = np.frombuffer(ids, np.uint32)
        return [array[start:end] for start, end in itertools.pairwise(edges)]

    return encode_batch
