"""A split of a dataset: text, examples or a mixture of texts, and its rows for step t.

The rows are a pure function of (split, seed, t). In a row a token that is not a target is ~id.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from engine.data import order
from engine.data.shards.shard_file import ShardedTokens

EXAMPLES_DTYPE = "int32"  # of token shards of examples: ~id is negative
PADDING_TOKEN = ~0  # token 0, not a target
EVALUATION_BATCH_TOKENS = 2**14
LENGTH_MULTIPLE = 8  # of padded examples: faster matrix products, and fewer shapes


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """Return the ids of tokens, of which ~id is not a target."""
    return np.where(tokens < 0, ~tokens, tokens)


def prompt_ids(example: np.ndarray) -> list[int]:
    """Return the token ids of an example before its first target."""
    return [~token for token in itertools.takewhile(lambda token: token < 0, example.tolist())]


def is_target(example: np.ndarray) -> np.ndarray:
    """Return a mask, bool (N,), of the targets in an encoded example (N,): never the first id."""
    return (example >= 0) & (np.arange(len(example)) > 0)


def padded_length(num_tokens: int, context_length: int) -> int:
    """Return the padded length of a batch's inputs, from the size of its longest example."""
    assert num_tokens <= context_length + 1, "see drop_long_examples"
    return min(-(-max(1, num_tokens - 1) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, context_length)


Tokens = np.ndarray | ShardedTokens  # token ids (N,)


@dataclass(frozen=True)
class BatchSpec:
    """What the rows of a rank in a training batch depend on, besides the step."""

    context_length: int
    seed: int
    batch_size: int  # sequences of all ranks
    rank_slice: slice  # selects the rank's sequences in a batch


class Split:
    """A split of a dataset: text, or in subclasses examples or a mixture of texts."""

    num_examples = 0  # 0: text
    longest_example = 0  # tokens
    num_removed = 0  # examples, by drop_long

    def __init__(self, tokens: Tokens):
        self.tokens = tokens

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    def tokens_per_step(self, batch_size: int, context_length: int) -> int:
        """Return the number of inputs of a batch without padding; for examples, the mean."""
        return batch_size * context_length

    def examples(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each example, int32; of text, nothing."""
        return iter(())

    def drop_long(self, context_length: int) -> "Split":
        """Remove the examples of more than context_length + 1 tokens."""
        return self

    def rows(self, step: int, spec: BatchSpec) -> np.ndarray:
        """Read the rows of a rank in a batch: int64 (N, up to context_length + 1)."""
        numbers = np.arange(spec.batch_size, dtype=np.uint64)[spec.rank_slice]
        index = np.uint64(step * spec.batch_size) + numbers
        return self.windows(spec.context_length, spec.seed, index)

    def windows(self, context_length: int, seed: int, sequence_index: np.ndarray) -> np.ndarray:
        """Read windows: see order.window_starts."""
        starts = order.window_starts(len(self), context_length, seed, sequence_index)
        return self._gather(starts, context_length + 1)

    def _gather(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read the windows of ``length`` tokens that start at ``starts`` (N,): (N, length)."""
        windows = [self.tokens[start : start + length] for start in starts.tolist()]
        return np.array(windows, np.int64).reshape(len(starts), length)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Read consecutive ids, int64 (N,), and which of them are targets, bool (N,)."""
        ids = self.tokens[start:stop].astype(np.int64)
        return ids, np.arange(start, start + len(ids)) > 0

    def evaluation_rows(
        self, context_length: int, max_tokens: int, rank: int, world_size: int
    ) -> Iterator[np.ndarray]:
        """Yield the rows of a rank to evaluate on, int64 (N, T + 1) each.

        A batch has about EVALUATION_BATCH_TOKENS. max_tokens limits the evaluation; 0: no limit.
        All ranks have the same number of batches, of the same shapes.
        """
        starts, num_ignored = order.evaluation_windows(len(self), context_length, max_tokens)
        num_missing = -len(starts) % world_size  # filled with windows without a target
        starts = np.pad(starts, (0, num_missing), "edge")
        num_ignored = np.pad(num_ignored, (0, num_missing), constant_values=context_length)
        num_rows = max(1, EVALUATION_BATCH_TOKENS // context_length) * world_size
        for first in range(rank, len(starts), num_rows):
            batch = slice(first, first + num_rows, world_size)
            rows = self._gather(starts[batch], context_length + 1)
            is_ignored = np.arange(context_length) < num_ignored[batch, None]
            rows[:, 1:] = np.where(is_ignored, ~rows[:, 1:], rows[:, 1:])
            yield rows


@dataclass(eq=False)
class MixedText(Split):
    """The training splits of several datasets of text."""

    texts: Sequence[Split]
    weights: Sequence[float]  # fraction of the sequences from each; they sum to 1

    def __len__(self) -> int:
        return sum(map(len, self.texts))

    def windows(self, context_length: int, seed: int, sequence_index: np.ndarray) -> np.ndarray:
        """Read the windows of each text."""
        windows = np.empty((len(sequence_index), context_length + 1), np.int64)
        text_index, index = order.assign_to_texts(self.weights, sequence_index)
        for number, text in enumerate(self.texts):
            rows = text_index == number
            # With one seed, texts of equal length would have the same order.
            text_seed = order.derived_seed(seed, number) if number else seed
            windows[rows] = text.windows(context_length, text_seed, index[rows])
        return windows


class Examples(Split):
    """A split of examples. Its length is its number of tokens, as for a split of text."""

    def __init__(self, tokens: Tokens, starts: np.ndarray, lengths: np.ndarray):
        """Take int32 tokens, and for each example its start and its length in them, int64 (N,)."""
        self.tokens = tokens
        self.starts = starts
        self.lengths = lengths
        self.num_examples = len(lengths)
        self.longest_example = int(lengths.max(initial=0))
        # The order of examples by seed and batch size; it remembers the group of the last batch.
        self.order_of = functools.lru_cache(2)(functools.partial(order.ExampleOrder, lengths))

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def tokens_per_step(self, batch_size: int, context_length: int) -> int:
        """Return the mean number of inputs of a batch without padding."""
        return round(batch_size * (len(self) / self.num_examples - 1))

    def example(self, index: int) -> np.ndarray:
        """Read the tokens of one example, int32."""
        start = int(self.starts[index])
        return self.tokens[start : start + int(self.lengths[index])]

    def drop_long(self, context_length: int) -> "Examples":
        """Remove the examples of more than context_length + 1 tokens."""
        fits = self.lengths <= context_length + 1
        fitting = Examples(self.tokens, self.starts[fits], self.lengths[fits])
        fitting.num_removed = int((~fits).sum())
        return fitting

    def examples(self) -> Iterator[np.ndarray]:
        """Yield the tokens of each example, int32."""
        return map(self.example, range(self.num_examples))

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Read ids, also those of removed examples, which are no targets."""
        tokens = self.tokens[start:stop].astype(np.int64)
        position = np.arange(start, start + len(tokens))
        index = np.searchsorted(self.starts, position, "right") - 1
        offset = position - self.starts[index]
        is_target = (tokens >= 0) & (offset > 0) & (offset < self.lengths[index])
        return token_ids(tokens), is_target

    def rows(self, step: int, spec: BatchSpec) -> np.ndarray:
        """Read the examples of a rank in a batch, which are padded to the longest of all ranks."""
        index = self.order_of(spec.seed, spec.batch_size).batch(step)
        length = padded_length(int(self.lengths[index].max()), spec.context_length)
        return self._gather(index[spec.rank_slice], length + 1)

    def _gather(self, example_index: np.ndarray, length: int) -> np.ndarray:
        """Read examples, padded on the right: indices (N,) → (N, length); -1: no tokens."""
        rows = np.full((len(example_index), length), PADDING_TOKEN, np.int64)
        for row, index in zip(rows, example_index.tolist(), strict=True):
            if index >= 0:
                tokens = self.example(index)
                row[: len(tokens)] = tokens
        return rows

    def evaluation_rows(
        self, context_length: int, max_tokens: int, rank: int, world_size: int
    ) -> Iterator[np.ndarray]:
        """Yield examples, longest first; a limit spaces them evenly."""
        index = np.argsort(-self.lengths, kind="stable")
        if max_tokens and max_tokens < len(self):
            num_examples = max(1, round(len(index) * max_tokens / len(self)))
            index = index[np.linspace(0, len(index) - 1, num_examples).astype(np.int64)]
        index = np.append(index, np.repeat(-1, -len(index) % world_size))
        while len(index):
            length = padded_length(int(self.lengths[index[0]]), context_length)
            num_rows = max(1, EVALUATION_BATCH_TOKENS // length) * world_size
            batch = index[:num_rows]
            yield self._gather(batch[rank::world_size], length + 1)
            index = index[num_rows:]
