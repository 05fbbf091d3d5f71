"""Checkpoints: a run's whole state at one step, in a folder that is complete or not there."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from engine.files import inside, new_directory, read_json, sha256, write_json

FORMAT = 1
FILES = {"model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"}
STATE = {"step", "model", "settings", "documents", "elapsed_seconds", "best_val_loss", "data_sha256"}
KEPT = 2  # the newest so many, and the best


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files are what its manifest says."""

    path: Path
    state: dict[str, Any]  # step, settings, losses: what state.json holds

    @property
    def step(self) -> int:
        return self.state["step"]

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters and their names, one at a time, on the CPU."""
        return _tensors(self.path / "model.safetensors")

    def optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state and its names, one at a time, on the CPU."""
        return _tensors(self.path / "optimizer.safetensors")


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from None


class Saver:
    """Writes a run's checkpoints in the background, one after the other: training waits only for a copy of the state.

    An error in the background is raised by whatever is called next.
    """

    def __init__(self, run: Path, save_tokenizer: Callable[[Path], None]):
        self.run, self.save_tokenizer = run, save_tokenizer
        self.thread = ThreadPoolExecutor(1)
        self.pending: Future | None = None

    def save(self, state: dict[str, Any], model: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Begin to write ``checkpoints/step-…``, whole or not at all; then prune.

        state must hold ``step``; ``val_loss``, if measured at that step, decides which is the best.
        """
        self.wait()
        copies = [{name: tensor.to("cpu", copy=True) for name, tensor in part.items()} for part in (model, optimizer)]
        self.pending = self.thread.submit(save_checkpoint, self.run, state, *copies, self.save_tokenizer)

    def wait(self) -> None:
        """Go on when everything is on the disk."""
        if self.pending:
            self.pending.result()

    def check(self) -> None:
        """Raise the error that the background met, if it did."""
        if self.pending and self.pending.done():
            self.pending.result()


def save_checkpoint(
    run: Path, state: dict[str, Any], model: dict[str, Tensor], optimizer: dict[str, Tensor], save_tokenizer: Callable
) -> Path:
    """Write ``checkpoints/step-…`` of a run, whole or not at all; then prune. Returns its path."""
    path = folder(run, state["step"])
    with new_directory(path) as directory:
        try:
            for name, tensors in (("model", model), ("optimizer", optimizer)):
                tensors = {key: value.contiguous() for key, value in tensors.items()}
                safetensors.torch.save_file(tensors, directory / f"{name}.safetensors")
        except safetensors.SafetensorError as error:  # its way to say that the disk is full, say
            raise OSError(f"{path} can't be written ({error})") from None
        write_json(directory / "state.json", state)
        save_tokenizer(directory / "tokenizer.json")
        files = {file.name: sha256(file) for file in sorted(directory.iterdir())}
        write_json(directory / "manifest.json", {"format": FORMAT, "files": files})
    prune(run)
    return path


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises ValueError naming the file that is missing or not as it was written."""
    if not (path / "manifest.json").is_file():
        raise ValueError(f"{path} holds no checkpoint: it has no manifest.json")
    manifest = read_json(path / "manifest.json")
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found!r}, but this version reads {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files.keys() >= FILES:
        raise ValueError(f"{path} is damaged: its manifest.json does not list {', '.join(sorted(FILES))}")
    for name, expected in files.items():
        if not inside(path, name).is_file():
            raise ValueError(f"{path} is damaged: {name} is missing")
        if sha256(path / name) != expected:
            raise ValueError(f"{path} is damaged: {name} is not as it was written")
    state = read_json(path / "state.json")
    if not isinstance(state, dict) or not state.keys() >= STATE:
        raise ValueError(f"{path} is damaged: its state.json does not tell {', '.join(sorted(STATE))}")
    return Checkpoint(path, state)


def newest_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole, or None if there are none at all; warn is told of those skipped.

    Raises ValueError if there are some and all are damaged.
    """
    paths = list_checkpoints(run)
    for path in reversed(paths):
        try:
            return open_checkpoint(path)
        except ValueError as error:
            warn(f"skipped: {error}")
    if paths:
        raise ValueError(f"every checkpoint in {run} is damaged; remove the folder to start again")
    return None


def best_path(run: Path) -> Path | None:
    """The checkpoint folder with the lowest validation loss, or the newest if none was validated, or None."""
    paths, losses = list_checkpoints(run), {}
    for path in paths:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # damaged: not for us to tell
            losses[path] = read_json(path / "state.json").get("val_loss")
    validated = {path: loss for path, loss in losses.items() if loss is not None}
    return min(validated, key=validated.get) if validated else (paths or [None])[-1]


def prune(run: Path) -> None:
    """Remove all checkpoints but the newest few that are whole, and the best."""
    best, whole = best_path(run), 0
    for path in reversed(list_checkpoints(run)):
        if whole == KEPT:
            if path != best:
                shutil.rmtree(path)
            continue
        with contextlib.suppress(ValueError):
            open_checkpoint(path)
            whole += 1
