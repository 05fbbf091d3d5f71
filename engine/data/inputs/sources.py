"""A source of documents, its kind and version, and the streams of bytes or rows in it."""

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from fsspec.compression import compr
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from engine.core.errors import UserError, import_optional, is_bug
from engine.core.files import check_pointer

BLOCK_BYTES = 2**18  # read at a time
HTTP_TIMEOUT_SECONDS = 60  # to wait for the next bytes of a web server
# Keys of a value that changes with the file, in fsspec's info of a file.
VERSION_KEYS = ["ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified"]
VERSION_KEYS += ["updated", "created"]
SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")  # in a folder of save_to_disk
STREAMED_FILE_BYTES = 2**28  # assumed for a file of a streamed dataset, whose size is unknown
RECORD_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
DEFAULT_ENCODING = "utf-8"
# Suffix → name in fsspec.
COMPRESSION_NAMES = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
DEFAULT_ADVICE = "Get it again, or check the address, the connection and your permission."
HUB_ADVICE = "Check the name, --hf-config, --hf-split and the connection."


@dataclass(frozen=True)
class ExampleParser:
    """How records become examples: see engine.data.chats.examples."""

    # Returns turns, each of which starts with its role, and remarks for the user.
    parse: Callable[[dict[str, Any]], tuple[Sequence[Any], list[str]]]
    fields: tuple[str, ...]  # that are read
    list_field: str = ""  # the field of a record that is a list of messages; "": none


@dataclass(frozen=True)
class Reader:
    """How files become documents."""

    field: str = "text"  # the field with the text of a record; "": all fields are read
    encoding: str = DEFAULT_ENCODING  # the name of a codec, or "auto"
    errors: str = "strict"  # or "replace": bytes that are not text become U+FFFD
    separator: str = ""  # between the documents of plain text; "": a file is one document
    skip_bad_rows: bool = False  # leave out and count records that cannot be used
    examples: ExampleParser | None = None  # None: a record has a text
    # Of special tokens, to count: all, and those that are not markup. (): none.
    names: tuple[re.Pattern[str], ...] = ()


DEFAULT_READER = Reader()


@dataclass(frozen=True)
class Source:
    """A file of documents, or a dataset of rows."""

    path: Path | str  # a file or an address; with hub_split, a folder or a name on the hub
    name: str  # in messages
    listed_name: str = ""  # in manifests; "": the name of the file
    hub_split: str = ""  # of a Hugging Face dataset; empty for a file
    hub_config: str | None = None
    revision: str = ""  # of a dataset on the hub

    @functools.cached_property
    def info(self) -> tuple[int, str]:
        """Size in bytes, and a version that changes with the content; 0 and "" if unknown."""
        if self.hub_split:
            rows = load_rows(self)
            if is_streamed(rows):
                return rows.num_shards * STREAMED_FILE_BYTES, self.revision
            files = [os.stat(file["filename"]) for file in rows.cache_files]
            version = " ".join(str(file.st_mtime_ns) for file in files)
            return sum(file.st_size for file in files), version
        fs, path = file_system(self.path)
        with wrap_errors(self.name):
            info = fs.info(path)
        versions = (str(info[key]) for key in VERSION_KEYS if info.get(key) is not None)
        return info.get("size") or 0, next(versions, "")

    @property
    def title(self) -> str:
        """Name in manifests, the same on every machine: without the path of the folder."""
        name = self.name.partition("?")[0] if "://" in self.name else self.name
        title = self.listed_name or PurePath(name).name
        return os.fsencode(title).decode(errors="replace")

    @property
    def size(self) -> int:
        """Size in bytes; 0 if unknown."""
        return self.info[0]

    def check_unchanged(self) -> None:
        """Raise UserError if a local file has changed since its size was read."""
        copy = replace(self)  # without the cached info
        if isinstance(self.path, Path) and copy.info != self.info:
            raise UserError(f"{self.name}: changed after it was listed. Prepare it again.")

    @property
    def suffixes(self) -> list[str]:
        """Suffixes of the file's name in lower case, the last first."""
        name = re.sub("[?#].*", "", self.path) if isinstance(self.path, str) else self.path
        return [suffix.lower() for suffix in reversed(PurePath(name).suffixes)]

    @property
    def compression(self) -> str:
        """Suffix of a compressed file, such as ".gz"; "" for other files."""
        return next((suffix for suffix in self.suffixes[:1] if suffix in COMPRESSION_NAMES), "")

    @property
    def kind(self) -> str:
        """The kind of reader: "rows", one of RECORD_SUFFIXES, or "text"."""
        if self.hub_split:
            return "rows"
        suffixes = [suffix for suffix in self.suffixes if suffix != self.compression]
        return suffixes[0] if suffixes and suffixes[0] in RECORD_SUFFIXES else "text"


@contextlib.contextmanager
def wrap_errors(name: str, advice: str = DEFAULT_ADVICE) -> Iterator[None]:
    """Turn any error of a library that reads ``name`` into a UserError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or is_bug(error):
            raise
        # fsspec raises FileNotFoundError for any error of a web server, which is its cause.
        cause = error.__cause__ if type(error) is FileNotFoundError else None
        reason = f"{type(cause or error).__name__}: {' '.join(str(cause or error).split())[:300]}"
        raise UserError(f"{name}: could not be read ({reason}). {advice}") from None


def file_system(path: Path | str) -> tuple[Any, str]:
    """Return fsspec's file system for a local path or an address, and the path in it."""
    if isinstance(path, Path):
        return LocalFileSystem(), os.path.realpath(path)  # whose info is not that of a link
    options = {}
    if path.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(  # the default limits a complete file to 5 minutes
            sock_connect=HTTP_TIMEOUT_SECONDS, sock_read=HTTP_TIMEOUT_SECONDS
        )
        options = {"client_kwargs": {"timeout": timeout}}
    with wrap_errors(path):
        return url_to_fs(path, **options)


@contextlib.contextmanager
def open_source(source: Source) -> Iterator[io.BufferedReader]:
    """Open a file to read its decompressed bytes. Errors in the block become UserErrors."""
    source.check_unchanged()
    fs, path = file_system(source.path)
    # Streamed, because a web server may ignore a request for a range of bytes.
    options = {"block_size": 0} if "http" in fs.protocol else {}
    suffix = source.compression
    advice = f"If it is not compressed, remove {suffix} from its name. " if suffix else ""
    wrap = wrap_errors(source.name, advice + DEFAULT_ADVICE)
    with wrap, fs.open(path, **options) as raw, decompress(raw, source) as file:
        yield io.BufferedReader(file, BLOCK_BYTES)
        source.check_unchanged()


def decompress(raw: Any, source: Source) -> Any:
    """Return a stream of the decompressed bytes of a file, which is a context manager."""
    file = io.BufferedReader(raw, BLOCK_BYTES)
    check_pointer(file.peek(), source.name)
    if source.compression != ".zst":
        return compr[COMPRESSION_NAMES.get(source.compression)](file, mode="r")
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return import_optional(name, source.name).ZstdFile(file)


@functools.lru_cache(16)
def load_rows(source: Source) -> Any:
    """Open a Hugging Face dataset: the rows in a folder of save_to_disk, else a stream of rows."""
    datasets = import_optional("datasets", source.name)
    datasets.disable_progress_bars()
    with wrap_errors(source.name, HUB_ADVICE):
        if any(Path(source.path, file).is_file() for file in SAVED_DATASET_FILES):
            saved = datasets.load_from_disk(source.path)
            return saved[source.hub_split] if isinstance(saved, dict) else saved
        options = {"split": source.hub_split, "revision": source.revision or None}
        return datasets.load_dataset(str(source.path), source.hub_config, streaming=True, **options)


def is_streamed(rows: Any) -> bool:
    """Return whether rows are a stream: without random access, and of unknown number."""
    return not hasattr(rows, "cache_files")
