"""The trainer: model, optimizer, batches, budget and callbacks of the training loop."""

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.core import sharding
from engine.core.cli import count_noun, say, warn
from engine.core.device import DTYPE_BY_NAME
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError, describe_briefly, is_bug
from engine.core.settings import flatten, to_toml
from engine.data.batches import Batches
from engine.data.dataset import Dataset
from engine.data.split import BatchSpec
from engine.generation.scores import Question
from engine.nn.attention import check_attention
from engine.nn.specs import draw_initial_values
from engine.runs.checkpoint import (
    BaseReference,
    Checkpoint,
    RunState,
    build_meta_model,
    check_modification,
    hash_definition,
)
from engine.runs.run_files import find_base, rank_evaluations
from engine.training.budget import Budget
from engine.training.config import TrainConfig
from engine.training.estimate import averaging_weight, lora_arguments, micro_batch_sizes
from engine.training.optimizer import Optimizer
from engine.training.passes import Passes, describe_update_difference
from engine.training.resolve import changed_settings, init_token_rows, split_token_ids
from engine.training.run_dir import RunDir
from model import GPT

NUM_CHECKED_PASSES = 3  # of a graph: compared with plain ones, the first two replays among them
CHECKPOINT_BYTES_PER_SECOND = 5e8  # written and hashed
CAPTURED_LENGTH_MULTIPLE = 64  # of padded examples in captured steps, which so have few lengths

Record = dict[str, Any]  # of metrics.jsonl


class Callback:
    """Hooks into training. A subclass overrides the hooks that it needs."""

    def on_train_start(self, trainer: "Trainer") -> None:
        """Called once, with the weights loaded, before the first step."""

    def on_step(self, trainer: "Trainer") -> None:
        """Called after every optimizer step."""

    def on_record(self, trainer: "Trainer", record: Record) -> None:
        """Called with each record of metrics.jsonl, which has ``train_loss`` or ``val_loss``."""

    def on_train_end(self, trainer: "Trainer") -> None:
        """Called once when training ends, also after an error."""


class Trainer:
    """The state of a run, and the objects that change it. Every rank has one."""

    def __init__(
        self,
        config: TrainConfig,
        dist_ctx: DistributedContext,
        data: Dataset,
        run_dir: RunDir | None = None,
        callbacks: Sequence[Callback] = (),
        modify_model: Callable[[GPT], None] | None = None,
    ):
        """Build model and optimizer, without weights. Nothing is saved without a run_dir.

        ``modify_model`` is called with the model before it gets memory and an optimizer.
        """
        self.config = config
        self.dist_ctx = dist_ctx
        self.data = data
        self.run_dir = run_dir
        self.callbacks = list(callbacks)
        self.modify_model = modify_model

        dtype = DTYPE_BY_NAME[config.dtype]
        torch.manual_seed(config.seed)
        model = build_meta_model(config.model_config, lora_arguments(config), modify_model)
        check_attention(model)
        self.base_reference: BaseReference | None = None  # of LoRA, on the main process
        self.model: GPT = sharding.shard_and_allocate(model, dist_ctx, dtype)
        self.passes = Passes(self.model, config, dist_ctx, data)
        self.passes.acceleration.make_room = self.make_room
        pool = self.passes.acceleration.pool
        if run_dir and dist_ctx.is_alone:
            self.passes.num_checked_passes = NUM_CHECKED_PASSES
            if pool and (problem := describe_update_difference(config, dist_ctx, data)):
                pool.fail(problem)
        self.optimizer = Optimizer(self.model, config.optimizer, dist_ctx, dtype, pool)

        rank_slice = dist_ctx.rank_slice(config.batch_size)
        spec = BatchSpec(config.context_length, config.seed, config.batch_size, rank_slice)
        length_multiple = CAPTURED_LENGTH_MULTIPLE if pool else 1
        self.batches = Batches(data.train, spec, dist_ctx.device, length_multiple)
        self.tokens_per_step = data.train.tokens_per_step(config.batch_size, config.context_length)

        self.step = 0
        self.questions: list[Question] = []  # to score at each evaluation
        self.evaluation: Record | None = None  # of this step, if it was evaluated
        self.best_evaluation: Record | None = None
        self.last_save: tuple[int, Record | None] = (0, None)  # its step and evaluation
        self.failed = False  # ended by an error
        self.warnings: set[str] = set()  # each is printed once
        self.changes: list[dict[str, Any]] = []  # settings changed by each resume
        self.budget = self.passes.budget

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: Any) -> None:
        self.failed = error_type is not None
        self.notify("on_train_end")
        self.passes.ddp_model = self.model  # DDP must be freed before its process group

    def say(self, text: str, end: str = "\n") -> None:
        """Print on the main process."""
        self.dist_ctx.run_on_main(say, text, end)

    def notify(self, event: str, *arguments: Any) -> None:
        """Call a hook of every callback. If one fails, warn once and continue."""
        for callback in tuple(self.callbacks):
            try:
                getattr(callback, event)(self, *arguments)
            except Exception as error:
                reason = describe_briefly(error)
                text = f"{type(callback).__name__} failed ({reason}); training continues"
                if text not in self.warnings:
                    self.warnings.add(text)
                    if is_bug(error):
                        traceback.print_exception(error)
                    warn(text)
                if event == "on_train_start":
                    self.callbacks.remove(callback)

    @property
    def is_best(self) -> bool:
        """Whether no comparable evaluation before that of this step is better; true for NaN too."""
        evaluations = (self.best_evaluation, self.evaluation)
        return rank_evaluations(evaluations, self.config.best_by)[0] == 1

    # Weights.

    def initialize(self, base: Checkpoint | None = None) -> None:
        """Set the weights to those of a base model, which rank 0 reads, or to initial values."""
        weights: Iterable[tuple[str, Tensor]] = ()
        if base:
            ids = split_token_ids(base, self.data.tokenizer, self.data.learns_chats)
            num_rows = len(self.model.token_embedding.weight)
            weights = init_token_rows(base.merged_model(), num_rows, *ids)
            if self.config.lora_rank and self.run_dir:
                self.base_reference = base.reference(self.run_dir.path)
        if self.config.init_from:
            weights = self.dist_ctx.broadcast_tensors(weights)
        sharding.load_parameters(self.model, self._complete(weights))

    def _complete(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield weights, then initial values of the other parameters."""
        params = dict(self.model.named_parameters())
        for name, value in weights:
            params.pop(name, None)
            yield name, value
        yield from draw_initial_values(params.items(), self.model.specs, self.model.seed)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run, and print the settings that have changed.

        Raises UserError if the data, or a setting that must not change, has changed.
        """
        assert self.run_dir is not None
        state = checkpoint.state
        check_modification(checkpoint, self.modify_model)
        changes = changed_settings(state, flatten(self.config), self.data.sha256)
        if checkpoint.sha256["tokenizer.json"] != self.data.manifest["tokenizer"]["sha256"]:
            raise UserError(f"{checkpoint.path}: corrupted, its tokenizer is not that of --data.")
        sharding.load_parameters(self.model, self._weights(checkpoint))
        self.optimizer.load_state(self.run_dir.distribute(checkpoint.optimizer()))
        self.step = state.step
        self.evaluation = state.evaluation
        self.best_evaluation = state.best_evaluation
        if "best_by" in changes:
            self.best_evaluation = self.run_dir.best(self.config.best_by).state.evaluation
        self.last_save = (self.step, self.evaluation)
        self.changes = list(state.changes)
        if changes:
            self.changes.append({"step": self.step, **changes})
        text = "".join(f", {name} {old} → {new}" for name, (old, new) in changes.items())
        self.say(f"Resuming after step {self.step:,}{text}")

    def load_best(self) -> int:
        """Set the weights to those of the best checkpoint of the run, and return its step."""
        assert self.run_dir is not None
        checkpoint = self.run_dir.best()
        sharding.load_parameters(self.model, self._weights(checkpoint))
        return checkpoint.step

    def _weights(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a checkpoint of this run on every rank, with those of its base."""
        assert self.run_dir is not None
        self.base_reference = checkpoint.state.base
        if self.base_reference:
            base = self.dist_ctx.run_on_main(find_base, checkpoint, self.config.base)
            frozen = base.merged_model() if base else ()
            trained_names = self.optimizer.parameters.keys()
            frozen = (pair for pair in frozen if pair[0] not in trained_names)
            yield from self.dist_ctx.broadcast_tensors(frozen)
        yield from self.run_dir.distribute(checkpoint.model())

    def average_weights(self) -> None:
        """Average the weights of a text that is read again; the last step replaces them by that."""
        is_last = self.budget.exhausted
        epoch_tokens = max(self.data.epoch_tokens)
        weight = averaging_weight(
            self.config, self.step, self.tokens_per_step, epoch_tokens, is_last
        )
        if weight:
            self.optimizer.average_parameters(weight, replace=is_last)

    # Memory and time.

    @property
    def num_captures(self) -> int:
        """The number of CUDA graphs that were captured."""
        calls = (self.passes.captured_pass, self.optimizer.captured_norm)
        return sum(each.num_captures for each in (*calls, self.optimizer.captured_update))

    def make_room(self) -> bool:
        """Drop the graphs of passes; if there are none, halve the micro-batches.

        Halves only in the first step of one rank, and returns False otherwise. Raises UserError if
        a micro-batch is one sequence.
        """
        if self.passes.captured_pass.drop_graphs():
            return True
        if self.dist_ctx.size > 1 or self.step > self.budget.first_step:
            return False
        rows = self.config.micro_batch_rows(self.dist_ctx)
        if rows == 1:
            problem = f"one sequence does not fit in the memory of {self.dist_ctx.device}"
            advice = "Use --checkpoint-activations, or a smaller --context-length"
            raise UserError(f"--micro-batch-size: {problem} (got 1). {advice}.") from None
        rows = micro_batch_sizes(self.config.batch_size, rows // 2)[0]
        self.config = replace(self.config, micro_batch_size=rows)
        self.passes.config = self.config
        self.passes.captured_pass.graphs.clear()
        if self.run_dir:
            self.run_dir.write_settings(to_toml(self.config))
        warn(f"out of memory: micro-batches have {count_noun(rows, 'sequence')} from now on")
        return True

    def start_budget(self, started_at: float, checkpoint: Checkpoint | None) -> None:
        """Start the budget, at the time of a checkpoint if there is one.

        ``started_at`` is the start of config.minutes, in seconds of time.monotonic().
        """
        config = self.config
        sizes = [len(dataset.val) for dataset in self.data.datasets]
        eval_tokens = sum(config.evaluation_tokens(size, False) for size in sizes)
        last_tokens = sum(config.evaluation_tokens(size, True) for size in sizes)
        extra_tokens = last_tokens if last_tokens > eval_tokens else 0
        state = checkpoint.state if checkpoint else RunState(config.model_config)
        optimizer_bytes = sum(tensor.nbytes for tensor in self.optimizer.state().values())
        checkpoint_bytes = optimizer_bytes + 4 * self.model.num_parameters
        limits = (state.settings.get("minutes"), state.settings.get("steps"))
        is_as_long = config.minutes and limits == (config.minutes, config.steps)
        end = started_at + 60 * config.minutes if config.minutes else math.inf
        self.budget = Budget(
            {"evaluate": config.eval_every, "save": config.save_every},
            eval_cost_steps=eval_tokens / self.tokens_per_step / 3,  # no backward pass
            last_eval_extra_steps=extra_tokens / self.tokens_per_step / 3,
            save_cost_seconds=checkpoint_bytes / CHECKPOINT_BYTES_PER_SECOND,
            steps=config.steps or math.inf,
            seconds=end - time.monotonic(),
            first_step=self.step,
            progress=state.progress if is_as_long else 0.0,
            earlier_seconds=state.elapsed_seconds,
            dist_ctx=self.dist_ctx,
        )
        self.passes.budget = self.budget
        self.budget.update(self.step)
        if checkpoint and self.budget.exhausted:
            flag = "--steps" if self.step >= self.budget.steps else "--minutes"
            self.say(f"The run is complete. To continue it, raise {flag}.")

    # Records and checkpoints.

    def log_training(self, loss: Tensor, learning_rate: float, grad_norm: Tensor) -> None:
        """Pass the record of a step to the callbacks. Waits for the device."""
        if self.run_dir is not None:
            self.run_dir.check()
        digest = self.dist_ctx.sum(torch.tensor(self.batches.digest, dtype=torch.float64))
        speed = self.budget.measure_speed(self.step) * self.tokens_per_step
        record = {
            "step": self.step,
            "tokens": self.step * self.tokens_per_step,
            "train_loss": self.dist_ctx.sum(loss).item(),
            "learning_rate": learning_rate,
            "grad_norm": grad_norm.item(),
            "tokens_per_second": round(speed, 1),
            "elapsed_seconds": round(self.budget.elapsed, 3),
            "skipped_steps": self.optimizer.count_skipped(self.last_save[0]),
            "batch_digest": f"{int(digest):x}",
        }
        if self.config.minutes:
            record["progress"] = round(self.budget.progress, 6)
        self.notify("on_record", record)

    def save(self) -> None:
        """Write a checkpoint in the background, unless this step and evaluation are saved."""
        if self.run_dir is None or self.step == 0 or self.last_save == (self.step, self.evaluation):
            return
        manifest = self.data.manifest
        state = RunState(
            step=self.step,
            tokens=self.step * self.tokens_per_step,
            elapsed_seconds=self.budget.elapsed,
            progress=self.budget.progress,
            evaluation=self.evaluation,
            best_evaluation=self.best_evaluation,
            changes=self.changes,
            model=self.config.model_config,
            settings=flatten(self.config),
            data_sha256=self.data.sha256,
            examples=manifest["origin"].get("examples"),
            documents=manifest["splits"]["train"]["documents"],
            base=self.base_reference,
            is_modified=self.modify_model is not None,
            definition=hash_definition() if self.config.model.attention == "loop" else "",
        )
        with self.budget.timing("save"):
            weights = self.model.state_dict()
            if self.config.lora_rank:
                weights = {name: weights[name] for name in self.optimizer.parameters}
            self.run_dir.save(state, weights, self.optimizer.state(), self.data.tokenizer.save)
        self.last_save = (self.step, self.evaluation)
