"""One checkpoint: a run's whole state at one step, in a folder that is complete or not there."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from engine.files import inside, new_directory, read_json, sha256, write_json
from engine.settings import from_values
from engine.tokenizer import Tokenizer, load_tokenizer

Tensors = dict[str, Tensor]  # by their names
FORMAT = 1
FILES = {"model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json"}
STATE = {"step", "model", "settings", "documents", "elapsed_seconds", "best_val_loss", "data_sha256"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files are what its manifest says."""

    path: Path
    state: dict[str, Any]  # step, settings, losses: what state.json holds

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def talks(self) -> bool:
        """Whether it has learned chats."""
        return self.state.get("examples") == "chats"

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


def write_checkpoint(
    path: Path, state: dict[str, Any], model: Tensors, optimizer: Tensors, save_tokenizer: Callable[[Path], None]
) -> None:
    """Write a checkpoint, whole or not at all. Raises OSError if it can't be written."""
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


def load_model(found: Checkpoint, config_class: type, model_class: type[nn.Module]) -> nn.Module:
    """The model as it was at the checkpoint, ready to predict. Raises ValueError if its files don't fit each other."""
    weights, shape = dict(found.model()), found.state["model"]
    try:
        config = from_values(config_class, shape, str(found.path / "state.json"))
        if config.num_layers * config.num_heads > len(weights):
            raise RuntimeError(f"{len(weights)} tensors can't be {config.num_layers} layers")
        with torch.device("meta"):  # nothing is made before it is known that the weights fit
            model = model_class(config)
        model.load_state_dict(weights, assign=True)
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{found.path} is damaged: its weights don't fit its state.json ({reason})") from None
    return model.eval()


def check_tokenizer(base: Path, tokenizer: Tokenizer, data: Path) -> None:
    """Raise ValueError for a dataset whose tokenizer is not that of the checkpoint at base, nor an extension of it."""
    if not tokenizer.extends(load_tokenizer(base / "tokenizer.json")):
        advice = f"prepare it with that one: python prepare.py INPUT --out {data} --force --tokenizer {base}"
        raise ValueError(f"{data} has another tokenizer than {base}; {advice}")


def inherited(shape: dict[str, Any], config: Any, source: Path) -> Any:
    """The model's settings of a checkpoint's state, but for dropout those of config, which may not say otherwise.

    Raises ValueError, naming the source, for a setting that config has neither by default nor from there.
    """
    found = from_values(type(config), shape, str(source))
    for name, own in dataclasses.asdict(found).items():
        given, default = getattr(config, name), getattr(type(config), name)
        if name != "dropout" and given not in (default, own):
            raise ValueError(f"{name} is {given}, but {source} has {own}; leave it out")
    return dataclasses.replace(found, dropout=config.dropout)


def with_rows(tensors: Iterable[tuple[str, Tensor]], sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Named tensors with so many rows: those that are missing, of new tokens, are the mean of those that are there.

    So new tokens begin as likely as others: Hewitt 2021, "Initializing new word embeddings".
    """
    for name, tensor in tensors:
        missing = sizes.get(name, 0) - len(tensor)
        yield name, tensor if missing <= 0 else torch.cat((tensor, tensor.mean(0, keepdim=True).expand(missing, -1)))


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
        raise ValueError(f"{path} is damaged: its state.json does not have all of {', '.join(sorted(STATE))}")
    return Checkpoint(path, state)
