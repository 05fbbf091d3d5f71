"""--depth, --steps or --minutes → the size of the model and its hyperparameters.

The depth sets every size. docs/sizing.md has the measurements behind each constant. The laws are
those of Hoffmann et al. 2022, section 3.3 (loss), Muennighoff et al. 2023, section 5 (repeats), and
Bergsma et al. 2025 (batch size).
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.cli import say
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import flatten
from engine.data.dataset import Examples
from engine.data.mixture import Mixture
from engine.training.budget import DEFAULT_STEPS
from engine.training.config import SHAPE_FIELDS, SIZE_FIELDS, TrainConfig, with_sizes
from engine.training.estimate import build_meta_model, largest_micro_batch
from engine.training.optimizer import DEFAULT_WEIGHT_DECAY

HEAD_DIM = 64
BLOCK_WEIGHTS = 12 * HEAD_DIM**2  # weights of all blocks / depth³
DEPTHS = range(2, 25)  # at least 2: induction heads need two layers
MAX_WEIGHTS_PER_TOKEN = 64  # of the blocks, for each token of the text
MAX_CHARACTER_VOCAB_SIZE = 512  # larger vocabularies are of pieces of words
MIN_CONTEXT = 64
MAX_CONTEXT = 1024  # of examples
# Context length for 1M tokens, and its exponent; of TEXT, an upper bound, for 1M different tokens.
CHARACTER_CONTEXT = (170, 0.25)
SUBWORD_CONTEXT = (68, 1.0)
TEXT_CONTEXT = (450, 0.17)
# Loss in nats per token: E + A / weights^WEIGHTS_EXPONENT + B / tokens^TOKENS_EXPONENT.
CHARACTER_LOSS = (1.17, 24.5, 172.0)  # E, A, B
SUBWORD_LOSS = (1.38, 80.0, 1110.0)
WEIGHTS_EXPONENT = 0.4
TOKENS_EXPONENT = 0.46
MAX_USEFUL_REPEATS = 4  # further epochs teach little
OVERFIT_THRESHOLD = 22  # √(epochs³ · weights / tokens of the text) that needs no more weight decay
OVERFIT_STOP = 20  # times the threshold, where a run in minutes ends early
MAX_DECAY_FACTOR = 5
DROPOUT_THRESHOLD = 460_000  # (epochs - 1) · weights / (tokens of the text)^¼ that needs no dropout
DROPOUT_PER_DOUBLING = 0.075
MAX_DROPOUT = 0.4
BATCH_TOKENS = 2048  # in a step, for 1M different tokens
BATCH_EXPONENT = 0.38
MIN_BATCH_FACTOR = 0.5  # of a smaller batch, where more weight decay does not help
BATCH_RATE = 0.01  # Muon's learning rate for BATCH_TOKENS; it grows with the square root
TABLE_MINUTES = (1, 3, 10, 30, 60, 180)
TIMED_TOKENS = 1e6  # the length of the run whose step is timed
MIN_SECONDS = 1.0  # to plan for, however long the start took
FIXED_POINT_ROUNDS = 4  # until tokens, and the batch size that follows from them, agree

StepTimer = Callable[[TrainConfig], float]  # returns the seconds of an optimizer step


@dataclass(frozen=True)
class SizeLimits:
    """What all sizes for one dataset and config have in common."""

    text_tokens: int
    vocab_size: int
    min_context: int
    max_context: int
    batch_size: int | None = None  # None: follows from the tokens
    batch_multiple: int = 1

    @property
    def is_of_characters(self) -> bool:
        return self.vocab_size <= MAX_CHARACTER_VOCAB_SIZE


@dataclass(frozen=True)
class Size:
    """A depth and a number of training tokens, and all that follows from them."""

    depth: int
    tokens: float  # with repeats
    limits: SizeLimits

    @property
    def epochs(self) -> float:
        return self.tokens / self.limits.text_tokens

    @property
    def weights(self) -> int:  # in the blocks
        return BLOCK_WEIGHTS * self.depth**3

    @property
    def context(self) -> int:
        bounds = [
            (SUBWORD_CONTEXT, self.tokens),
            (TEXT_CONTEXT, min(self.tokens, self.limits.text_tokens)),
        ]
        if self.limits.is_of_characters:
            bounds = [(CHARACTER_CONTEXT, self.tokens)]
        length = min(at_1m * (tokens / 1e6) ** exponent for (at_1m, exponent), tokens in bounds)
        power = 2 ** round(math.log2(length))
        return min(self.limits.max_context, max(self.limits.min_context, power))

    @property
    def effective_tokens(self) -> float:
        repeats = max(0.0, self.epochs - 1)
        worth = 1 + MAX_USEFUL_REPEATS * (1 - math.exp(-repeats / MAX_USEFUL_REPEATS))
        return min(self.tokens, self.limits.text_tokens) * worth

    @property
    def expected_loss(self) -> float:
        """Nats per token, to rank sizes: on another text the loss itself differs."""
        e, a, b = CHARACTER_LOSS if self.limits.is_of_characters else SUBWORD_LOSS
        return e + a / self.weights**WEIGHTS_EXPONENT + b / self.effective_tokens**TOKENS_EXPONENT

    @property
    def overfit_pressure(self) -> float:
        """How much the text invites overfitting, in multiples of the threshold."""
        weights_per_token = self.weights / self.limits.text_tokens
        return math.sqrt(self.epochs**3 * weights_per_token) / OVERFIT_THRESHOLD

    @property
    def max_tokens(self) -> float:
        """Training tokens with an overfit_pressure of OVERFIT_STOP."""
        weights_per_token = self.weights / self.limits.text_tokens
        epochs = ((OVERFIT_STOP * OVERFIT_THRESHOLD) ** 2 / weights_per_token) ** (1 / 3)
        return self.limits.text_tokens * epochs

    @property
    def operations(self) -> float:
        """Approximate multiplications for a training token: blocks, attention, output head."""
        width = HEAD_DIM * self.depth
        attention = self.context * width * self.depth
        return 3 * (self.weights + attention + self.limits.vocab_size * width)

    @property
    def batch_size(self) -> int:
        if self.limits.batch_size:
            return self.limits.batch_size
        factor = math.sqrt(MAX_DECAY_FACTOR / max(1.0, self.overfit_pressure))
        tokens = max(MIN_BATCH_FACTOR, min(1.0, factor)) * BATCH_TOKENS
        tokens *= (min(self.tokens, self.limits.text_tokens) / 1e6) ** BATCH_EXPONENT
        multiple = self.limits.batch_multiple
        return max(1, round(tokens / self.context / multiple)) * multiple

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.context

    @property
    def dropout(self) -> float:
        strength = (self.epochs - 1) * self.weights / self.limits.text_tokens**0.25
        doublings = math.log2(max(1.0, strength / DROPOUT_THRESHOLD))
        return round(20 * min(MAX_DROPOUT, DROPOUT_PER_DOUBLING * doublings)) / 20

    def settings(self) -> dict[str, Any]:
        """All sizes by the names of the settings. The learning rate is Muon's."""
        decay_factor = min(max(1.0, self.overfit_pressure), MAX_DECAY_FACTOR)
        learning_rate = BATCH_RATE * math.sqrt(self.tokens_per_step / BATCH_TOKENS)
        return {
            **dict.fromkeys(("depth", "num_layers", "num_heads"), self.depth),
            "vocab_size": self.limits.vocab_size,
            "d_model": HEAD_DIM * self.depth,
            "context_length": self.context,
            "dropout": self.dropout,
            "batch_size": self.batch_size,
            "learning_rate": float(f"{learning_rate:.2g}"),
            "weight_decay": round(DEFAULT_WEIGHT_DECAY * decay_factor, 2),
        }


@dataclass(frozen=True)
class SizeSearch:
    """Finds the best size for a time or a number of steps."""

    limits: SizeLimits
    depths: Sequence[int]  # to choose from
    seconds_per_token: Callable[[int], float]  # measures a depth, for TIMED_TOKENS
    fits: Callable[[Size], bool]  # in memory; the smallest depth must

    def for_seconds(self, seconds_left: Callable[[], float]) -> Size:
        """Return the size with the lowest expected loss in the seconds that are left.

        The best depth and the next one are timed. The time of others follows from their operations,
        of which a larger model does more in a second.
        """
        depths = self.depths
        timed = {depths[0]: self.seconds_per_token(depths[0])}

        def size_in(seconds: float, depth: int) -> Size:
            nearest = min(timed, key=lambda timed_depth: abs(timed_depth - depth))
            operations = seconds * Size(nearest, TIMED_TOKENS, self.limits).operations / timed[nearest]
            size = Size(depth, TIMED_TOKENS, self.limits)
            for _ in range(2):  # more tokens need a longer context, which takes longer
                size = replace(size, tokens=min(operations / size.operations, size.max_tokens))
            return size

        while True:
            seconds = seconds_left()
            sizes = [size_in(seconds, depth) for depth in depths]
            best = min(range(len(sizes)), key=lambda index: sizes[index].expected_loss)
            candidates = sizes[best : best + 2]
            too_large = [size.depth for size in candidates if not self.fits(size)]
            untimed = [size.depth for size in candidates if size.depth not in timed]
            if too_large:
                depths = [depth for depth in depths if depth < too_large[0]]
            elif untimed:
                timed[untimed[0]] = self.seconds_per_token(untimed[0])
            else:
                return size_in(seconds_left(), depths[best])

    def for_steps(self, steps: int) -> Size:
        """Return the largest size that learns more than smaller ones by as many operations."""
        # The tokens of these steps solve: tokens = steps · BATCH_TOKENS · (tokens / 1M)^exponent.
        tokens = (steps * BATCH_TOKENS / 1e6**BATCH_EXPONENT) ** (1 / (1 - BATCH_EXPONENT))
        for _ in range(FIXED_POINT_ROUNDS):
            tokens = steps * Size(self.depths[0], tokens, self.limits).tokens_per_step
        sizes = [Size(depth, tokens, self.limits) for depth in self.depths]

        def is_worthwhile(size: Size) -> bool:
            operations = tokens * size.operations
            rivals = [replace(rival, tokens=operations / rival.operations) for rival in sizes]
            best = min(rivals, key=lambda rival: rival.expected_loss)
            return best.depth >= size.depth and self.fits(size)

        size = [size for size in sizes if is_worthwhile(size)][-1]
        fixed = {"min_context": size.context, "max_context": size.context}
        limits = replace(self.limits, batch_size=size.batch_size, **fixed)
        return Size(size.depth, steps * size.tokens_per_step, limits)


def make_search(config: TrainConfig, data: Mixture, dist: DistributedContext, measure: StepTimer) -> SizeSearch:
    """Return the search for the sizes that a config leaves open. Arguments as in resolve_sizes."""
    if config.steps and config.minutes:
        raise UserError(
            f"--minutes: cannot choose a size together with --steps {config.steps} "
            f"(got {config.minutes}). Use one of them, or set the size."
        )
    text_tokens = len(data.train)
    vocab_size = config.model.vocab_size or data.tokenizer.vocab_size
    multiple = dist.size * (config.micro_batch_size or 1)
    contexts = context_range(config, data)
    limits = SizeLimits(text_tokens, vocab_size, *contexts, config.batch_size, multiple)
    groups = config.model.num_kv_heads or 1
    depths = [depth for depth in DEPTHS if depth % groups == 0] or list(DEPTHS)
    max_weights = MAX_WEIGHTS_PER_TOKEN * text_tokens
    depths = [depth for depth in depths if BLOCK_WEIGHTS * depth**3 <= max_weights] or depths[:1]
    if config.depth:
        depths = [config.depth]

    @functools.cache
    def seconds_per_token(depth: int) -> float:
        size = Size(depth, TIMED_TOKENS, limits)
        timed_config = config_of(size, config, dist)
        optimizer = replace(timed_config.optimizer, window_warmup=0.0)
        return measure(replace(timed_config, optimizer=optimizer)) / size.tokens_per_step

    def fits(size: Size) -> bool:
        is_smallest = size.depth == depths[0]
        return is_smallest or largest_micro_batch(with_sizes(config, size.settings()), dist) > 0

    return SizeSearch(limits, depths, seconds_per_token, fits)


def config_of(size: Size, config: TrainConfig, dist: DistributedContext) -> TrainConfig:
    """Return the config of a size, with micro-batches if the batch does not fit in memory."""
    sizes = size.settings()
    if config.optimizer.optimizer != "muon":
        del sizes["learning_rate"]  # with_sizes() has AdamW's
    config = with_sizes(config, sizes)
    rows = largest_micro_batch(config, dist)
    is_whole = config.micro_batch_size or rows == size.batch_size // dist.size
    return config if is_whole else replace(config, micro_batch_size=max(1, rows))


def context_range(config: TrainConfig, data: Mixture) -> tuple[int, int]:
    """Return the bounds of the context: the set one, the longest example, or that of a split."""
    splits = [split for dataset in data.datasets for split in (dataset.train, dataset.val)]
    lengths = [int(split.lengths.max()) for split in splits if isinstance(split, Examples)]
    length = config.model.context_length or (lengths and min(MAX_CONTEXT, max(lengths) - 1))
    if length:
        return length, length
    return MIN_CONTEXT, max(1, min(len(split) - 1 for split in splits))


def should_choose_sizes(config: TrainConfig) -> bool:
    """Whether sizes follow from minutes, steps or a depth: not if the shape of the model is set."""
    has_length = config.minutes or config.steps or config.depth
    has_shape = any(getattr(config.model, name) is not None for name in SHAPE_FIELDS)
    return bool(has_length) and not has_shape and not config.init_from


def resolve_sizes(
    config: TrainConfig,
    data: Mixture,
    dist: DistributedContext,
    started_at: float,
    measure: StepTimer,
) -> TrainConfig:
    """Return the config with a value for every size; what is chosen is printed.

    ``started_at`` is when the minutes began, in seconds of time.monotonic(). Raises UserError for
    settings that conflict.
    """
    depth = config.depth
    if not should_choose_sizes(config):
        resolved = with_sizes(config, {})
        shape = [getattr(resolved.model, name) for name in SHAPE_FIELDS]
        conflicts = depth and (config.init_from or shape != [depth, depth, HEAD_DIM * depth])
        if conflicts and not config.resume:
            raise UserError(
                f"--depth: sets every size, but other sizes are set too (got {depth}). "
                "Leave out --depth, or the other sizes."
            )
        return resolved
    search = make_search(config, data, dist, measure)
    if config.minutes:
        end = started_at + 60 * config.minutes
        length = f"{config.minutes:g} minutes"
        size = search.for_seconds(lambda: dist.broadcast(max(MIN_SECONDS, end - time.monotonic())))
    else:
        length = f"{config.steps or DEFAULT_STEPS:,} steps"
        size = search.for_steps(config.steps or DEFAULT_STEPS)
    resolved = config_of(size, config, dist)
    if config.minutes and size.tokens >= size.max_tokens:
        resolved = replace(resolved, steps=math.ceil(size.tokens / size.tokens_per_step))
        length += ", fewer because more epochs would overfit"
    if dist.is_main_process:
        before = flatten(config)
        after = flatten(resolved)
        names = [name for name in SIZE_FIELDS if before[name] is None and after[name] is not None]
        say(f"chosen {', '.join(f'{name} {after[name]}' for name in names)}")
        say(f"for {length}: {size.tokens:,.0f} tokens, {size.epochs:.1f} epochs")
    return resolved


def size_table(config: TrainConfig, data: Mixture, dist: DistributedContext, measure: StepTimer) -> str:
    """Return a table of the sizes for several numbers of minutes. Arguments as in resolve_sizes."""
    search = make_search(config, data, dist, measure)
    lines = ["minutes  depth   parameters          tokens  epochs  expected loss, nats per token"]
    for minutes in sorted({*TABLE_MINUTES, config.minutes or TABLE_MINUTES[0]}):
        size = search.for_seconds(functools.partial(float, 60 * minutes))
        model = build_meta_model(with_sizes(config, size.settings()).model)
        note = "  ends early" if size.tokens >= size.max_tokens else ""
        lines.append(
            f"{minutes:>7g} {size.depth:>6} {model.num_parameters:>12,}  {size.tokens:>14,.0f} "
            f"{size.epochs:>7,.1f}  {size.expected_loss:.2f}{note}"
        )
    return "\n".join(lines)
