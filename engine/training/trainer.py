"""What the training loop works with: model, optimizer, batches, budget, run directory and callbacks."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.cli import say, warn
from engine.core.device import DTYPE_BY_NAME, mixed_precision, total_memory
from engine.core.distributed import DistributedContext
from engine.core.settings import flatten, to_toml
from engine.core.sharding import load_parameters, shard_and_allocate, should_reduce_every_microbatch, wrap_ddp
from engine.data.batches import Batches, tokens_per_step
from engine.data.mixture import Mixture
from engine.nn.acceleration import checkpoint_activations, compile_modules
from engine.training.budget import Clock, Event, StepBudget, TimeBudget
from engine.training.checkpoint import Checkpoint
from engine.training.config import ChangeableConfig, TrainConfig
from engine.training.optimizer import Optimizer, OptimizerConfig
from engine.training.resolve import changed_settings, check_same_tokenizer, expand_vocab_rows
from engine.training.run_dir import RunDir
from model import GPT, Block

CHECKPOINT_BYTES_PER_SECOND = 5e8  # written and hashed
WARMUP_WINDOW_TOKENS = 16


class Callback:
    """Hooks into training; a callback overrides the ones that it needs."""

    def on_train_start(self, trainer: "Trainer") -> None:
        """Called once, after the weights are there and before the first step."""

    def on_step(self, trainer: "Trainer") -> None:
        """Called after every optimizer step."""

    def on_record(self, trainer: "Trainer", record: dict[str, Any]) -> None:
        """Called with each record for metrics.jsonl: with ``train_loss``, or ``val_loss`` of an evaluation."""

    def on_train_end(self, trainer: "Trainer") -> None:
        """Called once, however training ended."""


class Trainer:
    """The state of a run, and the objects that change it. Every rank has one."""

    def __init__(
        self,
        config: TrainConfig,
        dist: DistributedContext,
        data: Mixture,
        run_dir: RunDir | None = None,
        callbacks: Sequence[Callback] = (),
    ):
        """Build model and optimizer, without values yet: see :meth:`initialize` and :meth:`restore`.

        Every setting of the config that is None by default must have its value; without a run directory nothing is
        saved.
        """
        self.config = config
        self.dist = dist
        self.data = data
        self.run_dir = run_dir
        self.callbacks = list(callbacks)
        self.dtype = DTYPE_BY_NAME[config.dtype]
        assert config.batch_size is not None
        self.batch_size: int = config.batch_size
        torch.manual_seed(config.seed)
        with torch.device("meta"):
            model = GPT(config.model)
        self.model: GPT = shard_and_allocate(model, dist, self.dtype)
        self.optimizer = Optimizer(self.model, config.optimizer, dist, self.dtype)
        self.batches = Batches(
            data.train,
            config.model.context_length,
            config.seed,
            self.batch_size,
            dist.rank_slice(self.batch_size),
            dist.device,
        )
        self.tokens_per_step = tokens_per_step(data.train, config.model.context_length, self.batch_size)
        self.ddp_model: nn.Module = self.model  # averages gradients over the ranks; the model itself on one
        self.reduce_every_microbatch = False
        self.step = 0
        self.val_loss: float | None = None  # of this step, if it was evaluated
        self.best_val_loss = math.inf
        self.saved: tuple[int, float | None] = (
            0,
            None,
        )  # step and val_loss of the newest checkpoint
        self.changes: list[dict[str, Any]] = []  # settings changed by each resume
        self.clock = Clock(0.0, 0)
        self.budget = StepBudget(config.steps or math.inf, {})

    def say(self, text: str, end: str = "\n") -> None:
        """Print on the main process."""
        if self.dist.is_main_process:
            say(text, end)

    def notify(self, event: str, *arguments: Any) -> None:
        """Call a hook of every callback. A callback that fails is reported, and never ends the run."""
        for callback in tuple(self.callbacks):
            try:
                getattr(callback, event)(self, *arguments)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                warn(f"{type(callback).__name__} failed ({reason}); training continues")
                if event == "on_train_start":
                    self.callbacks.remove(callback)

    def autocast(self) -> torch.autocast:
        """The context in which matrix products compute in the dtype of the config."""
        return mixed_precision(self.dtype, self.dist.device)

    # Weights.

    def initialize(self, base: Checkpoint | None = None) -> None:
        """Set the weights to their initial values, or to those of a base model, which only rank 0 reads."""
        if base is None:
            load_parameters(self.model, self.model.initial_values())
            return
        target_rows = {name: len(parameter) for name, parameter in self.model.named_parameters()}
        weights = expand_vocab_rows(base.model() if self.dist.is_main_process else (), target_rows)
        load_parameters(self.model, self.dist.broadcast_tensors(weights))

    def restore(self, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
        """Continue from a checkpoint of this run. Returns the settings that changed: {name: (before, now)}.

        Raises UserError for a checkpoint of other data, or made with other settings that a resume must not change.
        """
        assert self.run_dir is not None
        state = checkpoint.state
        may_change = {setting.name for cls in (ChangeableConfig, OptimizerConfig) for setting in fields(cls)}
        changed = changed_settings(state, flatten(self.config), may_change - {"optimizer"}, self.data.sha256)
        check_same_tokenizer(checkpoint.path, checkpoint.sha256["tokenizer.json"], self.data.manifest)
        load_parameters(self.model, self.run_dir.tensors(checkpoint, "model"))
        self.optimizer.load_state(self.run_dir.tensors(checkpoint, "optimizer"))
        self.step = state["step"]
        self.val_loss = state.get("val_loss")
        self.best_val_loss = math.inf if state["best_val_loss"] is None else state["best_val_loss"]
        self.saved = (self.step, self.val_loss)
        self.changes = list(state.get("changes", []))
        if changed:
            self.changes.append({"step": self.step, **changed})
        return changed

    def wrap_model(self) -> None:
        """Apply activation checkpointing, compilation and data parallelism, each from outside the model."""
        config = self.config
        if config.checkpoint_activations:
            checkpoint_activations(self.model)
        rows = config.micro_batch_size or self.batch_size // self.dist.size
        example = torch.zeros(2, rows, config.model.context_length, dtype=torch.long, device=self.dist.device)
        with self.autocast():
            if config.compile or (config.compile is None and self.dist.device.type == "cuda"):
                modules = list(self.model.blocks) if self.dist.sharded else [self.model]
                error = compile_modules(modules, lambda: self.model(*example).backward())
                if error and self.dist.is_main_process:
                    warn(f"training continues without compilation, which failed: {error}")
                self.model.zero_grad()
            self.ddp_model = wrap_ddp(self.model, self.dist, *example)
        if self.dist.sharded and rows * self.dist.size < self.batch_size:
            num_parameters = self.model.num_parameters
            memory = total_memory(self.dist.device)
            self.reduce_every_microbatch = self.dist.any(should_reduce_every_microbatch(num_parameters, memory))
        if self.reduce_every_microbatch:
            self.say("gradients are reduced after each micro-batch: accumulated unsharded, they need too much memory")

    @contextlib.contextmanager
    def attention_window_warmup(self) -> Iterator[None]:
        """Early in the run, let the first block attend to the last few positions only.

        Its heads then soon learn to look at the previous token, on which the induction heads of the next block build
        (Olsson et al. 2022); with all positions in view this takes many times as long.
        """
        block = self.model.blocks[0]
        assert isinstance(block, Block)
        attention = block.attention
        window = attention.window
        if self.budget.progress < (self.config.optimizer.window_warmup or 0.0):
            attention.window = min(window or WARMUP_WINDOW_TOKENS, WARMUP_WINDOW_TOKENS)
        try:
            yield
        finally:
            attention.window = window

    # Time.

    @property
    def save_seconds(self) -> float:
        """Estimated seconds that a checkpoint takes to be written and hashed."""
        optimizer_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self.optimizer.state().values())
        return (optimizer_bytes + 4 * self.model.num_parameters) / CHECKPOINT_BYTES_PER_SECOND

    def start_budget(self, startup_seconds: float, state: dict[str, Any] | None) -> None:
        """Start the clock, after ``startup_seconds``, from the elapsed time of a checkpoint's state if there is one."""
        config = self.config
        self.clock = Clock(state["elapsed_seconds"] if state else 0.0, self.step)
        every: dict[Event, int | None] = {"evaluate": config.eval_every, "save": config.save_every}
        if not config.minutes:
            self.budget = StepBudget(config.steps or math.inf, every, self.step)
            return
        same_length = state is not None and state["settings"].get("minutes") == config.minutes
        splits = [dataset.val for dataset in self.data.datasets]
        eval_tokens = sum(min(len(split), config.eval_tokens or len(split)) for split in splits)
        self.budget = TimeBudget(
            60 * config.minutes - startup_seconds,
            every,
            {"evaluate": eval_tokens / self.tokens_per_step / 3, "save": self.save_seconds},
            self.dist,
            self.step,
            state["share"] if state is not None and same_length else 0.0,
            config.steps,
        )
        self.budget.update(self.step, self.clock)

    # Records and checkpoints.

    def log_training(self, loss: Tensor, learning_rate: float, grad_norm: Tensor) -> None:
        """Give the callbacks the record of a step. Only here does the loop wait for the device."""
        if self.run_dir is not None:
            self.run_dir.check()
        digest = self.dist.sum(torch.tensor(self.batches.digest, dtype=torch.float64))
        speed = self.clock.steps_per_second(self.step) * self.tokens_per_step
        record = {
            "step": self.step,
            "tokens": self.step * self.tokens_per_step,
            "train_loss": self.dist.sum(loss).item(),
            "learning_rate": learning_rate,
            "grad_norm": grad_norm.item(),
            "tokens_per_second": round(speed, 1),
            **({"share": round(self.budget.progress, 6)} if self.config.minutes else {}),
            "elapsed_seconds": round(self.clock.elapsed, 3),
            "skipped_steps": self.optimizer.count_skipped(self.saved[0]),
            "batch_digest": f"{int(digest):x}",
        }
        self.notify("on_record", record)

    def save(self) -> None:
        """Write a checkpoint in the background, unless this step is saved as it is."""
        if self.run_dir is None or self.step == 0 or self.saved == (self.step, self.val_loss):
            return
        manifest = self.data.manifest
        state = {
            "step": self.step,
            "tokens": self.step * self.tokens_per_step,
            "elapsed_seconds": self.clock.elapsed,
            "share": self.budget.progress,
            "val_loss": self.val_loss,
            "best_val_loss": self.best_val_loss,
            "changes": self.changes,
            "model": asdict(self.config.model),
            "settings": flatten(self.config),
            "data_sha256": self.data.sha256,
            "examples": manifest["origin"].get("examples"),
            "documents": manifest["splits"]["train"]["documents"],
        }
        with self.clock.pause(), self.budget.timing("save"):
            self.run_dir.save(state, self.model.state_dict(), self.optimizer.state(), self.data.tokenizer.save)
        self.saved = (self.step, self.val_loss)

    def write_settings(self) -> None:
        """Write config.toml: every setting, resolved."""
        if self.run_dir is not None:
            self.run_dir.write_settings(to_toml(self.config))
