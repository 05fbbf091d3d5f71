"""Runs of train.py, one after the other, in the same ranks, and what each rank records of them."""

import contextlib
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from helpers import StopAfter
from torch import Tensor

import train
from engine.core.distributed import init_distributed
from engine.core.sharding import load_parameters, local
from engine.data.batches import Batches
from engine.data.split import BatchSpec
from engine.nn.loss import IGNORE_INDEX
from engine.training import passes as passes_module
from engine.training.callbacks import MetricsFile, print_summary
from engine.training.config import TrainConfig
from engine.training.trainer import Callback, Trainer

ROWS, LENGTH = 12, 16  # of the batches that are masked
TIMEOUT_SECONDS = 60


@dataclasses.dataclass
class Run:
    """A run of train.py. The record of rank r is in OUT.seen/r.json."""

    config: TrainConfig
    stop: float = math.inf  # the step after which the last rank requests a stop
    other_settings: dict[str, Any] = dataclasses.field(default_factory=dict)  # of ranks 1, 2, …
    memory: float = 2**40  # bytes of the device
    watch: bool = False
    mask: bool = False
    hold: bool = False
    summarize: bool = False  # print the summary of train.py


def masks() -> dict[str, Tensor]:
    """Which targets of a batch count, (ROWS, LENGTH), one batch a step."""
    every = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    rows, columns = torch.arange(ROWS)[:, None], torch.arange(LENGTH)
    return {
        "all": every,
        "another count in each row": columns < rows + 1,
        "one": (rows == 7) & (columns == 5),
        "none in two of three rows": (rows % 3 == 1) & (columns % 2 == 0),
        "only the first process's": (rows < ROWS // 4) & (columns > 2),
        "only the last process's": (rows >= ROWS - 2) & (columns < 9),
        "none": ~every,
        "all after none": every,
    }


class Gradients(Callback):
    """Calls ``note`` before the optimizers update the parameters, while there are gradients."""

    def on_train_start(self, trainer: Trainer) -> None:
        self.parameters = trainer.optimizer.parameters
        optimizer = trainer.optimizer.optimizers[0]
        optimizer_step = optimizer.step

        def step(*arguments: Any) -> None:
            self.note()
            optimizer_step(*arguments)

        optimizer.step = step

    def note(self) -> None:
        raise NotImplementedError


class Watcher(Gradients):
    """Records the bytes that the first rank stores."""

    def __init__(self):
        self.record: dict[str, Any] = {}

    def note(self) -> None:
        self.record["parameters"] = sum(local(p).nbytes for p in self.parameters.values())
        self.record["gradients"] = sum(local(p.grad).nbytes for p in self.parameters.values())

    def on_step(self, trainer: Trainer) -> None:
        tensors = trainer.optimizer.state().values()
        self.record["optimizer"] = sum(local(tensor).nbytes for tensor in tensors)


class Masked(Gradients):
    """Trains on batches with ignored targets, from nonzero parameters.

    OUT.seen/s.safetensors holds the batch of step s, from 1, and the gradient over all ranks.
    """

    digest = 0

    def on_train_start(self, trainer: Trainer) -> None:
        super().on_train_start(trainer)
        spec = BatchSpec(LENGTH, trainer.config.seed, ROWS, slice(0, ROWS))
        self.batches = Batches(trainer.data.train, spec, trainer.dist_ctx.device)
        self.rows = trainer.dist_ctx.rank_slice(ROWS)
        torch.manual_seed(1)
        values = {name: 0.2 * torch.randn(p.shape) for name, p in self.parameters.items()}
        load_parameters(trainer.model, [*values.items()])
        trainer.batches = self

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batches.get(step)
        targets = torch.where(list(masks().values())[step], targets, IGNORE_INDEX)
        self.batch = {"inputs": inputs, "targets": targets}
        return inputs[self.rows], targets[self.rows]

    def note(self) -> None:
        self.gradients = {name: p.grad.clone() for name, p in self.parameters.items()}

    def on_step(self, trainer: Trainer) -> None:
        save_gathered(trainer, f"{trainer.step}", self.gradients, self.batch)


class Holder(Callback):
    """Writes gathered weights and optimizer state to OUT.seen/STEP-resumed.safetensors."""

    def on_train_start(self, trainer: Trainer) -> None:
        self.note(trainer, "resumed")

    def note(self, trainer: Trainer, moment: str) -> None:
        state = trainer.optimizer.state()
        tensors = {f"{name} of the optimizer": tensor for name, tensor in state.items()}
        save_gathered(trainer, f"{trainer.step}-{moment}", trainer.model.state_dict() | tensors, {})


def save_gathered(
    trainer: Trainer, name: str, sharded: dict[str, Tensor], full: dict[str, Tensor]
) -> None:
    """Write tensors, some of which are sharded, to OUT.seen/NAME.safetensors."""
    gathered = trainer.dist_ctx.copy_to_cpu(sharded)
    if trainer.dist_ctx.is_main_process:
        path = folder_of(trainer.config.out) / f"{name}.safetensors"
        safetensors.torch.save_file(gathered | full, path)


def folder_of(out: Path) -> Path:
    """Return the folder of the records of a run."""
    return out.with_name(f"{out.name}.seen")


def play(runs: list[Run]) -> None:
    """Run all runs in this process and its peers."""
    with init_distributed("cpu", timeout=TIMEOUT_SECONDS) as dist:
        for run in runs:
            config = dataclasses.replace(run.config, **run.other_settings if dist.rank else {})
            folder_of(config.out).mkdir(exist_ok=True)
            passes_module.usable_memory = lambda device, run=run: run.memory
            stopper = StopAfter(run.stop if dist.rank == dist.size - 1 else math.inf)
            watcher = Watcher()
            holder = Holder()
            callbacks = [stopper]
            callbacks += [MetricsFile()] if dist.is_main_process else []
            callbacks += [watcher] if run.watch and dist.is_main_process else []
            callbacks += [Masked()] if run.mask else []
            callbacks += [holder] if run.hold else []
            with contextlib.redirect_stdout(io.StringIO()) as output:
                peers = dataclasses.replace(dist, sharded=config.parallel == "fsdp")
                trainer = train.train(config, peers, callbacks, stopper)
                if run.summarize:
                    print_summary(trainer)
                if run.hold:
                    holder.note(trainer, "ended")
            assert trainer.step == min(run.stop, config.steps or trainer.step)
            # A DDP that outlives its process group may hang in its destructor.
            assert trainer.passes.ddp_model is trainer.model
            record = {
                "output": output.getvalue(),
                "progress": trainer.budget.progress,
                "steps": trainer.step,
            }
            path = folder_of(config.out) / f"{dist.rank}.json"
            path.write_text(json.dumps(watcher.record | record))
