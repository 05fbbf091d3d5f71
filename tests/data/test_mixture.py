"""Several datasets as one: shares, names, losses, and what can't be mixed."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.core.errors import UserError
from engine.data.mixture import Mixture, as_paths, assign_to_datasets, open_mixture
from prepare import PrepareConfig, prepare

MIXES = [
    (0.7, 0.3),
    (1, 1),
    (1, 99),
    (0.999, 0.001),
    (0.2, 0.5, 0.3),
    (0.01, 0.01, 0.98),
    (3, 1, 1, 2, 1e-9),
]


def shares_of(mix: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(weight / sum(mix) for weight in mix)


@pytest.mark.parametrize("batch_size", [1, 7, 32])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_each_part_has_its_share_at_every_moment_and_its_numbers_come_in_line(mix, batch_size):
    shares, serial = shares_of(mix), np.arange(2000 * batch_size, dtype=np.uint64)
    part, number = assign_to_datasets(shares, serial)
    for step in range(0, 2000, 97):  # whatever comes before, or beside it
        batch = slice(step * batch_size, (step + 1) * batch_size)
        assert [*map(np.ndarray.tolist, assign_to_datasets(shares, serial[batch]))] == [
            part[batch].tolist(),
            number[batch].tolist(),
        ]
    for index, share in enumerate(shares):
        own = part == index
        assert number[own].tolist() == [*range(own.sum())]
        assert own.mean() == pytest.approx(share, abs=0.005)
        assert np.abs(own.cumsum() - share * np.arange(1, len(own) + 1)).max() < len(shares)  # not random


@pytest.mark.parametrize("start", [0, 2**32 - 3, 10**12, 10**15, 2**62])
def test_sequences_far_out_are_drawn_exactly(start: int):
    serial = np.arange(start, start + 1000, dtype=np.uint64)
    share = round(0.3 * 2**32)
    part, number = assign_to_datasets((0.3, 0.7), serial)
    for n, found, own in zip(range(start, start + 1000), part.tolist(), number.tolist(), strict=True):
        before, after = n * share >> 32, (n + 1) * share >> 32
        assert (found, own) == ((0, before) if after > before else (1, n - before))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with datasets: a/x and b/x of bytes, c of characters, pairs of bytes."""
    folder = tmp_path_factory.mktemp("mixture")
    texts = {
        "a/x": ("one two " * 60, "byte"),
        "b/x": ("ünö " * 300, "byte"),
        "c": ("abc" * 99, "char"),
    }
    for name, (text, tokenizer) in texts.items():
        (folder / "text.txt").write_text(text, encoding="utf-8")
        prepare(PrepareConfig((str(folder / "text.txt"),), tokenizer=tokenizer, out=folder / name))
    (folder / "pairs.jsonl").write_text("".join(json.dumps({"p": f"{n}", "c": "x"}) + "\n" for n in range(50)))
    fields = {"prompt_field": "p", "completion_field": "c", "tokenizer": "byte"}
    prepare(PrepareConfig((str(folder / "pairs.jsonl"),), out=folder / "pairs", **fields))
    return folder


def test_one_dataset_is_itself(place):
    one = open_mixture([place / "a/x"])
    (dataset,) = one.datasets
    assert one.weights == (1.0,) and one.train is dataset.train and one.manifest == dataset.manifest
    assert (one.sha256, one.path, one.names) == (dataset.sha256, dataset.path, ["x"])
    assert one.evaluation([2.0]).keys() == {"val_loss", "val_bits_per_byte", "val_perplexity"}


def test_several_are_drawn_from_by_their_tokens_or_as_asked(place):
    paths = [place / "a/x", place / "b/x"]
    tokens = [len(one.train) for one in open_mixture(paths).datasets]
    assert open_mixture(paths).weights == pytest.approx([size / sum(tokens) for size in tokens])
    assert len(open_mixture(paths).train) == sum(tokens)
    assert open_mixture(paths, (6, 2)).weights == (0.75, 0.25)
    assert open_mixture(paths, (1e308, 1e308)).weights == (0.5, 0.5)
    assert open_mixture(paths, (1e308, 5e-324)).weights == pytest.approx((1, 0), abs=1e-9)
    assert open_mixture(paths, (1, 3)).epochs == [tokens[0] * 4, tokens[1] * 4 / 3]
    hashes = {open_mixture(some).sha256 for some in (paths, paths[::-1], paths[:1], paths[1:])}
    assert len(hashes) == 4
    counts = [{"splits": {"train": {"documents": count}}} for count in (2, 3)]
    pairs = zip(open_mixture(paths).datasets, counts, strict=True)
    datasets = tuple(replace(one, manifest=one.manifest | count) for one, count in pairs)
    assert Mixture(datasets, (0.5, 0.5)).manifest["splits"]["train"]["documents"] == 5


def test_an_evaluation_is_the_mean_by_the_shares_and_that_of_each(place):
    mixture = open_mixture([place / "a/x", place / "b/x"], (3, 1))
    found = mixture.evaluation([2.0, 4.0])
    assert found["val_loss"] == 2.5 and found["val_perplexity"] == pytest.approx(math.exp(2.5))
    drawn = sum(share * one.bytes_per_token("val") for share, one in zip((0.75, 0.25), mixture.datasets, strict=True))
    assert found["val_bits_per_byte"] == pytest.approx(2.5 / math.log(2) / drawn)
    assert (found["val_loss/x"], found["val_loss/x-2"]) == (2, 4)
    datasets = mixture.datasets
    assert found["val_bits_per_byte/x-2"] == 4 / math.log(2) / datasets[1].bytes_per_token("val")
    three = Mixture((*datasets, datasets[0], datasets[1]), (0.25,) * 4)
    assert three.names == ["x", "x-2", "x-3", "x-4"]


def test_every_dataset_is_verified(place, tmp_path):
    moved = Path(shutil.copytree(place / "b/x", tmp_path / "x"))
    content = (moved / "train-00000.npy").read_bytes()
    open_mixture([place / "a/x", moved]).verify(again=True)
    (moved / "train-00000.npy").write_bytes(content[:-1] + b"\1")
    with pytest.raises(ValueError, match=f"^{moved}: can't be used .*train-00000.npy: SHA-256"):
        open_mixture([place / "a/x", moved]).verify(again=True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a/x", "c"], "c: .*tokenizer.*a/x.*python prepare.py"),
        (["a/x", "b/x", "a/../a/x"], "x: .*same dataset.*a/x"),
        (["a/x", "pairs"], "pairs: examples"),
        (["pairs", "a/x"], "pairs: examples"),
        (["a/x", "none"], "none: .*prepare.py"),
    ],
)
def test_what_can_not_be_mixed_is_refused(place, names, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_mixture([place / name for name in names])
    assert "\n" not in str(caught.value)
    assert open_mixture([place / "pairs"]).train is not None


def test_folders_of_datasets_are_one_or_several_with_a_share_each():
    assert as_paths("a") == as_paths(Path("a")) == as_paths(["a"]) == (Path("a"),)
    assert as_paths(("a", Path("b")), (1, 2)) == (Path("a"), Path("b"))
    wrong = [((), None, "--data"), ("a", (1,), "--mix"), (("a", "b"), (1,), "--mix")]
    for data, mix, flag in [*wrong, (("a", "b"), (1, 1, 1), "--mix")]:
        with pytest.raises(UserError, match=f"^{flag}: "):
            as_paths(data, mix)
