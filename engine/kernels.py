"""The same numbers, sooner: attention, the output loss, linear layers, by the quickest way that a machine has.

``model.py`` is the definition; a test holds each branch here equal to it, in values and gradients.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -1  # a target that does not count
LONGEST_PLAIN = 512  # positions up to which a CPU's bfloat16 attention holds all T × T weights
WORTH_PACKING = 2**18  # elements of a weight; measured, smaller ones come from the processor's cache in any layout
LOGITS_AT_ONCE = 2**25  # elements of (rows, V) float32 logits that may exist at one time: 128 MiB


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


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Squash logits smoothly into ± cap (Gemma Team 2024); 0 leaves them."""
    return cap * torch.tanh(logits.float() / cap) if cap else logits


def output_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Cross-entropy of soft_cap(x @ weight.T) in nats, float32, summed over the targets that count.

    x (N, D), weight (V, D), targets (N,), IGNORED where one does not count. LOGITS_AT_ONCE logits exist at most.
    """
    rows = max(1, LOGITS_AT_ONCE // len(weight))
    if len(x) > rows and not torch.is_grad_enabled():
        pieces = zip(x.split(rows), targets.split(rows), strict=True)
        return sum(output_loss(some, weight, of_some, cap) for some, of_some in pieces)
    if len(x) > rows:
        return CrossEntropyInPieces.apply(x, weight, targets, cap, rows)
    logits = soft_cap(F.linear(x, weight), cap)
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


class CrossEntropyInPieces(torch.autograd.Function):
    """Cross-entropy a few rows of logits at a time, with gradients while they are there: nothing is computed twice."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        w, total = weight.to(dtype), 0.0
        x_gradient, weight_gradient = [], torch.zeros_like(weight, dtype=torch.float32)
        for piece, target in zip(x.to(dtype).split(rows), targets.split(rows), strict=True):
            logits = soft_cap((piece @ w.T).float(), cap)  # (rows, V)
            total += F.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
            gradient = logits.softmax(dim=-1)
            gradient.scatter_add_(1, target.clamp(min=0)[:, None], -torch.ones_like(gradient[:, :1]))
            gradient *= (target != IGNORED)[:, None]
            gradient = (gradient * (1 - (logits / cap) ** 2) if cap else gradient).to(dtype)
            x_gradient.append(gradient @ w)
            weight_gradient += gradient.T @ piece
        ctx.save_for_backward(torch.cat(x_gradient).to(x.dtype), weight_gradient)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x_gradient, weight_gradient = ctx.saved_tensors
        return x_gradient * gradient, weight_gradient * gradient, None, None, None


class PackedLinear(nn.Module):
    """A linear layer that only predicts, on a CPU: oneDNN keeps its weight in the order in which it reads it.

    With few rows a product costs reading its weight: 30 to 40 GB/s, F.linear 7 to 20, measured on 2 cores of a Zen 4.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether there is such a layer for this weight, and it pays."""
        known = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        return known and weight.numel() >= WORTH_PACKING and torch.backends.mkldnn.is_available()


def for_decoding(model: nn.Module, pack: bool = True) -> nn.Module:
    """A copy of a model that decodes sooner and only predicts, with the weights of now; the model stays as it is.

    Heads' weights, else joined at each call, are joined once (where there is ``join_heads()`` there is ``joined``). On
    a CPU large weights are packed, but for a model to be compiled (pack=False). All else is shared.
    """
    decoder = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()
    for module in [module for module in decoder.modules() if hasattr(module, "join_heads")]:
        weight, bias = (None if joined is None else joined.detach() for joined in module.join_heads())
        packed = pack and PackedLinear.fits(weight)
        module.joined = PackedLinear(weight, bias) if packed else partial(F.linear, weight=weight, bias=bias)
    if pack and decoder.head is None and PackedLinear.fits(decoder.head_weight()):
        decoder.head = PackedLinear(decoder.head_weight(), None)
    for parent in [module for module in decoder.modules() if pack and not hasattr(module, "query")]:  # a head is joined
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and PackedLinear.fits(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
    return decoder


def recompute_activations(model: nn.Module) -> None:
    """Have each block keep its input alone, and recompute the rest in the backward pass: Chen et al. 2016."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_parts(parts: Sequence[nn.Module], try_out: Callable[[], object]) -> str:
    """Have modules compile when try_out() runs them; returns why that failed, and they stay as they were, or ''."""
    for part in parts:
        part.compile()
    try:
        try_out()
        return ""
    except Exception as error:  # whatever the compiler, or a program that it calls, may raise
        for part in parts:
            part._compiled_call_impl = None
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]
