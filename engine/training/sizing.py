"""--depth, --steps or --minutes → the size of the model.

docs/training.md has the rules in a table. Fitted numbers are those of the best of runs of one to
ten minutes on Python's sources and tiny Shakespeare, some of them in docs/experiments.md.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from engine.core.cli import say
from engine.core.device import choose_num_threads
from engine.core.distributed import DistributedContext
from engine.core.settings import flatten
from engine.data.dataset import Dataset
from engine.nn.acceleration import can_capture_graphs
from engine.training.config import (
    DEFAULT_MINUTES,
    DEFAULT_STEPS,
    MAX_CHARACTER_VOCAB_SIZE,
    MAX_STEPS,
    TrainConfig,
    make_run_config,
)
from engine.training.estimate import estimate_overfitting, fit_micro_batches

# A run in minutes ends where more epochs do not help, however fast it is: at this overfitting, and
# before if its regularization is for less (experiments, 2026-11-24 and 2026-11-27).
MAX_OVERFITTING = 20
MAX_OVERFITTING_RATIO = 2  # to that for which the regularization was chosen, which is 1 at least
TIMED_TOKENS = 1e6  # the length of the run whose step is timed
MAX_TIMING = 0.1  # fraction of the time until the end, on a GPU


@dataclass(frozen=True)
class Size:
    """The settings for a depth and a number of training tokens, and what they lead to."""

    depth: int
    tokens: float  # with repeats
    settings: dict[str, Any]
    operations: float  # approximate multiplications for a training token
    loss: float  # expected nats per token, to rank sizes
    overfitting: float  # above 1, more weight decay helps
    step_tokens: int  # of an optimizer step


class SizeSearch:
    """Finds the best size for a config and its data."""

    def __init__(self, config: TrainConfig, data: Dataset, dist_ctx: DistributedContext):
        self.config = config
        self.data = data
        self.dist_ctx = dist_ctx
        self.text_tokens = len(data.train)
        self.vocab_size = config.model.vocab_size or data.tokenizer.vocab_size
        step = config.model.num_kv_heads or 1  # heads share keys in equal groups
        first = config.depth or max(2, step)  # induction heads need two layers
        # The blocks of a deeper model have more than 64 weights for each token of the text.
        last = config.depth or min(24, int((self.text_tokens / 768) ** (1 / 3)))
        self.depths = range(first, max(first, last) + 1, step)
        self.context = config.model.context_length and data.row_length(config.model.context_length)
        self.max_context = min(len(split) - 1 for split in data.splits)

    def make_size(self, depth: int, tokens: float) -> Size:
        """Return the size of a depth that trains on a number of tokens."""
        d_model = 64 * depth  # nanochat's rule, but heads are half as wide
        weights = 12 * d_model**2 * depth  # of the blocks: 4 d² for attention, 8 d² for the rest
        is_of_characters = self.vocab_size <= MAX_CHARACTER_VOCAB_SIZE
        epochs = tokens / self.text_tokens
        different_tokens = min(tokens, self.text_tokens)
        overfitting = estimate_overfitting(epochs, weights, self.text_tokens)

        # Fitted (experiments, 2026-11-23). At least 64: fewer save little.
        context = 170 * (tokens / 1e6) ** 0.25
        if not is_of_characters:
            context = min(110 * tokens / 1e6, 450 * (different_tokens / 1e6) ** 0.17)
        context = self.context or min(self.max_context, max(64, 2 ** round(math.log2(context))))

        # The exponent is that of Bergsma et al. 2025; smaller batches overfit a text less.
        step_tokens = 2048 * (different_tokens / 1e6) ** 0.38
        step_tokens *= math.sqrt(5 / min(20, max(5, overfitting)))  # 1 to 1/2
        multiple = self.dist_ctx.size * (self.config.micro_batch_size or 1)
        batch_size = max(1, round(step_tokens / context / multiple)) * multiple
        batch_size = self.config.batch_size or batch_size

        # Fitted (experiments, 2026-11-24).
        dropout_strength = (epochs - 1) * weights / self.text_tokens**0.25 / 460_000
        settings = {
            **dict.fromkeys(("depth", "num_layers", "num_heads"), depth),
            "d_model": d_model,
            "vocab_size": self.vocab_size,
            "context_length": context,
            "dropout": round(20 * min(0.4, 0.075 * math.log2(max(1, dropout_strength)))) / 20,
            "batch_size": batch_size,
            "weight_decay": round(0.1 * min(5, max(1, overfitting)), 2),
        }
        if self.config.optimizer.optimizer == "muon":
            # 0.01 is fitted. For the square root, see Malladi et al. 2022.
            learning_rate = 0.01 * math.sqrt(batch_size * context / 2048)
            settings["learning_rate"] = float(f"{learning_rate:.2g}")

        # Loss: Hoffmann et al. 2022, section 3.3. Repeats: Muennighoff et al. 2023, section 5.
        # E, A and B are fitted to the runs that tests/training/test_sizing.py lists.
        useful_repeats = 4 * (1 - math.exp(-max(0, epochs - 1) / 4))
        useful_tokens = different_tokens * (1 + useful_repeats)
        e, a, b = (1.17, 24.5, 172.0) if is_of_characters else (1.38, 80.0, 1110.0)
        loss = e + a / weights**0.4 + b / useful_tokens**0.46
        operations = 3 * (weights + d_model * (context * depth + self.vocab_size))
        return Size(depth, tokens, settings, operations, loss, overfitting, batch_size * context)

    def best_size(self, seconds: float, speeds: dict[int, float]) -> Size:
        """Return the size with the lowest expected loss, from operations per second by depth."""
        sizes = []
        for depth in self.depths:
            nearest = min(speeds, key=lambda timed: abs(timed - depth))
            size = self.make_size(depth, TIMED_TOKENS)
            for _ in range(2):  # more tokens need a longer context, which takes more operations
                max_tokens = size.tokens * (MAX_OVERFITTING / size.overfitting) ** (2 / 3)
                tokens = seconds * speeds[nearest] / size.operations
                size = self.make_size(depth, min(tokens, max_tokens))
            sizes.append(size)
        return min(sizes, key=lambda size: size.loss)

    def for_time(self, end: float, measure: Callable[[TrainConfig, Dataset], float]) -> Size:
        """Return the best size until a time. The best depth and the next one are timed.

        On a GPU, where compiling takes longer than timing, what it gains is measured once.
        """
        speeds: dict[int, float] = {}
        is_gpu = can_capture_graphs(self.dist_ctx.device)

        def measure_speed(depth: int, compiles: bool) -> float:
            """Return operations per second."""
            timed = self.make_size(depth, TIMED_TOKENS)
            config = make_run_config(self.config, timed.settings, self.dist_ctx)
            optimizer = replace(config.optimizer, window_warmup=0.0)
            config = replace(config, optimizer=optimizer, compile=config.compile and compiles)
            row_length = self.data.row_length(config.context_length)
            config = fit_micro_batches(config, self.dist_ctx, row_length)
            step_seconds = measure(config, self.data)
            if self.dist_ctx.size == 1 and self.dist_ctx.device.type == "cpu" and not speeds:
                step_seconds = choose_num_threads(step_seconds, partial(measure, config, self.data))
            return timed.step_tokens * timed.operations / step_seconds

        started_at = time.monotonic()
        depth = self.depths[0]
        while depth not in speeds:
            speeds[depth] = measure_speed(depth, compiles=not is_gpu)
            seconds = self.dist_ctx.broadcast(max(1.0, end - time.monotonic()))
            best = self.best_size(seconds, speeds)
            is_late = started_at + MAX_TIMING * (end - started_at) < time.monotonic()
            if self.dist_ctx.any(is_late and is_gpu):
                break
            depth = best.depth
            if depth in speeds and depth < self.depths[-1]:
                depth += self.depths.step
        if is_gpu and self.config.compile is not False:
            depth = min(speeds, key=lambda timed: abs(timed - best.depth))
            gain = measure_speed(depth, compiles=True) / speeds[depth]
            seconds = self.dist_ctx.broadcast(max(1.0, end - time.monotonic()))
            best = self.best_size(seconds, {depth: gain * speeds[depth] for depth in speeds})
        return best

    def for_steps(self, steps: int) -> Size:
        """Return the largest size whose loss no smaller one reaches in as many operations."""
        tokens = 2048.0 * steps
        for _ in range(20):  # until tokens, and the batch size that follows from them, agree
            tokens = steps * self.make_size(self.depths[0], tokens).step_tokens
        for depth in self.depths:
            size = self.make_size(depth, tokens)
            if self.best_size(tokens * size.operations, {depth: 1.0}).depth >= depth:
                best = size
        return replace(best, tokens=steps * best.step_tokens)

    def choose(
        self, started_at: float, measure: Callable[[TrainConfig, Dataset], float]
    ) -> dict[str, Any]:
        """Return the sizes and the minutes by name, unless a shape is set.

        ``measure`` returns the seconds of a step.
        """
        config = self.config
        model = config.model
        shape = (model.num_layers, model.num_heads, model.d_model)
        if any(size is not None for size in shape):
            return {}
        has_steps = config.steps or config.depth
        minutes = config.minutes or (0 if has_steps else DEFAULT_MINUTES)
        if minutes:
            size = self.for_time(started_at + 60 * minutes, measure)
            sizes = {**size.settings, "minutes": minutes}
        else:
            size = self.for_steps(config.steps or DEFAULT_STEPS)
            sizes = dict(size.settings)
        max_overfitting = MAX_OVERFITTING_RATIO * max(1, size.overfitting)
        ratio = min(MAX_OVERFITTING, max_overfitting) / size.overfitting
        max_tokens = size.tokens * ratio ** (2 / 3)
        if self.dist_ctx.is_main_process:
            typed = flatten(config)
            chosen = [f"{name} {x}" for name, x in sizes.items() if typed[name] is None]
            epochs = size.tokens / self.text_tokens
            say(f"chosen {', '.join(chosen)}: {size.tokens:,.0f} tokens, {epochs:.1f} epochs")
        if minutes and not config.steps:
            sizes["steps"] = min(MAX_STEPS, math.ceil(max_tokens / size.step_tokens))
        return sizes
