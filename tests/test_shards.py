"""Token shards, and which windows of them make up a batch."""

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.files import sha256, write_json
from engine.shards import (
    FORMAT,
    IGNORED,
    Batches,
    ShardedTokens,
    ShardWriter,
    derived_seed,
    evaluation_batch,
    evaluation_windows,
    gather,
    open_dataset,
    permute,
    window_starts,
    windows_per_epoch,
)
from engine.tokenizer import ByteTokenizer, CharTokenizer

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


def test_batch_is_the_same_after_any_other():
    alone = window_starts(1001, 8, seed=3, step=7, batch_size=6)
    for step in (0, 100, 7, 6):
        window_starts(1001, 8, seed=step, step=step, batch_size=6)
    np.testing.assert_array_equal(window_starts(1001, 8, seed=3, step=7, batch_size=6), alone)


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


@pytest.mark.parametrize("lengths", [[10], [3, 4, 3], [1] * 10, [0, 5, 0, 0, 5, 0]])
def test_sharded_tokens_slice_like_one_array(lengths: list[int]):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    tokens = ShardedTokens(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(tokens) == 10
    for start in range(11):
        for stop in range(start, 13):
            np.testing.assert_array_equal(tokens[start:stop], whole[start:stop])
            assert tokens[start:stop].dtype == np.uint16


def test_gather_gives_windows_as_embeddings_want_them():
    tokens = ShardedTokens([np.array([1, 2, 3], np.uint16), np.array([4, 65535], np.uint16)])
    windows = gather(tokens, np.array([2, 0]), 3)
    assert windows.dtype == np.int64
    assert windows.tolist() == [[3, 4, 65535], [1, 2, 3]]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_a_batch_whatever_step_they_ask_for(processes: int):
    tokens = ShardedTokens(np.split(np.arange(1001, dtype=np.uint16), [300, 500]))
    shares = [slice(rank * 6 // processes, (rank + 1) * 6 // processes) for rank in range(processes)]
    loaders = [Batches(tokens, 8, 1, 6, share, torch.device("cpu")) for share in shares]
    for step in (0, 1, 2, 30, 7, 8, 7):  # the next is made ahead; another must not come instead
        parts = [loader.get(step) for loader in loaders]
        inputs, targets = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
        np.testing.assert_array_equal(inputs, gather(tokens, window_starts(1001, 8, 1, step, 6), 8))
        np.testing.assert_array_equal(targets, inputs + 1)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_shards_hold_what_was_written(dtype: str, tmp_path: Path):
    ids = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, np.uint32, endpoint=True)
    writer = ShardWriter(tmp_path, "train", dtype, shard_tokens=300)
    for piece in np.split(ids, [0, 1, 299, 300, 301, 950]):  # a piece may be empty, fill a shard, or span several
        writer.write(piece)
    counts = writer.close()
    assert counts["tokens"] == 1000
    assert [(shard["file"], shard["tokens"]) for shard in counts["shards"]] == [
        ("train-00000.npy", 300),
        ("train-00001.npy", 300),
        ("train-00002.npy", 300),
        ("train-00003.npy", 100),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [shard["file"] for shard in counts["shards"]]
    arrays = [np.load(tmp_path / shard["file"], mmap_mode="r") for shard in counts["shards"]]
    assert all(isinstance(array, np.memmap) and array.dtype == dtype for array in arrays)
    np.testing.assert_array_equal(np.concatenate(arrays), ids)
    assert [shard["sha256"] for shard in counts["shards"]] == [sha256(path) for path in sorted(tmp_path.iterdir())]


@pytest.mark.parametrize("num_tokens", [9, 10, 16, 17, 18, 100, 129])
def test_evaluation_scores_each_token_but_the_first_once(num_tokens: int):
    context_length = 8
    tokens = np.arange(num_tokens)
    inputs, targets = evaluation_batch(tokens, *evaluation_windows(num_tokens, context_length), context_length)
    scored = targets != IGNORED
    assert sorted(targets[scored].tolist()) == [*range(1, num_tokens)]
    np.testing.assert_array_equal(inputs[scored] + 1, targets[scored])
    assert scored.any(axis=1).all()


def test_evaluation_with_a_limit_scores_about_that_many_spread_evenly():
    starts, scored_before = evaluation_windows(100_001, 10, limit=1000)
    assert len(starts) == len(np.unique(starts)) == 100
    assert starts[0] == 0 and starts[-1] == 100_001 - 10 - 1
    assert np.ptp(np.diff(starts)) <= 10
    assert not scored_before.any()


@pytest.mark.parametrize("limit", [1, 10, 101, 99999])
def test_evaluation_with_any_limit_scores_something(limit: int):
    starts, scored_before = evaluation_windows(101, 10, limit=limit)
    assert 0 < len(starts) <= 10
    assert (scored_before < 10).all()


@pytest.mark.parametrize("function", [lambda: window_starts(8, 8, 0, 0, 1), lambda: evaluation_windows(8, 8)])
def test_too_few_tokens_for_a_window(function):
    with pytest.raises(ValueError, match=r"^8 tokens are too few .* lower --context-length to at most 7$"):
        function()


def test_derived_seeds_differ():
    parts = [(0,), (1,), (-1,), (0, 0), (0, 1), (1, 0)]
    assert len({derived_seed(*part) for part in parts}) == len(parts)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset of two shards of training tokens and one for validation."""
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    splits = {}
    for split, text in {"train": "text to train on", "val": "and to check"}.items():
        writer = ShardWriter(tmp_path, split, "uint16", shard_tokens=12)
        writer.write(ByteTokenizer().encode(text))
        splits[split] = writer.close() | {"bytes": 2 * len(text)}
    identity = {"kind": "byte", "sha256": sha256(tmp_path / "tokenizer.json")}
    manifest = {"format": FORMAT, "tokenizer": identity, "vocab_size": 257, "dtype": "uint16", "splits": splits}
    write_json(tmp_path / "manifest.json", manifest)
    return tmp_path


def test_dataset_opens(dataset: Path):
    opened = open_dataset(dataset)
    assert len(opened.train.arrays) == 2
    assert opened.tokenizer.decode(opened.train[:]) == "text to train on"
    assert opened.tokenizer.decode(opened.val[:]) == "and to check"
    assert opened.bytes_per_token("val") == 2


def change_manifest(dataset: Path, **changes: object) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    write_json(dataset / "manifest.json", manifest | changes)


DAMAGES = {
    "cut manifest": lambda path: (path / "manifest.json").write_text('{"format": 1'),
    "no object": lambda path: (path / "manifest.json").write_text("[]"),
    "other format": lambda path: change_manifest(path, format=FORMAT + 1),
    "no splits": lambda path: change_manifest(path, splits={}),
    "no tokenizer": lambda path: (path / "tokenizer.json").unlink(),
    "other tokenizer": lambda path: CharTokenizer("abc").save(path / "tokenizer.json"),
    "no shard": lambda path: (path / "val-00000.npy").unlink(),
    "empty shard": lambda path: (path / "val-00000.npy").write_bytes(b""),
    "cut shard": lambda path: (path / "val-00000.npy").write_bytes((path / "val-00000.npy").read_bytes()[:-1]),
    "other file": lambda path: (path / "val-00000.npy").write_bytes(b"not an array at all"),
    "shorter shard": lambda path: np.save(path / "val-00000.npy", np.zeros(11, np.uint16)),
    "other dtype": lambda path: np.save(path / "val-00000.npy", np.zeros(12, np.uint32)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_dataset_is_refused_with_a_remedy(damage, dataset: Path):
    damage(dataset)
    path = re.escape(str(dataset))
    with pytest.raises(ValueError, match=rf"^{path} can't be used \(.*\); prepare it again with --force --out {path}$"):
        open_dataset(dataset)


def test_folder_without_a_dataset_is_told_how_to_get_one(tmp_path: Path):
    with pytest.raises(ValueError, match=f"holds no dataset; make it with: python prepare.py INPUT --out {tmp_path}$"):
        open_dataset(tmp_path)
