"""Cross-entropy of the output layer, in chunks where the logits would not fit in memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -1  # a target that does not count
LOGITS_AT_ONCE = 2**25  # elements of (rows, V) float32 logits that may exist at one time: 128 MiB


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
