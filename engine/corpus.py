"""Where text comes from: files, folders, .jsonl, gzip, downloads, standard input → documents, a piece at a time."""

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
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BLOCK = 2**20  # bytes read at a time
LONGEST_UNBROKEN = 2**24  # characters without a place to cut, after which the cut comes anywhere
# Where text can be cut so that every BPE here encodes the two parts to the ids of the whole: between a line's end and
# a next line that starts without space (o200k joins "\n" with "/"), or before the space between two words.
CUT = re.compile(r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])")


@dataclass(frozen=True)
class Source:
    """A file of text: one document, or with .jsonl one a line."""

    path: Path
    name: str  # as the user knows it

    @property
    def is_jsonl(self) -> bool:
        return ".jsonl" in self.path.suffixes[-2:]

    @property
    def is_gzip(self) -> bool:
        return self.path.suffix == ".gz"


# A document's text, read anew at each call, a block at a time.
Document = Callable[[], Iterator[str]]


def find_sources(inputs: tuple[str, ...], glob: str, expected_sha256: str, spool: Path) -> list[Source]:
    """The files that the inputs stand for, in an order that is the same on every machine.

    glob chooses a folder's files, at any depth; expected_sha256 is what a download must hash to, if not empty; spool
    is a folder for copies of pipes, as all is read more than once. Raises ValueError for an input that is not there.
    """
    sources = []
    for name in inputs:
        if name == "stdlib":
            sources += _standard_library()
        elif name == "-" or Path(name).is_fifo():
            sources.append(_spooled(name, spool / str(len(sources))))
        elif name == "shakespeare":
            sources.append(Source(download(SHAKESPEARE, SHAKESPEARE_SHA256), name))
        elif name.startswith(("http://", "https://")):
            sources.append(Source(download(name, expected_sha256), name))
        elif Path(name).is_dir():
            sources += _inside(Path(name), glob)
        elif Path(name).exists():
            sources.append(Source(Path(name), name))
        else:
            raise ValueError(
                f"{name} is not there: give a file, a folder, an http(s) address, -, stdlib or shakespeare"
            )
    return sources


def _spooled(name: str, copy: Path) -> Source:
    """A pipe, or - for standard input, with its text copied to a file."""
    with open(copy, "wb") as file, open(0 if name == "-" else name, "rb", closefd=name != "-") as pipe:
        shutil.copyfileobj(pipe, file)
    return Source(copy, "standard input" if name == "-" else name)


def _inside(folder: Path, glob: str) -> list[Source]:
    """The folder's files that match, at any depth, without those that are hidden or in a hidden folder."""
    try:
        inside = sorted(path.relative_to(folder) for path in folder.rglob(glob) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"--glob {glob!r} is not a pattern for files: {error}") from None
    shown = [path for path in inside if not any(part.startswith(".") for part in path.parts)]
    if not shown:
        raise ValueError(f"{folder} has no files that match {glob!r}; see --glob")
    return [Source(folder / path, str(folder / path)) for path in shown]


def _standard_library() -> list[Source]:
    """The running Python's own standard library, without tests, which not every machine has, and without tables."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
    inside = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    return [Source(root / path, str(path)) for path in inside if not left_out & set(path.parts)]


def download(address: str, expected_sha256: str) -> Path:
    """The file at an http(s) address, from the cache if it was downloaded before.

    Raises ValueError if it can't be had, or does not hash to expected_sha256 (if that is not empty).
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-trainer"
    name = Path(urllib.parse.urlparse(address).path).name or "download"
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
            partial.rename(path)
        except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: no address at all
            advice = "check the address and the connection, or download it yourself and give the file"
            raise ValueError(f"{address} could not be downloaded ({error}); {advice}") from None
        finally:
            partial.unlink(missing_ok=True)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected_sha256 and found != expected_sha256.lower():
        path.unlink()
        raise ValueError(f"{address} has SHA-256 {found}, not the expected {expected_sha256}; it changed, or broke off")
    return path


@contextlib.contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """The source's bytes, uncompressed. Raises ValueError for a damaged gzip file."""
    try:
        with gzip.open(source.path) if source.is_gzip else open(source.path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{source.name} is a damaged gzip file ({error}); get it again") from None


def documents(source: Source, field: str = "text", errors: str = "strict") -> Iterator[Document]:
    """The source's documents: itself, or with .jsonl each line that is not blank, from that field.

    Here, or when a document is read, ValueError names the file and byte, or the line, of what is not such text.
    """
    if not source.is_jsonl:
        yield lambda: _decoded(source, errors)
        return
    with opened(source) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                text = _text_of(line, field, errors, f"{source.name}, line {number}")
                yield lambda text=text: iter((text,))


def _decoded(source: Source, errors: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    decoded = waiting = 0  # bytes
    try:
        with opened(source) as file:
            while block := file.read(BLOCK):
                waiting = len(decoder.getstate()[0])
                yield decoder.decode(block)
                decoded += len(block)
        waiting = len(decoder.getstate()[0])
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        offset = decoded - waiting + error.start
        raise ValueError(f"{source.name} is not UTF-8 at byte {offset}; convert it, or use --errors replace") from None


def _text_of(line: bytes, field: str, errors: str, where: str) -> str:
    try:
        record = json.loads(line.decode("utf-8", errors))
        text = record[field]
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 at byte {error.start}; convert it, or use --errors replace") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    except (KeyError, TypeError, IndexError):
        found = f"has only {', '.join(record)}" if isinstance(record, dict) else "is not an object"
        raise ValueError(f"{where} {found}; it should have the field {field!r} (see --field)") from None
    if not isinstance(text, str):
        raise ValueError(f"{where}: the field {field!r} is not text (see --field)")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # JSON can spell half a character


def pieces(document: Document) -> Iterator[tuple[str, bool]]:
    """A document's text in pieces of about a block, and whether each is the last.

    They are cut where they encode apart to the ids of the whole; memory is a few blocks, whatever the document.
    """
    waiting = ""
    for text in document():
        waiting += text
        while len(waiting) > BLOCK:
            place = last_cut(waiting)
            if place is None:
                if len(waiting) < LONGEST_UNBROKEN:
                    break
                place = LONGEST_UNBROKEN
            yield waiting[:place], False
            waiting = waiting[place:]
    yield waiting, True


def last_cut(text: str) -> int | None:
    """The last place where text can be cut, or None; it looks ever further back, as most often it is near."""
    reach = 1024
    while True:
        places = [match.start() for match in CUT.finditer(text, max(1, len(text) - reach))]
        if places or reach > len(text):
            return places[-1] if places else None
        reach *= 16
