"""The progress of a run, in steps or in minutes, and when to evaluate and to save."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Literal

import torch

from engine.core.distributed import DistributedContext

DEFAULT_STEPS = 1200
DEFAULT_INTERVAL_STEPS = 500  # between evaluations, and between saves
# Of a run in minutes, before its last step; likewise for saves.
MAX_EVAL_FRACTION = 0.04  # of the time
NUM_EVALS = 9  # more in a long run: one in MIN_EVAL_INTERVAL_SECONDS
MIN_EVAL_INTERVAL_SECONDS = 600.0
SHUTDOWN_SECONDS = 2.5  # for picture, sample and exit, after the last save
STEP_TIME_DECAY = 0.9  # of the moving average of a step's seconds

Event = Literal["evaluate", "save"]


class Clock:
    """How long a run has trained, before resumes too, and how fast it is."""

    def __init__(self, elapsed: float, step: int):
        now = time.monotonic()
        self.start_time = now - elapsed
        self.paused = 0.0  # seconds
        self.last_time = now  # of the last call of steps_per_second()
        self.last_step = step

    @property
    def elapsed(self) -> float:
        """Seconds since the first step, without those between an interruption and the resume."""
        return time.monotonic() - self.start_time

    def steps_per_second(self, step: int) -> float:
        """Return the speed since the last call, without pauses."""
        now = time.monotonic()
        speed = (step - self.last_step) / max(now - self.last_time, 1e-9)
        self.last_time = now
        self.last_step = step
        return speed

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time of this block as training."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.last_time += seconds
        self.paused += seconds


class StepBudget:
    """The length of a run in optimizer steps."""

    def __init__(self, steps: float, every: dict[Event, int | None], step: int = 0):
        """``every`` holds the steps between evaluations and saves; ``step`` steps are done."""
        self.steps = steps
        self.every = every
        self.step = step
        self.progress = step / steps  # 0 to 1

    @property
    def exhausted(self) -> bool:
        """Whether the run has made its last step."""
        return self.progress >= 1

    @property
    def total_steps(self) -> float:
        """The steps of the whole run, estimated if its length is in minutes."""
        return self.steps

    def update(self, step: int, clock: Clock) -> None:
        """Set the number of steps done. All ranks must call it together."""
        self.step = step
        self.progress = step / self.steps

    def eval_due(self, step: int) -> bool:
        """Whether to evaluate after this step."""
        return self.is_due("evaluate", step)

    def save_due(self, step: int) -> bool:
        """Whether to save after this step."""
        return self.is_due("save", step)

    def is_due(self, event: Event, step: int) -> bool:
        """Whether a number of steps has passed since the event."""
        interval = self.every[event]
        return interval is not None and step % interval == 0

    @contextlib.contextmanager
    def timing(self, event: Event) -> Iterator[None]:
        """Measure the event in this block."""
        yield

    def seconds_left(self, clock: Clock) -> float:
        """Seconds until the process must exit."""
        return math.inf


class TimeBudget(StepBudget):
    """The length of a run in seconds, with its last evaluation, save and sample.

    Evaluations, and saves, before the last ones are spread evenly, in MAX_EVAL_FRACTION of the
    time. All ranks go by the clock of rank 0. ``steps`` is a maximum.
    """

    def __init__(
        self,
        seconds: float,
        every: dict[Event, int | None],
        costs: dict[Event, float],
        dist: DistributedContext,
        step: int = 0,
        progress: float = 0.0,
        steps: int | None = None,
    ):
        """``costs`` are first guesses: of an evaluation in steps, of a save in seconds."""
        super().__init__(steps or math.inf, every, step)
        self.seconds = max(0.0, dist.broadcast(seconds))
        self.costs = costs
        self.dist = dist
        self.first_step = step
        self.progress = progress
        self.last_done_at = dict.fromkeys(every, progress)
        self.step_seconds = 0.0  # moving average
        self.total_step_seconds = 0.0
        self.eval_seconds = 0.0  # expected by rank 0

    @property
    def total_steps(self) -> float:
        return self.step / self.progress if self.progress else math.inf

    def update(self, step: int, clock: Clock) -> None:
        """Set the number of steps done, and the progress by the clock of rank 0."""
        total_step_seconds = clock.elapsed - clock.paused
        if step > self.first_step + 1:  # the first step of a process is slow
            seconds = (total_step_seconds - self.total_step_seconds) / (step - self.step)
            average = self.step_seconds or seconds
            self.step_seconds = STEP_TIME_DECAY * average + (1 - STEP_TIME_DECAY) * seconds
        self.step = step
        self.total_step_seconds = total_step_seconds
        eval_seconds = self.step_seconds * self.costs["evaluate"]
        training_seconds = self.seconds - eval_seconds - self.costs["save"] - SHUTDOWN_SECONDS
        elapsed = clock.elapsed + self.step_seconds / 2 if step else 0.0  # to the nearest step
        values = [elapsed / max(training_seconds, 1e-9), eval_seconds]
        shared = torch.tensor(values, dtype=torch.float64) * self.dist.is_main_process
        fraction, self.eval_seconds = self.dist.sum(shared).tolist()  # those of rank 0
        self.progress = min(1.0, max(self.progress, fraction, step / self.steps))

    def is_due(self, event: Event, step: int) -> bool:
        """Whether enough of the time has passed since the event, and the end is not near."""
        if self.every[event]:
            return super().is_due(event, step)
        cost = self.eval_seconds if event == "evaluate" else self.costs["save"]
        num_affordable = int(MAX_EVAL_FRACTION * self.seconds / max(cost, 1e-9))
        num_wanted = max(NUM_EVALS, int(self.seconds / MIN_EVAL_INTERVAL_SECONDS))
        interval = 1 / (1 + min(num_affordable, num_wanted))
        is_near_end = 1 - self.progress < interval / 2
        return self.progress - self.last_done_at[event] >= interval and not is_near_end

    @contextlib.contextmanager
    def timing(self, event: Event) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.last_done_at[event] = self.progress
        if event == "evaluate" and self.step_seconds:
            self.costs[event] = (time.monotonic() - start) / self.step_seconds

    def seconds_left(self, clock: Clock) -> float:
        return self.seconds - clock.elapsed
