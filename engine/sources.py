"""Where text comes from: files, folders, downloads, standard input → documents, a block at a time."""

import codecs
import contextlib
import gzip
import hashlib
import http.client
import json
import os
import re
import shutil
import sysconfig
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from engine.files import sha256

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Of Python's standard library: what is not part of it, tests, which not every machine has, and tables.
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
BLOCK = 2**20  # bytes read at a time
NOT_UTF8 = "{} is not UTF-8 at byte {}; convert it, or use --errors replace"

# A document's text, read anew at each call, a block at a time.
Document = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Source:
    """A file of documents, and how to read it."""

    path: Path  # whose endings tell the kind of file
    name: str  # as the user knows it
    field: str = "text"  # where a format with fields has the text
    errors: str = "strict"  # or replace: bytes that are not UTF-8 become U+FFFD
    turns_of: Callable[[dict[str, Any]], Any] | None = None  # what finds the turns in a record, where it is an example


def find_sources(inputs: tuple[str, ...], glob: str | None, expected_sha256: str, spool: Path) -> list[Source]:
    """The files that the inputs stand for, in an order that is the same on every machine.

    glob chooses a folder's files, at any depth (None: all); expected_sha256 is what a download must hash to, if not
    empty; spool is a folder for copies of pipes, as all is read more than once. Raises ValueError for an input that is
    not there, and for a glob or hash without a folder or download.
    """
    sources, folders, downloads = [], 0, 0
    for name in inputs:
        path = Path(name)
        if name == "stdlib":
            root = Path(sysconfig.get_path("stdlib"))
            found = _files(root, "*.py", lambda entry: entry.name in NOT_IN_STDLIB or entry.is_symlink())
            sources += [Source(root / path, str(path)) for path in found]
        elif name == "-" or path.is_fifo():
            copy = spool / str(len(sources))
            with open(copy, "wb") as file, open(0 if name == "-" else name, "rb", closefd=name != "-") as pipe:
                shutil.copyfileobj(pipe, file)
            if _begins_as_json_lines(copy):
                copy = copy.rename(copy.with_suffix(".jsonl"))
            sources.append(Source(copy, "standard input" if name == "-" else name))
        elif name == "shakespeare":
            sources.append(Source(download(SHAKESPEARE, SHAKESPEARE_SHA256), name))
        elif name.startswith(("http://", "https://")):
            sources.append(Source(download(name, expected_sha256), name))
            downloads += 1
        elif path.is_dir():
            folders, pattern = folders + 1, "*" if glob is None else glob
            found = [path / file for file in _files(path, pattern, lambda entry: entry.name.startswith("."))]
            if not found:
                raise ValueError(f"{path} has no files that match {pattern!r}; see --glob")
            sources += [Source(file, str(file)) for file in found]
        elif path.exists():
            sources.append(Source(path, name))
        else:
            advice = "give a file, a folder, an http(s) address, -, stdlib or shakespeare"
            raise ValueError(f"{name} is not there: {advice}")
    if glob is not None and not folders:
        raise ValueError(f"--glob {glob} chooses files of a folder, and no input is one; leave it out")
    if expected_sha256 and not downloads:
        raise ValueError(f"--sha256 {expected_sha256} is of a download, and no input is one; leave it out")
    return sources


def _begins_as_json_lines(path: Path) -> bool:
    with open(path, "rb") as file, contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(file.readline(BLOCK), parse_int=str), dict)
    return False


def _files(folder: Path, glob: str, skip: Callable[[os.DirEntry], bool]) -> list[Path]:
    """The folder's files that match, at any depth, as seen from the folder; links are followed.

    Raises OSError for a folder that can't be read, ValueError for a link in a circle, or no pattern.
    """
    pattern, found, waiting = glob.removeprefix("**/"), [], [str(folder)]
    if not pattern or "**" in pattern or pattern.startswith("/"):
        raise ValueError(f"--glob {glob!r} is not a pattern for files, such as *.txt or docs/*.md, sought at any depth")
    while waiting:
        here = waiting.pop()
        with os.scandir(here) as entries:
            for entry in (entry for entry in entries if not skip(entry)):
                if entry.is_dir():
                    if entry.is_symlink() and Path(here).resolve().is_relative_to(Path(entry.path).resolve()):
                        raise ValueError(f"{entry.path} is a link that leads back to a folder around it; remove it")
                    waiting.append(entry.path)
                elif entry.is_file() and PurePath(entry.path).match(pattern):
                    found.append(Path(entry.path).relative_to(folder))
    return sorted(found)


def download(address: str, expected_sha256: str) -> Path:
    """The file at an http(s) address, from the cache if it was downloaded before.

    Raises ValueError if it can't be had, or does not hash to expected_sha256 (if that is not empty).
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-trainer"
    name = Path(re.sub("[?#].*", "", address.partition("://")[2])).name or "download"  # whose ending says what it is
    path = cache / hashlib.sha256(address.encode()).hexdigest()[:16] / name
    partial = path.with_name(f".{name}.{os.getpid()}")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(address, timeout=60) as response, open(partial, "wb") as file:
                shutil.copyfileobj(response, file)
                size = response.headers["Content-Length"]
                if size and file.tell() != int(size):
                    raise ConnectionError(f"it broke off after {file.tell()} of {size} bytes")
            partial.replace(path)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no address at all
            advice = "check the address and the connection, or download it yourself and give the file"
            raise ValueError(f"{address} could not be downloaded ({error}); {advice}") from None
        finally:
            partial.unlink(missing_ok=True)
    found = sha256(path)
    if expected_sha256 and found != expected_sha256.lower():
        path.unlink()
        raise ValueError(f"{address} has SHA-256 {found}, not the expected {expected_sha256}; it changed, or broke off")
    return path


def documents(source: Source) -> Iterator[Document]:
    """The source's documents, each to be read as often as needed.

    Here, or when a document is read, ValueError names the file and the byte, or the line, of what is not text.
    """
    return READERS[kind_of(source.path)](source)


def kind_of(path: Path) -> str:
    """The ending of a name that says how a file is read, "" for plain text; a compression's, or a date, may follow."""
    endings = [ending.lower() for ending in reversed(path.suffixes)]
    kind = next((one for one in endings if one not in COMPRESSIONS and not one[1:].replace("-", "").isdigit()), "")
    return kind if kind in READERS else ""


@contextlib.contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    """The source's bytes, uncompressed. Raises ValueError for a damaged compressed file."""
    kind, opener, damages = COMPRESSIONS.get(source.path.suffix.lower(), COMPRESSIONS[""])
    try:
        with opener(source.path, "rb") as file:
            yield file
    except damages as error:
        raise ValueError(f"{source.name} is a damaged {kind} file ({error}); get it again") from None


def _decoded(source: Source) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(source.errors)
    offset = 0  # of the first byte that is not decoded yet
    try:
        with _opened(source) as file:
            while block := file.read(BLOCK):
                yield decoder.decode(block)
                offset = file.tell() - len(decoder.getstate()[0])
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ValueError(NOT_UTF8.format(source.name, offset + error.start)) from None


def _json_lines(source: Source) -> Iterator[Document]:
    """Each line that is not blank: the text in the field of its JSON object, or as JSON the turns of an example."""
    with _opened(source) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                text = _text_of(line, source, f"{source.name}, line {number}")
                yield lambda text=text: iter((text,))


def _text_of(line: bytes, source: Source, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig", source.errors), parse_int=float)  # of any length
    except UnicodeDecodeError as error:
        raise ValueError(NOT_UTF8.format(where, error.start)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not an object with fields and values")
    if source.turns_of:
        try:
            text = json.dumps(source.turns_of(record), ensure_ascii=False)
        except ValueError as error:
            raise ValueError(f"{where} {error}") from None
    elif source.field not in record:
        found = f"{where} has only {', '.join(map(repr, record))}"
        raise ValueError(f"{found}; it should have the field {source.field!r} (see --field)")
    elif not isinstance(text := record[source.field], str):
        raise ValueError(f"{where}: the field {source.field!r} is not text (see --field)")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # JSON can spell half a character


# How the documents of a kind of file are read, by an ending of its name; "" is one document of plain text.
READERS = {"": lambda source: iter([lambda: _decoded(source)]), ".jsonl": _json_lines, ".ndjson": _json_lines}
# What undoes a compression, by the last ending: its name, what opens a file, and the errors by which damage shows.
COMPRESSIONS = {"": ("", open, ()), ".gz": ("gzip", gzip.open, (gzip.BadGzipFile, zlib.error, EOFError))}
