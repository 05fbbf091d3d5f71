"""Where text comes from: files, folders, addresses, Hugging Face datasets, standard input → sources, opened."""

import codecs
import contextlib
import functools
import gzip
import hashlib
import importlib
import io
import json
import lzma
import os
import re
import shutil
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, BinaryIO

from fsspec.core import url_to_fs

from engine.core.errors import UserError
from engine.core.files import sha256

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Of Python's standard library: what is not part of it, tests, which not every machine has, and tables.
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
AHEAD = 2**21  # bytes fetched at a time from afar
SILENCE = 60  # seconds in which a web server that sends nothing is given up
# What file systems call that which changes when a file does.
STAMPS = ("ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified", "updated", "created")
SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")  # files of a folder that its save_to_disk makes
SHARD = 2**28  # bytes that a file of a streamed Hugging Face dataset counts as, whose size nobody tells


class Unreadable(UserError):
    """What can't be read, and why, in one line."""


@dataclass(frozen=True)
class Source:
    """A file of documents, or a dataset of rows, and how to read it."""

    path: Path | str  # on this machine; or where its file system has it
    name: str  # as the user knows it
    field: str = "text"  # where a format with fields has the text
    errors: str = "strict"  # or replace: bytes that are not UTF-8 become U+FFFD
    turns_of: Callable[[dict[str, Any]], Any] | None = None  # what finds the turns in a record, where it is an example
    fs: Any = None  # fsspec's file system; None: this machine's own
    rows: Any = None  # a dataset of Hugging Face's library; None: a file
    revision: str = ""  # of a dataset on the hub

    @functools.cached_property
    def info(self) -> tuple[int, str]:
        """Its bytes, and a text that changes when the file does; empty where nobody knows."""
        if self.rows is not None:
            if self.is_streamed:
                return self.rows.num_shards * SHARD, self.revision
            return self.rows.data.nbytes, self.rows._fingerprint
        if self.fs is None:
            found = os.stat(self.path)
            return found.st_size, str(found.st_mtime_ns)
        with explained(self.name):
            found = self.fs.info(self.path)
        return found.get("size") or 0, str(next((found[key] for key in STAMPS if found.get(key)), ""))

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.info[0]

    @property
    def is_streamed(self) -> bool:
        """Whether it is a dataset of Hugging Face's whose rows come one after the other, nobody knows how many."""
        return self.rows is not None and not hasattr(self.rows, "data")

    @property
    def endings(self) -> list[str]:
        """The endings of its name, the last first."""
        name = self.path if self.fs is None else re.sub(r"[?#].*", "", str(self.path))
        return [ending.lower() for ending in reversed(PurePath(name).suffixes)]

    @property
    def compression(self) -> str:
        return self.endings[0] if self.endings and self.endings[0] in COMPRESSIONS else ""

    @functools.cached_property
    def seekable(self) -> bool:
        """Whether it can be read from any byte on."""
        return not self.compression and (self.fs is None or self.ranged)

    @functools.cached_property
    def ranged(self) -> bool:
        """Whether its file system gives a range of its bytes: a web server may not know how to, and not say so."""
        if not self.size or "http" not in self.fs.protocol:
            return self.size > 0
        with explained(self.name), self.fs.open(self.path, block_size=1) as file, contextlib.suppress(ValueError):
            file.seek(self.size - 1)
            return len(file.read(1)) == 1
        return False


@contextlib.contextmanager
def explained(name: str, advice: str = "check the address, the connection and your permission") -> Iterator[None]:
    """Around what a library does: whatever it raises becomes Unreadable, naming what was to be read."""
    try:
        yield
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        if type(error) is FileNotFoundError:  # so fsspec calls whatever a web server said
            error = error.__cause__ or error
        said = " ".join(str(error).split())[:300]
        raise Unreadable(f"{name} could not be read ({type(error).__name__}: {said}); {advice}") from None


def needed(module: str, name: str, package: str = "", extra: str = "data") -> Any:
    """A module that a bare install lacks. Raises Unreadable with the command that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = package or module.partition(".")[0]
        raise Unreadable(f'{name} needs the package {package}: pip install {package}, or -e ".[{extra}]"') from None


def find_sources(
    inputs: tuple[str, ...],
    glob: str | None,
    expected_sha256: str,
    spool: Path,
    config: str | None = None,
    split: str = "train",
) -> list[Source]:
    """The files that the inputs stand for, in an order that is the same on every machine.

    glob chooses a folder's files, at any depth (None: all); expected_sha256 is what a download must hash to, if not
    empty; spool is a folder for copies of pipes, as all may be read more than once; config and split are of Hugging
    Face datasets. Raises UserError for an input that is not there, and a glob or hash without a folder or download.
    """
    sources, folders, downloads = [], 0, 0
    for name in inputs:
        path = Path(name)
        if name == "stdlib":
            root = Path(sysconfig.get_path("stdlib"))
            found = _files(root, "*.py", lambda entry: entry.name in NOT_IN_STDLIB or entry.is_symlink())
            sources += [Source(root / path, str(path)) for path in found]
        elif name == "-" or path.is_fifo():
            sources.append(_piped(name, spool / str(len(sources))))
        elif name == "shakespeare":
            sources.append(Source(download(SHAKESPEARE, SHAKESPEARE_SHA256), name))
        elif name.startswith("hf:") and "://" not in name:
            sources.append(_rows(name, config, split))
        elif "://" in name and expected_sha256:
            sources.append(Source(download(name, expected_sha256), name))
            downloads += 1
        elif "://" in name:
            found = _remote(name, glob)
            folders += len(found) != 1 or found[0].name != name
            sources += found
        elif path.is_dir():
            folders += 1
            sources += _folder(path, "*" if glob is None else glob)
        elif path.exists():
            sources.append(Source(path, name))
        else:
            advice = "give a file, a folder, an address such as https:// or s3://, hf:NAME, -, stdlib or shakespeare"
            raise UserError(f"{name} is not there: {advice}")
    if glob is not None and not folders:
        raise UserError(f"--glob {glob} chooses files of a folder, and no input is one; leave it out")
    if expected_sha256 and not downloads:
        raise UserError(f"--sha256 {expected_sha256} is of a download, and no input is one; leave it out")
    return sources


def _piped(name: str, copy: Path) -> Source:
    with open(copy, "wb") as file, open(0 if name == "-" else name, "rb", closefd=name != "-") as pipe:
        shutil.copyfileobj(pipe, file)
    if _begins_as_json_lines(copy):
        copy = copy.rename(copy.with_suffix(".jsonl"))
    return Source(copy, "standard input" if name == "-" else name)


def _folder(path: Path, pattern: str) -> list[Source]:
    if any((path / name).is_file() for name in SAVED_BY_DATASETS):
        raise UserError(f"{path} is a Hugging Face dataset, saved; give it as hf:{path}")
    found = [path / file for file in _files(path, pattern, lambda entry: entry.name.startswith("."))]
    if not found:
        raise UserError(f"{path} has no files that match {pattern!r}; see --glob")
    return [Source(file, str(file)) for file in found]


def _begins_as_json_lines(path: Path) -> bool:
    with open(path, "rb") as file, contextlib.suppress(ValueError, RecursionError):
        line = file.readline(2**20)
        if line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):  # else it may be all of a text
            line += b"" if line.endswith(b"\n") else file.readline()
        return isinstance(json.loads(line, parse_int=str), dict)
    return False


def _check_pattern(glob: str) -> str:
    pattern = glob.removeprefix("**/")
    if not pattern or "**" in pattern or pattern.startswith("/"):
        raise UserError(f"--glob {glob!r} is not a pattern for files, such as *.txt or docs/*.md, sought at any depth")
    return pattern


def _files(folder: Path, glob: str, skip: Callable[[os.DirEntry], bool]) -> list[Path]:
    """The folder's files that match, at any depth, as seen from the folder; links are followed.

    Raises OSError for a folder that can't be read, ValueError for a link in a circle, or no pattern.
    """
    pattern, found, waiting = _check_pattern(glob), [], [str(folder)]
    while waiting:
        here = waiting.pop()
        with os.scandir(here) as entries:
            for entry in (entry for entry in entries if not skip(entry)):
                if entry.is_dir():
                    if entry.is_symlink() and Path(here).resolve().is_relative_to(Path(entry.path).resolve()):
                        raise UserError(f"{entry.path} is a link that leads back to a folder around it; remove it")
                    waiting.append(entry.path)
                elif entry.is_file() and PurePath(entry.path).match(pattern):
                    found.append(Path(entry.path).relative_to(folder))
    return sorted(found)


def _file_system(address: str) -> tuple[Any, str]:
    """The file system of an address, and the path there."""
    options = {}
    if address.startswith(("http://", "https://")):  # a stream lasts as long as the work on it
        timeout = needed("aiohttp", address).ClientTimeout(sock_connect=SILENCE, sock_read=SILENCE)
        options = {"client_kwargs": {"timeout": timeout}}
    with explained(address):
        try:
            return url_to_fs(address, **options)
        except ImportError as error:  # which says what to install
            raise Unreadable(f"{address} can't be opened yet: {' '.join(str(error).split())}") from None


def _remote(address: str, glob: str | None) -> list[Source]:
    """The file at an address; or the files of a folder there, or that match its *, at any depth."""
    pattern = _check_pattern("*" if glob is None else glob)
    fs, path = _file_system(address)
    with explained(address):
        if "*" in path:
            found = [one for one, info in fs.glob(path, detail=True).items() if info["type"] == "file"]
        elif address.endswith("/") or fs.info(path)["type"] == "directory":
            found = fs.find(path)
        else:
            return [Source(path, address, fs=fs)]
        folder = f"{path}/".partition("*")[0].rpartition("/")[0]
        below = ((one, PurePosixPath(one.removeprefix(folder))) for one in sorted(found))
        found = [one for one, name in below if name.match(pattern) and not any(p[0] == "." for p in name.parts)]
        if not found:
            raise Unreadable(f"{address} has no files that match {pattern!r}; see --glob")
        return [Source(one, fs.unstrip_protocol(one), fs=fs) for one in found]


def _rows(name: str, config: str | None, split: str) -> Source:
    """A dataset of Hugging Face's library: saved in a folder, or by its name on the hub or its folder, streamed."""
    datasets, where = needed("datasets", name), name.removeprefix("hf:")
    with explained(name, "check its name, --hf-config and --hf-split, and the connection"):
        datasets.disable_progress_bars()
        if any((Path(where) / file).is_file() for file in SAVED_BY_DATASETS):
            saved = datasets.load_from_disk(where)
            return Source(name, name, rows=saved[split] if isinstance(saved, dict) else saved)
        hub = needed("huggingface_hub", name)
        revision = None if Path(where).exists() else hub.HfApi().dataset_info(where).sha
        rows = datasets.load_dataset(where, config, split=split, streaming=True, revision=revision)
        return Source(name, name, rows=rows, revision=revision or "")


def download(address: str, expected_sha256: str) -> Path:
    """The file at an address, from the cache if it was downloaded before.

    Raises UserError if it can't be had, or does not hash to expected_sha256.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-trainer"
    name = Path(re.sub("[?#].*", "", address.partition("://")[2])).name or "download"  # whose ending says what it is
    path = cache / hashlib.sha256(address.encode()).hexdigest()[:16] / name
    partial = path.with_name(f".{name}.{os.getpid()}")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fs, remote = _file_system(address)
            with _Remote(Source(remote, address, fs=fs)) as found, open(partial, "wb") as file:
                shutil.copyfileobj(found, file)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    if (found := sha256(path)) != expected_sha256.lower():
        path.unlink()
        raise UserError(f"{address} has SHA-256 {found}, not the expected {expected_sha256}; it changed, or broke off")
    return path


class _Remote(io.RawIOBase):
    """A file of fsspec's, whose errors name it."""

    def __init__(self, source: Source):
        self.source, self.file = source, io.BytesIO()
        streamed = "http" in source.fs.protocol and not source.ranged
        with explained(source.name):
            self.file = source.fs.open(source.path, "rb", block_size=0 if streamed else AHEAD)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.source.seekable

    def readinto(self, buffer: memoryview) -> int:
        with explained(self.source.name):
            data = self.file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.file.close()
        super().close()


@contextlib.contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """The source's bytes, uncompressed. Raises Unreadable for a damaged compressed file, or one out of reach."""
    kind, package, damages = COMPRESSIONS[source.compression]
    opener = needed(package, source.name, package).open if package else None
    with open(source.path, "rb") if source.fs is None else io.BufferedReader(_Remote(source), AHEAD) as raw:
        try:
            with opener(raw, "rb") if opener else contextlib.nullcontext(raw) as file:
                yield file
        except Exception as error:
            if not isinstance(error, (EOFError, *damages)) and type(error).__name__ != "ZstdError":  # of an extra
                raise
            raise Unreadable(f"{source.name} is a damaged {kind} file ({error}); get it again") from None


ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
# What undoes a compression, by the last ending: its name, the module that opens it, and the errors that damage raises.
COMPRESSIONS = {
    "": ("", "", ()),
    ".gz": ("gzip", "gzip", (gzip.BadGzipFile, zlib.error)),
    ".xz": ("xz", "lzma", (lzma.LZMAError,)),
    ".zst": ("zstd", ZSTD, ()),
}
