"""Which windows, or examples, make up a batch, and which targets count."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.data.batches import (
    MAX_GROUP_BATCHES,
    ORDERS,
    Batches,
    check_length,
    check_sizes,
    derived_seed,
    drop_long_examples,
    evaluation_batches,
    evaluation_windows,
    example_indices,
    gather,
    padded_length,
    permute,
    shuffled_window_starts,
    tokens_per_step,
    windows_per_epoch,
)
from engine.data.dataset import Dataset, Examples, ShardedTokens
from engine.data.mixture import MixedTokens, Mixture, assign_to_datasets
from engine.data.tokenizer import ByteTokenizer
from engine.nn.loss import IGNORE_INDEX

SIZES = [1, 2, 3, 4, 5, 15, 16, 17, 100, 1000, 4097, 65536]


def permutation(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size, dtype=np.uint64), size, np.full(size, key, np.uint64))


def starts_of(num_tokens: int, context_length: int, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Where the windows of a batch start."""
    serial = step * batch_size + np.arange(batch_size, dtype=np.uint64)
    return shuffled_window_starts(num_tokens, context_length, seed, serial)


def text_of(length: int) -> Dataset:
    """A dataset of so many tokens in each split."""
    return Dataset(Path("data"), {}, ByteTokenizer(), np.arange(length), np.arange(length), sha256="")


def epoch_of_starts(num_tokens: int, context_length: int, seed: int, epoch: int) -> np.ndarray:
    """The starts of all windows of one epoch, sorted, taken one window at a time."""
    size = windows_per_epoch(num_tokens, context_length)
    serials = range(epoch * size, (epoch + 1) * size)
    return np.sort(np.concatenate([starts_of(num_tokens, context_length, seed, step, 1) for step in serials]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_permute_sends_each_index_elsewhere_inside(size: int, key: int):
    np.testing.assert_array_equal(np.sort(permutation(size, key)), np.arange(size))


def test_permute_scatters_and_differs_between_keys():
    size = 1000
    permutations = [permutation(size, key) for key in range(5)]
    for number, one in enumerate(permutations):
        assert np.abs(np.corrcoef(np.arange(size), one)[0, 1]) < 0.15  # five deviations of a random order
        for other in permutations[:number]:
            assert (one == other).sum() < 10


def test_permute_takes_a_key_for_each_index():
    keys = np.array([3, 7, 3], np.uint64)
    mixed = permute(np.array([5, 5, 6], np.uint64), 100, keys)
    assert mixed.tolist() == [
        permutation(100, 3)[5],
        permutation(100, 7)[5],
        permutation(100, 3)[6],
    ]


@pytest.mark.parametrize("num_tokens", [9, 10, 16, 17, 18, 24, 25, 26, 100, 1001])
def test_epoch_visits_each_window_once(num_tokens: int):
    context_length = 8
    offsets = set()
    for epoch in range(6):
        starts = epoch_of_starts(num_tokens, context_length, seed=1, epoch=epoch)
        assert len(starts) == windows_per_epoch(num_tokens, context_length)
        assert (np.diff(starts) == context_length).all()
        assert starts[0] < context_length
        assert starts[-1] + context_length + 1 <= num_tokens
        offsets.add(int(starts[0]))
    if num_tokens > 17:  # else there is hardly room to move
        assert len(offsets) > 1


def test_every_start_gets_its_turn():
    visited = {start for epoch in range(200) for start in epoch_of_starts(25, 8, seed=0, epoch=epoch).tolist()}
    assert visited == set(range(2 * 8))


def test_windows_of_an_epoch_come_in_another_order_in_another_epoch_and_with_another_seed():
    orders = {tuple(starts_of(8001, 8, seed, step, 999) // 8) for seed in (0, 1, -1) for step in (0, 1)}
    assert windows_per_epoch(8001, 8) == 999 and len(orders) == 6


def test_a_run_once_begun_finds_the_same_windows_in_every_version():
    assert starts_of(1001, 8, seed=3, step=7, batch_size=6).tolist() == [
        291,
        187,
        35,
        131,
        411,
        251,
    ]
    assert derived_seed(1, 2, 3) == 6053372350886475030
    batches = Batches(np.arange(1001, dtype=np.uint16), 8, 1, 6, slice(None), torch.device("cpu"))
    batches.get(2)
    assert batches.digest == 10327528389


@pytest.mark.parametrize("step", [0, 9, 10])  # 12 windows a batch, 123 an epoch: batch 10 spans two
def test_batch_is_the_windows_of_its_serial_numbers(step: int):
    assert windows_per_epoch(1000, 8) == 123
    whole = starts_of(1000, 8, 0, step, 12)
    one_by_one = [starts_of(1000, 8, 0, serial, 1) for serial in range(step * 12, step * 12 + 12)]
    np.testing.assert_array_equal(whole, np.concatenate(one_by_one))


@pytest.mark.parametrize("step", [0, 10**9])
def test_a_trillion_tokens_cost_no_more_than_a_million(step: int):
    starts_of(10**6, 1024, 0, 0, 8)  # whatever NumPy sets up once
    tracemalloc.start()
    starts = starts_of(10**12, 1024, 0, step, 512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20
    assert len(np.unique(starts)) == 512
    assert starts.max() + 1024 < 10**12 and starts.max() > 9 * 10**11


def test_gather_gives_windows_as_embeddings_want_them():
    tokens = ShardedTokens([np.array([1, 2, 3], np.uint16), np.array([4, 65535], np.uint16)])
    windows = gather(tokens, np.array([2, 0]), 3)
    assert windows.dtype == np.int64
    assert windows.tolist() == [[3, 4, 65535], [1, 2, 3]]
    assert gather(tokens, np.array([], int), 3).shape == (0, 3)


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_processes_have_a_batch_between_them_whatever_step_they_ask_for(processes: int):
    tokens = ShardedTokens(np.split(np.arange(1001, dtype=np.uint16), [300, 500]))
    rows = [slice(rank * 6 // processes, (rank + 1) * 6 // processes) for rank in range(processes)]
    loaders = [Batches(tokens, 8, 1, 6, own, torch.device("cpu")) for own in rows]
    alone = Batches(tokens, 8, 1, 6, slice(None), torch.device("cpu"))
    digests = set()
    for step in (0, 1, 2, 30, 7, 8, 7):  # the next is made ahead; another must not come instead
        parts = [loader.get(step) for loader in loaders]
        inputs, targets = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        np.testing.assert_array_equal(inputs, gather(tokens, starts_of(1001, 8, 1, step, 6), 8))
        np.testing.assert_array_equal(targets, inputs + 1)
        alone.get(step)
        assert sum(loader.digest for loader in loaders) == alone.digest
        digests.add(alone.digest)
    assert len(digests) == 6


def test_another_order_of_windows_is_one_function(monkeypatch):
    def sequential(num_tokens: int, context_length: int, seed: int, index: np.ndarray):
        return index % np.uint64(windows_per_epoch(num_tokens, context_length)) * context_length

    monkeypatch.setitem(ORDERS, "sequential", sequential)
    tokens = MixedTokens((np.arange(1001), np.arange(2000, 3001)), (0.5, 0.5))
    loader = Batches(tokens, 8, 1, 6, slice(None), torch.device("cpu"), order="sequential")
    assert sorted(loader.get(1)[0][:, 0].tolist()) == [24, 32, 40, 2024, 2032, 2040]


def test_each_dataset_of_a_mix_comes_once_an_epoch_in_an_order_of_its_own():
    parts = tuple(np.arange(start, start + length) for start, length in ((0, 1001), (10_000, 1001), (20_000, 257)))
    mixed, steps, context_length = MixedTokens(parts, (0.5, 0.2, 0.3)), 120, 8
    loader = Batches(mixed, context_length, 3, 6, slice(None), torch.device("cpu"))
    alone = Batches(parts[0], context_length, 3, 6, slice(None), torch.device("cpu"))
    rows = torch.cat([loader.get(step)[0] for step in range(steps)])
    assert (rows - rows[:, :1] == torch.arange(context_length)).all()  # each is a window of one part
    orders = []
    for index, part in enumerate(parts):
        starts = rows[rows[:, 0] // 10_000 == index, 0] - index * 10_000
        size = windows_per_epoch(len(part), context_length)
        assert abs(len(starts) - 6 * steps * mixed.weights[index]) < 3 and len(starts) > size
        for epoch in range(len(starts) // size):
            visited = starts[epoch * size : (epoch + 1) * size].sort().values
            assert (visited.diff() == context_length).all() and len(visited) == size
        orders.append((starts[:size] // context_length).tolist())
    assert sum(one == other for one, other in zip(*orders[:2], strict=True)) < 10  # parts as long, in other orders
    first = torch.cat([alone.get(step)[0] for step in range(20)])[:, 0].tolist()
    assert first == rows[rows[:, 0] < 10_000, 0].tolist()[: len(first)]  # as without the others


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_have_a_batch_of_a_mix_between_them(processes: int):
    parts, shares, steps = (np.arange(99), np.arange(500, 999)), (0.3, 0.7), (0, 1, 10**9, 7)
    rows = [slice(rank * 6 // processes, (rank + 1) * 6 // processes) for rank in range(processes)]
    loaders = [Batches(MixedTokens(parts, shares), 8, 1, 6, own, torch.device("cpu")) for own in rows]
    alone = Batches(MixedTokens(parts, shares), 8, 1, 6, slice(None), torch.device("cpu"))
    for step in steps:
        inputs = torch.cat([loader.get(step)[0] for loader in loaders])
        assert torch.equal(inputs, alone.get(step)[0])
        assert sum(loader.digest for loader in loaders) == alone.digest
        drawn, _ = assign_to_datasets(shares, step * 6 + np.arange(6, dtype=np.uint64))
        assert (inputs[:, 0] // 500).tolist() == drawn.tolist()


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [9, 10, 16, 17, 18, 100, 129])
def test_each_token_but_the_first_counts_once_in_an_evaluation(num_tokens: int, processes: int):
    tokens = np.arange(num_tokens)
    counted, lengths = [], set()
    for rank in range(processes):
        found = [*evaluation_batches(tokens, 8, 0, rank, processes, batch_tokens=24)]
        assert all(pair.dtype == torch.int64 and pair.shape[1] <= 3 and pair.shape[2] == 8 for pair in found)
        inputs, targets = torch.cat(found, dim=1)
        counts = targets != IGNORE_INDEX
        assert (inputs[counts] + 1 == targets[counts]).all()
        counted += targets[counts].tolist()
        lengths.add((len(found), len(targets)))
    assert sorted(counted) == [*range(1, num_tokens)]
    assert len(lengths) == 1  # processes that wait for each other take as many


def test_evaluation_with_a_limit_counts_about_that_many_spread_evenly():
    starts, counted_before = evaluation_windows(100_001, 10, max_tokens=1000)
    assert len(starts) == len(np.unique(starts)) == 100
    assert starts[0] == 0 and starts[-1] == 100_001 - 10 - 1
    assert np.ptp(np.diff(starts)) <= 10
    assert not counted_before.any()


@pytest.mark.parametrize("limit", [1, 10, 101, 99999])
def test_evaluation_with_any_limit_counts_something(limit: int):
    starts, counted_before = evaluation_windows(101, 10, max_tokens=limit)
    assert 0 < len(starts) <= 10
    assert (counted_before < 10).all()


@pytest.mark.parametrize("function", [lambda: starts_of(8, 8, 0, 0, 1), lambda: evaluation_windows(8, 8)])
def test_too_few_tokens_for_a_window(function):
    with pytest.raises(ValueError, match="--context-length"):
        function()


def test_derived_seeds_differ():
    parts = [(0,), (1,), (-1,), (0, 0), (0, 1), (1, 0)]
    assert len({derived_seed(*part) for part in parts}) == len(parts)


@pytest.mark.parametrize("sizes", [(6, 1, None), (6, 3, None), (6, 3, 2), (6, 1, 6)])
def test_batch_that_divides_is_taken(sizes):
    assert check_sizes(*sizes) is None


@pytest.mark.parametrize(
    "sizes, message",
    [
        ((6, 4, None), "--batch-size.*4 processes.* 8"),
        ((2, 4, None), "--batch-size.* Try 4"),
        ((12, 2, 4), "--micro-batch-size.* 1, 2, 3, 6"),
    ],
)
def test_batch_that_does_not_divide_is_refused(sizes, message: str):
    with pytest.raises(ValueError, match=message):
        check_sizes(*sizes)


def test_a_text_too_short_for_a_window_is_refused_by_its_length():
    check_length(Mixture((text_of(9), text_of(9)), (0.5, 0.5)), 8)
    with pytest.raises(ValueError, match="--context-length"):
        check_length(Mixture((text_of(9), text_of(8)), (0.5, 0.5)), 8)


# Examples.


def examples_of(lengths: list[int] | np.ndarray) -> Examples:
    """Examples of these lengths, each beginning with its number; all tokens but the first two of each count."""
    lengths = np.array(lengths)
    rows = [[~number, ~1, *range(2, length)][:length] for number, length in enumerate(lengths.tolist())]
    tokens = np.concatenate(rows).astype(np.int32)
    shards = ShardedTokens(np.split(tokens, [len(tokens) // 3, len(tokens) // 2]))
    return Examples(shards, np.cumsum(lengths) - lengths, lengths)


def random_lengths(count: int, median: int = 60, most: int = 1025) -> np.ndarray:
    chance = np.random.default_rng(count)
    return np.clip(chance.lognormal(np.log(median), 0.7, count), 2, most).astype(int)


def waste(examples: Examples, batch_size: int, steps: int) -> float:
    """The share of a training's inputs that are padding."""
    found = [examples.lengths[example_indices(examples, 1, step, batch_size)] for step in range(steps)]
    return 1 - sum((one - 1).sum() for one in found) / sum(padded_length(one.max(), 1024) * len(one) for one in found)


@pytest.mark.parametrize("batch_size", [1, 2, 7, 32])
@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 200])
def test_each_example_comes_once_an_epoch(count: int, batch_size: int, monkeypatch):
    monkeypatch.setattr("engine.data.batches.MAX_GROUP_BATCHES", 5)
    examples = examples_of(random_lengths(count))
    epochs = batch_size if count < 100 else 2
    steps = -(-epochs * count // batch_size)
    numbers = np.concatenate([example_indices(examples, 3, step, batch_size) for step in range(steps)])
    orders = set()
    for epoch in range(epochs):
        order = numbers[epoch * count : (epoch + 1) * count]
        assert sorted(order.tolist()) == [*range(count)]
        orders.add(tuple(order.tolist()))
    assert count < 31 or epochs < 2 or len(orders) > 1


@pytest.mark.parametrize("count, most", [(52_000, 0.09), (5000, 0.12)])
def test_like_lengths_come_together_and_short_ones_not_first(count: int, most: float):
    lengths = random_lengths(count)
    examples = Examples(np.empty(0, np.int32), np.cumsum(lengths) - lengths, lengths)
    steps = min(count // 32, 2 * MAX_GROUP_BATCHES)
    assert waste(examples, 32, steps) < most
    longest = [examples.lengths[example_indices(examples, 1, step, 32)].max() for step in range(100)]
    assert abs(np.corrcoef(np.arange(100), longest)[0, 1]) < 0.5  # five deviations of a random order


def test_a_run_once_begun_finds_the_same_examples_in_every_version():
    examples = examples_of(random_lengths(40))
    assert example_indices(examples, 3, 6, 6).tolist() == [18, 21, 37, 39, 30, 38]
    batches = Batches(examples, 1024, 1, 6, slice(None), torch.device("cpu"))
    batches.get(2)
    assert batches.digest == 14270823520


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_have_a_batch_of_examples_between_them(processes: int):
    examples = examples_of(random_lengths(50, median=8, most=21))
    rows = [slice(rank * 6 // processes, (rank + 1) * 6 // processes) for rank in range(processes)]
    loaders = [Batches(examples, 20, 1, 6, own, torch.device("cpu")) for own in rows]
    alone = Batches(examples, 20, 1, 6, slice(None), torch.device("cpu"))
    for step in (0, 1, 8, 9, 7):  # 8 and 1/3 batches an epoch
        parts = [loader.get(step) for loader in loaders]
        assert len({part.shape for pair in parts for part in pair}) == 1
        inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        numbers = example_indices(examples, 1, step, 6)
        length = examples.lengths[numbers].max() - 1
        assert inputs.dtype == targets.dtype == torch.int64 and inputs.shape == (
            6,
            min(-(-length // 8) * 8, 20),
        )
        for number, x, y in zip(numbers.tolist(), inputs.tolist(), targets.tolist(), strict=True):
            own = examples.lengths[number] - 1
            assert x[:own] == [number, 1, *range(2, own)][:own] and y[:own] == [
                IGNORE_INDEX,
                *range(2, own + 1),
            ]
            assert {*y[own:]} <= {IGNORE_INDEX} and not any(x[own + 1 :])
        assert all(map(torch.equal, alone.get(step), (inputs, targets)))
        assert sum(loader.digest for loader in loaders) == alone.digest


def test_the_last_token_of_the_longest_example_is_a_target():
    for length in (2, 8, 9, 10, 17, 21):
        _, targets = Batches(examples_of([length]), 20, 1, 1, slice(None), torch.device("cpu")).get(0)
        assert targets.max() == (length - 1 if length > 2 else IGNORE_INDEX)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_each_example_counts_once_in_an_evaluation(count: int, processes: int):
    examples, found, shapes = examples_of(random_lengths(count, median=12, most=33)), [], []
    for rank in range(processes):
        pairs = [*evaluation_batches(examples, 32, 0, rank, processes, batch_tokens=100)]
        assert all(pair.dtype == torch.int64 and pair[0].numel() <= 100 for pair in pairs)
        shapes.append([pair.shape for pair in pairs])
        rows = [row for pair in pairs for row in zip(*pair.tolist(), strict=True)]
        found += [(x[0], sum(t != IGNORE_INDEX for t in y)) for x, y in rows if any(x)]
    assert sorted(found) == [(number, max(0, length - 2)) for number, length in enumerate(examples.lengths.tolist())]
    assert all(one == shapes[0] for one in shapes)  # processes that wait for each other take as many, as long


@pytest.mark.parametrize("limit", [1, 1000, 5000])
def test_evaluation_of_examples_with_a_limit_takes_all_lengths(limit: int):
    examples = examples_of(random_lengths(1000))
    pairs = [*evaluation_batches(examples, 1024, limit, 0, 1)]
    numbers = [int(x[0]) for pair in pairs for x in pair[0]]
    lengths = examples.lengths[numbers]
    assert len({*numbers}) == len(numbers) and (limit < 1000 or 0.7 * limit < lengths.sum() < 1.3 * limit)
    if limit == 5000:
        assert abs(np.median(lengths) - np.median(examples.lengths)) < 8 and lengths.max() == examples.lengths.max()


def test_a_dataset_is_made_to_fit_the_context():
    lengths = {"train": [3, 9, 20], "val": [9, 3]}
    splits = {split: examples_of(some) for split, some in lengths.items()}
    dataset = Dataset(Path("data"), {"splits": {}}, ByteTokenizer(), **splits, sha256="")
    for cut, left in ((False, ([3, 9], [9, 3])), (True, ([3, 9, 9], [9, 3]))):
        (fitted,) = drop_long_examples(Mixture((dataset,), (1.0,)), 8, cut).datasets
        assert (fitted.train.lengths.tolist(), fitted.val.lengths.tolist()) == left
        assert (fitted.train.too_long, fitted.val.too_long) == (1, 0)
    with pytest.raises(ValueError, match="--context-length"):
        drop_long_examples(Mixture((dataset,), (1.0,)), 1, cut=False)
    assert tokens_per_step(fitted.train, 8, 4) == 24 and tokens_per_step(np.arange(99), 8, 4) == 32
    text = Mixture((text_of(9),), (1.0,))
    assert drop_long_examples(text, 8, cut=False) == text
