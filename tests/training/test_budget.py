"""How long a run trained and may train, in steps or minutes, and when evaluations and saves are due."""

import itertools
import json
import math
import time
from types import SimpleNamespace

import pytest
from helpers import logged, tiny

import train
from engine.core.distributed import SINGLE_PROCESS
from engine.core.settings import load_settings
from engine.training.budget import CLOSING, Clock, StepBudget, TimeBudget
from engine.training.callbacks import MetricsFile


def test_all_processes_have_the_first_one_s_seconds():
    other = SimpleNamespace(broadcast=lambda value: 50.0, is_first=False)
    assert TimeBudget(-3.0, {"save": None}, {}, other).seconds == 50
    assert TimeBudget(-3.0, {"save": None}, {}, SINGLE_PROCESS).seconds == 0


def drive(seconds, step_seconds, evaluation=0.0, save=0.0, every=None, share=0.0, elapsed=0.0, steps=None):
    """Run a time budget against a simulated clock: (end, steps, shares, those of evaluations, of saves)."""
    clock = SimpleNamespace(elapsed=elapsed + 1e-6, paused=0.0)
    costs = {"evaluate": evaluation / step_seconds(0), "save": save}
    budget = TimeBudget(seconds, {"evaluate": every, "save": every}, costs, SINGLE_PROCESS, share=share, steps=steps)
    shares, evaluated, saved, step = [], [], [], 0
    while True:
        budget.advance(step, clock)
        shares.append(budget.share)
        if step and budget.share < 1 and budget.is_due("evaluate"):
            with budget.timing("evaluate"):
                pass
            seconds = evaluation * step_seconds(clock.elapsed) / step_seconds(0)
            budget.costs["evaluate"] = seconds / step_seconds(clock.elapsed)
            clock.elapsed, clock.paused = clock.elapsed + seconds, clock.paused + seconds
            evaluated.append(budget.share)
        if step and budget.share < 1 and budget.is_due("save"):
            with budget.timing("save"):
                saved.append(budget.share)
        if budget.share >= 1:
            seconds = evaluation * step_seconds(clock.elapsed) / step_seconds(0)
            return clock.elapsed + seconds + save + CLOSING, step, shares, evaluated, saved
        step, clock.elapsed = step + 1, clock.elapsed + step_seconds(clock.elapsed)


@pytest.mark.parametrize("evaluation", [0.01, 1.0, 5.0])
def test_a_run_of_minutes_ends_on_time_with_its_last_evaluation_and_save(evaluation):
    end, _, shares, *_ = drive(120, lambda now: 0.35, evaluation, save=0.5)
    assert end == pytest.approx(120, abs=0.5)
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1 and shares[-2] > 0.99


def test_a_run_of_minutes_ends_on_time_beside_another_process_that_takes_a_core():
    end, *_ = drive(120, lambda now: 0.35 if now < 60 else 1.0, 4.0)
    assert end == pytest.approx(120, rel=0.03)


def test_a_run_of_minutes_and_steps_ends_with_what_is_over_first():
    end, step, shares, *_ = drive(120, lambda now: 0.35, steps=100)
    assert step == 100 and end < 40 and shares == [step / 100 for step in range(101)]
    end, step, shares, *_ = drive(120, lambda now: 0.35, steps=1000)
    assert step < 400 and end == pytest.approx(120, abs=0.5) and shares[-1] == 1
    end, step, shares, *_ = drive(120, lambda now: 0.1 if now < 5 else 1.0, steps=1000)  # 5% in 4% of the time
    assert end == pytest.approx(120, rel=0.03) and shares == sorted(shares) and step < 200


@pytest.mark.parametrize(("evaluation", "times"), [(0.001, 9), (1.0, 4), (2.0, 2), (4.0, 1), (9.0, 0)])
def test_evaluations_before_the_last_are_spread_evenly_and_take_a_small_part_of_the_time(evaluation, times):
    *_, evaluated, _ = drive(120, lambda now: 0.1, evaluation)
    assert evaluated == pytest.approx([(n + 1) / (times + 1) for n in range(times)], abs=0.02)
    assert drive(120, lambda now: 0.1, every=100)[3][0] == pytest.approx(0.085, abs=0.01)  # unless steps are given


@pytest.mark.parametrize(("save", "times"), [(0.001, 9), (1.0, 4), (2.0, 2), (4.0, 1), (9.0, 0)])
def test_saves_before_the_last_are_spread_evenly_and_take_a_small_part_of_the_time(save, times):
    *_, saved = drive(120, lambda now: 0.1, save=save)
    assert saved == pytest.approx([(n + 1) / (times + 1) for n in range(times)], abs=0.02)


def test_the_steps_of_a_run_of_minutes_are_told_from_its_share():
    budget = TimeBudget(CLOSING + 100, {"evaluate": None, "save": None}, {"evaluate": 0, "save": 0}, SINGLE_PROCESS)
    assert budget.total == math.inf
    for step in range(51):
        budget.advance(step, SimpleNamespace(elapsed=step + 1e-6, paused=0.0))
    assert budget.share == pytest.approx(0.505, abs=1e-3) and budget.total == pytest.approx(99, abs=0.1)
    assert budget.left(SimpleNamespace(elapsed=60)) == pytest.approx(42.5)


def test_a_run_of_steps_goes_by_its_steps():
    budget = StepBudget(10, {"evaluate": 4, "save": 5})
    due = []
    for step in range(11):
        budget.advance(step, Clock(0.0, 0))
        due.append((budget.is_due("evaluate"), budget.is_due("save")))
    assert [step for step, (evaluate, _) in enumerate(due) if evaluate] == [0, 4, 8]
    assert [step for step, (_, save) in enumerate(due) if save] == [0, 5, 10] and budget.share == 1
    assert budget.total == 10 and budget.left(Clock(0.0, 0)) == math.inf


def test_a_run_of_minutes_decays_evaluates_saves_and_goes_on_where_it_was(numbers, tmp_path, capsys):
    out, short = tmp_path / "run", ("--minutes", (CLOSING + 6) / 60, "--eval-every", 10**6)
    settings = load_settings(train.TrainConfig, tiny(numbers, out, *short))
    begun, asked = time.monotonic(), itertools.count()
    stopped = train.train(settings, observers=[MetricsFile()], stop=lambda: next(asked) > 30, begun=begun)
    assert 0 < stopped.budget.share < 1 and stopped.saved == stopped.step
    resumed = load_settings(train.TrainConfig, tiny(numbers, out, *short, "--resume"))
    capsys.readouterr()
    run = train.train(resumed, observers=[MetricsFile()], begun=time.monotonic() - 4)  # a slow start changes no setting
    assert capsys.readouterr().out.startswith(f"Resuming after step {stopped.step}\n")
    assert run.step > stopped.step and run.budget.share == 1 and run.saved == run.step and run.val_loss < 2
    assert run.clock.elapsed < CLOSING + 2  # what the start took is gone
    share = list(logged(out, "share").values())
    assert share == sorted(share) and share[-1] == 1 and max(logged(out, "train_loss")) == run.step
    assert list(logged(out, "learning_rate").values())[-1] < 0.1 * settings.optimizer.learning_rate
    state = json.loads((out / "checkpoints" / f"step-{run.step:08d}" / "state.json").read_text())
    assert state["share"] == 1
    again = train.train(resumed)
    assert again.step == run.step
