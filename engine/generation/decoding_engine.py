"""The decoding engine: token sequences of different lengths, and the logits of their next tokens.

Each sequence is a row of a cache of keys and values, so that a token costs only its own
computation. Everything that generates text drives one engine.
"""

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.core.cli import warn
from engine.core.device import ROUNDING_TOLERANCES, usable_memory
from engine.nn.acceleration import GRAPH_POOLS, CapturedCalls, GraphPool, can_capture_graphs
from engine.nn.attention import DocumentAttention, attend, attend_from_last
from model import GPT

MAX_CACHE_FRACTION = 0.25  # of a device's memory, for the rows of a batch
MAX_RESERVED_TOKENS = 512  # of a text: a captured token reads all of the memory
MAX_PROMPT_LOGITS = 2**23  # of a prompt that exist at one time, 32 MiB
MIN_CACHED_POSITIONS = 128  # that the cache has room for
SHAPELESS_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
NO_START_ID = -1  # one document
MAX_PADDING_BYTES = 2**19  # of a row; reading more takes longer than attention of each row alone


def window_start(length: int, context_length: int) -> int:
    """Return where the context of the next token starts in ``length`` tokens.

    The context grows to context_length, then drops its older half and grows again, so that a cache
    stays valid meanwhile.
    """
    stride = (context_length + 1) // 2
    num_excess = max(0, length - context_length)
    return math.ceil(num_excess / stride) * stride


@functools.cache
def warn_of_capture(reason: str) -> None:
    """Warn once that tokens are computed plainly."""
    warn(f"decoding continues without CUDA graphs: {reason}")


class RowSpan:
    """Consecutive rows of equal length, to which a forward pass appends T tokens each."""

    def __init__(self, first: int, start: int, num_tokens: int, device: torch.device):
        """Take the rows from ``first`` on, which have cached ``start`` positions."""
        self.first = first
        self.start = start
        self.end = start + num_tokens
        self.positions = torch.arange(start, self.end, device=device)  # (T,)


class TokenSpan:
    """The first N rows of a cache, to which a forward pass appends a token each, where they end.

    All that differs between two captured passes is in tensors. A row after all that are in use may
    stand in for the last of the N rows, so that few numbers of rows are captured.
    """

    def __init__(
        self,
        positions: Tensor,
        rows: Tensor,
        windows: set[int],
        end: int,
        lengths: Sequence[int] = (),
    ):
        """Append at positions (N, 1) of rows (N,), of which those before ``end`` are read.

        ``lengths`` are the same positions as numbers, if the pass is not captured.
        """
        self.positions = positions
        self.rows = rows
        self.end = end
        self.lengths = lengths
        self.num_padding = sum(end - length - 1 for length in lengths)  # of shorter rows
        self.masks: dict[int, Tensor] = {}  # by window: visible positions, (N, 1, 1, S)
        for window in windows:
            first_visible = max(0, min(lengths, default=0) + 1 - window)
            distances = positions - torch.arange(first_visible, end, device=positions.device)
            self.masks[window] = ((distances >= 0) & (distances < window))[:, None, None]


class KVCache:
    """The keys and values of a block's attention, in a row for each sequence."""

    span: RowSpan | TokenSpan  # of the next forward pass

    def __init__(self, num_heads: int, head_dim: int, window: int, like: Tensor):
        """Start without rows, with the dtype and device of ``like``.

        Each position sees ``window`` positions, itself included.
        """
        self.window = window
        self.values_per_position = 2 * num_heads * head_dim
        # (2, N, G, S, K). Zeros, because a NaN would change a sum in which its weight is 0.
        self.keys_values = like.new_zeros(2, 0, num_heads, 0, head_dim)

    def next_positions(self) -> Tensor:
        """Return the positions of the next tokens: (T,), or (N, 1) for different lengths."""
        return self.span.positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append keys and values (N, G, T, K); return attention to all visible, (N, H, T, K)."""
        span = self.span
        if isinstance(span, RowSpan):
            rows = self.keys_values.narrow(1, span.first, len(key))
            keys, values = rows.narrow(3, 0, span.end).unbind()
            keys[:, :, span.start :] = key
            values[:, :, span.start :] = value
            return attend(query, keys, values, window=self.window)
        keys, values = self.keys_values[:, :, :, : span.end].unbind()
        indices = (span.rows, slice(None), span.positions[:, 0])
        keys[indices] = key[:, :, 0]
        values[indices] = value[:, :, 0]
        padding_bytes = span.num_padding * 2 * key[0].numel() * key.element_size()
        is_cpu = key.device.type == "cpu"
        if is_cpu and span.lengths and padding_bytes > MAX_PADDING_BYTES * len(key):
            outputs = []
            for row, length in enumerate(span.lengths):
                row_keys = keys[row : row + 1, :, : length + 1]
                row_values = values[row : row + 1, :, : length + 1]
                row_query = query[row : row + 1]
                outputs.append(attend(row_query, row_keys, row_values, window=self.window))
            return torch.cat(outputs)
        mask = span.masks[self.window]
        N = len(key)
        visible = slice(span.end - mask.shape[-1], None)
        return attend_from_last(query, keys[:N, :, visible], values[:N, :, visible], mask)

    def reserve(self, num_rows: int, length: int, max_length: int) -> bool:
        """Make room for rows of a length; return whether memory has moved.

        What grows doubles at least, up to max_length.
        """
        _, rows, _, positions, _ = self.keys_values.shape
        more_rows = max(rows, num_rows - rows) if num_rows > rows else 0
        capacity = max(MIN_CACHED_POSITIONS, 2 * positions, length)
        more_positions = min(capacity, max_length) - positions if length > positions else 0
        if more_rows or more_positions:
            padding = (0, 0, 0, more_positions, 0, 0, 0, more_rows)
            self.keys_values = F.pad(self.keys_values, padding)
        return bool(more_rows or more_positions)

    def keep(self, rows: Sequence[int], num_rows: int, length: int) -> None:
        """Keep rows of these indices, of num_rows, which have up to ``length`` positions.

        The others become zero, as a NaN would change another text.
        """
        cached = self.keys_values[:, :, :, :length]
        if targets := [target for target, source in enumerate(rows) if source != target]:
            cached[:, targets] = cached[:, [rows[target] for target in targets]]
        cached[:, len(rows) : num_rows] = 0


@dataclass
class Row:
    """A sequence: the ids of its context, of which the first num_cached are in the cache."""

    ids: tuple[int, ...]
    num_cached: int = 0

    @property
    def num_unread(self) -> int:
        return len(self.ids) - self.num_cached


class DecodingEngine:
    """Token sequences, one a row, that grow together, and the logits of their next tokens.

    A row depends on its own tokens only. One that fills the context continues with its newer half:
    :func:`window_start`. With ``attention="loop"`` nothing is cached: contexts are computed again.
    """

    def __init__(self, model: GPT, cache_dtype: torch.dtype | None = None):
        """Decode with a model in evaluation mode; engine.nn.inference.build_decoder makes it fast.

        cache_dtype is that of keys and values; None: that of the weights.
        """
        config = model.config
        weight = next(model.parameters())
        self.model = model
        self.device = weight.device
        self.context_length = config.context_length
        self.rows: list[Row] = []
        like = torch.empty(0, dtype=cache_dtype or weight.dtype, device=self.device)
        windows = [window or config.context_length for window in config.layer_windows]
        self.windows = {*windows}
        self.has_cache = config.attention == "fused"
        self.caches = [
            KVCache(config.num_groups, config.head_width, window, like) for window in windows
        ]
        self.pool: GraphPool | None = None
        computes_alone = cache_dtype is None  # otherwise ranks compute together
        if can_capture_graphs(self.device) and computes_alone and self.has_cache:
            self.pool = GRAPH_POOLS[self.device.type](self.device, warn_of_capture)
        self.captured_step = CapturedCalls(self.pool)
        self.min_positions = 0  # to reserve, so that memory which graphs know does not move

    @property
    def captures(self) -> bool:
        """Whether steps are captured."""
        return self.pool is not None and self.pool.is_enabled

    def max_rows(self, limit: int, length: int) -> int:
        """Return how many rows of a length fit in the memory for caches, from 1 to a limit."""
        num_positions = min(2 * length, self.context_length)  # memory doubles as rows grow
        num_values = sum(cache.values_per_position for cache in self.caches) * num_positions
        row_bytes = num_values * self.caches[0].keys_values.element_size()
        return int(max(1, min(limit, MAX_CACHE_FRACTION * usable_memory(self.device) / row_bytes)))

    def add(self, prompt: Sequence[int], num_new_tokens: int = 0) -> None:
        """Append a row with the ids of a prompt, which :meth:`read` computes.

        It will probably grow by a number of tokens.
        """
        num_reserved = len(prompt) + min(num_new_tokens, MAX_RESERVED_TOKENS)
        self.min_positions = max(self.min_positions, num_reserved)
        self.rows.append(Row(tuple(prompt[window_start(len(prompt), self.context_length) :])))

    def read(self, row: int, max_tokens: int | None = None, has_all_logits: bool = False) -> Tensor:
        """Compute the ids of a row that are not in the cache, or the first max_tokens of them.

        Returns the logits of the token after the last of these, (1, V). With has_all_logits it
        computes no more than have MAX_PROMPT_LOGITS logits, and returns those after each, (T, V).
        """
        start = self.rows[row].num_cached
        ids = self.rows[row].ids[start:][:max_tokens]
        if has_all_logits:
            ids = ids[: max(1, MAX_PROMPT_LOGITS // self.model.config.vocab_size)]
        return self._extend(row, [ids], len(ids) if has_all_logits else 1)[0]

    def step(self, ids: Sequence[int]) -> Tensor:
        """Append ids[i] to row i, of the first N rows; return the next tokens' logits, (N, V)."""
        start = window_start(self.context_length + 1, self.context_length)
        for index, token in enumerate(ids):
            if self.rows[index].num_cached == self.context_length:
                self.rows[index] = Row(self.rows[index].ids[start:])
                if self.rows[index].ids:
                    self.read(index)  # at new positions
            self.rows[index].ids += (token,)
        if self.captures:
            return self._step_captured(ids)
        return self._extend(0, [[token] for token in ids])[:, -1]

    @torch.inference_mode()
    def _step_captured(self, ids: Sequence[int]) -> Tensor:
        """Do what :meth:`step` does by a captured pass of as many rows as a power of two."""
        num_rows = len(ids)
        padding = [0] * ((1 << (num_rows - 1).bit_length()) - num_rows)
        spare_row = len(self.rows)
        lengths = [row.num_cached for row in self.rows[:num_rows]]
        num_reserved = max(num_rows + len(padding), spare_row + bool(padding))
        self._reserve(num_reserved, max(lengths) + 1)
        rows = [*range(num_rows), *[spare_row] * len(padding)]
        table = torch.tensor([[*ids, *padding], [*lengths, *padding], rows], device=self.device)
        inputs = (table[0][:, None], table[1][:, None], table[2])
        num_captures = self.captured_step.num_captures
        logits = self.captured_step(self._compute_step, *inputs).clone()
        if self.captured_step.num_captures > num_captures:
            logits = self._compare(logits, *inputs)
        for row in self.rows[:num_rows]:
            row.num_cached += 1
        return logits[:num_rows]

    def _compare(self, logits: Tensor, *inputs: Tensor) -> Tensor:
        """Return plainly computed logits of a token; stop capturing if the captured ones differ."""
        assert self.pool
        expected = self._compute_step(*inputs)  # writes the same keys and values again
        difference = ((logits - expected).abs().max() / expected.abs().max()).item()
        if not difference <= ROUNDING_TOLERANCES[expected.dtype] and expected.isfinite().all():
            self.pool.fail(f"captured logits differ from plain ones by {difference:.1%}")
        return expected

    def _compute_step(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """Append tokens (N, 1) at positions (N, 1) of rows (N,); return logits (N, V)."""
        capacity = self.caches[0].keys_values.shape[3]
        span = TokenSpan(positions, rows, self.windows, capacity)
        for cache in self.caches:
            cache.span = span
        return self.model(tokens, contexts=self.caches)[:, -1]

    def _reserve(self, num_rows: int, length: int) -> None:
        """Make room for rows of a length, and drop the graphs if memory has moved."""
        if self.captures:
            length = max(length, min(self.min_positions, self.context_length))
        moves = [cache.reserve(num_rows, length, self.context_length) for cache in self.caches]
        if any(moves):
            self.captured_step.drop_graphs()

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows of these indices, in this order; an index may be repeated."""
        num_rows = len(self.rows)
        length = max((row.num_cached for row in self.rows), default=0)
        self.rows = [replace(self.rows[source]) for source in rows]
        self._reserve(len(rows), length)
        for cache in self.caches:
            cache.keep(rows, num_rows, length)

    @torch.inference_mode()
    def _extend(self, first: int, tokens: Sequence[Sequence[int]], last: int = 1) -> Tensor:
        """Append tokens (N, T) to the cached positions of N rows from ``first`` on.

        Returns the logits after the ``last`` of them, (N, last, V).
        """
        num_tokens = len(tokens[0])
        rows = self.rows[first : first + len(tokens)]
        lengths = [row.num_cached for row in rows]
        for row in rows:
            row.num_cached += num_tokens
        if not self.has_cache:
            return torch.cat([self._compute_context(row, last) for row in rows])
        end = max(lengths) + num_tokens
        self._reserve(len(self.rows), end)
        span: RowSpan | TokenSpan = RowSpan(first, lengths[0], num_tokens, self.device)
        if min(lengths) < max(lengths):
            positions = torch.tensor(lengths, device=self.device)
            indices = torch.arange(len(lengths), device=self.device)
            span = TokenSpan(positions[:, None], indices, self.windows, end, lengths)
        for cache in self.caches:
            cache.span = span
        ids = torch.tensor(tokens, device=self.device)
        # cuDNN's attention would prepare itself for each new number of keys.
        with sdpa_kernel(SHAPELESS_KERNELS) if ids.is_cuda else nullcontext():
            return self.model(ids, contexts=self.caches, last=last)

    def _compute_context(self, row: Row, last: int) -> Tensor:
        """Return the logits after the ``last`` ids of a row, (1, last, V). A loop has no cache."""
        ids = torch.tensor([row.ids[: row.num_cached]], device=self.device)
        context = DocumentAttention(ids, NO_START_ID, self.context_length, dropout_p=0.0)
        return self.model(ids, contexts=[context] * self.model.config.num_layers, last=last)
