"""out/<run>/: its lock, its settings, and which checkpoints stay."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import filelock
from torch import Tensor

from engine.core.cli import say
from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.errors import UserError
from engine.core.files import acquire_lock, atomic_write, propose_path
from engine.core.values import convert
from engine.runs.checkpoint import (
    Checkpoint,
    RunState,
    SaveTokenizer,
    Tensors,
    adapters_file,
    check_definition,
    complete_shards,
    open_checkpoint,
    write_checkpoint,
    write_shard,
)
from engine.runs.run_files import list_checkpoints, rank_checkpoints

Hashes = dict[str, str]  # SHA-256 by file name


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
        self.pending: futures.Future[Hashes | None] | None = None
        # Called with the hashes of all ranks' files.
        self.finish_sharded_save: Callable[[Hashes], None] | None = None

    def write_settings(self, toml: str) -> None:
        """Write config.toml."""
        self.dist_ctx.run_on_main(atomic_write, self.path / "config.toml", toml.encode())

    def newest(self, is_required: bool = False) -> Checkpoint | None:
        """Return the newest complete checkpoint, all of it verified; None without checkpoints.

        Prints corrupted ones, which are skipped. Raises UserError if all are, or if none is there
        that is required.
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
            self.dist_ctx.run_on_main(check_definition, checkpoint)
            return checkpoint
        if names:
            raise UserError(f"{self.path}: every checkpoint is corrupted. Choose another --out.")
        if is_required:
            advice = "Add --auto-resume to start a run, or leave --resume out."
            fix = propose_path(self.path, Path("out"), "checkpoints/step-*", advice)
            raise UserError(f"{self.path}: has no checkpoint to resume. {fix}")
        return None

    def best(self, best_by: str = "") -> Checkpoint:
        """Return the checkpoint that rank_checkpoints ranks first, all of it verified."""
        ranked = partial(rank_checkpoints, self.path, best_by)
        name = self.dist_ctx.broadcast_from_main(lambda: ranked()[0].name)
        return self._open(self.path / "checkpoints" / name)

    def _open(self, path: Path) -> Checkpoint:
        """Return a verified checkpoint; ranks that see the folder share the work."""
        content = None
        with self.dist_ctx.wait_for_all():  # raises the UserError of one rank on all
            if self.is_shared or self.dist_ctx.is_main_process:
                checkpoint = open_checkpoint(path)
                names = list(checkpoint.sha256)
                rank_names = names[self.dist_ctx.rank :: self.dist_ctx.size]
                checkpoint.verify(rank_names if self.is_shared else names)
                content = [asdict(checkpoint.state), checkpoint.sha256, checkpoint.shards]
        state, sha256, shards = self.dist_ctx.broadcast(content)
        return Checkpoint(path, convert(state, RunState, "state"), sha256, shards)

    def distribute(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Yield a checkpoint's tensors on every rank, also on ranks that do not see the folder."""
        return tensors if self.is_shared else self.dist_ctx.broadcast_tensors(tensors)

    def save(
        self, state: RunState, model: Tensors, optimizer: Tensors, save_tokenizer: SaveTokenizer
    ) -> None:
        """Copy the tensors and begin to write ``checkpoints/step-…`` in the background."""
        self.wait()
        path = self.path / "checkpoints" / f"step-{state.step:08d}"
        write_on_main = partial(self.dist_ctx.run_on_main, self._write_and_prune, path)
        model = self.dist_ctx.copy_to_cpu(model, gather=not self.is_shared)
        optimizer = self.dist_ctx.copy_to_cpu(optimizer, gather=not self.is_shared)
        if not self.is_shared:
            write = partial(write_on_main, write_checkpoint, state, model, optimizer)
            self.pending = self.thread.submit(write, save_tokenizer)
            return
        name = self.dist_ctx.broadcast_from_main(self._make_shard_directory, path)
        directory = path.with_name(name)
        write_rows = partial(write_shard, directory, self.dist_ctx.rank, self.dist_ctx.size)
        self.pending = self.thread.submit(write_rows, model, optimizer)
        complete = partial(write_on_main, complete_shards, directory, state)
        self.finish_sharded_save = partial(complete, save_tokenizer)

    def wait(self) -> None:
        """Wait until everything is on the disk. Raises the error of any rank."""
        while self.pending:  # a sharded save has a second stage
            with self.dist_ctx.wait_for_all():
                futures.wait([self.pending])
            self._finish_stage(self.pending)
        self.dist_ctx.raise_error(self._folder_error())

    def check(self) -> None:
        """Complete a checkpoint that all ranks have written, without waiting for one.

        Raises the error of any rank, and UserError if the folder is no longer that of this run.
        """
        self.dist_ctx.raise_error(self._folder_error())
        if self.pending and not self.dist_ctx.any(not self.pending.done()):
            self._finish_stage(self.pending)

    def _finish_stage(self, task: futures.Future[Hashes | None]) -> None:
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
        self.dist_ctx.run_on_main(self._release)

    def _is_visible_to_all(self) -> bool:
        """Return whether every rank sees the main process's run folder, not one of its own."""
        file = self.path / ".lock"
        content = file.read_text(encoding="utf-8") if file.is_file() else None
        return not self.dist_ctx.any(content != self.dist_ctx.broadcast(content))

    def _folder_error(self) -> UserError | None:
        """Return an error, on the main process, if the lock is no longer in the folder."""
        if not self.dist_ctx.is_main_process:
            return None
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path / ".lock"), self.lock_stat):
                return None
        problem = "removed, renamed or replaced during the run"
        return UserError(f"{self.path}: {problem}. Restore it and add --resume, or start again.")

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

    def _release(self) -> None:
        """Unlock the folder, and remove what is incomplete."""
        if not self._folder_error():
            self._remove_partial()
            if self.is_new and os.listdir(self.path) == [".lock"]:
                (self.path / ".lock").unlink()
                self.path.rmdir()
        self.lock.release()

    def _make_shard_directory(self, path: Path) -> str:
        """Make the directory into which all ranks write a checkpoint's shards; return its name."""
        path.parent.mkdir(exist_ok=True)
        directory = path.with_name(f".{path.name}.shards.partial.new")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        return directory.name

    def _write_and_prune(self, path: Path, write: Callable[..., None], *contents: Any) -> None:
        """Call a function that writes a checkpoint, then remove old checkpoints."""
        if error := self._folder_error():  # writing would create it again
            raise error
        write(path, *contents)
        self._prune(path)

    def _prune(self, newest: Path) -> None:
        """Remove all checkpoints but the best one, the newest complete ones and base models.

        ``newest`` was just written or verified. Others may be corrupted, and do not count.
        """
        self.complete.add(newest)
        best = rank_checkpoints(self.path)[0]
        num_complete = 0
        for path in reversed(list_checkpoints(self.path)):
            if num_complete < self.keep_checkpoints:
                if path in self.complete:
                    num_complete += 1
            elif path != best and not adapters_file(path).exists():
                path.rename(path.with_name(f".{path.name}.partial.old"))
        self._remove_partial()

    def _remove_partial(self) -> None:
        """Remove the remains of checkpoints after pruning, a kill or an error."""
        for path in (self.path / "checkpoints").glob(".step-*.partial.*"):
            if path.is_symlink():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
