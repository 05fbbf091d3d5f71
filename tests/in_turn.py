"""Runs of train.py, one after the other, in the same processes: importing torch once is enough.

    python tests/in_turn.py             answer each line of standard input, [num_ranks, RUNS],
                                        with an exit code
    torchrun … tests/in_turn.py RUNS    run in the processes of torchrun

RUNS is JSON: a list of {"flags": […]} with these optional keys. "stop": the step after which the
last rank requests a stop. "hang": the step after which it hangs. "full": the largest file that it
can write, in bytes. "others": additional flags of all ranks but the first. "watch", "mask", "hold",
"conclude": true. The record of rank r is in OUT.seen/r.json.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from engine.core.distributed import init_distributed
from engine.core.files import to_json
from engine.core.settings import load_settings
from engine.core.sharding import load_parameters, local
from engine.data.batches import Batches
from engine.data.split import BatchSpec
from engine.nn.loss import IGNORE_INDEX
from engine.training import callbacks as callbacks_module
from engine.training import trainer as trainer_module
from engine.training.callbacks import MetricsFile, print_summary
from engine.training.config import TrainConfig
from engine.training.trainer import Callback, Trainer

ROWS, LENGTH = 12, 16  # of the batches that are masked
WATCHED = 3  # the step, counted from 1, that is watched
MAX_RUN_SECONDS = 120  # of all runs of a line
callbacks_module.FINAL_SAMPLE_TOKENS = 3  # each is a round of messages


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


class Records(MetricsFile):
    """Writes every record to metrics.jsonl, on the first process, and draws nothing."""

    def on_train_start(self, trainer: Trainer) -> None:
        if trainer.dist_ctx.is_main_process:
            super().on_train_start(trainer)

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.dist_ctx.is_main_process:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{to_json(record)}\n")


class Stopper(Callback):
    """On the last rank only: requests a stop after a step, or hangs after another."""

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.should_stop = False

    def on_step(self, trainer: Trainer) -> None:
        if trainer.dist_ctx.rank == trainer.dist_ctx.size - 1:
            self.should_stop = trainer.step == self.options.get("stop")
            if trainer.step == self.options.get("hang"):
                os.kill(os.getpid(), signal.SIGSTOP)


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
    """Records the messages of the first rank in one step, and the bytes that it stores."""

    def __init__(self):
        self.record: dict[str, Any] = {}

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        if trainer.step == WATCHED - 1:
            self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profiler.start()

    def note(self) -> None:
        self.record["parameters"] = sum(local(p).nbytes for p in self.parameters.values())
        self.record["gradients"] = sum(local(p.grad).nbytes for p in self.parameters.values())

    def on_step(self, trainer: Trainer) -> None:
        if trainer.step == WATCHED:
            self.profiler.stop()
            events = [event for event in self.profiler.events() if event.name.startswith("gloo:")]
            self.record["messages"] = [
                (event.name.removeprefix("gloo:"), event.input_shapes[0]) for event in events
            ]
            tensors = trainer.optimizer.state().values()
            self.record["optimizer"] = sum(local(tensor).nbytes for tensor in tensors)


class Masked(Gradients):
    """Trains on batches with ignored targets, or on examples, from nonzero parameters.

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
        if not self.batches.split.num_examples:
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
    gathered = trainer.dist_ctx.gather_full(sharded)
    if trainer.dist_ctx.is_main_process:
        path = folder_of(trainer.config.out) / f"{name}.safetensors"
        safetensors.torch.save_file(gathered | full, path)


def folder_of(out: Path) -> Path:
    """Return the folder of the records of a run."""
    return out.with_name(f"{out.name}.seen")


def play(runs: list[dict[str, Any]]) -> None:
    """Run all runs in this process and its peers, with the timeout of the first run."""
    is_first_rank = os.environ["RANK"] == "0"
    flags = [run["flags"] + ([] if is_first_rank else run.get("others", [])) for run in runs]
    configs = [load_settings(TrainConfig, run_flags) for run_flags in flags]
    with init_distributed("cpu", timeout=configs[0].timeout) as dist:
        for config, options in zip(configs, runs, strict=True):
            folder_of(config.out).mkdir(exist_ok=True)
            trainer_module.total_memory = lambda device, run=options: run.get("memory", 2**40)
            if "full" in options and dist.rank == dist.size - 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (options["full"], resource.RLIM_INFINITY))
            stopper = Stopper(options)
            watcher = Watcher()
            holder = Holder()
            callbacks = [Records(), stopper]
            callbacks += [watcher] if options.get("watch") and dist.is_main_process else []
            callbacks += [Masked()] if options.get("mask") else []
            callbacks += [holder] if options.get("hold") else []
            with contextlib.redirect_stdout(io.StringIO()) as output:
                peers = dataclasses.replace(dist, sharded=config.parallel == "fsdp")
                run = train.train(config, peers, callbacks, lambda s=stopper: s.should_stop)
                if options.get("conclude"):
                    print_summary(run)
                if options.get("hold"):
                    holder.note(run, "ended")
            assert run.step == (options.get("stop") or config.steps or run.step)
            # A DDP that outlives its process group may hang in its destructor.
            assert run.ddp_model is run.model
            record = {
                "output": output.getvalue(),
                "progress": run.budget.progress,
                "steps": run.step,
            }
            path = folder_of(config.out) / f"{dist.rank}.json"
            path.write_text(json.dumps(watcher.record | record))


def run_forks(size: int, runs: list[dict[str, Any]]) -> int:
    """Run in ``size`` forks of this process; return the first exit code that is not 0, or 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    children = set()
    for rank in range(size):
        if child := os.fork():
            children.add(child)
            continue
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        signal.alarm(MAX_RUN_SECONDS)
        try:
            play(runs)
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
    code = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status)
            for peer in children:  # would wait for the one that failed
                os.kill(peer, signal.SIGKILL)
    return code


def serve(lines: Iterable[str]) -> None:
    """Answer each line, [processes, RUNS], with the exit code of the forks that did it."""
    for module in ("torch._dynamo", "torch.distributed.device_mesh", "torch.distributed.fsdp"):
        importlib.import_module(module)  # else every fork would, for its optimizer, or to shard
    for line in lines:
        print(run_forks(*json.loads(line)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        play(json.loads(sys.argv[1]))
    else:
        serve(sys.stdin)
