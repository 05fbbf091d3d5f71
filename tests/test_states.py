"""Prepare, train, kill, resume, copy, damage, prune and sample in any order: what is said to be there stays there.

SEQUENCES=500 pytest -o addopts= tests/test_states.py      as many sequences
"""

import collections
import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from helpers import exit_code_of, numbers_text
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file
from soak import Executioner, ended, forked

import prepare
import sample
import train
from engine.core.settings import load_settings
from engine.report import page as report_page
from engine.training import callbacks as observers
from engine.training.checkpoint import Checkpoint, open_checkpoint
from engine.training.run_dir import list_checkpoints

SEQUENCES = int(os.environ.get("SEQUENCES", 9))
# Of a schedule that does not look at its end, so that the weights follow from the text and the step alone.
SHAPE = "--num-layers 1 --num-heads 2 --d-model 8 --context-length 8 --batch-size 2 --dropout 0.1 --decay inverse_sqrt"
SHAPE = [*SHAPE.split(), "--eval-every", "1000000", "--eval-tokens", "30", "--save-every", "2", "--device", "cpu"]
SHAPE += ["--warmup-steps", "0", "--log-every", "1"]
NAMES, RUNS, TEXTS = st.sampled_from("aab"), st.sampled_from("rrs"), st.sampled_from([30, 60])
happened: collections.Counter = collections.Counter()  # what came up
known: dict[tuple[int, int], dict] = {}  # weights after so many steps on a text, of a run that nothing happened to


def called(main: Callable, *arguments: object) -> tuple[int, str, str]:
    """The exit code of a command run in this process, and what it printed; a mistake is one line."""
    printed, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = exit_code_of(lambda: main([*map(str, arguments)]))
        sys.stdout.flush(), sys.stderr.flush()
    said, told = (stream.buffer.getvalue().decode() for stream in (printed, errors))
    assert code in (0, 1) and (code == 0 or told.splitlines()[-1].startswith("error: ")), told
    return code, said, told


def newest_whole(run: Path) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole."""
    for path in reversed(list_checkpoints(run)):
        with contextlib.suppress(ValueError):
            return open_checkpoint(path)
    return None


def weights(text: int, step: int, folder: Path) -> dict:
    """What training without any accident leaves."""
    if (text, step) not in known:
        place = folder / f"reference {text} {step}"
        (place.with_suffix(".txt")).write_text(numbers_text(text))
        assert called(prepare.main, place.with_suffix(".txt"), "--tokenizer", "char", "--out", place / "data")[0] == 0
        flags = [*SHAPE, "--data", place / "data", "--out", place / "run", "--steps", step]
        train.train(load_settings(train.TrainConfig, [*map(str, flags)]))
        known[text, step] = load_file(newest_whole(place / "run").path / "model.safetensors")
        shutil.rmtree(place)
    return known[text, step]


class Accidents(RuleBasedStateMachine):
    """A folder in which a user works, and what must be true of it."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.users: dict[Path, bytes] = {}  # files of the user's own
        self.made: dict[str, int] = {}  # text of each dataset that a command said it made
        self.saved: dict[str, tuple[int, int]] = {}  # text, and the newest step that a command said it saved, of runs
        for text in (30, 60):
            self.own(self.folder / f"{text}.txt", numbers_text(text).encode())

    def teardown(self):
        shutil.rmtree(self.folder)

    def own(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.users[path] = content

    def data(self, name: str) -> Path:
        return self.folder / "data" / name

    def run_folder(self, name: str) -> Path:
        return self.folder / "out" / name

    def preparing(self, name: str, text: int, force: bool) -> list:
        return [self.folder / f"{text}.txt", "--tokenizer", "char", "--out", self.data(name), *["--force"] * force]

    def training(self, run: str, name: str, more: int, resume: bool) -> tuple[list, int]:
        done = self.saved.get(run, (0, 0))[1] if resume else 0
        flags = [*SHAPE, "--data", self.data(name), "--out", self.run_folder(run), "--steps", done + more]
        return [*flags, *["--resume"] * resume], done + more

    @initialize(text=TEXTS, steps=st.integers(0, 3))
    def begin(self, text, steps):
        self.prepare("a", text, False)
        if steps:
            self.train("r", "a", steps, False)

    @rule(name=NAMES, text=TEXTS, force=st.booleans())
    def prepare(self, name, text, force):
        code, *_ = called(prepare.main, *self.preparing(name, text, force))
        there = self.made.get(name)
        foreign = any(path.parent == self.data(name) for path in self.users)
        assert code == 0 or foreign or (there not in (None, text) and not force)
        happened[f"prepare {code}"] += 1
        if code == 0:
            self.made[name] = text

    @rule(run=RUNS, name=NAMES, more=st.integers(1, 5), resume=st.booleans())
    def train(self, run, name, more, resume):
        arguments, steps = self.training(run, name, more, resume)
        code, *_ = called(train.main, *arguments)
        text, before = self.saved.get(run, (None, 0))
        if text is not None and (not resume or self.made.get(name) != text):
            assert code == 1  # not asked to be resumed, or other text
        happened[f"train {code}{' resume' * resume}"] += 1
        if code == 0:
            self.saved[run] = self.made[name], steps
            found = newest_whole(self.run_folder(run))
            mine, expected = load_file(found.path / "model.safetensors"), weights(self.made[name], steps, self.folder)
            assert found.step == steps >= before and all(mine[key].equal(expected[key]) for key in expected)

    @rule(run=RUNS, name=NAMES, more=st.integers(1, 5), resume=st.booleans(), change=st.integers(1, 70))
    def kill_training(self, run, name, more, resume, change):
        arguments, _ = self.training(run, name, more, resume)
        self.killed(self.folder / "out", change, lambda: train.main([*map(str, arguments)]))
        self.learn(run, name)

    @rule(name=NAMES, text=TEXTS, force=st.booleans(), change=st.integers(1, 25))
    def kill_preparing(self, name, text, force, change):
        there = self.made.get(name)
        self.killed(self.folder / "data", change, lambda: prepare.main([*map(str, self.preparing(name, text, force))]))
        if (self.data(name) / "manifest.json").exists():  # then it is whole: what was there, or what was made
            made = [one for one in (30, 60) if called(prepare.main, *self.preparing(name, one, False))[0] == 0]
            foreign = any(path.parent == self.data(name) for path in self.users)
            assert foreign or (len(made) == 1 and made[0] in (there, text))
            self.made |= {name: made[0]} if made else {}
        else:
            assert there is None

    def killed(self, folder: Path, change: int, act: Callable) -> None:
        def until_then() -> int:
            Executioner(folder, change)
            return exit_code_of(act)

        code = ended(forked(self.folder / "log", until_then))
        assert code in (0, 1, -signal.SIGKILL)
        happened[f"killed {folder.name}"] += code < 0

    def learn(self, run: str, name: str) -> None:
        """After a kill: the newest checkpoint may be newer than what was said to be saved, never older."""
        if found := newest_whole(self.run_folder(run)):
            step = found.step
            text, before = self.saved.get(run, (self.made.get(name), 0))
            assert step >= before
            self.saved[run] = text, step

    @precondition(lambda self: self.saved)
    @rule(run=RUNS, name=st.sampled_from(["step-best", "step-00000001.keep", "mine", ".mine"]))
    def copy_a_checkpoint(self, run, name):
        target = self.run_folder(run) / "checkpoints" / name
        if run in self.saved and not target.exists():
            shutil.copytree(newest_whole(self.run_folder(run)).path, target)
            self.users |= {path: path.read_bytes() for path in target.iterdir()}

    @rule(place=st.sampled_from(["data/a", "data", "out/r", "out/r/checkpoints", "out"]))
    def leave_a_note(self, place):
        if (self.folder / place).exists():
            self.own(self.folder / place / "note.txt", b"mine")

    @precondition(lambda self: self.saved)
    @rule(run=RUNS, file=st.sampled_from(["model.safetensors", "state.json", "manifest.json", "optimizer.safetensors"]))
    def damage_the_newest(self, run, file):
        if run not in self.saved or len(list_checkpoints(self.run_folder(run))) < 2:
            return
        newest, before = list_checkpoints(self.run_folder(run))[:-3:-1]
        try:
            self.saved[run] = self.saved[run][0], open_checkpoint(before).step
        except ValueError:
            return  # one whole one is left to the run
        content = bytearray((newest / file).read_bytes())
        content[len(content) // 2] ^= 1
        (newest / file).write_bytes(content)
        happened["damage"] += 1

    @rule(run=RUNS, line=st.sampled_from([b"\n", b"{}\n", b"torn", b"\xff\n", b'{"step": "x"}\n']))
    def damage_the_metrics(self, run, line):
        if (self.run_folder(run) / "metrics.jsonl").exists():
            with open(self.run_folder(run) / "metrics.jsonl", "ab") as file:
                file.write(line)

    @precondition(lambda self: self.saved)
    @rule(run=RUNS)
    def sample(self, run):
        code, said, _ = called(sample.main, self.run_folder(run), "--max-new-tokens", 5, "--device", "cpu")
        assert (code == 0) == (run in self.saved) and (code or said)
        happened[f"sample {code}"] += 1

    @invariant()
    def nothing_of_the_users_is_gone(self):
        for path, content in self.users.items():
            assert path.read_bytes() == content, path

    @invariant()
    def what_was_said_to_be_saved_is_there(self):
        for run, (_, step) in self.saved.items():
            assert newest_whole(self.run_folder(run)).step >= step


def test_in_any_order_nothing_is_lost_and_every_answer_is_right(monkeypatch):
    monkeypatch.setattr(observers, "SAMPLE_TOKENS", 3)
    monkeypatch.setattr(report_page, "SAMPLE_TOKENS", 3)
    options = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
    run_state_machine_as_test(Accidents, settings=settings(max_examples=SEQUENCES, stateful_step_count=12, **options))
    assert all(happened[one] for one in ("killed out", "killed data", "train 0 resume", "train 1", "sample 0")), (
        happened
    )
