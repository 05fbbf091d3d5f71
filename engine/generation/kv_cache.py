"""The KV cache: keys and values of earlier positions, so that a token costs only its own."""

import math

import torch
from torch import Tensor

from model import GPT

MAX_CACHED_WINDOWS = 2  # of a sliding window; with 1, every token would move the window


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

    def clear(self) -> None:
        """Forget all positions."""
        self.filled = 0  # positions so far
        self.stored = 0  # the last of these, which are still stored

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, G, T, K) of the next T positions.

        Returns those of all positions that any of these T may see.
        """
        new = torch.stack((key, value))
        start = self.stored
        end = start + key.shape[2]
        self.filled += key.shape[2]
        if end <= self.keys_values.shape[3]:
            self.keys_values[:, :, :, start:end] = new
            self.stored = end
            keys, values = self.keys_values[:, :, :, :end]
            return keys, values
        # The capacity is used up: move what the next position sees to the front.
        first_visible = max(0, start + 1 - self.window)
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
