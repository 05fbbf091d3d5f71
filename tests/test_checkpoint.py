"""Checkpoints: whole or not there, verified, the best and the newest kept."""

import json

import pytest
import torch

from engine import checkpoint
from engine.checkpoint import best_path, list_checkpoints, newest_checkpoint, open_checkpoint, save_checkpoint


def saved(run, step, val_loss=None):
    model = {"weight": torch.full((3,), float(step))}
    optimizer = {"weight.momentum": torch.full((3,), -float(step))}
    state = dict.fromkeys(checkpoint.STATE) | {"step": step, "val_loss": val_loss}
    return save_checkpoint(run, state, model, optimizer, lambda path: path.write_text("{}"))


def test_what_is_saved_comes_back(tmp_path):
    found = open_checkpoint(saved(tmp_path, 60))
    assert found.path == tmp_path / "checkpoints" / "step-00000060" and found.step == 60
    assert torch.equal(dict(found.model())["weight"], torch.full((3,), 60.0))
    assert torch.equal(dict(found.optimizer())["weight.momentum"], torch.full((3,), -60.0))
    files = {file.name for file in found.path.iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json", "manifest.json"}
    assert set(json.loads((found.path / "manifest.json").read_text())["files"]) == files - {"manifest.json"}


def test_the_newest_two_and_the_best_are_kept(tmp_path):
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)]:
        saved(tmp_path, step, loss)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000004", "step-00000005"]
    assert best_path(tmp_path).name == "step-00000002"


def test_without_validation_the_newest_is_the_best(tmp_path):
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    assert best_path(tmp_path).name == "step-00000002"
    assert best_path(tmp_path / "nothing") is None


DAMAGES = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]),
}


@pytest.mark.parametrize("name", [*sorted(checkpoint.FILES), "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_by_name(tmp_path, name, damage):
    saved(tmp_path, 1)
    DAMAGES[damage](saved(tmp_path, 2) / name)
    warnings = []
    assert newest_checkpoint(tmp_path, warnings.append).step == 1
    assert len(warnings) == 1 and name in warnings[0] and "step-00000002" in warnings[0]
    saved(tmp_path, 3)  # what is damaged counts neither as one of the newest nor as the best
    saved(tmp_path, 4)
    assert [path.name for path in list_checkpoints(tmp_path)][-2:] == ["step-00000003", "step-00000004"]
    for path in list_checkpoints(tmp_path):
        DAMAGES[damage](path / name)
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        newest_checkpoint(tmp_path, warnings.append)


def test_the_last_whole_ones_outlive_damaged_newer_ones(tmp_path):
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").unlink()
    saved(tmp_path, 5)
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-0000000{step}" for step in (3, 4, 5)]


def test_a_manifest_can_not_lead_out_of_its_folder(tmp_path):
    path = saved(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../secret"] = "0"
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"names '../../secret', which is no file's name in its folder"):
        open_checkpoint(path)


def test_what_the_background_met_is_raised_by_the_next_call(tmp_path, monkeypatch):
    saver = checkpoint.Saver(tmp_path, lambda path: path.write_text("{}"))
    state = dict.fromkeys(checkpoint.STATE) | {"step": 1}
    weights = {"weight": torch.zeros(3)}
    saver.save(state, weights, {})
    weights["weight"] += 1  # training goes on
    saver.wait()
    assert torch.equal(dict(newest_checkpoint(tmp_path, print).model())["weight"], torch.zeros(3))
    monkeypatch.setattr(checkpoint, "write_json", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    saver.save(state | {"step": 2}, weights, {})
    for call in (saver.wait, saver.check, lambda: saver.save(state, weights, {})):
        with pytest.raises(OSError, match="No space left"):
            call()


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        saved(tmp_path, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert newest_checkpoint(tmp_path, print).step == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    saved(tmp_path, 1, 3.0)
    saved(tmp_path, 1, 2.0)
    assert newest_checkpoint(tmp_path, print).state["val_loss"] == 2.0
