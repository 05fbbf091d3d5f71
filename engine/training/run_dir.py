"""out/<run>/: its lock, its settings, and which checkpoints stay."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from engine.core.cli import say, shell_command, warn
from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.errors import UserError
from engine.core.files import acquire_lock, atomic_write, find_similar, to_json
from engine.core.values import from_json
from engine.runs.checkpoint import (
    Checkpoint,
    RunState,
    SaveTokenizer,
    Tensors,
    complete_shards,
    open_checkpoint,
    rank_checkpoint,
    write_checkpoint,
    write_shard,
)

CHECKPOINT_NAME = re.compile("step-[0-9]{8,}")  # directories with other names are the user's
Hashes = dict[str, str]  # SHA-256 by file name


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint directories of a run, the oldest first."""
    directories = (run / "checkpoints").glob("step-*")
    checkpoints = [path for path in directories if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))


def rank_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the best evaluation first, then the newest first."""
    return sorted(reversed(list_checkpoints(run)), key=rank_checkpoint)


def find_checkpoint(path: Path, base: Path | None = None) -> Checkpoint:
    """Return the checkpoint at path, or the best one of the run at path, to read its model.

    Only the model's files are verified. ``base`` is where an adapter's base model is now. Raises
    UserError if no checkpoint is complete.
    """
    is_checkpoint = (path / "manifest.json").is_file() and not any(path.glob("*.npy"))
    candidates = [path] if is_checkpoint else rank_checkpoints(path)
    for candidate in candidates:
        try:
            checkpoint = open_checkpoint(candidate)
            checkpoint.verify(checkpoint.model_files)
            break
        except UserError as error:
            if candidate == candidates[-1]:
                raise
            warn(f"{error} Using the next best checkpoint instead.")
    else:
        raise UserError(f"{path}: {explain_missing_checkpoint(path)}")
    return replace(checkpoint, base=find_base(checkpoint, base))


def find_base(checkpoint: Checkpoint, path: Path | None = None) -> Checkpoint | None:
    """Return the base model of an adapter, at path or where it was; None for other checkpoints.

    Raises UserError if it is missing, or another model.
    """
    reference = checkpoint.state.base
    if reference is None:
        if path:
            raise UserError(f"--base: {checkpoint.path} has no base model. Leave it out.")
        return None
    path = path or Path(reference.path)
    fix = "Name its base model with --base DIRECTORY."
    if not path.exists():
        raise UserError(f"{checkpoint.path}: its base model is not in {path}. {fix}")
    base = find_checkpoint(path)
    if base.reference().sha256 != reference.sha256:
        raise UserError(f"{checkpoint.path}: trained on another base model than {base.path}. {fix}")
    return base


def explain_missing_checkpoint(path: Path) -> str:
    """Return what a path is that has no checkpoint, and the path or command that helps."""
    name = path.resolve().name
    if any(path.glob("*.npy")):
        return f"is a dataset. Train on it: {shell_command('python', 'train.py', '--data', path)}"
    if (path / "config.json").is_file():
        command = shell_command("python", "huggingface.py", "import", path, f"out/{name}")
        return f"is a model of transformers. Import it: {command}"
    if similar := find_similar(path, Path("out"), "checkpoints/step-*"):
        return f"contains no checkpoint. Did you mean {similar}?"
    data = Path("data", name)
    flags = ("--data", data, "--out", Path("out", name)) if any(data.glob("*.npy")) else ()
    command = shell_command("python", "train.py", *flags)
    return f"contains no checkpoint. Train a model with: {command}"


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a .jsonl file, if it exists, without corrupted and unfinished lines."""
    records = []
    content = path.read_bytes() if path.exists() else b""
    for line in content.split(b"\n")[:-1]:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if is_record(record) and to_json(record).encode():  # raises for half a surrogate pair
                records.append(record)
    return records


def is_record(record: Any) -> bool:
    """Return whether a value of JSON is a record: with a step, and losses that are numbers."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    losses = (record.get(name) for name in ("train_loss", "val_loss"))
    return all(type(loss) in (int, float, type(None)) for loss in losses)


class RunDir:
    """A run's folder, locked by the main process; all ranks call its public methods together.

    Checkpoints are written in the background, one at a time. An error of any rank is raised on
    all ranks by the next :meth:`check`, :meth:`wait` or :meth:`save`. Sharded ranks that all see
    the folder write and read their own rows; otherwise the main process gathers and broadcasts.
    """

    lock: filelock.FileLock  # of the main process

    def __init__(
        self,
        path: Path,
        resume: bool = False,
        dist_ctx: DistributedContext = SINGLE_PROCESS,
        keep_checkpoints: int = 2,
    ):
        """Create or open the folder, to keep the best checkpoint and a number of the newest.

        Raises UserError, on all ranks, if it is in use, or has checkpoints and is not resumed.
        """
        self.path = path
        self.dist_ctx = dist_ctx
        self.keep_checkpoints = keep_checkpoints
        resume = dist_ctx.any(resume or dist_ctx.is_restart)
        dist_ctx.broadcast_from_main(self._acquire, resume)
        self.is_shared = dist_ctx.sharded and self._is_visible_to_all()
        self.complete: set[Path] = set()  # checkpoints that were written or verified
        self.thread = futures.ThreadPoolExecutor(1)
        self.pending: futures.Future[Hashes] | None = None
        # Called with the hashes of all ranks' files.
        self.finish_sharded_save: Callable[[Hashes], Hashes] | None = None

    def write_settings(self, toml: str) -> None:
        """Write config.toml."""
        self.dist_ctx.run_on_main(atomic_write, self.path / "config.toml", toml.encode())

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, all of it verified; None without checkpoints.

        Prints the corrupted ones, which are skipped. Raises UserError if all are corrupted.
        """
        if self.dist_ctx.sharded and not self.is_shared:
            message = f"Checkpoints are gathered by the main process: not all ranks see {self.path}"
            self.dist_ctx.run_on_main(say, message)
        names = self.dist_ctx.broadcast([path.name for path in list_checkpoints(self.path)])
        for name in reversed(names):
            try:
                checkpoint = self._open(self.path / "checkpoints" / name)
            except UserError as error:
                self.dist_ctx.run_on_main(say, f"skipped: {error}")
                continue
            self.complete.clear()  # the others are not verified
            self.dist_ctx.broadcast_from_main(self._prune, checkpoint.path)
            return checkpoint
        if names:
            raise UserError(f"{self.path}: every checkpoint is corrupted. Choose another --out.")
        return None

    def best(self) -> Checkpoint:
        """Return the checkpoint with the best evaluation, all of it verified."""
        name = self.dist_ctx.broadcast_from_main(lambda: rank_checkpoints(self.path)[0].name)
        return self._open(self.path / "checkpoints" / name)

    def _open(self, path: Path) -> Checkpoint:
        """Return a verified checkpoint; ranks that see the folder share the work."""
        content = None
        with self.dist_ctx.keep_alive():  # raises the UserError of one rank on all
            if self.is_shared or self.dist_ctx.is_main_process:
                checkpoint = open_checkpoint(path)
                names = list(checkpoint.sha256)
                rank_names = names[self.dist_ctx.rank :: self.dist_ctx.size]
                checkpoint.verify(rank_names if self.is_shared else names)
                content = [asdict(checkpoint.state), checkpoint.sha256, checkpoint.shards]
        state, *others = self.dist_ctx.broadcast(content)
        return Checkpoint(path, from_json(RunState, state, "state"), *others)

    def distribute(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Yield a checkpoint's tensors on every rank, also on ranks that do not see the folder."""
        return tensors if self.is_shared else self.dist_ctx.broadcast_tensors(tensors)

    def save(
        self, state: RunState, model: Tensors, optimizer: Tensors, save_tokenizer: SaveTokenizer
    ) -> None:
        """Copy the tensors and begin to write ``checkpoints/step-…`` in the background."""
        self.wait()
        path = self.path / "checkpoints" / f"step-{state.step:08d}"
        if not self.is_shared:
            tensors = (self.dist_ctx.gather_full(model), self.dist_ctx.gather_full(optimizer))
            task = partial(self._write_and_prune, path, write_checkpoint)
            self.pending = self.thread.submit(task, state, *tensors, save_tokenizer)
            return
        name = self.dist_ctx.broadcast_from_main(self._make_shard_directory, path)
        directory = path.with_name(name)
        rows = (self.dist_ctx.snapshot(model), self.dist_ctx.snapshot(optimizer))
        write = partial(write_shard, directory, self.dist_ctx.rank, self.dist_ctx.size)
        self.pending = self.thread.submit(write, *rows)
        shards = (directory, state, save_tokenizer)
        self.finish_sharded_save = partial(self._write_and_prune, path, complete_shards, *shards)

    def wait(self) -> None:
        """Wait until everything is on the disk. Raises the error of any rank."""
        while self.pending:
            with self.dist_ctx.keep_alive():
                futures.wait([self.pending])
            self._finish(self.pending)
        self.dist_ctx.raise_error(self._folder_error())

    def check(self) -> None:
        """Complete a checkpoint that all ranks have written, without waiting for one.

        Raises the error of any rank, and UserError if the folder is no longer that of this run.
        """
        self.dist_ctx.raise_error(self._folder_error())
        if self.pending and not self.dist_ctx.any(not self.pending.done()):
            self._finish(self.pending)

    def _finish(self, task: futures.Future[Hashes]) -> None:
        """Raise the error of any rank's task, which is done, or begin the next stage of a save."""
        finish_sharded_save = self.finish_sharded_save
        self.pending = None
        self.finish_sharded_save = None
        self.dist_ctx.raise_error(self._folder_error() or task.exception())
        if finish_sharded_save:
            hashes = {}
            for rank_hashes in self.dist_ctx.gather_json(task.result()):
                hashes.update(rank_hashes)
            self.pending = self.thread.submit(finish_sharded_save, hashes)

    def close(self) -> None:
        """Unlock the folder after this rank's writes, without waiting for other ranks.

        An incomplete sharded checkpoint is discarded, and a new folder without files removed.
        """
        self.thread.shutdown()
        if self.dist_ctx.is_main_process:
            if not self._folder_error():
                self._remove_partial()
                if self.is_new and os.listdir(self.path) == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
            self.lock.release()

    def _is_visible_to_all(self) -> bool:
        """Return whether every rank sees the main process's run folder, not one of its own."""
        file = self.path / ".lock"
        content = file.read_text(encoding="utf-8") if file.is_file() else None
        return not self.dist_ctx.any(content != self.dist_ctx.broadcast(content))

    # On the main process.

    def _acquire(self, resume: bool) -> None:
        """Create and lock the folder. Raises UserError if that is not possible."""
        self.is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = acquire_lock(self.path / ".lock", self.path)
        self.lock_stat = os.stat(self.path / ".lock")
        if list_checkpoints(self.path) and not resume:
            self.lock.release()
            advice = "Continue with --resume, or choose another --out."
            raise UserError(f"{self.path}: already contains checkpoints. {advice}")

    def _folder_error(self) -> UserError | None:
        """Return an error if the main process's lock is no longer in the folder."""
        if not self.dist_ctx.is_main_process:
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path / ".lock"), self.lock_stat):
                return None
        problem = "removed, renamed or replaced during the run"
        return UserError(f"{self.path}: {problem}. Restore it and add --resume, or start again.")

    def _make_shard_directory(self, path: Path) -> str:
        """Make the directory into which all ranks write a checkpoint's shards; return its name."""
        path.parent.mkdir(exist_ok=True)
        directory = path.with_name(f".{path.name}.shards.partial.new")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory.name

    def _write_and_prune(self, path: Path, write: Callable[..., None], *contents: Any) -> Hashes:
        """Call a function that writes a checkpoint, then remove old checkpoints."""
        if self.dist_ctx.is_main_process:
            if error := self._folder_error():  # writing would create it again
                raise error
            write(path, *contents)
            self._prune(path)
        return {}

    def _prune(self, newest: Path) -> None:
        """Remove all checkpoints but the best one and the newest complete ones.

        ``newest`` was just written or verified. Others may be corrupted, and do not count.
        """
        self.complete.add(newest)
        best = rank_checkpoints(self.path)[0]
        num_complete = 0
        for path in reversed(list_checkpoints(self.path)):
            if num_complete < self.keep_checkpoints:
                num_complete += path in self.complete
            elif path != best:
                path.rename(path.with_name(f".{path.name}.partial.old"))
        self._remove_partial()

    def _remove_partial(self) -> None:
        """Remove the remains of checkpoints after pruning, a kill or an error."""
        for path in (self.path / "checkpoints").glob(".step-*.partial.*"):
            if path.is_symlink():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
