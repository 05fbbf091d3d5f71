"""Where text comes from: files, folders, addresses, Hugging Face datasets, standard input."""

import codecs
import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from fsspec.compression import available_compressions
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from engine.core.errors import UserError
from engine.core.files import sha256

SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Folders below Python's standard library that are tables, tests or installed packages.
NOT_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
NOT_IN_STDLIB |= {"pydoc_data"}
BLOCK_BYTES = 2**18  # read at a time
HTTP_TIMEOUT_SECONDS = 60  # without any data from a web server
# Names that file systems use for a value that changes with the file.
VERSION_KEYS = ["ETag", "etag", "mtime", "Last-Modified", "LastModified", "last_modified"]
VERSION_KEYS += ["updated", "created"]
SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")  # marks of a folder of save_to_disk
STREAMED_FILE_BYTES = 2**28  # assumed for a file of a streamed dataset, whose size is unknown
COMPRESSIONS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}  # by ending, as fsspec names them
MAX_JSON_LINE_BYTES = 2**20  # of a pipe's first line that must be complete to recognize it
ADVICE = "Check the address, the connection and your permission."


@dataclass(frozen=True)
class Source:
    """A file of documents, or a dataset of rows, and how its records become text."""

    path: Path | str  # a local file; an address; or a name on the hub, with hub_split
    name: str  # in messages
    field: str = "text"  # of a record: where its text is
    errors: str = "strict"  # or "replace": bytes that are not UTF-8 become U+FFFD
    turns_of: Callable[[dict[str, Any]], Any] | None = None  # a record → the turns of an example
    hub_split: str = ""  # of a Hugging Face dataset; empty for a file
    hub_config: str | None = None
    revision: str = ""  # of a dataset on the hub

    @functools.cached_property
    def info(self) -> tuple[int, str]:
        """Size in bytes and version; a version changes with the content and is "" if unknown."""
        if self.hub_split:
            rows = load_rows(self)
            if is_streamed(rows):
                return rows.num_shards * STREAMED_FILE_BYTES, self.revision
            stats = [os.stat(file["filename"]) for file in rows.cache_files]
            version = " ".join(str(stat.st_mtime_ns) for stat in stats)
            return sum(stat.st_size for stat in stats), version
        if isinstance(self.path, Path):
            stat = os.stat(self.path)
            return stat.st_size, str(stat.st_mtime_ns)
        fs, path = file_system(self.path)
        with wrap_errors(self.name):
            info = fs.info(path)
        version = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
        return info.get("size") or 0, version

    @property
    def size(self) -> int:
        """Size in bytes; 0 if unknown."""
        return self.info[0]

    @property
    def suffixes(self) -> list[str]:
        """Endings of the file's name in lower case, the last first."""
        name = re.sub(r"[?#].*", "", self.path) if isinstance(self.path, str) else self.path
        return [suffix.lower() for suffix in reversed(PurePath(name).suffixes)]

    @property
    def compression(self) -> str:
        """Ending of a compressed file, such as ".gz"; "" for any other."""
        return self.suffixes[0] if self.suffixes and self.suffixes[0] in COMPRESSIONS else ""


@contextlib.contextmanager
def wrap_errors(name: str, advice: str = ADVICE) -> Iterator[None]:
    """Turn any error of a library that reads ``name`` into a UserError."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        # fsspec raises FileNotFoundError for any refusal of a web server.
        cause = error.__cause__ if type(error) is FileNotFoundError else None
        reason = f"{type(cause or error).__name__}: {' '.join(str(cause or error).split())[:300]}"
        message = f"{name}: could not be read ({reason}). {advice}"
        raise UserError(message) from None


def import_optional(module: str, name: str, package: str = "", extra: str = "data") -> Any:
    """Import a module that a bare install lacks. Raises UserError with the command to install."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = package or module.partition(".")[0]
        command = f'pip install {package}, or -e ".[{extra}]"'
        raise UserError(f"{name}: needs the package {package}. Install it: {command}") from None


def file_system(path: Path | str) -> tuple[Any, str]:
    """Return fsspec's file system for a local path or an address, and the path in it."""
    if isinstance(path, Path):
        return LocalFileSystem(), os.path.abspath(path)
    options = {}
    if path.startswith(("http://", "https://")):
        aiohttp = import_optional("aiohttp", path)
        limits = dict.fromkeys(("sock_connect", "sock_read"), HTTP_TIMEOUT_SECONDS)
        timeout = aiohttp.ClientTimeout(**limits)  # by default five minutes for all of a file
        options = {"client_kwargs": {"timeout": timeout}}
    with wrap_errors(path):
        return url_to_fs(path, **options)


def read_blocks(source: Source) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file from its beginning, BLOCK_BYTES at most at a time."""
    fs, path = file_system(source.path)
    compression = COMPRESSIONS.get(source.compression)
    if compression not in (None, *available_compressions()):
        import_optional("backports.zstd", source.name, "backports.zstd")
    # A stream: not every web server sends ranges of bytes, nor says so.
    options = {"block_size": 0} if "http" in fs.protocol else {}
    with wrap_errors(source.name):
        file = fs.open(path, "rb", compression=compression, **options)
    with file:
        while True:
            with wrap_errors(source.name):
                block = file.read(BLOCK_BYTES)
            if not block:
                return
            yield block


def find_sources(
    inputs: tuple[str, ...],
    glob: str | None,
    expected_sha256: str,
    spool: Path,
    config: str | None = None,
    split: str = "train",
) -> list[Source]:
    """List the files that the inputs stand for, in the same order on every machine.

    glob selects files of folders (None: all). expected_sha256 is the hash of a download, or "".
    spool is a folder for copies of pipes. config and split are for Hugging Face datasets.
    Raises UserError for an input that is missing, and for a glob or hash that nothing uses.
    """
    sources: list[Source] = []
    num_folders = 0
    num_downloads = 0
    for name in inputs:
        path = Path(name)
        if name == "stdlib":
            sources += _standard_library()
        elif name == "-" or path.is_fifo():
            sources.append(_spool_pipe(name, spool / str(len(sources))))
        elif name == "shakespeare":
            sources.append(Source(download(SHAKESPEARE, SHAKESPEARE_SHA256), name))
        elif name.startswith("hf:") and "://" not in name:
            sources.append(_find_rows(name, config, split))
        elif "://" in name and expected_sha256:
            sources.append(Source(download(name, expected_sha256), name))
            num_downloads += 1
        elif "://" in name:
            files = _find_remote(name, glob)
            num_folders += len(files) != 1 or files[0].name != name
            sources += files
        elif path.is_dir():
            sources += _find_in_folder(path, "*" if glob is None else glob)
            num_folders += 1
        elif path.exists():
            sources.append(Source(path.absolute(), name))
        else:
            kinds = "a file, a folder, https:// or s3://, hf:NAME, -, stdlib or shakespeare"
            raise UserError(f"{name}: not found. Give {kinds}.")
    if glob is not None and not num_folders:
        raise UserError(f"--glob: no input is a folder (got {glob}). Leave it out.")
    if expected_sha256 and not num_downloads:
        raise UserError(f"--sha256: no input is a download (got {expected_sha256}). Leave it out.")
    return sources


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    files = _list_files(root, "*.py", lambda file: file.name in NOT_IN_STDLIB or file.is_symlink())
    return [Source(root / file, str(file)) for file in files]


def _spool_pipe(name: str, copy: Path) -> Source:
    """Copy a pipe to a file, because a corpus is read more than once."""
    is_stdin = name == "-"
    with (
        open(copy, "wb") as file,
        open(0 if is_stdin else name, "rb", closefd=not is_stdin) as pipe,
    ):
        shutil.copyfileobj(pipe, file)
    if _starts_with_json_object(copy):
        copy = copy.rename(copy.with_suffix(".jsonl"))
    return Source(copy, "standard input" if is_stdin else name)


def _starts_with_json_object(path: Path) -> bool:
    with open(path, "rb") as file, contextlib.suppress(ValueError, RecursionError):
        line = file.readline(MAX_JSON_LINE_BYTES)
        is_cut = not line.endswith(b"\n")
        if is_cut and line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
            line += file.readline()
        return isinstance(json.loads(line, parse_int=str), dict)
    return False


def _find_in_folder(folder: Path, pattern: str) -> list[Source]:
    if any((folder / name).is_file() for name in SAVED_BY_DATASETS):
        raise UserError(f"{folder}: is a saved Hugging Face dataset. Give it as hf:{folder}.")
    files = _list_files(folder, pattern, lambda entry: entry.name.startswith("."))
    if not files:
        raise UserError(f"{folder}: no files match {pattern!r}. See --glob.")
    return [Source((folder / file).absolute(), str(folder / file)) for file in files]


def _check_pattern(glob: str) -> str:
    pattern = glob.removeprefix("**/")
    if not pattern or "**" in pattern or pattern.startswith("/"):
        form = "a pattern of files at any depth, such as *.txt or docs/*.md"
        raise UserError(f"--glob: must be {form} (got {glob!r}).")
    return pattern


def _list_files(folder: Path, glob: str, skip: Callable[[os.DirEntry], bool]) -> list[Path]:
    """List matching files at any depth, relative to the folder. Links are followed.

    Raises OSError for a folder that cannot be read, UserError for a circle of links.
    """
    pattern = _check_pattern(glob)
    files = []
    folders = [str(folder)]
    while folders:
        parent = folders.pop()
        with os.scandir(parent) as entries:
            for entry in entries:
                if skip(entry):
                    continue
                if entry.is_dir():
                    resolved = Path(entry.path).resolve() if entry.is_symlink() else None
                    if resolved and Path(parent).resolve().is_relative_to(resolved):
                        raise UserError(f"{entry.path}: is a link to a parent folder. Remove it.")
                    folders.append(entry.path)
                elif entry.is_file() and PurePath(entry.path).match(pattern):
                    files.append(Path(entry.path).relative_to(folder))
    return sorted(files)


def _find_remote(address: str, glob: str | None) -> list[Source]:
    """List the file at an address, or the files of a folder or a pattern with * there."""
    pattern = _check_pattern("*" if glob is None else glob)
    fs, path = file_system(address)
    with wrap_errors(address):
        if "*" in path:
            entries = fs.glob(path, detail=True).items()
            files = [file for file, info in entries if info["type"] == "file"]
        elif address.endswith("/") or fs.info(path)["type"] == "directory":
            files = fs.find(path)
        else:
            return [Source(address, address)]
        folder = f"{path}/".partition("*")[0].rpartition("/")[0]
        addresses = []
        for file in sorted(files):
            relative = PurePosixPath(file.removeprefix(folder))
            is_hidden = any(part.startswith(".") for part in relative.parts)
            if relative.match(pattern) and not is_hidden:
                addresses.append(fs.unstrip_protocol(file))
    if not addresses:
        raise UserError(f"{address}: no files match {pattern!r}. See --glob.")
    return [Source(file, file) for file in addresses]


def _find_rows(name: str, config: str | None, split: str) -> Source:
    where = name.removeprefix("hf:")
    if Path(where).exists():
        where = str(Path(where).absolute())
    revision = ""
    with wrap_errors(name, "Check the name, --hf-config, --hf-split and the connection."):
        if not Path(where).exists():
            hub = import_optional("huggingface_hub", name)
            revision = hub.HfApi().dataset_info(where).sha
        source = Source(where, name, hub_split=split, hub_config=config, revision=revision)
        load_rows(source)
    return source


def load_rows(source: Source) -> Any:
    """Open a dataset of the ``datasets`` library: one saved in a folder, any other streamed."""
    return _load_rows(str(source.path), source.hub_config, source.hub_split, source.revision)


@functools.lru_cache(16)
def _load_rows(where: str, config: str | None, split: str, revision: str) -> Any:
    datasets = import_optional("datasets", f"hf:{where}")
    datasets.disable_progress_bars()
    if any((Path(where) / file).is_file() for file in SAVED_BY_DATASETS):
        saved = datasets.load_from_disk(where)
        return saved[split] if isinstance(saved, dict) else saved
    options = {"split": split, "streaming": True, "revision": revision or None}
    return datasets.load_dataset(where, config, **options)


def is_streamed(rows: Any) -> bool:
    """Return whether a dataset's rows can only be read in order, their number unknown."""
    return not hasattr(rows, "cache_files")


def download(address: str, expected_sha256: str) -> Path:
    """Download a file once into the cache. Raises UserError if it fails or the hash differs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt-trainer"
    name = Path(re.sub("[?#].*", "", address.partition("://")[2])).name or "download"
    path = cache / hashlib.sha256(address.encode()).hexdigest()[:16] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{name}.{os.getpid()}")
        fs, remote = file_system(address)
        try:
            with wrap_errors(address):
                fs.get_file(remote, str(partial))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    actual_sha256 = sha256(path)
    if actual_sha256 != expected_sha256.lower():
        path.unlink()
        reason = f"SHA-256 must be {expected_sha256} (got {actual_sha256})"
        raise UserError(f"{address}: {reason}. The file has changed, or the transfer was cut off.")
    return path
