"""Causal attention in several implementations: PyTorch's fused kernel, a sliding window, plain products on a CPU.

``Head.attention`` in ``model.py`` is the definition; a test holds every branch equal to it, in values and gradients.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST_PLAIN = 512  # positions up to which a CPU's bfloat16 attention holds all T × T weights


def attend(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, window: int = 0) -> Tensor:
    """Causal attention of the last T of S positions: (B, H, T, K), and (B, G, S, K) twice → (B, H, T, K).

    H / G queries in a row share a key and a value. With a window a position sees so many, its own the last of them.
    """
    T, S, grouped = query.shape[-2], key.shape[-2], query.shape[1] != key.shape[1]
    if 0 < window < S:
        if window < T:
            return attend_locally(query, key, value, dropout, window)
        key, value = (one[:, :, 1 - T - window :] for one in (key, value))
        S = key.shape[-2]
    if T == 1:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, enable_gqa=grouped)
    if T != S:  # a later piece of a prompt: each position sees those before it too, not just this piece
        mask = band(T, S, window, query.device)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, enable_gqa=grouped)
    if plain_is_quicker(query, T, dropout):
        return plain_attention(query, key, value, dropout, band(T, T))
    return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, enable_gqa=grouped)


def band(T: int, S: int, window: int = 0, device: torch.device | None = None) -> Tensor:
    """Which of S positions each of the last T sees, (T, S): those up to its own, of them the last ``window`` or all."""
    mask = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    return mask.triu(S - T - window + 1) if window else mask


def attend_locally(query: Tensor, key: Tensor, value: Tensor, dropout: float, window: int) -> Tensor:
    """As :func:`attend`, for T > window, at the cost of the band that is seen: Beltagy et al. 2020, section 3.1.

    Queries come in blocks, each with the keys that its positions see: their own block and those before it.
    """
    (H, T), S = query.shape[1:3], key.shape[-2]
    # the first positions see fewer: the other blocks are all alike
    early = attend(query[:, :, :window], *(one[:, :, : S - T + window] for one in (key, value)), dropout, window)
    size = max(32, min(window // 2, 128), window // 4)  # measured: larger ones see more in vain, smaller ones are many
    blocks, before = -(-(T - window) // size), -(-(window - 1) // size)
    end = blocks * size - (T - window)

    def with_earlier(x: Tensor) -> Tensor:  # (B, G, S, K) → (B·H, blocks, (before + 1) · size, K)
        x = F.pad(x, (0, 0, before * size - (S - T + window), end)).unflatten(2, (before + blocks, size))
        x = torch.cat([x[:, :, i : i + blocks] for i in range(before + 1)], dim=3)
        return (x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)).flatten(0, 1)

    queries = F.pad(query[:, :, window:], (0, 0, 0, end)).unflatten(2, (blocks, size)).flatten(0, 1)
    keys, values, mask = with_earlier(key), with_earlier(value), band(size, (before + 1) * size, window, query.device)
    if plain_is_quicker(query, window, dropout):
        late = plain_attention(queries, keys, values, dropout, mask)
    else:
        late = F.scaled_dot_product_attention(queries, keys, values, mask, dropout)
    return torch.cat((early, late.unflatten(0, (-1, H)).flatten(2, 3)[:, :, : T - window]), dim=2)


def plain_is_quicker(query: Tensor, length: int, dropout: float) -> bool:
    """Whether PyTorch's fused attention is slow here: on a CPU its backward pass is in bfloat16, and its dropout."""
    # math_sdp_enabled is of all devices, in spite of its name; asking would cut a compiled graph in two
    slow = query.device.type == "cpu" and (dropout or (query.dtype == torch.bfloat16 and length <= LONGEST_PLAIN))
    return bool(slow) and (torch.compiler.is_compiling() or torch.backends.cuda.math_sdp_enabled())


def plain_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float, mask: Tensor) -> Tensor:
    """Attention to what a mask (T, S) shows, as three operations: (B, H, T, K), and (B, G, S, K) twice → (B, H, T, K).

    The backward pass of PyTorch's fused one is slow on a CPU in bfloat16: this takes a third to a half of its time.
    """
    if query.shape[1] != key.shape[1]:
        key, value = (one.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for one in (key, value))
    hidden = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -math.inf)
    weights = torch.softmax(query / math.sqrt(query.shape[-1]) @ key.mT + hidden, dim=-1)  # (B, H, T, S)
    return drop(weights, dropout) @ value


def drop(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """x with each element zeroed at that probability, the others enlarged to make up for it (Hinton et al. 2012).

    A CPU draws numbers one after another, 64 bits at a time: here that is four elements' lots, each of 2**16 values.
    """
    if not (probability and training) or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.dropout(x, probability, training)
    drawn = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = drawn[: x.numel()].view(x.shape) >= min(round(probability * 2**16), 2**16 - 1) - 2**15
    return kept.view(torch.int8).to(x.dtype).div_(1 - probability) * x  # as int8: bool is slow to convert
