"""Batch t, a pure function of (data, seed, t): its windows or examples, and their targets."""

import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.data.dataset import Examples, Tokens
from engine.data.mixture import MixedTokens, assign_to_datasets
from engine.nn.loss import IGNORE_INDEX

NUM_FEISTEL_ROUNDS = 6
EVALUATION_BATCH_TOKENS = 2**14
MAX_GROUP_BATCHES = 256  # batches whose examples are sorted by length together
LENGTH_MULTIPLE = 8  # of padded examples: faster matrix products, and fewer shapes
PADDING_TOKEN = ~0  # token 0, not a target
MIN_LONG_TEXT_WINDOWS = 100  # the windows of an epoch miss less than 2% of a longer text


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Hash uint64s with the finalizer of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def derived_seed(*numbers: int) -> int:
    """Return a random seed that depends on every number and on their order."""
    seed = np.zeros(1, np.uint64)
    for number in numbers:
        seed = splitmix64(seed + splitmix64(np.array([number % 2**64], np.uint64) + np.uint64(1)))
    return int(seed[0])


def permute(index: np.ndarray, size: int, key: np.ndarray) -> np.ndarray:
    """Permute 0…size-1 pseudo-randomly: index (N,), key (N,) or (1,) → permuted index (N,).

    A Feistel network (Luby & Rackoff 1988) over a power of four, at least size, with cycle walking
    (Black & Rogaway 2002). Memory does not depend on size.
    """
    num_bits = max(1, ((size - 1).bit_length() + 1) // 2)  # of each half
    shift = np.uint64(num_bits)
    mask = np.uint64(2**num_bits - 1)
    key = np.broadcast_to(key, index.shape)
    result = index.astype(np.uint64)
    is_outside = np.ones(len(result), bool)
    while is_outside.any():
        high = result[is_outside] >> shift
        low = result[is_outside] & mask
        for number in range(NUM_FEISTEL_ROUNDS):
            round_key = splitmix64(key[is_outside] + np.uint64(number))
            mixed = high ^ (splitmix64(low ^ round_key) & mask)
            high = low
            low = mixed
        result[is_outside] = (high << shift) | low
        is_outside &= result >= size
    return result


def is_short_text(num_tokens: int, context_length: int) -> bool:
    """Return whether a text is short, so that the windows of an epoch overlap to cover it."""
    return (num_tokens - 1) // context_length < MIN_LONG_TEXT_WINDOWS


def windows_per_epoch(num_tokens: int, context_length: int) -> int:
    """Return the number of windows of context_length + 1 tokens in an epoch.

    Their stride is context_length. In a short text they cover all tokens from any offset. A long
    text has one fewer than fit, so that they fit from any offset. Raises UserError if none fits.
    """
    num_fitting = (num_tokens - 1) // context_length
    if num_fitting < 1:
        reason = f"must be less than the number of tokens, {num_tokens} (got {context_length})"
        raise UserError(f"--context-length: {reason}. Lower it, or prepare more text.")
    if is_short_text(num_tokens, context_length):
        return (num_tokens - 3) // context_length + 2
    return max(1, num_fitting - 1)


def window_starts(
    num_tokens: int, context_length: int, seed: int, sequence_index: np.ndarray
) -> np.ndarray:
    """Return the index of the first token of each window: sequence numbers (N,), uint64 → (N,).

    Each epoch has its own offset, and visits each window once, in pseudo-random order. Windows that
    would begin before a short text, or end after it, are moved into the text.
    """
    size = windows_per_epoch(num_tokens, context_length)
    epoch = sequence_index // np.uint64(size)
    key = splitmix64(epoch + np.uint64(derived_seed(seed)))
    max_offset = min(context_length, num_tokens - size * context_length)
    margin = 0  # lets unsigned starts be before the text
    if is_short_text(num_tokens, context_length):
        max_offset = context_length
        margin = context_length - 1
    offset = splitmix64(key) % np.uint64(max_offset)
    window = permute(sequence_index % np.uint64(size), size, key)
    starts = offset + window * np.uint64(context_length)
    return np.clip(starts, margin, num_tokens - 1 - context_length + margin) - np.uint64(margin)


def gather(tokens: Tokens, starts: np.ndarray, length: int) -> np.ndarray:
    """Read the windows of ``length`` tokens that start at ``starts`` (N,): (N, length), int64."""
    windows = [tokens[start : start + length] for start in starts.tolist()]
    return np.array(windows, np.int64).reshape(len(starts), length)


def gather_windows(
    tokens: Tokens | MixedTokens, context_length: int, seed: int, sequence_index: np.ndarray
) -> np.ndarray:
    """Read the windows: sequence numbers (N,), uint64 → (N, context_length + 1), int64.

    Each dataset of a mix has its own seed. With one seed, datasets of equal length would have the
    same order.
    """
    if not isinstance(tokens, MixedTokens):
        starts = window_starts(len(tokens), context_length, seed, sequence_index)
        return gather(tokens, starts, context_length + 1)
    windows = np.empty((len(sequence_index), context_length + 1), np.int64)
    dataset_index, index = assign_to_datasets(tokens.weights, sequence_index)
    for number, dataset in enumerate(tokens.datasets):
        rows = dataset_index == number
        dataset_seed = derived_seed(seed, number) if number else seed
        windows[rows] = gather_windows(dataset, context_length, dataset_seed, index[rows])
    return windows


def example_indices(examples: Examples, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Return the indices of the examples in a batch, (batch_size,). An epoch visits each once.

    Epochs, each in pseudo-random order, follow one another without a gap, so a batch may contain
    examples of several epochs.
    """
    first_epoch = step * batch_size // examples.num_examples
    last_epoch = ((step + 1) * batch_size - 1) // examples.num_examples
    epochs = range(first_epoch, last_epoch + 1)
    return np.concatenate(
        [_examples_of_epoch(examples, seed, epoch, step, batch_size) for epoch in epochs]
    )


def _examples_of_epoch(
    examples: Examples, seed: int, epoch: int, step: int, batch_size: int
) -> np.ndarray:
    """Return the indices of the examples of one epoch that are in a batch.

    The batches of an epoch are divided into groups. The examples of a group are sorted by length,
    so that each batch has similar lengths. The batches of a group come in pseudo-random order.
    """
    size = examples.num_examples
    first_step = epoch * size // batch_size  # the first with examples of this epoch
    num_batches = ((epoch + 1) * size - 1) // batch_size - first_step + 1
    num_groups = -(-num_batches // MAX_GROUP_BATCHES)
    group = ((step - first_step + 1) * num_groups - 1) // num_batches
    start = first_step + num_batches * group // num_groups  # first step of the group
    end = first_step + num_batches * (group + 1) // num_groups
    edges = np.clip(np.arange(start, end + 1) * batch_size - epoch * size, 0, size)
    counts = np.diff(edges)  # of the epoch's examples in each batch of the group
    key = splitmix64(np.array([epoch], np.uint64) + np.uint64(derived_seed(seed)))
    example_index = permute(np.arange(edges[0], edges[-1]), size, key).astype(np.int64)
    sorted_index = example_index[np.argsort(examples.lengths[example_index], kind="stable")]
    group_key = splitmix64(key + np.uint64(group))
    position = permute(np.arange(len(counts)), len(counts), group_key)  # of each batch, by length
    stop = counts[position <= position[step - start]].sum()
    return sorted_index[stop - counts[step - start] : stop]


def padded_length(num_tokens: int, context_length: int) -> int:
    """Return the padded length of a batch's inputs, from the size of its longest example."""
    assert num_tokens <= context_length + 1, "see drop_long_examples"
    return min(-(-max(1, num_tokens - 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, context_length)


def gather_examples(examples: Examples, example_index: np.ndarray, length: int) -> np.ndarray:
    """Read examples, padded on the right: indices (N,) → ids (N, length), int64.

    An id that is not a target is stored as ~id. The index -1 is an example without tokens.
    """
    rows = np.full((len(example_index), length), PADDING_TOKEN, np.int64)
    for row, index in zip(rows, example_index.tolist(), strict=True):
        if index >= 0:
            tokens = examples.example(index)
            row[: len(tokens)] = tokens
    return rows


def inputs_and_targets(rows: np.ndarray) -> Tensor:
    """Split rows of ids, in which ~id is not a target: (B, T + 1) → (2, B, T)."""
    inputs = np.where(rows < 0, ~rows, rows)[:, :-1]
    return torch.from_numpy(np.stack((inputs, np.maximum(rows, IGNORE_INDEX)[:, 1:])))


@dataclass(eq=False)
class Batches:
    """The training batches of one rank. A thread assembles the next batch while one is in use."""

    tokens: Tokens | Examples | MixedTokens
    context_length: int
    seed: int
    batch_size: int  # sequences of all ranks
    rank_slice: slice  # selects the rank's sequences in a batch
    device: torch.device

    def __post_init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.pending: dict[int, Future] = {}  # the batch of the next step
        self.digest = 0  # of the last batch; the sum over ranks does not depend on the world size

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step on the device, int64 (B, T) each.

        T is the context length, or for examples at most that: see padded_length.
        """
        future = self.pending.pop(step, None) or self.thread.submit(self._assemble, step)
        pair, self.digest = future.result()
        self.pending = {step + 1: self.thread.submit(self._assemble, step + 1)}
        inputs, targets = pair.to(self.device, non_blocking=True)
        return inputs, targets

    def _assemble(self, step: int) -> tuple[Tensor, int]:
        """Return inputs and targets of a step, (2, B, T), and their digest."""
        numbers = np.arange(self.batch_size)[self.rank_slice]
        if isinstance(self.tokens, Examples):
            index = example_indices(self.tokens, self.seed, step, self.batch_size)
            longest = int(self.tokens.lengths[index].max())
            length = padded_length(longest, self.context_length)
            rows = gather_examples(self.tokens, index[numbers], length + 1)
        else:
            index = np.uint64(step * self.batch_size) + numbers.astype(np.uint64)
            rows = gather_windows(self.tokens, self.context_length, self.seed, index)
        digest = sum(map(zlib.crc32, rows, numbers.tolist()))
        pair = inputs_and_targets(rows)
        return pair.pin_memory() if self.device.type == "cuda" else pair, digest


def tokens_per_step(
    tokens: Tokens | Examples | MixedTokens, context_length: int, batch_size: int
) -> int:
    """Return the number of inputs of a batch without padding; for examples, the mean."""
    if isinstance(tokens, Examples):
        return round(batch_size * (len(tokens) / tokens.num_examples - 1))
    return batch_size * context_length


def check_sizes(batch_size: int, world_size: int, micro_batch_size: int | None) -> None:
    """Raise UserError unless ranks divide a batch evenly, and micro-batches the slice of a rank."""
    rank_size, remainder = divmod(batch_size, world_size)
    if remainder:
        next_multiple = (rank_size + 1) * world_size
        reason = f"must be a multiple of {world_size}, the number of processes (got {batch_size})"
        raise UserError(f"--batch-size: {reason}. Try {next_multiple}.")
    if micro_batch_size and (micro_batch_size < 1 or rank_size % micro_batch_size):
        divisors = ", ".join(str(n) for n in range(1, rank_size + 1) if rank_size % n == 0)
        reason = f"must divide the {rank_size} sequences of a rank (got {micro_batch_size})"
        raise UserError(f"--micro-batch-size: {reason}. Try one of {divisors}.")


def evaluation_windows(
    num_tokens: int, context_length: int, max_tokens: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of fixed windows, and the number of leading targets to ignore: (N,) each.

    Every token but the first is a target once. The last window starts early, so that it is full.
    With max_tokens, only evenly spaced windows are kept; 0: all. Raises UserError if none fits.
    """
    windows_per_epoch(num_tokens, context_length)
    aligned = np.arange(0, num_tokens - 1, context_length, dtype=np.int64)
    starts = np.minimum(aligned, num_tokens - 1 - context_length)
    num_ignored = aligned - starts
    if max_tokens and max_tokens < num_tokens:
        num_windows = max(1, max_tokens // context_length)
        index = np.linspace(0, len(starts) - 1, num_windows).astype(np.int64)
        return starts[index], num_ignored[index]
    return starts, num_ignored


def evaluation_batches(
    tokens: Tokens | Examples,
    context_length: int,
    max_tokens: int,
    rank: int,
    world_size: int,
    batch_tokens: int = EVALUATION_BATCH_TOKENS,
) -> Iterator[Tensor]:
    """Yield inputs and targets of the evaluation windows of a rank, int64 (2, B, T) each.

    max_tokens limits the evaluation (0: no limit), and batch_tokens limits a batch. All ranks have
    the same number of batches, of the same shapes.
    """
    if isinstance(tokens, Examples):
        order = evaluation_order(tokens, max_tokens)
        order = np.append(order, np.repeat(-1, -len(order) % world_size))
        while len(order):
            length = padded_length(int(tokens.lengths[order[0]]), context_length)
            num_rows = max(1, batch_tokens // length) * world_size
            rows = gather_examples(tokens, order[:num_rows][rank::world_size], length + 1)
            yield inputs_and_targets(rows)
            order = order[num_rows:]
        return
    starts, num_ignored = evaluation_windows(len(tokens), context_length, max_tokens)
    num_missing = -len(starts) % world_size  # filled with windows without a target
    starts = np.append(starts, np.repeat(starts[:1], num_missing))[rank::world_size]
    num_ignored = np.append(num_ignored, np.repeat(context_length, num_missing))[rank::world_size]
    num_rows = max(1, batch_tokens // context_length)
    for first in range(0, len(starts), num_rows):
        batch = slice(first, first + num_rows)
        rows = gather(tokens, starts[batch], context_length + 1)
        is_ignored = np.arange(context_length) < num_ignored[batch, None]
        rows[:, 1:] = np.where(is_ignored, ~rows[:, 1:], rows[:, 1:])
        yield inputs_and_targets(rows)


def evaluation_order(examples: Examples, max_tokens: int) -> np.ndarray:
    """Return the indices of the examples to evaluate, longest first; a limit spaces them evenly."""
    order = np.argsort(-examples.lengths, kind="stable")
    if max_tokens and max_tokens < len(examples):
        num_examples = max(1, round(len(order) * max_tokens / len(examples)))
        order = order[np.linspace(0, len(order) - 1, num_examples).astype(np.int64)]
    return order
