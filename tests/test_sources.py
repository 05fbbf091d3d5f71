"""Text from files, folders, .jsonl, gzip, pipes and downloads."""

import gzip
import hashlib
import http.server
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import sources
from engine.sources import Source, documents, download, find_sources


def texts(path: Path, **reading: str) -> list[str]:
    return ["".join(document()) for document in [*documents(Source(path, path.name, **reading))]]


def found(*inputs: object, glob: str | None = None, sha256: str = "", spool: Path = Path()) -> list[Source]:
    return find_sources(tuple(map(str, inputs)), glob, sha256, spool)


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_text_is_whole_however_blocks_cut_its_characters(block: int, strings: list[str], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", block)
    text = "".join(strings)[:2000]
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert texts(tmp_path / "a.txt") == [text]


@pytest.mark.parametrize("block", [1, 4, 5, 6, 7, 100])
@pytest.mark.parametrize(
    "content, offset",
    [(b"abc\xffdef", 3), (b"abcd\xc3\xa9\xe2\x82", 6), (b"abcd\xf0\x9f\x9aefgh", 4), (b"abcde\xed\xa0\x80", 5)],
)
@pytest.mark.parametrize("name, write", [("a.txt", bytes), ("a.txt.gz", gzip.compress)])
def test_bytes_that_are_not_utf8_are_located(content, offset, block, name, write, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", block)
    (tmp_path / name).write_bytes(write(content))
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} is not UTF-8 at byte {offset};"):
        texts(tmp_path / name)
    assert texts(tmp_path / name, errors="replace") == [content.decode(errors="replace")]


@pytest.mark.parametrize("damage", [lambda z: z[:-9], lambda z: b"no" + z, lambda z: z[:10] + b"\xff\xff" + z[12:]])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_damaged_gzip_is_named(damage, name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(damage(gzip.compress(b'{"text": "hello"}\n' * 100)))
    with pytest.raises(ValueError, match=rf"^{re.escape(name)} is a damaged gzip file"):
        texts(tmp_path / name)


@pytest.mark.parametrize("name, write", [("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress)])
def test_jsonl_has_a_document_a_line(name: str, write, tmp_path: Path):
    lines = (
        b'{"text": " one\\ntwo\\n"}\n\n  \r\n{"id": 1, "text": "\\u00e9\xc3\xa9"}\r\n{"text": ""}\n{"text": "\\ud83d!"}'
    )
    (tmp_path / name).write_bytes(write(lines))
    assert texts(tmp_path / name) == [" one\ntwo\n", "éé", "", "\ufffd!"]  # half a character can't be encoded


def test_jsonl_from_another_field_with_errors_replaced(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "no", "body": "yes\xff"}\n')
    assert texts(tmp_path / "a.jsonl", field="body", errors="replace") == ["yes\ufffd"]


@pytest.mark.parametrize(
    "line, message",
    [
        (b'{"text": "cut', "is not JSON"),
        (b'{"body": "b", "id": 1}', "has only 'body', 'id'; it should have the field 'text'"),
        (b'["text"]', "is not an object"),
        (b"7", "is not an object"),
        (b'{"text": 7.5}', "the field 'text' is not text"),
        (b'{"text": "\xff"}', "is not UTF-8 at byte 10"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_bad_jsonl_line_is_numbered(line: bytes, message: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 3:? {message}"):
        texts(tmp_path / "a.jsonl")


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
    assert [texts(source.path) for _ in range(2)] == [["through a pipe"]] * 2


def test_standard_library_is_python_without_its_tests():
    files = found("stdlib")
    assert "argparse.py" in [source.name for source in files]
    assert all(source.path.suffix == ".py" and "test" not in source.path.parts for source in files)


class Server(http.server.ThreadingHTTPServer):
    """Serves GET of /good, breaks off at /short and /chunked, has nothing else; it lists what it was asked for."""

    body = b"served text\n" * 1000

    def __init__(self):
        self.asked = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.close_connection = True
        if self.path.startswith("/absent"):
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"ff\r\nonly the start")
            return
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body[: 100 if self.path == "/short" else None])

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


def test_download_happens_once(server: Server, tmp_path: Path):
    expected = hashlib.sha256(server.body).hexdigest()
    for _ in range(2):
        (source,) = found(f"{server.address}/dir/good.txt?version=1", sha256=expected.upper())
        assert source.path.name == "good.txt"  # whose ending says what it is
        assert source.path.read_bytes() == server.body
    assert server.asked == ["/dir/good.txt?version=1"]
    assert cached(tmp_path) == [source.path]


def test_addresses_with_the_same_file_name_are_cached_apart(server: Server):
    assert download(f"{server.address}/a/good", "") != download(f"{server.address}/b/good", "")


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
        ("/short", ".* broke off after 100 of 12000 bytes"),
        ("/chunked", "could not be downloaded"),
        ("/absent", "could not be downloaded .*404"),
        ("/ä ö", "could not be downloaded"),
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
    with pytest.raises(ValueError, match=r"could not be downloaded .*refused"):
        download("http://127.0.0.1:9/text", "")
