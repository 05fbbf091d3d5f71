"""Which windows, or examples, make up batch t, a pure function of (data, seed, t), and which targets count."""

import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.data.dataset import Examples, Tokens
from engine.data.mixture import MixedTokens, Mixture, draw
from engine.nn.loss import IGNORED

FEISTEL_ROUNDS = 6
EVALUATION_TOKENS = 2**14  # in one forward pass of an evaluation
GROUP = 256  # batches whose examples are sorted by length together
MULTIPLE = 8  # of which a batch of examples is as long: matrix products are quicker, and lengths fewer


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64s so that every bit depends on every bit: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derived_seed(*parts: int) -> int:
    """A seed for a random generator: another for each sequence of whole numbers."""
    seed = np.zeros(1, np.uint64)
    for part in parts:
        seed = mix(seed + mix(np.array([part % 2**64], np.uint64) + np.uint64(1)))
    return int(seed[0])


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Where a pseudo-random permutation of 0…size-1 sends each index; ``key`` (same shape, uint64) chooses which.

    A Feistel network (Luby & Rackoff 1988) permutes the next power of four; whoever lands outside walks on until
    inside (Black & Rogaway 2002). No list is ever shuffled: the cost does not depend on size.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    result = index.astype(np.uint64)
    walking = np.ones(len(result), bool)
    while walking.any():
        left, right = result[walking] >> half, result[walking] & mask
        for round_number in range(FEISTEL_ROUNDS):
            scrambled = mix(right ^ mix(key[walking] + np.uint64(round_number)))
            left, right = right, left ^ (scrambled & mask)
        result[walking] = (left << half) | right
        walking &= result >= size
    return result


def windows_per_epoch(num_tokens: int, context_length: int) -> int:
    """How many windows of context_length + 1 tokens, stride context_length, one epoch visits.

    One fewer than would fit from the start, where there are two, so that any offset below context_length has as many.
    Raises UserError if not even one fits.
    """
    fitting = (num_tokens - 1) // context_length
    if fitting < 1:
        few = f"{num_tokens} tokens are too few for one window of context_length {context_length} + 1"
        raise UserError(f"{few}; prepare more text, or lower --context-length to at most {num_tokens - 1}")
    return max(1, fitting - 1)


def window_starts(num_tokens: int, context_length: int, seed: int, serial: np.ndarray) -> np.ndarray:
    """Where the windows of these serial numbers (N,), uint64, start, (N,): a pure function, in O(1) memory."""
    size = windows_per_epoch(num_tokens, context_length)
    epoch, index = serial // np.uint64(size), serial % np.uint64(size)
    key = mix(epoch + np.uint64(derived_seed(seed)))
    slack = min(context_length, num_tokens - size * context_length)
    offset = mix(key) % np.uint64(slack)
    return offset + permute(index, size, key) * np.uint64(context_length)


def gather(tokens: Tokens, starts: np.ndarray, length: int) -> np.ndarray:
    """The windows of ``length`` tokens at starts (N,): (N, length), int64 as embeddings want them."""
    windows = [tokens[start : start + length] for start in starts.tolist()]
    return np.array(windows, np.int64).reshape(len(starts), length)


def gather_windows(tokens: Tokens | MixedTokens, context_length: int, seed: int, serial: np.ndarray) -> np.ndarray:
    """The windows of these serial numbers (N,), uint64: (N, context_length + 1), int64. In a mix each part has its own.

    Its seed is its own too, or parts of one length would all be visited in the same order.
    """
    if not isinstance(tokens, MixedTokens):
        return gather(tokens, window_starts(len(tokens), context_length, seed, serial), context_length + 1)
    windows = np.empty((len(serial), context_length + 1), np.int64)
    drawn, own_serial = draw(tokens.shares, serial)
    for index, part in enumerate(tokens.parts):
        own_seed = derived_seed(seed, index) if index else seed
        windows[drawn == index] = gather_windows(part, context_length, own_seed, own_serial[drawn == index])
    return windows


def example_numbers(examples: Examples, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Which examples are in batch ``step``, (batch_size,): a pure function. Each comes once an epoch.

    An epoch's examples, in a pseudo-random order, are numbered on from the last epoch's; batch_size of these numbers
    make a batch, which so may end one epoch and begin the next.
    """
    serial, end, found = step * batch_size, (step + 1) * batch_size, []
    while serial < end:
        epoch = serial // examples.num_examples
        found.append(_examples_of_epoch(examples, seed, epoch, step, batch_size))
        serial = (epoch + 1) * examples.num_examples
    return np.concatenate(found)


def _examples_of_epoch(examples: Examples, seed: int, epoch: int, step: int, batch_size: int) -> np.ndarray:
    """Those of a batch that are of one epoch.

    An epoch's batches are cut into groups. A group's examples are sorted by length and distributed, so that each batch
    has like lengths, to its batches in a pseudo-random order, so that the short don't always come first.
    """
    size = examples.num_examples
    first, last = epoch * size // batch_size, ((epoch + 1) * size - 1) // batch_size  # batches that have some
    batches = last - first + 1
    groups = -(-batches // GROUP)  # as large as each other
    group = ((step - first + 1) * groups - 1) // batches
    begin, end = (first + batches * number // groups for number in (group, group + 1))  # the batches of this group
    edges = np.clip(np.arange(begin, end + 1) * batch_size - epoch * size, 0, size)
    counts = np.diff(edges)  # of the epoch's examples in each
    key = mix(np.array([epoch], np.uint64) + np.uint64(derived_seed(seed)))
    index = np.arange(edges[0], edges[-1], dtype=np.uint64)
    numbers = permute(index, size, np.repeat(key, len(index))).astype(np.int64)
    numbers = numbers[np.argsort(examples.lengths[numbers], kind="stable")]
    index = np.arange(len(counts), dtype=np.uint64)
    rank = permute(index, len(index), np.repeat(mix(key + np.uint64(group)), len(index)))
    by_rank = np.argsort(rank)  # of two batches the first has the shorter examples
    ends = np.cumsum(counts[by_rank])[np.argsort(by_rank)]
    return numbers[ends[step - begin] - counts[step - begin] : ends[step - begin]]


def padded_length(longest: int, context_length: int) -> int:
    """How many inputs a batch has whose longest example has so many tokens."""
    assert longest <= context_length + 1, "examples are made to fit: see fitting"
    return min(-(-max(1, longest - 1) // MULTIPLE) * MULTIPLE, context_length)


def gather_examples(examples: Examples, numbers: np.ndarray, length: int) -> np.ndarray:
    """Examples by their numbers (N,), padded on the right: (N, length), int64, negative what does not count.

    The number -1 stands for an example without tokens.
    """
    rows = np.full((len(numbers), length), ~0, np.int64)  # token 0, which does not count
    for row, number in zip(rows, numbers.tolist(), strict=True):
        if number >= 0:
            tokens = examples.example(number)
            row[: len(tokens)] = tokens
    return rows


def inputs_and_targets(rows: np.ndarray) -> np.ndarray:
    """Rows of ids, ~id where one does not count as a target (B, T + 1), as inputs and targets (2, B, T)."""
    return np.stack((np.where(rows < 0, ~rows, rows)[:, :-1], np.maximum(rows, IGNORED)[:, 1:]))


class Batches:
    """The training batches of one process, each assembled by a thread while the one before is worked on.

    ``rows`` are those of a batch's ``batch_size`` sequences that are this process's. Batches come to the device.
    """

    def __init__(
        self,
        tokens: Tokens | Examples | MixedTokens,
        context_length: int,
        seed: int,
        batch_size: int,
        rows: slice,
        device: torch.device,
    ):
        self.tokens, self.context_length, self.seed = tokens, context_length, seed
        self.batch_size, self.rows, self.device = batch_size, rows, device
        self.thread = ThreadPoolExecutor(1)
        self.next: tuple[int, Future] | None = None
        self.digest = 0  # of the windows given last; summed over processes it tells whether two runs saw the same

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 (B, T) each; T is the context or, of examples, what they need."""
        ready = self.next[1] if self.next and self.next[0] == step else self.thread.submit(self._assemble, step)
        windows, self.digest = ready.result()
        self.next = (step + 1, self.thread.submit(self._assemble, step + 1))
        inputs, targets = windows.to(self.device, non_blocking=True)
        return inputs, targets

    def _assemble(self, step: int) -> tuple[Tensor, int]:
        if isinstance(self.tokens, Examples):
            numbers = example_numbers(self.tokens, self.seed, step, self.batch_size)
            length = padded_length(int(self.tokens.lengths[numbers].max()), self.context_length)
            windows = gather_examples(self.tokens, numbers[self.rows], length + 1)
        else:
            serial = step * self.batch_size + np.arange(self.batch_size, dtype=np.uint64)[self.rows]
            windows = gather_windows(self.tokens, self.context_length, self.seed, serial)
        rows = range(self.batch_size)[self.rows]
        digest = sum(zlib.crc32(window.data, row) for window, row in zip(windows, rows, strict=True))
        pair = torch.from_numpy(inputs_and_targets(windows))
        return pair.pin_memory() if self.device.type == "cuda" else pair, digest


def fitting(mixture: Mixture, context_length: int, cut: bool) -> Mixture:
    """The datasets without the examples that are too long, or with them cut. Raises UserError if none is left."""
    datasets = list(mixture.datasets)
    for index, one in enumerate(datasets):
        if isinstance(one.train, Examples):
            datasets[index] = one.fitting(context_length, cut)
    return replace(mixture, datasets=tuple(datasets))


def tokens_per_step(tokens: Tokens | Examples | MixedTokens, context_length: int, batch_size: int) -> int:
    """How many inputs a batch has, padding aside: of examples on average."""
    if isinstance(tokens, Examples):
        return round(batch_size * (len(tokens) / tokens.num_examples - 1))
    return batch_size * context_length


def check_length(mixture: Mixture, context_length: int) -> None:
    """Raise UserError if a text is too short for one window; of examples :func:`fitting` tells."""
    for one in mixture.datasets:
        for split in (split for split in (one.train, one.val) if not isinstance(split, Examples)):
            try:
                windows_per_epoch(len(split), context_length)
            except ValueError as error:
                raise UserError(f"{one.path}: {error}") from None


def check_sizes(batch_size: int, processes: int, micro_batch_size: int | None) -> None:
    """Raise UserError if batches don't divide over the processes, or a process's sequences over micro-batches."""
    rows, left = divmod(batch_size, processes)
    if left:
        near = " or ".join(str(n * processes) for n in (rows, rows + 1) if n)
        raise UserError(f"--batch-size {batch_size} does not divide over {processes} processes; try {near}")
    if micro_batch_size and (micro_batch_size < 1 or rows % micro_batch_size):
        divisors = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        raise UserError(f"--micro-batch-size {micro_batch_size} does not divide {rows}; try one of {divisors}")


def evaluation_windows(num_tokens: int, context_length: int, limit: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Starts of fixed windows, and how many leading targets of each count in the window before: int64 (N,) each.

    Every token but the first counts once, as the last window reaches back to be full; or, with a limit, about that
    many tokens in windows spread evenly. Raises UserError if not even one window fits.
    """
    windows_per_epoch(num_tokens, context_length)
    in_line = np.arange(0, num_tokens - 1, context_length, dtype=np.int64)
    starts = np.minimum(in_line, num_tokens - 1 - context_length)
    chosen = slice(None)
    if limit and limit < num_tokens:
        chosen = np.linspace(0, len(starts) - 1, max(1, limit // context_length)).astype(np.int64)
    return starts[chosen], (in_line - starts)[chosen]


def evaluation_batches(
    tokens: Tokens | Examples,
    context_length: int,
    limit: int,
    rank: int,
    size: int,
    most_tokens: int = EVALUATION_TOKENS,
) -> Iterator[Tensor]:
    """Inputs and targets of the evaluation windows of process rank of size, int64 (2, B, T) each, most_tokens at most.

    Targets that count in another window are IGNORED. Of examples they are batches of examples.
    """
    if isinstance(tokens, Examples):
        yield from _evaluation_examples(tokens, context_length, limit, rank, size, most_tokens)
        return
    starts, counted_before = evaluation_windows(len(tokens), context_length, limit)
    missing = -len(starts) % size  # all processes take as many: windows of which nothing counts fill up
    starts = np.append(starts, np.repeat(starts[:1], missing))[rank::size]
    counted_before = np.append(counted_before, np.repeat(context_length, missing))[rank::size]
    rows = max(1, most_tokens // context_length)
    for some in (slice(first, first + rows) for first in range(0, len(starts), rows)):
        windows = gather(tokens, starts[some], context_length + 1)
        ignored = np.arange(context_length) < counted_before[some, None]
        yield torch.from_numpy(np.stack((windows[:, :-1], np.where(ignored, IGNORED, windows[:, 1:]))))


def _evaluation_examples(
    examples: Examples, context_length: int, limit: int, rank: int, size: int, most_tokens: int
) -> Iterator[Tensor]:
    """Every example once, the longest first; or, with a limit, about that many tokens in examples of all lengths."""
    order = np.argsort(-examples.lengths, kind="stable")
    if limit and limit < len(examples):
        share = max(1, round(len(order) * limit / len(examples)))
        order = order[np.linspace(0, len(order) - 1, share).astype(np.int64)]
    order = np.append(order, np.repeat(-1, -len(order) % size))  # all processes take as many
    while len(order):
        length = padded_length(int(examples.lengths[order[0]]), context_length)
        rows = max(1, most_tokens // length) * size
        some, order = order[:rows][rank::size], order[rows:]
        yield torch.from_numpy(inputs_and_targets(gather_examples(examples, some, length + 1)))
