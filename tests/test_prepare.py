"""Text → data/<name>/, through the command's main, or the command itself where a process matters."""

import csv
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pytest
from backports import zstd
from pyarrow import parquet

import prepare as command
from engine.core.files import held_alone
from engine.data import encoding
from engine.data import writer as dataset_writer
from engine.data.dataset import FORMAT, Dataset, open_dataset
from prepare import PrepareConfig

OFFLINE = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch, capsys) -> Callable[..., str]:
    """Runs prepare.py's main in tmp_path and returns what it printed; or, given an error to match, expects it alone."""
    monkeypatch.chdir(tmp_path)

    def prepare(*arguments: object, expect_error: str | None = None) -> str:
        capsys.readouterr()
        if expect_error is None:
            command.main([*map(str, arguments)])
        else:
            with pytest.raises((ValueError, SystemExit)) as caught:
                command.main([*map(str, arguments)])
        printed, errors = capsys.readouterr()
        if expect_error is not None:
            is_usage = isinstance(caught.value, SystemExit)
            said = errors.removeprefix("error: ").removesuffix("\n") if is_usage else str(caught.value)
            assert re.search(expect_error, said) and "\n" not in said and (not errors or is_usage)
        assert (expect_error is None) == (printed != "") and (expect_error or not errors)
        return printed

    return prepare


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """What would change if anything in the folder, or the folder, was written again."""
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in (folder, *folder.rglob("*"))}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "tokenizer, dtype, vocab_size, train_tokens, val_tokens",
    [
        ("char", "uint16", 65, 1_003_854, 111_540),
        ("byte", "uint16", 257, 1_003_854, 111_540 + 1),
        ("gpt2", "uint16", 50257, 301_966, 36_059 + 1),  # nanoGPT's counts, and the end of text
        ("cl100k_base", "uint32", 100277, None, None),
        ("bpe", "uint16", 2000, None, None),
    ],
)
def test_tiny_shakespeare(
    tokenizer, dtype, vocab_size, train_tokens, val_tokens, prepare, shakespeare: Path, tiktoken_cache, tmp_path: Path
):
    printed = prepare(shakespeare, "--tokenizer", tokenizer, *(("--vocab-size", 2000) if tokenizer == "bpe" else ()))
    path = tmp_path / "data" / "tinyshakespeare"
    assert "python train.py --data data/tinyshakespeare" in printed and f"{vocab_size:,}  {tokenizer}\n" in printed

    dataset = open_dataset(path)
    text = shakespeare.read_text(encoding="utf-8")
    ending = "" if tokenizer == "char" else "<|endoftext|>"
    assert dataset.tokenizer.decode(dataset.train[:]) == text[:1_003_854]
    assert dataset.tokenizer.decode(dataset.val[:]) == text[1_003_854:] + ending

    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.keys() == {"format", "tokenizer", "vocab_size", "dtype", "splits", "origin", "facts"}
    seen = {*dataset.train[:].tolist(), *dataset.val[:].tolist()}
    assert manifest["facts"].items() >= {"documents": 1, "repeats": 0, "vocabulary": len(seen)}.items()
    assert manifest["facts"]["longest"] == len(dataset.train) + len(dataset.val)
    assert (manifest["format"], manifest["vocab_size"], manifest["dtype"]) == (FORMAT, vocab_size, dtype)
    written = hashlib.sha256((path / "tokenizer.json").read_bytes()).hexdigest()
    assert manifest["tokenizer"] == {"kind": tokenizer, "sha256": written}
    assert dataset.tokenizer.vocab_size == vocab_size
    for split, tokens, size, ends in (("train", train_tokens, 1_003_854, 0), ("val", val_tokens, 111_540, 1)):
        counts = manifest["splits"][split]
        assert (counts["bytes"], counts["documents"]) == (size, ends)
        assert tokens in (None, counts["tokens"])
        (shard,) = counts["shards"]
        assert shard["sha256"] == hashlib.sha256((path / shard["file"]).read_bytes()).hexdigest()
        assert np.load(path / shard["file"], mmap_mode="r").shape == (shard["tokens"],) == (counts["tokens"],)
    names = {"manifest.json", "tokenizer.json", "train-00000.npy", "val-00000.npy", "prepared_from.json"}
    assert files(path).keys() == names
    assert [folder.name for folder in path.parent.iterdir()] == ["tinyshakespeare"]


def test_documents_are_encoded_in_order_each_with_its_end(code: str, prepare, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)  # many more batches than there are threads
    texts = ["", *(f"№ {i}: {code[100 * i :][: i % 700]}" for i in range(len(code) // 100))]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare("lines.jsonl", "--vocab-size", 300, "--val-fraction", 0.2)
    dataset = open_dataset(tmp_path / "data" / "lines")
    order = {}
    for split in ("train", "val"):
        tokens = getattr(dataset, split)[:]
        ends = np.flatnonzero(tokens == dataset.tokenizer.end_of_text)
        assert ends[-1] == len(tokens) - 1
        found = [dataset.tokenizer.decode(ids[:-1]) for ids in np.split(tokens, ends[:-1] + 1)]
        counts = dataset.manifest["splits"][split]
        assert (counts["documents"], counts["bytes"]) == (len(found), sum(len(text.encode()) for text in found))
        np.testing.assert_array_equal(tokens[: ends[0]], dataset.tokenizer.encode(found[0]))
        order[split] = [texts.index(text) for text in found]
        assert order[split] == sorted(order[split])
    assert len(order["train"]) + len(order["val"]) == len(texts)


@pytest.mark.parametrize("count", [12, 80])  # few documents, whose tails are taken, and many
def test_the_same_texts_give_the_same_shards_whatever_they_come_in(count: int, code: str, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    texts = [f'{i}: naïve 🚀, "quoted"\n{code[100 * i :][: i * 9]}' for i in range(count)]
    texts[5] = code[:3000] * 100  # a large one
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    (tmp_path / "folder").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "folder" / f"{i:03d}.txt").write_bytes(text.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(lines))
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
    parquet.write_table(pyarrow.table({"id": range(count), "text": texts}), tmp_path / "a.parquet", row_group_size=7)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved", num_shards=2)
    with fsspec.open("memory://a.jsonl", "wb") as file:
        file.write(lines)
    names = ["folder", "a.jsonl.gz", "a.jsonl.zst", "a.csv", "a.parquet"]
    inputs = [*(str(tmp_path / name) for name in names), f"hf:{tmp_path}/saved", "memory://a.jsonl"]
    found = []
    for number, name in enumerate(inputs):
        command.prepare(PrepareConfig((name,), vocab_size=400, out=tmp_path / f"{number}"))
        found.append({name: content for name, content in files(tmp_path / f"{number}").items() if name[-4:] == ".npy"})
        assert found[number] == found[0], name


def test_standard_input(run, tmp_path: Path):
    result = run("prepare.py", "-", "--tokenizer", "char", input="piped téxt")
    assert (result.returncode, result.stderr) == (0, "")
    dataset = open_dataset(tmp_path / "data" / "stdin")
    assert dataset.tokenizer.characters == " deiptxé"
    assert dataset.tokenizer.decode([*dataset.train[:], *dataset.val[:]]) == "piped téxt"


def test_some_files_of_a_folder_and_another_field(prepare, tmp_path: Path):
    (tmp_path / "posts").mkdir()
    (tmp_path / "posts" / "a.jsonl").write_text('{"body": "one post"}\n{"body": "and another"}\n')
    (tmp_path / "posts" / "b.txt").write_text("no post")
    prepare("posts", "--glob", "*.jsonl", "--field", "body", "--tokenizer", "char")
    dataset = open_dataset(tmp_path / "data" / "posts")
    texts = [dataset.tokenizer.decode(tokens[:]) for tokens in (dataset.train, dataset.val)]
    assert texts == ["one pos\nand anoth\n", "t\ner\n"]  # too few to share out whole: the tail of each


def test_download_must_hash_to_what_is_asked(prepare, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    address = "http://127.0.0.1:9/text"
    cached = tmp_path / "gpt-trainer" / hashlib.sha256(address.encode()).hexdigest()[:16] / "text"
    cached.parent.mkdir(parents=True)
    cached.write_text("downloaded before\n" * 10)
    prepare(address, "--sha256", hashlib.sha256(cached.read_bytes()).hexdigest())
    prepare(address, "--sha256", "0" * 64, expect_error="has SHA-256 .*, not the expected 0000")


def test_same_again_changes_nothing(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt")
    before = snapshot(tmp_path / "data")
    assert "Nothing changed" in prepare("a.txt")
    assert snapshot(tmp_path / "data") == before


def test_the_same_lines_in_another_order_are_other_text(prepare, tmp_path: Path):
    lines = [json.dumps({"text": f"document {number}"}) + "\n" for number in range(100)]
    for order in (lines, lines[::-1]):
        (tmp_path / "a.jsonl").write_text("".join(order))
        prepare("a.jsonl", expect_error=None if order is lines else "^data/a was made with other text; use --force")


def test_an_interruption_while_newer_files_are_noted_leaves_a_dataset(prepare, tmp_path: Path, monkeypatch):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    opened, write = [], Path.write_bytes

    def write_half(path: Path, content: bytes) -> None:
        opened.append(path)
        write(path, content[: len(content) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_bytes", write_half)
        patch.setattr(Path, "write_text", lambda path, text, encoding: write_half(path, text.encode()))
        command.main(["a.txt"])
    assert opened and "Nothing changed" in prepare("a.txt")
    assert json.loads((tmp_path / "data" / "a" / "prepared_from.json").read_text())  # whole by now


def test_a_folder_of_both_kinds_is_refused_by_any_name(prepare, tmp_path: Path, monkeypatch):
    (tmp_path / "posts").mkdir()
    (tmp_path / "posts" / "a.jsonl").write_text('{"text": "a"}\n' * 9)
    (tmp_path / "posts" / "README.txt").write_text("what this is")
    said = "has both .*a.jsonl, with fields, and .*README.txt, without: see --glob$"
    for name in ("posts", "./posts/", tmp_path / "posts"):
        prepare(name, expect_error=f"^{name} {said}")
    monkeypatch.chdir(tmp_path / "posts")
    prepare(".", expect_error=f"^. {said}")


@pytest.mark.parametrize(
    "text, arguments, other",
    [
        ("other words\n", (), "other text"),
        ("", ("--vocab-size", 300), "no vocab_size"),
        ("", ("--val-fraction", 0.5), "val_fraction 0.1"),
        ("", ("--tokenizer", "byte"), "tokenizer bpe"),
    ],
)
def test_other_dataset_is_replaced_by_force_only(text, arguments, other, prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt")
    before = snapshot(tmp_path / "data")
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10 + text)
    prepare("a.txt", *arguments, expect_error=f"^data/a was made with {other}; use --force")
    assert snapshot(tmp_path / "data") == before
    prepare("a.txt", *arguments, "--force")
    assert snapshot(tmp_path / "data").keys() == before.keys()
    assert "Nothing changed" in prepare("a.txt", *arguments)  # it is now what these arguments make


def test_force_mends_a_damaged_dataset(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt")
    (tmp_path / "data" / "a" / "val-00000.npy").write_bytes(b"")
    prepare("a.txt", "--force")
    assert len(open_dataset(tmp_path / "data" / "a").val) > 0


NO_MANIFESTS = ['{"format": 1}', "[]", '{"origin": 1, "tokenizer": {}, "splits": {}}']


@pytest.mark.parametrize("content", [{"notes.txt": "mine"}, *({"manifest.json": text} for text in NO_MANIFESTS)])
def test_folder_that_is_no_dataset_is_never_replaced(content: dict, prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    (tmp_path / "mine").mkdir()
    for name, text in content.items():
        (tmp_path / "mine" / name).write_text(text)
    before = snapshot(tmp_path / "mine")
    prepare(
        "a.txt", "--out", "mine", "--force", expect_error="^mine exists and is not a dataset; choose another directory"
    )
    prepare("a.txt", "--out", "a.txt", expect_error=r"^a\.txt exists and is not a dataset")
    assert snapshot(tmp_path / "mine") == before


def test_names_of_other_datasets_are_left_alone(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    being_made = tmp_path / "data" / ".wiki.small.partial.abcdefgh"  # by another process, at this moment
    being_made.mkdir(parents=True)
    prepare("a.txt", "--out", "data/wiki")
    assert being_made.exists()


@pytest.mark.parametrize(
    "content, arguments, message",
    [
        (None, (), "a.txt is not there"),  # arguments are checked before
        (b"", (), "a.txt: no text in there"),
        (b"abc\xffdef", (), "a.txt is not UTF-8 at byte 3; convert it, or use --errors replace"),
        (b"x", ("--tokenizer", "byte"), "the train split has 0 tokens of 1 documents"),
        (b"some text", ("--tokenizer", "char", "--val-fraction", "0.01"), "the val split has 1 tokens"),
        (None, ("--tokenizer", "gpt5"), "--tokenizer gpt5 is unknown"),
        (None, ("--vocab-size", "256"), "--vocab-size is 256; it must be at least 261"),
        (b"some text", ("--val-fraction", "1"), "--val-fraction is 1.0"),
        (b"some text", ("",), "no input"),
        (b"some text", ("http://127.0.0.1:9/b",), ".*9/b could not be read"),
        *[(b"some text", ("--part", part), f"--part is '{part}'") for part in ("4/3", "0/3", "a/b", "")],
        (b"some text", ("--merge",), "--merge needs --out, .* and takes nothing else but --force"),
        (b"some text", ("--merge", "--out", "data/a"), "--merge needs --out, .* and takes nothing else but --force"),
    ],
)
def test_user_mistake_leaves_nothing(content, arguments, message, prepare, tmp_path: Path, monkeypatch):
    for name, value in (OFFLINE | {"XDG_CACHE_HOME": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    prepare("a.txt", *arguments, expect_error=f"^{message}")
    assert [*(tmp_path / "data").rglob("*")] == []


@pytest.mark.parametrize("arguments", [(), ("--out", "w", "--part", "1/3"), ("--out", "w", "--tokenizer", "byte")])
def test_merge_takes_no_other_arguments(arguments: tuple[str, ...], prepare):
    prepare("--merge", *arguments, expect_error="^--merge needs --out, .* and takes nothing else but --force")


def test_no_input_is_refused(prepare):
    prepare(expect_error="^no input: give a file")


def test_command_says_a_mistake_in_one_line_and_exits_with_1(run, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text")
    environment = os.environ | OFFLINE | {"TIKTOKEN_CACHE_DIR": str(tmp_path)}
    result = run("prepare.py", "a.txt", "--tokenizer", "o200k_base", env=environment)
    message = r"error: tiktoken's encoding o200k_base could not be downloaded .* TIKTOKEN_CACHE_DIR .*\n"
    assert re.fullmatch(message, result.stderr)
    assert (result.returncode, result.stdout) == (1, "")


def test_bytes_that_are_not_utf8_can_be_replaced(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"abc\xffdefghijk")
    prepare("a.txt", "--errors", "replace", "--tokenizer", "char")
    assert "\ufffd" in open_dataset(tmp_path / "data" / "a").tokenizer.characters


@pytest.fixture(scope="module")
def corpora(code: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts/ of uneven size, some empty, lines.jsonl, and one.txt."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "texts").mkdir()
    lengths = [0, 7, 3000, 1, 40_000, 0, *range(100, 2000, 300), 9000, 0]
    for number, length in enumerate(lengths):
        (folder / "texts" / f"{number:02d}.txt").write_text(code[number * 100 :][:length], encoding="utf-8")
    lines = ["", *(f"Document {i}: naïve 🚀\n" + "with lines\n" * (i % 7) for i in range(60)), ""]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    (folder / "one.txt").write_text("one document and no other: naïve 🚀\n" * 10, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "inputs, arguments, documents",
    [
        ("texts", ("--vocab-size", 300), [8, 0, 18]),  # the fifth is larger than the others together
        ("lines.jsonl", ("--tokenizer", "byte"), [22, 20, 20]),
        ("one.txt", ("--tokenizer", "char"), [1, 0, 0]),
        ("one.txt", ("--tokenizer", "cl100k_base"), [1, 0, 0]),
    ],
)
def test_merged_parts_are_what_one_run_makes(inputs, arguments, documents, prepare, corpora, tiktoken_cache, tmp_path):
    prepare(corpora / inputs, *arguments, "--out", "data/whole")
    for part in (3, 1, 2):
        printed = prepare(corpora / inputs, *arguments, "--out", "data/web", "--part", f"{part}/3")
        assert "python prepare.py --merge --out data/web\n" in printed
    parts = [tmp_path / "data" / "web.parts" / f"{part}-of-3" for part in (1, 2, 3)]
    ends = [json.loads((part / "manifest.json").read_text())["splits"].values() for part in parts]
    assert [sum(counts["documents"] for counts in splits) for splits in ends] == documents
    assert not (tmp_path / "data" / "web").exists()
    assert "rm -r data/web.parts\n" in prepare("--merge", "--out", "data/web")
    assert files(tmp_path / "data" / "web") == files(tmp_path / "data" / "whole")


def test_merged_shards_end_where_those_of_one_run_do(corpora: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dataset_writer, "SHARD_TOKENS", 1000)
    options = {"inputs": (str(corpora / "texts"),), "tokenizer": "byte"}
    command.prepare(PrepareConfig(**options, out=tmp_path / "whole"))
    for part in range(1, 6):
        command.prepare(PrepareConfig(**options, out=tmp_path / "web", part=f"{part}/5"))
    command.merge(PrepareConfig((), out=tmp_path / "web", merge=True))
    assert files(tmp_path / "web") == files(tmp_path / "whole")
    assert len(files(tmp_path / "whole")) > 50


@pytest.fixture(scope="module")
def three_parts(corpora: Path) -> Path:
    """The parts of a dataset of bytes, data/web."""
    for part in (1, 2, 3):
        out = corpora / "web"
        command.prepare(PrepareConfig((str(corpora / "lines.jsonl"),), "byte", out=out, part=f"{part}/3"))
    return corpora / "web.parts"


def edit(file: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda parts: (parts / file).write_text((parts / file).read_text().replace(old, new))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda parts: shutil.rmtree(parts), "data/web.parts holds no parts; make each with: REMEDY 1/N"),
        (lambda parts: shutil.rmtree(parts / "1-of-3"), "data/web.parts/1-of-3 is missing; make it with: REMEDY 1/3"),
        (lambda parts: shutil.rmtree(parts / "3-of-3"), "data/web.parts/3-of-3 is missing; make it with: REMEDY 3/3"),
        (lambda parts: shutil.copytree(parts / "1-of-3", parts / "1-of-2"), "different counts, data/.*of-2 and .*of-3"),
        (lambda parts: (parts / "2-of-3" / "train-00000.npy").unlink(), "2-of-3/train.* is damaged; .* REMEDY 2/3 --f"),
        (edit("1-of-3/tokenizer.json", "byte", "bite"), "1-of-3/tokenizer.json is damaged; .* REMEDY 1/3 --force"),
        (edit("2-of-3/manifest.json", "{", ""), "2-of-3 is damaged; remove it, and make it with: REMEDY 2/3"),
        (
            edit("2-of-3/manifest.json", '"listing": "', '"listing": "0'),
            "2-of-3 was made with other text, unlike .*/1-of",
        ),
        (edit("2-of-3/manifest.json", "0.1", "0.2"), "with val_fraction 0.2, .* again: REMEDY 2/3 --force"),
        (edit("2-of-3/manifest.json", "2/3", "1/3"), "2-of-3 was made with part 1/3"),
        (
            edit("3-of-3/manifest.json", '"kind": "byte",\n  "sha256": "', '"kind": "byte",\n  "sha256": "0'),
            "3-of-3 .* token",
        ),
    ],
)
def test_parts_that_make_no_whole_are_not_merged(spoil, message, three_parts: Path, prepare, tmp_path: Path):
    shutil.copytree(three_parts, tmp_path / "data" / "web.parts")
    spoil(tmp_path / "data" / "web.parts")
    message = message.replace("REMEDY", "python prepare.py INPUT --out data/web --part")
    prepare("--merge", "--out", "data/web", expect_error=message)
    assert [path.name for path in (tmp_path / "data").iterdir() if path.name != "web.parts"] == []


def test_part_is_made_again_if_damaged_or_not_at_all(three_parts: Path, corpora: Path, prepare, tmp_path: Path):
    shutil.copytree(three_parts, tmp_path / "data" / "web.parts")
    shard = tmp_path / "data" / "web.parts" / "2-of-3" / "val-00000.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    merge = ("--merge", "--out", "data/web")
    prepare(*merge, expect_error=r"2-of-3/val-00000\.npy is damaged")
    one_run = (corpora / "lines.jsonl", "--tokenizer", "byte", "--out", "data/web")
    prepare(*one_run, "--part", "2/3", "--force")
    assert shard.read_bytes() == whole
    prepare(*merge)

    before = snapshot(tmp_path / "data")
    for arguments in ((*one_run, "--part", "2/3"), merge, one_run):
        assert "Nothing changed" in prepare(*arguments)
    assert snapshot(tmp_path / "data") == before
    prepare(*merge, "--force")
    assert snapshot(tmp_path / "data") != before


def test_parts_may_be_empty_and_the_whole_not(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    for part in ("1/2", "2/2"):
        prepare("a.txt", "--tokenizer", "byte", "--part", part)
    prepare("--merge", "--out", "data/a", expect_error="^the train split has 0 tokens of 1 documents")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a.parts"]


def test_start_is_quick_without_torch_and_without_tiktokens_registry():
    program = "import sys, prepare; sys.exit(bool({'torch', 'tiktoken_ext.openai_public'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(command.__file__).parent).returncode == 0


def stop_while_encoding(number: signal.Signals, tmp_path: Path) -> subprocess.Popen:
    """Send a prepare.py the signal as soon as it has begun to write the dataset; return it when it has ended."""
    (tmp_path / "large.txt").write_bytes(b"a line of a large text\n" * 400_000)
    arguments = [sys.executable, command.__file__, *["large.txt"] * 20, "--tokenizer", "byte"]  # takes seconds
    # A shell's job in the background has SIGINT ignored, and hands that on.
    process = subprocess.Popen(
        arguments, cwd=tmp_path, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )
    while process.poll() is None and not [*tmp_path.glob("data/.large.*/*.npy")]:
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert not (tmp_path / "data" / "large").exists()
    return process


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_interrupt_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path):
    assert stop_while_encoding(number, tmp_path).returncode == code
    assert [*(tmp_path / "data").iterdir()] == []


def test_run_after_a_kill_cleans_up_and_succeeds(prepare, tmp_path: Path):
    assert stop_while_encoding(signal.SIGKILL, tmp_path).returncode == -signal.SIGKILL
    assert [*(tmp_path / "data").iterdir()] != []
    (tmp_path / "large.txt").write_text("less text\n" * 10)
    prepare("large.txt", "--tokenizer", "byte")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["large"]


# What must not be lost, or done in silence.


def test_a_dataset_has_one_maker_at_a_time(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    with held_alone(tmp_path / "data" / "a"):
        prepare("a.txt", expect_error=f"^{tmp_path}/data/a is in use by process {os.getpid()} on .*; wait for it")
    prepare("a.txt")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["a"]


def test_force_replaces_nothing_but_a_dataset(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt")
    (tmp_path / "data" / "a" / "checkpoints").mkdir()
    prepare("a.txt", "--force", expect_error="^data/a holds checkpoints, which is no part of a dataset; move it")


def test_a_link_stays_a_link(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    for flags in ((), ("--force",)):
        prepare("a.txt", "--out", "link", *flags)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "manifest.json").is_file()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", ["train-00000.npy", "tokenizer.json"])
def test_what_lacks_a_file_is_not_up_to_date(name: str, damage, prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt")
    before = files(tmp_path / "data" / "a")
    damage(tmp_path / "data" / "a" / name)
    if damage is Path.unlink and name == "tokenizer.json":
        prepare("a.txt", expect_error="^data/a exists and is not a dataset")
        return
    assert "Nothing changed" not in prepare("a.txt")
    assert files(tmp_path / "data" / "a") == before


def test_a_torn_manifest_is_replaced_by_force(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt")
    before = files(tmp_path / "data" / "a")
    (tmp_path / "data" / "a" / "manifest.json").write_bytes(before["manifest.json"][:100])
    prepare("a.txt", expect_error="^data/a was made with a manifest.json that is damaged; use --force to replace it")
    prepare("a.txt", "--force")
    assert files(tmp_path / "data" / "a") == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--vocab-size", "300", "--tokenizer", "byte"), "--vocab-size 300 is for --tokenizer bpe; byte has its own"),
        (("--field", "body"), "--field body is for JSON lines"),
        (("--glob", "*"), "--glob .* chooses files of a folder, and no input is one"),
        (("--sha256", "00"), "--sha256 00 is of a download, and no input is one"),
        (("--vocab-size", "9" * 12), "--vocab-size is 999999999999; it must be at least 261, at most 16777216"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(flags, message, prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text to prepare\n" * 10)
    prepare("a.txt", *flags, expect_error=f"^{message}")
    assert not (tmp_path / "data").exists()


def test_few_documents_give_their_tails_and_that_is_said(prepare, tmp_path: Path):
    (tmp_path / "book.txt").write_text("a" * 60_000)
    (tmp_path / "note.txt").write_text("b" * 49)
    printed = prepare("book.txt", "note.txt", "--tokenizer", "byte", "--out", "data/both")
    assert "the last 10% of each document is for validation: so few can't be drawn whole" in printed
    dataset = open_dataset(tmp_path / "data" / "both")
    assert (len(dataset.train), len(dataset.val)) == (54_000 + 44 + 2, 6_000 + 5 + 2)  # and the ends of texts
    printed = prepare("book.txt", "note.txt", "--tokenizer", "byte", "--out", "data/few", "--val-fraction", 0.004)
    assert "the last 0.4% of each document is for validation" in printed


def test_a_million_spaces_in_a_row_are_text(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("some words " + " " * 1_500_000 + "\nand more\n")
    prepare("a.txt", "--vocab-size", 300)
    dataset = open_dataset(tmp_path / "data" / "a")
    assert dataset.tokenizer.decode(dataset.train[:100]).startswith("some words ")


# Examples to fine-tune on.

QUESTIONS = [{"q": f"{i} + 1 = ", "a": f"{i + 1}, naïve 🚀 <|end|>", "id": i} for i in range(60)]
CHATS = [
    {
        "messages": [
            *([{"role": "system", "content": "Be <|user|> brief."}] if i % 3 == 0 else []),
            *[{"role": role, "content": f"{i}: {role}é"} for role in ("user", "assistant") * (1 + i % 4)],
        ]
    }
    for i in range(60)
]
PAIRS = ("--prompt-field", "q", "--completion-field", "a")
KINDS = {"pairs": (QUESTIONS, PAIRS), "chats": (CHATS, ("--chat",))}


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    """Writes records as lines of JSON, and returns the file's name."""

    def lines(name: str, records: list) -> str:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return name

    return lines


def turns_of(record: dict) -> list[tuple[str, str]]:
    if "messages" in record:
        return [(message["role"], message["content"]) for message in record["messages"]]
    return [("prompt", record["q"]), ("completion", record["a"])]


@pytest.mark.parametrize("tokenizer", ["bpe", "char", "byte", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_examples_are_prepared(kind: str, tokenizer: str, prepare, lines, tiktoken_cache, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 500)  # many more batches than there are threads
    records, flags = KINDS[kind]
    printed = prepare(lines("a.jsonl", records), *flags, "--tokenizer", tokenizer, "--out", "data")
    dataset = open_dataset(tmp_path / "data")
    assert dataset.manifest["dtype"] == "int32" and dataset.manifest["origin"]["examples"] == kind
    expected = [turns_of(record) for record in records]
    order = []
    for split in ("train", "val"):
        counts, found, learned = dataset.manifest["splits"][split], getattr(dataset, split), ""
        targets = 0
        for number in range(found.num_examples):
            ids = found.example(number)
            text = dataset.tokenizer.decode(np.where(ids < 0, ~ids, ids).tolist())
            order.append(next(i for i, turns in enumerate(expected) if as_text(turns) == text))
            turns = expected[order[-1]]
            ends = "<|end|>" if kind == "chats" else "<|endoftext|>"
            texts = [text for who, text in turns if who in ("assistant", "completion")]
            assert dataset.tokenizer.decode(ids[ids >= 0].tolist()) == "".join(text + ends for text in texts)
            targets += (ids >= 0).sum()
            learned += "".join(texts)
        assert counts["documents"] == found.num_examples and counts["targets"] == targets
        assert counts["bytes"] == len(learned.encode()) and counts["tokens"] == len(found) == found.lengths.sum()
    assert sorted(order) == [*range(60)]
    assert f"  examples   {60:>21}\n" in printed and f"  that count {sum_of(dataset, 'targets'):>21,}\n" in printed
    first = order[0]
    shown = as_text(expected[first], "⟦", "⟧")
    assert f"  The first example, what is to be learned between ⟦ and ⟧:\n    {shown}\n" in printed


def as_text(turns: list[tuple[str, str]], begin: str = "", end: str = "") -> str:
    """An example's tokens as text, with something around what counts."""
    shown = ""
    for who, text in turns:
        before, after = ("", "<|endoftext|>" * (who == "completion"))
        if who in ("system", "user", "assistant"):
            before, after = f"<|{who}|>", "<|end|>"
        shown += f"{before}{begin}{text}{after}{end}" if who in ("assistant", "completion") else before + text + after
    return shown


def sum_of(dataset: Dataset, what: str) -> int:
    return sum(counts[what] for counts in dataset.manifest["splits"].values())


def test_targets_counted_by_hand(prepare, lines, tmp_path: Path):
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "é!"}, {"role": "user", "content": "c"}]
    other = [{"role": "user", "content": "ba"}, *chat[1:]]
    records = [{"messages": messages} for messages in (chat, other)]
    prepare(lines("a.jsonl", records), "--chat", "--tokenizer", "byte", "--val-fraction", 0.5)
    dataset = open_dataset(tmp_path / "data" / "a")
    # user a b end, assistant é é ! end, user c end: é's two bytes, ! and the end count
    for split in ("train", "val"):
        counts = dataset.manifest["splits"][split]
        assert [counts[what] for what in ("documents", "tokens", "targets", "bytes")] == [1, 12, 4, 3]
        assert dataset.bytes_per_token(split) == 3 / 4
    found = [split.example(0).tolist() for split in (dataset.train, dataset.val)]
    assert sorted(found)[1] == [~258, ~97, ~98, ~260, ~259, 195, 169, 33, 260, ~258, ~99, ~260]


def test_an_empty_prompt_s_first_token_is_no_target(prepare, lines, tmp_path: Path):
    prepare(lines("a.jsonl", [{"q": "", "a": "yes"}, {"q": "", "a": "no"}]), *PAIRS, "--tokenizer", "byte")
    splits = json.loads((tmp_path / "data" / "a" / "manifest.json").read_text())["splits"]
    assert sorted(splits[split]["targets"] for split in ("train", "val")) == [2, 3]


def test_a_tokenizer_learns_from_what_is_said_not_from_json(prepare, lines, tmp_path: Path):
    prepare(lines("a.jsonl", QUESTIONS), *PAIRS, "--tokenizer", "char")
    tokenizer = open_dataset(tmp_path / "data" / "a").tokenizer
    assert {*tokenizer.characters} == {*"".join(text for record in QUESTIONS for text in (record["q"], record["a"]))}
    assert tokenizer.special_tokens == {"<|endoftext|>": len(tokenizer.characters)}
    prepare(lines("b.jsonl", CHATS), "--chat", "--vocab-size", 300)
    tokenizer = open_dataset(tmp_path / "data" / "b").tokenizer
    assert not any({*'["'} & {*tokenizer.decode([i])} for i in range(256, tokenizer.vocab_size - 5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("val_fraction", [0.1, 0.004])  # by lot, and too few for that
def test_merged_parts_of_examples_are_what_one_run_makes(kind, val_fraction, prepare, lines, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_writer, "SHARD_TOKENS", 50)
    records, flags = KINDS[kind]
    arguments = (lines("a.jsonl", records), *flags, "--vocab-size", 300, "--val-fraction", val_fraction)
    printed = prepare(*arguments, "--out", "whole")
    assert ("examples are for validation: so few can't be drawn by lot\n" in printed) == (val_fraction < 0.1)
    assert open_dataset(tmp_path / "whole").manifest["origin"].get("split") == (None if val_fraction == 0.1 else "few")
    for part in (1, 2, 3):
        prepare(*arguments, "--out", "web", "--part", f"{part}/3")
    lengths = tmp_path / "web.parts" / "2-of-3" / "train-lengths-00000.npy"
    before = lengths.read_bytes()
    lengths.write_bytes(before[:-1] + b"\1")
    prepare("--merge", "--out", "web", expect_error="2-of-3/train-lengths-00000.npy is damaged; .* --part 2/3 --force")
    lengths.write_bytes(before)
    prepare("--merge", "--out", "web")
    assert files(tmp_path / "web") == files(tmp_path / "whole") and len(files(tmp_path / "web")) > 20
    for flags in (arguments, ("--merge",)):
        assert "Nothing changed" in prepare(*flags, "--out", "web")


GOOD = '{"q": "a", "a": "b", "messages": [{"role": "assistant", "content": "c"}]}\n'


@pytest.mark.parametrize(
    "content, flags, message",
    [
        (None, ("--prompt-field", "q"), "--prompt-field and --completion-field go together"),
        (None, ("--completion-field", "a"), "--prompt-field and --completion-field go together"),
        (None, (*PAIRS, "--chat"), "--chat and --prompt-field exclude each other"),
        (None, (*PAIRS, "--field", "q"), "--prompt-field and --field exclude each other"),
        (None, ("--field", "q", "--chat"), "--chat and --field exclude each other"),
        (None, ("--pattern", "gpt2", "--tokenizer", "byte"), "--pattern gpt2 is for --tokenizer bpe; byte has its own"),
        (None, ("--pattern", "gpt9"), "--pattern gpt9 is unknown; the known ones are pairs, gpt2, llama3"),
        ("", ("--chat",), "a.jsonl: no text in there"),
        (" \n\n", PAIRS, "a.jsonl: no text in there"),
        (GOOD, PAIRS, "the val split has 0 tokens of 1 examples, too few"),
        (GOOD * 2 + '{"q": "half"}', PAIRS, r"a.jsonl, line 3 has only 'q'; it should have 'a' \(see --completion-f"),
        (GOOD + '{"q": "half", "a": ""}', PAIRS, "a.jsonl, line 2 has an empty 'a'"),
        (GOOD + '{"q": 7, "a": "b"}', PAIRS, "a.jsonl, line 2 has no text in 'q'"),
        (GOOD + "7", PAIRS, "a.jsonl, line 2 is not an object with fields and values"),
        (GOOD + '{"messages": "hello"}', ("--chat",), "a.jsonl, line 2 has 'messages' that should be a list"),
        (GOOD + '{"messages": [{"role": "user", "content": 7}]}', ("--chat",), "a.jsonl, line 2 has a message 1 whose"),
        (GOOD + GOOD.replace("assistant", "bot"), ("--chat",), "a.jsonl, line 2 has a message 1 of the role 'bot'"),
        (GOOD + GOOD.replace("assistant", "user"), ("--chat",), "a.jsonl, line 2 has no message of the assistant"),
    ],
)
def test_mistakes_in_examples_leave_nothing(content: str | None, flags, message: str, prepare, tmp_path: Path):
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    prepare("a.jsonl", *flags, expect_error=f"^{message}")
    assert not [*(tmp_path / "data").rglob("*")]


def test_examples_are_lines_of_json(prepare, lines, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    lines("folder/a.jsonl", QUESTIONS)
    (tmp_path / "folder" / "notes.txt").write_text("text")
    message = "^--prompt-field is for JSON lines, .*, which folder/notes.txt is not; .* --glob"
    prepare("folder", *PAIRS, expect_error=message)
    prepare("folder", *PAIRS, "--glob", "*.jsonl", "--tokenizer", "byte")
    assert open_dataset(tmp_path / "data" / "folder").train.num_examples > 30


def test_chats_come_from_a_pipe(run, tmp_path: Path):
    told = "".join(json.dumps(record) + "\n" for record in CHATS)
    result = run("prepare.py", "-", "--chat", "--tokenizer", "byte", input=told)
    assert (result.returncode, result.stderr) == (0, "") and "⟦" in result.stdout
    assert sum_of(open_dataset(tmp_path / "data" / "stdin"), "documents") == 60


def test_a_tokenizer_of_another_dataset_is_known_by_what_it_is(prepare, lines, tmp_path: Path):
    (tmp_path / "text.txt").write_text("text to prepare, with é\n" * 20)
    prepare("text.txt", "--vocab-size", 300)
    arguments = (lines("a.jsonl", CHATS), "--chat", "--out", "chats", "--tokenizer")
    prepare(*arguments, "data/text")
    assert open_dataset(tmp_path / "chats").tokenizer.state() == open_dataset(tmp_path / "data/text").tokenizer.state()
    shutil.copytree(tmp_path / "data" / "text", tmp_path / "copy")
    for path in ("data/text", "copy", "copy/tokenizer.json"):
        assert "Nothing changed" in prepare(*arguments, path)
    prepare("text.txt", "--tokenizer", "byte", "--force")
    prepare(*arguments, "data/text", expect_error="^chats was made with tokenizer bpe [0-9a-f]{64}; use --force")
    prepare("text.txt", "text.txt", "--tokenizer", "char", "--out", "characters")
    prepare("text.txt", "text.txt", "--tokenizer", "characters", "--out", "more")  # where no token ends a document
    assert files(tmp_path / "more").items() - files(tmp_path / "characters").items() == {
        ("manifest.json", (tmp_path / "more" / "manifest.json").read_bytes())
    }
    prepare("text.txt", "--tokenizer", "copy", "--out", "again")
    assert open_dataset(tmp_path / "again").tokenizer.state() == open_dataset(tmp_path / "chats").tokenizer.state()


def test_words_are_cut_as_asked(prepare, tmp_path: Path):
    (tmp_path / "a.txt").write_text("".join(f"{i} in 12345 words\n" for i in range(500)))
    prepare("a.txt", "--vocab-size", 400)
    prepare("a.txt", "--vocab-size", 400, "--pattern", "pairs")
    prepare("a.txt", "--vocab-size", 400, "--pattern", "gpt2", expect_error="data/a was made with no pattern")
    prepare("a.txt", "--vocab-size", 400, "--pattern", "gpt2", "--out", "gpt2")
    found = [open_dataset(tmp_path / path).tokenizer.encode(" 12345") for path in ("data/a", "gpt2")]
    assert [len(ids) > 1 for ids in found] == [True, False]
    assert json.loads((tmp_path / "gpt2" / "manifest.json").read_text())["origin"]["pattern"] == "gpt2"
