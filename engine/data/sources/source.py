"""A source of documents, its kind and version, and the streams of bytes or rows in it."""

import contextlib
import functools
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from fsspec.core import url_to_fs

from engine.core.errors import UserError, import_optional, is_bug
from engine.core.files import check_pointer

BLOCK_BYTES = 2**18  # read at a time
HTTP_TIMEOUT_SECONDS = 60  # to wait for the next bytes of a web server
# Keys of a value that changes with the file, in fsspec's info of a file.
VERSION_KEYS = ["ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified"]
VERSION_KEYS += ["updated", "created"]
SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")  # in a folder of save_to_disk
MAX_SAVED_SHARDS = 2**8  # parts of a dataset of save_to_disk
STREAMED_FILE_BYTES = 2**28  # assumed for a file of a streamed dataset, whose size is unknown
RECORD_SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")
ZSTD_MODULE = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
# Suffix → module that decompresses.
MODULE_BY_SUFFIX = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": ZSTD_MODULE}
DEFAULT_ADVICE = "Get it again, or check its ending, the address, the connection, your permission."
HUB_ADVICE = "Check the name, --hf-config, --hf-split and the connection."
SPLIT_BY_NAME = {"train": "train", "validation": "val", "val": "val", "dev": "val", "test": "test"}
# A file or folder whose name is a split, such as test-00000-of-00001.parquet.
SPLIT_PATTERN = re.compile(rf"({'|'.join(SPLIT_BY_NAME)})(-\d+-of-\d+)?(\..*)?", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A file of documents, or a dataset of rows."""

    path: Path | str  # a file or an address; with hub_split, a folder or a name on the hub
    name: str  # in messages
    listed_name: str = ""  # in manifests; "": the name of the file
    folder: str = ""  # the input, if it is a folder, in which the file was found
    hub_split: str = ""  # of a Hugging Face dataset; empty for a file
    hub_config: str | None = None
    revision: str = ""  # of a dataset on the hub

    @functools.cached_property
    def info(self) -> tuple[int, str]:
        """Size in bytes, and a version that changes with the content; 0 and "" if unknown."""
        if self.hub_split and self.revision:
            return load_rows(self).num_shards * STREAMED_FILE_BYTES, self.revision
        with wrap_errors(self.name):
            if self.hub_split:
                files = [_stat(path) for path in sorted(Path(self.path).rglob("*.*"))]
                return sum(size for size, _ in files), " ".join(version for _, version in files)
            if isinstance(self.path, Path):
                return _stat(self.path)
            fs, path = file_system(self.path)
            info = fs.info(path)
        versions = (str(info[key]) for key in VERSION_KEYS if info.get(key) is not None)
        return info.get("size") or 0, next(versions, "")

    @property
    def title(self) -> str:
        """Name in manifests, the same on every machine: without the path of the folder."""
        title = self.listed_name or PurePath(re.sub("(://[^?]*).*", r"\1", self.name)).name
        return os.fsencode(title).decode(errors="replace")

    @property
    def size(self) -> int:
        """Size in bytes; 0 if unknown."""
        return self.info[0]

    @property
    def split(self) -> str:
        """The split that a name in its folder says: train, val or test; "" if none does."""
        names = PurePath(self.listed_name).parts if self.folder else ()
        matches = (SPLIT_PATTERN.fullmatch(name) for name in names)
        return next((SPLIT_BY_NAME[match[1].lower()] for match in matches if match), "")

    def check_unchanged(self) -> None:
        """Raise UserError if a local file has changed since its size was read."""
        is_file = isinstance(self.path, Path) and not self.hub_split
        if is_file and _stat(self.path) != self.info:
            raise UserError(f"{self.name}: changed after it was listed. Prepare it again.")

    @functools.cached_property
    def suffixes(self) -> tuple[str, str]:
        """The last suffix of the file's name, and that of its compression; "" for none."""
        path = re.sub("[?#].*", "", self.path) if isinstance(self.path, str) else str(self.path)
        stem, suffix = os.path.splitext(path.lower())
        return (os.path.splitext(stem)[1], suffix) if suffix in MODULE_BY_SUFFIX else (suffix, "")

    @property
    def compression(self) -> str:
        """Suffix of a compressed file, such as ".gz"; "" for other files."""
        return self.suffixes[1]

    @property
    def kind(self) -> str:
        """The kind of records: "rows", one of RECORD_SUFFIXES, or "text"."""
        if self.hub_split:
            return "rows"
        return self.suffixes[0] if self.suffixes[0] in RECORD_SUFFIXES else "text"


def _stat(path: Path | str) -> tuple[int, str]:
    """Return the size and the version of a local file."""
    file = os.stat(path)
    return file.st_size, str(file.st_mtime_ns)


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


def file_system(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in it."""
    options = {}
    if address.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(  # the default limits a complete file to 5 minutes
            sock_connect=HTTP_TIMEOUT_SECONDS, sock_read=HTTP_TIMEOUT_SECONDS
        )
        options = {"client_kwargs": {"timeout": timeout}}
    with wrap_errors(address):
        return url_to_fs(address, **options)


@contextlib.contextmanager
def open_source(source: Source) -> Iterator[io.BufferedReader]:
    """Open a file to read its decompressed bytes. Errors in the block become UserErrors."""
    with wrap_errors(source.name):
        source.check_unchanged()
        if isinstance(source.path, Path):
            raw = open(source.path, "rb", buffering=0)  # noqa: SIM115
        else:
            fs, path = file_system(source.path)
            # Streamed, because a web server may ignore a request for a range of bytes.
            raw = fs.open(path, **{"block_size": 0} if "http" in fs.protocol else {})
        file: Any = io.BufferedReader(raw, BLOCK_BYTES)
        with file:
            check_pointer(file.peek(), source.name)
            if source.compression:
                module = import_optional(MODULE_BY_SUFFIX[source.compression], source.name)
                file = io.BufferedReader(module.open(file), BLOCK_BYTES)
            yield file
        source.check_unchanged()


@functools.lru_cache(16)
def load_rows(source: Source) -> Any:
    """Open a stream of the rows of a Hugging Face dataset, also of a folder of save_to_disk."""
    datasets = import_optional("datasets", source.name)
    datasets.disable_progress_bars()
    with wrap_errors(source.name, HUB_ADVICE):
        if any(Path(source.path, file).is_file() for file in SAVED_DATASET_FILES):
            saved = datasets.load_from_disk(source.path)
            rows = saved[source.hub_split] if isinstance(saved, dict) else saved
            return rows.to_iterable_dataset(num_shards=max(1, min(len(rows), MAX_SAVED_SHARDS)))
        options = {"split": source.hub_split, "revision": source.revision or None}
        return datasets.load_dataset(str(source.path), source.hub_config, streaming=True, **options)
