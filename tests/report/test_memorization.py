"""What stands word for word in the training data: exact to the character, and quick on any text.

COPIES_MB=100 pytest -o addopts= tests/test_copies.py -k quick -s      in so many MB of training data
"""

import json
import os
import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import engine.report.memorization
from engine.data.dataset import Dataset, ShardedTokens, open_dataset
from engine.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe
from engine.report.memorization import SHORTEST, Copy, copied, validation_texts
from prepare import PrepareConfig, prepare

MEGABYTES = int(os.environ.get("COPIES_MB", 1))
BYTES = ByteTokenizer()


def dataset_of(documents: Sequence[str], tokenizer: Tokenizer = BYTES, shard: int = 2**40, times: int = 1) -> Dataset:
    """A dataset of these documents, all so many times, in shards of so many tokens; of no validation text."""
    parts = [part for text in documents for part in (tokenizer.encode(text), [tokenizer.end_of_text])]
    ids = np.tile(np.concatenate(parts).astype(np.uint16), times)
    arrays = [ids[start : start + shard] for start in range(0, len(ids), shard)]
    shards = [{"file": f"train-{number:05d}.npy"} for number in range(len(arrays))]
    return Dataset(
        Path("data"), {"splits": {"train": {"shards": shards}}}, tokenizer, ShardedTokens(arrays), ids[:0], ""
    )


def spans(copies: list[Copy]) -> list[tuple[int, int]]:
    return [(one.start, one.length) for one in copies]


def by_brute_force(text: str, documents: Sequence[str]) -> list[tuple[int, int]]:
    """What copied should find: starts and lengths."""
    lengths = []
    for start in range(len(text)):
        length = max(0, lengths[-1] - 1) if lengths else 0
        while start + length < len(text) and any(text[start : start + length + 1] in one for one in documents):
            length += 1
        lengths.append(length)
    found = []
    while True:
        fits = [len(text[start : start + length].encode()) >= SHORTEST for start, length in enumerate(lengths)]
        lengths = [length * fit for length, fit in zip(lengths, fits, strict=True)]
        if not any(lengths):
            return found
        longest = max(lengths)
        first = lengths.index(longest)
        found.append((first, longest))
        left = [min(length, first - start) for start, length in enumerate(lengths[:first])]
        lengths = [*left, *[0] * longest, *lengths[first + longest :]]


def text_at(copy: Copy, text: str, documents: Sequence[str]) -> bool:
    """Whether a copy stands at the byte and in the document that it names."""
    data, run = "".join(documents).encode(), text[copy.start : copy.start + copy.length].encode()
    begins = copy.place.byte - sum(len(one.encode()) for one in documents[: copy.place.document])
    size = len(documents[copy.place.document].encode())
    return data[copy.place.byte :].startswith(run) and 0 <= begins <= size - len(run)


@pytest.fixture(scope="module")
def bpe(code) -> Tokenizer:
    return train_bpe([code[:30_000]], 600)


@pytest.mark.parametrize("seed", range(40))
def test_copies_are_those_found_by_brute_force(seed, bpe, monkeypatch):
    chance = random.Random(seed)
    for name, values in {"CHUNK": (64, 1000), "SLICE": (1, 5, 2**16), "FEW": (0, 1, 8), "SLOTS": (4, 20)}.items():
        monkeypatch.setattr(engine.report.memorization, name, chance.choice(values))
    alphabet = chance.choice(["a", "ab", "abcd", "x \n", "äб漢🚀", "é\0\x7f"])

    def some(size: int) -> str:
        period = "".join(chance.choices(alphabet, k=chance.choice((1, 5, size))))
        return (period * size)[:size]

    parts = [some(chance.randint(1, 60)) for _ in range(5)]
    documents, texts = (
        [
            "".join(chance.choice(parts)[chance.randint(0, 3) :] for _ in range(chance.randint(0, most)))
            for _ in range(3)
        ]
        for most in (12, 6)
    )
    texts += texts[:1]
    dataset = dataset_of(documents, chance.choice((BYTES, bpe)), chance.choice((7, 100, 2**40)))
    found = copied(texts, [dataset])
    assert [*map(spans, found)] == [by_brute_force(text, documents) for text in texts]
    assert all(text_at(copy, text, documents) for text, copies in zip(texts, found, strict=True) for copy in copies)


@pytest.mark.parametrize(
    "source", ["def quoted(x): return x  # 0123456789\n", "Съешь же ещё этих мягких", "漢字かな交じり文🚀"]
)
def test_a_quotation_is_found_to_the_character_wherever_it_is_cut(source, bpe, monkeypatch):
    chance = random.Random(source)
    monkeypatch.setattr(engine.report.memorization, "CHUNK", 2**12)
    quotation = "".join(chance.choices(source, k=200))
    filler = "".join(chance.choices("pqrs", k=20_000))
    text = f"Before it, {quotation}ÿ and after it."
    for before in (0, 1, 4000, 4090, 4096, 8191):
        documents = ["first", f"{filler[:before]}{quotation}{filler[before:]}", "last"]
        dataset = dataset_of(documents, bpe, shard=1009)
        (copy,) = copied([text], [dataset])[0]
        assert (copy.start, copy.length, copy.place.document, copy.place.byte) == (11, 200, 1, len("first") + before)
        shard = int(copy.place.shard.stem.removeprefix("train-"))
        assert copy.place.shard == Path("data") / f"train-{shard:05d}.npy" and copy.place.token < 1009
        at = dataset.train.starts[shard] + copy.place.token
        special = "<|endoftext|>"
        until = [bpe.decode(dataset.train[:end].tolist()).replace(special, "") for end in (at, at + 1)]
        assert len(until[0].encode()) <= copy.place.byte < len(until[1].encode())  # a token may begin in its middle


def test_runs_end_with_documents_datasets_and_characters():
    one, other = "the first half of a sentence, ", "and here the second half of it"
    text = one + other
    assert spans(copied([text], [dataset_of([text])])[0]) == [(0, 60)]
    assert spans(copied([text], [dataset_of([one, other])])[0]) == [(0, 30), (30, 30)]
    open_ended = dataset_of([one])
    open_ended = replace(
        open_ended, train=ShardedTokens([open_ended.train[: len(one)]])
    )  # a single document needs no end
    several = copied([text], [open_ended, dataset_of([other, "x"])])[0]
    assert [*spans(several), *(copy.place.byte for copy in several)] == [(0, 30), (30, 30), 0, 0]
    assert spans(copied(["ab" * 12 + "é"], [dataset_of(["ab" * 12 + "è"])])[0]) == [(0, 24)]  # a byte is the same
    assert copied(["ab" * 11 + "éx"], [dataset_of(["ab" * 11 + "èx"])]) == [[]]
    assert copied([], [dataset_of([one])]) == [] and copied(["", "short"], [dataset_of(["short"])]) == [[], []]


def test_examples_are_training_data_too(tmp_path):
    lines = [
        {"p": f"Which number comes after {n}? ", "c": f"After {n} comes {n + 1}, as any child knows."}
        for n in range(50)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"prompt_field": "p", "completion_field": "c", "tokenizer": "byte"}
    prepare(PrepareConfig((str(tmp_path / "a.jsonl"),), out=tmp_path / "data", **fields))
    dataset = open_dataset(tmp_path / "data")
    number = dataset.train.num_examples // 2
    example = dataset.train.example(number)
    asked = BYTES.decode(np.where(example < 0, ~example, example)[:-1].tolist())
    (copy,) = copied([f"…{asked}…"], [dataset])[0]
    assert (copy.start, copy.length, copy.place.document) == (1, len(asked), number)
    assert copy.place.token == dataset.train.starts[number]
    assert copy.place.byte == copy.place.token - number  # an end is a token, but no text


def test_without_an_end_of_text_documents_have_no_numbers(numbers):
    dataset = open_dataset(numbers)
    text = dataset.tokenizer.decode(dataset.train[1000:1100].tolist())
    (copy,) = copied([text], [dataset])[0]
    assert copy == (0, 100, (numbers / "train-00000.npy", 1000, None, 1000))


def test_validation_texts_are_as_long_and_from_all_over(numbers):
    dataset = open_dataset(numbers)
    val = dataset.tokenizer.decode(dataset.val[:].tolist())
    like = ["x" * 50, "é" * 70, ""]
    pieces = validation_texts([dataset], like)
    assert [*map(len, pieces)] == [50, 70, 0] and all(piece in val for piece in pieces)
    first, *_, last = validation_texts([dataset], ["x" * 50] * 10)
    assert val.startswith(first) and val.endswith(last)
    assert [*map(len, validation_texts([dataset], ["x" * 10**6]))] == [len(val)]


def walk(texts: Sequence[str], size: int) -> str:
    """A text whose every 16 characters stand in one of the texts, but from one go to the next as they like."""
    chance, after = random.Random(0), {}
    for text in texts:
        for start in range(len(text) - 16):
            after.setdefault(text[start : start + 16], []).append(text[start + 16 : start + 80])
    parts, last, left = [], "", size
    while left > 0:
        step = chance.choice(after.get(last) or [chance.choice(texts)[:16]])[: chance.randint(16, 64)]
        parts.append(step)
        last, left = (last + step)[-16:], left - len(step)
    return "".join(parts)


def awful(name: str, texts: Sequence[str], code: str) -> str:
    """A fifth of a megabyte, mostly."""
    if name == "walk":
        return walk(texts, 200_000)
    unit = {"code": code, "spaces": " ", "one": "x", "text": texts[0], "odd": texts[0][:-7]}[name]
    return unit * (200_000 // len(unit))


@pytest.mark.parametrize("name", ["code", "spaces", "one", "text", "odd", "walk"])
def test_it_is_quick_and_small_whatever_the_texts_and_data(name, code, bpe):
    """20 texts of 2,000 characters (of 200 in 1 MB): 10 s for 100 MB, and 200 MB of memory."""
    chance, length = random.Random(0), 2000 if MEGABYTES > 1 else 200
    cuts = [[chance.randrange(len(code)) for _ in range(length // 10)] for _ in range(18)]
    texts = ["".join(code[cut : cut + chance.randint(10, 60)] for cut in some)[:length] for some in cuts]
    texts += [" " * length, "x" * length]
    documents = [awful(name, texts, code)]
    dataset = dataset_of(documents, bpe, times=5 * MEGABYTES)
    begun = time.process_time()
    found = [*map(spans, copied(texts, [dataset]))]
    took, peak = time.process_time() - begun, 0
    whole = {"spaces": 18, "one": 19, "text": 0, "odd": 0}.get(name)
    assert whole is None or found[whole][0][1] >= length - 7 * (name == "odd")
    if MEGABYTES > 1:  # it takes as long again
        tracemalloc.start()
        assert [*map(spans, copied(texts, [dataset_of(documents, bpe, times=50)]))] == found
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    print(f"{name}: {MEGABYTES} MB in {took:.2f} s, peak {peak / 1e6:.0f} MB")
    assert took < 2 + 0.1 * MEGABYTES and peak < 200e6
