"""Which windows or examples make up a batch, and which targets count."""

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.errors import UserError
from engine.data.batches import Batches, check_sizes, inputs_and_targets
from engine.data.dataset import Dataset
from engine.data.order import (
    MAX_GROUP_BATCHES,
    ExampleOrder,
    derived_seed,
    evaluation_windows,
    permute,
    window_starts,
    windows_per_epoch,
)
from engine.data.shards.shard_file import ShardedTokens
from engine.data.split import BatchSpec, Examples, MixedText, Split, padded_length
from engine.data.tokenizer import ByteTokenizer
from engine.nn.loss import IGNORE_INDEX


def permutation(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size), size, np.array([key], np.uint64))


def starts_of(tokens: int, context: int, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Return where the windows of a batch start."""
    index = step * batch_size + np.arange(batch_size, dtype=np.uint64)
    return window_starts(tokens, context, seed, index)


def epoch_of_starts(num_tokens: int, context: int, epoch: int) -> np.ndarray:
    """Return the starts of the windows of one epoch, sorted, taken one at a time."""
    size = windows_per_epoch(num_tokens, context)
    steps = range(epoch * size, (epoch + 1) * size)
    starts = [starts_of(num_tokens, context, 1, step, 1) for step in steps]
    return np.sort(np.concatenate(starts))


def batches_of(split, context_length: int, rank: int = 0, world_size: int = 1) -> Batches:
    """Return batches of six sequences, of which a rank has its slice."""
    rows = slice(rank * 6 // world_size, (rank + 1) * 6 // world_size)
    return Batches(split, BatchSpec(context_length, 1, 6, rows), torch.device("cpu"))


def dataset_of(**splits: object) -> Dataset:
    return Dataset(Path("data"), {"splits": {}}, ByteTokenizer(), **splits, sha256="")


def examples_of(lengths: list[int] | np.ndarray) -> Examples:
    """Return examples that start with their number; tokens from the third on are targets."""
    lengths = np.array(lengths)
    rows = [[~n, ~1, *range(2, length)][:length] for n, length in enumerate(lengths.tolist())]
    tokens = np.concatenate(rows).astype(np.int32)
    shards = ShardedTokens(np.split(tokens, [len(tokens) // 3, len(tokens) // 2]))
    return Examples(shards, np.cumsum(lengths) - lengths, lengths)


def random_lengths(count: int, median: int = 60, maximum: int = 1025) -> np.ndarray:
    lengths = np.random.default_rng(count).lognormal(np.log(median), 0.7, count)
    return np.clip(lengths, 2, maximum).astype(int)


# Permutations and windows.


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 100, 1000, 4097, 65536])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_permute_is_a_permutation(size: int, key: int):
    np.testing.assert_array_equal(np.sort(permutation(size, key)), np.arange(size))


@pytest.mark.parametrize("num_tokens", [801, 1001])
def test_an_epoch_visits_each_window_of_a_long_text_once(num_tokens: int):
    offsets = set()
    for epoch in range(6):
        starts = epoch_of_starts(num_tokens, 8, epoch)
        assert len(starts) == windows_per_epoch(num_tokens, 8)
        assert (np.diff(starts) == 8).all()
        assert starts[0] < 8 and starts[-1] + 8 + 1 <= num_tokens
        offsets.add(int(starts[0]))
    assert len(offsets) > 1 or num_tokens <= 17  # with room to move


def test_each_token_of_a_short_text_is_a_target_in_each_epoch():
    rng = random.Random(0)
    sizes = [(2, 1), (3, 1), (33, 32), (34, 32), (64, 32), (65, 32), (95, 32), (800, 8)]
    for _ in range(300):
        context = rng.choice([1, 2, 3, 8, 32, rng.randint(1, 300)])
        sizes.append((rng.randint(context + 1, 100 * context), context))
    for num_tokens, context in sizes:
        size = windows_per_epoch(num_tokens, context)
        assert (num_tokens - 1) / context <= size < (num_tokens - 1) / context + 2
        starts = starts_of(num_tokens, context, 1, rng.randrange(100), size).astype(int)
        assert starts.min() == 0 and starts.max() + context == num_tokens - 1
        assert np.diff(np.sort(starts)).max(initial=0) <= context
        assert num_tokens < 3 * context or len(np.unique(starts)) > size - 2


def test_the_order_depends_on_the_epoch_and_on_the_seed():
    assert windows_per_epoch(8001, 8) == 999
    pairs = [(seed, epoch) for seed in (0, 1, -1) for epoch in (0, 1)]
    assert len({tuple(starts_of(8001, 8, *pair, 999) // 8) for pair in pairs}) == 6
    numbers = [(0,), (1,), (-1,), (0, 0), (0, 1), (1, 0)]
    assert len({derived_seed(*seeds) for seeds in numbers}) == 6


def test_batches_are_the_same_in_every_version():
    assert starts_of(1001, 8, 3, 7, 6).tolist() == [291, 187, 35, 131, 411, 251]
    assert derived_seed(1, 2, 3) == 6053372350886475030
    examples = examples_of(random_lengths(40))
    assert ExampleOrder(examples.lengths, 3, 6).batch(6).tolist() == [18, 21, 37, 39, 30, 38]
    text = Split(np.arange(1001, dtype=np.uint16))
    for split, context_length, digest in ((text, 8, 10327528389), (examples, 1024, 14270823520)):
        batches = batches_of(split, context_length)
        batches.get(2)
        assert batches.digest == digest


@pytest.mark.parametrize("step", [0, 10**9])
def test_memory_does_not_depend_on_the_number_of_tokens(step: int):
    starts_of(10**6, 1024, 0, 0, 8)  # what NumPy sets up once
    tracemalloc.start()
    starts = starts_of(10**12, 1024, 0, step, 512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 and len(np.unique(starts)) == 512
    assert 9 * 10**11 < starts.max() < 10**12 - 1024


def test_windows_are_gathered_across_shards():
    tokens = ShardedTokens([np.array([1, 2, 3], np.uint16), np.array([4, 65535], np.uint16)])
    ids, is_target = Split(tokens).read(1, 5)
    assert ids.dtype == np.int64 and ids.tolist() == [2, 3, 4, 65535] and is_target.all()
    assert Split(tokens).read(0, 2)[1].tolist() == [False, True]
    assert Split(tokens).windows(2, 0, np.empty(0, np.uint64)).shape == (0, 3)


# Batches.

TEXT = Split(ShardedTokens(np.split(np.arange(1001, dtype=np.uint16), [300, 500])))
MIX = MixedText([Split(np.arange(99)), Split(np.arange(500, 999))], (0.3, 0.7))
EXAMPLES = examples_of(random_lengths(50, median=8, maximum=21))


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("split", [TEXT, MIX, EXAMPLES], ids=["text", "mix", "examples"])
def test_ranks_share_the_batch_of_one_rank_in_any_order_of_steps(split, world_size: int):
    ranks = [batches_of(split, 20, rank, world_size) for rank in range(world_size)]
    alone = batches_of(split, 20)
    digests = set()
    for step in (0, 1, 2, 10**9, 7, 8, 7):  # the next one is assembled ahead
        pairs = [batches.get(step) for batches in ranks]
        assert len({tensor.shape[1:] for pair in pairs for tensor in pair}) == 1
        inputs, targets = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        assert inputs.dtype == targets.dtype == torch.int64 and len(inputs) == 6
        assert all(map(torch.equal, alone.get(step), (inputs, targets)))
        assert sum(batches.digest for batches in ranks) == alone.digest
        digests.add(alone.digest)
    assert len(digests) == 6


@pytest.mark.parametrize("step", [0, 20, 10**9])
def test_a_batch_of_text_has_its_windows_and_the_tokens_after_them(step: int):
    inputs, targets = batches_of(TEXT, 8).get(step)
    assert inputs[:, 0].tolist() == starts_of(1001, 8, 1, step, 6).tolist()
    assert (inputs - inputs[:, :1] == torch.arange(8)).all()
    assert torch.equal(targets, inputs + 1)


def test_each_dataset_of_a_mix_is_visited_once_an_epoch_in_its_own_order():
    starts_and_lengths = [(0, 1001), (10_000, 1001), (20_000, 897)]
    texts = [Split(np.arange(first, first + size)) for first, size in starts_and_lengths]
    mix = MixedText(texts, (0.5, 0.2, 0.3))
    batches = batches_of(mix, 8)
    rows = torch.cat([batches.get(step)[0] for step in range(120)])
    assert (rows - rows[:, :1] == torch.arange(8)).all()  # each is a window of one dataset
    orders = []
    for index, text in enumerate(texts):
        starts = rows[rows[:, 0] // 10_000 == index, 0] - index * 10_000
        size = windows_per_epoch(len(text), 8)
        assert abs(len(starts) - 6 * 120 * mix.weights[index]) < 3 and len(starts) > size
        for epoch in range(len(starts) // size):
            visited = starts[epoch * size : (epoch + 1) * size].sort().values
            assert (visited.diff() == 8).all() and len(visited) == size
        orders.append(starts // 8)
    size = min(len(orders[0]), len(orders[1]))
    assert (orders[0][:size] == orders[1][:size]).sum() < 20  # of equal length, in other orders
    alone = batches_of(texts[0], 8)
    first = torch.cat([alone.get(step)[0] for step in range(20)])[:, 0]
    assert first.tolist() == rows[rows[:, 0] < 10_000, 0].tolist()[: len(first)]


@pytest.mark.parametrize("step", range(10))  # 8 1/3 batches an epoch
def test_a_batch_of_examples_is_padded_on_the_right(step: int):
    inputs, targets = batches_of(EXAMPLES, 20).get(step)
    index = ExampleOrder(EXAMPLES.lengths, 1, 6).batch(step)
    num_inputs = EXAMPLES.lengths[index] - 1
    assert inputs.shape == (6, min(-(-num_inputs.max() // 8) * 8, 20))
    rows = zip(index.tolist(), num_inputs.tolist(), inputs.tolist(), targets.tolist(), strict=True)
    for number, length, x, y in rows:
        assert x[:length] == [number, 1, *range(2, length)][:length]
        assert not any(x[length + 1 :])
        assert y == [IGNORE_INDEX, *range(2, length + 1)] + [IGNORE_INDEX] * (len(y) - length)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 200])
def test_an_epoch_visits_each_example_once(count: int, batch_size: int, monkeypatch):
    monkeypatch.setattr("engine.data.order.MAX_GROUP_BATCHES", 5)
    examples = examples_of(random_lengths(count))
    num_epochs = batch_size if count < 100 else 2
    steps = range(-(-num_epochs * count // batch_size))
    orders = [ExampleOrder(examples.lengths, 3, batch_size) for _ in range(2)]
    index = np.concatenate([orders[0].batch(step) for step in steps])
    again = [orders[1].batch(step) for step in reversed(steps)]
    np.testing.assert_array_equal(np.concatenate(again[::-1]), index)  # without memory of others
    epochs = index[: num_epochs * count].reshape(num_epochs, count)
    assert (np.sort(epochs) == np.arange(count)).all()
    assert count < 31 or num_epochs < 2 or len(np.unique(epochs, axis=0)) > 1


@pytest.mark.parametrize("count, max_padding", [(52_000, 0.09), (5000, 0.12)])
def test_a_batch_has_similar_lengths_and_batches_are_not_in_their_order(count, max_padding):
    lengths = random_lengths(count)
    steps = range(min(count // 32, 2 * MAX_GROUP_BATCHES))
    order = ExampleOrder(lengths, 1, 32)
    batches = [lengths[order.batch(step)] for step in steps]
    num_inputs = sum(padded_length(batch.max(), 1024) * len(batch) for batch in batches)
    assert 1 - sum((batch - 1).sum() for batch in batches) / num_inputs < max_padding
    assert order.sort_group.cache_info().misses <= 1 + len(steps) // MAX_GROUP_BATCHES
    longest = [batch.max() for batch in batches[:100]]
    assert abs(np.corrcoef(np.arange(100), longest)[0, 1]) < 0.5  # 5 standard deviations


# Evaluation.


def evaluation_rows(split, context_length: int, world_size: int) -> list[tuple[list, list]]:
    """Return the inputs and targets of an evaluation by all ranks, in batches of 100 tokens."""
    rows = []
    shapes = set()
    for rank in range(world_size):
        batches = split.evaluation_rows(context_length, 0, rank, world_size)
        pairs = [*map(inputs_and_targets, batches)]
        assert all(pair.dtype == torch.int64 and pair[0].numel() <= 100 for pair in pairs)
        shapes.add(tuple(pair.shape for pair in pairs))
        rows += [row for pair in pairs for row in zip(*pair.tolist(), strict=True)]
    assert len(shapes) == 1  # ranks that wait for each other
    return rows


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [9, 10, 16, 17, 18, 100, 129])
def test_each_token_but_the_first_is_a_target_once(num_tokens: int, world_size: int, monkeypatch):
    monkeypatch.setattr("engine.data.split.EVALUATION_BATCH_TOKENS", 100)
    rows = evaluation_rows(Split(np.arange(num_tokens)), 8, world_size)
    pairs = [pair for inputs, targets in rows for pair in zip(inputs, targets, strict=True)]
    counted = [(x, y) for x, y in pairs if y != IGNORE_INDEX]
    assert sorted(counted) == [(token, token + 1) for token in range(num_tokens - 1)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_each_example_is_evaluated_once(count: int, world_size: int, monkeypatch):
    monkeypatch.setattr("engine.data.split.EVALUATION_BATCH_TOKENS", 100)
    examples = examples_of(random_lengths(count, median=12, maximum=33))
    rows = evaluation_rows(examples, 32, world_size)
    counts = [(x[0], sum(target != IGNORE_INDEX for target in y)) for x, y in rows if any(x)]
    assert sorted(counts) == [(n, max(0, size - 2)) for n, size in enumerate(examples.lengths)]


def test_an_evaluation_with_a_limit_has_windows_spread_evenly():
    starts, num_ignored = evaluation_windows(100_001, 10, max_tokens=1000)
    assert len(starts) == len(np.unique(starts)) == 100 and not num_ignored.any()
    assert starts[0] == 0 and starts[-1] == 100_001 - 10 - 1 and np.ptp(np.diff(starts)) <= 10
    for limit in (1, 10, 101, 99999):
        starts, num_ignored = evaluation_windows(101, 10, max_tokens=limit)
        assert 0 < len(starts) <= 10 and (num_ignored < 10).all()


@pytest.mark.parametrize("limit", [1, 1000, 5000])
def test_an_evaluation_with_a_limit_has_examples_of_all_lengths(limit: int):
    examples = examples_of(random_lengths(1000))
    rows = examples.evaluation_rows(1024, limit, 0, 1)
    numbers = [~row[0] for batch in rows for row in batch.tolist()]
    lengths = examples.lengths[numbers]
    assert len({*numbers}) == len(numbers)
    assert limit == 1 or 0.7 * limit < lengths.sum() < 1.3 * limit
    if limit == 5000:
        assert abs(np.median(lengths) - np.median(examples.lengths)) < 8
        assert lengths.max() == examples.lengths.max()


# Sizes that do not fit.


SHORT = dataset_of(train=Split(np.arange(9)), val=Split(np.arange(8)))
EXAMPLES_TO_FIT = dataset_of(train=examples_of([3, 9, 20]), val=examples_of([9, 3]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: check_sizes(6, 4, None), "^--batch-size: .* 8"),
        (lambda: check_sizes(2, 4, None), "^--batch-size: .* 4"),
        (lambda: check_sizes(12, 2, 4), "^--micro-batch-size: .* 1, 2, 3, 6"),
        (lambda: SHORT.check_length(8), "^--context-length: .* 8 .*val split.*--val-fraction"),
        (lambda: SHORT.check_length(9), "^--context-length: .* 9 .*train split"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(function, message: str):
    with pytest.raises(UserError, match=message):
        function()


def test_examples_are_made_to_fit_the_context():
    fitting = EXAMPLES_TO_FIT.drop_long_examples(8)
    assert (fitting.row_length(100), fitting.row_length(5)) == (8, 5)
    assert fitting.num_removed == 1 and fitting.lacks_examples  # 1 of 5
    assert (fitting.train.lengths.tolist(), fitting.val.lengths.tolist()) == ([3, 9], [9, 3])
    assert (fitting.train.num_removed, fitting.val.num_removed) == (1, 0)
    assert fitting.train.tokens_per_step(4, 8) == 20
    text = dataset_of(train=Split(np.arange(9)), val=Split(np.arange(9)))
    text.check_length(8)
    assert text.drop_long_examples(8) == text and text.train.tokens_per_step(4, 8) == 32
