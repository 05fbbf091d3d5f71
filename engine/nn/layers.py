"""Variants of PyTorch's layers: fused projections, norms, embeddings and dropout."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAST_DROPOUT_RATES = (0.001, 0.99)  # lower and upper bound: 16 bits resolve them to 0.1%

LayerPair = tuple[nn.Module, nn.Module] | None  # None: not shared


class FusedLinear(nn.Module):
    """Several linear layers of one input, applied as one matrix product.

    It has no parameters of its own: its tuple refers to layers that are registered elsewhere.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        super().__init__()
        self.layers = tuple(layers)

    def concatenate(self) -> tuple[Tensor, Tensor | None]:
        """Return the layers' weights as one matrix, and their biases as one vector."""
        weight = torch.cat([layer.weight for layer in self.layers])
        if self.layers[0].bias is None:
            return weight, None
        return weight, torch.cat([layer.bias for layer in self.layers])

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of the layers: (…, D) → (…, sum of their widths)."""
        weight, bias = self.concatenate()
        return F.linear(x, weight, bias)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm in the dtype of its input: Zhang & Sennrich 2019."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension: (…, width) → (…, width)."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def make_norm(kind: str, width: int, epsilon: float, bias: bool) -> nn.Module:
    """Return a layer norm, or a root-mean-square norm with or without a weight."""
    if kind == "layernorm":
        return nn.LayerNorm(width, eps=epsilon, bias=bias)
    return RMSNorm(width, epsilon, elementwise_affine=kind == "weighted_rmsnorm")


def make_embedding(num_rows: int, width: int) -> nn.Embedding:
    """Return an uninitialized embedding.

    PyTorch's own initialization imports the compiler on some devices.
    """
    return nn.Embedding.from_pretrained(torch.empty(num_rows, width), freeze=False)


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Zero each element with probability p, and divide the rest by 1 - p: Hinton et al. 2012.

    On a CPU, where drawing is serial, each 64-bit draw is used as four 16-bit random numbers.
    """
    lowest, highest = FAST_DROPOUT_RATES
    is_fast = lowest <= p <= highest and not torch.compiler.is_compiling()
    if not training or x.device.type != "cpu" or not is_fast:
        return F.dropout(x, p, training)
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = draws.view(torch.int16)[: x.numel()].view(x.shape)
    threshold = round(p * 2**16) - 2**15
    is_kept = (numbers >= threshold).view(torch.int8)  # a bool is slow to convert
    return is_kept.to(x.dtype).div_(1 - p) * x
