"""Files, folders, pipes, downloads, addresses: what is found, how it is opened, and what is said where it can't be."""

import contextlib
import gzip
import hashlib
import http.server
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from fsspec.implementations.memory import MemoryFile

from engine.data import sources
from engine.data.readers import can_be_cut, read
from engine.data.sources import Source, download, explained, find_sources


def texts(source: Source) -> list[str]:
    return [text.text for text in read(source)]


def found(*inputs: object, glob: str | None = None, sha256: str = "", spool: Path = Path()) -> list[Source]:
    return find_sources(tuple(map(str, inputs)), glob, sha256, spool)


def refused(*inputs: str, **options: str) -> str:
    """The one line that is said of inputs that can't be found, or not be read; it begins with their name."""
    with pytest.raises(ValueError) as error:
        _ = [texts(source) for source in found(*inputs, **options)]
    assert "\n" not in str(error.value) and str(error.value).startswith(inputs[0])
    return str(error.value)


def test_folder_gives_its_matching_files_but_no_hidden_ones(tmp_path: Path):
    for name in ("b.txt", "a/z.txt", "a/b/c.txt", "a.md", ".hidden.txt", ".git/x.txt", "a/.cache/y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [source.path.relative_to(tmp_path).as_posix() for source in found(tmp_path, glob="*.txt")]
    assert names == ["a/b/c.txt", "a/z.txt", "b.txt"]
    assert len(found(tmp_path)) == 4


@pytest.mark.parametrize("glob, message", [("*.py", "has no files that match"), ("**.txt", "is not a pattern")])
def test_folder_without_matching_files_is_refused(glob: str, message: str, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=message):
        found(tmp_path, glob=glob)


def test_pipe_is_read_more_than_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")  # as a shell's <(…) gives one
    (tmp_path / "spool").mkdir()
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_text("through a pipe"), daemon=True)
    writer.start()
    (source,) = found(tmp_path / "pipe", spool=tmp_path / "spool")
    assert source.path.is_file()
    writer.join()
    assert [texts(source) for _ in range(2)] == [["through a pipe"]] * 2


def test_standard_library_is_python_without_its_tests():
    files = found("stdlib")
    assert "argparse.py" in [source.name for source in files]
    assert all(source.path.suffix == ".py" and "test" not in source.path.parts for source in files)


class Server(http.server.ThreadingHTTPServer):
    """Serves its body, as the folder in an address says; it lists what it was asked for."""

    body = b"served text\n" * 1000
    stamp = "Sat, 21 Nov 2026 12:00:00 GMT"

    def __init__(self):
        self.asked = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.answer(self.server.body)

    def answer(self, body: bytes) -> None:
        self.close_connection = True
        way, size, bounds = self.path.split("/")[1], len(self.server.body), self.headers.get("Range")
        if way in ("absent", "forbidden"):
            self.send_error({"absent": 404, "forbidden": 403}[way])
            return
        if way == "ranges" and bounds:
            start, last = map(int, bounds.removeprefix("bytes=").split("-"))
            body = body[start : last + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{size}")
            size = len(body)
        else:
            self.send_response(200)
        self.send_header("Last-Modified", self.server.stamp)
        if way == "no-ranges-told":
            self.send_header("Accept-Ranges", "none")
        if way == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ff\r\nonly the start" if body else b"")
            return
        if way != "no-length":
            self.send_header("Content-Length", str(size))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client has seen enough
            self.wfile.write(body[: 100 if way == "short" else None])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield server
        server.shutdown()


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("way", ["ranges", "no-ranges", "no-ranges-told", "no-length"])
@pytest.mark.parametrize("size", [0, 1, 100, 2**20 + 1])
def test_a_file_is_read_from_any_web_server(way: str, size: int, server: Server):
    server.body = (b"a line of text\n" * (size // 15 + 1))[:size]
    for name in ("a.txt", "a.txt.gz?version=1"):
        if "gz" in name:
            server.body = gzip.compress(server.body, 0)  # no smaller
        (source,) = found(f"{server.address}/{way}/{name}")
        assert source.name == f"{server.address}/{way}/{name}"
        assert source.size == (0 if way == "no-length" else len(server.body))
        ranged = way == "ranges" and "gz" not in name and size > 1
        assert can_be_cut(source) == ranged or size <= 1
        assert "".join(texts(source)).encode() == (b"a line of text\n" * (size // 15 + 1))[:size]
        if ranged and size > 2**20:
            parts = [[*read(source, start, end)] for start, end in itertools.pairwise((0, 300_000, 900_000, size))]
            assert all(parts) and [text for some in parts for text in some] == [*read(source)]


def test_json_lines_and_parquet_are_read_from_a_web_server(server: Server, tmp_path: Path):
    lines = [f"line {number} " + "x" * 1000 for number in range(600)]
    server.body = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
    for way in ("ranges", "no-ranges"):
        (source,) = found(f"{server.address}/{way}/a.jsonl")
        assert texts(source) == lines
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "a.parquet", row_group_size=100)
    server.body = (tmp_path / "a.parquet").read_bytes()
    (source,) = found(f"{server.address}/ranges/a.parquet")
    assert texts(source) == lines
    server.body *= 300
    assert "could not be read" in refused(f"{server.address}/no-ranges/a.parquet")


def test_the_stamp_of_a_served_file_changes_when_it_does(server: Server):
    address = f"{server.address}/ranges/a.txt"
    before = found(address)[0].info
    assert found(address)[0].info == before and before[1]
    server.stamp = "Sat, 21 Nov 2026 12:00:01 GMT"
    assert found(address)[0].info != before


@pytest.mark.parametrize(
    ("path", "said"),
    [("absent/a.txt", "404"), ("forbidden/a.txt", "403"), ("short/a.txt", "100"), ("chunked/a.txt", "Not enough data")],
)
def test_what_a_web_server_fails_at_is_one_line(path: str, said: str, server: Server):
    line = refused(f"{server.address}/{path}")
    assert " could not be read (" in line and said in line and line.endswith("your permission")


def test_a_web_server_that_falls_silent_is_given_up(server: Server, monkeypatch):
    monkeypatch.setattr(sources, "SILENCE", 0.2)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        assert "imeout" in refused(f"http://127.0.0.1:{silent.getsockname()[1]}/a.txt")


def test_download_happens_once(server: Server, tmp_path: Path):
    server.body *= 100
    for way in ("ranges", "no-ranges", "no-length"):
        server.asked = []
        expected, address = hashlib.sha256(server.body).hexdigest(), f"{server.address}/{way}/good.txt?version=1"
        (source,) = found(address, sha256=expected.upper())
        assert source.path.name == "good.txt"  # whose ending says what it is
        assert source.path.read_bytes() == server.body and source.path in cached(tmp_path)
        asked = len(server.asked)
        assert found(address, sha256=expected) == [source] and len(server.asked) == asked
    assert len(cached(tmp_path)) == 3


def test_addresses_with_the_same_file_name_are_cached_apart(server: Server):
    sha256 = hashlib.sha256(server.body).hexdigest()
    assert download(f"{server.address}/a/good", sha256) != download(f"{server.address}/b/good", sha256)


def test_shakespeare_is_downloaded_and_checked(server: Server, shakespeare: Path, monkeypatch):
    monkeypatch.setattr(sources, "SHAKESPEARE", f"{server.address}/input.txt")
    with pytest.raises(ValueError, match=r"has SHA-256 .* not the expected 86c4"):
        found("shakespeare")
    server.body = shakespeare.read_bytes()
    (source,) = found("shakespeare")
    assert source.path.read_bytes() == server.body


@pytest.mark.parametrize(
    "path, message",
    [
        ("/good", "has SHA-256 .* not the expected 0000"),
        ("/short", "could not be read .*100"),
        ("/chunked", "could not be read"),
        ("/absent", "could not be read .*404"),
        ("/absent/ä ö", "could not be read .*404"),
    ],
)
def test_failed_download_leaves_nothing(path: str, message: str, server: Server, tmp_path: Path):
    address = server.address + path
    with pytest.raises(ValueError, match=f"^{re.escape(address)} {message}") as error:
        download(address, "0" * 64)
    assert "\n" not in str(error.value)
    assert cached(tmp_path) == []


def test_server_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(ValueError, match=r"could not be read .*Cannot connect"):
        download("http://127.0.0.1:9/text", "")
    assert "Cannot connect" in refused("http://127.0.0.1:9/text")


def test_only_a_file_that_is_not_there_is_explained_by_its_cause():
    known = {FileNotFoundError("path"): "OSError: 404", PermissionError("denied"): "PermissionError: denied"}
    for error, said in known.items():
        with pytest.raises(ValueError, match=rf"^a could not be read \({said}\); check"), explained("a"):
            raise error from OSError("404")


@pytest.mark.parametrize("address", ["http://[::1", "nowhere://a/b.txt", "memory://nothing/there.txt"])
def test_an_address_that_is_none_is_one_line(address: str):
    assert "could not be read" in refused(address)


# Other file systems, by the example of one in memory.


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_files_of_another_file_system(memory: fsspec.AbstractFileSystem):
    contents = {
        "d/b.txt": "b",
        "d/a.md": "a",
        "d/deep/c.txt": "c",
        "d/.hidden.txt": "h",
        "d/.git/x.txt": "x",
        "e.txt": "e",
    }
    for name, content in contents.items():
        memory.pipe(f"/{name}", content.encode())

    def named(*arguments: str, **options: str) -> dict[str, str]:
        return {source.name: "".join(texts(source)) for source in found(*arguments, **options)}

    assert named("memory://e.txt") == {"memory://e.txt": "e"}
    assert [*named("memory://d").values()] == [*named("memory://d/").values()] == ["a", "b", "c"]
    assert [*named("memory://d", glob="*.txt").values()] == ["b", "c"]
    assert [*named("memory://d", glob="deep/*.txt").values()] == ["c"]
    assert named("memory://d/*.txt") == {"memory:///d/b.txt": "b"}
    assert [*named("memory://*/*").values()] == [*named("memory://d/*").values()] == ["a", "b"]
    assert [*named("memory://d/**").values()] == ["a", "b", "c"]
    assert [*named("memory://d/*", glob="*.txt").values()] == ["b"]
    for address, options in (("memory://d", {"glob": "*.py"}), ("memory://d/*.md", {"glob": "*.py"})):
        assert "has no files that match '*.py'" in refused(address, **options) and "could not" not in refused(
            address, **options
        )


def test_a_large_file_of_another_file_system_is_read_in_stretches(memory: fsspec.AbstractFileSystem):
    content = "a line of text\n" * 2**16
    memory.pipe("/a.txt", content.encode())
    memory.pipe("/a.txt.zst", zstd.compress(content.encode()))
    (source,), (compressed,) = found("memory://a.txt"), found("memory://a.txt.zst")
    assert can_be_cut(source) and not can_be_cut(compressed)
    parts = [[*read(source, start, end)] for start, end in itertools.pairwise((0, 300_000, 900_000, source.size))]
    assert all(parts) and [text for some in parts for text in some] == [*read(source)] == [*read(compressed)]
    assert "".join(text.text for text in read(source)) == content
    memory.pipe("/a.txt.zst", zstd.compress(content.encode())[:-9])
    assert "is a damaged zstd file" in refused("memory://a.txt.zst")


@pytest.mark.parametrize("when", ["info", "open", "read"])
def test_what_another_file_system_refuses_is_one_line(when: str, memory: fsspec.AbstractFileSystem, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("access\ndenied")

    memory.pipe("/a.txt", b"text")
    owner = MemoryFile if when == "read" else type(memory)
    monkeypatch.setattr(owner, when, refuse)
    assert refused("memory://a.txt").startswith(
        "memory://a.txt could not be read (PermissionError: access denied); check"
    )


@pytest.mark.parametrize(
    ("address", "module"), [("abfs://bucket/a.txt", "adlfs"), ("http://127.0.0.1:9/a.txt", "aiohttp")]
)
def test_a_file_system_that_is_not_installed_is_told(address: str, module: str, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == module] + [module]:
        monkeypatch.setitem(sys.modules, name, None)
    assert "nstall" in refused(address) and module in refused(address)


def test_a_dataset_that_is_unknown_is_one_line(run: Callable):
    done = run("prepare.py", "hf:no-such-person/no-such-dataset", env=os.environ | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.match("error: hf:no-such-person/no-such-dataset could not be read .*--hf-config", done.stderr)


def test_a_saved_dataset_is_no_folder_of_texts_and_an_address_no_name(tmp_path: Path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="is a Hugging Face dataset, saved; give it as hf:/"):
        found(tmp_path)
    with pytest.raises(ValueError, match="hf://datasets/nobody/nothing"):
        found("hf://datasets/nobody/nothing/a.parquet")


# Folders, endings, and what an option is for.


def test_links_to_folders_are_followed_but_not_in_circles(tmp_path: Path):
    (tmp_path / "here" / "deep").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_text("text")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    assert [source.name for source in found(tmp_path / "here")] == [str(tmp_path / "here" / "link" / "a.txt")]
    (tmp_path / "here" / "deep" / "back").symlink_to(tmp_path / "here")
    with pytest.raises(ValueError, match=r"deep/back is a link that leads back to a folder around it; remove it"):
        found(tmp_path / "here")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_can_not_be_read_is_no_empty_one(tmp_path: Path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(PermissionError):
        found(tmp_path)


def test_a_folder_may_be_deep(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    Path("a.txt").write_text("text")
    os.chdir(tmp_path)
    assert [source.name for source in found("d")] == ["d/" * 1200 + "a.txt"]
    subprocess.run(["rm", "-r", "d"], check=True)  # Python's own way is not so patient


@pytest.mark.parametrize(
    ("glob", "names"),
    [("*.md", ["a.md", "sub/b.md"]), ("sub/*.md", ["sub/b.md"]), ("**/*.md", ["a.md", "sub/b.md"])],
)
def test_a_glob_is_sought_at_any_depth(glob: str, names: list[str], tmp_path: Path):
    (tmp_path / "sub").mkdir()
    for name in ("a.md", "a.txt", "sub/b.md", ".c.md"):
        (tmp_path / name).write_text("text")
    assert [source.name for source in found(tmp_path, glob=glob)] == [str(tmp_path / name) for name in names]


@pytest.mark.parametrize("glob", ["", "/a", "a/**/b"])
def test_what_is_no_pattern_is_refused(glob: str, tmp_path: Path):
    with pytest.raises(ValueError, match=f"--glob '{re.escape(glob)}' is not a pattern"):
        found(tmp_path, glob=glob)


@pytest.mark.parametrize(("option", "flag"), [({"glob": "*"}, "--glob"), ({"sha256": "00"}, "--sha256")])
def test_an_option_that_no_input_has_a_use_for_is_refused(option: dict, flag: str, tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=f"^{flag} .*, and no input is one; leave it out"):
        found(tmp_path / "a.txt", **option)


@pytest.mark.parametrize(
    ("name", "is_json"),
    [
        ("a.JSONL", 1),
        ("a.ndjson", 1),
        ("a.jsonl.2024-01-01", 1),
        ("a.Jsonl.GZ", 1),
        ("a.jsonl.txt", 0),
        ("a.json", 0),
        ("a.json.GZ", 1),
    ],
)
def test_the_ending_tells_how_a_file_is_read_whatever_its_case(name: str, is_json: bool, tmp_path: Path):
    line = b'{"text": "a document"}\n'
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("GZ") else line)
    assert texts(*found(tmp_path / name)) == (["a document"] if is_json else [line.decode()])


@pytest.mark.parametrize(
    ("content", "is_json"), [('{"text": "a"}\n{"text": "b"}', True), ("{\n}", False), ("7\n", False)]
)
def test_json_lines_are_known_in_a_pipe_too(content: str, is_json: bool, tmp_path: Path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(content,))
    writer.start()
    (source,) = found(tmp_path / "pipe", spool=tmp_path)
    writer.join()
    assert texts(source) == (["a", "b"] if is_json else [content])


@pytest.mark.parametrize("before", ["", "\ufeff", " "])
def test_json_lines_are_known_in_a_pipe_by_a_long_first_one_too(before: str, tmp_path: Path):
    book = "x" * 2**20
    content = before + "".join(json.dumps({"text": text}) + "\n" for text in (book, "b"))
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(content, "utf-8"))
    writer.start()
    (source,) = found(tmp_path / "pipe", spool=tmp_path)
    writer.join()
    assert "".join(texts(source)) == f"{book}b"  # a long one comes in pieces
