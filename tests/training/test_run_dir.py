"""A run's folder: which checkpoints stay, what is verified when, and who may use it.

SEQUENCES=500 pytest -o addopts= tests/training/test_run_dir.py      more sequences in any order
"""

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import make_state
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.core.errors import UserError
from engine.training.checkpoint import open_checkpoint
from engine.training.run_dir import RunDir, checkpoints_by_loss, find_checkpoint, list_checkpoints


def save_tokenizer(path: Path) -> None:
    path.write_text("{}")


def raise_disk_full(path: Path) -> None:
    raise OSError(28, "No space left on device")


def save(run_dir: RunDir, step: int, val_loss: float | None = None, save_tokenizer=save_tokenizer):
    """Save a checkpoint and wait for it; return its path."""
    model = {"weight": torch.full((3,), float(step))}
    state = make_state(step, val_loss=val_loss)
    run_dir.save(state, model, {"weight.momentum": -model["weight"]}, save_tokenizer)
    run_dir.wait()
    return list_checkpoints(run_dir.path)[-1]


@pytest.fixture
def open_run_dir() -> Iterator[Callable[..., RunDir]]:
    """Opens run folders, and closes them at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(
            contextlib.closing(RunDir(*args, **kwargs))
        )


@pytest.fixture
def run_dir(open_run_dir, tmp_path) -> RunDir:
    return open_run_dir(tmp_path / "run")


def steps(run_dir: RunDir) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(run_dir.path)]


# Which checkpoints stay.


@pytest.mark.parametrize(
    ("keep", "expected"), [(1, [2, 6]), (2, [2, 5, 6]), (3, [2, 4, 5, 6]), (9, [1, 2, 3, 4, 5, 6])]
)
def test_the_newest_checkpoints_and_the_best_stay(open_run_dir, tmp_path, keep, expected):
    run_dir = open_run_dir(tmp_path, keep_checkpoints=keep)
    assert checkpoints_by_loss(tmp_path) == []
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5), (6, float("nan"))]:
        save(run_dir, step, loss)
    assert steps(run_dir) == expected
    assert find_checkpoint(tmp_path).step == 2
    assert run_dir.newest().step == 6


def test_without_validation_the_newest_checkpoint_is_the_best(run_dir):
    save(run_dir, 1)
    save(run_dir, 2)
    assert find_checkpoint(run_dir.path).step == 2


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_by_name_and_does_not_count_as_kept(run_dir, name, capsys):
    save(run_dir, 1)
    (save(run_dir, 2, 0.5) / name).write_bytes(b"")
    assert run_dir.newest().step == 1
    (skipped,) = capsys.readouterr().out.splitlines()
    assert name in skipped and "step-00000002" in skipped
    save(run_dir, 3, 2.0)
    assert steps(run_dir) == [1, 2, 3]  # two are complete
    save(run_dir, 4, 3.0)
    assert steps(run_dir)[-2:] == [3, 4] and 1 not in steps(run_dir)
    for path in list_checkpoints(run_dir.path):
        (path / name).write_bytes(b"")
    with pytest.raises(UserError, match="every checkpoint is corrupted"):
        run_dir.newest()


def test_a_changed_or_unverified_checkpoint_stays_until_two_are_newer(run_dir, open_run_dir):
    for step in (1, 2):
        save(run_dir, step)
    run_dir.close()
    resumed = open_run_dir(run_dir.path, resume=True)
    assert resumed.newest().step == 2
    weights = save(resumed, 3) / "model.safetensors"
    assert steps(resumed) == [2, 3]
    os.utime(weights, ns=(0, 0))
    save(resumed, 4)
    assert steps(resumed) == [2, 3, 4]  # 3 may be corrupted, so 2 is needed
    save(resumed, 5)
    assert steps(resumed) == [4, 5]


def test_steps_of_nine_digits_are_newer_than_those_of_eight(run_dir):
    for step in (99_999_980, 99_999_990, 100_000_000):
        save(run_dir, step)
    assert steps(run_dir) == [99_999_990, 100_000_000]


@pytest.mark.parametrize("target", ["moved", "missing", "a file"])
def test_a_link_to_a_checkpoint_is_pruned_without_following_it(run_dir, target):
    moved = save(run_dir, 1).rename(run_dir.path.parent / "moved")
    (run_dir.path.parent / "a file").write_text("")
    checkpoints = run_dir.path / "checkpoints"
    (checkpoints / "step-00000001").symlink_to(run_dir.path.parent / target)
    for step in (2, 3):
        save(run_dir, step)
    assert {path.name for path in checkpoints.iterdir()} == {"step-00000002", "step-00000003"}
    assert open_checkpoint(moved).verify().step == 1
    assert (run_dir.path.parent / "a file").exists()


# What is verified when.


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_the_optimizer_is_verified_to_resume_but_not_to_sample(run_dir, damage, capsys):
    save(run_dir, 1)
    damage(save(run_dir, 2) / "optimizer.safetensors")
    assert find_checkpoint(run_dir.path).step == 2
    assert run_dir.newest().step == 1
    assert "optimizer.safetensors" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "tokenizer.json"])
def test_the_next_best_checkpoint_is_found_if_the_best_is_damaged(run_dir, name, capsys):
    best = save(run_dir, 1, 0.5)
    for step, loss in ((2, 0.7), (3, 0.6)):
        save(run_dir, step, loss)
    (best / name).write_bytes(b"")
    assert find_checkpoint(run_dir.path).step == 3
    if name != "state.json":  # without its loss it is not the best
        warning = capsys.readouterr().err
        assert name in warning and "step-00000001" in warning and warning.count("\n") == 1


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


@pytest.mark.parametrize("call", ["wait", "check", "save"])
def test_an_error_of_the_background_is_raised_by_the_next_call(run_dir, call):
    save(run_dir, 1)
    run_dir.save(make_state(2), {}, {}, raise_disk_full)
    while not run_dir.pending.done():
        threading.Event().wait(0.01)
    with pytest.raises(OSError, match="No space left"):
        save(run_dir, 3) if call == "save" else getattr(run_dir, call)()
    assert [path.name for path in (run_dir.path / "checkpoints").iterdir()] == ["step-00000001"]


# Who may use it.


def test_a_run_folder_belongs_to_one_run_of_a_process_until_it_is_closed(open_run_dir, tmp_path):
    run_dir = RunDir(tmp_path)
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on "):
        RunDir(tmp_path)
    run_dir.close()
    open_run_dir(tmp_path).write_settings("steps = 1\n")
    assert (tmp_path / "config.toml").read_text() == "steps = 1\n"


def test_a_run_is_continued_only_if_resumed_or_restarted(run_dir, open_run_dir, monkeypatch):
    save(run_dir, 1)
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
    RunDir(tmp_path / "unused").close()
    assert not (tmp_path / "unused").exists()
    (tmp_path / "mine").mkdir()  # a folder that existed before
    RunDir(tmp_path / "mine").close()
    assert (tmp_path / "mine").is_dir()
    run_dir = RunDir(tmp_path / "used")
    run_dir.write_settings("steps = 1\n")
    run_dir.close()
    assert (tmp_path / "used" / "config.toml").is_file()


# In any order.


class AnyOrder(RuleBasedStateMachine):
    """Save, fail, be killed, resume, copy and damage in any order: nothing saved is lost."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run_dir = RunDir(self.folder)
        self.step = 0
        self.complete: set[int] = set()  # steps of the checkpoints that were saved, not damaged
        self.user_files: dict[Path, bytes] = {}

    def teardown(self):
        self.run_dir.close()
        shutil.rmtree(self.folder)

    def complete_on_disk(self) -> list[Path]:
        paths = list_checkpoints(self.folder)
        return [path for path in paths if int(path.name.removeprefix("step-")) in self.complete]

    @rule(loss=st.sampled_from([None, 1.0, 2.0, 3.0]))
    def save(self, loss):
        self.step += 1
        save(self.run_dir, self.step, loss)
        self.complete.add(self.step)

    @rule()
    def fail_to_save(self):
        with pytest.raises(OSError, match="No space left"):
            save(self.run_dir, self.step + 1, 0.0, raise_disk_full)

    @rule(name=st.sampled_from(["partial.a", "shards.partial.b", "partial.old"]))
    def be_killed_in_a_save(self, name):
        self.run_dir.wait()  # or pruning in the background may remove the folder as it is made
        partial = self.folder / "checkpoints" / f".step-{self.step + 1:08d}.{name}"
        partial.mkdir(parents=True, exist_ok=True)
        (partial / "model.safetensors").write_bytes(b"half")

    @rule()
    def resume(self):
        self.run_dir.close()
        self.run_dir = RunDir(self.folder, resume=True)
        checkpoint = self.run_dir.newest() if self.complete else None
        self.step = checkpoint.step if checkpoint else 0

    @precondition(lambda self: self.complete)
    @rule(name=st.sampled_from(["step-best", "step-00000001.keep", ".mine"]))
    def copy_a_checkpoint(self, name):
        target = self.folder / "checkpoints" / name
        if not target.exists():
            shutil.copytree(self.complete_on_disk()[-1], target)
            self.user_files |= {path: path.read_bytes() for path in target.iterdir()}

    @precondition(lambda self: len(self.complete_on_disk()) > 1)
    @rule(name=st.sampled_from(["model.safetensors", "state.json", "manifest.json"]))
    def damage_the_newest(self, name):
        newest = self.complete_on_disk()[-1]
        content = bytearray((newest / name).read_bytes())
        content[len(content) // 2] ^= 1
        (newest / name).write_bytes(content)
        os.utime(newest / name, ns=(0, 0))  # a clock tick may be longer than the test's step
        self.complete.remove(int(newest.name.removeprefix("step-")))

    @precondition(lambda self: self.complete)
    @rule()
    def sample(self):
        assert find_checkpoint(self.folder).step in self.complete

    @invariant()
    def no_file_of_the_user_is_lost(self):
        assert all(path.read_bytes() == content for path, content in self.user_files.items())

    @invariant()
    def the_newest_complete_checkpoint_is_on_disk(self):
        if self.complete:
            newest = open_checkpoint(self.complete_on_disk()[-1]).verify()
            assert newest.step == max(self.complete)


def test_in_any_order_no_saved_checkpoint_and_no_file_of_the_user_is_lost():
    options = settings(
        max_examples=int(os.environ.get("SEQUENCES", 20)),
        stateful_step_count=15,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(AnyOrder, settings=options)
