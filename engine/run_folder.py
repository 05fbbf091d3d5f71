"""out/<run>/: its lock, its settings, and which checkpoints stay."""

import contextlib
import math
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.checkpoint import Checkpoint, Tensors, open_checkpoint, write_checkpoint
from engine.files import lock, read_json, write_whole

UNRECORDED = {"data", "out", "resume", "wandb", "verify_data"}  # settings whose change changes nothing
NAME = re.compile("step-[0-9]{8,}")  # a checkpoint's; copies by other names are the user's
KEPT = 2  # checkpoints: the newest so many, and the best


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted(path for path in (run / "checkpoints").glob("step-*") if NAME.fullmatch(path.name))


def checkpoints_by_loss(run: Path) -> list[Path]:
    """The checkpoint folders of a run from the lowest validation loss on; then those without one, the newest first."""
    paths, losses = list_checkpoints(run)[::-1], {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):  # damaged: opening it will say so
            losses[path] = float(read_json(path / "state.json").get("val_loss"))
    return sorted(paths, key=lambda path: losses.get(path, math.inf))


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at path, or the best whole one of the run at path. Raises ValueError if there is none."""
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
    raise ValueError(f"{path} holds no checkpoint; give a run folder such as out/stdlib, or train one: python train.py")


def changed_settings(
    state: dict[str, Any], settings: dict[str, Any], may_change: set[str], data_sha256: str
) -> dict[str, tuple[Any, Any]]:
    """What this run has other than the one that made a checkpoint's state: {name: (then, now)}.

    Raises ValueError for a setting, or text, that must stay; and for fewer steps than are done.
    """
    was = state["settings"]
    changed = {  # 0 used to say: not set
        name: (was.get(name), now) for name, now in settings.items() if (now or None) != (was.get(name) or None)
    }
    refused = [f"{name} {then!r} → {now!r}" for name, (then, now) in changed.items() if name not in may_change]
    if state["data_sha256"] != data_sha256:
        refused.append("the text in --data")
    if refused:
        raise ValueError(f"--resume can't change {', '.join(refused)}; set it back, or choose another --out")
    if settings["steps"] < state["step"]:
        raise ValueError(f"--steps {settings['steps']} are fewer than the {state['step']} that are done; give more")
    return {name: pair for name, pair in changed.items() if name not in UNRECORDED}


class RunFolder:
    """A run's folder, held by this process alone.

    Checkpoints are written in the background, one after the other; an error there is raised by whatever is called next.
    """

    def __init__(self, path: Path, resume: bool = False, launch: str = ""):
        """Make or open the folder; launch names what started this process, and may start it again after a fault.

        Raises ValueError if another process has it, or for checkpoints that are not to be resumed.
        """
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.lock = path, lock(path / ".lock", path)
        launched = path / ".launch"
        again = launch and launched.exists() and launched.read_text(encoding="utf-8") == launch
        if list_checkpoints(path) and not (resume or again):
            self.lock.release()
            raise ValueError(f"{path} already holds checkpoints; go on with --resume, or choose another --out")
        if launch:
            launched.write_text(launch, encoding="utf-8")
        self.whole: dict[Path, Any] = {}  # checkpoints found to be whole, and what they looked like then
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None

    def write_settings(self, toml: str) -> None:
        """Write config.toml."""
        write_whole(self.path / "config.toml", toml.encode())

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest whole checkpoint, or None without any; warn is called for the others. ValueError if none is."""
        for path in reversed(paths := list_checkpoints(self.path)):
            try:
                found = open_checkpoint(path)
            except ValueError as error:
                warn(f"skipped: {error}")
            else:
                self.whole[path] = _look(path)
                self.pending = self.thread.submit(self._prune)  # a kill may have come before it
                return found
        if paths:
            raise ValueError(f"every checkpoint in {self.path} is damaged; remove the folder to start again")
        return None

    def save(self, state: dict[str, Any], model: Tensors, optimizer: Tensors, save_tokenizer: Callable) -> None:
        """Begin to write ``checkpoints/step-…``, of tensors that stay as they are; then prune."""
        self.wait()
        self.pending = self.thread.submit(self._write, state, model, optimizer, save_tokenizer)

    def _write(self, state: dict[str, Any], *contents: Any) -> None:
        path = self.path / "checkpoints" / f"step-{state['step']:08d}"
        write_checkpoint(path, state, *contents)
        self.whole[path] = _look(path)
        self._prune()

    def _prune(self) -> None:
        """Remove all checkpoints but the best and the newest few that are whole; what is known is not hashed again."""
        (best, *_), whole = [*checkpoints_by_loss(self.path), None], 0
        for path in reversed(list_checkpoints(self.path)):
            if whole < KEPT:
                whole += self._is_whole(path)
            elif path != best:
                path.rename(path.with_name(f".{path.name}.partial.old"))  # step-… is never half a checkpoint
                self.whole.pop(path, None)
        for left in (self.path / "checkpoints").glob(".step-*.partial.*"):  # by a kill too
            shutil.rmtree(left)

    def _is_whole(self, path: Path) -> bool:
        if path not in self.whole or self.whole[path] != _look(path):
            try:
                open_checkpoint(path)
            except ValueError:
                return False
            self.whole[path] = _look(path)
        return True

    def wait(self) -> None:
        """Go on when everything is on the disk."""
        if self.pending:
            self.pending.result()

    def check(self) -> None:
        """Raise the error that the background met, if it did."""
        if self.pending and self.pending.done():
            self.pending.result()

    def close(self) -> None:
        """Let another process have the folder, once what is being written is there."""
        self.thread.shutdown()
        self.lock.release()


def _look(path: Path) -> dict[str, tuple[int, int]]:
    """The size and time of each file of a checkpoint: the same as long as nobody touches it."""
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in path.iterdir()}
