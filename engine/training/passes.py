"""The forward and backward passes of a run: compiled, captured, or averaged over the ranks."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from engine.core import sharding
from engine.core.cli import say, warn
from engine.core.device import DTYPE_BY_NAME, mixed_precision, total_memory
from engine.core.distributed import DistributedContext
from engine.core.sharding import gradient_sync
from engine.data.batches import Mixture, inputs_and_targets
from engine.data.split import EVALUATION_BATCH_TOKENS, PADDING_TOKEN, Split
from engine.nn.acceleration import (
    Acceleration,
    CapturedCalls,
    StaticGradients,
    checkpoint_activations,
)
from engine.nn.attention import DocumentAttention
from engine.nn.inference import build_decoder
from engine.training.budget import Budget
from engine.training.config import RunConfig
from engine.training.estimate import fits_merged_weights
from model import GPT, Block

WARMUP_WINDOW_TOKENS = 16


class Passes:
    """The passes of a model through micro-batches, in training and in evaluation."""

    def __init__(self, model: GPT, config: RunConfig, dist_ctx: DistributedContext, data: Mixture):
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
            config.captures_steps(dist_ctx),
            dist_ctx.sharded,
        )
        params = [param for param in model.parameters() if param.requires_grad]
        self.gradients = StaticGradients(params)
        self.captured_pass = CapturedCalls(self.acceleration.pool)

    def wrap_model(self) -> None:
        """Apply activation checkpointing, compilation and data parallelism to the model."""
        config = self.config
        if config.checkpoint_activations:
            # To save the state of a generator waits for the device.
            checkpoint_activations(self.model, keeps_generator=not self.acceleration.captures)
        if config.compile:
            self.dist_ctx.run_on_main(say, "compiling the model, before the first step")
            self.acceleration.compile(self.warm_up, is_dynamic=bool(self.data.longest_example))
        with self.budget.pause(), self.autocast():
            self.ddp_model = sharding.wrap_ddp(self.model, self.dist_ctx, *self.example_batch())
        num_rows = config.micro_batch_rows(self.dist_ctx) * self.dist_ctx.size
        if self.dist_ctx.sharded and num_rows < config.batch_size:
            gradient_bytes = 4 * self.model.num_parameters  # of full ones, on each rank
            is_too_large = gradient_bytes > total_memory(self.dist_ctx.device) / 4
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
            loss = self.loss(self.model, *self.example_batch())
            if self.dist_ctx.sharded:
                loss.backward()
                self.model.zero_grad()
            else:
                torch.autograd.grad(loss, self.gradients.params, allow_unused=True)
        with self.budget.pause(), self.evaluating():
            split = self.data.datasets[0].val
            self.loss(self.model, *next(self.evaluation_batches(split)))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model compute as in evaluation, without gradients."""
        self.model.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield
        finally:
            self.model.train()

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a micro-batch, (B, T) each, summed over its targets."""
        if not self.config.document_mask:
            return model(inputs, targets)
        dropout_p = self.config.model.dropout if model.training else 0.0
        windows = [cast(Block, block).attention.window for block in self.model.blocks]
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
            if self.acceleration.captures:
                compute = self._compute_static_gradients
                return self.captured_pass(compute, inputs, targets, scale, key=(is_first, window))
            sync = self.reduce_every_microbatch or is_last
            with gradient_sync(self.ddp_model, sync), self.autocast():
                loss = self.loss(self.ddp_model, inputs, targets)
                (loss * scale).backward()
        return loss.detach()

    def _compute_static_gradients(
        self, inputs: Tensor, targets: Tensor, scale: Tensor, is_first: bool, window: int
    ) -> Tensor:
        """Do what :meth:`add_gradients` does, without a new tensor that another pass needs."""
        with self.autocast():
            loss = self.loss(self.model, inputs, targets)
            self.gradients.compute(loss * scale, adds=not is_first)
        return loss.detach()

    @contextlib.contextmanager
    def attention_window_warmup(self) -> Iterator[int]:
        """Early in the run, let the first block attend to the last few positions only.

        Its heads then learn early to attend to the previous token. The induction heads of the next
        block need that (Olsson et al. 2022). Yields the window of the first block.
        """
        attention = cast(Block, self.model.blocks[0]).attention
        window = attention.window
        layers: list[Any] = [attention, *attention.heads]  # for the fused path and for the loop
        if self.budget.progress < self.config.optimizer.window_warmup:
            for layer in layers:
                layer.window = min(window or WARMUP_WINDOW_TOKENS, WARMUP_WINDOW_TOKENS)
        try:
            yield attention.window
        finally:
            for layer in layers:
                layer.window = window

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

        It has weights of its own if they fit; else, and if it is sharded, it is the training model,
        which computes in the dtype of the run.
        """
        if fits_merged_weights(self.config, self.dist_ctx):
            yield build_decoder(self.model), None
            return
        with self.autocast():
            yield self.model.eval(), DTYPE_BY_NAME[self.config.dtype]
        self.model.train()
