"""Files that are whole or not there, their hashes, strict JSON, and locks."""

import hashlib
import json
import os
import stat
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from engine.core import files
from engine.core.files import (
    exchange,
    inside,
    is_locked,
    lock,
    new_directory,
    read_json,
    sha256,
    to_json,
    write_json,
    write_whole,
)


def test_a_hash_is_that_of_the_bytes(tmp_path):
    content = np.random.default_rng(0).bytes(3_000_000)
    (tmp_path / "file").write_bytes(content)
    assert sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


# JSON.


def test_json_is_strict_what_is_not_finite_is_null_and_the_value_itself_stays():
    value = {"a": [1.5, float("nan"), (float("inf"), 2)], "b": {"c": float("-inf")}, "é": None, "d": True}
    text = to_json(value)
    assert json.loads(text, parse_constant=pytest.fail) == {"a": [1.5, None, [None, 2]], "b": {"c": None}} | {
        "é": None,
        "d": True,
    }
    assert "é" in text and "\n" not in text
    assert value["b"]["c"] == float("-inf")


def test_json_comes_back_from_a_file(tmp_path):
    value = {"text": "漢字 🚀", "numbers": [0.1 + 0.2, 10**30, -1], "nothing": None}
    write_json(tmp_path / "value.json", value)
    assert read_json(tmp_path / "value.json") == value
    assert (tmp_path / "value.json").read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000], ids=["empty", "torn", "no text", "deep"])
def test_what_is_not_json_is_refused_by_name_in_one_line(tmp_path, content):
    (tmp_path / "value.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"value\.json is damaged: not valid JSON \(") as caught:
        read_json(tmp_path / "value.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", "", ".", None, 3, ["x"]])
def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"manifest\.json names .*, which is no file's name in its folder"):
        inside(tmp_path, name)


def test_a_name_in_its_folder_is_a_path(tmp_path):
    assert inside(tmp_path, "train-00000.npy") == tmp_path / "train-00000.npy"


# Whole files.


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with open(path, "rb") as reader:  # who had it open sees it whole
        write_whole(path, b"the new one")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"the new one" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_can_not_be_written_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, b"old")

    def fails(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


# Whole directories.


@pytest.fixture(params=["exchanged", "no such system call"])
def any_system(request, monkeypatch) -> str:
    """Linux, which swaps two names at once, and a system that can't."""
    if request.param == "no such system call":
        monkeypatch.setattr(sys, "platform", "other")
    elif sys.platform != "linux":
        pytest.skip("only Linux can")
    return request.param


def fill(target: Path, text: str) -> None:
    with new_directory(target) as directory:
        assert directory.parent == target.parent  # a rename needs the same file system
        (directory / text).write_text(text)


def test_a_new_directory_is_there_when_it_is_whole(tmp_path):
    with new_directory(tmp_path / "deep" / "target") as directory:
        (directory / "file").write_text("x")
        assert not (tmp_path / "deep" / "target").exists()
    assert [path.name for path in (tmp_path / "deep").rglob("*")] == ["target", "file"]


def test_a_new_directory_replaces_the_one_that_was_there(tmp_path, any_system):
    for text in ("one", "two", "three"):
        fill(tmp_path / "target", text)
        assert [path.name for path in tmp_path.rglob("*")] == ["target", text]  # and nothing is left


def test_an_error_leaves_a_directory_as_it_was(tmp_path, any_system):
    def fill_and_fail(target: Path) -> None:
        with pytest.raises(KeyboardInterrupt), new_directory(target) as directory:
            (directory / "two").write_text("")
            raise KeyboardInterrupt

    fill_and_fail(tmp_path / "target")
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / "target", "one")
    fill_and_fail(tmp_path / "target")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "one"]


def test_what_a_kill_left_is_removed_and_nothing_else(tmp_path):
    names = [".target.partial.abc", ".target.partial.abc.old", ".target2.partial.abc", ".[x].partial.abc"]
    for name in names:
        (tmp_path / name).mkdir()
    fill(tmp_path / "target", "one")
    fill(tmp_path / "[x]", "one")
    assert {path.name for path in tmp_path.iterdir()} == {".target2.partial.abc", "target", "[x]"}


def test_everybody_may_read_a_new_directory_as_the_mask_says(tmp_path):
    before = os.umask(0o027)
    try:
        with new_directory(tmp_path / "target") as directory:
            (directory / "folder").mkdir()
            (directory / "file").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"target": 0o750, "folder": 0o750, "file": 0o640}


needs_exchange = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can swap two names at once")


@needs_exchange
def test_while_a_directory_is_replaced_it_is_always_there(tmp_path):
    fill(tmp_path / "target", "whole")
    missing, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                os.stat(tmp_path / "target" / "whole")
            except OSError as error:
                missing.append(error)

    watcher = threading.Thread(target=look)
    watcher.start()
    for _ in range(50):
        fill(tmp_path / "target", "whole")
    done.set()
    watcher.join()
    assert missing == []


@needs_exchange
def test_two_names_are_swapped_or_nothing_is_done(tmp_path):
    fill(tmp_path / "one", "1")
    fill(tmp_path / "other", "2")
    assert exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "2").exists() and (tmp_path / "other" / "1").exists()
    assert not exchange(tmp_path / "one", tmp_path / "nothing")
    assert (tmp_path / "one" / "2").exists() and not (tmp_path / "nothing").exists()


def test_without_the_system_call_nothing_is_swapped(tmp_path, monkeypatch):
    fill(tmp_path / "one", "1")
    fill(tmp_path / "other", "2")
    monkeypatch.setattr(sys, "platform", "other")
    assert not exchange(tmp_path / "one", tmp_path / "other")
    monkeypatch.undo()
    monkeypatch.setattr(files.ctypes, "CDLL", lambda name: object())  # an old C library
    assert not exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "one" / "1").exists()


# Locks.


def test_a_lock_names_its_owner_until_it_is_released(tmp_path):
    held = lock(tmp_path / ".lock", tmp_path)
    refusal = rf"{tmp_path} is in use by process {os.getpid()} on .+; wait for it, or choose another --out"
    with pytest.raises(ValueError, match=refusal):
        lock(tmp_path / ".lock", tmp_path)
    held.release()
    lock(tmp_path / ".lock", tmp_path).release()


def test_a_lock_whose_owner_is_not_known_is_refused_all_the_same(tmp_path):
    held = lock(tmp_path / ".lock", tmp_path)
    (tmp_path / ".lock.owner").unlink()
    with pytest.raises(ValueError, match=r"is in use by process of another machine"):
        lock(tmp_path / ".lock", tmp_path)
    held.release()


def test_a_lock_file_that_nobody_holds_is_no_lock(tmp_path):
    (tmp_path / ".lock").write_text("4711 on a machine that went down")
    (tmp_path / ".lock.owner").write_text("4711 on a machine that went down")
    held = lock(tmp_path / ".lock", tmp_path)
    assert held.is_locked
    held.release()


def test_a_lock_is_seen_by_others_as_long_as_it_is_held(tmp_path: Path):
    held = lock(tmp_path / ".lock", tmp_path)
    assert is_locked(tmp_path / ".lock")
    held.release()
    assert not is_locked(tmp_path / ".lock")
