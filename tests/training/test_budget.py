"""The length of a run in steps or minutes, and when evaluations and saves are due."""

import itertools
import math
import time
from types import SimpleNamespace

import pytest
from helpers import logged, newest_checkpoint, tiny, train_tiny

import train
from engine.core.distributed import SINGLE_PROCESS
from engine.core.settings import load_settings
from engine.training.budget import SHUTDOWN_SECONDS, Budget
from engine.training.callbacks import MetricsFile


class SimulatedBudget(Budget):
    """A budget whose clock the test sets."""

    elapsed = 1e-6


def simulate(
    seconds, step_seconds, evaluation=0.0, save=0.0, every=None, steps=math.inf, last_evaluation=0.0
):
    """Run a time budget against a simulated clock; an evaluation slows down as steps do.

    The last one takes ``last_evaluation`` more seconds.
    """
    intervals = {"evaluate": every, "save": every}
    budget = SimulatedBudget(intervals, evaluation / step_seconds(0), save, steps, seconds)
    budget.last_eval_extra_steps = last_evaluation / step_seconds(0)
    run = SimpleNamespace(step=0, progress=[], evaluated_at=[], saved_at=[])
    while True:
        budget.update(run.step)
        run.progress.append(budget.progress)
        evaluation_seconds = evaluation * step_seconds(budget.elapsed) / step_seconds(0)
        if budget.exhausted:
            evaluation_seconds += last_evaluation
            run.end = budget.elapsed + evaluation_seconds + save + SHUTDOWN_SECONDS
            return run
        if run.step and budget.is_due("evaluate", run.step):
            with budget.timing("evaluate"):
                run.evaluated_at.append(budget.progress)
            budget.eval_cost_steps = evaluation / step_seconds(0)
            budget.paused += evaluation_seconds
            budget.elapsed += evaluation_seconds
        if run.step and budget.is_due("save", run.step):
            with budget.timing("save"):
                run.saved_at.append(budget.progress)
        run.step += 1
        budget.elapsed += step_seconds(budget.elapsed)


@pytest.mark.parametrize("evaluation", [0.01, 1.0, 5.0])
def test_minutes_include_the_last_evaluation_and_save(evaluation):
    run = simulate(120, lambda now: 0.35, evaluation, save=0.5)
    assert run.end == pytest.approx(120, abs=0.5)
    assert run.progress == sorted(run.progress)
    assert run.progress[0] == 0
    assert run.progress[-2] > 0.99
    longer = simulate(120, lambda now: 0.35, evaluation, last_evaluation=7)
    assert longer.end == pytest.approx(120, abs=0.5)
    slowing = simulate(120, lambda now: 0.35 if now < 60 else 1.0, evaluation)
    assert slowing.end == pytest.approx(120, rel=0.03)


def test_minutes_and_steps_end_with_the_first_of_both():
    run = simulate(120, lambda now: 0.35, steps=100)
    assert run.progress == [step / 100 for step in range(101)]
    run = simulate(120, lambda now: 0.35, steps=1000)
    assert run.step < 400
    assert run.end == pytest.approx(120, abs=0.5)


@pytest.mark.parametrize(("cost", "number"), [(0.001, 9), (1.1, 5), (2.0, 3), (4.0, 1), (9.0, 0)])
@pytest.mark.parametrize("event", ["evaluation", "save"])
def test_events_are_spread_evenly_in_a_fraction_of_the_time(event, cost, number):
    run = simulate(120, lambda now: 0.1, **{event: cost})
    events = run.evaluated_at if event == "evaluation" else run.saved_at
    expected = [(index + 1) / (number + 1) for index in range(number)]
    assert events == pytest.approx(expected, abs=0.02)


def test_a_run_of_minutes_continues_where_it_was_interrupted(numbers, tmp_path, capsys):
    flags = ("--minutes", (SHUTDOWN_SECONDS + 6) / 60, "--eval-every", 10**6)
    calls = itertools.count()
    interrupted = train_tiny(numbers, tmp_path, *flags, should_stop=lambda: next(calls) > 30)
    assert 0 < interrupted.budget.progress < 1
    resumed = load_settings(train.TrainConfig, tiny(numbers, tmp_path, *flags, "--resume"))
    started_at = time.monotonic() - 2  # a slow start
    run = train.train(resumed, SINGLE_PROCESS, [MetricsFile()], lambda: False, started_at)
    assert run.step > interrupted.step
    assert run.budget.exhausted
    assert run.budget.elapsed < SHUTDOWN_SECONDS + 4
    progress = list(logged(tmp_path, "progress").values())
    assert progress == sorted(progress)
    assert progress[-1] == 1
    rates = list(logged(tmp_path, "learning_rate").values())
    assert rates[-1] < 0.5 * max(rates)
    assert newest_checkpoint(tmp_path).state.progress == 1
    capsys.readouterr()
    assert train.main(["--resume", "--out", str(tmp_path)]) == 0  # its minutes are over
    output = capsys.readouterr().out
    assert "raise --minutes" in output and f"{run.step} steps" in output
    settings = load_settings(train.TrainConfig, [str(tmp_path / "config.toml")])
    assert settings.minutes == resumed.minutes and settings.steps is None


def test_all_ranks_use_the_clock_of_rank_0():
    dist = SimpleNamespace(broadcast=lambda value: 50.0)
    budget = Budget({"evaluate": None, "save": None}, seconds=3.0, dist_ctx=dist)
    assert budget.seconds == 50
    dist.broadcast = lambda values: [0.25, 0.0]
    budget.update(7)
    assert budget.progress == 0.25
