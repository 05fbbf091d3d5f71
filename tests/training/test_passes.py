"""Captured steps are plain steps, compiled seldom; without what fails, training continues."""

import math
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import (
    SpoilWeights,
    StopAfter,
    assert_same_run,
    logged,
    make_dataset,
    read_lines,
    train_tiny,
)
from imitation import imitate_graphs
from torch._dynamo.testing import CompileCounter

import train
from engine.core.errors import UserError
from engine.nn.acceleration import CapturedCalls
from engine.runs.run_files import rank_evaluations
from engine.training.trainer import Callback, Trainer

# Three micro-batches, dropout, two windows of the first block.
FLAGS = ["--batch-size", 6, "--micro-batch-size", 2, "--dropout", 0.1, "--window-warmup", 0.4]
FLAGS += ["--steps", 12, "--eval-every", 5, "--seed", 3]


def run_twice(data, folder, *flags, **options) -> list:
    """Train with and without captured steps; return the folders."""
    for name, capture in (("captured", "--capture"), ("plain", "--no-capture")):
        train_tiny(data, folder / name, *flags, capture, **options)
    return [folder / "captured", folder / "plain"]


@pytest.fixture(scope="module")
def plain_run(numbers, tmp_path_factory) -> Path:
    """A run with FLAGS whose steps are not captured, where they could be."""
    out = tmp_path_factory.mktemp("plain") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        imitate_graphs(monkeypatch)
        train_tiny(numbers, out, *FLAGS, "--no-capture")
    return out


@pytest.fixture
def captures(graphs, monkeypatch):
    """How many graphs were captured, without those of the small model at the start of a run."""
    monkeypatch.setattr("engine.training.trainer.describe_update_difference", lambda *_: "")
    return lambda: graphs.captures


@pytest.mark.parametrize(
    ("flags", "is_captured"),
    [
        (["--eval-every", 12], True),  # and the weights of one step are not finite
        (["--window-warmup", 0, "--checkpoint-activations", "--dropout", 0], True),
        (["--checkpoint-activations"], False),
        (["--optimizer", "adamw", "--clip-norm", 0, "--micro-batch-size", 0], True),
        (["--dtype", "float16", "--document-mask", "--windows", 5], True),
        (["--tie-embeddings", "--num-kv-heads", 1, "--dtype", "bfloat16"], True),
    ],
    ids=str,
)
def test_a_captured_run_is_a_plain_run(captures, numbers, tmp_path, flags, is_captured):
    if "--document-mask" in flags:
        numbers = make_dataset(tmp_path, [{"text": "abc " * (n % 9)} for n in range(500)])
    callbacks = [SpoilWeights()] if "--eval-every" in flags else []
    runs = run_twice(numbers, tmp_path, *FLAGS, *flags, callbacks=callbacks)
    assert_same_run(*runs)
    assert bool(captures()) == is_captured
    if callbacks:
        assert logged(runs[0], "skipped_steps")[12] == logged(runs[1], "skipped_steps")[12] == 1


def test_a_run_resumes_bit_for_bit_with_and_without_capture(graphs, numbers, plain_run, tmp_path):
    for flags, step in (([], 5), (["--resume"], 9), (["--resume"], math.inf)):
        capture = "--capture" if step == 9 else "--no-capture"
        stop = StopAfter(step)
        train_tiny(numbers, tmp_path / "stopped", *FLAGS, *flags, capture, should_stop=stop)
    assert_same_run(tmp_path / "stopped", plain_run)


def test_all_lengths_of_examples_are_compiled_at_once(graphs, tmp_path, counter):
    rows = [{"prompt": f"{n}", "completion": "so " * (n % 40 + 1)} for n in range(300)]
    fields = {"prompt_field": "prompt", "completion_field": "completion"}
    pairs = make_dataset(tmp_path, rows, **fields)
    flags = ["--context-length", 160, "--steps", 12, "--batch-size", 2, "--compile"]
    train_tiny(pairs, tmp_path / "run", *flags)
    assert counter.frame_count == 3  # two blocks and the loss


def test_a_run_in_minutes_evaluates_on_all_tokens_at_its_end_and_compares_fewer(numbers, tmp_path):
    flags = ("--minutes", 0.1, "--steps", 2, "--eval-every", 1, "--eval-tokens", 0)
    trainer = train_tiny(numbers, tmp_path, *flags)
    val = trainer.data.val
    counts = []
    losses = []
    for is_last in (True, False):
        batches = trainer.passes.evaluation_batches(val, is_last)
        counts.append(sum((targets >= 0).sum().item() for _, targets in batches))
        losses.append(train.evaluate(trainer, lambda: False, is_last)["val_loss"])
    assert counts[0] == len(val) - 1
    assert counts[1] == pytest.approx(0.1 * 8192, abs=20)
    records = read_lines(tmp_path / "metrics.jsonl")
    first, last = [record for record in records if "val_loss" in record]
    assert [last["val_loss"], last["val_loss_partial"]] == pytest.approx(losses)
    assert losses[0] != losses[1] and "val_loss_partial" not in first
    assert [last["val_tokens"], last["val_tokens_partial"]] == counts
    assert first["val_tokens"] == counts[1]
    worse = last | {"val_loss_partial": last["val_loss_partial"] + 0.1, "val_loss": 0.0}
    assert rank_evaluations([last, worse], "loss") == [0, 1]
    trainer.config = trainer.passes.config = replace(trainer.config, eval_tokens=100)
    assert sum(targets.numel() for _, targets in trainer.passes.evaluation_batches(val)) == 96


def test_a_gradient_in_some_steps_only_is_not_captured_with_one_warning(
    graphs, numbers, tmp_path, capsys
):
    class Hook(Callback):
        def on_train_start(self, trainer: Trainer) -> None:
            trainer.model.blocks[1].feed_forward.register_forward_hook(
                lambda layer, inputs, y: y.detach() if trainer.step % 4 == 1 else y
            )

    assert_same_run(*run_twice(numbers, tmp_path, *FLAGS, callbacks=[Hook()]))
    assert capsys.readouterr().err.count("warning") == 1


def spoil_replays(monkeypatch, name, spoil) -> None:
    """Let replays of the functions of a name give other results, as an untested GPU may."""
    original = CapturedCalls.__call__

    def call(calls, function, *inputs, **options):
        result = original(calls, function, *inputs, **options)
        if function.__name__ == name and calls.num_captures and calls.pool.is_enabled:
            spoil(function.__self__)
        return result

    monkeypatch.setattr(CapturedCalls, "__call__", call)


def spoil_gradient(passes, first_step=0) -> None:
    """Change the gradient of one parameter, from a step on."""
    if round(passes.budget.progress * passes.budget.steps) >= first_step:
        passes.model.blocks[1].feed_forward.expand.weight.grad.mul_(1.1)


@torch.no_grad()
def spoil_weight(optimizer) -> None:
    """Change a parameter after its update."""
    optimizer.parameters["head.weight"].mul_(1.1)


@pytest.mark.parametrize("first_step", [0, 5], ids=["always", "after an evaluation"])
def test_replayed_gradients_that_differ_do_not_change_a_step(
    captures, numbers, tmp_path, monkeypatch, capsys, first_step
):
    spoil = partial(spoil_gradient, first_step=first_step)
    spoil_replays(monkeypatch, "_compute_static_gradients", spoil)
    assert_same_run(*run_twice(numbers, tmp_path, *FLAGS, "--window-warmup", 0))
    assert captures() >= 2 and capsys.readouterr().err.count("warning") == 1


def test_replayed_updates_that_differ_are_found_before_the_first_step(
    graphs, numbers, plain_run, tmp_path, monkeypatch, capsys
):
    spoil_replays(monkeypatch, "update", spoil_weight)
    train_tiny(numbers, tmp_path, *FLAGS)
    assert_same_run(tmp_path, plain_run)
    errors = capsys.readouterr().err
    assert errors.count("warning") == 1 and "--no-capture" in errors and "head.weight" in errors


@pytest.mark.parametrize("capture", ["--capture", "--no-capture"])
def test_a_compiler_whose_gradients_differ_is_found_before_they_change_a_step(
    graphs, numbers, tmp_path, monkeypatch, capsys, capture
):
    def compile_wrongly(graph, inputs):
        return lambda *values: [2 * value for value in graph(*values)]

    flags = [*FLAGS, "--dropout", 0, capture]
    train_tiny(numbers, tmp_path / "plain", *flags)
    with monkeypatch.context() as context:
        context.setattr(torch, "compile", partial(torch.compile, backend=compile_wrongly))
        train_tiny(numbers, tmp_path / "compiled", *flags, "--compile")
    torch.compiler.reset()
    errors = capsys.readouterr().err
    assert "--no-compile" in errors and errors.count("warning") == 1 + (capture == "--capture")
    losses = [logged(tmp_path / name, "train_loss") for name in ("compiled", "plain")]
    assert losses[0] == losses[1]


@pytest.fixture
def counter(monkeypatch):
    """A count of what is compiled."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch.compiler.reset()
    yield counter
    torch.compiler.reset()


def test_training_continues_without_a_compiler_that_fails_at_any_time(
    graphs, numbers, plain_run, tmp_path, monkeypatch, capsys
):
    calls = []

    def compile_for_some_calls(function, **options):
        def compiled(*arguments):
            calls.append(1)
            if len(calls) > 40:
                raise RuntimeError("the compiler failed")
            return function(*arguments)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_for_some_calls)
    train_tiny(numbers, tmp_path, *FLAGS, "--compile", "--no-capture")
    assert_same_run(tmp_path, plain_run)
    errors = capsys.readouterr().err
    assert errors.count("warning") == 1 and "the compiler failed" in errors


@pytest.mark.parametrize(("max_rows", "num_rows"), [(2, 1), (0, 0)])
def test_micro_batches_that_do_not_fit_are_halved_in_the_first_step(
    each_path, numbers, tmp_path, capsys, max_rows, num_rows
):
    def check_rows(model: torch.nn.Module, inputs: tuple) -> None:
        if model.training and len(inputs[0]) > max_rows:
            raise torch.OutOfMemoryError("out of memory")

    def limit_memory(model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(check_rows)

    flags = ["--batch-size", 6, "--steps", 3]
    train_limited = partial(train_tiny, numbers, tmp_path / "run", modify_model=limit_memory)
    if not max_rows:
        with pytest.raises(UserError, match="--micro-batch-size"):
            train_limited(*flags)
        return
    train_limited(*flags)
    settings = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert settings["micro_batch_size"] == num_rows
    assert capsys.readouterr().err.count("warning: out of memory") == 2
    train_tiny(numbers, tmp_path / "typed", *flags, "--micro-batch-size", num_rows)
    assert_same_run(tmp_path / "run", tmp_path / "typed")
