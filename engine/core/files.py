"""Atomic writes, SHA-256 hashes, strict JSON, and locks between processes."""

import contextlib
import glob
import hashlib
import io
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import filelock

from engine.core.errors import UserError, did_you_mean, wrap_library_errors

MAX_INPUT_BYTES = 2**30  # of an input that is read at once
POINTER_START = b"version https://git-lfs.github.com/spec/"


def read_input(file: BinaryIO, name: Path | str) -> bytes:
    """Return the bytes of a file, pipe or device. Raises UserError if they are too many."""
    content = file.read(MAX_INPUT_BYTES + 1)
    check_pointer(content, name)
    if len(content) > MAX_INPUT_BYTES:
        raise UserError(f"{name}: must have at most {MAX_INPUT_BYTES:,} bytes. Give a file.")
    return content


def check_pointer(head: bytes, name: Path | str) -> None:
    """Raise UserError for the start of a file that Git LFS has not downloaded."""
    if head.startswith(POINTER_START):
        raise UserError(f"{name}: is a Git LFS pointer, not the file. Get it with: git lfs pull")


class NamedFile(io.FileIO):
    """A file whose errors, such as those of a full disk, name it."""

    def write(self, data: Any) -> int:
        """Write bytes; return their number."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = str(self.name)
            raise


def propose_path(path: Path, folder: Path, pattern: str, advice: str) -> str:
    """Return the question whether a wrong path means another, in which a file matches ``pattern``.

    That is above the wrong path or inside it, or has a similar name, beside it or in ``folder``.
    """
    name = path.resolve().stem
    relatives = [*path.parents[:2], *sorted(path.glob("*"))]
    pairs = [(each.name, each) for each in (*path.parent.glob("*"), *folder.glob("*"))]
    pairs += [(name, each) for each in reversed(relatives)]  # the last of a name is proposed
    candidates = ((key, each) for key, each in pairs if each.resolve() != path.resolve())
    proposals = {key: each for key, each in candidates if any(each.glob(pattern))}
    return did_you_mean(name, proposals, advice)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        check_pointer(file.peek(), path)
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
    """Return the value of a JSON file's content. Raises UserError, also for NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON value")

    check_pointer(content, path)
    problem = f"{path}: corrupted, not valid JSON"
    with wrap_library_errors(problem, ValueError, RecursionError, advice="."):
        return json.loads(content.decode(), parse_constant=refuse)


def safe_child_path(folder: Path, name: Any) -> Path:
    """Return the path of a file that a manifest names. Raises UserError outside the folder."""
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".."):
        manifest = folder / "manifest.json"
        raise UserError(f"{manifest}: must name files of its own folder (got {name!r}).")
    return folder / name


def acquire_lock(file: Path, target: Path) -> filelock.FileLock:
    """Lock a file, which protects ``target``, until release(). Raises UserError if that fails."""
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
    """Give a file, which safetensors makes private, the permissions of its directory; flush it."""
    if path.is_file():
        path.chmod(path.parent.stat().st_mode & 0o666)
    fsync(path)


def atomic_write(path: Path, content: bytes) -> None:
    """Write or replace a file so that it has the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with io.BufferedWriter(NamedFile(partial, "wb")) as file:
            file.write(content)
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
    for stale in target.parent.glob(f"{glob.escape(f'.{target.name}.partial.')}*"):  # after a kill
        shutil.rmtree(stale, ignore_errors=True)
    partial = target.with_name(f".{target.name}.partial.{os.getpid()}")
    partial.mkdir()  # with the permissions of the umask, unlike tempfile.mkdtemp()
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
