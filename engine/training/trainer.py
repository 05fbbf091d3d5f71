"""A run: what training works with, and how far it is."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.cli import say
from engine.core.device import DTYPES, mixed_precision
from engine.core.distributed import DistributedContext
from engine.data.batches import Batches, tokens_per_step
from engine.data.mixture import Mixture
from engine.training.budget import Clock, StepBudget, TimeBudget
from engine.training.optimizer import Optimizer
from engine.training.run_dir import RunDir

SAVED_PER_SECOND = 5e8  # bytes of a checkpoint, written and hashed


@dataclass
class Run:
    """What training works with, and how far it is. All processes have the same, but that only the first records."""

    config: Any  # a TrainConfig
    world: DistributedContext
    dataset: Mixture
    model: nn.Module
    optimizer: Optimizer
    folder: RunDir
    step: int = 0
    saved: int = 0  # the step of the newest checkpoint
    best_loss: float = math.inf
    val_loss: float | None = None  # of this step, if it was evaluated
    changes: list[dict[str, Any]] = field(default_factory=list)  # what resumes changed, and after which step

    def __post_init__(self):
        config, length = self.config, self.config.model.context_length
        shape = (length, config.seed, config.batch_size, self.world.slice(config.batch_size), self.world.device)
        self.batches = Batches(self.dataset.train, *shape)
        self.tokens_per_step = tokens_per_step(self.dataset.train, length, config.batch_size)
        self.replica: nn.Module = self.model  # as it trains: averaging its gradients with its peers'
        self.reduces_each = False  # rather than in the last micro-batch of a step
        self.clock, self.budget = Clock(0.0, 0), StepBudget(1, {})

    def autocast(self) -> torch.autocast:
        return mixed_precision(DTYPES[self.config.dtype], self.world.device)

    @property
    def save_seconds(self) -> float:
        """About how long a checkpoint takes to be written and hashed."""
        state = sum(tensor.numel() * tensor.element_size() for tensor in self.optimizer.state().values())
        return (state + 4 * self.model.num_parameters) / SAVED_PER_SECOND

    def begin(self, startup: float, state: dict[str, Any] | None) -> None:
        """Start the clock, after so many seconds of starting up, where the state's had stopped."""
        config, self.clock = self.config, Clock(state["elapsed_seconds"] if state else 0.0, self.step)
        every = {"evaluate": config.eval_every, "save": config.save_every}
        if not config.minutes:
            self.budget = StepBudget(config.steps, every, self.step)
        else:
            share = state["share"] if state and state["settings"].get("minutes") == config.minutes else 0.0
            evaluated = sum(min(len(one.val), config.eval_tokens or len(one.val)) for one in self.dataset.datasets)
            costs = {"evaluate": evaluated / self.tokens_per_step / 3, "save": self.save_seconds}
            done = (self.step, share, config.steps)
            self.budget = TimeBudget(60 * config.minutes - startup, every, costs, self.world, *done)
            self.budget.advance(self.step, self.clock)

    def say(self, text: str, end: str = "\n") -> None:
        self.world.only_first(say, text, end)

    def training_record(self, loss: Tensor, learning_rate: float, grad_norm: Tensor) -> dict[str, Any]:
        """A step's record for metrics.jsonl; here, and nowhere else in the loop, the device is waited for."""
        self.folder.check()
        digest = self.world.sum(torch.tensor(self.batches.digest, dtype=torch.float64))
        speed = round(self.clock.steps_per_second(self.step) * self.tokens_per_step, 1)
        record = {"step": self.step, "tokens": self.step * self.tokens_per_step}
        record |= {"train_loss": self.world.sum(loss).item(), "learning_rate": learning_rate}
        record |= {"grad_norm": grad_norm.item(), "tokens_per_second": speed}
        record |= {"share": round(self.budget.share, 6)} if self.config.minutes else {}
        record |= {"elapsed_seconds": round(self.clock.elapsed, 3)}
        record |= {"skipped_steps": self.optimizer.count_skipped(self.saved)}
        return record | {"batch_digest": f"{int(digest):x}"}
