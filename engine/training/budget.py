"""The progress of a run, in steps or in minutes, and when to evaluate and to save."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engine.core.distributed import SINGLE_PROCESS, DistributedContext

# Of evaluations, or of saves, in a run in minutes.
MAX_EVENT_TIME = 0.05  # fraction of the run
MIN_EVENTS = 9
MAX_EVENT_INTERVAL_SECONDS = 600
SHUTDOWN_SECONDS = 2.5  # for picture, sample and exit, after the last save

Event = Literal["evaluate", "save"]


@dataclass
class Budget:
    """The length of a run in steps or in seconds, whichever ends first, by the clock of rank 0."""

    # Steps between events; None: they are spread over the seconds of the run.
    intervals: dict[Event, int | None]
    eval_cost_steps: float = 0.0  # estimate: an evaluation takes as long as these steps
    save_cost_seconds: float = 0.0  # estimate
    steps: float = math.inf
    seconds: float = math.inf
    last_eval_extra_steps: float = 0.0  # estimate: the last evaluation is repeated on all tokens
    first_step: int = 0  # of this process
    progress: float = 0.0  # 0 to 1
    earlier_seconds: float = 0.0  # before the run was resumed
    dist_ctx: DistributedContext = SINGLE_PROCESS
    total_step_seconds: float = 0.0
    step_seconds: float = 0.0  # moving average
    eval_seconds: float = 0.0  # estimate of rank 0
    paused: float = 0.0  # seconds

    def __post_init__(self) -> None:
        self.start_time = time.monotonic() - self.earlier_seconds
        self.last_report = (self.earlier_seconds, self.first_step)  # without pauses, and step
        self.seconds = max(1.0, self.dist_ctx.broadcast(self.seconds))
        self.total_steps = self.steps  # in a run in seconds an estimate
        self.last_done_at = dict.fromkeys(self.intervals, self.progress)

    @property
    def elapsed(self) -> float:
        """The seconds that the run has trained, before resumes too."""
        return time.monotonic() - self.start_time

    @property
    def exhausted(self) -> bool:
        return self.progress >= 1

    def update(self, step: int) -> None:
        """Set the number of steps done. All ranks must call it together."""
        total_step_seconds = self.elapsed - self.paused
        if step > self.first_step + 1:  # the first step of a process is slow
            seconds = total_step_seconds - self.total_step_seconds
            self.step_seconds = 0.9 * (self.step_seconds or seconds) + 0.1 * seconds
        self.total_step_seconds = total_step_seconds
        fraction = step / self.steps
        if self.seconds < math.inf:
            eval_seconds = self.step_seconds * self.eval_cost_steps
            last_eval_seconds = eval_seconds + self.step_seconds * self.last_eval_extra_steps
            end_seconds = last_eval_seconds + self.save_cost_seconds + SHUTDOWN_SECONDS
            training_seconds = self.seconds - end_seconds
            elapsed = self.elapsed + self.step_seconds / 2 if step else 0.0  # to the nearest step
            fraction = max(fraction, elapsed / max(training_seconds, 1e-9))
            fraction, self.eval_seconds = self.dist_ctx.broadcast([fraction, eval_seconds])
        self.progress = min(1.0, max(self.progress, fraction))
        if self.seconds < math.inf and self.progress:
            self.total_steps = step / self.progress

    def is_due(self, event: Event, step: int) -> bool:
        """Return whether the interval of an event is over, and without one its next time.

        Events without an interval are evenly spaced, with none at the end.
        """
        interval = self.intervals[event]
        if interval is not None:
            return step % interval == 0
        cost = self.eval_seconds if event == "evaluate" else self.save_cost_seconds
        num_affordable = int(MAX_EVENT_TIME * self.seconds / max(cost, 1e-9))
        num_wanted = max(MIN_EVENTS, int(self.seconds / MAX_EVENT_INTERVAL_SECONDS))
        fraction = 1 / (1 + min(num_affordable, num_wanted))
        return self.last_done_at[event] + fraction <= self.progress <= 1 - fraction / 2

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time of this block as training."""
        start = time.monotonic()
        yield
        self.paused += time.monotonic() - start

    @contextlib.contextmanager
    def timing(self, event: Event) -> Iterator[None]:
        """Pause during an event, and note its time."""
        paused = self.paused
        with self.pause():
            yield
        self.last_done_at[event] = self.progress
        if event == "evaluate" and self.step_seconds:
            self.eval_cost_steps = (self.paused - paused) / self.step_seconds

    def measure_speed(self, step: int) -> float:
        """Return the steps per second since the last call, without pauses."""
        last_seconds, last_step = self.last_report
        seconds = self.elapsed - self.paused
        self.last_report = (seconds, step)
        return (step - last_step) / max(seconds - last_seconds, 1e-9)
