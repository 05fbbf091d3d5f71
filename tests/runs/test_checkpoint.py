"""One checkpoint: written atomically, verified where it is read, gathered or in shards."""

import dataclasses
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import make_state, same_checkpoint, same_tensors, save_tokenizer

from engine.core.errors import UserError
from engine.runs.checkpoint import (
    COMMON_FILES,
    FORMAT_SHARDED,
    Checkpoint,
    complete_shards,
    load_model,
    open_checkpoint,
    tensor_files,
    write_checkpoint,
    write_shard,
)
from model import GPT, ModelConfig

NUM_SHARDS = 4
MODEL = {
    "matrix": torch.randn(7, 3),
    "one row": torch.randn(1, 5),
    "vector": torch.randn(5),
    "unsharded": torch.randn(3, 2),
}
OPTIMIZER = {
    "matrix.momentum": torch.randn(3, 7).mT.bfloat16(),  # not contiguous
    "matrix.step": torch.tensor(60.0),
}
GATHERED_FILES = ["model.safetensors", "optimizer.safetensors", *COMMON_FILES]


def write_gathered(folder: Path, **state: object) -> Path:
    path = folder / "step-00000060"
    write_checkpoint(path, make_state(60, **state), MODEL, OPTIMIZER, save_tokenizer)
    return path


def rows_of(tensors: dict[str, torch.Tensor], rank: int, shards: int) -> dict[str, torch.Tensor]:
    """The rows that a rank has of each tensor, perhaps none; rank 0 has the unsharded tensors."""
    rows = {}
    for name, tensor in tensors.items():
        if tensor.ndim and name != "unsharded":
            height = -(-len(tensor) // shards)
            rows[name] = tensor[height * rank : height * (rank + 1)]
        elif rank == 0:
            rows[name] = tensor
    return rows


def write_sharded(folder: Path, shards: int = NUM_SHARDS) -> Path:
    path = folder / "step-00000060"
    directory = folder / "shards"
    directory.mkdir()
    hashes = {}
    for rank in range(shards):
        rows = [rows_of(tensors, rank, shards) for tensors in (MODEL, OPTIMIZER)]
        hashes |= write_shard(directory, rank, shards, *rows)
    complete_shards(path, directory, make_state(60), save_tokenizer, hashes)
    return path


# Written and read.


@pytest.mark.parametrize("shards", [1, NUM_SHARDS])
def test_a_sharded_checkpoint_equals_the_gathered_one(tmp_path, shards):
    (tmp_path / "gathered").mkdir()
    gathered = open_checkpoint(write_gathered(tmp_path / "gathered")).verify()
    assert same_tensors(dict(gathered.model()), MODEL)
    assert same_tensors(dict(gathered.optimizer()), OPTIMIZER)
    assert {file.name for file in gathered.path.iterdir()} == {*GATHERED_FILES, "manifest.json"}
    sharded = open_checkpoint(write_sharded(tmp_path, shards)).verify()
    assert same_checkpoint(sharded, gathered)
    assert sharded.state == gathered.state
    assert (sharded.shards, gathered.shards) == (shards, 0)
    names = {*tensor_files("model", shards), *tensor_files("optimizer", shards), *COMMON_FILES}
    assert {file.name for file in sharded.path.iterdir()} == {*names, "manifest.json"}
    (tmp_path / "plain").touch()  # with the permissions of the umask
    files = [tmp_path / "plain", *gathered.path.iterdir(), *sharded.path.iterdir()]
    assert len({file.stat().st_mode for file in files}) == 1
    assert not (tmp_path / "shards").exists()


def test_a_model_is_loaded_without_naming_its_class(tmp_path, monkeypatch):
    sizes = {"vocab_size": 11, "context_length": 8, "num_layers": 1, "num_heads": 2, "d_model": 8}
    model = GPT(ModelConfig(**sizes))
    state = make_state(60, model=model.config)
    write_checkpoint(tmp_path / "one", state, model.state_dict(), {}, save_tokenizer)
    checkpoint = open_checkpoint(tmp_path / "one")
    loaded = load_model(checkpoint)
    assert loaded.config == model.config and not loaded.training
    assert same_tensors(loaded.state_dict(), model.state_dict())
    for name, value in (("num_layers", 2), ("num_layers", 10**4), ("d_ff", 7), ("bias", True)):
        state = make_state(60, model=dataclasses.replace(checkpoint.state.model, **{name: value}))
        with pytest.raises(UserError, match=r"one.*state\.json"):
            load_model(Checkpoint(checkpoint.path, state, {}))
    monkeypatch.setattr(GPT, "__init__", Mock(side_effect=ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):  # and not a damaged file
        load_model(checkpoint)


# Corrupted.

DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "altered": lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]),
}


@pytest.mark.parametrize("write", [write_gathered, write_sharded])
@pytest.mark.parametrize("damage", DAMAGES)
def test_only_the_files_that_are_read_are_verified(tmp_path, write, damage):
    checkpoint = open_checkpoint(write(tmp_path))
    for name in tensor_files("optimizer", checkpoint.shards):
        DAMAGES[damage](checkpoint.path / name)
    checkpoint = open_checkpoint(checkpoint.path)
    assert same_tensors(dict(checkpoint.verify(checkpoint.model_files).model()), MODEL)
    DAMAGES[damage](checkpoint.path / checkpoint.model_files[0])
    with pytest.raises(UserError, match=checkpoint.model_files[0]):
        checkpoint.verify(checkpoint.model_files)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "got 1"),
        ({"format": FORMAT_SHARDED, "shards": 10**9}, "manifest.json"),
        ({"format": FORMAT_SHARDED, "shards": 2}, r"model-00001-of-00002\S+, model-00002-of"),
    ],
)
def test_an_impossible_manifest_is_refused(tmp_path, changes, message):
    path = write_gathered(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(UserError, match=message):
        open_checkpoint(path)
