"""Kill training and preparing, run them again, and compare with a run that was not killed.

    python tests/soak.py events    killed at every change of a file, one after the other
    python tests/soak.py ranks     the same for each of two FSDP ranks

Torch is imported once, and each run is a fork. Exit code 0: no difference.
"""

import contextlib
import functools
import gc
import itertools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork has only one thread
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
from helpers import Action, assert_same_run, logged, numbers_text, rendezvous

import prepare
import train
from engine.core.errors import UserError
from engine.core.settings import load_settings
from engine.report import callback as report_callback
from engine.runs.checkpoint import open_checkpoint
from engine.runs.run_files import list_checkpoints
from engine.training import callbacks
from engine.training.callbacks import MetricsFile
from engine.training.config import TrainConfig

SHAPE = "--num-layers 1 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4"
FLAGS = "--warmup-steps 2 --dropout 0.1 --eval-tokens 200 --eval-every 1000000 --auto-resume"
FLAGS += " --device cpu"
SIX_STEPS = ("--steps", 6, "--save-every", 2, "--log-every", 1)
# Audit events, and which argument is the directory's descriptor.
FILE_EVENTS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.chmod": 2}
FILE_EVENTS |= {"shutil.rmtree": 1, "os.truncate": None, "tempfile.mkdtemp": None}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
RUN_TIMEOUT_SECONDS = 120
PEER_TIMEOUT_SECONDS = 10  # of a rank, once another has failed


# Runs.


def fork(log: Path, function: Callable[[], int | None]) -> int:
    """Call a function in a child process, whose output goes to a log; return its process id."""
    if torch.cuda.is_available() and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip("a fork has no gradients if its parent had some, beside a GPU")
    if child := os.fork():
        return child
    gc.freeze()  # a collection would copy the memory that is shared with the parent
    try:
        output = open(log, "a", encoding="utf-8")  # noqa: SIM115
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = sys.stderr = output
        torch.set_num_threads(1)
        callbacks.FINAL_SAMPLE_TOKENS = report_callback.SAMPLE_TOKENS = 3
        code = function() or 0
        output.flush()
        os._exit(code)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(99)


def wait_for(child: int) -> int:
    """Return the exit code of a child process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_ranks(log: Path, num_ranks: int, function: Callable[[int], int | None]) -> list[int]:
    """Call function(rank) in a process for each rank; return their exit codes."""
    with rendezvous(num_ranks) as variables:

        def start(rank: int) -> int | None:
            os.environ.update({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            signal.alarm(RUN_TIMEOUT_SECONDS)
            return function(rank)

        children = [fork(log, functools.partial(start, rank)) for rank in range(num_ranks)]
        return wait_for_ranks(children)


def wait_for_ranks(children: list[int]) -> list[int]:
    """Return the exit codes of ranks. If one fails, end the others like torchrun."""
    codes: dict[int, int] = {}
    deadline = math.inf
    while running := [child for child in children if child not in codes]:
        for child in running:
            process, status = os.waitpid(child, os.WNOHANG)
            if process:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        if deadline == math.inf and any(codes.values()):
            deadline = time.monotonic() + PEER_TIMEOUT_SECONDS
        time.sleep(0.01)
    return [codes[child] for child in children]


def train_arguments(run: Path, *flags: object) -> list[str]:
    """Return the command line of train.py for a run on the dataset beside it."""
    paths = ["--data", run.parent / "data", "--out", run]
    return list(map(str, [*paths, *SHAPE.split(), *FLAGS.split(), *flags]))


def make_data(folder: Path, *flags: str) -> None:
    """Prepare a small dataset of characters."""
    text = folder / "text.txt"
    text.write_text(numbers_text(500), encoding="utf-8")
    os.utime(text, (0, 0))  # the same file each time
    with contextlib.redirect_stdout(sys.stderr):
        prepare.main([str(text), "--tokenizer", "char", "--out", str(folder / "data"), *flags])


# Killed at every change of a file.


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


def make_killed_run(folder: Path) -> None:
    """Train to step 5 and be killed; there are checkpoints, but none of step 5."""
    make_data(folder)
    config = load_settings(TrainConfig, train_arguments(folder / "run", *SIX_STEPS))
    kill = functools.partial(signal.raise_signal, signal.SIGKILL)
    hooks = [MetricsFile(), Action(5, kill, "train_loss")]
    child = fork(folder.with_suffix(".log"), lambda: train.train(config, callbacks=hooks))
    assert wait_for(child) == -signal.SIGKILL
    assert list(logged(folder / "run", "train_loss")) == [1, 2, 3, 4, 5]


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
    config = now / "run" / "config.toml"
    assert not config.exists() or config.read_bytes() == (after / "run/config.toml").read_bytes()


def check_same(now: Path, after: Path) -> None:
    """Check that two folders have the same dataset, or settings, weights and records of a run.

    The first may have an older checkpoint too: killed before the prune, with nothing left to save.
    """
    files = contents_of(now)
    expected = contents_of(after)
    if not (after / "run").exists():
        assert files == expected
        return
    additional = files.keys() - expected.keys()
    assert len(files) == len(expected) + len(additional)
    assert all(name.startswith("run/checkpoints/step-") for name in additional)
    assert files["run/config.toml"] == expected["run/config.toml"]
    num_records, num_expected = (len(x["run/metrics.jsonl"].split()) for x in (files, expected))
    assert num_records == num_expected
    assert_same_run(now / "run", after / "run")


@dataclass
class Kind:
    """A command to kill, and what makes its folder."""

    begin: Callable[[Path], Any]
    command: Callable[[Path], Any]
    num_ranks: int = 1
    victim: int = 0  # the rank to kill


def train_six_steps(folder: Path, *flags: str) -> int:
    return train.main(train_arguments(folder / "run", *SIX_STEPS, *flags))


def train_sharded(folder: Path) -> int:
    return train_six_steps(folder, "--parallel", "fsdp")


KINDS = {
    "train": Kind(make_data, train_six_steps),
    "resume": Kind(make_killed_run, train_six_steps),
    "train, rank 0 of 2 sharded": Kind(make_data, train_sharded, num_ranks=2, victim=0),
    "train, rank 1 of 2 sharded": Kind(make_data, train_sharded, num_ranks=2, victim=1),
    "prepare": Kind(lambda folder: None, make_data),
    "prepare --force": Kind(
        lambda folder: make_data(folder, "--val-fraction", "0.3"),
        lambda folder: make_data(folder, "--force"),
    ),
}


def events(folder: Path, name: str, max_kills: int = 10**6) -> int:
    """Kill one kind of command at each of its file events, or at some of them, evenly spread.

    Returns the number of kills. Raises AssertionError for one from which it did not recover.
    """
    kind = KINDS[name]
    now, before, after, temporary = (folder / name for name in ("now", "before", "after", "tmp"))
    log = folder / "log"
    for path in (now, temporary):
        path.mkdir()
    kind.begin(now)
    shutil.copytree(now, before)

    def run(fatal: int | None = None) -> int:
        def start(rank: int) -> int | None:
            tempfile.tempdir = str(temporary)
            if rank != kind.victim:
                return kind.command(now)
            killer = Killer(now, fatal, rank)
            code = kind.command(now)
            (folder / "events.json").write_text(json.dumps(killer.events))
            return code

        codes = run_ranks(log, kind.num_ranks, start)
        assert -signal.SIGALRM not in codes, log.read_text()
        return codes[kind.victim] or max(codes)

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
    for name, kind in KINDS.items():
        if sys.argv[1] == ("events" if kind.num_ranks == 1 else "ranks"):
            with tempfile.TemporaryDirectory() as temporary:
                print(f"{name}: killed at {events(Path(temporary), name)} events", flush=True)
