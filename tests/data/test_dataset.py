"""Shards and manifest, written, opened and verified; parts and their merging are in test_parts.py."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from engine.core.files import sha256, write_json
from engine.data import writer as dataset_writer
from engine.data.dataset import FORMAT, Examples, ShardedTokens, open_dataset, verify_dataset
from engine.data.ledger import ENDS, LAST, VAL, content_of
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.writer import DatasetWriter, ShardWriter, is_made, new_dataset
from prepare import PrepareConfig, prepare


def add(writer: DatasetWriter, split: str, ids: np.ndarray, size: int, targets: int = 0) -> None:
    """One document of a split, with so many bytes."""
    writer.write(split, ids)
    writer.record(np.array([[1, 2, size, len(ids), targets, VAL * (split == "val") + ENDS + LAST]], np.uint64))


def made(path: Path, origin: dict, force: bool = False, stamp: str = "s", content: str | None = None) -> bool:
    """Whether the dataset is made; its text is only looked at if there is something to see."""
    assert content is not None or stamp == "s"
    return is_made(path, origin, force, stamp, lambda: content)


@pytest.mark.parametrize("lengths", [[10], [3, 4, 3], [1] * 10, [0, 5, 0, 0, 5, 0]])
def test_sharded_tokens_slice_like_one_array(lengths: list[int]):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    tokens = ShardedTokens(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(tokens) == 10
    for start in range(11):
        for stop in range(start, 13):
            np.testing.assert_array_equal(tokens[start:stop], whole[start:stop])
            assert tokens[start:stop].dtype == np.uint16


def test_slice_of_one_shard_is_no_copy():
    shards = np.split(np.arange(10, dtype=np.uint16), [4, 7])
    assert all(ShardedTokens(shards)[start:stop].base is not None for start, stop in ((0, 4), (5, 6), (4, 7), (7, 10)))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_shards_hold_what_was_written(dtype: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dataset_writer, "SHARD_TOKENS", 300)
    ids = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, np.uint32, endpoint=True)
    writer = ShardWriter(tmp_path, "train", dtype)
    for piece in np.split(ids, [0, 1, 299, 300, 301, 950]):  # a piece may be empty, fill a shard, or span several
        writer.write(piece)
    shards = writer.close()
    assert writer.tokens == 1000
    assert [(shard["file"], shard["tokens"]) for shard in shards] == [
        ("train-00000.npy", 300),
        ("train-00001.npy", 300),
        ("train-00002.npy", 300),
        ("train-00003.npy", 100),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [shard["file"] for shard in shards]
    arrays = [np.load(tmp_path / shard["file"], mmap_mode="r") for shard in shards]
    assert all(isinstance(array, np.memmap) and array.dtype == dtype for array in arrays)
    np.testing.assert_array_equal(np.concatenate(arrays), ids)
    assert [shard["sha256"] for shard in shards] == [sha256(path) for path in sorted(tmp_path.iterdir())]


def test_shard_is_what_numpy_saves(tmp_path: Path):
    writer = ShardWriter(tmp_path, "val", "uint16")
    writer.write(np.arange(12345))
    writer.close()
    np.save(tmp_path / "theirs.npy", np.arange(12345, dtype=np.uint16))
    assert (tmp_path / "val-00000.npy").read_bytes() == (tmp_path / "theirs.npy").read_bytes()


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch) -> Path:
    """A dataset of two shards of training tokens and one for validation."""
    monkeypatch.setattr(dataset_writer, "SHARD_TOKENS", 12)
    path = tmp_path / "data"
    with new_dataset(path, ByteTokenizer(), {"val_fraction": 0.1}, "s") as writer:
        for split, text in {"train": "text to train on", "val": "and to check"}.items():
            add(writer, split, ByteTokenizer().encode(text), 2 * len(text))
        assert not path.exists()
    return path


def test_dataset_opens(dataset: Path):
    opened = open_dataset(dataset)
    assert len(opened.train.arrays) == 2
    assert opened.tokenizer.decode(opened.train[:]) == "text to train on"
    assert opened.tokenizer.decode(opened.val[:]) == "and to check"
    assert opened.bytes_per_token("val") == 2


def test_dataset_in_the_making_leaves_nothing_after_an_error(tmp_path: Path):
    with (
        pytest.raises(ValueError, match="the train split has 1 tokens of 1 documents, too few"),
        new_dataset(tmp_path / "data", ByteTokenizer(), {}, "s") as writer,
    ):
        add(writer, "train", np.array([1], np.uint32), 1)
    assert [*tmp_path.iterdir()] == []


def test_dataset_is_made_if_of_the_same_origin(dataset: Path):
    origin, text = {"val_fraction": 0.1}, content_of([np.array([[1, 2]] * 2, np.uint64)])
    assert made(dataset, origin) and not made(dataset, origin, force=True)
    (dataset.parent / "empty").mkdir()
    for name in ("empty", "not there"):
        assert not made(dataset.parent / name, origin)
    message = r"data was made with {}; use --force to replace it, or another --out$"
    with pytest.raises(ValueError, match=message.format("val_fraction 0.1")):
        made(dataset, {"val_fraction": 0.2})
    with pytest.raises(ValueError, match=message.format("other text")):
        made(dataset, origin, stamp="t", content="0")
    for stamp in ("", "t"):  # not known, and newer files
        assert made(dataset, origin, stamp=stamp, content=text)
    assert json.loads((dataset / "prepared_from.json").read_text()) == "t"


def test_a_dataset_s_facts_are_counted(dataset: Path):
    tokens = len({*"text to train on", *"and to check"})
    facts = json.loads((dataset / "manifest.json").read_text())["facts"]
    assert facts == {"documents": 2, "repeats": 1, "longest": 16, "vocabulary": tokens}


def change_manifest(dataset: Path, **changes: object) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text())
    write_json(dataset / "manifest.json", manifest | changes)


def exchange_shards(dataset: Path) -> None:
    (dataset / "train-00000.npy").rename(dataset / "other.npy")
    (dataset / "train-00001.npy").rename(dataset / "train-00000.npy")
    (dataset / "other.npy").rename(dataset / "train-00001.npy")


DAMAGES = {
    "cut manifest": lambda path: (path / "manifest.json").write_text('{"format": 1'),
    "no object": lambda path: (path / "manifest.json").write_text("[]"),
    "other format": lambda path: change_manifest(path, format=FORMAT + 1),
    "no splits": lambda path: change_manifest(path, splits={}),
    "no tokenizer": lambda path: (path / "tokenizer.json").unlink(),
    "other tokenizer": lambda path: CharTokenizer("".join(map(chr, range(257)))).save(path / "tokenizer.json"),
    "no shard": lambda path: (path / "val-00000.npy").unlink(),
    "empty shard": lambda path: (path / "val-00000.npy").write_bytes(b""),
    "cut shard": lambda path: (path / "val-00000.npy").write_bytes((path / "val-00000.npy").read_bytes()[:-1]),
    "other file": lambda path: (path / "val-00000.npy").write_bytes(b"not an array at all"),
    "exchanged shards": exchange_shards,
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


def altered(path: Path, index: int, token: int) -> None:
    tokens = np.load(path)
    tokens[index] = token
    np.save(path, tokens)


def test_verified_once_a_shard_is_hashed_again_when_it_was_touched_or_when_asked(dataset: Path):
    shard = dataset / "train-00001.npy"
    verify_dataset(open_dataset(dataset), again=False)
    before = shard.stat()
    altered(shard, 3, 7)
    with pytest.raises(ValueError, match=r"train-00001\.npy is not as it was written"):
        verify_dataset(open_dataset(dataset), again=False)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a failing disk would: nobody touched it
    verify_dataset(open_dataset(dataset), again=False)
    with pytest.raises(ValueError, match=r"train-00001\.npy is not as it was written"):
        verify_dataset(open_dataset(dataset), again=True)


def test_token_outside_the_vocabulary_is_found(dataset: Path):
    altered(dataset / "val-00000.npy", 5, 257)
    splits = json.loads((dataset / "manifest.json").read_text())["splits"]
    splits["val"]["shards"][0]["sha256"] = sha256(dataset / "val-00000.npy")
    change_manifest(dataset, splits=splits)
    with pytest.raises(ValueError, match=r"can't be used .*val-00000\.npy has token 257 of 257"):
        verify_dataset(open_dataset(dataset), again=False)


# Examples.


@pytest.fixture
def examples(tmp_path: Path, monkeypatch) -> Path:
    """A dataset of examples: of two, three, … tokens, all but the last of each a target that counts; many shards."""
    monkeypatch.setattr(dataset_writer, "SHARD_TOKENS", 5)
    path = tmp_path / "data"
    with new_dataset(path, ByteTokenizer(), {"examples": "pairs"}, "s") as writer:
        for split, lengths in {"train": [2, 3, 4, 5, 6, 7], "val": [3, 3]}.items():
            for length in lengths:
                add(writer, split, np.array([*range(length - 1), ~(length - 1)]), 3, length - 2)
    return path


def test_examples_are_written_and_opened(examples: Path):
    manifest = json.loads((examples / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    assert manifest["dtype"] == "int32" and [train[key] for key in ("documents", "tokens", "targets", "bytes")] == [
        6,
        27,
        15,
        18,
    ]
    assert [entry["file"] for entry in train["lengths"]] == ["train-lengths-00000.npy", "train-lengths-00001.npy"]
    assert [entry["tokens"] for entry in train["lengths"]] == [5, 1]
    assert np.load(examples / "train-lengths-00000.npy").dtype == np.uint32
    opened = open_dataset(examples)
    verify_dataset(opened, again=True)
    assert (len(opened.train), opened.train.num_examples, opened.val.num_examples) == (27, 6, 2)
    for index in range(6):
        found = opened.train.example(index)
        assert found.dtype == np.int32 and found.tolist() == [*range(index + 1), ~(index + 1)]
    assert opened.bytes_per_token("train") == 18 / 15


@pytest.mark.parametrize("cut", [False, True])
def test_examples_are_made_to_fit(cut: bool, examples: Path):
    train = open_dataset(examples).train
    fitting = train.fitting(3, cut)
    assert fitting.too_long == 3 and fitting.lengths.tolist() == [2, 3, 4] + [4, 4, 4] * cut
    assert [fitting.example(i).tolist() for i in range(3)] == [[0, ~1], [0, 1, ~2], [0, 1, 2, ~3]]
    assert not cut or fitting.example(5).tolist() == [0, 1, 2, 3]
    assert len(fitting) == 9 + 12 * cut
    everything = train.fitting(6, cut)
    assert everything.too_long == 0 and everything.lengths.tolist() == train.lengths.tolist()


def test_bits_per_byte_are_of_the_examples_that_are_left(tmp_path: Path):
    """Half of the completions are y, one byte and the end of text, and half 1,000 bytes long."""
    rows = [{"prompt": f"{n}?", "completion": "y" if n % 2 else f"{n}, " * 250} for n in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"prompt_field": "prompt", "completion_field": "completion", "val_fraction": 0.5}
    prepare(PrepareConfig((str(tmp_path / "a.jsonl"),), tokenizer="byte", out=tmp_path / "data", **fields))
    dataset = open_dataset(tmp_path / "data")
    assert dataset.bytes_per_token("val") > 0.99
    assert dataset.fitting(64, cut=False).bytes_per_token("val") == 0.5
    assert dataset.fitting(2000, cut=False).bytes_per_token("val") == dataset.bytes_per_token("val")
    cut = dataset.fitting(64, cut=True)  # whose long ones lost their ends
    val = [cut.val.example(index) for index in range(cut.val.num_examples)]
    ends = sum(int(example[-1] == cut.tokenizer.end_of_text) for example in val)
    targets = sum(int((example[1:] >= 0).sum()) for example in val)
    assert 0 < ends < len(val) and cut.bytes_per_token("val") == (targets - ends) / targets


def test_an_example_with_nothing_to_learn_when_cut_is_left_out():
    tokens = np.array([~1, ~2, ~3, 4, ~5, 6, ~7, 8], np.int32)
    examples = Examples(tokens, np.array([0, 4]), np.array([4, 4]))
    fitting = examples.fitting(2, cut=True)
    assert (fitting.too_long, fitting.num_examples, fitting.example(0).tolist()) == (2, 1, [~5, 6, ~7])
    with pytest.raises(
        ValueError, match=r"^all 2 .* --context-length 2 .* raise it to at least 3, or use --long-examples"
    ):
        examples.fitting(2, cut=False)
    with pytest.raises(ValueError, match=r"^all 1 .* --context-length 2 .* nothing to learn; raise it$"):
        Examples(tokens[:4], np.array([0]), np.array([4])).fitting(2, cut=True)


def rewrite_lengths(path: Path, lengths: list[int]) -> None:
    np.save(path / "val-lengths-00000.npy", np.array(lengths, np.uint32))


def miscount_examples(path: Path) -> None:
    splits = json.loads((path / "manifest.json").read_text())["splits"]
    splits["val"]["documents"] += 1
    change_manifest(path, splits=splits)


DAMAGES_OF_EXAMPLES = {
    "miscounted examples": miscount_examples,
    "no lengths": lambda path: (path / "val-lengths-00000.npy").unlink(),
    "fewer lengths": lambda path: rewrite_lengths(path, [6]),
    "other lengths": lambda path: rewrite_lengths(path, [3, 2]),
    "an empty example": lambda path: rewrite_lengths(path, [0, 6]),
    "lengths of another type": lambda path: np.save(path / "val-lengths-00000.npy", np.array([3, 3], np.int32)),
    "tokens of another type": lambda path: change_manifest(path, dtype="uint32"),
}


@pytest.mark.parametrize("damage", DAMAGES_OF_EXAMPLES.values(), ids=DAMAGES_OF_EXAMPLES.keys())
def test_damaged_examples_are_refused_with_a_remedy(damage, examples: Path):
    damage(examples)
    with pytest.raises(ValueError, match=r"can't be used \(.*\); prepare it again"):
        open_dataset(examples)


@pytest.mark.parametrize("name, index, value", [("val-lengths-00000", slice(2), [1, 5]), ("train-00003", 0, 200)])
def test_examples_are_verified(name: str, index: int | slice, value: int, examples: Path):
    altered(examples / f"{name}.npy", index, value)
    with pytest.raises(ValueError, match=rf"{name}\.npy is not as it was written"):
        verify_dataset(open_dataset(examples), again=False)


@pytest.mark.parametrize("token", [257, ~257])
def test_example_s_token_outside_the_vocabulary_is_found(token: int, examples: Path):
    altered(examples / "train-00002.npy", 1, token)
    splits = json.loads((examples / "manifest.json").read_text())["splits"]
    splits["train"]["shards"][2]["sha256"] = sha256(examples / "train-00002.npy")
    change_manifest(examples, splits=splits)
    with pytest.raises(ValueError, match=r"can't be used .*train-00002\.npy has token 257 of 257"):
        verify_dataset(open_dataset(examples), again=False)


@pytest.mark.parametrize("name", ["val-lengths-00000.npy", "train-lengths-00001.npy"])
def test_what_lacks_its_lengths_is_not_made(name: str, examples: Path):
    origin = {"examples": "pairs"}
    assert made(examples, origin)
    (examples / name).write_bytes((examples / name).read_bytes()[:-1])
    assert not made(examples, origin)
    with pytest.raises(ValueError, match="was made with examples pairs; use --force"):
        made(examples, {})
