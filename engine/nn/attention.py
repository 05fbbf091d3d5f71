"""Fast implementations of causal attention: fused, with a sliding window, and on a CPU.

``Head.attention`` in ``model.py`` is the definition. Tests compare values and gradients of every
branch with it, and :func:`check_attention` those of a model's options.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.nn.layers import dropout

MAX_UNFUSED_POSITIONS = 512  # for bfloat16 on a CPU: longer attention would store too many weights
MIN_UNFUSED_KEY_BYTES = 2**19  # of all rows, for one query on a CPU
MIN_BLOCK_QUERIES = 32  # of sliding-window attention
MAX_BLOCK_QUERIES = 128  # of sliding-window attention, or a quarter of the window if that is more
NUM_CHECKED_POSITIONS = 12
MAX_CHECKED_WINDOW = 5
CHECK_TOLERANCE = 1e-4  # of the largest value; rounding makes less than 1e-5


class Context(Protocol):
    """What a block's attention sees: cached positions before its input, or documents in it."""

    def next_positions(self) -> Tensor:
        """Return the positions of the next tokens, (T,) or (B, T)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add keys and values (B, G, T, K); return attention to all visible, (B, H, T, K)."""


Contexts = Sequence[Context]


def attend(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, window: int = 0
) -> Tensor:
    """Return causal attention of the last T of S positions, (B, H, T, K).

    query is (B, H, T, K); key and value are (B, G, S, K). H / G consecutive heads share a key and a
    value. With a window, each position sees that many positions, itself included.
    """
    T = query.shape[-2]
    S = key.shape[-2]
    if 0 < window < T:
        is_grouped = query.shape[1] != key.shape[1]
        if torch.compiler.is_compiling() and is_grouped and has_wrong_gradient(query):
            mask = causal_mask(T, S, window, query.device)
            return masked_attention(query, key, value, dropout_p, mask, T)
        return sliding_window_attention(query, key, value, dropout_p, window)
    if 0 < window < S:
        S = min(S, T + window - 1)
        key = key[:, :, -S:]
        value = value[:, :, -S:]
    is_square = T > 1 and T == S
    if is_square and prefer_unfused_attention(query, T, dropout_p):
        mask = causal_mask(T, T, device=query.device)
        return unfused_attention(query, key, value, dropout_p, mask)
    if T == 1 and not dropout_p:
        return attend_from_last(query, key, value)
    later_mask = causal_mask(T, S, window, query.device) if 1 < T < S else None  # in a prompt
    key, value, is_grouped = prepare_groups(query, key, value, later_mask)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=later_mask,
        dropout_p=dropout_p,
        is_causal=True if is_square else False,  # noqa: SIM210  SDPA refuses a symbolic bool
        enable_gqa=is_grouped,
    )


def prepare_groups(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Return keys and values for fused attention, and whether heads still share them.

    On a GPU only flash attention shares them: 16 bits, without a mask, compute capability 8 or
    more. Otherwise they are repeated for each head, as T × T weights take more memory.
    """
    H = query.shape[1]
    if key.shape[1] == H:
        return key, value, False
    if query.device.type != "cuda":
        return key, value, True
    is_flash = mask is None and query.dtype != torch.float32
    if is_flash and torch.cuda.get_device_properties(query.device).major >= 8:
        return key, value, True
    key, value = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (key, value))
    return key, value, False


def has_wrong_gradient(query: Tensor) -> bool:
    """Return whether torch 2.11 would compile wrong gradients of masks and of a group's windows."""
    return query.dtype == torch.float32 and query.device.type == "cuda"


def attend_from_last(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return attention of the last of S positions, (B, H, 1, K), to all or those of a mask.

    query is (B, H, 1, K); key and value are (B, G, S, K); the mask is (B, 1, 1, S), True where a
    position is visible. The heads of a group are computed as its queries. On a CPU large keys are
    read by plain products: faster, though bfloat16 scores are rounded.
    """
    queries = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # (B, G, H / G, K)
    is_large = key.numel() * key.element_size() >= MIN_UNFUSED_KEY_BYTES
    if query.device.type == "cpu" and is_large:
        scores = key @ (queries / math.sqrt(query.shape[-1])).mT  # (B, G, S, H / G)
        if mask is not None:
            scores = scores.masked_fill(~mask.mT, -math.inf)
        output = scores.softmax(dim=-2).mT @ value
    else:
        output = F.scaled_dot_product_attention(queries, key, value, mask)
    return output.reshape(query.shape)


def causal_mask(T: int, S: int, window: int = 0, device: torch.device | None = None) -> Tensor:
    """Return the mask of the last T of S positions, (T, S): True where a query sees a key.

    A query sees its own position and all earlier ones; with a window, the last ``window`` of them.
    """
    mask = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    return mask.triu(S - T - window + 1) if window else mask


def sliding_window_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, window: int
) -> Tensor:
    """Return :func:`attend` for T > window, without most of the scores outside the window.

    Queries are split into blocks. A block attends to its own keys and to those of the earlier
    blocks that the window reaches (Beltagy et al. 2020, section 3.1).
    """
    H, T = query.shape[1:3]
    S = key.shape[-2]
    # The first queries see fewer keys. The blocks of the other queries have one shape.
    num_first_keys = S - T + window
    first_keys = key[:, :, :num_first_keys]
    first_values = value[:, :, :num_first_keys]
    first_output = attend(query[:, :, :window], first_keys, first_values, dropout_p, window)
    # Measured: larger blocks compute more masked scores, and smaller ones have more overhead.
    size = max(MIN_BLOCK_QUERIES, min(window // 2, MAX_BLOCK_QUERIES), window // 4)
    num_blocks = math.ceil((T - window) / size)
    num_earlier_blocks = math.ceil((window - 1) / size)
    padding = num_blocks * size - (T - window)

    def split_keys(x: Tensor) -> Tensor:
        """Return the keys of each block, (B·H, num_blocks, (num_earlier_blocks + 1)·size, K)."""
        x = F.pad(x, (0, 0, num_earlier_blocks * size - num_first_keys, padding))
        x = x.unflatten(2, (num_earlier_blocks + num_blocks, size))
        x = torch.cat([x[:, :, i : i + num_blocks] for i in range(num_earlier_blocks + 1)], dim=3)
        if x.shape[1] != H:
            x = x.repeat_interleave(H // x.shape[1], dim=1)  # (B, G, …) → (B, H, …)
        return x.flatten(0, 1)

    queries = F.pad(query[:, :, window:], (0, 0, 0, padding))
    queries = queries.unflatten(2, (num_blocks, size)).flatten(0, 1)
    keys = split_keys(key)
    values = split_keys(value)
    mask = causal_mask(size, (num_earlier_blocks + 1) * size, window, query.device)
    output = masked_attention(queries, keys, values, dropout_p, mask, window)
    output = output.unflatten(0, (-1, H)).flatten(2, 3)[:, :, : T - window]
    return torch.cat((first_output, output), dim=2)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, mask: Tensor, num_positions: int
) -> Tensor:
    """Return attention with a mask (T, S) or (B, 1, T, S), of about num_positions a query."""
    if has_wrong_gradient(query) or prefer_unfused_attention(query, num_positions, dropout_p):
        return unfused_attention(query, key, value, dropout_p, mask)
    key, value, is_grouped = prepare_groups(query, key, value, mask)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout_p, enable_gqa=is_grouped)


class DocumentAttention:
    """The context of training rows whose attention does not cross documents."""

    def __init__(self, tokens: Tensor, start_id: int, window: int, dropout_p: float):
        """Let documents of tokens (B, T) start at each start_id; window as in :func:`attend`."""
        T = tokens.shape[1]
        self.positions = torch.arange(T, device=tokens.device)
        document = torch.eq(tokens, start_id).cumsum(dim=1)
        is_same = document[:, None, :, None] == document[:, None, None, :]
        self.mask = is_same & causal_mask(T, T, window, tokens.device)  # (B, 1, T, T)
        self.dropout_p = dropout_p

    def next_positions(self) -> Tensor:
        """Return the positions of the tokens, (T,), which do not restart in a document."""
        return self.positions

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention to earlier positions of the same document, (B, H, T, K)."""
        T = query.shape[-2]
        return masked_attention(query, key, value, self.dropout_p, self.mask, T)


def prefer_unfused_attention(query: Tensor, num_positions: int, dropout_p: float) -> bool:
    """Return whether unfused attention is faster: on a CPU with dropout or few bfloat16 positions.

    On a CPU, the fused backward pass in bfloat16 takes two to three times as long.
    """
    is_short = query.dtype == torch.bfloat16 and num_positions <= MAX_UNFUSED_POSITIONS
    return query.device.type == "cpu" and (dropout_p > 0 or is_short)


def unfused_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, mask: Tensor
) -> Tensor:
    """Return :func:`masked_attention`, computed with separate products and a softmax.

    The queries of a group's heads are rows of one product with its keys.
    """
    G = key.shape[1]
    queries = query.unflatten(1, (G, -1)).flatten(2, 3)  # (B, G, H / G · T, K)
    bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    bias = torch.cat([bias.masked_fill(~mask, -math.inf)] * (query.shape[1] // G), dim=-2)
    scores = queries / math.sqrt(query.shape[-1]) @ key.mT
    weights = torch.softmax(scores + bias, dim=-1)  # (B, G, H / G · T, S)
    return (dropout(weights, dropout_p) @ value).view(query.shape)


def check_attention(model: Any) -> None:
    """Raise UserError if attention would be trained that is not the one of the definition.

    A model whose attention was replaced by a layer without ``loop`` is not checked.
    """
    attentions = [getattr(block, "attention", None) for block in model.blocks]
    if model.config.attention == "loop" or not all(hasattr(each, "loop") for each in attentions):
        return
    difference = attention_difference(model)
    if difference > CHECK_TOLERANCE:
        problem = "MultiHeadAttention.forward must compute what Head.attention defines"
        advice = "Change both, or train with --attention loop, which computes Head.attention"
        raise UserError(f"model.py: {problem} (got a difference of {difference:.1%}). {advice}.")


def shrink_config(config: Any, attention: str = "fused", dropout: float = 0.0) -> Any:
    """Return the configuration of a small model with the options of another."""
    windows = tuple({min(window, MAX_CHECKED_WINDOW) for window in config.layer_windows})
    num_groups = min(config.num_groups, 2)
    return replace(
        config,
        attention=attention,
        vocab_size=2,
        context_length=NUM_CHECKED_POSITIONS,
        num_layers=len(windows),
        windows=windows,
        num_heads=num_groups * min(config.num_heads // config.num_groups, 2),
        num_kv_heads=num_groups,
        head_dim=8,
        d_model=16,
        d_ff=16,
        dropout=dropout,
    )


def attention_difference(model: Any) -> float:
    """Return the largest difference between loop and fused path, relative to the values.

    Compared are outputs and gradients of a small model with the options of ``model``, in float32
    and with random weights.
    """
    small_config = shrink_config(model.config)
    differences = [torch.zeros(())]
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.enable_grad():
        torch.manual_seed(1)
        small_model = type(model)(small_config)
        for parameter in small_model.parameters():
            nn.init.normal_(parameter, std=0.5)
        rotation = small_model.rotation(torch.arange(NUM_CHECKED_POSITIONS))
        for block in small_model.blocks:
            attention = block.attention
            attention.projection = nn.Identity()
            x = torch.randn(2, NUM_CHECKED_POSITIONS, small_config.d_model, requires_grad=True)
            inputs = [x, *attention.parameters()]
            results = []
            for output in (attention(x, rotation), attention.loop(x, rotation)):
                total = (output.flatten() * torch.linspace(-1, 1, output.numel())).sum()
                grads = torch.autograd.grad(total, inputs, materialize_grads=True)
                results.append((output.detach(), torch.cat([grad.flatten() for grad in grads])))
            for actual, expected in zip(*results, strict=True):
                differences.append((actual - expected).abs().max() / expected.abs().max())
    return max(differences).item()
