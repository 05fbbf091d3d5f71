"""Callbacks: when they are called, metrics, the terminal, Weights & Biases."""

import json
import math
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import Action, SpoilHead, logged, read_lines, same_tensors, tiny, train_tiny

import train
from engine.core.errors import UserError
from engine.data.dataset import open_dataset
from engine.runs.checkpoint import open_checkpoint
from engine.training.callbacks import MetricsFile, Terminal, WeightsAndBiases, print_summary
from engine.training.run_dir import RunDir
from engine.training.trainer import Callback, Trainer


class Diary(Callback):
    """Notes each call, with the step and the progress of the run."""

    def __init__(self):
        self.entries: list[tuple] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.entries.append(("start", trainer.step))

    def on_step(self, trainer: Trainer) -> None:
        self.entries.append(("step", trainer.step, trainer.budget.progress))

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        keys = {"train_loss", "val_loss"} & record.keys()
        self.entries += [(key, record["step"]) for key in keys]

    def on_train_end(self, trainer: Trainer) -> None:
        self.entries.append(("end",))


def test_callbacks_are_called_in_order_and_know_the_progress(numbers, tmp_path):
    diary = Diary()
    flags = ["--log-every", 2, "--eval-every", 3]
    train_tiny(numbers, tmp_path, "--steps", 4, *flags, callbacks=[diary])
    steps = [("start", 0), ("step", 1, 0.25), ("step", 2, 0.5), ("train_loss", 2)]
    steps += [("step", 3, 0.75), ("val_loss", 3), ("step", 4, 1), ("train_loss", 4)]
    assert diary.entries == [*steps, ("val_loss", 4), ("end",)]  # the last step is always recorded
    diary = Diary()
    train_tiny(numbers, tmp_path, "--steps", 5, *flags, "--resume", callbacks=[diary])
    assert diary.entries[:2] == [("start", 4), ("step", 5, 1)]


def test_a_refused_start_closes_callbacks_and_unlocks_the_directory(numbers, tmp_path):
    train_tiny(numbers, tmp_path, "--steps", 1)
    caught = []  # a notebook keeps the errors, and everything that they refer to
    for flags, entries in ((("--resume", "--seed", 9), [("end",)]), ((), [])):
        callbacks = [Diary(), Terminal()]
        with pytest.raises(UserError, match="seed" if flags else "--resume") as error:
            train_tiny(numbers, tmp_path, "--steps", 2, *flags, callbacks=callbacks)
        caught.append(error)
        assert callbacks[0].entries == entries
        RunDir(tmp_path, resume=True).close()


# metrics.jsonl.


def test_a_diverged_run_has_no_sample(numbers, tmp_path, capsys):
    run = train_tiny(numbers, tmp_path, "--steps", 2)
    with torch.no_grad():
        run.model.token_embedding.weight.fill_(math.nan)
    print_summary(run)
    assert "none: " in capsys.readouterr().out  # instead of a sample


def test_the_summary_is_that_of_the_checkpoint_that_is_used(numbers, tmp_path, capsys):
    flags = ["--steps", 6, "--eval-every", 3]
    run = train_tiny(numbers, tmp_path, *flags, callbacks=[SpoilHead(5, -1)])
    losses = logged(tmp_path, "val_loss")
    assert losses[3] < losses[6]
    capsys.readouterr()
    print_summary(run)
    output = capsys.readouterr().out
    for name, digits in (("val_loss", 4), ("val_perplexity", 2), ("val_bits_per_byte", 4)):
        assert f"{logged(tmp_path, name)[3]:.{digits}f}" in output
    assert "step 3" in output and f"{losses[6]:.4f}" in output
    best = dict(open_checkpoint(tmp_path / "checkpoints" / "step-00000003").model())
    assert same_tensors(run.model.state_dict(), best)  # the sample is of these weights


def test_records_of_repeated_steps_and_corrupted_lines_are_removed_atomically(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train_loss": 3.0 - step}) for step in (1, 2, 3)]
    lines += ["", "torn", "{}", "[1]", "[" * 9999, '{"step": true}', '{"step": 1, "val_loss": [2]}']
    old_content = "\n".join([*lines, '{"step": 1, "text": "\\ud800"}', '{"step": 4, "tra'])
    path.write_text(old_content)
    with open(path, encoding="utf-8") as reader:  # who has it open sees all of it
        metrics = MetricsFile()
        metrics.on_train_start(SimpleNamespace(step=2, config=SimpleNamespace(out=tmp_path)))
        assert reader.read() == old_content
    metrics.on_record(SimpleNamespace(step=3), {"step": 3, "train_loss": 0.5})
    assert logged(tmp_path, "train_loss") == {1: 2.0, 2: 1.0, 3: 0.5}
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl"}


# The terminal.


def test_the_terminal_describes_the_run_each_evaluation_and_saves_longer_than_torchrun_waits(
    numbers, tmp_path, monkeypatch, capsys
):
    flags = ["--steps", 4, "--eval-every", 2, "--learning-rate", 0.0031]
    train_tiny(numbers, tmp_path / "run", *flags, callbacks=[Terminal()])
    output, errors = capsys.readouterr()
    assert not errors  # no progress bar without a terminal
    data, model, run, *evaluations = output.splitlines()
    assert f"{len(open_dataset(numbers).train):,}" in data and "8,928 parameters" in model
    assert "4 steps" in run and "0.0031" in run and str(tmp_path / "run") in run
    for step, line in zip((2, 4), evaluations, strict=True):
        assert f"{logged(tmp_path / 'run', 'val_loss')[step]:.4f}" in line
    monkeypatch.setattr("engine.training.trainer.CHECKPOINT_BYTES_PER_SECOND", 1000)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train_tiny(numbers, tmp_path / "slow", *flags, callbacks=[Terminal()])
    output, errors = capsys.readouterr()
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in output
    assert "step 4/4 |" in errors and "loss " in errors and "tokens/s" in errors


# Weights & Biases.


def test_weights_and_biases_is_imported_only_with_its_flag(numbers, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it is an error now
    assert train.main(tiny(numbers, tmp_path / "without", "--steps", 1)) == 0
    with pytest.raises(ImportError):
        train.main(tiny(numbers, tmp_path / "with", "--steps", 1, "--wandb"))


def test_weights_and_biases_gets_settings_and_every_record_of_one_run(
    numbers, tmp_path, monkeypatch
):
    runs = []

    def init(**options: Any) -> SimpleNamespace:
        records = []
        ends = []
        run = SimpleNamespace(options=options, records=records, ends=ends)
        run.define_metric = lambda *names, **axes: records.append((*names, axes))
        run.log = lambda record: records.append(record)  # a step would drop repeated records
        run.finish = lambda exit_code: ends.append((len(records), exit_code))
        runs.append(run)
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    out = tmp_path / "run"
    flags = ["--eval-every", 2, "--learning-rate", 0.003]
    for more in (["--steps", 4], ["--steps", 6, "--resume"]):
        train_tiny(numbers, out, *more, *flags, callbacks=[WeightsAndBiases()])
    first, second = runs
    assert first.ends == [(len(first.records), 0)] and second.ends == [(len(second.records), 0)]
    assert first.records.pop(0) == second.records.pop(0) == ("*", {"step_metric": "step"})
    assert first.options["id"] == second.options["id"]
    assert first.options["config"]["learning_rate"] == 0.003
    assert first.records + second.records == read_lines(out / "metrics.jsonl")
    with pytest.raises(SystemExit):
        callbacks = [WeightsAndBiases(), Action(1, sys.exit)]
        train_tiny(numbers, tmp_path / "failed", "--steps", 2, callbacks=callbacks)
    assert runs[2].ends == [(1, 1)]
    shutil.copytree(out, tmp_path / "copy")
    resume = ["--steps", 6, "--resume", *flags]
    train_tiny(numbers, tmp_path / "copy", *resume, callbacks=[WeightsAndBiases()])
    assert runs.pop().options["id"] != first.options["id"]
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    train_tiny(numbers, tmp_path / "named", "--steps", 2, callbacks=[WeightsAndBiases()])
    assert {*first.options} - {*runs[3].options} == {"project"}


def test_weights_and_biases_accepts_the_run(numbers, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert train.main(tiny(numbers, tmp_path / "run", "--steps", 2, "--wandb")) == 0
    (folder,) = (tmp_path / "run").glob("wandb/offline-run-*")
    assert folder.name.endswith((tmp_path / "run" / "wandb.id").read_text().split()[0])
