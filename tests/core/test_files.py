"""Atomic files and directories, hashes, strict JSON, and locks."""

import errno
import fcntl
import hashlib
import json
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.core.errors import UserError
from engine.core.files import (
    acquire_lock,
    atomic_directory,
    atomic_write,
    exclusive_lock,
    read_json,
    safe_child_path,
    sha256,
    to_json,
    write_json,
)


def names_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


# JSON.


def test_json_is_strict_and_read_back_from_a_file(tmp_path):
    path = tmp_path / "value.json"
    value = {"漢字 🚀": [0.1 + 0.2, 10**30, None], "a": [float("nan"), {"b": (float("-inf"), 2)}]}
    expected = value | {"a": [None, {"b": [None, 2]}]}
    write_json(path, value)
    text = path.read_text(encoding="utf-8")
    assert read_json(path) == json.loads(text, parse_constant=pytest.fail) == expected
    assert "漢字 🚀" in text and text.endswith("}\n") and "\n" not in to_json(value)
    assert value["a"][1] == {"b": (float("-inf"), 2)}  # the value itself is unchanged


def test_corrupted_json_and_a_path_outside_its_folder_are_refused_in_one_line(tmp_path):
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000):
        (tmp_path / "value.json").write_bytes(content)
        with pytest.raises(UserError, match=r"^[^\n]*value\.json: corrupted[^\n]*$"):
            read_json(tmp_path / "value.json")
    for name in ("../x", "/etc/passwd", "a/b", "..", "", ".", None, 3, ["x"]):
        with pytest.raises(UserError, match=r"manifest\.json: "):
            safe_child_path(tmp_path, name)
    assert safe_child_path(tmp_path, "train-00000.npy") == tmp_path / "train-00000.npy"


# Atomic files.


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_file_is_replaced_unless_the_write_fails(tmp_path, monkeypatch, is_disk_full):
    path = tmp_path / "file"
    atomic_write(path, b"old")
    assert sha256(path) == hashlib.sha256(b"old").hexdigest()
    with open(path, "rb") as reader:
        if is_disk_full:
            error = OSError(errno.ENOSPC, "No space left on device")
            monkeypatch.setattr(os, "fsync", Mock(side_effect=error))
            with pytest.raises(OSError, match="No space"):
                atomic_write(path, b"the new one")
        else:
            atomic_write(path, b"the new one")
        assert reader.read() == b"old"
    assert path.read_bytes() == (b"old" if is_disk_full else b"the new one")
    assert names_below(tmp_path) == {"file"}


# Atomic directories.


def fill(target: Path, text: str) -> None:
    with atomic_directory(target) as directory:
        (directory / text).write_text(text)


def test_directory_appears_when_it_is_complete_and_is_replaced_when_it_exists(tmp_path):
    target = tmp_path / "deep" / "target"
    with atomic_directory(target) as directory:
        (directory / "one").write_text("x")
        assert not target.exists()
    assert names_below(tmp_path) == {"deep", "target", "one"}
    (tmp_path / "link").symlink_to(target)
    with atomic_directory(tmp_path / "link") as directory:
        assert directory.parent == target.parent  # a rename needs the same file system
        (directory / "two").write_text("")
    assert (tmp_path / "link").is_symlink()
    assert names_below(tmp_path) == {"deep", "target", "two", "link"}


@pytest.mark.parametrize(
    ("exists", "failing_rename"), [(False, 0), (False, 1), (True, 0), (True, 1), (True, 2)]
)
def test_an_error_leaves_a_directory_as_it_was(tmp_path, monkeypatch, exists, failing_rename):
    target = tmp_path / "target"
    if exists:
        fill(target, "one")
    before = names_below(tmp_path)
    rename = Path.rename
    calls = []

    def rename_or_fail(path: Path, new_path: Path) -> Path:
        calls.append(path)
        if len(calls) == min(failing_rename, 1 + exists):  # a new one is renamed once
            raise OSError("disk")
        return rename(path, new_path)

    monkeypatch.setattr(Path, "rename", rename_or_fail)
    with pytest.raises((OSError, KeyboardInterrupt)), atomic_directory(target) as directory:
        (directory / "two").write_text("")
        if not failing_rename:
            raise KeyboardInterrupt
    assert names_below(tmp_path) == before


def test_partial_directories_of_a_kill_are_removed_and_others_stay(tmp_path):
    for name in (".target.partial.abc", ".target2.partial.abc", ".[x].partial.abc"):
        (tmp_path / name).mkdir()
    fill(tmp_path / "target", "one")
    fill(tmp_path / "[x]", "one")
    assert {path.name for path in tmp_path.iterdir()} == {".target2.partial.abc", "target", "[x]"}


def test_directory_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "umask", None)  # to set it, even for a moment, affects all threads
            with atomic_directory(tmp_path / "target") as directory:
                (directory / "folder").mkdir()
                (directory / "file").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"target": 0o750, "folder": 0o750, "file": 0o640}


# Locks.


def test_lock_names_its_owner_until_it_is_released(tmp_path):
    file = tmp_path / ".lock"
    file.write_text("process 4711 on a dead machine")
    file_lock = acquire_lock(file, tmp_path)
    with pytest.raises(UserError, match=rf"^{tmp_path}: .* process {os.getpid()} on .+"):
        acquire_lock(file, tmp_path)
    file_lock.release()
    acquire_lock(file, tmp_path).release()


def test_exclusive_lock_leaves_no_files(tmp_path):
    target = tmp_path / "deep" / "target"
    for _ in range(2):
        with exclusive_lock(target), pytest.raises(UserError, match="target"):
            exclusive_lock(target).__enter__()
    assert names_below(tmp_path) == {"deep"}


def test_file_system_without_locks_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks")))
    with pytest.raises(UserError, match=rf"^{tmp_path}: "):
        acquire_lock(tmp_path / ".lock", tmp_path)
