"""A run's folder: which checkpoints stay, what is verified when, who holds it, and its metrics."""

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.training.checkpoint import STATE, open_checkpoint
from engine.training.run_dir import RunDir, checkpoints_by_loss, list_checkpoints


def save_tokenizer(path: Path) -> None:
    path.write_text("{}")


def save(folder: RunDir, step: int, val_loss: float | None = None, save_tokenizer=save_tokenizer) -> Path:
    """A checkpoint of that step, on the disk."""
    model = {"weight": torch.full((3,), float(step))}
    state = dict.fromkeys(STATE) | {"step": step, "val_loss": val_loss}
    folder.save(state, model, {"weight.momentum": -model["weight"]}, save_tokenizer)
    folder.wait()
    return list_checkpoints(folder.path)[-1]


@pytest.fixture
def open_folder() -> Iterator[Callable[..., RunDir]]:
    """Opens run folders, and closes them in the end."""
    with contextlib.ExitStack() as opened:
        yield lambda *arguments: opened.enter_context(contextlib.closing(RunDir(*arguments)))


@pytest.fixture
def folder(open_folder, tmp_path) -> RunDir:
    return open_folder(tmp_path / "run")


def steps(folder: RunDir) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder.path)]


# Which checkpoints stay.


def test_the_newest_two_and_the_best_are_kept(folder):
    assert checkpoints_by_loss(folder.path) == []
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)]:
        save(folder, step, loss)
    assert steps(folder) == [2, 4, 5]
    assert checkpoints_by_loss(folder.path)[0].name == "step-00000002"
    assert folder.newest(pytest.fail).step == 5


def test_without_validation_the_newest_is_the_best(folder):
    save(folder, 1)
    save(folder, 2)
    assert checkpoints_by_loss(folder.path)[0].name == "step-00000002"


def test_a_loss_that_is_not_finite_is_never_the_best(folder):
    for step, loss in [(1, float("nan")), (2, 5.0), (3, float("inf")), (4, float("nan"))]:
        save(folder, step, loss)
    assert checkpoints_by_loss(folder.path)[0].name == "step-00000002"


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_skipped_by_name_and_does_not_count_as_one_of_those_kept(folder, name):
    save(folder, 1)
    (save(folder, 2, 0.5) / name).write_bytes(b"")
    warnings = []
    assert folder.newest(warnings.append).step == 1
    assert len(warnings) == 1 and name in warnings[0] and "step-00000002" in warnings[0]
    save(folder, 3, 2.0)
    assert steps(folder) == [1, 2, 3]  # only two of them are whole
    save(folder, 4, 3.0)
    assert steps(folder)[-2:] == [3, 4] and 1 not in steps(folder)
    for path in list_checkpoints(folder.path):
        (path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged; remove the folder to start again"):
        folder.newest(warnings.append)


def test_the_last_whole_ones_outlive_damaged_newer_ones(folder):
    for step in (1, 2, 3):
        save(folder, step)
    (save(folder, 4) / "state.json").unlink()
    save(folder, 5)
    assert steps(folder) == [3, 4, 5]


def test_what_a_kill_left_of_a_save_is_gone_after_a_resume(folder, open_folder):
    save(folder, 1)
    old = Path(shutil.copytree(list_checkpoints(folder.path)[0], folder.path / "old"))
    for step in (2, 3):
        save(folder, step)
    folder.close()
    old.rename(folder.path / "checkpoints" / "step-00000001")  # killed before it was pruned, ...
    (folder.path / "checkpoints" / ".step-00000004.partial.abc").mkdir()  # ... and while a checkpoint was written
    resumed = open_folder(folder.path, True)
    assert resumed.newest(pytest.fail).step == 3
    save(resumed, 5)
    assert {path.name for path in (folder.path / "checkpoints").iterdir()} == {"step-00000003", "step-00000005"}


def test_checkpoints_that_are_not_to_be_resumed_are_not_overwritten(folder, open_folder):
    save(folder, 1)
    folder.close()
    with pytest.raises(ValueError, match=r"already holds checkpoints; go on with --resume, or choose another --out"):
        RunDir(folder.path)
    assert open_folder(folder.path, True).newest(pytest.fail).step == 1


# What is verified when.

opened: list[str] | None = None  # the files, while somebody looks


def note(event: str, arguments: tuple) -> None:
    if opened is not None and event == "open":
        opened.append(str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def watch_files():
    sys.addaudithook(note)  # for good: Python knows no way to take it back


@contextlib.contextmanager
def verified() -> Iterator[list[int]]:
    """The steps of those checkpoints whose weights are read within, but for one that is just being written."""
    global opened
    steps, opened = [], []
    try:
        yield steps
    finally:
        read, opened = [Path(path) for path in opened if Path(path).name == "model.safetensors"], None
    steps += [int(path.parent.name.removeprefix("step-")) for path in read if path.parent.name.startswith("step-")]


def test_a_save_reads_no_known_checkpoint_again(folder):
    for step in range(1, 6):
        with verified() as read:
            save(folder, step, 1 / step)
        assert read == []


def test_a_resumed_run_verifies_what_it_finds_once(folder, open_folder):
    for step in (1, 2, 3):
        save(folder, step)
    folder.close()
    resumed = open_folder(folder.path, True)
    with verified() as read:
        resumed.newest(pytest.fail)
        save(resumed, 4)
        save(resumed, 5)
    assert sorted(read) == sorted(set(read)) and 3 in read


def test_a_checkpoint_that_was_touched_or_not_verified_is_kept_until_two_are_newer_and_not_read(folder, open_folder):
    for step in (1, 2):
        save(folder, step)
    folder.close()
    resumed = open_folder(folder.path, True)
    with verified() as read:
        assert resumed.newest(pytest.fail).step == 2
        weights = save(resumed, 3) / "model.safetensors"
        assert steps(resumed) == [2, 3]
        os.utime(weights, ns=(0, 0))
        save(resumed, 4)
        assert steps(resumed) == [2, 3, 4]  # 3 may be damaged: 2 is needed
        save(resumed, 5)
    assert steps(resumed) == [4, 5] and read == [2]
    resumed.close()
    for name in ("model.safetensors", "state.json"):
        (list_checkpoints(folder.path)[0] / name).write_bytes(b"")
    last = open_folder(folder.path, True)
    assert last.newest(pytest.fail).step == 5
    with verified() as read:
        save(last, 6)
    assert steps(last) == [5, 6] and read == []


# Written in the background.


def test_training_goes_on_while_a_checkpoint_is_written_of_the_state_as_it_was(folder):
    weights, written = {"weight": torch.zeros(3)}, threading.Event()

    def slow(path: Path) -> None:
        assert written.wait(60)
        save_tokenizer(path)

    folder.save(dict.fromkeys(STATE) | {"step": 1}, weights, {}, slow)
    weights["weight"] += 1
    folder.check()
    assert steps(folder) == []
    written.set()
    folder.wait()
    assert torch.equal(dict(folder.newest(pytest.fail).model())["weight"], torch.zeros(3))


def test_what_the_background_met_is_raised_by_the_next_call(folder):
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    save(folder, 1)
    with pytest.raises(OSError, match="No space left"):
        save(folder, 2, save_tokenizer=full)
    for call in (folder.wait, folder.check, lambda: save(folder, 3)):
        with pytest.raises(OSError, match="No space left"):
            call()
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step-00000001"]


def test_closing_waits_for_what_is_being_written(folder):
    started = threading.Event()

    def slow(path: Path) -> None:
        started.set()
        save_tokenizer(path)

    folder.save(dict.fromkeys(STATE) | {"step": 1}, {"weight": torch.zeros(3)}, {}, slow)
    assert started.wait(60)
    folder.close()
    assert open_checkpoint(list_checkpoints(folder.path)[0]).step == 1


# Who holds it.

HOLD = "import sys; from pathlib import Path; from engine.core.files import lock"
HOLD += "; held = lock(Path(sys.argv[1]) / '.lock', Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_folder_belongs_to_one_process_until_it_dies(open_folder, tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        refusal = rf"{tmp_path} is in use by process {process.pid} on .*; wait for it, or choose another --out"
        for _ in range(2):  # being refused changes nothing
            with pytest.raises(ValueError, match=refusal):
                RunDir(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    open_folder(tmp_path)


def test_a_folder_belongs_to_one_run_of_a_process_until_it_is_closed(open_folder, tmp_path):
    folder = RunDir(tmp_path)
    with pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on "):
        RunDir(tmp_path)
    folder.close()
    open_folder(tmp_path).write_settings("steps = 1\n")
    assert (tmp_path / "config.toml").read_text() == "steps = 1\n"


# Whose it is.


def test_steps_of_nine_digits_are_newer_than_those_of_eight(folder):
    for step in (99_999_980, 99_999_990, 100_000_000):
        save(folder, step)
    assert steps(folder) == [99_999_990, 100_000_000] and folder.newest(pytest.fail).step == 100_000_000


@pytest.mark.parametrize("name", ["step-00000001.keep", "step-best", "step-1", "mine", ".mine", ".step-00000009.keep"])
def test_copies_by_other_names_are_the_users(folder, name):
    kept = shutil.copytree(save(folder, 1), folder.path / "checkpoints" / name)
    for step in (2, 3, 4):
        save(folder, step)
    assert open_checkpoint(kept).step == 1
    assert steps(folder) == [3, 4] and folder.newest(pytest.fail).step == 4


def test_what_a_kill_left_of_any_step_is_removed(folder):
    left = folder.path / "checkpoints" / ".step-00000001.partial.x"
    left.mkdir(parents=True)
    save(folder, 2)
    assert not left.exists()


def test_processes_that_are_started_again_resume_and_those_of_another_launch_do_not(open_folder, tmp_path):
    def launched(launch: str) -> DistributedContext:
        return dataclasses.replace(SINGLE_PROCESS, launch=launch)

    first = open_folder(tmp_path, False, launched("1 on here"))
    save(first, 1)
    first.close()
    open_folder(tmp_path, False, launched("1 on here")).close()
    for launch in ("2 on here", ""):
        for _ in range(2):  # and again, when torchrun starts what was refused once more
            with pytest.raises(ValueError, match="already holds checkpoints; go on with --resume"):
                RunDir(tmp_path, False, launched(launch))
    open_folder(tmp_path, True, launched("2 on here")).close()
    open_folder(tmp_path, False, launched("2 on here")).close()
