"""The losses of the simplest models equal ones computed by hand."""

import collections
import itertools
import lzma
import math
from dataclasses import replace

import pytest
from helpers import make_dataset

import engine.report.baselines as baselines
from engine.data.batches import open_mixture
from engine.data.dataset import Dataset, open_dataset
from engine.data.shards.shard_file import ShardedTokens
from engine.data.split import Split
from engine.data.tokenizer import CharTokenizer
from engine.report.baselines import (
    baseline_losses,
    count_pairs,
    mixture_yardsticks,
    xz_bits_per_byte,
)


@pytest.fixture
def letters(numbers) -> Dataset:
    """A dataset of a, b and c: 'ababaccb' to train on, and 'abcab' to validate on."""
    tokenizer = CharTokenizer("abc")
    train, val = (tokenizer.encode(text) for text in ("ababaccb", "abcab"))
    splits = {"train": Split(ShardedTokens([train[:3], train[3:]])), "val": Split(val)}
    return replace(open_dataset(numbers), tokenizer=tokenizer, **splits)


def test_losses_equal_those_computed_by_hand(letters):
    # Pairs: ab and ba twice, ac, cc and cb once. Targets: 2 a, 3 b, 2 c.
    a, b, c = (0.3, 0.4, 0.3)
    b_after_a = (2 + 2 * b) / (3 + 2)
    c_after_b = (0 + 1 * c) / (2 + 1)
    a_after_c = (0 + 2 * a) / (2 + 2)
    expected = {
        "uniform": math.log(3),
        "unigram": -sum(map(math.log, (b, c, a, b))) / 4,
        "bigram": -sum(map(math.log, (b_after_a, c_after_b, a_after_c, b_after_a))) / 4,
    }
    assert baseline_losses(letters) == pytest.approx(expected)


@pytest.mark.parametrize("train", ["ababaccb", "aaaa"])
def test_probabilities_after_any_token_sum_to_one(letters, train):
    letters = replace(letters, train=Split(letters.tokenizer.encode(train)))
    for name, before in itertools.product(("unigram", "bigram"), "abc"):
        pairs = [Split(letters.tokenizer.encode(before + after)) for after in "abc"]
        losses = [baseline_losses(replace(letters, val=pair))[name] for pair in pairs]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)
        assert max(losses) < math.inf


def test_of_examples_only_targets_count_and_no_pair_spans_two(tmp_path):
    lines = [{"p": "abc"[: n % 4], "c": "xy"[n % 2] * (n % 3 + 1)} for n in range(40)]
    dataset = open_dataset(make_dataset(tmp_path, lines, prompt_field="p", completion_field="c"))
    for split in (dataset.train, dataset.train.drop_long(5)):
        expected = collections.Counter()
        for example in split.examples():
            for before, after in itertools.pairwise(example.tolist()):
                expected.update([max(before, ~before) * 257 + after] if after >= 0 else [])
        pairs, counts = count_pairs(split, 257, 1.0)
        assert dict(zip(pairs.tolist(), counts.tolist(), strict=True)) == expected
    losses = baseline_losses(dataset)
    assert 0 < losses["bigram"] < losses["unigram"] < losses["uniform"]
    assert "xz_bits_per_byte" not in mixture_yardsticks(open_mixture([dataset.path]))


def test_xz_gets_a_bounded_text_and_the_datasets_of_a_mixture_share_the_bounds(
    numbers, tmp_path, monkeypatch
):
    dataset = open_dataset(numbers)
    text = dataset.tokenizer.decode(dataset.val.tokens[:].tolist()).encode()
    xz = {"xz_bits_per_byte": 8 * len(lzma.compress(text, preset=9)) / len(text)}
    expected = baseline_losses(dataset) | xz
    assert mixture_yardsticks(open_mixture([numbers])) == pytest.approx(expected)
    monkeypatch.setattr(baselines, "MAX_COMPRESSED_BYTES", 1000)
    bits = 8 * len(lzma.compress(text[:500], preset=9)) / 500
    assert xz_bits_per_byte(dataset, 0.5) == pytest.approx(bits)
    second = make_dataset(
        tmp_path, numbers.with_suffix(".txt"), tokenizer=str(numbers), val_fraction=0.3
    )
    data = open_mixture([numbers, second])
    bits = data.mean(xz_bits_per_byte(each, 0.5) for each in data.datasets)
    assert mixture_yardsticks(data)["xz_bits_per_byte"] == bits
