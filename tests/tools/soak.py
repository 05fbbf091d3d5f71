"""Kill training and preparing, run them again, and compare with a run that was not killed.

python tests/tools/soak.py events    killed at every change of a file, one after the other
python tests/tools/soak.py ranks     the same for each of two FSDP ranks
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork has only one thread
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_same_run, numbers_text, run_ranks, tiny

import prepare
import train
from engine.runs.checkpoint import open_checkpoint
from engine.runs.run_files import list_checkpoints

SIX_STEPS = "--steps 6 --save-every 2 --eval-every 1000000 --dropout 0.1 --auto-resume"
# Audit events, and which argument is the directory's descriptor.
FILE_EVENTS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.chmod": 2}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def train_six_steps(folder: Path, flags: Sequence[str] = ()) -> int:
    """Train on the dataset of a folder."""
    return train.main(tiny(folder / "data", folder / "run", *SIX_STEPS.split(), *flags))


def make_data(folder: Path, flags: Sequence[str] = ()) -> None:
    """Prepare a small dataset of characters."""
    text = folder / "text.txt"
    text.write_text(numbers_text(500), encoding="utf-8")
    os.utime(text, (0, 0))  # the same file each time
    with contextlib.redirect_stdout(sys.stderr):
        prepare.main([str(text), "--tokenizer", "char", "--out", str(folder / "data"), *flags])


def changed_path(event: str, arguments: tuple[Any, ...]) -> str:
    """Return the path that an audit event is about to change, or an empty string."""
    is_write = event in FILE_EVENTS or (event == "open" and arguments[2] & WRITE_FLAGS)
    if not is_write or isinstance(arguments[0], int):
        return ""
    path = os.fsdecode(arguments[0])
    index = FILE_EVENTS.get(event)
    if index and (arguments[index] or -1) >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[index]}"), path)
    return path


def kill_at_event(folder: Path, fatal: int | None, is_main: bool) -> list[str]:
    """Kill this process at the n-th change of a file in a folder; return the list of changes.

    Files that the main process has not yet renamed or linked into place lose half of their bytes.
    """
    events: list[str] = []
    numbers = itertools.count(1)  # threads take turns at it
    rewritten: set[str] = set()  # files that were opened to be written anew

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = changed_path(event, arguments)
        if not path.startswith(f"{folder}/"):
            return
        events.append(event)
        if event == "open" and arguments[2] & os.O_TRUNC:
            rewritten.add(path)
        if next(numbers) == fatal:
            for file in folder.rglob("*") if is_main else ():
                with contextlib.suppress(FileNotFoundError):  # another thread has renamed it
                    is_rewritten = str(file) in rewritten and file.stat().st_nlink == 1
                    if file.is_file() and (".partial" in str(file) or is_rewritten):
                        os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return events


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return every file in a folder, except locks, by its path in it."""
    files = [file for file in folder.rglob("*") if file.is_file() and ".lock" not in file.name]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def check_killed(now: Path, before: Path, after: Path) -> None:
    """Check that checkpoints and settings are complete, or that the dataset is the old or new."""
    if not (after / "run").exists():
        dataset = contents_of(now / "data") or contents_of(now / ".data.replaced")
        assert dataset in (contents_of(before / "data"), contents_of(after / "data"))
    for path in list_checkpoints(now / "run"):
        open_checkpoint(path).verify()


def check_same(now: Path, after: Path) -> None:
    """Check that two folders have the same dataset, or settings, weights and records of a run."""
    if (after / "run").exists():
        assert contents_of(now)["run/config.toml"] == contents_of(after)["run/config.toml"]
        assert_same_run(now / "run", after / "run")
    else:
        assert contents_of(now) == contents_of(after)


make_other_data = partial(make_data, flags=["--val-fraction", "0.3"])
train_on_two_ranks = partial(train_six_steps, flags=["--parallel", "fsdp"])
KINDS = {  # what makes a folder, the command that is killed, and the rank of two, or None
    "train": (make_data, train_six_steps, None),
    "rank 0 of two": (make_data, train_on_two_ranks, 0),
    "rank 1 of two": (make_data, train_on_two_ranks, 1),
    "prepare": (Path.touch, make_data, None),
    "prepare --force": (make_other_data, partial(make_data, flags=["--force"]), None),
}


def events(folder: Path, name: str, max_kills: int = 10**6) -> int:
    """Kill one kind of command at each of its file events, or at some of them, evenly spread.

    Returns the number of kills. Raises AssertionError for one from which it did not recover.
    """
    begin, command, victim = KINDS[name]
    now, before, after = (folder / name for name in ("now", "before", "after"))
    log = folder / "log"
    now.mkdir()
    begin(now)
    shutil.copytree(now, before)

    def run(fatal: int | None = None) -> int:
        def start(rank: int) -> int | None:
            tempfile.tempdir = str(folder)
            if rank != (victim or 0):
                return command(now)
            changes = kill_at_event(now, fatal, rank == 0)
            code = command(now)
            (folder / "events.json").write_text(json.dumps(changes))
            return code

        codes = run_ranks(log, 1 if victim is None else 2, start)
        return codes[victim or 0] or max(codes)

    assert run() == 0, log.read_text()
    now.rename(after)
    changes = json.loads((folder / "events.json").read_text())
    kills = range(len(changes), 0, -max(1, len(changes) // max_kills))
    for fatal in kills:
        print(f"{name}: killed at event {fatal} of {len(changes)}, {changes[fatal - 1]}")
        shutil.copytree(before, now)
        assert run(fatal) == -signal.SIGKILL, log.read_text()
        check_killed(now, before, after)
        assert run() == 0, log.read_text()
        check_same(now, after)
        shutil.rmtree(now)
    return len(kills)


if __name__ == "__main__":
    for name, (*_, victim) in KINDS.items():
        if sys.argv[1] == ("events" if victim is None else "ranks"):
            with tempfile.TemporaryDirectory() as temporary:
                events(Path(temporary), name)
