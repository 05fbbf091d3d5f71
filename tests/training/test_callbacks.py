"""Callbacks: when they are called, metrics and spikes, the terminal, Weights & Biases."""

import json
import math
import re
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import logged, tiny, train_tiny

import sample
import train
from engine.core.errors import UserError
from engine.core.settings import load_settings
from engine.data.dataset import open_dataset
from engine.training.budget import Clock
from engine.training.callbacks import SPIKE_Z_SCORE, MetricsFile, Terminal, print_summary
from engine.training.config import TrainConfig
from engine.training.trainer import Callback, Trainer
from prepare import PrepareConfig, prepare


class Diary(Callback):
    """Notes each call, with the step and the progress of the run."""

    def __init__(self):
        self.entries: list[tuple] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.entries.append(("start", trainer.step))

    def on_step(self, trainer: Trainer) -> None:
        self.entries.append(("step", trainer.step, trainer.budget.progress))

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        kind = "train_loss" if "train_loss" in record else "val_loss"
        self.entries.append((kind, record["step"]))

    def on_train_end(self, trainer: Trainer) -> None:
        self.entries.append(("end",))


class Spoiling(Callback):
    """Multiplies the training loss of one step."""

    def __init__(self, step: int, factor: float):
        self.step = step
        self.factor = factor

    def on_train_start(self, trainer: Trainer) -> None:
        def spoil(model: torch.nn.Module, inputs: tuple, loss: torch.Tensor) -> torch.Tensor:
            return loss * self.factor if model.training and trainer.step + 1 == self.step else loss

        trainer.model.register_forward_hook(spoil)


def train_with(callbacks: list[Callback], numbers: Path, out: Path, *flags: object) -> Trainer:
    return train.train(load_settings(TrainConfig, tiny(numbers, out, *flags)), callbacks=callbacks)


def test_callbacks_are_called_in_order_and_know_the_progress(numbers, tmp_path):
    diary = Diary()
    flags = ["--log-every", 2, "--eval-every", 3]
    train_with([diary], numbers, tmp_path, "--steps", 4, *flags)
    steps = [("start", 0), ("step", 1, 0.25), ("step", 2, 0.5), ("train_loss", 2)]
    steps += [("step", 3, 0.75), ("val_loss", 3), ("step", 4, 1), ("train_loss", 4)]
    assert diary.entries == [*steps, ("val_loss", 4), ("end",)]  # the last step is always recorded
    diary = Diary()
    train_with([diary], numbers, tmp_path, "--steps", 5, *flags, "--resume")
    assert diary.entries[:2] == [("start", 4), ("step", 5, 1)]


def test_callbacks_of_a_run_that_never_started_are_closed(numbers, tmp_path):
    train_with([], numbers, tmp_path, "--steps", 1)
    callbacks = [Diary(), MetricsFile(), Terminal()]
    with pytest.raises(UserError, match="seed"):
        train_with(callbacks, numbers, tmp_path, "--steps", 2, "--resume", "--seed", 9)
    assert callbacks[0].entries == [("end",)]


# metrics.jsonl.


def test_a_loss_spike_is_reported_and_scored(numbers, tmp_path, capsys):
    flags = ["--steps", 55, "--eval-every", 100, "--learning-rate", 1e-3]
    train_with([Spoiling(50, 5.0), MetricsFile()], numbers, tmp_path, *flags)
    scores = logged(tmp_path, "loss_z_score")
    assert [step for step, score in scores.items() if score > SPIKE_Z_SCORE] == [50]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "spike" in line]
    assert f"{logged(tmp_path, 'train_loss')[50]:.4f}" in line


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null_and_counted_and_training_continues(
    numbers, tmp_path, capsys, factor
):
    callbacks = [Spoiling(2, factor), MetricsFile(), Terminal()]
    print_summary(train_with(callbacks, numbers, tmp_path, "--steps", 6, "--eval-every", 3))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    losses = logged(tmp_path, "train_loss")
    assert losses.pop(2) is None and all(loss > 0 for loss in losses.values())
    assert logged(tmp_path, "skipped_steps") == {1: 0} | dict.fromkeys(range(2, 7), 1)
    output = capsys.readouterr().out
    assert "step      2  skipped 1 step with" in output and "6 steps (1 skipped" in output


def test_a_callback_that_fails_again_and_again_warns_once(numbers, tmp_path, capsys):
    class Failing(Callback):
        def on_record(self, trainer: Trainer, record: dict) -> None:
            raise OSError("no space left")

    train_with([Failing(), MetricsFile()], numbers, tmp_path, "--steps", 6, "--eval-every", 2)
    (warning,) = capsys.readouterr().err.splitlines()
    assert "Failing" in warning and "no space left" in warning
    assert list(logged(tmp_path, "val_loss")) == [2, 4, 6]


def test_a_run_that_is_worse_than_guessing_says_so(numbers, tmp_path, capsys):
    for name, rate in (("learned", 0.01), ("diverged", 50)):
        run = train_with([], numbers, tmp_path / name, "--steps", 12, "--learning-rate", rate)
        print_summary(run)
        is_worse = run.val_loss > math.log(open_dataset(numbers).tokenizer.vocab_size)
        output = capsys.readouterr().out
        assert is_worse == (name == "diverged") == ("uniform" in output)


def test_a_finished_run_prints_existing_paths_and_a_command_that_works(numbers, tmp_path, capsys):
    out = tmp_path / "my run's $(id)"
    assert train.main(tiny(numbers, out, "--steps", 1)) == 0
    output = capsys.readouterr().out
    assert "1 step," in output and "\n1 step in " in output
    paths = [shlex.split(path) for path in re.findall(r"^(?:Report|Best .*): (.*)$", output, re.M)]
    assert paths == [[str(out / "report.html")], [str(out / "checkpoints" / "step-00000001")]]
    python, script, *arguments = shlex.split(output.splitlines()[-1].partition(": ")[2])
    assert (python, script) == ("python", "sample.py")
    sample.main([*arguments, "--max-new-tokens", "2", "--device", "cpu"])
    assert capsys.readouterr().out


def make_metrics(path: Path, first_step: int) -> MetricsFile:
    """Return the metrics of a run at path that continues after first_step."""
    metrics = MetricsFile()
    metrics.on_train_start(SimpleNamespace(step=first_step, config=SimpleNamespace(out=path)))
    return metrics


def add(metrics: MetricsFile, step: int, loss: float) -> None:
    metrics.on_record(SimpleNamespace(step=step), {"step": step, "train_loss": loss})


def test_every_record_is_a_line_of_json_at_once(tmp_path):
    metrics = make_metrics(tmp_path, 0)
    for step in (1, 2, 3):
        add(metrics, step, 2.5)
        last_line = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(last_line) == {"step": step, "train_loss": 2.5, "loss_z_score": 0.0}


LINES = [json.dumps({"step": step, "train_loss": 3.0 - step}) + "\n" for step in (1, 2, 3)]
CORRUPTED = ["", " ", "torn", "{}", "[1]", "7", '{"step": "1"}', "[" * 9999]
CORRUPTED += ['{"step": true}', '{"step": 1, "text": "\\ud800"}', '{"step": 1, "train_loss": "2"}']
CORRUPTED += ['{"step": 1, "val_loss": [2]}', '{"step": 1, "val_loss": true}']


def test_records_of_repeated_steps_and_corrupted_lines_are_removed_atomically(tmp_path):
    path = tmp_path / "metrics.jsonl"
    old_content = "".join([*LINES, *(f"{line}\n" for line in CORRUPTED), '{"step": 4, "tra'])
    path.write_text(old_content)
    with open(path, encoding="utf-8") as reader:  # who has it open sees all of it
        metrics = make_metrics(tmp_path, 2)
        assert reader.read() == old_content
    add(metrics, 3, 0.5)
    assert logged(tmp_path, "train_loss") == {1: 2.0, 2: 1.0, 3: 0.5}
    assert [record["step"] for record in metrics.records] == [1, 2, 3]
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl", "metrics.damaged"}
    assert (tmp_path / "metrics.damaged").read_text() == old_content


@pytest.mark.parametrize("first_step", [3, 10])
def test_metrics_are_not_rewritten_without_a_reason(tmp_path, first_step):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(LINES))
    before = path.stat()
    make_metrics(tmp_path, first_step)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_z_score_counts_deviations_from_the_recent_losses_that_are_finite(tmp_path):
    metrics = make_metrics(tmp_path, 0)
    losses = [2.0 + step % 2 if step % 5 else math.nan for step in range(40)]
    for step, loss in enumerate([50.0] * 160 + losses):
        add(metrics, step, loss)
        if step == 18:
            assert metrics.loss_z_score(1e6) == 0.0  # too few to compare with
    finite = torch.tensor([loss for loss in losses if math.isfinite(loss)])
    expected = pytest.approx((4 - finite.mean().item()) / finite.std().item())
    assert metrics.loss_z_score(4.0) == expected
    assert metrics.loss_z_score(math.nan) == metrics.loss_z_score(math.inf) == 0.0
    metrics.records += [{"val_loss": 9.0}] * 9  # evaluations do not count
    assert metrics.loss_z_score(4.0) == expected


# The terminal.


def test_the_terminal_describes_the_run_and_each_evaluation(numbers, tmp_path, capsys):
    callbacks = [Terminal(), MetricsFile()]
    train_with(callbacks, numbers, tmp_path, "--steps", 4, "--eval-every", 2)
    output, errors = capsys.readouterr()
    assert not errors  # no progress bar without a terminal
    data, model, run, *evaluations = output.splitlines()
    dataset = open_dataset(numbers)
    for text in (numbers, f"{len(dataset.train):,}", f"{len(dataset.val):,}", "char"):
        assert str(text) in data
    assert model == "model  8,928 parameters: 2 layers, 2 heads, d_model 16, context 16"
    assert run.startswith("run    4 steps") and run.endswith(f"→ {tmp_path}")
    for step, line in zip((2, 4), evaluations, strict=True):
        assert line.startswith(f"step      {step}  validation loss ")
        for key in ("val_loss", "val_bits_per_byte"):
            assert f"{logged(tmp_path, key)[step]:.4f}" in line


def test_on_a_terminal_the_bar_shows_step_loss_and_speed(numbers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train_with([Terminal()], numbers, tmp_path, "--steps", 3)
    errors = capsys.readouterr().err
    assert "step 3/3 |" in errors and "loss " in errors and "tokens/s" in errors


def test_a_model_that_diverged_ends_without_a_sample(numbers, tmp_path, capsys):
    run = train_with([], numbers, tmp_path, "--steps", 1)
    with torch.no_grad():
        run.model.token_embedding.weight.fill_(math.nan)
    print_summary(run)
    assert "none: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environment", "warns"),
    [
        ({}, False),
        ({"TORCHELASTIC_RUN_ID": "none"}, True),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1e6"}, False),
    ],
    ids=["alone", "torchrun", "a longer limit"],
)
def test_a_save_longer_than_torchrun_waits_is_announced(
    numbers, tmp_path, monkeypatch, capsys, environment, warns
):
    monkeypatch.setattr("engine.training.trainer.CHECKPOINT_BYTES_PER_SECOND", 1000)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    train_with([Terminal()], numbers, tmp_path, "--steps", 1)
    assert ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in capsys.readouterr().out) == warns


# The clock.


def test_speed_excludes_pauses_and_elapsed_time_continues_after_a_resume(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    clock = Clock(elapsed=30.0, step=10)
    now += 2
    assert clock.steps_per_second(14) == 2
    now += 1
    with clock.pause():
        now += 100
    now += 1
    assert clock.steps_per_second(20) == 3
    assert clock.elapsed == 134  # a pause counts here


def test_evaluations_do_not_reduce_the_speed(numbers, tmp_path):
    class Slow(Callback):
        def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
            if "val_loss" in record and trainer.step == 2:
                time.sleep(1)

    train_with([MetricsFile(), Slow()], numbers, tmp_path, "--steps", 3, "--eval-every", 2)
    assert logged(tmp_path, "tokens_per_second")[3] > 64 / 0.9  # a step has 64 tokens


# Weights & Biases.


def test_weights_and_biases_is_imported_only_with_its_flag(numbers, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it is an error now
    assert train.main(tiny(numbers, tmp_path / "without", "--steps", 1)) == 0
    assert not capsys.readouterr().err
    assert train.main(tiny(numbers, tmp_path / "with", "--steps", 3, "--wandb")) == 0
    (warning,) = capsys.readouterr().err.splitlines()
    assert "ModuleNotFoundError" in warning


def test_weights_and_biases_gets_settings_and_every_record_of_one_run(
    numbers, tmp_path, monkeypatch
):
    class FakeRun:
        def __init__(self, **options: Any):
            self.options = options
            self.records: list[dict[str, Any]] = []
            runs.append(self)

        def log(self, record: dict[str, Any], step: int) -> None:
            assert record["step"] == step
            self.records.append(record)

        def finish(self) -> None:
            self.is_finished = True

    runs: list[FakeRun] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=FakeRun))
    out = tmp_path / "run"
    flags = ["--eval-every", 2, "--wandb", "--learning-rate", 0.003]
    for more in (["--steps", 4], ["--steps", 6, "--resume"]):
        assert train.main(tiny(numbers, out, *more, *flags)) == 0
    first, second = runs
    assert first.is_finished and second.is_finished
    assert first.options["id"] == second.options["id"] == (out / "wandb.id").read_text()
    assert first.options["config"]["learning_rate"] == 0.003
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert first.records + second.records == records


def test_weights_and_biases_accepts_the_run(numbers, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert train.main(tiny(numbers, tmp_path / "run", "--steps", 2, "--wandb")) == 0
    (folder,) = (tmp_path / "run").glob("wandb/offline-run-*")
    assert folder.name.endswith((tmp_path / "run" / "wandb.id").read_text())


@pytest.mark.parametrize("cut", [False, True])
def test_examples_that_are_cut_and_left_out_are_counted_apart(cut: bool, tmp_path: Path, capsys):
    """Of every four pairs one fits, two have a long completion, and one a long prompt."""
    lengths = [(2, 2), (2, 40), (3, 40), (40, 2)] * 25
    rows = [{"p": "?" * p + str(n), "c": "!" * c} for n, (p, c) in enumerate(lengths)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    fields = {"prompt_field": ("p",), "completion_field": "c"}
    prepare(PrepareConfig((str(path),), tokenizer="byte", out=tmp_path / "data", **fields))
    flags = ["--steps", 1, "--long-examples", "cut" if cut else "leave_out"]
    train_tiny(tmp_path / "data", tmp_path / "run", *flags, callbacks=[Terminal()])
    output = capsys.readouterr().out
    assert ("50 cut, 25 left out" if cut else "75 left out") in output
    assert (" cut" in output) == cut
