"""out/<run>/: its lock, its settings, and which checkpoints stay."""

import contextlib
import json
import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from engine.core.distributed import SINGLE_PROCESS, DistributedContext, Sliceable
from engine.core.errors import UserError
from engine.core.files import is_locked, lock, new_directory, read_json, write_whole
from engine.training.checkpoint import Checkpoint, Shard, Tensors, complete_shards, open_checkpoint, write_checkpoint

UNRECORDED = {"data", "out", "resume", "wandb", "verify_data"}  # settings whose change changes nothing
NAME = re.compile("step-[0-9]{8,}")  # a checkpoint's; copies by other names are the user's
KEPT = 2  # checkpoints: the newest so many, and the best
LAUNCH = ".launch"  # a file: what started the processes that have the folder, or had it last
GRACE = 20.0  # seconds that closing waits for other processes' shards; torchrun kills after 30


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def checkpoints_by_loss(run: Path) -> list[Path]:
    """The checkpoint folders of a run from the lowest validation loss on; then those without one, the newest first."""
    paths, losses = list_checkpoints(run)[::-1], {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # damaged: opening it will say so
            losses[path] = float(read_json(path / "state.json").get("val_loss"))
    return sorted(paths, key=lambda path: losses.get(path, math.inf))


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at path, or the best whole one of the run at path. Raises UserError if there is none."""
    damage = None
    for candidate in [path] if (path / "manifest.json").is_file() else checkpoints_by_loss(path):
        try:
            found = open_checkpoint(candidate)
        except ValueError as error:
            damage = damage or error
        else:
            if damage:
                print(f"warning: {damage}; {found.path.name} serves instead", file=sys.stderr)
            return found
    if damage:
        raise damage
    raise UserError(f"{path} holds no checkpoint; give a run folder such as out/stdlib, or train one: python train.py")


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The records of a .jsonl file, if it is there, each with its step; and the lines that are none.

    A last line without an end is neither: a kill has torn it, or it is just being written.
    """
    records, damaged = [], []
    content = path.read_bytes() if path.exists() else b""
    for line in filter(bytes.strip, content.split(b"\n")[:-1]):
        try:
            if not isinstance((record := json.loads(line))["step"], int):
                raise TypeError("a step is a whole number")
            records.append(record)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged.append(line + b"\n")
    return records, damaged


def changed_settings(
    state: dict[str, Any], settings: dict[str, Any], may_change: set[str], data_sha256: str
) -> dict[str, tuple[Any, Any]]:
    """What this run has other than the one that made a checkpoint's state: {name: (then, now)}.

    Raises UserError for a setting, or text, that must stay; and for fewer steps than are done.
    """
    was = state["settings"]
    changed = {  # 0 used to say: not set
        name: (was.get(name), now) for name, now in settings.items() if (now or None) != (was.get(name) or None)
    }
    refused = [f"{name} {then!r} → {now!r}" for name, (then, now) in changed.items() if name not in may_change]
    if state["data_sha256"] != data_sha256:
        refused.append("the text in --data")
    if refused:
        raise UserError(f"--resume can't change {', '.join(refused)}; set it back, or choose another --out")
    if (settings["steps"] or math.inf) < state["step"]:
        raise UserError(f"--steps {settings['steps']} are fewer than the {state['step']} that are done; give more")
    if "minutes" in changed and 60 * (settings["minutes"] or math.inf) < state["elapsed_seconds"]:
        done = f"{state['elapsed_seconds'] / 60:.3g}"
        raise UserError(f"--minutes {settings['minutes']:g} are fewer than the {done} that are done; give more")
    return {name: pair for name, pair in changed.items() if name not in UNRECORDED}


class Keeper:
    """What only the first process does in a run's folder: hold it, begin and end checkpoints, prune them."""

    def __init__(self, path: Path, resume: bool, launch: str):
        """Make or open the folder, for the process that launch names; ValueError as for :class:`RunDir`."""
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.lock = path, lock(path / ".lock", path)
        launched = path / LAUNCH
        again = launch and launched.exists() and launched.read_text(encoding="utf-8") == launch
        if list_checkpoints(path) and not (resume or again):
            self.lock.release()
            raise UserError(f"{path} already holds checkpoints; go on with --resume, or choose another --out")
        if launch:
            launched.write_text(launch, encoding="utf-8")
        self.whole: dict[Path, Any] = {}  # checkpoints known to be whole, and what they looked like then
        self.give_up_at = math.inf

    def write_settings(self, toml: str) -> None:
        write_whole(self.path / "config.toml", toml.encode())

    def names(self) -> list[str]:
        """The checkpoints' names, the newest first."""
        return [path.name for path in reversed(list_checkpoints(self.path))]

    def open(self, path: Path) -> Checkpoint:
        return open_checkpoint(path)

    def write(self, path: Path, *contents: Any) -> None:
        write_checkpoint(path, *contents)
        self.keep(path)

    def begin(self, path: Path) -> str:
        """Make the directory into which all processes write their shards; its name."""
        self.partial = contextlib.ExitStack()
        return self.partial.enter_context(new_directory(path)).name

    def complete(self, path: Path, directory: Path, *contents: Any) -> None:
        """Make it the checkpoint when all are written."""
        with self.partial:
            complete_shards(directory, *contents, lambda: time.monotonic() > self.give_up_at)
        self.keep(path)

    def keep(self, path: Path) -> None:
        """Remember that a checkpoint is whole, and prune."""
        self.whole[path] = _look(path)
        self.prune()

    def prune(self) -> None:
        """Remove all checkpoints but the best and the newest few that are known to be whole; no weights are read."""
        (best, *_), whole = [*checkpoints_by_loss(self.path), None], 0
        for path in reversed(list_checkpoints(self.path)):
            if whole < KEPT:
                whole += path in self.whole and self.whole[path] == _look(path)
            elif path != best:
                path.rename(path.with_name(f".{path.name}.partial.old"))  # step-… is never half a checkpoint
                self.whole.pop(path, None)
        for left in (self.path / "checkpoints").glob(".step-*.partial.*"):  # by a kill too
            shutil.rmtree(left, ignore_errors=True)

    def hurry(self) -> None:
        self.give_up_at = time.monotonic() + GRACE

    def release(self) -> None:
        self.lock.release()


class RunDir:
    """A run's folder, held by the first process alone; all call what is here together.

    Checkpoints are written in the background, one after the other; an error there is raised by whatever is called next.
    Sharded processes that all see the folder write and read what each of them holds; else all passes through the first.
    """

    def __init__(self, path: Path, resume: bool = False, world: DistributedContext = SINGLE_PROCESS):
        """Make or open the folder; the launcher (DistributedContext.launch) may start the processes again after a fault.

        Raises UserError if another process has it, or for checkpoints that are not to be resumed.
        """
        self.path, self.world = path, world
        self.first = world.only_first(Keeper, path, resume, world.launch)
        seen = is_launch(path, world.broadcast(world.launch)) and (world.is_main_process or is_locked(path / ".lock"))
        self.shared = world.sharded and not world.any(not seen)  # locks tell who is at work, if its disk knows them
        self.thread = ThreadPoolExecutor(1)
        self.pending: list[Future] = []

    def write_settings(self, toml: str) -> None:
        """Write config.toml."""
        self.first.write_settings(toml)

    def newest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, or None without any; say is called for the others. ValueError if none is."""
        if self.world.sharded and not self.shared:
            say(f"Checkpoints are gathered by the first process: not all processes see {self.path}")
        for name in (names := self.world.broadcast(self.first.names())):
            found, damage = self._open(self.path / "checkpoints" / name)
            if found:
                self._begin((self.first.keep, found.path))  # a kill may have come before it was pruned
                return found
            say(f"skipped: {damage}")
        if names:
            raise UserError(f"every checkpoint in {self.path} is damaged; remove the folder to start again")
        return None

    def _open(self, path: Path) -> tuple[Checkpoint | None, str | None]:
        """The checkpoint, or what is wrong with it. Processes that see the folder share the hashing."""
        found = damage = None
        with self.world.patience():
            try:
                mine = slice(self.world.rank, None, self.world.size)
                found = open_checkpoint(path, mine) if self.shared else self.first.open(path)
            except ValueError as error:
                damage = str(error)
        if damage := self.world.first_of(damage):
            return None, damage
        return Checkpoint(path, *self.world.broadcast(found and [found.state, found.sha256, found.shards])), None

    def tensors(self, found: Checkpoint, kind: Literal["model", "optimizer"]) -> Iterator[tuple[str, Sliceable]]:
        """All that a checkpoint has of that kind, by name, of which each process is to take what it holds."""
        saved = found.saved(kind)
        return saved if self.shared else self.world.broadcast_tensors((name, tensor[...]) for name, tensor in saved)

    def save(self, state: dict[str, Any], model: Tensors, optimizer: Tensors, save_tokenizer: Callable) -> None:
        """Begin to write ``checkpoints/step-…``, of tensors as they are now; then prune."""
        self.wait()
        path, size = self.path / "checkpoints" / f"step-{state['step']:08d}", self.world.size
        if not self.shared:
            full = [self.world.gather_full(tensors) for tensors in (model, optimizer)]
            self._begin((self.first.write, path, state, *full, save_tokenizer))
            return
        directory = path.with_name(self.world.broadcast(self.first.begin(path)))
        shard = Shard(directory, self.world.rank + 1, size)
        shard.begin()
        self.world.any(False)  # all have begun
        mine = [self.world.snapshot(tensors) for tensors in (model, optimizer)]
        self._begin((shard.write, *mine), (self.first.complete, path, directory, size, state, save_tokenizer))

    def _begin(self, *tasks: tuple) -> None:
        self.pending = [self.thread.submit(*task) for task in tasks]

    def wait(self) -> None:
        """Go on when everything is on the disk."""
        for task in self.pending:  # as many on every process
            with self.world.patience():
                task.result()

    def check(self) -> None:
        """Raise the error that the background met, if it did."""
        for task in self.pending:
            if task.done():
                task.result()

    def close(self) -> None:
        """Let another process have the folder, once what is being written is there, or can't come any more."""
        self.first.hurry()
        self.thread.shutdown()
        self.first.release()


def is_launch(path: Path, launch: str) -> bool:
    """Whether a run's folder was opened by the first process of that launch."""
    return (path / LAUNCH).is_file() and (path / LAUNCH).read_text(encoding="utf-8") == launch


def _look(path: Path) -> dict[str, tuple[int, int]]:
    """The size and time of each file of a checkpoint: the same as long as nobody touches it."""
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir()}
