"""One checkpoint: a run's whole state at one step, in a folder that is complete or not there."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import filelock
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.files import inside, new_directory, read_json, settle, sha256, to_json, write_json, write_whole
from engine.core.settings import from_values
from engine.data.tokenizer import Tokenizer, load_tokenizer

Tensors = dict[str, Tensor]  # by their names
GATHERED, SHARDED = 1, 2  # formats
FILES = {"state.json", "tokenizer.json"}  # of either, beside those of tensors
MOST_SHARDS = 99_999  # that their names have room for
POLL = 0.1  # seconds between two looks for what another process writes
STATE = {"step", "model", "settings", "documents", "elapsed_seconds", "best_val_loss", "data_sha256"}


class SavedTensor:
    """A full tensor on disk: ``saved[start:stop]`` reads these rows, ``saved[...]`` all."""

    def __init__(self, slices: list[Any]):
        """The slices are safetensors', one for each shard that has rows, in their order."""
        shapes = [piece.get_shape() for piece in slices]
        self.slices, self.rows = slices, [shape[0] for shape in shapes] if len(slices) > 1 else []
        self.shape = torch.Size([sum(self.rows), *shapes[0][1:]] if self.rows else shapes[0])

    def __getitem__(self, rows: Any) -> Tensor:
        if not self.rows:
            return self.slices[0][rows]
        start, stop, _ = (slice(None) if rows is ... else rows).indices(self.shape[0])
        pieces, before = [], 0
        for piece, count in zip(self.slices, self.rows, strict=True):
            overlap = slice(max(start - before, 0), min(stop - before, count))
            pieces += [piece[overlap]] if overlap.start < overlap.stop else []
            before += count
        return torch.cat(pieces or [self.slices[0][:0]])


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose files are what its manifest says."""

    path: Path
    state: dict[str, Any]  # step, settings, losses: what state.json holds
    sha256: dict[str, str]  # of each of its files
    shards: int = 0  # that its tensors are in; 0: gathered

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def talks(self) -> bool:
        """Whether it has learned chats."""
        return self.state.get("examples") == "chats"

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters and their names, one at a time, on the CPU."""
        return ((name, saved[...]) for name, saved in self.saved("model"))

    def optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's state and its names, one at a time, on the CPU."""
        return ((name, saved[...]) for name, saved in self.saved("optimizer"))

    def saved(self, kind: Literal["model", "optimizer"]) -> Iterator[tuple[str, SavedTensor]]:
        """All tensors of that kind and their names, to be read before the next one comes."""
        slices: dict[str, list[Any]] = {}
        with contextlib.ExitStack() as opened:
            for name in tensor_files(kind, self.shards):
                try:
                    file = opened.enter_context(safetensors.safe_open(self.path / name, "pt"))
                    for key in file.keys():  # noqa: SIM118
                        slices.setdefault(key, []).append(file.get_slice(key))
                except safetensors.SafetensorError as error:
                    raise UserError(f"{self.path / name} is damaged ({error})") from None
            for key, pieces in slices.items():
                kinds = {(len(shape), *shape[1:]) for shape in (piece.get_shape() for piece in pieces)}
                if len(pieces) > 1 and (len(kinds) > 1 or (0,) in kinds):
                    raise UserError(f"{self.path} is damaged: its shards don't have rows of one {key}")
                yield key, SavedTensor(pieces)


def tensor_files(kind: Literal["model", "optimizer"], shards: int) -> list[str]:
    """The names of the files with a checkpoint's tensors of that kind, one for each shard; 0 shards: gathered."""
    return [f"{kind}-{n:05d}-of-{shards:05d}.safetensors" for n in range(1, shards + 1)] or [f"{kind}.safetensors"]


def write_checkpoint(
    path: Path, state: dict[str, Any], model: Tensors, optimizer: Tensors, save_tokenizer: Callable[[Path], None]
) -> None:
    """Write a checkpoint, whole or not at all. Raises OSError if it can't be written."""
    with new_directory(path) as directory:
        written = {}
        for kind, tensors in (("model", model), ("optimizer", optimizer)):
            written |= _write_tensors(directory / tensor_files(kind, 0)[0], tensors)
        _complete(directory, {"format": GATHERED}, written, state, save_tokenizer)


def _write_tensors(file: Path, tensors: Tensors) -> dict[str, str]:
    """Write a file; returns its name and hash. What was just written is read from memory, at the speed of hashing."""
    try:
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    except safetensors.SafetensorError as error:  # its way to say that the disk is full, say
        raise OSError(f"{file} can't be written ({error})") from None
    return {file.name: sha256(file)}


def _complete(
    directory: Path, manifest: dict[str, Any], written: dict[str, str], state: dict[str, Any], save_tokenizer: Callable
) -> None:
    """Add what tells of the tensors' files to a directory that has them; the manifest last."""
    write_json(directory / "state.json", state)
    save_tokenizer(directory / "tokenizer.json")
    written |= {name: sha256(directory / name) for name in sorted(FILES)}
    write_json(directory / "manifest.json", manifest | {"files": written})


class Shard:
    """One process's part of a checkpoint, written into the directory that will be one when all parts are there.

    A lock says that the process is at work, and dies with it. What it leaves is a record of its files' hashes.
    """

    def __init__(self, directory: Path, number: int, shards: int):
        """The shard with that number, from 1."""
        self.directory, self.number, self.shards = directory, number, shards
        self.record = directory / f"shard-{number:05d}.json"
        self.lock = filelock.FileLock(self.record.with_suffix(".lock"), thread_local=False)

    def begin(self) -> None:
        """Say that this process will write it."""
        self.lock.acquire(blocking=False)

    def write(self, model: Tensors, optimizer: Tensors) -> None:
        """Write it. Raises OSError if it can't be written."""
        try:
            written = {}
            for kind, tensors in (("model", model), ("optimizer", optimizer)):
                file = self.directory / tensor_files(kind, self.shards)[self.number - 1]
                written |= _write_tensors(file, tensors)
                settle(file)
            write_whole(self.record, to_json(written).encode())
        finally:
            self.lock.release()

    def collect(self, give_up: Callable[[], bool]) -> dict[str, str]:
        """The hashes of its files, once its process is done. Raises OSError if that failed, ended, or is given up."""
        while not give_up():
            with contextlib.suppress(filelock.Timeout), self.lock.acquire(blocking=False):
                if self.record.is_file():
                    return read_json(self.record)
                break
            time.sleep(POLL)
        what = f"shard {self.number} of {self.shards} of {self.directory}"
        raise OSError(f"{what} was not written; the error of its process says why")


def complete_shards(
    directory: Path, shards: int, state: dict[str, Any], save_tokenizer: Callable, give_up: Callable[[], bool]
) -> None:
    """Make a directory a checkpoint when all its shards are written. Raises OSError if one is not, or is given up."""
    parts, written = [Shard(directory, number, shards) for number in range(1, shards + 1)], {}
    for part in parts:
        written |= part.collect(give_up)
    for part in parts:
        part.record.unlink()
        Path(part.lock.lock_file).unlink()
    _complete(directory, {"format": SHARDED, "shards": shards}, written, state, save_tokenizer)


def load_model(found: Checkpoint, config_class: type, model_class: type[nn.Module]) -> nn.Module:
    """The model as it was at the checkpoint, ready to predict. Raises UserError if its files don't fit each other."""
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
        raise UserError(f"{found.path} is damaged: its weights don't fit its state.json ({reason})") from None
    return model.eval()


def check_tokenizer(base: Path, tokenizer: Tokenizer, data: Path) -> None:
    """Raise UserError for a dataset whose tokenizer is not that of the checkpoint at base, nor an extension of it."""
    if not tokenizer.extends(load_tokenizer(base / "tokenizer.json")):
        advice = f"prepare it with that one: python prepare.py INPUT --out {data} --force --tokenizer {base}"
        raise UserError(f"{data} has another tokenizer than {base}; {advice}")


def inherited(shape: dict[str, Any], config: Any, source: Path) -> Any:
    """The model's settings of a checkpoint's state, but for dropout those of config, which may not say otherwise.

    Raises UserError, naming the source, for a setting that config has neither by default nor from there.
    """
    found = from_values(type(config), shape, str(source))
    for name, own in dataclasses.asdict(found).items():
        given, default = getattr(config, name), getattr(type(config), name)
        if name != "dropout" and given not in (default, own):
            raise UserError(f"{name} is {given}, but {source} has {own}; leave it out")
    return dataclasses.replace(found, dropout=config.dropout)


def with_rows(tensors: Iterable[tuple[str, Tensor]], sizes: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """Named tensors with so many rows: those that are missing, of new tokens, are the mean of those that are there.

    So new tokens begin as likely as others: Hewitt 2021, "Initializing new word embeddings".
    """
    for name, tensor in tensors:
        missing = sizes.get(name, 0) - len(tensor)
        yield name, tensor if missing <= 0 else torch.cat((tensor, tensor.mean(0, keepdim=True).expand(missing, -1)))


def open_checkpoint(path: Path, share: slice = slice(None)) -> Checkpoint:
    """The checkpoint in a folder. Raises UserError naming the file that is missing or not as it was written.

    The share is which of its files to hash, in the order of their names: peers may hash the others.
    """
    if not (path / "manifest.json").is_file():
        raise UserError(f"{path} holds no checkpoint: it has no manifest.json")
    manifest = read_json(path / "manifest.json")
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found not in (GATHERED, SHARDED):
        raise UserError(f"{path} has format {found!r}, but this version reads {GATHERED} and {SHARDED}")
    files, shards = manifest.get("files"), manifest.get("shards") if found == SHARDED else 0
    if lacking := _lacking(files, shards):
        raise UserError(f"{path} is damaged: its manifest.json does not list {lacking}")
    for name in files:
        if not inside(path, name).is_file():
            raise UserError(f"{path} is damaged: {name} is missing")
    for name in sorted(files)[share]:
        if sha256(path / name) != files[name]:
            raise UserError(f"{path} is damaged: {name} is not as it was written")
    state = read_json(path / "state.json")
    if not isinstance(state, dict) or not state.keys() >= STATE:
        raise UserError(f"{path} is damaged: its state.json does not have all of {', '.join(sorted(STATE))}")
    return Checkpoint(path, state, files, shards)


def _lacking(files: Any, shards: Any) -> str:
    """The files that a manifest should list and does not, as text."""
    if not isinstance(shards, int) or not 0 <= shards <= MOST_SHARDS:
        return f"1 to {MOST_SHARDS} shards, but {shards!r}"
    needed = {*FILES, *tensor_files("model", shards), *tensor_files("optimizer", shards)}
    return ", ".join(sorted(needed - files.keys() if isinstance(files, dict) else needed))
