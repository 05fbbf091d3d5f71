"""Variants of PyTorch's layers: fused projections, norms, embeddings and dropout."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MIN_16_BIT_DROPOUT = 0.001  # 16 bits resolve it to 0.1%
MAX_16_BIT_DROPOUT = 0.99


def is_plain_linear(layer: nn.Module, cls: type = nn.Linear) -> TypeGuard[nn.Linear]:
    """Return whether calling a layer calls the forward of this class, and nothing else: no hooks.

    The class has the parameters of nn.Linear.
    """
    hooks = (
        *(layer._forward_hooks, layer._forward_pre_hooks),
        *(layer._backward_hooks, layer._backward_pre_hooks),
    )
    return type(layer) is cls and "forward" not in vars(layer) and not any(hooks)


def concatenate_linear(
    layers: Sequence[nn.Module], cls: type = nn.Linear
) -> tuple[Tensor, Tensor | None] | None:
    """Return the layers' weights as one matrix, and their biases as one vector.

    None unless all are plain layers of this class, and all or none have a bias.
    """
    plain = [layer for layer in layers if is_plain_linear(layer, cls)]
    weights: list[Tensor] = [layer.weight for layer in plain]
    biases: list[Tensor] = [layer.bias for layer in plain if layer.bias is not None]
    if len(plain) < len(layers) or len(biases) not in (0, len(layers)):
        return None
    return torch.cat(weights), torch.cat(biases) if biases else None


class FusedLinear(nn.Module):
    """Several layers of one input; plain linear layers are applied as one matrix product.

    It has no layers of its own: a function returns those of another module, in every call.
    """

    def __init__(self, get_layers: Callable[[], list[nn.Module]]):
        super().__init__()
        self.get_layers = get_layers

    def forward(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of the layers: (…, D) → (…, sum of their widths)."""
        layers = self.get_layers()
        concatenated = concatenate_linear(layers)
        if concatenated is None:
            return torch.cat([layer(x) for layer in layers], dim=-1)
        return F.linear(x, *concatenated)


class UnitRMS(torch.autograd.Function):
    """Scale rows to a root mean square of 1, with the gradient in closed form.

    On a CPU it is faster than F.rms_norm, which consists of separate operations: a training step of
    a small model takes 4% less time, and decoding a token 10%.
    """

    @staticmethod
    def forward(x: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled x (…, width), and the scale of each row (…, 1)."""
        wide = x if x.dtype == torch.float64 else x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (wide * scale).to(x.dtype), scale

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        """Keep the output and the scales for the gradient."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output)

    @staticmethod
    @once_differentiable
    def backward(ctx, y_grad: Tensor, _: Tensor):
        """Return scale · (y_grad - y · mean(y_grad · y))."""
        y, scale = ctx.saved_tensors
        wide_grad = y_grad.to(scale.dtype)
        wide_y = y.to(scale.dtype)
        mean = (wide_grad * wide_y).mean(dim=-1, keepdim=True)
        return torch.addcmul(wide_grad, wide_y, mean, value=-1).mul_(scale).to(y_grad.dtype), None


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm in the dtype of its input: Zhang & Sennrich 2019."""

    eps: float

    def __init__(self, width: int, epsilon: float, elementwise_affine: bool = True):
        super().__init__(width, epsilon, elementwise_affine)
        self.cpu_epsilon = torch.tensor(epsilon, device="cpu")  # making it anew is a slow operation

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension: (…, width) → (…, width)."""
        weight = None if self.weight is None else self.weight.to(x.dtype)
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            # CUDA's autocast computes it in float32, and that of CPUs does not.
            return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)
        scale_rows = UnitRMS.apply if x.requires_grad else UnitRMS.forward
        y, _ = scale_rows(x, self.cpu_epsilon)
        return y if weight is None else y * weight


def make_norm(config: Any) -> nn.Module:
    """Return a layer norm, or a root-mean-square norm with or without a weight."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.epsilon, bias=config.bias)
    return RMSNorm(config.d_model, config.epsilon, config.norm == "weighted_rmsnorm")


def make_qk_norm(config: Any) -> nn.Module:
    """Return the norm of a head's queries or keys; without qk_norm, one that changes nothing."""
    if not config.qk_norm:
        return nn.Identity()
    return RMSNorm(config.head_width, config.epsilon, config.norm == "weighted_rmsnorm")


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
    is_fast = MIN_16_BIT_DROPOUT <= p <= MAX_16_BIT_DROPOUT and not torch.compiler.is_compiling()
    if x.device.type != "cpu" or not is_fast:
        return F.dropout(x, p)
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = draws.view(torch.int16)[: x.numel()].view(x.shape)
    threshold = round(p * 2**16) - 2**15
    is_kept = (numbers >= threshold).view(torch.int8)  # a bool is slow to convert
    return is_kept.to(x.dtype).div_(1 - p) * x
