"""How large a model to train, and how, for a text and a time: one dial, the depth, sets all the rest."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from engine.core.cli import say
from engine.core.device import choose_dtype, mixed_precision
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import flatten, load_settings, with_values
from engine.data.dataset import Examples
from engine.data.mixture import Mixture
from engine.training.budget import STEPS
from engine.training.optimizer import Optimizer, OptimizerConfig
from engine.training.run_dir import is_launch, list_checkpoints

HEAD = 64  # width of a head; a model has as many heads as layers
BLOCKS = 12 * HEAD**2  # weights of a model's blocks, over the depth cubed
DEPTHS = range(2, 25)  # to choose from: one layer was never the best, as it can compose nothing (docs/sizing.md)
MOST_WEIGHTS = 64  # of the blocks for each token of the text, where the size is chosen (docs/sizing.md)
# For 1M in all, and the exponent by which it grows; the last, at most, for 1M different ones (docs/sizing.md).
CONTEXT_OF_CHARACTERS, CONTEXT_OF_TOKENS, CONTEXT_OF_TEXT = (170, 0.25), (68, 1.0), (450, 0.17)
SHORTEST, LONGEST = 64, 1024  # context of text at least, and of examples at most
# Nats per token that a model with N weights in its blocks learns from T fresh tokens are E + A / N^α + B / T^β
# (Hoffmann et al. 2022, section 3.3): (E, A, B) fitted to runs of minutes, on tiny Shakespeare by characters and on
# Python's sources, with α and β the same (docs/sizing.md). Of another text they rank sizes, but do not tell the loss.
CHARACTERS, TOKENS = (1.17, 24.5, 172.0), (1.38, 80.0, 1110.0)
OF_WEIGHTS, OF_TOKENS = 0.4, 0.46  # α, β
FEW = 512  # tokens of a vocabulary that are characters, or bytes, rather than pieces of words
REPEATS = 4  # epochs after which more of them teach little (docs/sizing.md)
# Weight decay costs more than it gains up to so much of √(epochs³ · weights of the blocks for each token of the text),
# and is in proportion to it from there on; so does dropout up to so much of epochs · weights / (tokens of the text)^¼,
# the first epoch not counted, and rises by so much with each doubling from there on (docs/sizing.md).
HARMLESS, WITHOUT_DROPOUT, DROPOUT = 22, 460_000, 0.075
MOST_DECAY, MOST_DROPOUT = 5, 0.4  # the first in times the usual
MOST_EXCESS = 20  # times what is harmless, where a run on time ends: more epochs teach less (docs/sizing.md)
LEAST_BATCH = 0.5  # of the usual tokens in a step: where decay can do no more, the noise of fewer helps
# Tokens in a step for 1M different ones, their learning rate, and the exponent of growth: Bergsma et al. 2025.
BATCH, RATE, GROWTH = 2048, 0.01, 0.38
MINUTES = (1, 3, 10, 30, 60, 180)  # of the table
TIMED = 5  # steps, of which the quickest tells the speed: the first three of a process are slow
TIMED_TOKENS = 1e6  # in all; as many sequences, as long, as follow from these are timed
LEAST_SECONDS = 1.0  # that are planned for, however long the start took
SETTLED = 4  # rounds in which a number of tokens and what follows from it come to agree
SHAPE = {"num_layers", "num_heads", "d_model"}  # who gives one of them chooses all sizes
LENGTH = {"minutes", "steps", "depth"}  # who gives none of them trains with the defaults


@dataclass(frozen=True)
class Size:
    """A depth, and what a run of that depth gets through."""

    depth: int
    tokens: float  # to train on in all
    text: int  # tokens of the text
    vocab_size: int
    shortest: int  # context
    longest: int
    rows: int | None = None  # of a batch; None: as many as the tokens ask for
    multiple: int = 1  # that these are of

    @property
    def context(self) -> int:
        """Of the model, in tokens: a power of two that grows with all tokens, between the shortest and the longest."""
        bounds = [(CONTEXT_OF_TOKENS, self.tokens), (CONTEXT_OF_TEXT, min(self.tokens, self.text))]
        if self.vocab_size <= FEW:
            bounds = [(CONTEXT_OF_CHARACTERS, self.tokens)]
        asked = min(first * (tokens / 1e6) ** growth for (first, growth), tokens in bounds)
        return min(self.longest, max(self.shortest, 2 ** round(math.log2(asked))))

    @property
    def fresh(self) -> float:
        """Fresh tokens that teach as much as these, some of which come again: Muennighoff et al. 2023, section 5."""
        again = max(0.0, self.tokens / self.text - 1)
        return min(self.tokens, self.text) * (1 + REPEATS * (1 - math.exp(-again / REPEATS)))

    @property
    def loss(self) -> float:
        """Nats per token that may be expected."""
        least, a, b = CHARACTERS if self.vocab_size <= FEW else TOKENS
        return least + a / (BLOCKS * self.depth**3) ** OF_WEIGHTS + b / self.fresh**OF_TOKENS

    @property
    def excess(self) -> float:
        """How much the text invites overfitting, as a multiple of what is harmless."""
        return math.sqrt((self.tokens / self.text) ** 3 * BLOCKS * self.depth**3 / self.text) / HARMLESS

    @property
    def most_tokens(self) -> float:
        """Those after which more would teach less: of MOST_EXCESS."""
        return self.text * ((MOST_EXCESS * HARMLESS) ** 2 * self.text / (BLOCKS * self.depth**3)) ** (1 / 3)

    @property
    def operations(self) -> float:
        """Multiplications for a token of training, about: of the blocks, attention, and the output head."""
        width = HEAD * self.depth
        return 3 * (BLOCKS * self.depth**3 + self.context * width * self.depth + self.vocab_size * width)

    def settings(self) -> dict[str, Any]:
        """All that follows, by the names of the settings."""
        excess = max(1.0, self.excess)
        fewer = max(LEAST_BATCH, min(1.0, math.sqrt(MOST_DECAY / excess)))
        rows = fewer * BATCH * (min(self.tokens, self.text) / 1e6) ** GROWTH / self.context
        rows = self.rows or max(1, round(rows / self.multiple)) * self.multiple
        rate = RATE * math.sqrt(rows * self.context / BATCH)
        decay = OptimizerConfig.weight_decay * min(excess, MOST_DECAY)
        found = {"depth": self.depth, "num_layers": self.depth, "num_heads": self.depth, "d_model": HEAD * self.depth}
        found |= {"context_length": self.context, "batch_size": rows, "learning_rate": float(f"{rate:.2g}")}
        again = (self.tokens / self.text - 1) * BLOCKS * self.depth**3 / self.text**0.25
        dropout = min(MOST_DROPOUT, DROPOUT * math.log2(max(1.0, again / WITHOUT_DROPOUT)))
        return found | {"weight_decay": round(decay, 2), "dropout": round(20 * dropout) / 20}


def chooses(config: Any, given: set[str]) -> bool:
    """Whether sizes are chosen: for minutes, steps or a depth, if none is given, nor a model to begin with."""
    return bool(LENGTH & given) and not SHAPE & given and not config.init_from


def sized(
    config: Any,
    given: set[str],
    data: Mixture,
    world: DistributedContext,
    begun: float,
    make: Callable[[Any], nn.Module],
) -> Any:
    """The settings, with those that were not given chosen, which is said; if the run is resumed, chosen as then.

    ``given`` are settings' names; ``begun`` is when the minutes began; make(ModelConfig) is a model. Raises UserError
    for a depth beside other sizes, and for both minutes and steps.
    """
    depth, model = config.depth, config.model
    if not chooses(config, given):
        shape = (model.num_layers, model.num_heads, model.d_model)
        if depth and not config.resume and (config.init_from or shape != (depth, depth, HEAD * depth)):
            raise UserError(f"--depth {depth} sets all sizes, but others are given too; leave out --depth, or those")
        return config
    saved = config.out / "config.toml"
    again = config.resume or is_launch(config.out, world.launch)  # after a fault
    if world.broadcast(again and saved.exists() and bool(list_checkpoints(config.out))):
        then = world.broadcast(flatten(load_settings(type(config), [str(saved)])) if world.is_main_process else None)
        names = Size(1, 1, 1, 1, 1, 1).settings().keys() | ({"steps"} if then["minutes"] else set())
        return with_values(config, {name: then[name] for name in names - given if then["depth"]})
    depths, rest, _, measure = _choices(config, given, data, world, make)

    def left() -> float:  # the first process's: all must choose alike
        return world.broadcast(max(LEAST_SECONDS, 60 * config.minutes - (time.monotonic() - begun)))

    if config.minutes:
        size, each = size_for_seconds(depths, left, rest, measure)
        why, found = f"{config.minutes:g} minutes at {1 / each:,.0f} tokens/s", size.settings()
        if size.tokens >= size.most_tokens:
            found["steps"] = math.ceil(size.tokens / (found["batch_size"] * found["context_length"]))
    else:
        steps = config.steps or STEPS
        size, why = size_for_steps(depths, steps, rest), f"{steps:,} steps"
        found = size.settings()
    chosen = {name: value for name, value in found.items() if name not in given}
    world.only_first(
        say,
        f"chosen {', '.join(f'{name} {value}' for name, value in chosen.items())}\n"
        f"       for {why}: {size.tokens:,.0f} tokens, {size.tokens / size.text:.1f} epochs"
        + ("; more would overfit" if "steps" in found else ""),
    )
    return with_values(config, chosen)


def outlook(
    config: Any, given: set[str], data: Mixture, world: DistributedContext, make: Callable[[Any], nn.Module]
) -> str:
    """A table, as text, of what may be learned here in how many minutes; the arguments are as for :func:`sized`."""
    depths, rest, shaped, measure = _choices(config, given, data, world, make)
    lines = ["minutes  depth   parameters          tokens  epochs  expected loss, nats per token"]
    for minutes in sorted({*MINUTES, config.minutes}):
        size, _ = size_for_seconds(depths, lambda minutes=minutes: 60 * minutes, rest, measure)
        with torch.device("meta"):
            parameters = shaped(size.depth).num_parameters
        learned = f"{size.tokens:>14,.0f} {size.tokens / size.text:>7,.1f}  {size.loss:.2f}"
        learned += "  ends sooner" if size.tokens >= size.most_tokens else ""
        lines.append(f"{minutes:>7g} {size.depth:>6} {parameters:>12,}  {learned}")
    return "\n".join(lines)


def _choices(
    config: Any, given: set[str], data: Mixture, world: DistributedContext, make: Callable[[Any], nn.Module]
) -> tuple:
    """The depths to choose from, what else a Size is made of, a depth's model, and its measured time for a token."""
    if {"steps", "minutes"} <= given:
        raise UserError(f"--steps {config.steps} and --minutes {config.minutes} both say how long; give one of them")
    vocab_size, shared = config.model.vocab_size or data.tokenizer.vocab_size, config.model.num_kv_heads or 1
    fitting = [depth for depth in DEPTHS if depth % shared == 0] or DEPTHS
    depths = [depth for depth in fitting if BLOCKS * depth**3 <= MOST_WEIGHTS * len(data.train)] or fitting[:1]
    depths = [config.depth] if config.depth else depths
    contexts = (config.model.context_length,) * 2 if "context_length" in given else contexts_for(data)
    rows, multiple = config.batch_size if "batch_size" in given else None, world.size * (config.micro_batch_size or 1)
    rest = (len(data.train), vocab_size, *contexts, rows, multiple)

    def shaped(depth: int) -> Any:
        own = Size(depth, TIMED_TOKENS, *rest).settings()
        shape = {name: own[name] for name in ("num_layers", "num_heads", "d_model", "context_length")}
        return make(replace(config.model, vocab_size=vocab_size, **shape))

    @functools.cache
    def measure(depth: int) -> float:
        rows = max(1, Size(depth, TIMED_TOKENS, *rest).settings()["batch_size"] // world.size)
        spent = seconds_per_token(shaped(depth).to(world.device), config, rows, world)
        return float(world.sum(torch.tensor(spent, dtype=torch.float64))) / world.size**2  # as many at a time

    return depths, rest, shaped, measure


def contexts_for(data: Mixture) -> tuple[int, int]:
    """The shortest and the longest context to choose from: all of an example; of text, what each split has."""
    splits = [split for one in data.datasets for split in (one.train, one.val)]
    if isinstance(splits[0], Examples):
        return (min(LONGEST, max(int(split.lengths.max()) for split in splits) - 1),) * 2
    return SHORTEST, max(1, min(len(split) - 1 for split in splits))


def size_for_seconds(
    depths: Sequence[int], left: Callable[[], float], rest: tuple, measure: Callable[[int], float]
) -> tuple[Size, float]:
    """The size that learns most in the seconds that are left, or sooner, and what a token takes it.

    measure(depth) measures that in seconds, a few times, until it has for the best depth and the next; of the others,
    and of a longer context, it follows from the operations, of which a larger model does more in a second.
    """
    known: dict[int, float] = {}

    def within(seconds: float, depth: int) -> Size:
        near, size = min(known, key=lambda other: abs(other - depth)), Size(depth, TIMED_TOKENS, *rest)
        speed = Size(near, TIMED_TOKENS, *rest).operations / known[near]
        for _ in range(2):  # more tokens make a longer context, which takes longer
            size = replace(size, tokens=min(seconds * speed / size.operations, size.most_tokens))
        return size

    unknown = depths[:1]
    while unknown:
        known[unknown[0]], seconds = measure(unknown[0]), left()
        best = min(range(len(depths)), key=lambda index: within(seconds, depths[index]).loss)
        unknown = [depth for depth in depths[best : best + 2] if depth not in known]
    size = within(left(), depths[best])
    return size, known[size.depth] * size.operations / Size(size.depth, TIMED_TOKENS, *rest).operations


def size_for_steps(depths: Sequence[int], steps: int, rest: tuple) -> Size:
    """The largest size that learns more in so many steps than a smaller one does by as many operations."""
    tokens = (steps * BATCH / 1e6**GROWTH) ** (1 / (1 - GROWTH))  # as there are so many in a step for so many in all
    for _ in range(SETTLED):  # in whole sequences, or in as many, or as long ones, as are given
        any_depth = Size(depths[0], tokens, *rest)
        tokens = steps * any_depth.settings()["batch_size"] * any_depth.context
    best = depths[0]
    for depth in depths:
        budget = tokens * Size(depth, tokens, *rest).operations
        sizes = {other: Size(other, budget / Size(other, tokens, *rest).operations, *rest) for other in depths}
        if min(depths, key=lambda other: sizes[other].loss) >= depth:
            best = depth
    size = Size(best, tokens, *rest)
    rows, context = size.settings()["batch_size"], size.context  # its own, not those of the first depth
    return replace(size, tokens=steps * rows * context, rows=rows, shortest=context, longest=context)


def seconds_per_token(model: nn.Module, config: Any, rows: int, world: DistributedContext) -> float:
    """What a token of training takes this process: the quickest of a few steps of so many sequences."""
    dtype = choose_dtype(config.dtype, world.device, model.config.d_model)
    optimizer = Optimizer(model, config.optimizer, DistributedContext(0, 1, world.device), dtype)
    example = torch.zeros(2, rows, model.config.context_length, dtype=torch.long, device=world.device)
    seconds = []
    for _ in range(TIMED):
        begun = time.monotonic()
        for micro in example.split(config.micro_batch_size or rows, dim=1):
            with mixed_precision(dtype, world.device):
                loss = model(*micro)
            (loss / example[0].numel()).backward()
        optimizer.step(0, 10**9)[1].item()  # waits for the device
        seconds.append(time.monotonic() - begun)
    return min(seconds) / example[0].numel()
