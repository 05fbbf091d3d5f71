"""Where text comes from: files, folders, .jsonl, gzip, downloads, standard input → documents, a piece at a time.

And which of them belong to which split, and to which part of the work where many machines share it.
"""

import codecs
import contextlib
import dataclasses
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
BLOCK = 2**20  # bytes read at a time
LONGEST_UNBROKEN = 2**24  # characters without a place to cut, after which the cut comes anywhere
# Where text can be cut so that every BPE here encodes the two parts to the ids of the whole: between a line's end and
# a next line that starts without space (o200k joins "\n" with "/"), or before the space between two words.
CUT = re.compile(r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])")


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass
class Census:
    """What one pass over the whole corpus finds."""

    documents: int = 0
    bytes: int = 0  # of UTF-8
    sizes: list[int] = dataclasses.field(default_factory=list)  # bytes of each source
    alphabet: set[str] = dataclasses.field(default_factory=set)
    smallest_lot: float = 1.0
    content: str = ""  # a hash of all documents, in order


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
        found = f"has only {', '.join(map(repr, record))}" if isinstance(record, dict) else "is not an object"
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


def lot(digest: bytes) -> float:
    """A document's place between 0 and 1, by the hash of its text: the same in any order, on any machine."""
    return int.from_bytes(digest[:8], "big") / 2**64


def digest_of(document: Document) -> bytes:
    hasher = hashlib.blake2b()
    for text in document():
        hasher.update(text.encode())
    return hasher.digest()


def count(
    sources: list[Source], field: str, errors: str, with_alphabet: bool, advance: Callable[[int], object]
) -> Census:
    """Read everything once: check that it is text, count it, hash it; advance is told the bytes as they are read.

    Raises ValueError for what is not text.
    """
    census = Census()
    content = hashlib.blake2b()
    for source in sources:
        before = census.bytes
        for document in documents(source, field, errors):
            hasher = hashlib.blake2b()
            for text in document():
                encoded = text.encode()
                hasher.update(encoded)
                census.bytes += len(encoded)
                if with_alphabet:
                    census.alphabet.update(text)
                advance(len(encoded))
            census.documents += 1
            census.smallest_lot = min(census.smallest_lot, lot(hasher.digest()))
            content.update(hasher.digest())
        census.sizes.append(census.bytes - before)
    census.content = content.hexdigest()
    return census


def share(
    sources: list[Source], census: Census, field: str, errors: str, part: int = 1, parts: int = 1
) -> Iterator[Document]:
    """The documents of one of so many parts, counted from 1: those whose first byte falls in its share of all bytes.

    The parts end to end are all documents in order; one may be empty. A source that has none of a part is not read.
    """
    first, end = (census.bytes * number // parts for number in (part - 1, part))
    end += part == parts  # for documents without text, after the last byte
    place = 0
    for source, size in zip(sources, census.sizes, strict=True):
        start = place
        place += size
        if start >= end or place < first:
            continue
        for document in documents(source, field, errors):
            if start >= end:
                break
            if start >= first:
                yield document
            if source.is_jsonl:
                start += sum(len(text.encode()) for text in document())


def assigned(chosen: Iterable[Document], census: Census, val_fraction: float) -> Iterator[tuple[str, str, bool]]:
    """Every piece of the chosen documents with its split, train or val, and whether it ends its document.

    A corpus of one document gives its tail to validation. Of many, each goes whole where its lot falls; the one with
    the smallest always to validation, so that few documents too leave something to validate on.
    """
    if census.documents > 1:
        for document in chosen:
            drawn = lot(digest_of(document))
            split = "val" if drawn < val_fraction or drawn == census.smallest_lot else "train"
            for text, ends in pieces(document):
                yield split, text, ends
        return
    left = int(census.bytes * (1 - val_fraction))  # bytes for training
    for document in chosen:
        for text, ends in pieces(document):
            encoded = text.encode()
            place = max(0, min(left, len(encoded)))
            while place < len(encoded) and encoded[place] & 0xC0 == 0x80:  # inside a character
                place += 1
            left -= place
            if place:
                yield "train", encoded[:place].decode(), False
            if place < len(encoded) or ends:
                yield "val", encoded[place:].decode(), ends
