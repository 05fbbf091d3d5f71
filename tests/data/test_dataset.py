"""Datasets as they are opened, verified and made to fit; and folders that must not be replaced."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_dataset, write_lines

from engine.core.errors import UserError
from engine.core.files import sha256, write_json
from engine.data.dataset import (
    FORMAT_VERSION,
    hash_manifest,
    is_up_to_date,
    open_dataset,
    verify_dataset,
)
from engine.data.shards.shard_file import ShardedTokens, ShardWriter
from engine.data.tokenizer import CharTokenizer


@pytest.mark.parametrize("lengths", [[10], [3, 4, 3], [1] * 10, [0, 5, 0, 0, 5, 0]])
def test_sharded_tokens_slice_like_one_array_without_a_copy(lengths: list[int]):
    joined = np.arange(sum(lengths), dtype=np.uint16)
    shards = np.split(joined, np.cumsum(lengths)[:-1])
    tokens = ShardedTokens(shards)
    assert len(tokens) == 10
    for start in range(11):
        for stop in range(start, 13):
            np.testing.assert_array_equal(tokens[start:stop], joined[start:stop])
            assert tokens[start:stop].dtype == np.uint16
    for start, shard in zip(tokens.starts, shards, strict=False):
        assert len(shard) == 0 or np.shares_memory(tokens[start : start + len(shard)], joined)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_shard_is_a_file_as_numpy_saves_it(dtype: str, tmp_path: Path):
    ids = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, 1000, dtype, endpoint=True)
    writer = ShardWriter(tmp_path / "train-00007.npy")
    for part in np.split(ids, [0, 1, 299, 300, 301, 950]):
        writer.write(part)
    np.save(tmp_path / "saved.npy", ids)
    (shard,) = writer.close()
    digest = sha256(tmp_path / "saved.npy")
    assert shard == {"file": "train-00007.npy", "tokens": 1000, "sha256": digest}
    assert sha256(tmp_path / "train-00007.npy") == digest
    assert not ShardWriter(tmp_path / "empty.npy").close()
    assert not (tmp_path / "empty.npy").exists()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the datasets text, of two shards a split, and examples, of three."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in ("texts", "pairs"):
        (folder / name).mkdir()
    for number in (1, 2):
        (folder / "texts" / f"{number}.txt").write_text("text to train on and to check" * number)
    for number in range(3):
        rows = [{"q": "?" * n, "a": "!" * n} for n in range(1 + number, 30, 3)]
        write_lines(folder / "pairs" / f"{number}.jsonl", rows)
    settings = {"prompt_field": "q", "completion_field": "a", "val_fraction": 0.3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.data.documents.corpus.MIN_UNIT_BYTES", 1)
        make_dataset(folder, folder / "texts", out=folder / "text")
        make_dataset(folder, folder / "pairs", out=folder / "examples", **settings)
    return folder


@pytest.fixture
def text(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared / "text", tmp_path / "text"))


@pytest.fixture
def examples(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared / "examples", tmp_path / "examples"))


# Corrupted files.


def change_manifest(dataset: Path, **changes: object) -> None:
    manifest = json.loads((dataset / "manifest.json").read_text()) | changes
    write_json(dataset / "manifest.json", manifest | {"sha256": hash_manifest(manifest)})


def change_split(dataset: Path, split: str, **changes: object) -> None:
    splits = json.loads((dataset / "manifest.json").read_text())["splits"]
    change_manifest(dataset, splits=splits | {split: splits[split] | changes})


def change_lengths(dataset: Path, first: int, second: int) -> None:
    path = dataset / "val-lengths-00000.npy"
    lengths = np.load(path)
    np.save(path, np.append(np.uint32([first, second]), lengths[2:]))


VAL = "val-00000.npy"
DAMAGES: dict[tuple[str, str], Callable[[Path], object]] = {
    ("text", "cut manifest"): lambda path: (path / "manifest.json").write_text('{"format": 1'),
    ("text", "another format"): lambda path: change_manifest(path, format=FORMAT_VERSION + 1),
    ("text", "altered source"): lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('source": "', 'source": "_')
    ),
    ("text", "no tokenizer"): lambda path: (path / "tokenizer.json").unlink(),
    ("text", "another tokenizer"): lambda path: CharTokenizer("abc").save(path / "tokenizer.json"),
    ("text", "no shard"): lambda path: (path / VAL).unlink(),
    ("text", "cut shard"): lambda path: (path / VAL).write_bytes((path / VAL).read_bytes()[:-1]),
    ("text", "another dtype"): lambda path: np.save(
        path / VAL, np.load(path / VAL).astype(np.uint32)
    ),
    ("text", "a path outside"): lambda path: change_split(
        path, "val", shards=[{"file": "../text.txt", "tokens": 1, "sha256": ""}]
    ),
    ("examples", "no targets"): lambda path: change_split(path, "val", targets=0),
    ("examples", "an empty example"): lambda path: change_lengths(
        path, 0, np.load(path / "val-lengths-00000.npy")[:2].sum()
    ),
}


@pytest.mark.parametrize("case", DAMAGES, ids=" ".join)
def test_corrupted_files_are_refused(case: tuple[str, str], request):
    path = request.getfixturevalue(case[0])
    DAMAGES[case](path)
    pattern = rf"^{re.escape(str(path))}: can't be used \([^\n]*--force[^\n]*$"
    with pytest.raises(UserError, match=pattern):
        open_dataset(path)
    if (path / "tokenizer.json").exists():
        with pytest.raises(UserError, match=pattern):
            is_up_to_date(path, {}, False, "", str)


def test_a_folder_without_a_dataset_is_refused_with_the_command(tmp_path: Path):
    with pytest.raises(UserError, match=rf"python prepare\.py {tmp_path}$"):
        open_dataset(tmp_path)
    (tmp_path / "checkpoints").mkdir()  # of a run, which is not text to prepare
    with pytest.raises(UserError, match=r"python prepare\.py INPUT$"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("name", "file"), [("text", "train-00001"), ("examples", "val-lengths-00000")]
)
def test_a_changed_shard_is_found(name: str, file: str, request):
    path = request.getfixturevalue(name)
    shard = path / f"{file}.npy"
    verify_dataset(open_dataset(path), force=False)
    stat = shard.stat()
    np.save(shard, np.load(shard)[::-1])
    with pytest.raises(UserError, match=rf"{file}\.npy: SHA-256"):
        verify_dataset(open_dataset(path), force=False)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a failing disk leaves it
    verify_dataset(open_dataset(path), force=False)
    with pytest.raises(UserError, match=rf"{file}\.npy: SHA-256"):
        verify_dataset(open_dataset(path), force=True)


@pytest.mark.parametrize("token", [257, ~257])
def test_a_token_outside_the_vocabulary_is_found(token: int, examples: Path):
    path = examples / "train-00002.npy"
    tokens = np.load(path)
    tokens[1] = token
    np.save(path, tokens)
    shards = json.loads((examples / "manifest.json").read_text())["splits"]["train"]["shards"]
    shards[2]["sha256"] = sha256(path)
    change_split(examples, "train", shards=shards)
    with pytest.raises(UserError, match=r"train-00002\.npy has token 257"):
        verify_dataset(open_dataset(examples), force=False)


# Examples that are too long.


def test_bytes_per_token_are_of_the_examples_that_are_kept(tmp_path: Path):
    """Half of the completions are y, one byte and the end of text, and half have 1,000 bytes."""
    rows = [{"p": f"{n}?", "c": "y" if n % 2 else f"{n}, " * 250} for n in range(100)]
    fields: dict[str, Any] = {"prompt_field": "p", "completion_field": "c", "val_fraction": 0.5}
    dataset = open_dataset(make_dataset(tmp_path, rows, **fields))
    assert dataset.bytes_per_token("val") > 0.99
    assert dataset.drop_long_examples(64).bytes_per_token("val") == 0.5


# Folders that must not be replaced.


def test_a_dataset_is_up_to_date_if_its_origin_and_text_are_the_same(text: Path):
    manifest = json.loads((text / "manifest.json").read_text())
    version = json.loads((text / "prepared_from.json").read_text())
    content = manifest["origin"].pop("content")
    origin = manifest["origin"]

    def never() -> str:
        raise AssertionError("the text need not be read")

    assert is_up_to_date(text, origin, False, version, never)
    assert not is_up_to_date(text, origin, True, version, never)
    assert not is_up_to_date(text.parent / "absent", origin, False, version, never)
    for unknown in ("", "another version"):
        assert is_up_to_date(text, origin, False, unknown, lambda: content)
        with pytest.raises(UserError, match=r"other text.*--force"):
            is_up_to_date(text, origin, False, unknown, lambda: "other")
    with pytest.raises(UserError, match=r"val_fraction 0\.1.*--force"):
        is_up_to_date(text, origin | {"val_fraction": 0.2}, False, version, never)
    (text / "prepared_from.json").write_text("{")  # then the text is compared
    assert is_up_to_date(text, origin, False, version, lambda: content)


def test_a_folder_of_the_user_is_never_replaced(text: Path, tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "manifest.json").write_text('{"format": 1}')
    (text / "checkpoints").mkdir()
    for folder, problem in ((tmp_path / "notes", "notes: manifest"), (text, "text: checkpoints")):
        with pytest.raises(UserError, match=f"^--out: .*{problem}"):
            is_up_to_date(folder, {}, True, "", str)
