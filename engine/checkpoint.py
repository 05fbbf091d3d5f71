"""Checkpoints: a run's whole state at one step, in a folder that is complete or not there."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from engine.files import new_directory, read_json, sha256, write_json

FORMAT = 1
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


def save_checkpoint(
    run: Path, state: dict[str, Any], model: dict[str, Tensor], optimizer: dict[str, Tensor], save_tokenizer: Callable
) -> Path:
    """Write ``checkpoints/step-…`` of a run, whole or not at all; then prune. Returns its path.

    state must hold ``step``; ``val_loss``, if measured at that step, decides which is the best.
    """
    path = folder(run, state["step"])
    with new_directory(path) as directory:
        safetensors.torch.save_file({k: v.contiguous() for k, v in model.items()}, directory / "model.safetensors")
        safetensors.torch.save_file(
            {k: v.contiguous() for k, v in optimizer.items()}, directory / "optimizer.safetensors"
        )
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
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} has format {manifest.get('format')}, but this version reads {FORMAT}")
    for name, expected in manifest["files"].items():
        if not (path / name).is_file():
            raise ValueError(f"{path} is damaged: {name} is missing")
        if sha256(path / name) != expected:
            raise ValueError(f"{path} is damaged: {name} is not as it was written")
    return Checkpoint(path, read_json(path / "state.json"))


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
    paths = list_checkpoints(run)
    losses = {path: read_json(path / "state.json").get("val_loss") for path in paths if (path / "state.json").is_file()}
    validated = {path: loss for path, loss in losses.items() if loss is not None}
    return min(validated, key=validated.get) if validated else (paths or [None])[-1]


def prune(run: Path) -> None:
    """Remove all checkpoints but the newest few and the best."""
    best = best_path(run)
    for path in list_checkpoints(run)[:-KEPT]:
        if path != best:
            shutil.rmtree(path)
