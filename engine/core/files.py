"""Atomic writes, SHA-256 hashes, strict JSON, and locks between processes."""

import contextlib
import glob
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from engine.core.errors import UserError

INPUT_BLOCK_BYTES = 2**20  # read at a time
MAX_INPUT_BYTES = 2**30  # of an input that is read at once


def read_input(file: BinaryIO, name: Path | str) -> bytes:
    """Return the bytes of a file, a pipe or a device.

    Raises UserError if there are more than MAX_INPUT_BYTES: /dev/zero does not end.
    """
    blocks = iter(lambda: file.read(INPUT_BLOCK_BYTES), b"")
    content = b"".join(islice(blocks, MAX_INPUT_BYTES // INPUT_BLOCK_BYTES + 1))
    if len(content) > MAX_INPUT_BYTES:
        raise UserError(f"{name}: must have at most {MAX_INPUT_BYTES:,} bytes. Give a file.")
    return content


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, indent: int | None = None) -> str:
    """Return a value as strict JSON, in which NaN and infinity become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write a value as strict JSON, as :func:`to_json` returns it."""
    path.write_text(to_json(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises UserError if the file is not JSON."""
    return parse_json(path.read_bytes(), path)


def parse_json(content: bytes, path: Path) -> Any:
    """Return the value of a JSON file's content. Raises UserError naming the path.

    Python also reads NaN and Infinity, which are not JSON.
    """

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON value")

    try:
        return json.loads(content.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: corrupted, not valid JSON ({error}).") from None


def check_types(value: Any, schema: Any, name: str) -> None:
    """Raise UserError unless a value of JSON has the types of a schema, and no negative number.

    The schema of a dict has that of each key, or of "*" for the others; of a list, of its items.
    """
    expected_type: Any = schema if isinstance(schema, type) else type(schema)
    is_negative = isinstance(value, int) and value < 0
    if not isinstance(value, expected_type) or isinstance(value, bool) or is_negative:
        problem = f"must be of type {expected_type.__name__} and not negative"
        raise UserError(f"{name}: {problem} (got {str(value)[:40]!r})")
    if isinstance(schema, list):
        for index, item in enumerate(value):
            check_types(item, schema[0], f"{name}[{index}]")
    if isinstance(schema, dict):
        names = [*schema, *value] if "*" in schema else [*schema]
        for key in filter(lambda key: key != "*", names):
            check_types(value.get(key), schema.get(key, schema.get("*")), f"{name}.{key}")


def safe_child_path(folder: Path, name: Any) -> Path:
    """Return the path of a file that a manifest names. Raises UserError outside the folder."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".."):
        manifest = folder / "manifest.json"
        raise UserError(f"{manifest}: must name files of its own folder (got {name!r}).")
    return folder / name


def acquire_lock(file: Path, target: Path) -> filelock.FileLock:
    """Lock a file, which protects ``target``, until release() or the end of the process.

    Raises UserError if another process holds it, or if it cannot be locked.
    """
    file_lock = filelock.FileLock(file, fallback_to_soft=False)
    try:
        file_lock.acquire(blocking=False)
    except filelock.Timeout:
        owner = file.read_text(encoding="utf-8") or "another process"
        advice = "Wait for it, or choose another --out."
        raise UserError(f"{target}: in use by {owner}. {advice}") from None
    except OSError as error:  # not every file system has locks
        raise UserError(f"{target}: cannot be locked ({error}). Choose another folder.") from None
    file.write_text(f"process {os.getpid()} on {platform.node()}", encoding="utf-8")
    return file_lock


@contextlib.contextmanager
def exclusive_lock(target: Path) -> Iterator[None]:
    """Let no other process make or replace a directory. Raises UserError if another is doing so."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_name(f".{target.name}.lock")
    file_lock = acquire_lock(file, target)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        file_lock.release()


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    if sys.platform == "win32":  # where a directory cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chmod_and_fsync(path: Path) -> None:
    """Give a file or directory the permissions of the umask, and flush it to the disk."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)  # mkdtemp and safetensors: 0600
    fsync(path)


def atomic_write(path: Path, content: bytes) -> None:
    """Write or replace a file so that it has the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        fsync(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield an empty directory, and rename it to ``target`` if the block raises nothing.

    An existing target is replaced; a symbolic link is followed. After an error it is unchanged.
    After a kill between the two renames, the next call restores it from ``.NAME.replaced``.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    replaced = target.with_name(f".{target.name}.replaced")
    _restore(target, replaced)
    prefix = f".{target.name}.partial."
    for stale in target.parent.glob(f"{glob.escape(prefix)}*"):  # after a kill
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            chmod_and_fsync(path)
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        fsync(target.parent)
    finally:
        _restore(target, replaced)
        shutil.rmtree(partial, ignore_errors=True)


def _restore(target: Path, replaced: Path) -> None:
    """Rename a replaced directory back if its target is missing, and remove it otherwise."""
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    elif replaced.exists():
        replaced.rename(target)
