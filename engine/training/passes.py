"""The forward and backward passes of a run: compiled, captured, or averaged over the ranks."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from engine.core import sharding
from engine.core.cli import say, warn
from engine.core.device import (
    DTYPE_BY_NAME,
    ROUNDING_TOLERANCES,
    forked_generators,
    mixed_precision,
    usable_memory,
)
from engine.core.distributed import DistributedContext
from engine.core.sharding import gradient_sync
from engine.data.batches import inputs_and_targets
from engine.data.dataset import Dataset
from engine.data.split import EVALUATION_BATCH_TOKENS, PADDING_TOKEN, Split
from engine.nn.acceleration import (
    Acceleration,
    CapturedCalls,
    StaticGradients,
    checkpoint_activations,
)
from engine.nn.attention import DocumentAttention, shrink_config
from engine.nn.inference import build_decoder
from engine.runs.checkpoint import build_meta_model
from engine.training.budget import Budget
from engine.training.config import TrainConfig
from engine.training.estimate import lora_arguments
from engine.training.optimizer import Optimizer
from model import GPT, Block, Head

WARMUP_WINDOW_TOKENS = 16
NUM_COMPARED_STEPS = 4  # of a small model


class Passes:
    """The passes of a model through micro-batches, in training and in evaluation."""

    def __init__(
        self, model: GPT, config: TrainConfig, dist_ctx: DistributedContext, data: Dataset
    ):
        """Prepare passes of a model, whose weights may be set later."""
        self.model = model
        self.config = config
        self.dist_ctx = dist_ctx
        self.data = data
        self.ddp_model: nn.Module = model  # averages gradients over the ranks
        self.reduce_every_microbatch = False
        self.budget = Budget({}, steps=config.steps or math.inf)  # of the run
        self.autocast = partial(mixed_precision, DTYPE_BY_NAME[config.dtype], dist_ctx.device)
        self.acceleration = Acceleration(
            model,
            dist_ctx.device,
            partial(dist_ctx.run_on_main, warn),
            self.warm_up,
            captures=config.captures_steps(dist_ctx),
            compiles_blocks=dist_ctx.sharded,
            is_dynamic=bool(data.longest_example),
        )
        params = [param for param in model.parameters() if param.requires_grad]
        self.gradients = StaticGradients(params)
        self.captured_pass = CapturedCalls(self.acceleration.pool)
        self.num_passes: Counter[tuple[Any, ...]] = Counter()  # of each graph, to check the first
        self.num_checked_passes = 0
        self.copies_decoder = not (dist_ctx.sharded or config.lora_rank)
        self.tolerance = ROUNDING_TOLERANCES[DTYPE_BY_NAME[config.dtype]]

    def wrap_model(self) -> None:
        """Apply activation checkpointing, compilation and data parallelism to the model."""
        config = self.config
        if config.checkpoint_activations:
            # To save the state of a generator waits for the device.
            checkpoint_activations(self.model, keeps_generator=not self.acceleration.captures)
        if config.compile:
            self.dist_ctx.run_on_main(say, "compiling the model, before the first step")
            self.acceleration.compile()
        with self.budget.pause(), self.autocast():
            self.ddp_model = sharding.wrap_ddp(self.model, self.dist_ctx, *self.example_batch())
        num_rows = config.micro_batch_rows(self.dist_ctx) * self.dist_ctx.size
        if self.dist_ctx.sharded and num_rows < config.batch_size:
            gradient_bytes = 4 * self.model.num_parameters  # of full ones, on each rank
            is_too_large = gradient_bytes > usable_memory(self.dist_ctx.device) / 4
            self.reduce_every_microbatch = self.dist_ctx.any(is_too_large)
        if self.reduce_every_microbatch:
            text = "gradients are reduced after each micro-batch, to save memory"
            self.dist_ctx.run_on_main(say, text)

    def example_batch(self) -> Tensor:
        """Return inputs and targets of the shape of a micro-batch, (2, B, T)."""
        rows = self.config.micro_batch_rows(self.dist_ctx)
        shape = (2, rows, self.data.row_length(self.config.context_length))
        return torch.zeros(shape, dtype=torch.long, device=self.dist_ctx.device)

    def warm_up(self) -> None:
        """Compute gradients of a micro-batch and a loss of evaluation, which compiles them.

        The gradients of the parameters stay as they are: a capture may have failed in a step.
        """
        with self.budget.pause(), self.attention_window_warmup(), self.autocast():
            loss = self.compute_loss(self.model, *self.example_batch())
            if self.dist_ctx.sharded:
                loss.backward()
                self.model.zero_grad()
            else:
                torch.autograd.grad(loss, self.gradients.params, allow_unused=True)
        with self.budget.pause(), self.evaluating():
            split = self.data.val
            self.compute_loss(self.model, *next(self.evaluation_batches(split)))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model compute as in evaluation, without gradients."""
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            self.model.train()
            for key in self.num_passes:  # an evaluation may have used the memory of a graph
                self.num_passes[key] = max(0, self.num_checked_passes - 1)

    def compute_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch, (B, T) each, summed over its targets."""
        if not self.config.document_mask:
            return model(inputs, targets)
        dropout_p = self.config.model.dropout if model.training else 0.0
        windows = self.model.config.layer_windows
        windows[0] = first_head(self.model).window  # shorter in its warmup
        start = cast(int, self.data.document_start)  # resolve() checks that there is one
        contexts = {w: DocumentAttention(inputs, start, w, dropout_p) for w in {*windows}}
        return model(inputs, targets, [contexts[window] for window in windows])

    def add_gradients(
        self, inputs: Tensor, targets: Tensor, scale: Tensor, is_first: bool, is_last: bool
    ) -> Tensor:
        """Compute the gradients of a micro-batch's loss, times a scale, and add them.

        The first micro-batch of a step sets them. Returns the loss, summed over the targets, which
        the next call may overwrite.
        """
        with self.attention_window_warmup() as window:
            add = partial(self._add_gradients, inputs, targets, scale, (is_first, window), is_last)
            key = (is_first, window, inputs.shape)
            is_due = self.num_passes[key] < self.num_checked_passes
            self.num_passes[key] += 1
            if is_due and (self.acceleration.captures or self.acceleration.undo_compilation):
                return self._add_checked_gradients(add, is_first)
            return add()

    def _add_gradients(
        self,
        inputs: Tensor,
        targets: Tensor,
        scale: Tensor,
        key: tuple[bool, int],
        is_last: bool,
        is_captured: bool = True,
    ) -> Tensor:
        """Do what :meth:`add_gradients` does."""
        if self.acceleration.pool and self.acceleration.captures:
            compute = self._compute_static_gradients
            if is_captured:
                return self.captured_pass(compute, inputs, targets, scale, key=key)
            return self.acceleration.pool.run(partial(compute, inputs, targets, scale, *key))
        sync = self.reduce_every_microbatch or is_last
        with gradient_sync(self.ddp_model, sync), self.autocast():
            loss = self.compute_loss(self.ddp_model, inputs, targets)
            (loss * scale).backward()
        return loss.detach()

    def _add_checked_gradients(self, add: Callable[..., Tensor], is_first: bool) -> Tensor:
        """Add gradients as fast as possible, then plainly, and keep the plain ones.

        What makes them differ is not used again. Without memory for both, nothing is compared.
        Compiled dropout draws other numbers: with dropout, both are compiled.
        """
        earlier: list[Tensor | None] = []
        loss: Tensor | None = None

        def restore() -> None:
            for param, grad in zip(self.gradients.params, earlier, strict=False):
                if grad is None or param.grad is None:
                    param.grad = None
                else:
                    param.grad.copy_(grad)

        try:
            for param in self.gradients.params:
                grad = None if is_first else param.grad
                earlier.append(None if grad is None else grad.clone())
            with forked_generators(self.dist_ctx.device):
                actual = fingerprint(add(), self._gradients())
            restore()
            with nullcontext() if self.config.model.dropout else self.acceleration.uncompiled():
                loss = add(is_captured=False)
        except torch.OutOfMemoryError:
            self.num_checked_passes = 0
        if loss is None:
            restore()
            return add()
        expected = fingerprint(loss, self._gradients())
        if problem := describe_difference([*self._gradients()], actual, expected, self.tolerance):
            self.num_passes.clear()
            self.acceleration.step_back(problem)
        return loss

    def _gradients(self) -> dict[str, Tensor]:
        named_params = self.model.named_parameters()
        return {name: param.grad for name, param in named_params if param.grad is not None}

    def _compute_static_gradients(
        self, inputs: Tensor, targets: Tensor, scale: Tensor, is_first: bool, window: int
    ) -> Tensor:
        """Do what :meth:`add_gradients` does, without a new tensor that another pass needs."""
        with self.autocast():
            loss = self.compute_loss(self.model, inputs, targets)
            self.gradients.compute(loss * scale, adds=not is_first)
        return loss.detach()

    @contextlib.contextmanager
    def attention_window_warmup(self) -> Iterator[int]:
        """Early in the run, let the first block attend to the last few positions only.

        Its heads then learn early to attend to the previous token. The induction heads of the next
        block need that (Olsson et al. 2022). Yields the window of the first block.
        """
        head = first_head(self.model)
        window = head.window
        if self.budget.progress < self.config.optimizer.window_warmup:
            head.window = min(window or WARMUP_WINDOW_TOKENS, WARMUP_WINDOW_TOKENS)
        try:
            yield head.window
        finally:
            head.window = window

    def evaluation_batches(self, split: Split, is_last: bool = False) -> Iterator[Tensor]:
        """Yield inputs and targets, (2, B, T), of this rank's rows of an evaluation, or the last.

        For a compiled model, batches of text have one shape: a shorter one is padded with rows.
        """
        config = self.config
        num_rows = 0
        if config.compile and not split.num_examples:
            num_rows = max(1, EVALUATION_BATCH_TOKENS // config.context_length)
        max_tokens = config.evaluation_tokens(len(split), is_last)
        ranks = (self.dist_ctx.rank, self.dist_ctx.size)
        for rows in split.evaluation_rows(config.context_length, max_tokens, *ranks):
            num_missing = max(0, num_rows - len(rows))
            rows = np.pad(rows, ((0, num_missing), (0, 0)), constant_values=PADDING_TOKEN)
            yield inputs_and_targets(rows).to(self.dist_ctx.device)

    @contextlib.contextmanager
    def decoder(self) -> Iterator[tuple[GPT, torch.dtype | None]]:
        """Yield the model for generating text, and the dtype of its cached keys and values.

        It has weights of its own. If the model is sharded, or frozen below updates of LoRA, it is
        the training model, which computes in the dtype of the run.
        """
        if self.copies_decoder:
            yield build_decoder(self.model), None
            return
        with self.autocast(), self.acceleration.uncompiled():  # each length would be compiled
            yield self.model.eval(), DTYPE_BY_NAME[self.config.dtype]
        self.model.train()


def first_head(model: GPT) -> Head:
    """Return the head whose window is that of the first block."""
    return cast(Head, cast(Block, model.blocks[0]).attention.heads[0])


def fingerprint(loss: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    """Return a loss, and of each tensor the norm and the sum with alternating signs."""
    flat = [tensor.flatten() for tensor in tensors.values()]
    sums = [2 * values[::2].sum() - values.sum() for values in flat]
    return torch.stack([loss, *torch._foreach_norm(flat), *sums]).double().cpu()


def describe_difference(
    names: Sequence[str], actual: Tensor, expected: Tensor, tolerance: float
) -> str:
    """Name the largest difference between two fingerprints; "" if all are within a tolerance."""
    norms = expected[1 : 1 + len(names)]
    # Beside the largest, a tiny tensor consists of rounding errors.
    norms = norms.clamp(min=tolerance * norms.nan_to_num(0, 0).max())
    differences = (actual - expected).abs() / torch.cat((expected[:1].abs(), norms, norms))
    is_finite_in_one = actual.isfinite() | expected.isfinite()
    differences = differences.nan_to_num(math.inf).masked_fill(~is_finite_in_one, 0)
    if differences.max() <= tolerance:
        return ""
    name = ["the loss", *names, *names][int(differences.argmax())]
    return f"results differ from plain ones by {differences.max():.1%} ({name})"


def describe_update_difference(
    config: TrainConfig, dist_ctx: DistributedContext, data: Dataset
) -> str:
    """Compare captured steps with plain ones; return "" if they capture and weights are equal.

    The model is small and has random weights, and the options and the optimizer of the run.
    """
    dtype = DTYPE_BY_NAME[config.dtype]
    model_config = shrink_config(config.model, config.model.attention, config.model.dropout)
    config = replace(config, compile=False, model=model_config)
    shape = (2, 2, model_config.context_length)
    inputs, targets = torch.arange(math.prod(shape), device=dist_ctx.device).view(shape) // 3 % 2
    results = []
    problems: list[str] = []
    for captures in (True, False):
        with forked_generators(dist_ctx.device):
            torch.manual_seed(1)
            model = build_meta_model(model_config, lora_arguments(config))
            model = sharding.shard_and_allocate(model, dist_ctx, dtype)
            for param in model.parameters():
                nn.init.normal_(param, std=0.5)
            passes = Passes(model, replace(config, capture=captures), dist_ctx, data)
            if pool := passes.acceleration.pool:
                pool.on_failure = problems.append
            optimizer = Optimizer(model, config.optimizer, dist_ctx, dtype, pool)
            for step in range(NUM_COMPARED_STEPS):
                passes.budget.progress = step / NUM_COMPARED_STEPS  # and the window changes
                scale = torch.full((), optimizer.loss_scale / targets.numel()).to(dist_ctx.device)
                passes.add_gradients(inputs, targets, scale, is_first=True, is_last=False)
                loss = passes.add_gradients(inputs, targets, scale, is_first=False, is_last=True)
                loss = loss.clone()  # before the next replay
                optimizer.step(step, NUM_COMPARED_STEPS)
            results.append(fingerprint(loss, dict(model.named_parameters())))
    names = [name for name, _ in model.named_parameters()]
    problem = describe_difference(names, results[0], results[1], passes.tolerance)
    return problems[0] if problems else problem and f"captured updates: {problem}"
