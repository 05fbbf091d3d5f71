"""The losses of the simplest models, against ones worked out by hand."""

import collections
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest

import engine.report.baselines
from engine.data.batches import fitting
from engine.data.dataset import Dataset, ShardedTokens, open_dataset
from engine.data.mixture import Mixture
from engine.data.tokenizer import CharTokenizer
from engine.report.baselines import baselines, count_pairs
from prepare import PrepareConfig, prepare


@pytest.fixture
def letters(numbers) -> Dataset:
    """A dataset of a, b and c: 'ababaccb', and 'abcab' to validate on, whose tokens stand for 2 bytes on average."""
    dataset = open_dataset(numbers)
    splits = dataset.manifest["splits"] | {"val": {"bytes": 10, "tokens": 5}}
    tokenizer = CharTokenizer("abc")
    train, val = (tokenizer.encode(text) for text in ("ababaccb", "abcab"))
    manifest = dataset.manifest | {"splits": splits}
    return replace(
        dataset, manifest=manifest, tokenizer=tokenizer, train=ShardedTokens([train[:3], train[3:]]), val=val
    )


def test_losses_are_those_worked_out_by_hand(letters):
    # Pairs: ab twice, ba twice, ac, cc, cb once each; so D = 3 / (3 + 2 · 2). Targets: 2 a, 3 b, 2 c.
    a, b, c = 2 / 8, 3 / 8, 3 / 8  # q: one kind of token stands before a, two before b and c; five kinds of pairs
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
    assert baselines(letters) == pytest.approx(expected)


@pytest.mark.parametrize("train", ["ababaccb", "aaaa", "abcabcabc", "ab"])
def test_probabilities_after_any_token_sum_to_one(letters, train):
    letters = replace(letters, train=letters.tokenizer.encode(train))
    for name in ("unigram", "bigram"):
        for before in "abc":
            pairs = [letters.tokenizer.encode(before + after) for after in "abc"]
            chances = [math.exp(-baselines(replace(letters, val=pair))[name]) for pair in pairs]
            assert sum(chances) == pytest.approx(1) and min(chances) > 0


def test_chunks_and_shards_do_not_show_and_only_so_many_tokens_count(numbers, monkeypatch):
    dataset = open_dataset(numbers)
    expected, tokens = baselines(dataset), dataset.train[:]
    monkeypatch.setattr(engine.report.baselines, "CHUNK", 1000)
    split = replace(dataset, train=ShardedTokens([tokens[:777], tokens[777:]]))
    assert baselines(split) == expected
    monkeypatch.setattr(engine.report.baselines, "MOST", 2500)
    assert baselines(dataset) == baselines(replace(dataset, train=tokens[:2500], val=dataset.val[:2500]))
    assert baselines(dataset)["bigram"] != pytest.approx(expected["bigram"])


def test_of_examples_the_targets_count_and_no_pair_joins_two(tmp_path):
    lines = [{"p": "abc"[: n % 4], "c": "xy"[n % 2] * (n % 3 + 1)} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = {"prompt_field": "p", "completion_field": "c", "tokenizer": "byte"}
    prepare(PrepareConfig((str(tmp_path / "a.jsonl"),), out=tmp_path / "data", **fields))
    dataset = open_dataset(tmp_path / "data")
    expected: dict[int, int] = {}
    for number in range(dataset.train.num_examples):
        ids = dataset.train.example(number).tolist()
        for before, after in itertools.pairwise(ids):
            if after >= 0:
                pair = max(before, ~before) * 257 + after
                expected[pair] = expected.get(pair, 0) + 1
    for chunk in (2**22, 7):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(engine.report.baselines, "CHUNK", chunk)
            pairs, counts = count_pairs(dataset.train, 257)
            assert dict(zip(pairs.tolist(), counts.tolist(), strict=True)) == expected
    for cut in (False, True):  # as a run has them
        split = fitting(Mixture((dataset,), (1.0,)), 5, cut).datasets[0].train
        expected = collections.Counter()
        for number in range(split.num_examples):
            for before, after in itertools.pairwise(split.example(number).tolist()):
                expected.update([max(before, ~before) * 257 + after] if after >= 0 else [])
        pairs, counts = count_pairs(split, 257)
        assert dict(zip(pairs.tolist(), counts.tolist(), strict=True)) == expected
    assert 0 < baselines(dataset)["bigram"] < baselines(dataset)["unigram"] < math.log(257)


def test_a_model_of_pairs_learns_what_is_sure(numbers):
    tokenizer = CharTokenizer("abc")
    tokens = np.tile(tokenizer.encode("abc"), 1000)
    found = baselines(replace(open_dataset(numbers), tokenizer=tokenizer, train=tokens, val=tokens[:300]))
    assert found["uniform"] == pytest.approx(math.log(3)) and found["unigram"] == pytest.approx(math.log(3), abs=1e-3)
    assert found["bigram"] < 1e-3
