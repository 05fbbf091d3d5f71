"""Local paths: lists the files of folders, copies pipes, and refuses devices and sockets."""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath

from engine.core.errors import UserError

HEAD_CHARACTERS = 2**18  # of a pipe, to tell whether it holds records
MAX_FIRST_RECORD_CHARACTERS = 2**27  # for the same, of the rest of its first line
SPECIAL_FILES: dict[str, Callable[[int], bool]] = {
    "a character device": stat.S_ISCHR,
    "a block device": stat.S_ISBLK,
    "a socket": stat.S_ISSOCK,
    "a pipe": stat.S_ISFIFO,
}


def check_file(path: Path) -> None:
    """Raise UserError for a path that is not a file, or that cannot be read."""
    try:
        check_mode(str(path), path.stat().st_mode)
    except OSError as error:
        reason = f"cannot be read ({error.strerror}: {os.path.realpath(path)})"
        raise UserError(f"{path}: {reason}. Repair it, or choose files with --glob.") from None
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: cannot be read (permission denied). Change its permissions.")


def check_glob(arguments: Sequence[str]) -> None:
    """Raise UserError if the shell seems to have replaced a pattern of --glob by names."""
    start = arguments.index("--glob") + 1 if "--glob" in arguments else len(arguments)
    names = [*itertools.takewhile(lambda argument: not argument.startswith("-"), arguments[start:])]
    suffix = PurePath(names[0]).suffix if names else ""
    files = [name for name in names if PurePath(name).suffix == suffix and Path(name).is_file()]
    if suffix and len(files) > 1 and names[0] in files:
        got = f"got {len(files)} files, such as {files[0]}"
        raise UserError(f"--glob: must be one pattern ({got}). Quote it: --glob '*{suffix}'.")


def check_mode(name: str, mode: int) -> None:
    """Raise UserError if a mode, as of os.stat, is that of a device, a socket or a pipe."""
    for kind, is_kind in SPECIAL_FILES.items():
        if is_kind(mode):
            reason = f"must be a file (got {kind})"
            raise UserError(f"{name}: {reason}. Give a file, or choose files with --glob.")


def copy_pipe(pipe: int | str, name: str, copy: Path) -> Path:
    """Copy a pipe, given by its descriptor or path, until it ends. UserError: a full disk.

    Returns the path of the copy, which ends in .jsonl if it holds records.
    """
    try:
        with open(copy, "wb") as file, open(pipe, "rb", closefd=isinstance(pipe, str)) as source:
            mode = os.fstat(source.fileno()).st_mode
            if not source.isatty() and not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
                check_mode(name, mode)  # a device would not end
            shutil.copyfileobj(source, file)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        reason = f"does not fit on the disk of {copy.parent}"
        raise UserError(f"{name}: {reason}. Set TMPDIR to a larger one.") from None
    return copy.rename(copy.with_suffix(".jsonl")) if _holds_json_records(copy) else copy


def _holds_json_records(path: Path) -> bool:
    """Return whether a file starts with an array of JSON objects, or with one on a line."""
    with open(path, "rb") as binary_file:
        encoding = json.detect_encoding(binary_file.read(4))
    with open(path, encoding=encoding, errors="replace") as file:
        head = file.read(HEAD_CHARACTERS).lstrip()
        is_array = re.match(r'\[\s*(\{|\[\s*\{\s*"(role|from)")', head)
        if not is_array and not head.startswith("{"):
            return False
        head += file.readline(MAX_FIRST_RECORD_CHARACTERS)
    with contextlib.suppress(ValueError, RecursionError):
        decoder = json.JSONDecoder(parse_int=float)
        if is_array:
            decoder.raw_decode(head, head.index("{"))
        else:
            decoder.decode(head.partition("\n")[0])
        return True
    return False


def list_files(
    folder: Path, is_excluded: Callable[[Path], bool], visited: set[Path] | None = None
) -> Iterator[tuple[Path, Path]]:
    """Yield the files at any depth, in order, each with its real path.

    A folder with several links to it is visited once. Raises UserError for a link to a parent
    folder, and for a folder that cannot be listed.
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
        real_path = real_folder / path.name
        if path.is_symlink():
            real_path = Path(os.path.realpath(path))
        if not path.is_dir():
            yield path, real_path
        elif path.is_symlink() and real_folder.is_relative_to(real_path):
            raise UserError(f"{path}: is a link to a parent folder. Remove it.")
        else:
            yield from list_files(path, is_excluded, visited)
