"""The same token stream however it is encoded: threads, units, Ray, and interrupted runs."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers import ROOT, read_lines, train_sentencepiece, write_lines

from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.dataset import open_dataset, verify_dataset
from engine.data.documents import corpus as documents
from engine.data.documents.corpus import SplitRule, Unit
from engine.data.ids import EncodingRule
from engine.data.shards import writer
from engine.data.shards.writer import encode_on_ray, work_folder
from engine.data.tokenizer_training import train_bpe_tokenizer
from prepare import PrepareConfig, prepare

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")


def stream(out: Path) -> dict[str, Any]:
    """Return everything in a dataset that must not depend on how it was encoded."""
    dataset = open_dataset(out)
    verify_dataset(dataset, force=True)
    facts: dict[str, Any] = {"tokenizer": (out / "tokenizer.json").read_bytes()}
    for split in ("train", "val"):
        facts[split] = getattr(dataset, split).tokens[:].tolist()
        facts[f"{split} lengths"] = [len(row) for row in getattr(dataset, split).examples()]
        counts = dataset.manifest["splits"][split]
        facts[f"{split} counts"] = {name: n for name, n in counts.items() if isinstance(n, int)}
        facts[f"{split} sources"] = counts["sources"]
        assert sum(source["tokens"] for source in counts["sources"]) == counts["tokens"]
    return facts | dataset.manifest["statistics"] | dataset.manifest["origin"]


def num_finished(out: Path) -> int:
    """Count the finished units of an interrupted run."""
    return len([*work_folder(out).glob("unit-*.npz")])


@pytest.fixture
def many_units(monkeypatch):
    """Make units and batches so small that a test has many."""
    monkeypatch.setattr(documents, "MIN_UNIT_BYTES", 5000)
    monkeypatch.setattr(documents, "MIN_BATCH_CHARACTERS", 500)


@pytest.fixture(scope="module")
def corpora(code: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write texts/, lines.jsonl, a.parquet with repeats, one.txt, chats.jsonl and pairs.jsonl."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "texts").mkdir()
    lengths = [0, 7, 3000, 1, 40_000, 0, *range(100, 2000, 200), 9000, 0]
    for number, length in enumerate(lengths):
        text = code[number * 100 :][:length]
        (folder / "texts" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    texts = ["", *(f"№ {i % 50}: naïve 🚀\n{code[: i % 50 * 20]}" for i in range(150))]
    texts += [code * 4] * 2
    write_lines(folder / "lines.jsonl", [{"text": text} for text in texts])
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=13)
    (folder / "one.txt").write_text(code * 4, encoding="utf-8")
    chats = []
    for i in range(300):
        roles = ("user", "assistant") * (1 + i % 4)
        messages = [{"role": role, "content": f"{i % 200}: {role}é"} for role in roles]
        chats.append({"messages": messages})
    write_lines(folder / "chats.jsonl", chats)
    pairs = [{"q": f"{i % 80} + 1 =", "a": f"{i % 80 + 1} é"} for i in range(300)]
    write_lines(folder / "pairs.jsonl", pairs)
    return folder


CASES: dict[str, dict[str, Any]] = {
    "texts": {"tokenizer": "bpe", "vocab_size": 300},
    "lines.jsonl": {"tokenizer": "char", "deduplicate": True},
    "a.parquet": {"tokenizer": "byte", "deduplicate": True},
    "one.txt": {"tokenizer": "bpe"},
    "chats.jsonl": {"tokenizer": "byte", "chat": True},
    "pairs.jsonl": {"prompt_field": "q", "completion_field": "a", "deduplicate": True},
}


def config_of(corpora: Path, name: str, out: Path, **settings: Any) -> PrepareConfig:
    return PrepareConfig((str(corpora / name),), out=out, **CASES[name], **settings)


@pytest.mark.parametrize("name", CASES)
def test_threads_and_units_do_not_change_the_stream(name: str, corpora, tmp_path, request):
    prepare(config_of(corpora, name, tmp_path / "one"), threads=1)
    expected = stream(tmp_path / "one")
    assert len([*(tmp_path / "one").glob("train-0*.npy")]) == 1
    request.getfixturevalue("many_units")
    prepare(config_of(corpora, name, tmp_path / "threads"), threads=5)
    assert stream(tmp_path / "threads") == expected
    num_shards = len([*(tmp_path / "threads").glob("train-0*.npy")])
    assert (num_shards > 4) == (name in ("texts", "a.parquet"))


def test_the_manifest_is_that_of_the_same_files_at_another_place(corpora, tmp_path, monkeypatch):
    shutil.copytree(corpora, tmp_path / "copy" / "deeper")
    prepare(config_of(corpora, "texts", tmp_path / "data"), threads=1)
    content = (tmp_path / "data" / "manifest.json").read_bytes()
    assert str(corpora).encode() not in content
    monkeypatch.chdir(tmp_path / "copy")
    prepare(config_of(Path("deeper"), "texts", tmp_path / "again"), threads=2)
    assert (tmp_path / "again" / "manifest.json").read_bytes() == content
    names = [source["source"] for source in json.loads(content)["splits"]["train"]["sources"]]
    assert names == sorted({*names}) and names[-1] == "17.txt"


def test_documents_are_encoded_whole_if_pieces_have_other_ids(
    code, corpora, many_units, tmp_path, monkeypatch
):
    """A tokenizer like SentencePiece gives the pieces of a text other ids than the whole text."""
    sentencepiece = train_sentencepiece([code])
    monkeypatch.setattr("engine.data.records.reader.LARGE_TEXT_BYTES", 8000)
    monkeypatch.setattr("engine.data.records.reader.PIECE_BYTES", 2000)
    sentencepiece.save(tmp_path / "tokenizer.json")
    tokenizer = str(tmp_path / "tokenizer.json")
    path = corpora / "lines.jsonl"
    config = PrepareConfig((str(path),), out=tmp_path / "data", tokenizer=tokenizer)
    prepare(config)
    dataset = open_dataset(tmp_path / "data")
    texts = [record["text"] for record in read_lines(path)]
    end = sentencepiece.end_of_text_id
    encoded = set()
    for tokens in (dataset.train.tokens[:], dataset.val.tokens[:]):
        for ids in np.split(tokens, np.flatnonzero(tokens == end)):
            encoded.add(sentencepiece.decode(ids[ids != end]))
    assert all(any(text in document for document in texts) for text in encoded)  # without a space
    assert {text for text in texts if len(text) <= len(code)} <= encoded
    assert any(len(text) > 2 * len(code) for text in encoded)
    monkeypatch.setattr(documents, "MAX_JOINED_DOCUMENT_BYTES", 9000)
    with pytest.raises(UserError, match="--tokenizer"):
        prepare(replace(config, out=tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()


def test_deduplicated_documents_are_first_occurrences(many_units, corpora, tmp_path):
    config = config_of(corpora, "a.parquet", tmp_path / "data")
    prepare(replace(config, deduplicate=False, out=tmp_path / "all"))
    assert open_dataset(tmp_path / "all").manifest["statistics"]["repeats"] == 101
    prepare(config)
    dataset = open_dataset(tmp_path / "data")
    facts = dataset.manifest["statistics"]
    assert (facts["documents"], facts["dropped"], facts["repeats"]) == (52, 101, 0)
    tokens = np.concatenate((dataset.train.tokens[:], dataset.val.tokens[:]))
    text = dataset.tokenizer.decode(tokens)
    numbers = [int(line.split(":")[0][2:]) for line in text.split("\n") if line.startswith("№")]
    assert sorted(numbers) == sorted({*numbers})


def interrupt_after(count: int, monkeypatch) -> list[int]:
    """Interrupt encoding after ``count`` units. Returns the numbers of the finished units."""
    finished: list[int] = []
    write_unit = writer.write_unit

    def write_or_die(job: writer.EncodingJob, unit: Unit, *arguments: Any) -> None:
        if len(finished) == count:
            raise KeyboardInterrupt
        write_unit(job, unit, *arguments)
        finished.append(unit.number)

    monkeypatch.setattr(writer, "write_unit", write_or_die)
    return finished


CHANGES: dict[str, tuple[Callable[[Path, Path], object], dict[str, Any], int]] = {
    "nothing": (lambda corpora, folder: None, {}, 3),
    "a file": (lambda corpora, folder: os.utime(corpora / "texts" / "02.txt", ns=(1, 1)), {}, 2),
    "another unit": (lambda corpora, folder: (folder / "train-99999.npy").touch(), {}, 3),
    "a setting": (lambda corpora, folder: None, {"val_fraction": 0.3}, 0),
}


@pytest.mark.parametrize(
    ("name", "change"), [*(("texts", change) for change in CHANGES), ("a.parquet", "nothing")]
)
def test_a_run_after_an_interruption_encodes_what_is_missing_or_has_changed(
    name, change, many_units, corpora, tmp_path, monkeypatch
):
    make_change, settings, num_kept = CHANGES[change]
    shutil.copytree(corpora, tmp_path / "corpora")
    out = tmp_path / "data"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt_after(3, patch)
        prepare(config_of(tmp_path / "corpora", name, out))
    assert not out.exists() and num_finished(out) == 3
    make_change(tmp_path / "corpora", work_folder(out))
    with monkeypatch.context() as patch:
        encoded = interrupt_after(1000, patch)
        prepare(config_of(tmp_path / "corpora", name, out, **settings))
    assert len({0, 1, 2} - {*encoded}) == num_kept
    prepare(config_of(tmp_path / "corpora", name, tmp_path / "whole", **settings))
    assert stream(out) == stream(tmp_path / "whole")
    assert not (out / "train-99999.npy").exists() and not work_folder(out).exists()


def test_an_error_in_a_later_unit_keeps_the_finished_ones(many_units, corpora, tmp_path):
    out = tmp_path / "data"
    (tmp_path / "99.txt").write_bytes(b"words\n" * 60_000 + b"\xff")
    inputs = (str(corpora / "texts"), str(tmp_path / "99.txt"))
    config = PrepareConfig(inputs, out=out, tokenizer="byte")
    with pytest.raises(UserError, match=r"99\.txt"):
        prepare(config)
    assert num_finished(out) > 2 and not out.exists()
    (tmp_path / "99.txt").write_bytes(b"words\n" * 60_000)
    prepare(config)
    assert [path.name for path in tmp_path.iterdir() if "data" in path.name] == ["data"]


# Ray.


def ray_workers() -> list[int]:
    """Return the processes in which Ray encodes a unit."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::encode_unit"):
                processes.append(int(path.parent.name))
        except OSError:
            continue
    return processes


@needs_ray
def test_an_unreachable_cluster_is_one_line(tmp_path: Path):
    rule = EncodingRule(SplitRule(0.1, False, False, False))
    jobs = [writer.EncodingJob(tmp_path, rule, size, "") for size in (2**16, 2**16 + 1)]
    assert [job.dtype for job in jobs] == ["uint16", "uint32"]
    with pytest.raises(UserError, match=r"^--ray 127\.0\.0\.1:9: [^\n]*$"):
        list(encode_on_ray(jobs[0], [], "127.0.0.1:9"))


@needs_ray
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds workers in /proc")
def test_ray_encodes_the_same_stream_though_a_worker_is_killed(code: str, tmp_path: Path):
    train_bpe_tokenizer([code], 400).save(tmp_path / "tokenizer.json")
    (tmp_path / "texts").mkdir()
    for number in range(10):
        text = f"{number % 8}\n" + code * (40 if number == 4 else 1)
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    rows = [f"{n % 200}: {code[:1000]}" if n % 9 else None for n in range(400)]
    table = pyarrow.table({"text": rows})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", 100, use_dictionary=False)
    (tmp_path / "val.jsonl").write_text(json.dumps({"text": code}))
    inputs = ["texts", "a.parquet", "--val", "val.jsonl", "--tokenizer", "tokenizer.json"]
    inputs += ["--deduplicate", "--skip-bad-rows", "--out", "ray", "--ray", "local:2"]
    code_with_small_units = """
import prepare
from engine.core.cli import run_command
from engine.data.documents import corpus
corpus.MIN_UNIT_BYTES = 2**12
run_command(prepare.main)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code_with_small_units, *inputs],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    victims: list[int] = []
    while process.poll() is None and not victims:
        victims = ray_workers() if num_finished(tmp_path / "ray") > 1 else []
        time.sleep(0.005)
    assert victims, process.communicate()
    os.kill(victims[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    config = parse(PrepareConfig, inputs[:-4])
    with contextlib.chdir(tmp_path):
        prepare(replace(config, out=Path("one")))
    expected = stream(tmp_path / "one")
    assert stream(tmp_path / "ray") == expected and 45 in expected["notes"].values()
    assert len(open_dataset(tmp_path / "ray").train.tokens.arrays) > 10
