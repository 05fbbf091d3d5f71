"""The losses of the simplest models equal ones computed by hand."""

import collections
import itertools
import json
import math
from dataclasses import replace

import pytest

import engine.report.baselines as baselines
from engine.data.dataset import Dataset, ShardedTokens, open_dataset
from engine.data.tokenizer import CharTokenizer
from engine.report.baselines import baseline_losses, count_pairs
from prepare import PrepareConfig, prepare


@pytest.fixture
def letters(numbers) -> Dataset:
    """A dataset of a, b and c: 'ababaccb' to train on, and 'abcab' to validate on."""
    tokenizer = CharTokenizer("abc")
    train, val = (tokenizer.encode(text) for text in ("ababaccb", "abcab"))
    shards = ShardedTokens([train[:3], train[3:]])
    return replace(open_dataset(numbers), tokenizer=tokenizer, train=shards, val=val)


def test_losses_equal_those_computed_by_hand(letters):
    # Pairs: ab twice, ba twice, ac, cc, cb once each; so D = 3 / (3 + 2 · 2). Targets: 2 a, 3 b, 2 c.
    a, b, c = 2 / 8, 3 / 8, 3 / 8  # q: a follows one kind of token, b and c two; there are five kinds of pairs
    d = 3 / 7
    bigram = [
        (2 - d + d * 2 * b) / 3,  # b after a
        (0 + d * 1 * c) / 2,  # c after b
        (0 + d * 2 * a) / 2,  # a after c
        (2 - d + d * 2 * b) / 3,  # b after a
    ]
    expected = {
        "uniform": math.log(3),
        "unigram": -sum(map(math.log, (0.4, 0.3, 0.3, 0.4))) / 4,
        "bigram": -sum(map(math.log, bigram)) / 4,
    }
    assert baseline_losses(letters) == pytest.approx(expected)


@pytest.mark.parametrize("train", ["ababaccb", "aaaa", "abcabcabc", "ab"])
def test_probabilities_after_any_token_sum_to_one(letters, train):
    letters = replace(letters, train=letters.tokenizer.encode(train))
    for name, before in itertools.product(("unigram", "bigram"), "abc"):
        pairs = [letters.tokenizer.encode(before + after) for after in "abc"]
        probabilities = [math.exp(-baseline_losses(replace(letters, val=pair))[name]) for pair in pairs]
        assert sum(probabilities) == pytest.approx(1) and min(probabilities) > 0


def test_chunks_and_shards_change_nothing_and_the_number_of_tokens_is_bounded(numbers, monkeypatch):
    dataset = open_dataset(numbers)
    expected, tokens = baseline_losses(dataset), dataset.train[:]
    monkeypatch.setattr(baselines, "COUNTED_CHUNK_TOKENS", 1000)
    assert baseline_losses(replace(dataset, train=ShardedTokens([tokens[:777], tokens[777:]]))) == expected
    monkeypatch.setattr(baselines, "MAX_COUNTED_TOKENS", 2500)
    assert baseline_losses(dataset) == baseline_losses(replace(dataset, train=tokens[:2500], val=dataset.val[:2500]))
    assert baseline_losses(dataset)["bigram"] != pytest.approx(expected["bigram"])


@pytest.mark.parametrize("chunk_tokens", [2**22, 7])
def test_of_examples_only_targets_count_and_no_pair_spans_two(tmp_path, monkeypatch, chunk_tokens):
    lines = [{"p": "abc"[: n % 4], "c": "xy"[n % 2] * (n % 3 + 1)} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"prompt_field": "p", "completion_field": "c", "tokenizer": "byte"}
    prepare(PrepareConfig((str(tmp_path / "a.jsonl"),), out=tmp_path / "data", **fields))
    dataset = open_dataset(tmp_path / "data")
    monkeypatch.setattr(baselines, "COUNTED_CHUNK_TOKENS", chunk_tokens)
    for split in (dataset.train, *(dataset.train.drop_long(5, cut) for cut in (False, True))):
        expected = collections.Counter()
        for index in range(split.num_examples):
            for before, after in itertools.pairwise(split.example(index).tolist()):
                expected.update([max(before, ~before) * 257 + after] if after >= 0 else [])
        pairs, counts = count_pairs(split, 257)
        assert dict(zip(pairs.tolist(), counts.tolist(), strict=True)) == expected
    losses = baseline_losses(dataset)
    assert 0 < losses["bigram"] < losses["unigram"] < losses["uniform"]
