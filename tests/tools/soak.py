"""Kill training and preparing, run them again, and compare with a run that was not killed.

    python tests/tools/soak.py events    killed at every change of a file, one after the other
    python tests/tools/soak.py ranks     the same for each of two FSDP ranks

Torch is imported once, and each run is a fork. Exit code 0: no difference.
"""

import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork has only one thread
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import assert_same_run, numbers_text, run_ranks

import prepare
import train
from engine.core.errors import UserError
from engine.runs.checkpoint import open_checkpoint
from engine.runs.run_files import list_checkpoints

FLAGS = "--num-layers 1 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --device cpu "
FLAGS += "--warmup-steps 2 --dropout 0.1 --eval-tokens 200 --eval-every 1000000 --auto-resume "
FLAGS += "--steps 6 --save-every 2 --log-every 1"
# Audit events, and which argument is the directory's descriptor.
FILE_EVENTS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.chmod": 2}
FILE_EVENTS |= {"shutil.rmtree": 1, "os.truncate": None, "tempfile.mkdtemp": None}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def train_six_steps(folder: Path, *flags: str) -> int:
    """Train on the dataset of a folder."""
    paths = ["--data", f"{folder}/data", "--out", f"{folder}/run"]
    return train.main([*paths, *FLAGS.split(), *flags])


def make_data(folder: Path, *flags: str) -> None:
    """Prepare a small dataset of characters."""
    text = folder / "text.txt"
    text.write_text(numbers_text(500), encoding="utf-8")
    os.utime(text, (0, 0))  # the same file each time
    with contextlib.redirect_stdout(sys.stderr):
        prepare.main([str(text), "--tokenizer", "char", "--out", str(folder / "data"), *flags])


class Killer:
    """An audit hook that kills this process at the n-th change of a file in a folder."""

    def __init__(self, folder: Path, fatal: int | None, rank: int = 0):
        self.folder = os.path.join(folder, "")
        self.fatal = fatal
        self.rank = rank
        self.events: list[str] = []
        self.rewritten: set[str] = set()  # files that were opened to be written anew
        self.counter = itertools.count(1)
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_change(event, arguments):
            self.events.append(event)
            if event == "open" and arguments[2] & os.O_TRUNC:
                self.rewritten.add(os.fsdecode(arguments[0]))
            if next(self.counter) == self.fatal:
                self.is_change = lambda *_: False
                self.kill()

    def is_change(self, event: str, arguments: tuple[Any, ...]) -> bool:
        is_write = event in FILE_EVENTS or (event == "open" and arguments[2] & WRITE_FLAGS)
        if not is_write or isinstance(arguments[0], int):
            return False
        path = os.fsdecode(arguments[0])
        index = FILE_EVENTS.get(event)
        if index and (arguments[index] or -1) >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[index]}"), path)
        exists = event == "os.mkdir" and os.path.isdir(path)
        return path.startswith(self.folder) and not exists

    def kill(self) -> None:
        """Kill this process; on rank 0, files not renamed or linked into place lose half."""
        for path in Path(self.folder).rglob("*") if self.rank == 0 else ():
            with contextlib.suppress(FileNotFoundError):  # another thread has renamed it
                is_rewritten = str(path) in self.rewritten and path.stat().st_nlink == 1
                if path.is_file() and (".partial" in str(path) or is_rewritten):
                    os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def make_shorter_run(folder: Path) -> None:
    """Train to step 4, to be resumed."""
    make_data(folder)
    train_six_steps(folder, "--steps", "4")


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
    """Check that two folders have the same dataset, or settings, weights and records of a run.

    The first may have an older checkpoint too: killed before the prune, with nothing left to save.
    """
    files = contents_of(now)
    expected = contents_of(after)
    if not (after / "run").exists():
        assert files == expected
        return
    assert expected.keys() <= files.keys()
    additional = files.keys() - expected.keys()
    assert all(name.startswith("run/checkpoints/step-") for name in additional)
    assert files["run/config.toml"] == expected["run/config.toml"]
    assert_same_run(now / "run", after / "run")


KINDS = {  # what makes a folder, the command that is killed, and the rank of two, or None
    "train": (make_data, train_six_steps, None),
    "resume": (make_shorter_run, train_six_steps, None),
    "rank 0 of two": (make_data, lambda folder: train_six_steps(folder, "--parallel", "fsdp"), 0),
    "rank 1 of two": (make_data, lambda folder: train_six_steps(folder, "--parallel", "fsdp"), 1),
    "prepare": (lambda folder: None, make_data, None),
    "prepare --force": (
        lambda folder: make_data(folder, "--val-fraction", "0.3"),
        lambda folder: make_data(folder, "--force"),
        None,
    ),
}


def events(folder: Path, name: str, max_kills: int = 10**6) -> int:
    """Kill one kind of command at each of its file events, or at some of them, evenly spread.

    Returns the number of kills. Raises AssertionError for one from which it did not recover.
    """
    begin, command, victim = KINDS[name]
    now, before, after, temporary = (folder / name for name in ("now", "before", "after", "tmp"))
    log = folder / "log"
    for path in (now, temporary):
        path.mkdir()
    begin(now)
    shutil.copytree(now, before)

    def run(fatal: int | None = None) -> int:
        def start(rank: int) -> int | None:
            tempfile.tempdir = str(temporary)
            if rank != (victim or 0):
                return command(now)
            killer = Killer(now, fatal, rank)
            code = command(now)
            (folder / "events.json").write_text(json.dumps(killer.events))
            return code

        codes = run_ranks(log, 1 if victim is None else 2, start)
        assert -signal.SIGALRM not in codes, log.read_text()
        return codes[victim or 0] or max(codes)

    assert run() == 0, log.read_text()
    now.rename(after)
    seen = json.loads((folder / "events.json").read_text())
    chosen = range(len(seen), 0, -max(1, len(seen) // max_kills))
    for fatal in chosen:
        where = f"{name}, killed at event {fatal} of {len(seen)}, {seen[fatal - 1]}"
        shutil.copytree(before, now)
        code = run(fatal)
        assert code == -signal.SIGKILL, f"{where}: exit code {code}, {log.read_text()[-2000:]}"
        try:
            check_killed(now, before, after)
            assert run() == 0, log.read_text()[-2000:]
            check_same(now, after)
        except (AssertionError, UserError) as error:
            raise AssertionError(where) from error
        shutil.rmtree(now)
    return len(chosen)


if __name__ == "__main__":
    for name, (*_, victim) in KINDS.items():
        if sys.argv[1] == ("events" if victim is None else "ranks"):
            with tempfile.TemporaryDirectory() as temporary:
                print(f"{name}: killed at {events(Path(temporary), name)} events", flush=True)
