"""One checkpoint: the state of a run at one step, written atomically and verified by hashes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.core.files import (
    atomic_directory,
    chmod_and_fsync,
    read_json,
    safe_child_path,
    sha256,
    write_json,
)
from engine.core.settings import from_values
from model import GPT, ModelConfig

Tensors = dict[str, Tensor]
TensorKind = Literal["model", "optimizer"]
SaveTokenizer = Callable[[Path], None]
FORMAT_GATHERED = 1
FORMAT_SHARDED = 2
COMMON_FILES = ("state.json", "tokenizer.json")  # of both formats
MAX_SHARDS = 99_999  # five digits of a file name
REQUIRED_STATE = {
    "step",
    "model",
    "settings",
    "documents",
    "elapsed_seconds",
    "best_val_loss",
    "data_sha256",
}


class SavedTensor:
    """A full tensor on disk: ``saved[start:stop]`` reads these rows, ``saved[...]`` all."""

    def __init__(self, slices: list[Any]):
        """Take the safetensors slice of each shard that has rows, in the order of the shards."""
        shapes = [piece.get_shape() for piece in slices]
        self.slices = slices
        self.num_rows = [shape[0] for shape in shapes] if len(slices) > 1 else []
        full_shape = [sum(self.num_rows), *shapes[0][1:]] if self.num_rows else shapes[0]
        self.shape = torch.Size(full_shape)

    def __getitem__(self, rows: Any) -> Tensor:
        if not self.num_rows:
            return self.slices[0][rows]
        start, stop, _ = (slice(None) if rows is ... else rows).indices(self.shape[0])
        pieces = []
        offset = 0
        for piece, num_rows in zip(self.slices, self.num_rows, strict=True):
            overlap = slice(max(start - offset, 0), min(stop - offset, num_rows))
            if overlap.start < overlap.stop:
                pieces.append(piece[overlap])
            offset += num_rows
        return torch.cat(pieces or [self.slices[0][:0]])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk; :meth:`verify` checks the files that are about to be read."""

    path: Path
    state: dict[str, Any]  # the content of state.json
    sha256: dict[str, str]  # by file name
    shards: int = 0  # 0: gathered

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def is_chat_model(self) -> bool:
        """Whether the model was trained on chats."""
        return self.state.get("examples") == "chats"

    @property
    def model_files(self) -> list[str]:
        """The names of the files that sampling and export read."""
        return [*tensor_files("model", self.shards), *COMMON_FILES]

    def verify(self, names: Iterable[str] | None = None) -> "Checkpoint":
        """Compare files, by default all, with their hashes, and return the checkpoint.

        Raises UserError naming a file that is missing or corrupted.
        """
        for name in self.sha256 if names is None else names:
            _verify_file(self.path, name, self.sha256[name])
        return self

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every parameter, on the CPU."""
        return ((name, saved[...]) for name, saved in self.saved("model"))

    def optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and value of every tensor of the optimizer's state, on the CPU."""
        return ((name, saved[...]) for name, saved in self.saved("optimizer"))

    def saved(self, kind: TensorKind) -> Iterator[tuple[str, SavedTensor]]:
        """Yield the name of every tensor of a kind, and the tensor, readable until the next."""
        slices: dict[str, list[Any]] = {}
        with contextlib.ExitStack() as stack:
            for name in tensor_files(kind, self.shards):
                try:
                    file = stack.enter_context(safetensors.safe_open(self.path / name, "pt"))
                    for key in file.keys():  # noqa: SIM118
                        slices.setdefault(key, []).append(file.get_slice(key))
                except safetensors.SafetensorError as error:
                    raise UserError(f"{self.path / name}: corrupted ({error}).") from None
            for key, pieces in slices.items():
                shapes = [piece.get_shape() for piece in pieces]
                row_shapes = {tuple(shape[1:]) if shape else None for shape in shapes}
                if len(pieces) > 1 and (len(row_shapes) > 1 or None in row_shapes):
                    raise UserError(f"{self.path}: corrupted, its shards of {key} do not match.")
                yield key, SavedTensor(pieces)


def tensor_files(kind: TensorKind, shards: int) -> list[str]:
    """Return the names of a checkpoint's tensor files, one for each shard; 0 shards: gathered."""
    if not shards:
        return [f"{kind}.safetensors"]
    return [f"{kind}-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)]


def write_checkpoint(
    path: Path,
    state: dict[str, Any],
    model: Tensors,
    optimizer: Tensors,
    save_tokenizer: SaveTokenizer,
) -> None:
    """Write a gathered checkpoint atomically. Raises OSError if it can't be written."""
    with atomic_directory(path) as directory:
        hashes = {
            **_write_tensors(directory / "model.safetensors", model),
            **_write_tensors(directory / "optimizer.safetensors", optimizer),
        }
        _write_manifest(directory, {"format": FORMAT_GATHERED}, hashes, state, save_tokenizer)


def write_shard(
    directory: Path,
    rank: int,
    shards: int,
    model: Tensors,
    optimizer: Tensors,
) -> dict[str, str]:
    """Write the files of one rank's shard and return their hashes."""
    model_file = directory / tensor_files("model", shards)[rank]
    optimizer_file = directory / tensor_files("optimizer", shards)[rank]
    hashes = {**_write_tensors(model_file, model), **_write_tensors(optimizer_file, optimizer)}
    chmod_and_fsync(model_file)
    chmod_and_fsync(optimizer_file)
    return hashes


def complete_shards(
    path: Path,
    directory: Path,
    state: dict[str, Any],
    save_tokenizer: SaveTokenizer,
    hashes: dict[str, str],
) -> None:
    """Make a checkpoint of the shards in a directory, atomically, and remove the directory."""
    manifest = {"format": FORMAT_SHARDED, "shards": len(hashes) // 2}
    with atomic_directory(path) as target:
        for name in hashes:
            (directory / name).rename(target / name)
        _write_manifest(target, manifest, hashes, state, save_tokenizer)
    directory.rmdir()


def _write_tensors(file: Path, tensors: Tensors) -> dict[str, str]:
    """Write a file and return its name and hash; it is read back from the page cache."""
    try:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, file)
    except safetensors.SafetensorError as error:  # also for a full disk
        raise OSError(f"{file}: can't be written ({error}).") from None
    return {file.name: sha256(file)}


def _write_manifest(
    directory: Path,
    manifest: dict[str, Any],
    tensor_hashes: dict[str, str],
    state: dict[str, Any],
    save_tokenizer: SaveTokenizer,
) -> None:
    """Write the state, the tokenizer, and last the manifest, into a directory with tensors."""
    write_json(directory / "state.json", state)
    save_tokenizer(directory / "tokenizer.json")
    common_hashes = {name: sha256(directory / name) for name in COMMON_FILES}
    write_json(directory / "manifest.json", {**manifest, "files": tensor_hashes | common_hashes})


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder; of its files only state.json is verified.

    Raises UserError for a folder without a checkpoint, an unsupported format, and a manifest or
    state that is corrupted.
    """
    if not (path / "manifest.json").is_file():
        raise UserError(f"{path}: not a checkpoint (manifest.json not found).")
    manifest = read_json(path / "manifest.json")
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version not in (FORMAT_GATHERED, FORMAT_SHARDED):
        raise UserError(
            f"{path}: unsupported checkpoint format (got {version!r}). This version reads "
            f"{FORMAT_GATHERED} and {FORMAT_SHARDED}; use the version that wrote it."
        )
    hashes = manifest.get("files")
    shards = manifest.get("shards") if version == FORMAT_SHARDED else 0
    if not isinstance(hashes, dict) or shards not in range(MAX_SHARDS + 1):
        raise UserError(f"{path}: corrupted, its manifest.json has no files or shards.")
    required = {*tensor_files("model", shards), *tensor_files("optimizer", shards), *COMMON_FILES}
    if missing := ", ".join(sorted(required - hashes.keys())):
        raise UserError(f"{path}: corrupted, its manifest.json does not list {missing}.")
    for name in hashes:
        safe_child_path(path, name)
    _verify_file(path, "state.json", hashes["state.json"])
    state = read_json(path / "state.json")
    if not isinstance(state, dict) or not state.keys() >= REQUIRED_STATE:
        names = ", ".join(sorted(REQUIRED_STATE))
        raise UserError(f"{path}: corrupted, its state.json must have {names}.")
    return Checkpoint(path, state, hashes, shards)


def _verify_file(path: Path, name: str, expected: str) -> None:
    """Raise UserError if a file of a checkpoint is missing or has another hash."""
    if not (path / name).is_file():
        raise UserError(f"{path}: corrupted, {name} not found.")
    if sha256(path / name) != expected:
        raise UserError(f"{path}: corrupted, SHA-256 mismatch of {name}.")


def load_model(checkpoint: Checkpoint) -> GPT:
    """Return the model of a checkpoint, ready to predict.

    Raises UserError if its weights do not match its state.json.
    """
    weights = dict(checkpoint.model())
    try:
        source = str(checkpoint.path / "state.json")
        config = from_values(ModelConfig, checkpoint.state["model"], source)
        if config.num_layers * config.num_heads > len(weights):
            raise RuntimeError(f"{len(weights)} tensors for {config.num_layers} layers")
        with torch.device("meta"):  # no memory is allocated for a shape that does not match
            model = GPT(config)
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        message = f"{checkpoint.path}: corrupted, its weights do not match its state.json"
        raise UserError(f"{message} ({reason}).") from None
    return model.eval()
