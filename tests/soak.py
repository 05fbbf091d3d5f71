"""Training and preparing under fire. Torch is imported once, and each run is a fork.

    python tests/soak.py events        killed at every change of a file, one after the other, then run again;
                                       sharded, first the first of two processes and then the second
    python tests/soak.py kills 100     killed so many times at random moments
    python tests/soak.py long 20000    so many steps: memory and open files

The first two must end in what a run leaves that nothing happened to. Exit code 0: all is well.
"""

import collections
import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: a fork has no threads but its own
sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib.figure  # noqa: F401  as the next, or every fork would import it
import torch
import torch._dynamo
import torch.distributed.fsdp
from helpers import newest_checkpoint, numbers_text, same_checkpoint

import prepare
import train
from engine.core.settings import load_settings
from engine.report import page as report_page
from engine.training import callbacks as observers
from engine.training.callbacks import MetricsFile
from engine.training.checkpoint import open_checkpoint
from engine.training.run_dir import list_checkpoints

SHAPE = "--num-layers 1 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --warmup-steps 2 --dropout 0.1"
SHAPE = [*SHAPE.split(), "--eval-tokens", "200", "--eval-every", "1000000", "--device", "cpu", "--resume"]
CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.truncate": None, "os.chmod": 2}
CHANGES |= {"shutil.rmtree": 1, "tempfile.mkdtemp": None}  # events, and which argument is the folder's descriptor
PATIENCE = 60  # seconds until a process of several is taken to hang
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


# Runs in forks.


def forked(log: Path, act: Callable[[], int | None]) -> int:
    """Begin to do something in a child, whose output goes to a log; returns its process id."""
    if child := os.fork():
        return child
    try:
        output = open(log, "a", encoding="utf-8")  # noqa: SIM115
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = sys.stderr = output
        torch.set_num_threads(1)
        observers.SAMPLE_TOKENS = report_page.SAMPLE_TOKENS = 3  # of a sharded model each is a round of messages
        code = act() or 0
        output.flush()
        os._exit(code)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(99)


def ended(child: int) -> int:
    """The exit code of a child, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def training(out: Path, *flags: object) -> list[str]:
    """The arguments of train.py."""
    return ["--data", str(out.parent / "data"), "--out", str(out), *SHAPE, *map(str, flags)]


def make_data(out: Path, *flags: str) -> None:
    """A small dataset of characters, or what the flags say."""
    text = out.parent / "text.txt"
    text.write_text(numbers_text(500), encoding="utf-8")
    os.utime(text, (0, 0))  # the same file each time
    with contextlib.redirect_stdout(sys.stderr):
        prepare.main([str(text), "--tokenizer", "char", "--out", str(out), *flags])


# Killed at every change of a file.


class Executioner:
    """An audit hook that kills this process at the fatal-th change of what is in a folder, and counts the changes."""

    def __init__(self, folder: Path, fatal: int | None, rank: int = 0):
        self.folder, self.fatal, self.rank = os.path.join(folder, ""), fatal, rank
        self.seen: list[str] = []
        self.written: set[str] = set()  # files that are not only appended to
        self.number = itertools.count(1)
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_change(event, arguments):
            self.seen.append(event)
            if event == "open" and arguments[2] & os.O_TRUNC:
                self.written.add(os.fsdecode(arguments[0]))
            if next(self.number) == self.fatal:
                self.is_change = lambda *_: False
                self.kill()

    def is_change(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "ctypes.dlsym":  # no event tells of the system call that exchanges two directories
            return arguments[1] == "renameat2"
        if not (event in CHANGES or (event == "open" and arguments[2] & WRITING)) or isinstance(arguments[0], int):
            return False
        path, descriptor = os.fsdecode(arguments[0]), CHANGES.get(event)
        if descriptor and (arguments[descriptor] or -1) >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[descriptor]}"), path)
        looks = self.rank == 0 and "/shard-" in path and path.endswith(".lock")  # for as long as others write
        looks |= event == "os.mkdir" and os.path.isdir(path)
        return path.startswith(self.folder) and not looks

    def kill(self) -> None:
        """End at once; what may not be on the disk yet, as it is not in its place, or was opened there, loses half.

        But the first of many processes goes on with what others had on the disk.
        """
        for path in Path(self.folder).rglob("*") if self.rank == 0 else ():
            if path.is_file() and (".partial" in str(path) or str(path) in self.written):
                os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Kind:
    """A command to kill; what is there before it, what it leaves, and what must hold even in between."""

    begin: Callable[[Path], Any]
    act: Callable[[Path], Any]
    is_sound: Callable[[Path, Path, Path], bool]
    is_same: Callable[[Path, Path], bool]
    processes: int = 1
    victim: int = 0  # the rank of the one to kill


def interrupted(folder: Path) -> None:
    """A run that was killed at step 5; its checkpoints are of steps 2 and 4."""

    class Killer:
        def recorded(self, run: Any, record: dict[str, Any]) -> None:
            if run.step == 5:
                run.folder.wait()
                os.kill(os.getpid(), signal.SIGKILL)

    make_data(folder / "data")
    config = load_settings(train.TrainConfig, training(folder / "run", *SIX_STEPS))
    child = forked(folder.with_suffix(".log"), lambda: train.train(config, observers=[MetricsFile(), Killer()]))
    assert ended(child) == -signal.SIGKILL and [step for step, *_ in losses(folder / "run")] == [1, 2, 3, 4, 5]


def make_parts(folder: Path) -> None:
    for part in ("1/2", "2/2"):
        make_data(folder / "data", "--part", part)


def contents(path: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path in it."""
    files = [file for file in path.rglob("*") if file.is_file() and ".lock" not in file.name]  # which say nothing
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


def run_is_whole(now: Path, before: Path, after: Path) -> bool:
    """All that has its name is complete: checkpoints, settings, records and the picture."""
    found, end = contents(now / "run"), contents(after / "run")
    settled = all(found[name] == end[name] for name in ("config.toml", "loss.png") if name in found)
    return settled and all(open_checkpoint(path) for path in list_checkpoints(now / "run"))


def dataset_is_whole(now: Path, before: Path, after: Path) -> bool:
    return contents(now / "data") in (contents(before / "data"), contents(after / "data"))


def same_files(one: Path, other: Path) -> bool:
    return contents(one) == contents(other)


def losses(run: Path) -> list[tuple[int, float | None, float | None]]:
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(record["step"], record.get("train_loss"), record.get("val_loss")) for record in records]


def same_run(one: Path, other: Path) -> bool:
    """The same files, weights, optimizer states, settings and losses.

    The first may have an older checkpoint too: killed before that was pruned, and then there was nothing more to save.
    """
    names = [contents(folder).keys() for folder in (one, other)]
    older = all(name.startswith("run/checkpoints/step-") for name in names[0] - names[1])
    settings = [(folder / "run" / "config.toml").read_bytes() for folder in (one, other)]
    newest = [newest_checkpoint(folder / "run") for folder in (one, other)]
    same = losses(one / "run") == losses(other / "run") and same_checkpoint(*newest)
    return same and older and names[0] >= names[1] and settings[0] == settings[1]


SIX_STEPS = ("--steps", 6, "--save-every", 2, "--log-every", 1)
NEW = (dataset_is_whole, same_files)
KINDS = (
    {
        "train": Kind(
            lambda folder: make_data(folder / "data"),
            lambda folder: train.main(training(folder / "run", *SIX_STEPS)),
            run_is_whole,
            same_run,
        ),
        "resume": Kind(
            interrupted, lambda folder: train.main(training(folder / "run", *SIX_STEPS)), run_is_whole, same_run
        ),
    }
    | {
        f"train, {rank + 1} of 2 sharded": Kind(
            lambda folder: make_data(folder / "data"),
            lambda folder: train.main(training(folder / "run", *SIX_STEPS, "--parallel", "fsdp")),
            run_is_whole,
            same_run,
            processes=2,
            victim=rank,
        )
        for rank in (0, 1)
    }
    | {
        "prepare": Kind(lambda folder: None, lambda folder: make_data(folder / "data"), *NEW),
        "prepare --force": Kind(
            lambda folder: make_data(folder / "data", "--val-fraction", "0.3"),
            lambda folder: make_data(folder / "data", "--force"),
            *NEW,
        ),
        "prepare --merge": Kind(
            make_parts, lambda folder: prepare.main(["--merge", "--out", str(folder / "data")]), *NEW
        ),
    }
)


def events(folder: Path, name: str, choose: Callable[[int], Iterable[int]] = lambda n: range(1, n + 1)) -> str:
    """Kill one kind of command at each of its n changes, or those chosen, from 1; tells how many there were.

    Raises AssertionError for a change that it did not recover from.
    """
    kind, now, before, after = KINDS[name], folder / "now", folder / "before", folder / "after"
    temporary = folder / "temporary"
    for path in (now, temporary):
        path.mkdir()
    kind.begin(now)
    shutil.copytree(now, before)

    def run(fatal: int | None = None) -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]

        def act(rank: int) -> int | None:
            tempfile.tempdir = str(temporary)
            if kind.processes > 1:
                given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": kind.processes, "MASTER_PORT": port}
                given |= {"LOCAL_WORLD_SIZE": kind.processes, "MASTER_ADDR": "127.0.0.1"}
                os.environ.update({name: str(value) for name, value in given.items()})
                signal.alarm(PATIENCE)
            if rank != kind.victim:
                return kind.act(now)
            executioner = Executioner(now, fatal, rank)
            code = kind.act(now)
            (folder / "seen.json").write_text(json.dumps(executioner.seen))
            return code

        children = [forked(folder / "log", functools.partial(act, rank)) for rank in range(kind.processes)]
        codes = [ended(child) for child in children]
        assert -signal.SIGALRM not in codes, (folder / "log").read_text()
        return codes[kind.victim] or max(codes)

    assert run() == 0, (folder / "log").read_text()
    now.rename(after)
    seen = json.loads((folder / "seen.json").read_text())
    for fatal in choose(len(seen)):
        where = f"{name}, killed at change {fatal} of {len(seen)}, {seen[fatal - 1]}"
        shutil.copytree(before, now)
        assert run(fatal) == -signal.SIGKILL, where
        assert kind.is_sound(now, before, after), f"{where}: something is there that is not whole"
        assert run() == 0, f"{where}: {(folder / 'log').read_text()[-2000:]}"
        assert kind.is_same(now, after), f"{where}: run again, it does not end as it should"
        shutil.rmtree(now)
    told = ", ".join(f"{count} {event}" for event, count in sorted(collections.Counter(seen).items()))
    return f"{name}: {len(seen)} changes ({told})"


# Killed at random, and left alone.


def kills(folder: Path, times: int) -> str:
    make_data(folder / "data")
    flags = ("--save-every", 7, "--log-every", 50, "--decay", "inverse_sqrt")  # which does not look at the last step

    def run(name: str, steps: int) -> int:
        arguments = training(folder / name, *flags, "--steps", steps)
        return forked(folder / f"{name}.log", lambda: train.main(arguments))

    for number in range(times):
        child = run("killed", 1_000_000)
        time.sleep(random.Random(number).uniform(0.02, 0.6))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
    reached = newest_checkpoint(folder / "killed").step if list_checkpoints(folder / "killed") else 0
    assert all(ended(run(name, reached + 10)) == 0 for name in ("killed", "whole"))
    assert same_checkpoint(newest_checkpoint(folder / "whole"), newest_checkpoint(folder / "killed"))
    return f"{times} kills, up to step {reached}; resumed to the same weights"


def long(folder: Path, steps: int) -> str:
    make_data(folder / "data")
    flags = ("--steps", steps, "--save-every", 500, "--log-every", 100)
    child = forked(folder / "log", lambda: train.main(training(folder / "long", *flags)))
    seen = []
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if list_checkpoints(folder / "long"):
            pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
            seen.append((pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{child}/fd"))))
        time.sleep(0.2)
    early, late = seen[len(seen) // 10], seen[len(seen) * 9 // 10]
    told = [f"{memory:.1f} MiB and {files} open files" for memory, files in (early, late)]
    assert newest_checkpoint(folder / "long").step == steps
    assert late[0] < early[0] * 1.05 + 5 and late[1] <= early[1] + 2, told
    return f"{steps} steps: {told[0]} at a tenth of the way, {told[1]} at nine tenths"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    mode, *numbers = sys.argv[1:]
    for name in KINDS if mode == "events" else ("",):
        with temporary_folder() as place:
            if mode == "events":
                print(f"{events(place, name)}: killed at each, and recovered from each", flush=True)
            else:
                print({"kills": kills, "long": long}[mode](place, *map(int, numbers)))
