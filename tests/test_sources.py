"""Text from files, folders, .jsonl, gzip, pipes and downloads."""

import gzip
import hashlib
import http.server
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import sources
from engine.sources import Source, documents, download, find_sources


def texts(path: Path, **reading: object) -> list[str]:
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
        (b'{"text": 7}', "the field 'text' is not text"),
        (b'{"text": "\xff"}', "is not UTF-8 at byte 10"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_bad_jsonl_line_is_numbered(line: bytes, message: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 3:? {message}"):
        texts(tmp_path / "a.jsonl")


def turns_of(record: dict) -> list[tuple[str, str]]:
    if "bad" in record:
        raise ValueError("has something bad")
    return [("user", record["q"]), ("assistant", record["a"])]


def test_examples_are_the_json_of_their_turns(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d", "q": "é \\"x\\"\\n"}\n\n{"q": "", "a": "\\ud83d\\ude80"}\n')
    found = texts(tmp_path / "a.jsonl", turns_of=turns_of)
    assert found[0] == '[["user", "é \\"x\\"\\n"], ["assistant", "\ufffd"]]'
    assert found[1] == '[["user", ""], ["assistant", "🚀"]]' and len(found) == 2


@pytest.mark.parametrize(
    "line, message", [('{"bad": 1}', "has something bad"), ("[1]", "is not an object with fields")]
)
def test_bad_example_is_numbered(line: str, message: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(f'{{"q": "a", "a": "b"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"^a\.jsonl, line 3 {message}"):
        texts(tmp_path / "a.jsonl", turns_of=turns_of)


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
    [("a.JSONL", 1), ("a.ndjson", 1), ("a.jsonl.2024-01-01", 1), ("a.Jsonl.GZ", 1), ("a.jsonl.txt", 0), ("jsonl", 0)],
)
def test_the_ending_tells_how_a_file_is_read_whatever_its_case(name: str, is_json: bool, tmp_path: Path):
    line = b'{"text": "a document"}\n'
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith("GZ") else line)
    assert texts(tmp_path / name) == (["a document"] if is_json else [line.decode()])


@pytest.mark.parametrize(
    ("content", "is_json"), [('{"text": "a"}\n{"text": "b"}', True), ("{\n}", False), ("7\n", False)]
)
def test_json_lines_are_known_in_a_pipe_too(content: str, is_json: bool, tmp_path: Path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(content,))
    writer.start()
    (source,) = found(tmp_path / "pipe", spool=tmp_path)
    writer.join()
    assert texts(source.path) == (["a", "b"] if is_json else [content])


def test_json_may_begin_with_a_byte_order_mark_and_have_numbers_of_any_length(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": ' + "7" * 5000 + "}\n", encoding="utf-8-sig")
    assert texts(tmp_path / "a.jsonl") == ["a"]


def test_an_address_that_is_none_is_one_line():
    with pytest.raises(ValueError, match=r"http://\[::1 could not be downloaded \(Invalid IPv6 URL\)"):
        found("http://[::1")
