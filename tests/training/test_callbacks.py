"""Callbacks: when they are called, metrics and spikes, the lines on the terminal, Weights & Biases."""

import functools
import json
import math
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import logged, tiny

import train
from engine.core.errors import UserError
from engine.core.settings import load_settings
from engine.data.dataset import open_dataset
from engine.training.budget import Clock
from engine.training.callbacks import SPIKE_Z_SCORE, MetricsFile, Terminal, print_summary
from engine.training.config import TrainConfig
from engine.training.trainer import Callback, Trainer


class Diary(Callback):
    """Remembers what it was told."""

    def __init__(self):
        self.entries: list[tuple] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.entries.append(("started", trainer.step))

    def on_step(self, trainer: Trainer) -> None:
        self.entries.append(("stepped", trainer.step))

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        self.entries.append(("recorded", record["step"], "train_loss" if "train_loss" in record else "val_loss"))

    def on_train_end(self, trainer: Trainer) -> None:
        self.entries.append(("closed",))


class Spoiling(Callback):
    """Multiplies the training loss of one step."""

    def __init__(self, step: int, factor: float):
        self.step, self.factor = step, factor

    def on_train_start(self, trainer: Trainer) -> None:
        def spoil(model: torch.nn.Module, inputs: tuple, loss: torch.Tensor) -> torch.Tensor:
            return loss * self.factor if model.training and trainer.step + 1 == self.step else loss

        trainer.model.register_forward_hook(spoil)


def observed(numbers: Path, out: Path, *flags: object, callbacks: list[Callback]) -> Trainer:
    return train.train(load_settings(TrainConfig, tiny(numbers, out, *flags)), callbacks=callbacks)


def test_observers_are_told_what_happens_in_order(numbers, tmp_path):
    diary = Diary()
    flags = ["--log-every", 2, "--eval-every", 3]
    observed(numbers, tmp_path, "--steps", 3, *flags, callbacks=[diary])
    first = [("started", 0), ("stepped", 1), ("stepped", 2), ("recorded", 2, "train_loss"), ("stepped", 3)]
    last = [("recorded", 3, "train_loss"), ("recorded", 3, "val_loss"), ("closed",)]  # the last step is told of anyway
    assert diary.entries == first + last
    diary = Diary()
    observed(numbers, tmp_path, "--steps", 4, *flags, "--resume", callbacks=[diary])
    assert diary.entries[:2] == [("started", 3), ("stepped", 4)]


def test_observers_know_how_far_the_run_is(numbers, tmp_path):
    told = []

    class Progress(Callback):
        def on_step(self, trainer: Trainer) -> None:
            told.append(trainer.budget.progress)

    observed(numbers, tmp_path, "--steps", 4, callbacks=[Progress()])
    assert told == [0.25, 0.5, 0.75, 1]


def test_observers_of_a_run_that_never_started_are_closed(numbers, tmp_path):
    observed(numbers, tmp_path, "--steps", 1, callbacks=[])
    callbacks = [Diary(), MetricsFile(), Terminal()]
    with pytest.raises(UserError, match="seed"):
        observed(numbers, tmp_path, "--steps", 2, "--resume", "--seed", 9, callbacks=callbacks)
    assert callbacks[0].entries == [("closed",)]


# The metrics file.


def test_a_spike_is_pointed_out(numbers, tmp_path, capsys):
    callbacks = [Spoiling(50, 5.0), MetricsFile()]
    observed(numbers, tmp_path, "--steps", 55, "--eval-every", 100, "--learning-rate", 1e-3, callbacks=callbacks)
    scores = logged(tmp_path, "loss_z_score")
    assert scores[50] > SPIKE_Z_SCORE and max(score for step, score in scores.items() if step != 50) < SPIKE_Z_SCORE
    said = [line for line in capsys.readouterr().out.splitlines() if "spike" in line]
    assert len(said) == 1 and f"{logged(tmp_path, 'train_loss')[50]:.4f}" in said[0]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null_and_training_goes_on(numbers, tmp_path, factor):
    observed(numbers, tmp_path, "--steps", 6, "--eval-every", 3, callbacks=[Spoiling(2, factor), MetricsFile()])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert not [line for line in lines if "NaN" in line or "Infinity" in line]
    losses = logged(tmp_path, "train_loss")
    assert losses.pop(2) is None and all(loss > 0 for loss in losses.values())
    assert logged(tmp_path, "skipped_steps") == {1: 0} | dict.fromkeys(range(2, 7), 1)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_loss_is_drawn_after_each_evaluation_and_only_then(numbers, tmp_path):
    drawn = []

    class Looking(Callback):
        def on_step(self, trainer: Trainer) -> None:
            drawn.append((tmp_path / "loss.png").exists())

    observed(numbers, tmp_path, "--steps", 4, "--eval-every", 2, callbacks=[MetricsFile(), Looking()])
    assert drawn == [False, False, True, True]


def test_a_resumed_run_goes_on_in_its_metrics(numbers, tmp_path):
    observed(numbers, tmp_path, "--steps", 3, "--save-every", 2, callbacks=[MetricsFile()])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "train_loss": 9.0}) + '\n{"step": 5, "train')  # then it was killed
    observed(numbers, tmp_path, "--steps", 5, "--resume", callbacks=[MetricsFile()])
    losses = logged(tmp_path, "train_loss")
    assert list(losses) == [1, 2, 3, 4, 5] and losses[4] < 5
    assert list(logged(tmp_path, "val_loss")) == [3, 5]


def metrics_of(path: Path, first_step: int) -> MetricsFile:
    """The metrics of a run at path that goes on after first_step."""
    metrics = MetricsFile()
    metrics.on_train_start(SimpleNamespace(step=first_step, config=SimpleNamespace(out=path)))
    return metrics


def add(metrics: MetricsFile, step: int, loss: float) -> None:
    metrics.on_record(SimpleNamespace(step=step), {"step": step, "train_loss": loss})


def strict(line: str) -> dict:
    """The JSON of a line that has no bare NaN or infinity."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"a bare {name}: {line}"))


def stored(run: Path) -> list[dict]:
    return [strict(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_every_record_is_a_line_of_strict_json_at_once(tmp_path):
    metrics = metrics_of(tmp_path, 0)
    for step, loss in enumerate([2.5, float("nan"), float("inf"), float("-inf")], 1):
        add(metrics, step, loss)
        assert stored(tmp_path)[-1] == {"step": step, "train_loss": loss if step == 1 else None, "loss_z_score": 0.0}
    assert len(metrics.records) == 4


LINES = [json.dumps({"step": step, "train_loss": 3.0 - step}) + "\n" for step in (1, 2, 3)]


def test_records_after_the_resumed_step_and_torn_lines_are_dropped_at_once(tmp_path):
    torn = "".join(LINES) + '{"step": 4, "tra'
    (tmp_path / "metrics.jsonl").write_text(torn)
    with open(tmp_path / "metrics.jsonl", encoding="utf-8") as reader:  # who had it open sees it whole
        metrics = metrics_of(tmp_path, 2)
        assert reader.read() == torn
    add(metrics, 3, 0.5)
    assert [(line["step"], line["train_loss"]) for line in stored(tmp_path)] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert metrics.records == stored(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("first_step", [3, 10])
def test_metrics_are_not_rewritten_when_there_is_nothing_to_drop(tmp_path, first_step):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(LINES))
    before = path.stat()
    metrics = metrics_of(tmp_path, first_step)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    add(metrics, 4, 1.0)
    assert path.stat().st_ino == before.st_ino and len(stored(tmp_path)) == 4


def test_a_bare_nan_of_an_earlier_version_becomes_null(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(LINES[0] + '{"step": 2, "train_loss": NaN}\n')
    metrics = metrics_of(tmp_path, 2)
    assert stored(tmp_path)[1] == {"step": 2, "train_loss": None}
    assert metrics.loss_z_score(3.0) == metrics_of(tmp_path, 2).loss_z_score(3.0) == 0.0  # as null too


def test_a_z_score_counts_deviations_from_the_recent_losses_that_are_finite(tmp_path):
    metrics = metrics_of(tmp_path, 0)
    for step in range(200):
        recent = step >= 160
        add(metrics, step, (2.0 + step % 2 if step % 5 else float("nan")) if recent else 50.0)
        if step == 18:
            assert metrics.loss_z_score(1e6) == 0.0  # too few to compare with
    losses = torch.tensor([2.0 + step % 2 for step in range(160, 200) if step % 5])
    assert metrics.loss_z_score(4.0) == pytest.approx((4 - losses.mean().item()) / losses.std().item())
    assert metrics.loss_z_score(float("nan")) == metrics.loss_z_score(float("inf")) == 0.0
    expected = metrics.loss_z_score(4.0)
    metrics.records = [one for record in metrics.records for one in ({"val_loss": 9.0}, record, {"val_loss": 9.0})]
    assert metrics.loss_z_score(4.0) == expected  # evaluations between them do not count


@pytest.mark.parametrize("line", [b"", b" ", b"torn", b"{}", b"[1]", b"7", b'{"step": "1"}', b"\xff", b"[" * 9999])
def test_what_is_no_record_is_put_aside_and_the_others_are_kept(tmp_path, capsys, line):
    (tmp_path / "metrics.jsonl").write_bytes(LINES[0].encode() + line + b"\n" + LINES[1].encode())
    metrics = metrics_of(tmp_path, 2)
    assert [record["step"] for record in metrics.records] == [record["step"] for record in stored(tmp_path)] == [1, 2]
    said, aside = capsys.readouterr().err, tmp_path / "metrics.damaged"
    if line.strip():
        assert said.count("\n") == 1 and "metrics.jsonl" in said and aside.read_bytes() == line + b"\n"
    else:
        assert not said and not aside.exists()


# The terminal.


def test_the_terminal_says_what_is_about_to_happen_and_each_evaluation(numbers, tmp_path, capsys):
    observed(numbers, tmp_path, "--steps", 4, "--eval-every", 2, callbacks=[Terminal(), MetricsFile()])
    said, shown = capsys.readouterr()
    assert not shown  # no live line where there is no terminal
    data, model, run, *evaluations = said.splitlines()
    dataset = open_dataset(numbers)
    sizes = f"{len(dataset.train):,} tokens to train on, {len(dataset.val):,} to validate"
    assert data == f"data   {numbers}: {sizes}; vocabulary {dataset.tokenizer.vocab_size} (char)"
    assert model == "model  8,928 parameters: 2 layers, 2 heads, d_model 16, context 16"
    assert run.startswith("run    4 steps, 4 × 16 tokens a step = 256 tokens") and run.endswith(f"→ {tmp_path}")
    losses, bits = logged(tmp_path, "val_loss"), logged(tmp_path, "val_bits_per_byte")
    expected = [f"step {n:>6,}  validation loss {losses[n]:.4f}, {bits[n]:.4f} bits per byte  (" for n in (2, 4)]
    assert [line[: line.index("(") + 1] for line in evaluations] == expected


class Screen:
    """Standard error as a terminal: what is written to it."""

    def __init__(self):
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_line_shows_loss_and_speed(numbers, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    observed(numbers, tmp_path, "--steps", 3, callbacks=[Terminal()])
    assert "step 3/3 |" in screen.text and "loss " in screen.text and "tokens/s" in screen.text


# The clock.


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, in a list, to be set."""
    seconds = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])
    return seconds


def test_elapsed_time_goes_on_after_a_resume(now):
    clock = Clock(elapsed=30.0, step=10)
    now[0] += 5
    assert clock.elapsed == 35


def test_speed_is_that_since_the_last_time_without_the_pauses(now):
    clock = Clock(0.0, step=10)
    now[0] += 2
    assert clock.steps_per_second(14) == 2
    now[0] += 1
    with clock.pause():
        now[0] += 100
    now[0] += 1
    assert clock.steps_per_second(20) == 3
    assert clock.elapsed == 104  # a pause takes time all the same


def test_evaluations_and_what_is_made_of_them_are_no_part_of_the_speed(numbers, tmp_path):
    class Slow(Callback):
        def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
            if "val_loss" in record and trainer.step == 2:
                time.sleep(1)

    observed(numbers, tmp_path, "--steps", 3, "--eval-every", 2, callbacks=[MetricsFile(), Slow()])
    assert logged(tmp_path, "tokens_per_second")[3] > 64 / 0.9  # a step has 64 tokens


# Weights & Biases.


def test_weights_and_biases_is_imported_only_when_asked(numbers, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)  # to import it is an error now
        assert train.main(tiny(numbers, tmp_path / "quiet", "--steps", 1)) == 0
        capsys.readouterr()
        assert train.main(tiny(numbers, tmp_path / "asked", "--steps", 3, "--wandb")) == 0
        told = capsys.readouterr().err.splitlines()
        assert len(told) == 1 and told[0].startswith("warning: WeightsAndBiases failed (ModuleNotFoundError:")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert train.main(tiny(numbers, tmp_path / "loud", "--steps", 2, "--wandb")) == 0
    (logged_to,) = (tmp_path / "loud").glob("wandb/offline-run-*")
    assert logged_to.name.endswith((tmp_path / "loud" / "wandb.id").read_text())


def logged_to_wandb(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """What the newest of a run's own offline files holds: the history, the settings, and the ids of the run."""
    history, settings, ids = [], {}, []
    for record in wandb_records(sorted(run.glob("wandb/offline-run-*/*.wandb"))[-1]):
        values: dict[str, Any] = {}
        for item in record.history.item:
            *above, key = item.nested_key or [item.key]
            holder = functools.reduce(lambda inner, name: inner.setdefault(name, {}), above, values)
            holder[key] = json.loads(item.value_json)
        history += [values] if values else []
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        ids += [record.run.run_id] if record.run.run_id else []
    return history, settings, ids


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a log as LevelDB's, in blocks of 32 KiB, after 7 bytes that say what it is."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, offset, data = path.read_bytes(), 7, b""
    while len(content) - offset >= 7:
        if 32768 - offset % 32768 < 7:  # no room for a header
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        data += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(data)
            data = b""


def test_weights_and_biases_has_settings_metrics_and_samples_of_one_run(numbers, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    flags = ["--eval-every", 2, "--wandb", "--learning-rate", 0.003]
    assert train.main(tiny(numbers, tmp_path / "run", "--steps", 4, *flags)) == 0
    history, settings, ids = logged_to_wandb(tmp_path / "run")
    assert settings["learning_rate"] == 0.003 and settings["num_layers"] == 2 and settings["data"] == [str(numbers)]
    for key in ("train_loss", "val_loss", "val_bits_per_byte", "learning_rate", "tokens_per_second"):
        found = {one["step"]: one[key] for one in history if key in one}
        assert found == logged(tmp_path / "run", key) and found
    assert all(one["tokens"] == one["step"] * 64 and one["_step"] == one["step"] for one in history)
    tables = [one["samples"] for one in history if "samples" in one]
    assert [table["nrows"] for table in tables] == [1, 2]
    folder = next((tmp_path / "run").glob("wandb/offline-run-*/files"))
    rows = json.loads((folder / tables[-1]["path"]).read_text(encoding="utf-8"))
    assert rows["columns"] == ["step", "tokens", "sample"] and [row[:2] for row in rows["data"]] == [[2, 128], [4, 256]]
    assert all(isinstance(row[2], str) and row[2] for row in rows["data"])
    assert train.main(tiny(numbers, tmp_path / "run", "--steps", 6, "--resume", *flags)) == 0
    history, _, resumed = logged_to_wandb(tmp_path / "run")
    assert set(resumed) == set(ids) and len(set(ids)) == 1
    assert {one["step"] for one in history} == {5, 6}


# Steps that are skipped.


def test_skipped_steps_are_told_as_they_happen_and_at_the_end(numbers, tmp_path, capsys):
    callbacks = [Spoiling(2, math.nan), MetricsFile(), Terminal()]
    run = observed(numbers, tmp_path, "--steps", 4, "--eval-every", 4, callbacks=callbacks)
    print_summary(run)
    said = capsys.readouterr().out
    assert "step      2  skipped 1 steps" in said and "4 steps (1 skipped" in said


def test_a_model_that_diverged_ends_without_a_sample(numbers, tmp_path, capsys):
    run = observed(numbers, tmp_path, "--steps", 1, callbacks=[])
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
def test_a_save_longer_than_torchrun_waits_is_announced(numbers, tmp_path, monkeypatch, capsys, environment, warns):
    monkeypatch.setattr("engine.training.trainer.CHECKPOINT_BYTES_PER_SECOND", 1000)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    train.train(load_settings(TrainConfig, tiny(numbers, tmp_path, "--steps", 1)), callbacks=[Terminal()])
    assert ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in capsys.readouterr().out) == warns
