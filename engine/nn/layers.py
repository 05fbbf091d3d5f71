"""Variants of PyTorch's layers: fused projections, norms, embeddings and dropout."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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


def prefer_closed_form_gradient(x: Tensor) -> bool:
    """Return whether a closed form is faster than autograd's gradient: on a CPU, not compiled."""
    return x.device.type == "cpu" and x.requires_grad and not torch.compiler.is_compiling()


class UnweightedRMSNorm(torch.autograd.Function):
    """The root-mean-square norm without a weight, with its gradient in closed form.

    On a CPU it is faster than F.rms_norm, which consists of separate operations.
    """

    @staticmethod
    def forward(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Return x (…, width) with a root mean square of 1, and the scale of each row (…, 1)."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = (norm.square() / x.shape[-1] + epsilon).rsqrt()
        return (wide * scale).to(x.dtype), scale

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Keep the output and the scales for the gradient."""
        _, scale = output
        ctx.mark_non_differentiable(scale)
        ctx.save_for_backward(*output)

    @staticmethod
    @once_differentiable
    def backward(ctx, y_grad: Tensor, _: Tensor):
        """Return scale · (y_grad - y · mean(y_grad · y))."""
        y, scale = ctx.saved_tensors
        wide_grad = y_grad.to(scale.dtype)
        wide_y = y.to(scale.dtype)
        mean = (wide_grad * wide_y).mean(dim=-1, keepdim=True)
        x_grad = torch.addcmul(wide_grad, wide_y, mean, value=-1).mul_(scale)
        return x_grad.to(y_grad.dtype), None


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm in the dtype of its input: Zhang & Sennrich 2019."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension: (…, width) → (…, width)."""
        if self.weight is None and prefer_closed_form_gradient(x):
            return UnweightedRMSNorm.apply(x, self.eps)[0]
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
    if not training:
        return x
    lowest, highest = FAST_DROPOUT_RATES
    is_fast = lowest <= p <= highest and not torch.compiler.is_compiling()
    if x.device.type != "cpu" or not is_fast:
        return F.dropout(x, p)
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = draws.view(torch.int16)[: x.numel()].view(x.shape)
    threshold = round(p * 2**16) - 2**15
    is_kept = (numbers >= threshold).view(torch.int8)  # a bool is slow to convert
    return is_kept.to(x.dtype).div_(1 - p) * x
