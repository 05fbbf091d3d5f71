"""Which windows make up a batch, and which targets count."""

import tracemalloc

import numpy as np
import pytest
import torch

from engine.batches import (
    Batches,
    check_sizes,
    derived_seed,
    evaluation_batches,
    evaluation_windows,
    gather,
    permute,
    window_starts,
    windows_per_epoch,
)
from engine.dataset import ShardedTokens
from engine.kernels import IGNORED

SIZES = [1, 2, 3, 4, 5, 15, 16, 17, 100, 1000, 4097, 65536]


def permutation(size: int, key: int) -> np.ndarray:
    return permute(np.arange(size, dtype=np.uint64), size, np.full(size, key, np.uint64))


def epoch_of_starts(num_tokens: int, context_length: int, seed: int, epoch: int) -> np.ndarray:
    """The starts of all windows of one epoch, sorted, taken one window at a time."""
    size = windows_per_epoch(num_tokens, context_length)
    serials = range(epoch * size, (epoch + 1) * size)
    return np.sort(np.concatenate([window_starts(num_tokens, context_length, seed, step, 1) for step in serials]))


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
    assert mixed.tolist() == [permutation(100, 3)[5], permutation(100, 7)[5], permutation(100, 3)[6]]


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
    orders = {tuple(window_starts(8001, 8, seed, step, 999) // 8) for seed in (0, 1, -1) for step in (0, 1)}
    assert windows_per_epoch(8001, 8) == 999 and len(orders) == 6


def test_a_run_once_begun_finds_the_same_windows_in_every_version():
    assert window_starts(1001, 8, seed=3, step=7, batch_size=6).tolist() == [291, 187, 35, 131, 411, 251]
    assert derived_seed(1, 2, 3) == 6053372350886475030
    batches = Batches(np.arange(1001, dtype=np.uint16), 8, 1, 6, slice(None), torch.device("cpu"))
    batches.get(2)
    assert batches.digest == 10327528389


@pytest.mark.parametrize("step", [0, 9, 10])  # 12 windows a batch, 123 an epoch: batch 10 spans two
def test_batch_is_the_windows_of_its_serial_numbers(step: int):
    assert windows_per_epoch(1000, 8) == 123
    whole = window_starts(1000, 8, 0, step, 12)
    one_by_one = [window_starts(1000, 8, 0, serial, 1) for serial in range(step * 12, step * 12 + 12)]
    np.testing.assert_array_equal(whole, np.concatenate(one_by_one))


@pytest.mark.parametrize("step", [0, 10**9])
def test_a_trillion_tokens_cost_no_more_than_a_million(step: int):
    window_starts(10**6, 1024, 0, 0, 8)  # whatever NumPy sets up once
    tracemalloc.start()
    starts = window_starts(10**12, 1024, 0, step, 512)
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
        np.testing.assert_array_equal(inputs, gather(tokens, window_starts(1001, 8, 1, step, 6), 8))
        np.testing.assert_array_equal(targets, inputs + 1)
        alone.get(step)
        assert sum(loader.digest for loader in loaders) == alone.digest
        digests.add(alone.digest)
    assert len(digests) == 6


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [9, 10, 16, 17, 18, 100, 129])
def test_each_token_but_the_first_counts_once_in_an_evaluation(num_tokens: int, processes: int):
    tokens = np.arange(num_tokens)
    counted, lengths = [], set()
    for rank in range(processes):
        found = [*evaluation_batches(tokens, 8, 0, rank, processes, most_tokens=24)]
        assert all(pair.dtype == torch.int64 and pair.shape[1] <= 3 and pair.shape[2] == 8 for pair in found)
        inputs, targets = torch.cat(found, dim=1)
        counts = targets != IGNORED
        assert (inputs[counts] + 1 == targets[counts]).all()
        counted += targets[counts].tolist()
        lengths.add((len(found), len(targets)))
    assert sorted(counted) == [*range(1, num_tokens)]
    assert len(lengths) == 1  # processes that wait for each other take as many


def test_evaluation_with_a_limit_counts_about_that_many_spread_evenly():
    starts, counted_before = evaluation_windows(100_001, 10, limit=1000)
    assert len(starts) == len(np.unique(starts)) == 100
    assert starts[0] == 0 and starts[-1] == 100_001 - 10 - 1
    assert np.ptp(np.diff(starts)) <= 10
    assert not counted_before.any()


@pytest.mark.parametrize("limit", [1, 10, 101, 99999])
def test_evaluation_with_any_limit_counts_something(limit: int):
    starts, counted_before = evaluation_windows(101, 10, limit=limit)
    assert 0 < len(starts) <= 10
    assert (counted_before < 10).all()


@pytest.mark.parametrize("function", [lambda: window_starts(8, 8, 0, 0, 1), lambda: evaluation_windows(8, 8)])
def test_too_few_tokens_for_a_window(function):
    with pytest.raises(ValueError, match=r"^8 tokens are too few .* lower --context-length to at most 7$"):
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
        ((6, 4, None), "^--batch-size 6 does not divide over 4 processes; try 4 or 8$"),
        ((2, 4, None), "^--batch-size 2 does not divide over 4 processes; try 4$"),
        ((12, 2, 4), "^--micro-batch-size 4 does not divide 6; try one of 1, 2, 3, 6$"),
    ],
)
def test_batch_that_does_not_divide_is_refused(sizes, message: str):
    with pytest.raises(ValueError, match=message):
        check_sizes(*sizes)
