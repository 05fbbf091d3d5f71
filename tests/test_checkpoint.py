"""One checkpoint: complete, whole or not there, and verified."""

import json
import stat
from pathlib import Path

import pytest
import torch
from helpers import seal

from engine.checkpoint import FILES, STATE, open_checkpoint, write_checkpoint


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


@pytest.mark.parametrize("name", [*sorted(FILES), "manifest.json"])
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
        ({"format": 2}, "has format 2, but this version reads 1"),
        ({"format": None}, "has format None, but this version reads 1"),
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
