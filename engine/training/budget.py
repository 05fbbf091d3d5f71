"""How long a run has trained, how far it is, and when it is time to evaluate and to save."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Literal

import torch

from engine.core.distributed import DistributedContext

# Of a run, between its evaluations and its saves, and sequences in a step, unless the settings say otherwise.
STEPS, EVERY, BATCH_SIZE = 1200, 500, 16
PART = 0.04  # of a run's time that evaluations before the last may take; and saves
MARKS = 9  # evaluations, and saves, before the last of a run on time; more if it takes hours
SELDOM = 600.0  # seconds between them then
CLOSING = 2.5  # seconds for the picture, the sample and the way out, after the last save
SLOWLY = 0.9  # how much of the estimate of a step's seconds each step keeps


class Clock:
    """How long a run has trained, those parts before a resume too, and how fast it does."""

    def __init__(self, elapsed: float, step: int):
        self.begun = time.monotonic() - elapsed
        self.since, self.since_step, self.paused = time.monotonic(), step, 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the run's first step, not counting those between an interruption and the resumption."""
        return time.monotonic() - self.begun

    def steps_per_second(self, step: int) -> float:
        """The speed since the last call, pauses not counted."""
        now = time.monotonic()
        speed = (step - self.since_step) / max(now - self.since, 1e-9)
        self.since, self.since_step = now, step
        return speed

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around something else than training, which is no part of its speed."""
        paused = time.monotonic()
        yield
        paused = time.monotonic() - paused
        self.since, self.paused = self.since + paused, self.paused + paused


class StepBudget:
    """A run's length in optimizer steps, and when it is time to evaluate and to save: every so many of them."""

    def __init__(self, steps: float, every: dict[str, int], step: int = 0):
        """``every`` has the steps between two times to "evaluate", and to "save"; ``step`` are done."""
        self.steps, self.every, self.step = steps, every, step

    @property
    def share(self) -> float:
        """How much of the run is done, 0…1."""
        return self.step / self.steps

    @property
    def total(self) -> float:
        """The steps of the whole run, as far as can be told."""
        return self.steps

    def advance(self, step: int, clock: Clock) -> None:
        """So many steps are done. All processes call it together."""
        self.step = step

    def is_due(self, what: Literal["evaluate", "save"]) -> bool:
        """Whether it is time for it, after the steps that are done."""
        return self.step % self.every[what] == 0

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Around what was due."""
        yield

    def left(self, clock: Clock) -> float:
        """Seconds until the run has to end."""
        return float("inf")


class TimeBudget(StepBudget):
    """A run's length in seconds: it ends on time, with the last evaluation, save and sample.

    Evaluations before the last, and saves, are spread evenly, as many as take PART of the time. All processes go by the
    first one's clock. It ends sooner if it is of a number of steps that are done sooner.
    """

    share = 0.0

    def __init__(
        self,
        seconds: float,
        every: dict[str, int | None],
        costs: dict[str, float],
        world: DistributedContext,
        step: int = 0,
        share: float = 0.0,
        steps: int | None = None,
    ):
        """``seconds`` are the clock's when all is over. ``costs`` are what an evaluation takes, in steps, until one was
        seen, and a save, in seconds. ``every`` may be None: the time decides. ``step`` and ``share`` are done, of
        ``steps`` at most.
        """
        super().__init__(steps or math.inf, every, step)
        self.seconds = max(0.0, world.broadcast(seconds))  # the first's: each process took its own time to start
        self.costs, self.world, self.first, self.share = costs, world, step, share
        self.marked = dict.fromkeys(every, share)  # the share at which each was done last
        self.step_seconds = self.stepping = 0.0  # a step's seconds, of late; all steps' so far
        self.evaluation_seconds = 0.0  # as the first process expects

    @property
    def total(self) -> float:
        return self.step / self.share if self.share else float("inf")

    def advance(self, step: int, clock: Clock) -> None:
        stepping = clock.elapsed - clock.paused
        if step > self.first + 1:  # that one is slower than the others
            seconds = (stepping - self.stepping) / (step - self.step)
            self.step_seconds = SLOWLY * (self.step_seconds or seconds) + (1 - SLOWLY) * seconds
        self.step, self.stepping = step, stepping
        evaluation = self.step_seconds * self.costs["evaluate"]
        training = max(self.seconds - evaluation - self.costs["save"] - CLOSING, 1e-9)
        gone = (clock.elapsed + self.step_seconds / 2) / training if step else 0.0
        mine = torch.tensor([gone, evaluation] if self.world.is_main_process else [0.0, 0.0], dtype=torch.float64)
        gone, self.evaluation_seconds = self.world.sum(mine).tolist()
        self.share = min(1.0, max(self.share, gone, step / self.steps))

    def is_due(self, what: Literal["evaluate", "save"]) -> bool:
        if self.every[what]:
            return super().is_due(what)
        cost = self.evaluation_seconds if what == "evaluate" else self.costs["save"]
        times = 1 + min(int(PART * self.seconds / max(cost, 1e-9)), max(MARKS, int(self.seconds / SELDOM)))
        return self.share - self.marked[what] >= 1 / times and 1 - self.share >= 0.5 / times

    @contextlib.contextmanager
    def timing(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.marked[what] = self.share
        if what == "evaluate" and self.step_seconds:
            self.costs[what] = (time.monotonic() - begun) / self.step_seconds

    def left(self, clock: Clock) -> float:
        return self.seconds - clock.elapsed
