"""Files, folders, standard input, addresses: which sources are listed, and how they are read."""

import contextlib
import gzip
import http.server
import json
import os
import pickle
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from helpers import make_dataset, read_lines, texts_of, write_lines

from engine.core.errors import UserError
from engine.data.dataset import open_dataset
from engine.data.documents.document import read_documents
from engine.data.records.reader import choose_sources
from engine.data.records.text import DEFAULT_READER
from engine.data.sources import built_in
from engine.data.sources import source as sources
from engine.data.sources.finder import find_sources
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source
from prepare import PrepareConfig, list_sources


def find(*inputs: object, globs: Sequence[str] = (), spool: Path = Path()) -> list[Source]:
    return find_sources([*map(str, inputs)], spool, globs)


def error_of(*inputs: object, **options: Any) -> str:
    """Return the one line of the error when inputs are listed and read."""
    with pytest.raises(UserError) as error:
        _ = [texts_of(source) for source in find(*inputs, **options)]
    assert "\n" not in str(error.value)
    return str(error.value)


# Folders.


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        ([], ["a/b/c.txt", "a/z.txt", "a.md", "b.txt"]),
        (["*.txt"], ["a/b/c.txt", "a/z.txt", "b.txt"]),
        (["a/*.txt"], ["a/z.txt"]),
        (["**/*.md", "b*"], ["a.md", "b.txt"]),
        (["!*.txt"], ["a.md"]),
        (["*.txt", "!a/*.txt"], ["a/b/c.txt", "b.txt"]),
    ],
)
def test_a_folder_has_the_files_that_match_at_any_depth(globs, names, tmp_path: Path):
    hidden = [".hidden.txt", ".git/x.txt", "a/.cache/y.txt"]
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "a.md", *hidden):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    listed = find(tmp_path, globs=globs)
    assert [source.name for source in listed] == [str(tmp_path / name) for name in names]
    assert [texts_of(source) for source in listed] == [[name] for name in names]


def test_a_title_is_the_path_in_the_folder_or_the_name(tmp_path: Path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c d.txt").write_text("text")
    (tmp_path / "a" / "state.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a" / "b" / "c d.txt"
    address = f"file://{tmp_path}/"
    inputs = [file, file.parent, "a/b", f"{address}a/b/", f"{address}*/b/*.txt", f"hf:{tmp_path}/a"]
    titles = [source.title for source in find(*inputs)]
    assert titles == ["c d.txt"] * 4 + ["a/b/c d.txt", "a"]
    assert Source(file, "https://host/c.txt?key=1").title == "c.txt"
    assert "asyncio/queues.py" in [source.title for source in find("stdlib")]
    assert f"hf:{tmp_path}/a" in error_of(tmp_path / "a")  # a saved dataset


@pytest.mark.parametrize("glob", ["*.py", "/a", "a/**/b", "**.txt", ""])
def test_an_unsuitable_glob_is_refused(glob: str, tmp_path: Path):
    assert "contains no files" in error_of(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    assert "--glob" in error_of(tmp_path, globs=[glob])


def test_each_real_folder_and_file_is_read_once_however_many_links_lead_to_it(tmp_path: Path):
    for number in range(22):
        (tmp_path / f"{number:02}").mkdir()
        (tmp_path / f"{number:02}" / "a.txt").write_text(f"text {number}")
        for name in ("one", "two"):
            (tmp_path / f"{number:02}" / name).symlink_to(tmp_path / f"{number + 1:02}")
    (tmp_path / "22").mkdir()
    (tmp_path / "22" / "back").symlink_to(tmp_path / "00")
    (tmp_path / "00" / "0.txt").symlink_to("a.txt")
    listed = find(tmp_path / "00")
    texts = [f"text {number}" for number in range(22)]
    assert sorted(texts_of(source)[0] for source in listed) == sorted(texts)
    assert listed[0].name == str(tmp_path / "00" / "0.txt") and listed == find(tmp_path / "00")
    assert len(find(tmp_path / "00", tmp_path / "00")) == 2 * len(listed)
    assert len(find(tmp_path / "00", globs=["a.txt"])) == 22


JUNK = {  # what is not text, also in two of which the other encoding comes late
    "latin-1.txt": "Größe".encode("latin-1"),
    "late.txt": b"words\n" * 9999 + b"\xe9",
    "large.txt": b"words\n" * 99_999 + b"\xe9",
    "Thumbs.db": bytes(range(256)),
    "utf-16-le.txt": "text".encode("utf-16-le"),
    "photo.png": b"\x89PNG\r\n",
    "paper.pdf": b"%PDF-1.4",
    "a.zip": b"PK\x03\x04\x14\0",
    "torn.txt.gz": b"not compressed",
    "a.so": b"\x7fELF\x02\x01\0",
    "arrays.npy": b"\x93NUMPY\x01\0\0\0",
}


def test_a_folder_of_junk_is_taken_at_the_first_try(tmp_path: Path):
    for name, content in JUNK.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "old.md").symlink_to("gone.md")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("settings.json", "budget.csv"):
        (tmp_path / name).write_text('{"a": 1}')
    for number in range(9):
        (tmp_path / f"{number}.md").write_text(f"note {number}\n" * 9)
    out = make_dataset(tmp_path, tmp_path, out=tmp_path.with_name("junk-data"))
    statistics = open_dataset(out).manifest["statistics"]
    left_out = "files left out, as they are no readable text: loop, old.md, pipe, …"
    assert statistics["notes"][left_out] == len(JUNK) + 3
    assert statistics["documents"] == 9
    assert any("--glob '*.csv' --glob '*.json'" in note for note in statistics["notes"])
    assert any(note.endswith(": 9 .md, 2 .txt") for note in statistics["notes"])
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "latin-1.txt").write_bytes(JUNK["latin-1.txt"])
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "zero.txt").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"alone/latin-1\.txt: is not UTF-8"):
        make_dataset(tmp_path, tmp_path / "alone")
    assert error_of(tmp_path / "links").startswith(f"{tmp_path}/links/zero.txt: links to no file")
    assert "no files" in error_of(tmp_path / "links", globs=["*.md"])
    compressed = gzip.compress(random.Random(0).randbytes(2**18).hex().encode())
    (tmp_path / "links" / "zero.txt").unlink()
    (tmp_path / "links" / "cut.txt.gz").write_bytes(compressed[: len(compressed) // 2])
    with pytest.raises(UserError, match=r"cut\.txt\.gz: could not be read"):  # it may be text
        make_dataset(tmp_path, tmp_path / "links")
    for name in [*JUNK, "old.md", "pipe", "loop"]:  # named, it is refused
        assert error_of(tmp_path / name).startswith(f"{tmp_path / name}: ")
    (tmp_path / "big.csv").write_text("text\n" + "one\n" * 200_000)
    notes_of_records = Notes()
    choose_sources(find(tmp_path), DEFAULT_READER, notes_of_records)
    assert any("--glob '*.md'" in note for note in notes_of_records)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("train.txt test.txt validation.txt latest.txt", "train.txt latest.txt|validation.txt"),
        ("train/a.txt Test/a.txt dev/a.txt", "train/a.txt|dev/a.txt"),
        (
            "train-00000-of-00001.txt test-00000-of-00001.txt a.txt",
            "a.txt train-00000-of-00001.txt",
        ),
        ("val.txt b.txt", "b.txt|val.txt"),
        ("test.txt", "test.txt"),
        ("tests/a.txt testing.txt", "testing.txt tests/a.txt"),
    ],
)
def test_names_of_splits_are_splits(names: str, expected: str, tmp_path: Path):
    for name in names.split():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f"{name}\n" * 20)
    config = PrepareConfig((str(tmp_path / "in"),))
    notes = Notes()
    splits = list_sources(config, DEFAULT_READER, tmp_path, notes)
    titles = [{source.title for source in listed} for listed in splits]
    train, _, val = expected.partition("|")
    assert titles == [{*train.split()}, {*val.split()}]
    assert ("for validation, validation data" in str(notes)) == bool(val)
    is_left_out = len(titles[0] | titles[1]) < len(names.split())
    assert ("test data by their names" in str(notes)) == is_left_out
    if val:
        with pytest.raises(UserError, match=r"^--val-fraction: "):
            list_sources(replace(config, val_fraction=0.2), DEFAULT_READER, tmp_path, notes)


# Standard input.


@pytest.fixture
def give_stdin() -> Iterator[Callable[[Path], None]]:
    """Return a function that makes a file or a folder the standard input."""
    original = os.dup(0)

    def give(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.dup2(descriptor, 0)
        os.close(descriptor)

    yield give
    os.dup2(original, 0)


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("through standard input", ["through standard input"]),
        ('\ufeff\n {"text": "a"}\n{"text": "b"}', ["a", "b"]),
        ("{\n}", ["{\n}"]),
        ("[1] a note\n", ["[1] a note\n"]),
        ("[{a}]\n", ["[{a}]\n"]),
        ('[\r\n  {\r\n "text": "a"\r\n  },\r\n{"text": "b"}]\r\n', ["a", "b"]),
        ('{"text": "' + "a" * 2**19 + '"}\n{"text": "b"}', [*["a" * 2**16] * 8, "b"]),
    ],
)
def test_standard_input_is_text_or_records_and_read_twice(content, texts, give_stdin, tmp_path):
    (tmp_path / "input").write_text(content)
    give_stdin(tmp_path / "input")
    (source,) = find("-", spool=tmp_path)
    assert texts_of(source) == texts_of(source) == texts
    give_stdin(tmp_path)
    assert re.match(f"-.*{tmp_path}.*directory.*TMPDIR", error_of("-", spool=tmp_path))


# Files that change between two readings.


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (Path.unlink, "No such file|FileNotFound"),
        (lambda path: os.truncate(path, 300_000), "changed|shorter|could not be read"),
        (lambda path: path.write_bytes(path.read_bytes()), "changed"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_file_that_changes_between_readings_is_named(name, change, word, tmp_path: Path):
    path = tmp_path / name
    texts = [f"{number} " + random.Random(number).randbytes(50_000).hex() for number in range(9)]
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    elif name == "a.jsonl":
        write_lines(path, [{"text": text} for text in texts])
    else:
        path.write_text("".join(texts))
    (source,) = find(path)
    assert source.size and texts_of(source)
    change(path)
    if path.exists():
        os.utime(path, ns=(1, 1))
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}.*({word})"):
        texts_of(source)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path):
    (source,) = find(write_lines(tmp_path / "a.jsonl", [{"text": "a"}] * 3))
    texts = read_documents(source)
    next(texts)
    with open(source.path, "a") as file:
        file.write("\n")
    with pytest.raises(UserError, match="changed"):
        list(texts)


def test_the_documentation_is_the_reference_and_the_docstrings_of_each_module(
    tmp_path, monkeypatch
):
    modules = find("stdlib")
    assert not any("test" in Path(source.path).parts for source in modules)
    few = [source for source in modules if source.name in ("argparse.py", "zipfile.py")]
    monkeypatch.setattr(built_in, "find_modules", lambda spool: few)
    (source,) = find_sources(["pydocs"], tmp_path)
    texts = [record["text"] for record in read_lines(Path(source.path))]
    assert len(texts) > 70 and source.kind == ".jsonl"
    assert any(text.startswith('The "assert" statement') for text in texts)
    (argparse,) = [text for text in texts if text.startswith("Command-line parsing library")]
    assert "Keyword Arguments:" in argparse and "def add_argument(self" not in argparse


def test_the_version_changes_with_the_file_and_a_source_can_be_pickled(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    before = find("a.txt")[0].info
    assert before == find("a.txt")[0].info and all(before)
    os.utime("a.txt", ns=(1, 1))
    (source,) = find("a.txt")
    assert source.info != before
    monkeypatch.chdir("/")
    assert texts_of(pickle.loads(pickle.dumps(source))) == ["text"]


# Web servers.


class Server(http.server.ThreadingHTTPServer):
    """Serves its body in the way that the first folder of an address names."""

    body = b"served text\n" * 1000
    last_modified = "Sat, 21 Nov 2026 12:00:00 GMT"

    def __init__(self):
        self.requests: list[str] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.answer(self.server.body)

    def answer(self, body: bytes) -> None:
        self.close_connection = True
        way = self.path.split("/")[1]
        size = len(self.server.body)
        bounds = self.headers.get("Range")
        if way.isdigit():
            self.send_error(int(way))
            return
        if way == "ranges" and bounds:
            start, last = map(int, bounds.removeprefix("bytes=").split("-"))
            body = body[start : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{size}")
            size = len(body)
        else:
            self.send_response(200)
        self.send_header("Last-Modified", self.server.last_modified)
        if way != "no-length":
            self.send_header("Content-Length", str(size))
        self.end_headers()
        if way == "slow":
            time.sleep(1)
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body[: 100 if way == "short" else None])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        options = {"poll_interval": 0.01}
        threading.Thread(target=server.serve_forever, kwargs=options).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("way", ["ranges", "no-ranges", "no-length"])
def test_a_file_is_read_from_any_web_server(way: str, server: Server):
    content = b"a line of text\n" * 2**19  # more than a block of fsspec
    for name, body in (("a.txt", content), ("a.txt.gz?version=1", gzip.compress(content))):
        server.body = body
        (source,) = find(f"{server.address}/{way}/{name}")
        assert source.name == f"{server.address}/{way}/{name}"
        assert source.size == (0 if way == "no-length" else len(body))
        assert "".join(texts_of(source)).encode() == content


def test_json_lines_and_parquet_are_read_from_a_web_server(server: Server, tmp_path: Path):
    lines = [f"line {number} " + "x" * 1000 for number in range(600)]
    server.body = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
    assert texts_of(*find(f"{server.address}/no-ranges/a.jsonl")) == lines
    table = pyarrow.table({"text": lines})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    server.body = (tmp_path / "a.parquet").read_bytes()
    address = f"{server.address}/ranges/a.parquet"
    assert texts_of(*find(address)) == lines
    before = find(address)[0].info
    assert find(address)[0].info == before and before[1]
    server.last_modified = "Sat, 21 Nov 2026 12:00:01 GMT"
    assert find(address)[0].info != before


@pytest.mark.parametrize(
    ("path", "word"), [("404/ä ö", "404|FileNotFound"), ("500/a", "500"), ("short/a", "100")]
)
def test_a_failed_request_is_one_line(path, word, server):
    address = f"{server.address}/{path}"
    assert re.match(f"{re.escape(address)}: could not be read .*({word})", error_of(address))


def test_a_slow_or_silent_web_server_is_given_up(server: Server, monkeypatch):
    monkeypatch.setattr(sources, "HTTP_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address in (f"{server.address}/slow", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            assert "imeout" in error_of(f"{address}/a.txt")


def test_shakespeare_is_downloaded_once_and_checked(server, shakespeare, tmp_path, monkeypatch):
    monkeypatch.setattr(built_in, "SHAKESPEARE_URL", f"{server.address}/404/input.txt")
    assert re.search("could not be read.*404.*stdlib.* file", error_of("shakespeare"))
    monkeypatch.setattr(built_in, "SHAKESPEARE_URL", f"{server.address}/input.txt")
    assert "86c4" in error_of("shakespeare")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    server.body = shakespeare.read_bytes()
    (source,) = find("shakespeare")
    assert Path(source.path).read_bytes() == server.body
    num_requests = len(server.requests)
    assert find("shakespeare") == [source] and len(server.requests) == num_requests


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    line = error_of("shakespeare")
    assert f"{tmp_path}/file/gpt-trainer: " in line and "XDG_CACHE_HOME" in line


# Other file systems.


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


@pytest.mark.parametrize(
    ("path", "globs", "text"),
    [
        ("e.txt", [], "e"),
        ("d/", [], "abc"),
        ("d", ["deep/*.txt"], "c"),
        ("d", ["!deep/*"], "ab"),
        ("*/*", [], "ab"),
        ("d/**", ["*.txt"], "bc"),
    ],
)
def test_files_of_another_file_system(path: str, globs: list[str], text: str, memory):
    contents = {"d/b.txt": "b", "d/a.md": "a", "d/deep/c.txt": "c", "e.txt": "e"}
    for name, content in (contents | {"d/.hidden.txt": "h", "d/.git/x.txt": "x"}).items():
        memory.pipe(f"/{name}", content.encode())
    listed = find(f"memory://{path}", globs=globs)
    assert "".join("".join(texts_of(source)) for source in listed) == text
    assert "'*.py'" in error_of("memory://d", globs=["*.py"])


@pytest.mark.parametrize(
    "address", ["http://[::1", "nowhere://a/b.txt", "memory://nothing/a.txt", "abfs://bucket/a"]
)
def test_an_unsuitable_address_is_one_line(address: str, monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    line = error_of(address)
    assert line.startswith(f"{address}: could not be read")
    assert ("adlfs" in line) == address.startswith("abfs")


def test_an_unknown_hugging_face_dataset_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert error_of("hf:nobody/nothing").startswith("hf:nobody/nothing: could not be read")


def test_a_bug_while_reading_is_not_called_an_unreadable_file(tmp_path: Path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    monkeypatch.setattr("engine.data.records.tables.JSON_DECODER", None)
    with pytest.raises(AttributeError):
        texts_of(tmp_path / "a.jsonl")
