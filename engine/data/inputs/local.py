"""Local paths: lists the files of folders, copies pipes, and refuses devices and sockets."""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.core.errors import UserError

STDIN_NAMES = ("-", "/dev/stdin")
# The first letter of stat.filemode() → what it stands for.
SPECIAL_FILES = {"c": "a character device", "b": "a block device", "s": "a socket", "p": "a pipe"}
HEAD_CHARACTERS = 2**18  # of a pipe, to tell whether it holds records
# An array of objects or of lists of messages, or an object that ends on its line or after the head.
RECORDS_PATTERN = re.compile(
    r'\s*(\[\s*\{\s*"|\[\s*\[\s*\{\s*"(role|from)"|\{[ \t]*".*(\}[ \t]*$|\Z))', re.MULTILINE
)


def check_file(path: Path) -> None:
    """Raise UserError for a path that is not a file, or that cannot be read."""
    try:
        check_mode(str(path), path.stat().st_mode)
    except OSError as error:
        reason = f"cannot be read ({error.strerror}: {os.path.realpath(path)})"
        raise UserError(f"{path}: {reason}. Repair it, or choose files with --glob.") from None
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: cannot be read (permission denied). Change its permissions.")


def check_mode(name: str, mode: int) -> None:
    """Raise UserError if a mode, as of os.stat, is that of a device, a socket or a pipe."""
    if kind := SPECIAL_FILES.get(stat.filemode(mode)[0]):
        advice = "Give a file, or choose files with --glob"
        raise UserError(f"{name}: must be a file (got {kind}). {advice}.")


def copy_pipe(name: str, copy: Path) -> Path:
    """Copy a pipe, because a corpus is read more than once; the copy of records ends in .jsonl.

    Raises UserError for a device, which would not end, and if the copy cannot be written.
    """
    is_stdin = name in STDIN_NAMES
    try:
        with (
            open(0 if is_stdin else name, "rb", closefd=not is_stdin) as source,
            open(copy, "wb") as file,
        ):
            mode = os.fstat(source.fileno()).st_mode
            if stat.S_ISCHR(mode) and not source.isatty():
                check_mode(name, mode)
            shutil.copyfileobj(source, file)
    except OSError as error:
        reason = f"could not be copied to {copy.parent} ({error.strerror})"
        advice = "Make it readable, or set TMPDIR to a larger folder"
        raise UserError(f"{name}: {reason}. {advice}.") from None
    with open(copy, "rb") as binary_file:
        encoding = json.detect_encoding(binary_file.read(4))
    with open(copy, encoding=encoding, errors="replace") as text_file:
        has_records = RECORDS_PATTERN.match(text_file.read(HEAD_CHARACTERS))
    return copy.rename(copy.with_suffix(".jsonl")) if has_records else copy


def list_files(
    folder: Path, is_excluded: Callable[[Path], bool], visited: set[Path] | None = None
) -> Iterator[Path]:
    """Yield the files at any depth, in order. Those with several links to them are visited once.

    Raises UserError for a link to a parent folder, and for what cannot be listed or read.
    """
    visited = set() if visited is None else visited
    real_folder = Path(os.path.realpath(folder))
    if real_folder in visited:
        return
    visited.add(real_folder)
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        reason = f"cannot be listed ({error.strerror})"
        raise UserError(f"{folder}: {reason}. Change its permissions.") from None
    for path in paths:
        if is_excluded(path):
            continue
        is_link = path.is_symlink()
        real_path = Path(os.path.realpath(path)) if is_link else real_folder / path.name
        if is_link and real_folder.is_relative_to(real_path):
            raise UserError(f"{path}: is a link to a parent folder. Remove it.")
        if path.is_dir():
            yield from list_files(path, is_excluded, visited)
        elif real_path not in visited:
            visited.add(real_path)
            check_file(path)
            yield path
