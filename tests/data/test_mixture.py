"""Several datasets as one: weights, names, losses, and datasets that cannot be mixed."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import make_dataset

from engine.core.errors import UserError
from engine.data.batches import dataset_paths, open_mixture
from engine.data.dataset import open_dataset, verify_dataset
from engine.data.order import assign_to_texts

MIXES = [(0.7, 0.3), (1, 1), (1, 99), (0.999, 0.001), (0.2, 0.5, 0.3), (0.01, 0.01, 0.98)]
MIXES += [(3, 1, 1, 2, 1e-9)]


@pytest.mark.parametrize("batch_size", [1, 7, 32])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_counts_follow_the_weights_and_indices_are_consecutive(mix, batch_size):
    weights = [weight / sum(mix) for weight in mix]
    sequences = np.arange(2000 * batch_size, dtype=np.uint64)
    dataset_index, index = assign_to_texts(weights, sequences)
    for batch in np.split(np.arange(len(sequences)), 2000)[::97]:
        assigned = assign_to_texts(weights, sequences[batch])
        assert (np.array(assigned) == (dataset_index[batch], index[batch])).all()
    for number, weight in enumerate(weights):
        is_own = dataset_index == number
        assert index[is_own].tolist() == [*range(is_own.sum())]
        errors = is_own.cumsum() - weight * np.arange(1, len(sequences) + 1)
        assert np.abs(errors).max() < len(weights)  # not random
        assert is_own.mean() == pytest.approx(weight, abs=0.005)


@pytest.mark.parametrize("start", [0, 2**32 - 3, 10**12, 10**15, 2**62])
def test_assignment_is_exact_for_large_indices(start: int):
    sequences = np.arange(start, start + 1000, dtype=np.uint64)
    weight = round(0.3 * 2**32)
    expected = []
    for n in range(start, start + 1000):
        before = n * weight >> 32
        is_first = (n + 1) * weight >> 32 > before
        expected.append((0, before) if is_first else (1, n - before))
    dataset_index, index = assign_to_texts((0.3, 0.7), sequences)
    assert [*zip(dataset_index.tolist(), index.tolist(), strict=True)] == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with datasets: a/x and b/x of bytes, c of characters, pairs of bytes."""
    folder = tmp_path_factory.mktemp("mixture")
    make_dataset(folder, "one two " * 60, out=folder / "a/x")
    make_dataset(folder, "ünö " * 300, out=folder / "b/x")
    make_dataset(folder, "abc" * 99, out=folder / "c", tokenizer="char")
    pairs = [{"p": f"{n}", "c": "x"} for n in range(50)]
    fields = {"prompt_field": "p", "completion_field": "c"}
    make_dataset(folder, pairs, out=folder / "pairs", **fields)
    return folder


@pytest.fixture
def paths(folder: Path) -> list[Path]:
    return [folder / "a/x", folder / "b/x"]


def test_a_dataset_is_a_mixture_of_one(paths):
    data = open_mixture(paths[:1])
    assert data.datasets == (data,) and data.weights == (1.0,) and data.names == ["x"]
    assert data.sha256 == open_dataset(paths[0]).sha256
    assert not [key for key in data.evaluation_record([2.0]) if "/" in key]


def test_weights_are_the_tokens_by_default_or_those_of_mix(paths):
    mixture = open_mixture(paths)
    sizes = [len(dataset.train) for dataset in mixture.datasets]
    assert mixture.weights == pytest.approx([size / sum(sizes) for size in sizes])
    assert len(mixture.train) == sum(sizes)
    assert open_mixture(paths, (6, 2)).weights == (0.75, 0.25)
    assert open_mixture(paths, (1e308, 1e308)).weights == (0.5, 0.5)
    assert open_mixture(paths, (1e308, 5e-324)).weights == pytest.approx((1, 0), abs=1e-9)
    assert open_mixture(paths, (1, 3)).epoch_tokens == [sizes[0] * 4, sizes[1] * 4 / 3]


def test_a_mixture_has_its_own_hash_and_documents(paths):
    choices = (paths, paths[::-1], paths[:1], paths[1:])
    assert len({open_mixture(choice).sha256 for choice in choices}) == 4
    counts = [open_dataset(path).manifest["splits"]["train"]["documents"] for path in paths]
    assert open_mixture(paths).manifest["splits"]["train"]["documents"] == sum(counts)


def test_an_evaluation_has_the_mean_by_the_weights_and_each_loss(paths):
    mixture = open_mixture(paths, (3, 1))
    sizes = [dataset.bytes_per_token("val") for dataset in mixture.datasets]
    mean_size = 0.75 * sizes[0] + 0.25 * sizes[1]
    assert mixture.evaluation_record([2.0, 4.0]) == pytest.approx(
        {
            "val_loss": 2.5,
            "val_perplexity": math.exp(2.5),
            "val_bits_per_byte": 2.5 / math.log(2) / mean_size,
            "val_loss/x": 2,
            "val_loss/x-2": 4,
            "val_bits_per_byte/x": 2 / math.log(2) / sizes[0],
            "val_bits_per_byte/x-2": 4 / math.log(2) / sizes[1],
        }
    )
    first, second = mixture.datasets
    datasets = (first, second, replace(first, path=Path("x-2")), first)
    assert replace(mixture, mixed=datasets).names == ["x", "x-2", "x-2-2", "x-3"]


def test_every_dataset_is_verified(paths, tmp_path):
    copy = Path(shutil.copytree(paths[1], tmp_path / "x"))
    shard = copy / "train-00000.npy"
    verify_dataset(open_mixture([paths[0], copy]), force=True)
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    with pytest.raises(UserError, match=rf"^{copy}: .*train-00000\.npy: SHA-256"):
        verify_dataset(open_mixture([paths[0], copy]), force=True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/x", "c"], r"c: .*tokenizer.*a/x.*python prepare\.py"),
        (["a/x", "pairs"], "pairs: examples"),
        (["pairs", "a/x"], "pairs: examples"),
        (["a/x", "none"], r"none: .*prepare\.py"),
        (["a/x", "b/x", "a/../a/x"], "--data: .*twice"),
    ],
)
def test_datasets_that_cannot_be_mixed_are_refused(folder, names, message):
    with pytest.raises(UserError, match=message) as caught:
        open_mixture([folder / name for name in names])
    assert "\n" not in str(caught.value)


def test_data_is_one_folder_or_several_with_a_weight_each():
    assert dataset_paths("a") == dataset_paths(Path("a")) == dataset_paths(["a"]) == (Path("a"),)
    assert dataset_paths(("a", Path("b")), (1, 2)) == (Path("a"), Path("b"))
    wrong_counts = [((), None, "--data"), ("a", (1,), "--mix"), (("a", "b"), (1,), "--mix")]
    for data, mix, flag in [*wrong_counts, (("a", "b"), (1, 1, 1), "--mix")]:
        with pytest.raises(UserError, match=f"^{flag}: "):
            dataset_paths(data, mix)
