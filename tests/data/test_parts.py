"""Parts of a dataset: what each reads, that they merge to what one run makes, and repeats that are left out."""

import contextlib
import dataclasses
import gzip
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import parquet

import prepare as command
from engine.data import readers, sources
from engine.data.dataset import open_dataset
from engine.data.parts import parts_of, remove_parts
from prepare import PrepareConfig, merge, prepare

ARGUMENTS = {"char": {}, "byte": {}, "bpe": {"vocab_size": 400}}


class Counting(MemoryFileSystem):
    """Files in memory that count which of their bytes are read."""

    protocol = "counting"
    store, pseudo_dirs = {}, [""]
    read = 0

    def _open(self, path: str, mode: str = "rb", **options: object):
        file = super()._open(path, mode, **options)
        return CountedFile(file.getvalue()) if mode == "rb" else file


class CountedFile(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        Counting.read += len(data)
        return data


fsspec.register_implementation("counting", Counting, clobber=True)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def documents(code: str) -> list[str]:
    """Some 600 texts with 500 KB in all."""
    chance = random.Random(0)
    starts = [chance.randrange(len(code) - 4000) for _ in range(600)]
    return [f"{i}: naïve 🚀\n{code[start:][: int(chance.lognormvariate(6, 1))]}" for i, start in enumerate(starts)]


@pytest.fixture(scope="module")
def corpus(documents: list[str], code: str) -> str:
    """A folder of texts of 1.3 MB, of which one is over 40% of all, so that parts cut it."""
    with fsspec.open_files("counting://texts/*.txt", "w", num=len(documents) + 1, newline="") as opened:
        for file, text in zip(opened, [*documents[:300], (code * 9)[:600_000], *documents[300:]], strict=True):
            file.write(text)
    return "counting://texts/"


def in_parts(count: int, out: Path, **options: object) -> list[int]:
    """Make a dataset in so many parts and merge it; returns how many bytes each has read."""
    read = []
    for part in range(1, count + 1):
        Counting.read = 0
        prepare(PrepareConfig(**options, out=out, part=f"{part}/{count}"))
        read.append(Counting.read)
    merge(PrepareConfig((), out=out, merge=True))
    return read


@pytest.mark.parametrize("tokenizer", ARGUMENTS)
def test_a_part_reads_its_bytes_and_hardly_more(tokenizer: str, corpus: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "AHEAD", 2**12)  # read ahead from afar: nothing beside the bytes of a real part
    monkeypatch.setattr(readers, "PIECE", 2**12)
    options = {"inputs": (corpus,), "tokenizer": tokenizer} | ARGUMENTS[tokenizer]
    prepare(PrepareConfig(**options, out=tmp_path / "whole"))
    read = in_parts(8, tmp_path / "web", **options)
    assert files(tmp_path / "web") == files(tmp_path / "whole")
    total = sum(len(file.getvalue()) for file in Counting.store.values())
    if tokenizer == "bpe":
        assert total < read[0] < 1.05 * (total + total / 8)  # it learns the tokens for all of them
    largest = max(read[tokenizer == "bpe" :])
    assert total / 8 < largest < total / 8 * 1.05 + 2**12  # a document of 4 KB is not cut
    assert sum(read[tokenizer == "bpe" :]) < 1.03 * total


def test_parts_of_lines_and_of_groups_of_rows(documents: list[str], tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    parquet.write_table(pyarrow.table({"text": documents}), tmp_path / "a.parquet", row_group_size=20)
    whole = None
    for name in ("a.jsonl", "a.parquet"):
        for count in (3, 7):
            out = tmp_path / f"{name}-{count}"
            in_parts(count, out, inputs=(str(tmp_path / name),), tokenizer="byte")
            tokens = {file: content for file, content in files(out).items() if file.endswith(".npy")}
            whole = whole or tokens
            assert tokens == whole
    prepare(PrepareConfig((str(tmp_path / "a.jsonl"),), "byte", out=tmp_path / "one"))
    assert {file: content for file, content in files(tmp_path / "one").items() if file.endswith(".npy")} == whole


def split_documents(out: Path) -> dict[str, list[str]]:
    """The documents of each split, read back."""
    dataset = open_dataset(out)
    found = {}
    for split in ("train", "val"):
        ids = getattr(dataset, split)[:]
        ends = np.flatnonzero(ids == dataset.tokenizer.end_of_text)
        found[split] = [dataset.tokenizer.decode(one[:-1].tolist()) for one in np.split(ids, ends + 1)[:-1]]
    return found


@pytest.mark.parametrize("kind", ["many", "few"])
def test_nothing_that_is_validated_on_is_trained_on(kind: str, documents: list[str], code: str, tmp_path: Path):
    texts = documents if kind == "many" else documents[:7]
    texts = [*texts, (code * 9)[:300_000]]  # one large enough to be cut
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    in_parts(2, tmp_path / "web", inputs=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")), tokenizer="byte")
    found = split_documents(tmp_path / "web")
    assert not {*found["train"]} & {*found["val"]} and len(found["val"]) >= 2
    assert all(found[split].count(text) == 2 for split in found for text in found[split])
    manifest = open_dataset(tmp_path / "web").manifest
    assert manifest["facts"]["repeats"] * 2 == manifest["facts"]["documents"] == 2 * len(texts)


@pytest.fixture
def repeats(documents: list[str], code: str, tmp_path: Path) -> tuple[str, ...]:
    """Files with every document in two of them, and a large one too."""
    for name, texts in (("a", documents[:200]), ("b", [*documents[200:400], *documents[:200]]), ("c", documents[200:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name in ("d.txt", "e.txt"):
        (tmp_path / name).write_text((code * 9)[:300_000])
    return tuple(str(tmp_path / name) for name in ("a.jsonl", "d.txt", "b.jsonl", "e.txt", "c.jsonl"))


@pytest.mark.parametrize("tokenizer", ["byte", "char"])
def test_repeats_are_left_out_wherever_they_are(tokenizer: str, repeats, documents, tmp_path: Path, capsys):
    options = {"inputs": repeats, "tokenizer": tokenizer, "deduplicate": True}
    prepare(PrepareConfig(**options, out=tmp_path / "one"))
    assert "and 401 exact repeats, which were left out" in capsys.readouterr().out
    assert not parts_of(tmp_path / "one").exists()
    in_parts(5, tmp_path / "web", **options)
    assert files(tmp_path / "web") == files(tmp_path / "one")
    assert prepare(PrepareConfig(**options, out=tmp_path / "one")) == (tmp_path / "one", False)
    if tokenizer == "byte":
        found = split_documents(tmp_path / "one")
        counts = [len(found["train"]), len(found["val"])]
        assert sum(counts) == len(documents) + 2  # the large one has some in both
        texts = {*found["train"], *found["val"]}
        assert {*documents} <= texts and len(texts) == len(documents) + 2


def test_other_files_are_another_corpus(documents: list[str], tmp_path: Path):
    for folder, texts in (("a", documents), ("b", documents[:-1])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for part, folder in ((1, "a"), (2, "b")):
        prepare(PrepareConfig((str(tmp_path / folder),), "byte", out=tmp_path / "web", part=f"{part}/2"))
    with pytest.raises(ValueError, match=r"2-of-2 was made with other text, unlike .*1-of-2; make it again: "):
        merge(PrepareConfig((), out=tmp_path / "web", merge=True))


def test_links_are_read_by_their_own_names_and_a_linked_folder_is_filled(documents, tmp_path: Path, monkeypatch):
    """As in a cache of Hugging Face's hub, where what a name leads to has no ending."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f3a").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    (tmp_path / "train.jsonl").symlink_to("blobs/0f3a")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "ray_cluster", lambda address: contextlib.nullcontext((2, map)))
    one, made = prepare(PrepareConfig(("train.jsonl",), "byte"))
    assert made and one == Path("data/train")
    prepare(PrepareConfig(("train.jsonl",), "byte", out=Path("link"), ray="local"))
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "link.parts").exists()
    here, there = files(one), files(tmp_path / "elsewhere")
    assert here.keys() == there.keys() and all(here[name] == there[name] for name in here)


def touch(path: Path) -> None:
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))


@pytest.mark.parametrize("part", [None, "1/2"])
def test_files_that_are_newer_are_read_and_only_if_other_refused(part, documents, tmp_path: Path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = PrepareConfig((str(path),), "byte", out=tmp_path / "web", part=part)
    out, made = prepare(config)
    before = files(out)
    touch(path)
    assert made and prepare(config) == (out, False)
    after = files(out)
    assert before.pop("prepared_from.json") != after.pop("prepared_from.json") and before == after
    content = path.read_bytes()
    path.write_bytes(content.replace(b"0: na", b"0: nb"))  # as many bytes
    touch(path)
    with pytest.raises(ValueError, match="was made with other text; use --force"):
        prepare(config)
    assert files(out) == before | {"prepared_from.json": files(out)["prepared_from.json"]}


def test_a_bpe_is_trained_once_for_all_parts_on_as_much_as_asked(documents: list[str], tmp_path: Path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    options = {"inputs": (str(path),), "vocab_size": 400, "tokenizer_bytes": 50_000}
    prepare(PrepareConfig(**options, out=tmp_path / "whole"))
    in_parts(3, tmp_path / "web", **options)
    assert len([*parts_of(tmp_path / "web").glob("tokenizer-*.json")]) == 1
    assert files(tmp_path / "web") == files(tmp_path / "whole")
    prepare(PrepareConfig(**options | {"tokenizer_bytes": None}, out=tmp_path / "all"))
    names = ("whole", "all")
    assert len({(tmp_path / name / "tokenizer.json").read_bytes() for name in names}) == 2
    with pytest.raises(ValueError, match="was made with tokenizer_bytes 50000"):
        prepare(PrepareConfig(**options | {"tokenizer_bytes": None}, out=tmp_path / "whole"))


def test_repeats_in_a_pipe_are_left_out_and_a_failure_leaves_nothing(
    documents: list[str], run: Callable, tmp_path: Path
):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents[:100] * 2)
    for text, code in (("x", 1), (lines, 0)):
        done = run("prepare.py", "-", "--deduplicate", "--tokenizer", "byte", "--val-fraction", 0.2, input=text)
        assert done.returncode == code, done.stderr
        assert [path.name for path in (tmp_path / "data").glob("*")] == ["stdin"] * (not code)
    assert "100  and 100 exact repeats, which were left out" in done.stdout


READING = {"field": "body", "errors": "replace"}


@pytest.mark.parametrize("name", READING)
def test_text_read_in_another_way_is_another_text(name: str, documents: list[str], tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text, "body": text}) + "\n" for text in documents))
    config = PrepareConfig((str(path),), "byte", out=tmp_path / "web")
    other = dataclasses.replace(config, **{name: READING[name]})
    prepare(config)
    with pytest.raises(ValueError, match=f"was made with no {name}; use --force"):
        prepare(other)
    for part, one in (("1/2", config), ("2/2", other)):
        prepare(dataclasses.replace(one, out=tmp_path / "parts", part=part))
    with pytest.raises(ValueError, match=rf"2-of-2 was made with {name} \w+, unlike .*1-of-2; make it again"):
        merge(PrepareConfig((), out=tmp_path / "parts", merge=True))


def test_what_lies_among_the_parts_is_not_ours(documents: list[str], tmp_path: Path):
    folder = tmp_path / "book.parts"
    folder.mkdir()
    (folder / "a.txt").write_text("text")
    with pytest.raises(
        ValueError, match=r"book.parts lies in .*book.parts, which is for parts of .*book; choose another"
    ):
        prepare(PrepareConfig((str(folder),), "byte", out=tmp_path / "book", ray="local"))
    (folder / "1-of-2").mkdir()
    remove_parts(tmp_path / "book")
    assert [path.name for path in folder.iterdir()] == ["a.txt"]


def test_a_part_without_its_ledger_is_made_again(documents: list[str], tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = PrepareConfig((str(path),), "byte", out=tmp_path / "web", part="1/1")
    out, _ = prepare(config)
    (out / "ledger-00000.npy").unlink()
    assert prepare(config) == (out, True) and (out / "ledger-00000.npy").is_file()
