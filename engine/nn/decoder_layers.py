"""Layers of a model for decoding on a CPU: the same mathematics in fewer operations.

For one token of a small model, starting an operation takes longer than computing it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.attention import Cache, attend
from engine.nn.layers import RMSNorm
from engine.nn.positions import rotation_frequencies

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]  # (weight, bias) → layer


class FrozenRMSNorm(nn.Module):
    """Root-mean-square norm for inference, computed in float32: x · scale / hypot(‖x‖, √(n ε))."""

    scale: Tensor
    floor: Tensor

    def __init__(self, norm: RMSNorm, weight: Tensor | None):
        """Take the width and epsilon of a norm, and a weight (…, width) that may be another's."""
        super().__init__()
        (width,) = norm.normalized_shape
        root = torch.tensor(math.sqrt(width))
        scale = root if weight is None else root * weight.detach().float()
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("floor", root * math.sqrt(norm.eps or 0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension: (…, width) → (…, width)."""
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self.scale / torch.hypot(length, self.floor)).to(x.dtype)


class PairRotation:
    """RoPE's rotations as complex numbers, for neighboring dimensions."""

    def __init__(self, width: int, base: float | None, scaling: tuple[float, ...] | None):
        """Compute the frequencies of the pairs of a head's dimensions."""
        self.frequencies = rotation_frequencies(width, base, scaling)  # (K / 2,)
        self.radius = torch.ones(())

    def __call__(self, positions: Tensor) -> Tensor:
        """Return e^(iθ): positions (T,) → (T, K / 2), or (B, T) → (B, 1, T, K / 2)."""
        if positions.ndim == 2:
            positions = positions[:, None]  # the same for all heads
        return torch.polar(self.radius, positions[..., None] * self.frequencies)


class FrozenAttention(nn.Module):
    """Multi-head attention with RoPE for inference, on queries and keys together.

    A pair of dimensions (i, i + K / 2) of a head is one complex number here, whose imaginary part
    comes first in the model. So a rotation is one product.
    """

    def __init__(self, attention: Any, make_linear: MakeLinear):
        """Copy a MultiHeadAttention of the model."""
        super().__init__()
        self.heads = attention.heads
        self.projection = attention.projection
        self.window = attention.window
        self.num_groups = attention.num_groups
        self.head_width = attention.head_width
        num_rotated = len(self.heads) + self.num_groups
        # Of a head's dimensions (first, second), the pairs (second, first) become neighbors.
        order = torch.arange(self.head_width).view(2, -1).flip(0).T.flatten()
        weight, bias = attention.fused_qkv.concatenate()
        rows = torch.arange(len(weight)).view(-1, self.head_width)
        rows[:num_rotated] = rows[:num_rotated, order]
        rows = rows.flatten()
        self.fused_qkv = make_linear(weight[rows], None if bias is None else bias[rows])
        self.norm: nn.Module = nn.Identity()
        query_norm, key_norm = attention.qk_norms
        if isinstance(query_norm, RMSNorm):
            weight = None
            if query_norm.weight is not None:
                query_weight = query_norm.weight[order].expand(len(self.heads), 1, -1)
                key_weight = key_norm.weight[order].expand(self.num_groups, 1, -1)
                weight = torch.cat((query_weight, key_weight))
            self.norm = FrozenRMSNorm(query_norm, weight)

    def forward(self, x: Tensor, rotation: Tensor, cache: Cache | None = None) -> Tensor:
        """Compute all heads, (B, T, D) → (B, T, D), with the rotation of a PairRotation."""
        B, T, _ = x.shape
        num_rotated = len(self.heads) + self.num_groups
        qkv = self.fused_qkv(x).view(B, T, -1, self.head_width).transpose(1, 2)
        qk, v = qkv.split((num_rotated, self.num_groups), dim=1)
        pairs = torch.view_as_complex(self.norm(qk.float()).unflatten(-1, (-1, 2)))
        qk = torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
        q, k = qk.split((len(self.heads), self.num_groups), dim=1)
        mixed = attend(q, k, v, window=self.window) if cache is None else cache.attend(q, k, v)
        return self.projection(mixed.transpose(1, 2).reshape(B, T, -1))


class FrozenSwiGLU(nn.Module):
    """Gated feed-forward layer for inference, with the gate and its other factor as one product."""

    def __init__(self, feed_forward: Any, make_linear: MakeLinear):
        """Copy a FeedForward of the model that has a gate."""
        super().__init__()
        gate = feed_forward.gate
        expand = feed_forward.expand
        bias = None if gate.bias is None else torch.cat((gate.bias, expand.bias))
        self.gate_and_expand = make_linear(torch.cat((gate.weight, expand.weight)), bias)
        self.contract = feed_forward.contract

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers: (B, T, D) → (B, T, D)."""
        gate, hidden = self.gate_and_expand(x).chunk(2, dim=-1)
        return self.contract(F.silu(gate) * hidden)
