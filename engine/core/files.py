"""Files that are whole or not there: written under another name and renamed; their hashes; a lock on a folder."""

import contextlib
import ctypes
import glob
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

from engine.core.errors import UserError

AT_CURRENT_DIRECTORY, EXCHANGE = -100, 2  # Linux's <fcntl.h> and <linux/fs.h>


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(value: Any, indent: int | None = None) -> str:
    """A value as strict JSON, which has no word for what is not finite: NaN and infinity become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
    return json.dumps(finite, indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write a value as strict JSON; what is not finite becomes null."""
    path.write_text(to_json(value, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises UserError if it is not one."""
    return parse_json(path.read_bytes(), path)


def parse_json(content: bytes, path: Path) -> Any:
    """The value that a file's content stands for. Raises UserError naming the path if it is no JSON."""
    try:
        return json.loads(content.decode(), parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: not valid JSON ({error})") from None


def inside(folder: Path, name: Any) -> Path:
    """The path of a file that a manifest names. Raises UserError for a name that leads out of the folder."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".."):
        raise UserError(f"{folder / 'manifest.json'} names {name!r}, which is no file's name in its folder")
    return folder / name


def lock(file: Path, what: Path) -> filelock.FileLock:
    """Hold what the file stands for until the lock is released or the process ends.

    Raises UserError naming another process that holds it.
    """
    held, owner = filelock.FileLock(file), file.with_name(f"{file.name}.owner")
    try:
        held.acquire(blocking=False)
    except filelock.Timeout:
        name = owner.read_text(encoding="utf-8") if owner.exists() else "of another machine"
        raise UserError(f"{what} is in use by process {name}; wait for it, or choose another --out") from None
    owner.write_text(f"{os.getpid()} on {platform.node()}", encoding="utf-8")
    return held


def is_locked(file: Path) -> bool:
    """Whether another process holds a file's lock, as far as this machine can tell."""
    held = filelock.FileLock(file)
    try:
        held.acquire(blocking=False)
    except filelock.Timeout:
        return True
    held.release()
    return False


@contextlib.contextmanager
def held_alone(target: Path) -> Iterator[None]:
    """While this process makes or replaces a directory, no other does. Raises UserError naming another at work."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.with_name(f".{target.name}.lock")
    held = lock(file, target)
    try:
        yield
    finally:
        for left in (file.with_name(f"{file.name}.owner"), file):
            with contextlib.suppress(OSError):
                left.unlink()
        held.release()


def flush(path: Path) -> None:
    """Wait until a file, or where the system can a directory's list of names, is on the disk."""
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settle(path: Path) -> None:
    """Give a file or directory the usual permissions, and wait until it is on the disk."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)  # mkdtemp and safetensors make private ones
    flush(path)


def write_whole(path: Path, content: bytes) -> None:
    """Make or replace a file at once and durably: whatever happens, it is as it was, or as it should be."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    flush(path.parent)


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names stand for, at once; False where the system can't."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    names = (AT_CURRENT_DIRECTORY, os.fsencode(one), AT_CURRENT_DIRECTORY, os.fsencode(other))
    return swap is not None and swap(*names, EXCHANGE) == 0


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Fill the directory that this yields; leaving it without an error makes it ``target``, at once and durably.

    A target that exists, or that a link at its place leads to, is replaced. After an error, or a kill, it is as before.
    """
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial."
    for stale in target.parent.glob(f"{glob.escape(prefix)}*"):  # left by a kill
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            settle(path)
        if not target.exists():
            partial.rename(target)
        elif not exchange(partial, target):  # no such system call: for a moment nothing is there
            target.rename(replaced := partial.with_name(f"{partial.name}.old"))
            partial.rename(target)
            shutil.rmtree(replaced, ignore_errors=True)
        flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
