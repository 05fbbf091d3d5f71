"""Memorized passages are those of the definition, and say where they lie."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import engine.report.memorization as memorization
from engine.data.dataset import Dataset
from engine.data.shards.shard_file import ShardedTokens
from engine.data.split import Split
from engine.data.tokenizer import ByteTokenizer, Tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.report.memorization import MIN_PASSAGE_BYTES, find_passages


def encode(documents: Sequence[str], tokenizer: Tokenizer, shard_tokens: int = 2**40) -> Dataset:
    """A dataset of these documents, without validation text."""
    end = [tokenizer.end_of_text_id]
    ids = [token for text in documents for token in [*tokenizer.encode(text).tolist(), *end]]
    starts = range(0, len(ids), shard_tokens)
    arrays = [np.array(ids[start : start + shard_tokens], np.uint16) for start in starts]
    shards = [{"file": f"{n}.npy", "tokens": len(array)} for n, array in enumerate(arrays)]
    counts = {"bytes": sum(map(len, map(str.encode, documents))), "tokens": len(ids)}
    manifest = {"splits": {"train": {"shards": shards, "sources": [], **counts}}}
    splits = (Split(ShardedTokens(arrays)), Split(arrays[0][:0]))
    return Dataset(Path("data"), manifest, tokenizer, *splits, "")


def find_spans_slowly(text: str, documents: Sequence[str]) -> list[tuple[int, int]]:
    """The definition of what find_passages returns."""
    free = [True] * len(text)
    spans = []
    while True:
        matches = []
        for start in range(len(text)):
            for end in range(start + 1, len(text) + 1):
                piece = text[start:end]
                if not free[end - 1] or not any(piece in document for document in documents):
                    break
                if len("".join(piece.split()).encode()) >= MIN_PASSAGE_BYTES:
                    matches.append((end - start, -start))
        if not matches:
            return sorted(spans)
        length, start = max(matches)
        spans.append((-start, length))
        free[-start : length - start] = [False] * length


@pytest.fixture(scope="module")
def bpe(code) -> Tokenizer:
    return train_bpe_tokenizer([code[:30_000]], 600)


@pytest.mark.parametrize("seed", range(6))
def test_passages_are_those_of_the_definition(seed, bpe):
    draw = random.Random(seed)
    alphabet = draw.choice(["a", "ab", "abcd", "x \n", "äб漢🚀", "é\0\x7f"])

    def draw_piece() -> str:
        size = draw.randint(1, 60)
        period = "".join(draw.choices(alphabet, k=draw.choice((1, 5, size))))
        return (period * size)[:size]

    def draw_text(max_pieces: int) -> str:
        count = draw.randint(0, max_pieces)
        return "".join(draw.choice(pieces)[draw.randint(0, 3) :] for _ in range(count))

    pieces = [draw_piece() for _ in range(5)]
    documents = [draw_text(12) for _ in range(3)]
    texts = [draw_text(6) for _ in range(3)]
    tokenizer = draw.choice((ByteTokenizer(), bpe))
    datasets = [encode(part, tokenizer) for part in (documents[:1], documents[1:])]
    passages, fraction = find_passages(texts, datasets)
    for text, spans in zip(texts, passages, strict=True):
        assert [(start, length) for start, length, _ in spans] == find_spans_slowly(text, documents)
    assert fraction == 1


def test_a_passage_of_many_sources_names_the_shard_and_a_search_in_part_its_fraction(monkeypatch):
    letters = "".join(random.Random(0).choices("abcdefgh ", k=100_000))
    dataset = encode([letters], ByteTokenizer(), shard_tokens=7_000)
    text = letters[44_000:44_100]
    assert find_passages([f"…{text}"], [dataset]) == ([[(1, 100, str(Path("data/6.npy")))]], 1)
    monkeypatch.setattr(memorization, "MAX_SEARCHED_BYTES", 28_000)
    passages, fraction = find_passages([text], [dataset])
    assert passages == [[]] and fraction == pytest.approx(0.28, rel=1e-3)
