"""The order of data: which windows of a text, or which examples, step t has.

Everything here is a pure function of sizes, seed and step, in O(1) memory.
"""

import functools
from collections.abc import Sequence

import numpy as np

NUM_FEISTEL_ROUNDS = 6
MAX_GROUP_BATCHES = 256  # batches whose examples are sorted by length together
MIN_LONG_TEXT_WINDOWS = 100  # the windows of an epoch miss less than 2% of a longer text
FIXED_POINT_ONE = 2**32  # a weight of 1 in fixed-point numbers, which make counts exact


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

    Their stride is context_length. Short texts have enough windows to cover all tokens at any
    offset. Long texts have one less than fits, so that any offset fits.
    """
    assert num_tokens > context_length, "see Dataset.check_length"
    if is_short_text(num_tokens, context_length):
        return (num_tokens - 3) // context_length + 2
    return (num_tokens - 1) // context_length - 1


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
    # The margin lets unsigned starts be before a short text.
    margin = context_length - 1 if is_short_text(num_tokens, context_length) else 0
    offset = splitmix64(key) % np.uint64(context_length)
    window = permute(sequence_index % np.uint64(size), size, key)
    starts = offset + window * np.uint64(context_length)
    return np.clip(starts, margin, num_tokens - 1 - context_length + margin) - np.uint64(margin)


def evaluation_windows(
    num_tokens: int, context_length: int, max_tokens: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of fixed windows, and the number of leading targets to ignore: (N,) each.

    Every token but the first is a target once. The last window starts early, so that it is full.
    With max_tokens, only evenly spaced windows are kept; 0: all.
    """
    aligned = np.arange(0, num_tokens - 1, context_length, dtype=np.int64)
    if max_tokens and max_tokens < num_tokens:
        num_windows = max(1, max_tokens // context_length)
        aligned = aligned[np.linspace(0, len(aligned) - 1, num_windows).astype(np.int64)]
    starts = np.minimum(aligned, num_tokens - 1 - context_length)
    return starts, aligned - starts


class ExampleOrder:
    """Which examples a batch has: a pure function of all lengths (N,), seed, batch size and step.

    An epoch visits each once. Epochs, each in pseudo-random order, follow one another without a
    gap, so a batch may contain examples of several epochs.

    The batches of an epoch are divided into groups. The examples of a group are sorted by length,
    so that each batch has similar lengths. The batches of a group come in pseudo-random order.
    """

    def __init__(self, lengths: np.ndarray, seed: int, batch_size: int):
        self.lengths = lengths
        self.seed = seed
        self.batch_size = batch_size
        self.sort_group = functools.lru_cache(2)(self._sort_group)  # consecutive steps share one

    def batch(self, step: int) -> np.ndarray:
        """Return the indices of the examples in a batch, (batch_size,)."""
        size = len(self.lengths)
        last_epoch = ((step + 1) * self.batch_size - 1) // size
        indices = []
        for epoch in range(step * self.batch_size // size, last_epoch + 1):
            first_step = epoch * size // self.batch_size  # the first with examples of this epoch
            num_batches = ((epoch + 1) * size - 1) // self.batch_size - first_step + 1
            num_groups = -(-num_batches // MAX_GROUP_BATCHES)
            number = ((step - first_step + 1) * num_groups - 1) // num_batches
            start = first_step + num_batches * number // num_groups
            end = first_step + num_batches * (number + 1) // num_groups
            indices.append(self.sort_group(epoch, number, start, end)[step - start])
        return np.concatenate(indices)

    def _sort_group(self, epoch: int, number: int, start: int, end: int) -> list[np.ndarray]:
        """Return an epoch's examples for each step from ``start`` to before ``end``."""
        size = len(self.lengths)
        edges = np.arange(start, end + 1) * self.batch_size - epoch * size
        edges = np.clip(edges, 0, size)
        counts = np.diff(edges)  # of the epoch's examples in each batch
        key = splitmix64(np.array([epoch], np.uint64) + np.uint64(derived_seed(self.seed)))
        index = permute(np.arange(edges[0], edges[-1]), size, key).astype(np.int64)
        sorted_index = index[np.argsort(self.lengths[index], kind="stable")]
        group_key = splitmix64(key + np.uint64(number))
        position = permute(np.arange(len(counts)), len(counts), group_key)  # of batches, by length
        stops = np.cumsum(counts[np.argsort(position)])
        batches = np.split(sorted_index, stops[:-1])
        return [batches[number] for number in position.tolist()]


def assign_to_texts(
    weights: Sequence[float], sequence_index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the text of each sequence, and its index there: (N,) each, from uint64 (N,).

    The first text has sequence n if floor((n + 1) * weight) > floor(n * weight), at index
    floor(n * weight). The other sequences are renumbered from 0 and assigned in the same way. So
    each text has its fraction of the first n sequences, up to a few, at consecutive indices.
    """
    last = len(weights) - 1
    fixed = [round(FIXED_POINT_ONE * weights[i] / sum(weights[i:])) for i in range(last)]
    pairs = []
    for n in sequence_index.tolist():  # Python's integers do not overflow
        number = last
        for candidate, weight in enumerate(fixed):
            before = n * weight // FIXED_POINT_ONE
            if (n + 1) * weight // FIXED_POINT_ONE > before:
                number = candidate
                n = before
                break
            n -= before
        pairs.append((number, n))
    text_index, index = np.array(pairs, np.uint64).reshape(-1, 2).T
    return text_index.astype(np.int64), index
