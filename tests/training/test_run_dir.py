"""A run's folder: which checkpoints stay, what is verified when, and who may use it."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import make_state, save_tokenizer

from engine.core.errors import UserError
from engine.runs.checkpoint import open_checkpoint
from engine.runs.run_files import find_checkpoint, list_checkpoints, rank_checkpoints
from engine.training.run_dir import RunDir


def raise_disk_full(path: Path) -> None:
    raise OSError(28, "No space left on device")


def save(
    run_dir: RunDir,
    step: int,
    val_loss: float | None = None,
    save_tokenizer=save_tokenizer,
    **values: Any,
) -> Path:
    """Save a checkpoint and wait for it; return its path."""
    model = {"weight": torch.full((3,), float(step))}
    evaluation = None if val_loss is None else {"val_loss": val_loss}
    state = make_state(step, **{"evaluation": evaluation, **values})
    run_dir.save(state, model, {"weight.momentum": -model["weight"]}, save_tokenizer)
    run_dir.wait()
    return list_checkpoints(run_dir.path)[-1]


@pytest.fixture
def open_run_dir() -> Iterator[Callable[..., RunDir]]:
    """Opens run folders, and closes them at the end."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(closing(RunDir(*args, **kwargs)))


@pytest.fixture
def run_dir(open_run_dir, tmp_path) -> RunDir:
    return open_run_dir(tmp_path / "run")


def steps(run_dir: RunDir) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(run_dir.path)]


# Which checkpoints stay.


@pytest.mark.parametrize(("keep", "expected"), [(1, [2, 6]), (3, [2, 4, 5, 6])])
def test_the_newest_checkpoints_and_the_best_stay(open_run_dir, tmp_path, keep, expected):
    run_dir = open_run_dir(tmp_path, keep_checkpoints=keep)
    assert rank_checkpoints(tmp_path) == []
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5), (6, 9.0)]:
        save(run_dir, step, loss)
    assert steps(run_dir) == expected
    assert find_checkpoint(tmp_path).step == 2
    assert run_dir.newest().step == 6


def test_a_base_model_stays_until_its_mark_is_deleted(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.path.parent)
    base = open_checkpoint(save(run_dir, 1).relative_to(Path.cwd()))
    for name in ("first", "moved"):  # their folders may be anywhere
        reference = base.reference(Path(name))
    assert reference.path == str(run_dir.path / "checkpoints" / "step-00000001")
    for step in (1, 2, 3, 4):  # the first is written again, with its evaluation
        save(run_dir, step)
    assert steps(run_dir) == [1, 3, 4]
    mark = Path(f"{reference.path}.adapters.txt")
    assert mark.read_text().splitlines() == [f"{Path.cwd()}/first", f"{Path.cwd()}/moved"]
    mark.unlink()
    save(run_dir, 5)
    assert steps(run_dir) == [4, 5]


def test_the_best_checkpoint_has_the_lowest_loss_or_the_highest_score(run_dir):
    results = [(1, 1.0, 0.5), (2, 3.0, 0.9), (3, 2.0, 0.9), (4, 4.0, 0.9)]
    for best_by, expected in (("loss", 1), ("score", 3)):
        run_dir.write_settings(f'best_by = "{best_by}"')
        for step, loss, score in results:
            evaluation = {"step": step, "val_loss": loss, "val_score": score}
            settings = {"best_by": ["loss", "score"][step % 2]}  # those before a resume
            save(run_dir, step, evaluation=evaluation, settings=settings)
        assert find_checkpoint(run_dir.path).step == expected == run_dir.best().step
        assert steps(run_dir) == [expected, *(step for step in (3, 4) if step != expected)]
        shutil.rmtree(run_dir.path / "checkpoints")


def test_without_validation_the_newest_is_the_best_and_sampled_without_its_optimizer(run_dir):
    for step in (99_999_980, 99_999_990):
        save(run_dir, step)
    newest = save(run_dir, 100_000_000)  # of nine digits
    assert steps(run_dir) == [99_999_990, 100_000_000]
    (newest / "optimizer.safetensors").unlink()
    assert find_checkpoint(run_dir.path).step == 100_000_000
    assert run_dir.newest().step == 99_999_990


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_by_name_and_does_not_count_as_kept(run_dir, name, capsys):
    save(run_dir, 1)
    (save(run_dir, 2, 0.5) / name).write_bytes(b"")
    assert find_checkpoint(run_dir.path).step == run_dir.newest().step == 1
    for text in capsys.readouterr():
        assert name in text and "step-00000002" in text and text.count("\n") == 1
    save(run_dir, 3, 2.0)
    assert steps(run_dir) == [1, 2, 3]  # two are complete
    save(run_dir, 4, 3.0)
    assert steps(run_dir)[-2:] == [3, 4] and 1 not in steps(run_dir)
    for path in list_checkpoints(run_dir.path):
        (path / name).write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint is corrupted"):
        run_dir.newest()


def test_a_link_to_a_checkpoint_is_pruned_without_following_it(run_dir):
    moved = save(run_dir, 1).rename(run_dir.path.parent / "moved")
    checkpoints = run_dir.path / "checkpoints"
    (checkpoints / "step-00000001").symlink_to(moved)
    for step in (2, 3):
        save(run_dir, step)
    assert {path.name for path in checkpoints.iterdir()} == {"step-00000002", "step-00000003"}
    assert open_checkpoint(moved).verify().step == 1


def test_copies_of_the_user_stay_and_remains_of_a_killed_save_do_not(run_dir, open_run_dir):
    checkpoints = save(run_dir, 1).parent
    for name in ("step-best", "step-00000001.keep", ".mine"):
        shutil.copytree(checkpoints / "step-00000001", checkpoints / name)
    with pytest.raises(OSError, match="No space left"):
        save(run_dir, 2, 0.0, raise_disk_full)
    for name in ("partial.a", "shards.partial.b", "partial.old"):
        (checkpoints / f".step-00000002.{name}").mkdir()
    run_dir.close()
    resumed = open_run_dir(run_dir.path, resume=True)
    assert resumed.newest().step == 1
    for step in (2, 3):
        save(resumed, step)
    names = {"step-best", "step-00000001.keep", ".mine", "step-00000002", "step-00000003"}
    assert {path.name for path in checkpoints.iterdir()} == names


# Written in the background.


def test_training_continues_while_a_checkpoint_is_written_of_the_state_as_it_was(run_dir):
    weights = {"weight": torch.zeros(3)}
    may_write = threading.Event()

    def save_slowly(path: Path) -> None:
        assert may_write.wait(60)
        save_tokenizer(path)

    run_dir.save(make_state(1), weights, {}, save_slowly)
    weights["weight"] += 1
    run_dir.check()
    assert steps(run_dir) == []
    may_write.set()
    run_dir.wait()
    assert torch.equal(dict(run_dir.newest().model())["weight"], torch.zeros(3))


@pytest.mark.parametrize("call", ["check", "save"])
def test_an_error_of_the_background_is_raised_by_the_next_call(run_dir, call):
    save(run_dir, 1)
    run_dir.save(make_state(2), {}, {}, raise_disk_full)
    while not run_dir.pending.done():
        threading.Event().wait(0.01)
    with pytest.raises(OSError, match="No space left"):
        save(run_dir, 3) if call == "save" else run_dir.check()
    assert [path.name for path in (run_dir.path / "checkpoints").iterdir()] == ["step-00000001"]


# Who may use it.


def test_a_run_is_continued_only_if_resumed_or_restarted(run_dir, open_run_dir, monkeypatch):
    save(run_dir, 1)
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on "):
        RunDir(run_dir.path)
    run_dir.close()
    for _ in range(2):
        with pytest.raises(UserError, match=f"^{run_dir.path}: .*--resume"):
            RunDir(run_dir.path)
    RunDir(run_dir.path, True).close()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with pytest.raises(UserError, match="--resume"):
        RunDir(run_dir.path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert open_run_dir(run_dir.path).newest().step == 1


def test_a_new_run_folder_is_removed_if_nothing_was_written_to_it(tmp_path):
    (tmp_path / "mine").mkdir()  # a folder that existed before
    for name in ("unused", "mine"):
        RunDir(tmp_path / name).close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
