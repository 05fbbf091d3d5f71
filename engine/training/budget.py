"""The progress of a run, in steps or in minutes, and when to evaluate and to save."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.core.distributed import SINGLE_PROCESS, DistributedContext

# Of evaluations, or of saves, in a run in minutes: see docs/training.md.
MAX_EVENT_TIME = 0.04  # fraction of the run
MIN_EVENTS = 9
MAX_EVENT_INTERVAL_SECONDS = 600
SHUTDOWN_SECONDS = 2.5  # for picture, sample and exit, after the last save

Event = Literal["evaluate", "save"]


class Clock:
    """How long a run has trained, before resumes too, and how fast it is."""

    def __init__(self, elapsed: float, step: int):
        self.start_time = time.monotonic() - elapsed
        self.paused = 0.0  # seconds
        self.last_report = (elapsed, step)  # seconds without pauses, and step

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start_time

    def measure_speed(self, step: int) -> float:
        """Return the speed since the last call, without pauses."""
        last_seconds, last_step = self.last_report
        seconds = self.elapsed - self.paused
        self.last_report = (seconds, step)
        return (step - last_step) / max(seconds - last_seconds, 1e-9)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time of this block as training."""
        start = time.monotonic()
        yield
        self.paused += time.monotonic() - start


@dataclass
class Budget:
    """The length of a run in steps or in seconds, whichever ends first, by the clock of rank 0."""

    intervals: dict[Event, int | None]  # steps between events; None, in a run in seconds: chosen
    eval_cost_steps: float = 0.0  # estimate: an evaluation takes as long as these steps
    save_cost_seconds: float = 0.0  # estimate
    steps: float = math.inf
    seconds: float = math.inf
    first_step: int = 0  # of this process
    progress: float = 0.0  # 0 to 1
    dist_ctx: DistributedContext = SINGLE_PROCESS
    total_step_seconds: float = 0.0
    step_seconds: float = 0.0  # moving average
    eval_seconds: float = 0.0  # estimate of rank 0

    def __post_init__(self) -> None:
        self.seconds = max(1.0, self.dist_ctx.broadcast(self.seconds))
        self.total_steps = self.steps  # in a run in seconds an estimate
        self.last_done_at = dict.fromkeys(self.intervals, self.progress)

    @property
    def exhausted(self) -> bool:
        return self.progress >= 1

    def update(self, step: int, clock: Clock) -> None:
        """Set the number of steps done. All ranks must call it together."""
        total_step_seconds = clock.elapsed - clock.paused
        if step > self.first_step + 1:  # the first step of a process is slow
            seconds = total_step_seconds - self.total_step_seconds
            self.step_seconds = 0.9 * (self.step_seconds or seconds) + 0.1 * seconds
        self.total_step_seconds = total_step_seconds
        fraction = step / self.steps
        if self.seconds < math.inf:
            eval_seconds = self.step_seconds * self.eval_cost_steps
            training_seconds = (
                self.seconds - eval_seconds - self.save_cost_seconds - SHUTDOWN_SECONDS
            )
            elapsed = clock.elapsed + self.step_seconds / 2 if step else 0.0  # to the nearest step
            fraction = max(fraction, elapsed / max(training_seconds, 1e-9))
            fraction, self.eval_seconds = self.dist_ctx.broadcast([fraction, eval_seconds])
        self.progress = min(1.0, max(self.progress, fraction))
        if self.seconds < math.inf and self.progress:
            self.total_steps = step / self.progress

    def is_due(self, event: Event, step: int) -> bool:
        """Return whether enough steps or time passed since the event, and the end is not near."""
        interval = self.intervals[event]
        if interval or self.seconds == math.inf:
            return interval is not None and step % interval == 0
        cost = self.eval_seconds if event == "evaluate" else self.save_cost_seconds
        num_affordable = int(MAX_EVENT_TIME * self.seconds / max(cost, 1e-9))
        num_wanted = max(MIN_EVENTS, int(self.seconds / MAX_EVENT_INTERVAL_SECONDS))
        fraction = 1 / (1 + min(num_affordable, num_wanted))
        return self.last_done_at[event] + fraction <= self.progress <= 1 - fraction / 2

    @contextlib.contextmanager
    def timing(self, event: Event) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.last_done_at[event] = self.progress
        if event == "evaluate" and self.step_seconds:
            self.eval_cost_steps = (time.monotonic() - start) / self.step_seconds

    def seconds_left(self, clock: Clock) -> float:
        return self.seconds - clock.elapsed
