"""One checkpoint: complete, whole or not there, and verified."""

import json
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers import same_checkpoint, same_tensors, seal

from engine.core.files import new_directory
from engine.training.checkpoint import (
    FILES,
    STATE,
    Shard,
    complete_shards,
    open_checkpoint,
    tensor_files,
    write_checkpoint,
)


def save_tokenizer(path: Path) -> None:
    path.write_text("{}")


def written(folder: Path, step: int = 60, save_tokenizer=save_tokenizer, **state) -> Path:
    model = {"weight": torch.full((3,), float(step))}
    optimizer = {"weight.momentum": torch.full((2, 3), -float(step)).mT}  # not contiguous
    path = folder / f"step-{step:08d}"
    write_checkpoint(path, dict.fromkeys(STATE) | {"step": step} | state, model, optimizer, save_tokenizer)
    return path


def test_what_is_written_comes_back(tmp_path):
    found = open_checkpoint(written(tmp_path))
    assert found.path == tmp_path / "step-00000060" and found.step == 60
    assert torch.equal(dict(found.model())["weight"], torch.full((3,), 60.0))
    assert torch.equal(dict(found.optimizer())["weight.momentum"], torch.full((3, 2), -60.0))
    files = {file.name for file in found.path.iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json", "manifest.json"}
    assert set(json.loads((found.path / "manifest.json").read_text())["files"]) == files - {"manifest.json"}


def test_what_is_not_finite_is_null_in_the_state(tmp_path):
    path = written(tmp_path, best_val_loss=float("inf"), val_loss=float("nan"))
    assert "Infinity" not in (path / "state.json").read_text() and "NaN" not in (path / "state.json").read_text()
    state = open_checkpoint(path).state
    assert state["best_val_loss"] is None and state["val_loss"] is None


def test_everybody_may_read_what_was_written(tmp_path):
    path = written(tmp_path)
    (tmp_path / "plain").touch()
    usual = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {usual}


def test_writing_a_step_again_replaces_it(tmp_path):
    written(tmp_path, val_loss=3.0)
    assert open_checkpoint(written(tmp_path, val_loss=2.0)).state["val_loss"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000060"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    written(tmp_path, 1, val_loss=3.0)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            written(tmp_path, step, save_tokenizer=full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert open_checkpoint(tmp_path / "step-00000001").state["val_loss"] == 3.0


DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


@pytest.mark.parametrize("name", [*sorted(FILES), "model.safetensors", "optimizer.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, damage):
    path = written(tmp_path)
    DAMAGES[damage](path / name)
    with pytest.raises(ValueError, match="step-00000060") as caught:
        open_checkpoint(path)
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_what_is_no_tensor_file_is_refused_by_name_though_its_hash_fits(tmp_path, name):
    path = written(tmp_path)
    (path / name).write_bytes(b"nothing of the kind")
    seal(path)
    found = open_checkpoint(path)
    with pytest.raises(ValueError, match=rf"{name} is damaged \("):
        list(found.model() if name.startswith("model") else found.optimizer())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 3}, "has format 3, but this version reads 1 and 2"),
        ({"format": None}, "has format None, but this version reads 1 and 2"),
        ({"format": 2}, "its manifest.json does not list 1 to 99999 shards, but None"),
        (
            {"format": 2, "shards": 2},
            r"its manifest.json does not list model-00001-of-00002\.safetensors, model-00002-of",
        ),
        ({"files": []}, r"its manifest\.json does not list model\.safetensors, "),
        ({"files": {"../../secret": "0"}}, "names '../../secret', which is no file's name in its folder"),
    ],
)
def test_a_manifest_that_can_not_be_is_refused(tmp_path, changes, message):
    path = written(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    if isinstance(changes.get("files"), dict):
        changes = {"files": manifest["files"] | changes["files"]}
    (path / "manifest.json").write_text(json.dumps(manifest | changes))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("state", ["[]", "{}", json.dumps(dict.fromkeys(STATE - {"documents"}))])
def test_a_state_that_does_not_tell_enough_is_refused(tmp_path, state):
    path = written(tmp_path)
    (path / "state.json").write_text(state)
    seal(path)
    with pytest.raises(ValueError, match=r"is damaged: its state\.json does not .* best_val_loss, "):
        open_checkpoint(path)


# Sharded.

SHARDS = 4
MODEL = {"matrix": torch.randn(7, 3), "one row": torch.randn(1, 5), "vector": torch.randn(5), "all": torch.randn(3, 2)}
OPTIMIZER = {"matrix.momentum": torch.randn(7, 3).bfloat16(), "matrix.step": torch.tensor(60.0)}


def held(tensors: dict[str, torch.Tensor], number: int, count: int) -> dict[str, torch.Tensor]:
    """What process ``number`` has of tensors: its rows, which may be none; what is not sharded, if it is the first."""
    each = {name: -(-len(tensor) // count) for name, tensor in tensors.items() if tensor.ndim and name != "all"}
    mine = {name: tensors[name][n * (number - 1) : n * number] for name, n in each.items()}
    return mine | {name: tensor for name, tensor in tensors.items() if number == 1 and name not in each}


def written_sharded(folder: Path, count: int = SHARDS) -> Path:
    path = folder / "step-00000060"
    with new_directory(path) as directory:
        for number in range(1, count + 1):
            shard = Shard(directory, number, count)
            shard.begin()
            shard.write(held(MODEL, number, count), held(OPTIMIZER, number, count))
        complete_shards(directory, count, dict.fromkeys(STATE) | {"step": 60}, save_tokenizer, lambda: False)
    return path


@pytest.mark.parametrize("count", [1, 2, 3, SHARDS])
def test_a_sharded_checkpoint_is_the_gathered_one_bit_for_bit(tmp_path, count):
    state = dict.fromkeys(STATE) | {"step": 60}
    write_checkpoint(tmp_path / "gathered", state, MODEL, OPTIMIZER, save_tokenizer)
    found, gathered = open_checkpoint(written_sharded(tmp_path, count)), open_checkpoint(tmp_path / "gathered")
    assert same_checkpoint(found, gathered) and same_tensors(dict(found.model()), MODEL)
    assert found.state == gathered.state and found.shards == count and gathered.shards == 0
    files = {*tensor_files("model", count), *tensor_files("optimizer", count), *FILES}
    assert {file.name for file in found.path.iterdir()} == {*files, "manifest.json"}
    assert len({stat.S_IMODE(file.stat().st_mode) for file in found.path.iterdir()}) == 1


def test_any_rows_of_a_saved_tensor_are_read_alone(tmp_path):
    state = dict.fromkeys(STATE) | {"step": 60}
    write_checkpoint(tmp_path / "gathered", state, MODEL, OPTIMIZER, save_tokenizer)
    for path in (written_sharded(tmp_path), tmp_path / "gathered"):
        for name, saved in open_checkpoint(path).saved("model"):
            assert saved.shape == MODEL[name].shape
            for start in range(len(MODEL[name]) + 1):
                for stop in range(start, len(MODEL[name]) + 1):
                    assert torch.equal(saved[start:stop], MODEL[name][start:stop])


@pytest.mark.parametrize("name", [tensor_files("model", SHARDS)[2], tensor_files("optimizer", SHARDS)[3]])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_by_name_by_the_process_that_has_to_look(tmp_path, name, damage):
    path = written_sharded(tmp_path)
    DAMAGES[damage](path / name)
    refused = []
    for rank in range(3):
        try:
            open_checkpoint(path, slice(rank, None, 3))
        except ValueError as error:
            assert name in str(error)
            refused.append(rank)
    assert refused == [0, 1, 2] if damage == "deleted" else len(refused) == 1


def test_a_shard_of_another_count_is_refused_by_name(tmp_path):
    path = written_sharded(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    one, other = (tensor_files("model", count)[1] for count in (SHARDS, 3))
    (path / one).rename(path / other)
    manifest["files"][other] = manifest["files"].pop(one)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"is damaged: its manifest.json does not list {one}"):
        open_checkpoint(path)


@pytest.mark.parametrize(("name", "other"), [("matrix", torch.zeros(2, 4)), ("step", torch.tensor(1.0))])
def test_shards_that_do_not_fit_each_other_are_refused_though_their_hashes_fit(tmp_path, name, other):
    path = written_sharded(tmp_path)
    for file in tensor_files("model", SHARDS)[1:3]:
        safetensors.torch.save_file({name: other}, path / file)
    seal(path)
    with pytest.raises(ValueError, match=rf"is damaged: its shards don't have rows of one {name}"):
        dict(open_checkpoint(path).model())


@pytest.mark.parametrize("fault", ["failed", "ended", "hangs"])
def test_a_checkpoint_that_lacks_a_shard_is_not_there(tmp_path, fault):
    given_up = iter([False, False, False, True])
    said = r"shard 2 of 2 of .* was not written; the error of its process says why"
    with pytest.raises(OSError, match=said), new_directory(tmp_path / "step-00000060") as directory:
        shards = [Shard(directory, number, 2) for number in (1, 2)]
        shards[0].begin()
        shards[0].write(MODEL, OPTIMIZER)
        if fault != "ended":
            shards[1].begin()
        if fault == "failed":
            (directory / tensor_files("optimizer", 2)[1]).mkdir()
            with pytest.raises(OSError, match="can't be written"):
                shards[1].write(MODEL, OPTIMIZER)
        complete_shards(directory, 2, dict.fromkeys(STATE), save_tokenizer, lambda: next(given_up))
    assert list(tmp_path.iterdir()) == []
