"""Files that are whole or not there: directories made under another name and renamed, and their hashes."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises ValueError if it is not one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: not valid JSON ({error})") from None


def inside(folder: Path, name: Any) -> Path:
    """The path of a file that a manifest names. Raises ValueError for a name that leads out of the folder."""
    if not isinstance(name, str) or name != Path(name).name:
        raise ValueError(f"{folder / 'manifest.json'} names {name!r}, which is no file's name in its folder")
    return folder / name


def lock(path: Path) -> IO:
    """Hold a folder for this process as long as the file that this returns is open; it ends with the process.

    Raises ValueError naming the process that holds it already.
    """
    file = open(path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        raise ValueError(f"{path} is in use by process {file.read()}; wait for it, or choose another --out") from None
    file.truncate(0)
    file.write(f"{os.getpid()} on {platform.node()}")
    file.flush()
    return file


def flush(path: Path) -> None:
    """Wait until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Fill the directory that this yields; leaving it without an error makes it ``target``, at once and durably.

    A target that exists is replaced. After an error, or a kill, target is as it was before.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.partial."
    for stale in target.parent.glob(f"{glob.escape(prefix)}*"):  # left by a kill
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        for path in (*partial.iterdir(), partial):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)  # mkdtemp and safetensors make private ones
            flush(path)
        replaced = partial.with_name(partial.name + ".old")
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
        flush(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
