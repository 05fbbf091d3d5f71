"""Kill training and preparing, run them again, and compare with a run that was not killed.

    python tests/soak.py events        killed at every change of a file, one after the other
    python tests/soak.py ranks         each of two FSDP ranks killed at each stage of a save
    python tests/soak.py kills 100     killed 100 times at random moments
    python tests/soak.py long 20000    20,000 steps: memory and open files must not grow

Torch is imported once, and each run is a fork, except under torchrun. Exit code 0: no difference.
"""

import collections
import contextlib
import functools
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork has only one thread
sys.path.insert(0, str(Path(__file__).parents[1]))

import matplotlib.figure  # noqa: F401  these three, or every fork would import them
import torch
import torch._dynamo
import torch.distributed.fsdp
from helpers import newest_checkpoint, numbers_text, rendezvous, same_checkpoint

import prepare
import train
from engine.core.cli import run_command
from engine.core.settings import load_settings
from engine.report import samples as report_samples
from engine.training import callbacks, checkpoint, run_dir
from engine.training.callbacks import MetricsFile
from engine.training.checkpoint import open_checkpoint
from engine.training.config import TrainConfig
from engine.training.run_dir import list_checkpoints
from engine.training.trainer import Callback, Trainer

SHAPE = "--num-layers 1 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4"
FLAGS = "--warmup-steps 2 --dropout 0.1 --eval-tokens 200 --eval-every 1000000 --resume"
FLAGS += " --device cpu"
SIX_STEPS = ("--steps", 6, "--save-every", 2, "--log-every", 1)
FSDP = ("--parallel", "fsdp")
# Audit events, and which argument is the directory's descriptor.
FILE_EVENTS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.chmod": 2}
FILE_EVENTS |= {"shutil.rmtree": 1, "os.truncate": None, "tempfile.mkdtemp": None}
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
RUN_TIMEOUT_SECONDS = 60
PEER_TIMEOUT_SECONDS = 10  # of a rank, once another is killed


# Runs.


def fork(log: Path, function: Callable[[], int | None]) -> int:
    """Call a function in a child process, whose output goes to a log; return its process id."""
    if child := os.fork():
        return child
    try:
        output = open(log, "a", encoding="utf-8")  # noqa: SIM115
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        sys.stdout = sys.stderr = output
        torch.set_num_threads(1)
        callbacks.FINAL_SAMPLE_TOKENS = report_samples.NEW_TOKENS = 3
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
    if num_ranks == 1:
        return [wait_for(fork(log, functools.partial(function, 0)))]
    with rendezvous(num_ranks) as variables:

        def start(rank: int) -> int | None:
            os.environ.update({**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            signal.alarm(RUN_TIMEOUT_SECONDS)
            return function(rank)

        children = [fork(log, functools.partial(start, rank)) for rank in range(num_ranks)]
        return wait_for_ranks(children)


def wait_for_ranks(children: list[int]) -> list[int]:
    """Return the exit codes of ranks. If one is killed, end the others like torchrun."""
    codes: dict[int, int] = {}
    deadline = math.inf
    while running := [child for child in children if child not in codes]:
        for child in running:
            process, status = os.waitpid(child, os.WNOHANG)
            if process:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        if deadline == math.inf and any(code < 0 for code in codes.values()):
            deadline = time.monotonic() + PEER_TIMEOUT_SECONDS
        time.sleep(0.01)
    return [codes[child] for child in children]


def train_arguments(run: Path, *flags: object) -> list[str]:
    """Return the command line of train.py for a run on the dataset beside it."""
    paths = ["--data", run.parent / "data", "--out", run]
    return list(map(str, [*paths, *SHAPE.split(), *FLAGS.split(), *flags]))


def make_data(data: Path, *flags: str) -> None:
    """Prepare a small dataset of characters."""
    text = data.parent / "text.txt"
    text.write_text(numbers_text(500), encoding="utf-8")
    os.utime(text, (0, 0))  # the same file each time
    with contextlib.redirect_stdout(sys.stderr):
        prepare.main([str(text), "--tokenizer", "char", "--out", str(data), *flags])


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
            is_rewritten = str(path) in self.rewritten and path.stat().st_nlink == 1
            if path.is_file() and (".partial" in str(path) or is_rewritten):
                os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def make_killed_run(folder: Path) -> None:
    """Train to step 5 and be killed; the checkpoints are of steps 2 and 4."""

    class KillAtStepFive(Callback):
        def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
            if trainer.step == 5:
                assert trainer.run_dir is not None
                trainer.run_dir.wait()
                os.kill(os.getpid(), signal.SIGKILL)

    make_data(folder / "data")
    config = load_settings(TrainConfig, train_arguments(folder / "run", *SIX_STEPS))
    hooks = [MetricsFile(), KillAtStepFive()]
    child = fork(folder.with_suffix(".log"), lambda: train.train(config, callbacks=hooks))
    assert wait_for(child) == -signal.SIGKILL
    assert [step for step, *_ in losses_of(folder / "run")] == [1, 2, 3, 4, 5]


def contents_of(folder: Path) -> dict[str, bytes]:
    """Return every file in a folder, except locks, by its path in it."""
    files = [file for file in folder.rglob("*") if file.is_file() and ".lock" not in file.name]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def losses_of(run: Path) -> list[tuple[int, float | None, float | None]]:
    """Return step, training loss and validation loss of each record of a run."""
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        (record["step"], record.get("train_loss"), record.get("val_loss")) for record in records
    ]


def is_sound_run(now: Path, before: Path, after: Path) -> bool:
    """Return whether every file in place is complete: checkpoints and settings."""
    files = contents_of(now / "run")
    expected = contents_of(after / "run")
    for path in list_checkpoints(now / "run"):
        open_checkpoint(path).verify()
    return all(files.get(name, expected[name]) == expected[name] for name in ("config.toml",))


def is_sound_dataset(now: Path, before: Path, after: Path) -> bool:
    """Return whether the dataset is the old or the new one."""
    files = contents_of(now / "data") or contents_of(now / ".data.replaced")
    return files in (contents_of(before / "data"), contents_of(after / "data"))


def is_same_dataset(now: Path, after: Path) -> bool:
    return contents_of(now) == contents_of(after)


def is_same_run(now: Path, after: Path) -> bool:
    """Return whether two runs have the same files, weights, optimizer states and losses.

    The first may have an older checkpoint too: killed before the prune, with nothing left to save.
    """
    files = contents_of(now)
    expected = contents_of(after)
    additional = files.keys() - expected.keys()
    newest = [newest_checkpoint(folder / "run") for folder in (now, after)]
    return (
        expected.keys() <= files.keys()
        and all(name.startswith("run/checkpoints/step-") for name in additional)
        and files["run/config.toml"] == expected["run/config.toml"]
        and losses_of(now / "run") == losses_of(after / "run")
        and same_checkpoint(*newest)
    )


@dataclass
class Kind:
    """A command to kill: its folder before, the command, and checks after a kill and at the end."""

    begin: Callable[[Path], Any]
    command: Callable[[Path], Any]
    is_sound: Callable[[Path, Path, Path], bool]
    is_same: Callable[[Path, Path], bool]
    num_ranks: int = 1
    victim: int = 0  # the rank to kill


def train_kind(begin: Callable[[Path], Any], *flags: str, **ranks: int) -> Kind:
    def command(folder: Path) -> int:
        return train.main(train_arguments(folder / "run", *SIX_STEPS, *flags))

    return Kind(begin, command, is_sound_run, is_same_run, **ranks)


def make_default_data(folder: Path) -> None:
    make_data(folder / "data")


KINDS = {
    "train": train_kind(make_default_data),
    "resume": train_kind(make_killed_run),
    "train, rank 0 of 2 sharded": train_kind(make_default_data, *FSDP, num_ranks=2, victim=0),
    "train, rank 1 of 2 sharded": train_kind(make_default_data, *FSDP, num_ranks=2, victim=1),
    "prepare": Kind(lambda folder: None, make_default_data, is_sound_dataset, is_same_dataset),
    "prepare --force": Kind(
        lambda folder: make_data(folder / "data", "--val-fraction", "0.3"),
        lambda folder: make_data(folder / "data", "--force"),
        is_sound_dataset,
        is_same_dataset,
    ),
}


def every_event(num_events: int) -> Iterable[int]:
    return range(1, num_events + 1)


def events(folder: Path, name: str, choose: Callable[[int], Iterable[int]] = every_event) -> str:
    """Kill one kind of command at each of its file events, or the chosen ones, counted from 1.

    Raises AssertionError for an event from which it did not recover.
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
    for fatal in choose(len(seen)):
        where = f"{name}, killed at event {fatal} of {len(seen)}, {seen[fatal - 1]}"
        shutil.copytree(before, now)
        code = run(fatal)
        assert code == -signal.SIGKILL, f"{where}: exit code {code}, {log.read_text()[-2000:]}"
        assert kind.is_sound(now, before, after), f"{where}: left an incomplete file"
        assert run() == 0, f"{where}: {log.read_text()[-2000:]}"
        assert kind.is_same(now, after), f"{where}: the second run ended differently"
        shutil.rmtree(now)
    counts = sorted(collections.Counter(seen).items())
    return f"{name}: {len(seen)} events ({', '.join(f'{n} {event}' for event, n in counts)})"


# Ranks killed at each stage of a sharded save, and restarted by torchrun.

STAGES = {  # and the steps from the start of an attempt to the checkpoint to resume from
    "before writing": {2},
    "while writing": {2},
    "before reporting": {2},
    "before the rename": {2, 4},  # rank 0 may complete it without rank 1
    "after the rename": {4},
}
ALL_KILLS = [(stage, rank) for stage in STAGES for rank in (0, 1)][:-1]


def kill_in_call(module: Any, name: str, number: int, before: bool = False) -> None:
    """Patch a function so that its n-th call kills this process, before or after its work."""
    function = getattr(module, name)
    counter = itertools.count(1)

    def patched(*arguments: Any) -> Any:
        is_fatal = next(counter) == number
        result = None if is_fatal and before else function(*arguments)
        if is_fatal:
            if name == "write_tensors":
                os.truncate(arguments[0], arguments[0].stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, patched)


def kill_in_second_save(stage: str, rank: int) -> None:
    """Patch this process to be killed at a stage of the second checkpoint that it saves."""
    if stage == "before writing":
        kill_in_call(run_dir, "write_shard", 2, before=True)
    elif stage == "while writing":
        kill_in_call(checkpoint, "write_tensors", 4)  # two files in each save
    elif stage == "before reporting":
        kill_in_call(run_dir, "write_shard", 2)
    elif rank > 0:
        kill_in_call(run_dir.RunDir, "_write_and_prune", 2, before=True)
    elif stage == "before the rename":
        kill_in_call(checkpoint, "_write_manifest", 2)
    else:
        kill_in_call(run_dir, "complete_shards", 2)


def train_killed(run: str, kills: str, *flags: str) -> None:
    """Train under torchrun; its n-th attempt is killed by the n-th of the kills."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    callbacks.FINAL_SAMPLE_TOKENS = report_samples.NEW_TOKENS = 3
    for stage, victim in json.loads(kills)[attempt : attempt + 1]:
        if victim == rank:
            kill_in_second_save(stage, rank)
    run_command(lambda: train.main(train_arguments(Path(run), *flags)))


def ranks(folder: Path, kills: list[tuple[str, int]] = ALL_KILLS) -> str:
    """Kill ranks as listed, each in the next attempt of one run, and compare how it ends."""
    make_data(folder / "data")
    steps = 4 * (len(kills) + 1)
    flags = list(map(str, [*FSDP, "--steps", steps, "--save-every", 2, "--log-every", 1]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", str(len(kills))]
    arguments = [__file__, "train_killed", str(folder / "killed"), json.dumps(kills), *flags]
    done = subprocess.run(
        [*torchrun, *arguments], capture_output=True, encoding="utf-8", timeout=600
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "skipped" not in done.stdout, done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("Resuming after step ")]
    resumed = [int(line.split()[3].strip(",;")) for line in lines]
    assert len(resumed) == len(kills), done.stdout
    for (stage, rank), start, step in zip(kills, [0, *resumed], resumed, strict=False):
        assert step - start in STAGES[stage], f"rank {rank} killed {stage}: {start} → {step}"
    arguments = train_arguments(folder / "whole", *flags)
    assert run_ranks(folder / "log", 2, lambda rank: train.main(arguments)) == [0, 0]
    newest = [newest_checkpoint(folder / name) for name in ("killed", "whole")]
    assert newest[0].step == steps and newest[0].shards == 2 and same_checkpoint(*newest)
    return f"{len(kills)} kills of ranks, resumed after steps {resumed} to the same weights"


# Killed at random, and not killed.


def kills(folder: Path, num_kills: int) -> str:
    """Kill a run at random moments, resume it each time, and compare how it ends."""
    make_data(folder / "data")
    flags = ("--save-every", 7, "--log-every", 50, "--decay", "inverse_sqrt")  # of any length

    def start(name: str, steps: int) -> int:
        arguments = train_arguments(folder / name, *flags, "--steps", steps)
        return fork(folder / f"{name}.log", lambda: train.main(arguments))

    for number in range(num_kills):
        child = start("killed", 1_000_000)
        time.sleep(random.Random(number).uniform(0.02, 0.6))
        os.kill(child, signal.SIGKILL)
        assert wait_for(child) == -signal.SIGKILL
    is_saved = bool(list_checkpoints(folder / "killed"))
    reached = newest_checkpoint(folder / "killed").step if is_saved else 0
    assert all(wait_for(start(name, reached + 10)) == 0 for name in ("killed", "whole"))
    assert same_checkpoint(*(newest_checkpoint(folder / name) for name in ("killed", "whole")))
    return f"{num_kills} kills, up to step {reached}, resumed to the same weights"


def long(folder: Path, steps: int) -> str:
    """Train for many steps; memory and open files must not grow."""
    make_data(folder / "data")
    flags = ("--steps", steps, "--save-every", 500, "--log-every", 100)
    arguments = train_arguments(folder / "long", *flags)
    child = fork(folder / "log", lambda: train.main(arguments))
    usage = []
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if list_checkpoints(folder / "long"):
            num_pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
            mebibytes = num_pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            usage.append((mebibytes, len(os.listdir(f"/proc/{child}/fd"))))
        time.sleep(0.2)
    early = usage[len(usage) // 10]
    late = usage[len(usage) * 9 // 10]
    assert newest_checkpoint(folder / "long").step == steps
    assert late[0] < early[0] * 1.05 + 5 and late[1] <= early[1] + 2, (early, late)
    return f"{steps} steps: (MiB, open files) {early} at 10% of the time, {late} at 90%"


if __name__ == "__main__":
    mode, *arguments = sys.argv[1:]
    if mode == "train_killed":
        train_killed(*arguments)
    elif mode == "events":
        for name in KINDS:
            with tempfile.TemporaryDirectory() as temporary:
                print(events(Path(temporary), name), flush=True)
    else:
        function = {"ranks": ranks, "kills": kills, "long": long}[mode]
        with tempfile.TemporaryDirectory() as temporary:
            print(function(Path(temporary), *map(int, arguments)))
