"""out/<run>/: its lock, its settings, its metrics, and which checkpoints stay."""

import contextlib
import json
import math
import shutil
import statistics
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.checkpoint import Checkpoint, Tensors, open_checkpoint, write_checkpoint
from engine.files import lock, read_json, to_json, write_whole

KEPT = 2  # checkpoints: the newest so many, and the best
RECENT = 40  # records that a loss is compared with


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def best_checkpoint(run: Path) -> Path | None:
    """The checkpoint folder with the lowest validation loss, or the newest if none was validated, or None."""
    paths, losses = list_checkpoints(run), {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # damaged: opening it will say so
            losses[path] = read_json(path / "state.json").get("val_loss")
    validated = {path: loss for path, loss in losses.items() if loss is not None}
    return min(validated, key=validated.get) if validated else (paths or [None])[-1]


def check_same_run(state: dict[str, Any], settings: dict[str, Any], may_change: set[str], data_sha256: str) -> None:
    """Raise ValueError if a checkpoint's state was made with settings, or on text, that this run does not have."""
    changed = [
        f"{name} {was!r} → {settings[name]!r}"
        for name, was in state["settings"].items()
        if name not in may_change and (settings.get(name) or None) != (was or None)  # 0 used to say: not set
    ]
    if state["data_sha256"] != data_sha256:
        changed.append("the text in --data")
    if changed:
        raise ValueError(f"--resume can't change {', '.join(changed)}; set it back, or choose another --out")


class RunFolder:
    """A run's folder, held by this process alone.

    Checkpoints are written in the background, one after the other; an error there is raised by whatever is called next.
    """

    def __init__(self, path: Path, resume: bool = False):
        """Make or open the folder. Raises ValueError if another process has it, or for checkpoints not to resume."""
        path.mkdir(parents=True, exist_ok=True)
        self.path, self.lock = path, lock(path)
        if not resume and list_checkpoints(path):
            self.lock.release()
            raise ValueError(f"{path} already holds checkpoints; go on with --resume, or choose another --out")
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
        """Begin to write ``checkpoints/step-…``; then prune. The lowest ``val_loss`` in a state is the best."""
        self.wait()
        copies = [{name: tensor.to("cpu", copy=True) for name, tensor in part.items()} for part in (model, optimizer)]
        self.pending = self.thread.submit(self._write, state, *copies, save_tokenizer)

    def _write(self, state: dict[str, Any], *contents: Any) -> None:
        path = self.path / "checkpoints" / f"step-{state['step']:08d}"
        write_checkpoint(path, state, *contents)
        self.whole[path] = _look(path)
        self._prune()

    def _prune(self) -> None:
        """Remove all checkpoints but the best and the newest few that are whole; what is known is not hashed again."""
        best, whole = best_checkpoint(self.path), 0
        for path in reversed(list_checkpoints(self.path)):
            if whole < KEPT:
                whole += self._is_whole(path)
            elif path != best:
                path.rename(path.with_name(f".{path.name}.partial.old"))  # step-… is never half a checkpoint
                self.whole.pop(path, None)
        for left in (self.path / "checkpoints").glob(".*"):  # by a kill too
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


class Metrics:
    """The records of a run, and metrics.jsonl, which has one a line."""

    def __init__(self, run: Path, first_step: int):
        """Records after first_step, written by a run that was then interrupted, are dropped: they come again."""
        self.path, self.records, found = run / "metrics.jsonl", [], b""
        if self.path.exists():
            found = self.path.read_bytes()
            whole = [json.loads(line) for line in found.splitlines(keepends=True) if line.endswith(b"\n")]
            self.records = [record for record in whole if record["step"] <= first_step]
        kept = "".join(f"{to_json(record)}\n" for record in self.records).encode()
        if kept != found:
            write_whole(self.path, kept)

    def add(self, record: dict[str, Any]) -> None:
        """Write one record; it must have a step."""
        self.records.append(record)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{to_json(record)}\n")

    def z_score(self, loss: float) -> float:
        """How many standard deviations a training loss lies above the mean of the last few; 0 before there are any."""
        losses = [record.get("train_loss") for record in self.records[-RECENT:]]
        recent = [one for one in losses if one is not None and math.isfinite(one)]
        if len(recent) < RECENT // 2 or not math.isfinite(loss):
            return 0.0
        return (loss - statistics.fmean(recent)) / max(statistics.stdev(recent), 1e-9)
