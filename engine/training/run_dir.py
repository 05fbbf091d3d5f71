"""out/<run>/: its lock, its settings, and which checkpoints stay."""

import contextlib
import json
import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import filelock

from engine.core.cli import warn
from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.errors import UserError
from engine.core.files import acquire_lock, atomic_write, read_json
from engine.core.sharding import Sliceable
from engine.training.checkpoint import (
    Checkpoint,
    SaveTokenizer,
    TensorKind,
    Tensors,
    complete_shards,
    open_checkpoint,
    write_checkpoint,
    write_shard,
)

CHECKPOINT_NAME = re.compile("step-[0-9]{8,}")  # directories with other names are the user's
KEEP_LAST = 2  # checkpoints, besides the best one
Hashes = dict[str, str]  # SHA-256 by file name
FileStats = dict[str, tuple[int, int]]  # size in bytes and modification time, by file name


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint directories of a run, the oldest first."""
    directories = (run / "checkpoints").glob("step-*")
    checkpoints = [path for path in directories if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))


def checkpoints_by_loss(run: Path) -> list[Path]:
    """Return the checkpoint directories of a run, the one with the lowest validation loss first.

    Those without a validation loss follow, the newest first.
    """

    def val_loss(path: Path) -> float:
        try:
            return float(read_json(path / "state.json").get("val_loss"))
        except (OSError, ValueError, TypeError, AttributeError):  # reported when it is opened
            return math.inf

    return sorted(reversed(list_checkpoints(run)), key=val_loss)


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint at path, or the best one of the run at path, to read its model.

    Only the files that this takes are verified. Raises UserError if no checkpoint is complete.
    """
    is_checkpoint = (path / "manifest.json").is_file()
    first_error = None
    for candidate in [path] if is_checkpoint else checkpoints_by_loss(path):
        try:
            checkpoint = open_checkpoint(candidate)
            checkpoint.verify(checkpoint.model_files)
        except UserError as error:
            first_error = first_error or error
            continue
        if first_error:
            warn(f"{first_error} Using {checkpoint.path.name} instead.")
        return checkpoint
    raise first_error or UserError(
        f"{path}: contains no checkpoint. Name a run folder such as out/stdlib, or train a model: python train.py"
    )


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the records of a .jsonl file, which may be missing, and its corrupted lines.

    A record has an integer step. A last line without a newline is neither: it is being written,
    or a kill cut it off.
    """
    records = []
    corrupted = []
    content = path.read_bytes() if path.exists() else b""
    for line in filter(bytes.strip, content.split(b"\n")[:-1]):
        try:
            record = json.loads(line)
            if not isinstance(record["step"], int):
                raise TypeError("step must be an integer")
            records.append(record)
        except (ValueError, TypeError, KeyError, RecursionError):
            corrupted.append(line + b"\n")
    return records, corrupted


def should_resume(resume: bool, world: DistributedContext) -> bool:
    """Return whether to resume: as the flag says, or after torchrun restarted a rank."""
    return resume or world.any(world.is_restart)


def check_run_dir(path: Path, resume: bool, world: DistributedContext = SINGLE_PROCESS) -> None:
    """Raise UserError, on all ranks, if a run folder can't be used; nothing is created.

    That is: another process has it, or it has checkpoints and the run is not to be resumed.
    """
    resume = should_resume(resume, world)

    def check() -> None:
        if (path / ".lock").exists():
            acquire_lock(path / ".lock", path).release()
        if list_checkpoints(path) and not resume:
            advice = "Continue with --resume, or choose another --out."
            raise UserError(f"{path}: already contains checkpoints. {advice}")

    world.broadcast_from_main(check)


class RunDir:
    """A run's folder, locked by the main process; all ranks call its public methods together.

    Checkpoints are written in the background, one at a time. An error of any rank is raised on
    all ranks by the next :meth:`check`, :meth:`wait` or :meth:`save`. Sharded ranks that all see
    the folder write and read their own rows; otherwise the main process gathers and broadcasts.
    """

    def __init__(
        self,
        path: Path,
        resume: bool = False,
        world: DistributedContext = SINGLE_PROCESS,
        keep_checkpoints: int | None = KEEP_LAST,
    ):
        """Create or open the folder, keeping the newest checkpoints (None: all) and the best.

        Raises UserError as :func:`check_run_dir` does.
        """
        check_run_dir(path, resume, world)
        self.path = path
        self.world = world
        self.keep_checkpoints = keep_checkpoints
        self.lock: filelock.BaseFileLock | None = None
        self.is_new = not path.exists()
        if world.is_main_process:
            path.mkdir(parents=True, exist_ok=True)
            self.lock = acquire_lock(path / ".lock", path)
        self.is_shared = world.sharded and _is_visible_to_all(path, world)
        self.complete: dict[Path, FileStats] = {}  # checkpoints, as they were when complete
        self.thread = futures.ThreadPoolExecutor(1)
        self.pending: futures.Future[Hashes] | None = None
        self.next_stage: Callable[[Hashes], Hashes] | None = None  # called with all ranks' hashes

    def write_settings(self, toml: str) -> None:
        """Write config.toml."""
        if self.world.is_main_process:
            atomic_write(self.path / "config.toml", toml.encode())

    def newest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """Return the newest complete checkpoint, all of it verified; None without checkpoints.

        ``say`` is called with a message for each one that is skipped. Raises UserError if all are
        corrupted.
        """
        if self.world.sharded and not self.is_shared:
            say(f"Checkpoints are gathered by the main process: not all ranks see {self.path}")
        names = self.world.broadcast([path.name for path in list_checkpoints(self.path)])
        for name in reversed(names):
            checkpoint, error = self._open(self.path / "checkpoints" / name)
            if checkpoint:  # prune: a kill may have come before that
                self._start(partial(self._write_and_prune, checkpoint.path, lambda path: None))
                return checkpoint
            say(f"skipped: {error}")
        if names:
            raise UserError(f"{self.path}: every checkpoint is corrupted. Remove it to start again.")
        return None

    def _open(self, path: Path) -> tuple[Checkpoint | None, str | None]:
        """Return a verified checkpoint, or an error; ranks that see the folder share the work."""
        content = None
        error = None
        with self.world.keep_alive():
            try:
                if self.is_shared or self.world.is_main_process:
                    checkpoint = open_checkpoint(path)
                    names = sorted(checkpoint.sha256)
                    rank_names = names[self.world.rank :: self.world.size]
                    checkpoint.verify(rank_names if self.is_shared else names)
                    content = [checkpoint.state, checkpoint.sha256, checkpoint.shards]
            except UserError as exception:
                error = str(exception)
        error = self.world.broadcast_first_non_none(error)
        if error:
            return None, error
        return Checkpoint(path, *self.world.broadcast(content)), None

    def tensors(self, checkpoint: Checkpoint, kind: TensorKind) -> Iterator[tuple[str, Sliceable]]:
        """Yield the name and value of every tensor of a kind; each rank takes its rows of it."""
        saved = checkpoint.saved(kind)
        if self.is_shared:
            return saved
        return self.world.broadcast_tensors((name, tensor[...]) for name, tensor in saved)

    def save(
        self,
        state: dict[str, Any],
        model: Tensors,
        optimizer: Tensors,
        save_tokenizer: SaveTokenizer,
    ) -> None:
        """Copy the tensors and begin to write ``checkpoints/step-…`` in the background."""
        self.wait()
        path = self.path / "checkpoints" / f"step-{state['step']:08d}"
        if not self.is_shared:
            full_model = self.world.gather_full(model)
            full_optimizer = self.world.gather_full(optimizer)
            contents = (state, full_model, full_optimizer, save_tokenizer)
            self._start(partial(self._write_and_prune, path, write_checkpoint, *contents))
            return
        directory = path.with_name(self.world.broadcast_from_main(self._make_shard_directory, path))
        rows = (self.world.snapshot(model), self.world.snapshot(optimizer))
        self._start(partial(write_shard, directory, self.world.rank, self.world.size, *rows))
        shards = (directory, state, save_tokenizer)
        self.next_stage = partial(self._write_and_prune, path, complete_shards, *shards)

    def _start(self, task: Callable[[], Hashes]) -> None:
        """Begin a task in the background."""
        self.pending = self.thread.submit(task)

    def wait(self) -> None:
        """Wait until everything is on the disk. Raises the error of any rank."""
        while self.pending:
            with self.world.keep_alive():
                futures.wait([self.pending])
            self._finish(self.pending)

    def check(self) -> None:
        """Complete a checkpoint that all ranks have written; wait for none that is not.

        Raises the error of any rank.
        """
        if self.pending and not self.world.any(not self.pending.done()):
            self._finish(self.pending)

    def _finish(self, task: futures.Future[Hashes]) -> None:
        """Raise the error of any rank's task, which is done, or begin the next stage of a save."""
        next_stage = self.next_stage
        self.pending = None
        self.next_stage = None
        self.world.raise_error(task.exception())
        if next_stage:
            hashes = {}
            for rank_hashes in self.world.gather_json(task.result()):
                hashes.update(rank_hashes)
            self._start(partial(next_stage, hashes))

    def close(self) -> None:
        """Let another process have the folder, after this rank's writes; wait for no other rank.

        A sharded checkpoint that :meth:`wait` has not completed is given up. A folder that this
        object created is removed if nothing was written to it.
        """
        self.thread.shutdown()
        if self.lock:
            self._remove_partial()
            if self.is_new:
                self._remove_if_empty()
            self.lock.release()

    # On the main process.

    def _make_shard_directory(self, path: Path) -> str:
        """Make the directory into which all ranks write a checkpoint's shards; return its name."""
        self._require_path()
        path.parent.mkdir(exist_ok=True)
        return Path(tempfile.mkdtemp("", f".{path.name}.shards.partial.", path.parent)).name

    def _write_and_prune(self, path: Path, write: Callable[..., None], *contents: Any) -> Hashes:
        """Call a function that writes a checkpoint, then remove the ones that do not stay."""
        if self.world.is_main_process:
            self._require_path()
            write(path, *contents)
            self.complete[path] = _file_stats(path)
            self._prune()
        return {}

    def _prune(self) -> None:
        """Remove all checkpoints but the best one and the newest complete ones.

        A checkpoint whose files have changed since it was complete does not count; none is read.
        """
        best = next(iter(checkpoints_by_loss(self.path)), None)
        num_complete = 0
        for path in reversed(list_checkpoints(self.path)):
            if self.keep_checkpoints is None or num_complete < self.keep_checkpoints:
                num_complete += self.complete.get(path) == _file_stats(path)
            elif path != best:
                path.rename(path.with_name(f".{path.name}.partial.old"))
                self.complete.pop(path, None)
        self._remove_partial()

    def _remove_partial(self) -> None:
        """Remove what pruning, a kill or an error leaves of checkpoints."""
        for path in (self.path / "checkpoints").glob(".step-*.partial.*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove_if_empty(self) -> None:
        """Remove the folder if there is nothing in it but the lock."""
        with contextlib.suppress(OSError):  # the user removed it, or another process came in
            if [path.name for path in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()

    def _require_path(self) -> None:
        """Raise UserError if the folder was removed: writing would create it again."""
        if not self.path.is_dir():
            raise UserError(f"{self.path}: the run folder was removed during the run. Start again.")


def _is_visible_to_all(path: Path, world: DistributedContext) -> bool:
    """Return whether every rank sees the run folder of the main process, not one of its own."""
    probe = path / ".shared"
    token = world.broadcast(secrets.token_hex(8))
    if world.is_main_process:
        probe.write_text(token, encoding="utf-8")
    world.any(False)  # a barrier
    is_visible = probe.is_file() and probe.read_text(encoding="utf-8") == token
    is_visible_to_all = not world.any(not is_visible)
    if world.is_main_process:
        probe.unlink()
    return is_visible_to_all


def _file_stats(path: Path) -> FileStats:
    """Return the size and modification time of each file of a checkpoint."""
    stats = {file.name: file.stat() for file in path.iterdir()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
