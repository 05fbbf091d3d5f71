"""The KV cache: keys and values of earlier positions, so that a token costs only its own."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.core.device import total_memory
from engine.nn.attention import attend, attend_from_last
from engine.nn.positions import position_range
from model import GPT

MAX_CACHED_WINDOWS = 2  # of a sliding window; with 1, every token would move the window
MAX_CACHE_FRACTION = 0.25  # of a device's memory, for sequences that are decoded together
MIN_ROW_POSITIONS = 128  # that rows of different lengths have room for


class KVCache:
    """The keys and values of a block's attention; with a sliding window, of the last positions."""

    def __init__(
        self,
        batch_size: int,
        num_heads: int,
        length: int,
        head_dim: int,
        like: Tensor,
        window: int = 0,
    ):
        """Allocate for up to ``length`` positions, with the dtype and device of ``like``.

        Each position sees ``window`` positions, or all of them if that is 0.
        """
        self.length = length
        self.window = window or length
        capacity = min(length, MAX_CACHED_WINDOWS * self.window)
        # (2, B, G, capacity, K)
        self.keys_values = like.new_empty(2, batch_size, num_heads, capacity, head_dim)
        self.clear()

    def next_positions(self, num_tokens: int) -> Tensor:
        """Return the next positions, (T,). Raises ValueError beyond the cache's length."""
        device = self.keys_values.device
        return position_range(self.filled, num_tokens, self.length, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append keys and values (B, G, T, K); return attention to all visible, (B, H, T, K)."""
        keys, values = self.append(key, value)
        return attend(query, keys, values, window=self.window)

    def clear(self) -> None:
        """Forget all positions."""
        self.filled = 0  # positions so far
        self.stored = 0  # the last of these, which are still stored

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, G, T, K) of the next T positions.

        Returns those of all positions that any of these T may see.
        """
        num_tokens = key.shape[2]
        start = self.stored
        end = start + num_tokens
        self.filled += num_tokens
        if end <= self.keys_values.shape[3]:
            self.stored = end
            keys, values = self.keys_values.narrow(3, 0, end).unbind()
            keys.narrow(2, start, num_tokens).copy_(key)
            values.narrow(2, start, num_tokens).copy_(value)
            return keys, values
        # The capacity is used up: move what the next position sees to the front.
        first_visible = max(0, start + 1 - self.window)
        new = torch.stack((key, value))
        visible = torch.cat((self.keys_values[:, :, :, first_visible:start], new), dim=3)
        self.stored = min(self.window - 1, visible.shape[3])
        self.keys_values[:, :, :, : self.stored] = visible[
            :, :, :, visible.shape[3] - self.stored :
        ]
        keys, values = visible
        return keys, values

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, (N,) indices, in this order; an index may be repeated."""
        chosen = self.keys_values[:, rows, :, : self.stored]
        self.keys_values = chosen.new_empty(*chosen.shape[:3], *self.keys_values.shape[3:])
        self.keys_values[:, :, :, : self.stored] = chosen


def new_caches(model: GPT, batch_size: int, max_length: float = math.inf) -> list[KVCache]:
    """Create an empty cache for each block, for max_length positions or the context, if shorter."""
    config = model.config
    length = int(min(config.context_length, max_length))
    shape = (batch_size, config.num_groups, length, config.head_width)
    like = next(model.parameters())
    return [KVCache(*shape, like, window) for window in config.layer_windows]


def max_cached_rows(model: GPT, limit: int) -> int:
    """Return how many sequences of full length fit in the memory for caches, from 1 to a limit."""
    config = model.config
    like = next(model.parameters())
    num_values = 2 * config.num_layers * config.num_groups * config.head_width
    row_bytes = num_values * config.context_length * like.element_size()
    return int(max(1, min(limit, MAX_CACHE_FRACTION * total_memory(like.device) / row_bytes)))


class RowLengths:
    """The lengths of sequences in the rows of :class:`RowCache`, the same in all blocks."""

    def __init__(self, max_rows: int, max_length: int, device: torch.device):
        self.max_rows = max_rows
        self.max_length = max_length
        self.lengths = torch.empty(0, dtype=torch.long, device=device)  # (N,)
        self.longest = 0
        self.masks: dict[int, Tensor] = {}

    def replace(self, lengths: Tensor) -> None:
        """Set the lengths, (N,), of all sequences."""
        self.lengths = lengths
        self.longest = int(lengths.max()) if len(lengths) else 0
        self.masks.clear()

    def visible(self, window: int) -> Tensor:
        """Return which positions the next token of each row sees, (N, 1, 1, S)."""
        if window not in self.masks:
            positions = torch.arange(self.longest + 1, device=self.lengths.device)
            distance = self.lengths[:, None] - positions
            self.masks[window] = ((distance >= 0) & (distance < window))[:, None, None]
        return self.masks[window]


class RowCache:
    """The keys and values of a block for sequences of different lengths, one in each row.

    Sequences come and go: one comes from a :class:`KVCache`, and all grow by one token at a time.
    Memory grows with the number of sequences and with the longest.
    """

    def __init__(
        self, rows: RowLengths, num_heads: int, head_dim: int, like: Tensor, window: int = 0
    ):
        """Start without rows, with the dtype and device of ``like``.

        Each position sees ``window`` positions, or all of them if that is 0.
        """
        self.rows = rows
        self.window = window or rows.max_length
        # (2, N, G, S, K)
        self.keys_values = like.new_zeros(2, 0, num_heads, 0, head_dim)

    def next_positions(self, num_tokens: int) -> Tensor:
        """Return the position of each row's next token, (N, 1). Raises ValueError without room."""
        if num_tokens != 1 or self.rows.longest >= self.rows.max_length:
            limit = self.rows.max_length
            raise ValueError(f"rows must grow by one token (got {num_tokens}), up to {limit}")
        return self.rows.lengths[:, None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the keys and values (N, G, 1, K) of a token; return its attention, (N, H, 1, K)."""
        num_rows = len(query)
        length = self.rows.longest + 1
        self.reserve(num_rows, length)
        indices = torch.arange(num_rows, device=query.device)
        self.keys_values[:, indices, :, self.rows.lengths] = torch.stack((key, value))[
            :, :, :, 0
        ].transpose(0, 1)
        keys, values = self.keys_values[:, :num_rows, :, :length]
        return attend_from_last(query, keys, values, self.rows.visible(self.window))

    def reserve(self, num_rows: int, length: int) -> None:
        """Make room for num_rows sequences of a length.

        What grows has at least twice the size afterwards, up to its limit.
        """
        row_capacity = new_row_capacity = self.keys_values.shape[1]
        capacity = new_capacity = self.keys_values.shape[3]
        if num_rows > row_capacity:
            new_row_capacity = min(max(2 * row_capacity, num_rows), self.rows.max_rows)
        if length > capacity:
            new_capacity = min(max(MIN_ROW_POSITIONS, 2 * capacity, length), self.rows.max_length)
        more_rows = new_row_capacity - row_capacity
        more_positions = new_capacity - capacity
        if more_rows or more_positions:
            padding = (0, 0, 0, more_positions, 0, 0, 0, more_rows)
            self.keys_values = F.pad(self.keys_values, padding)

    def clear(self) -> None:
        """Free the memory of all rows."""
        self.keys_values = self.keys_values[:, :0, :, :0].clone()

    def insert(self, row: int, cache: KVCache) -> None:
        """Put the only sequence of a cache into a row."""
        self.reserve(row + 1, cache.filled)
        stored = slice(cache.filled - cache.stored, cache.filled)
        self.keys_values[:, row, :, stored] = cache.keys_values[:, 0, :, : cache.stored]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the positions of a row over another row."""
        self.keys_values[:, target, :, :length] = self.keys_values[:, source, :, :length]


def new_row_caches(model: GPT, rows: RowLengths) -> list[RowCache]:
    """Create a cache for each block, for sequences with the lengths of ``rows``."""
    config = model.config
    like = next(model.parameters())
    shape = (config.num_groups, config.head_width)
    return [RowCache(rows, *shape, like, window) for window in config.layer_windows]
