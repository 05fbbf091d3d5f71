"""The loss of the output layer, in chunks where the logits would not fit in memory.

Training and validation loss are separate functions. To train with another loss (label smoothing,
z-loss), change :func:`training_loss` alone: validation losses stay comparable.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -1  # the target of positions that are not counted
MAX_LOGITS = 2**25  # float32 logits (rows, V) in memory at one time: 128 MiB

LogitsLoss = Callable[[Tensor, Tensor], Tensor]  # float32 logits (N, V), targets (N,) → a sum


def training_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Return the loss that training minimizes, summed over the counted targets.

    x is (N, D), weight (V, D), and targets (N,), of which IGNORE_INDEX is not counted.
    """
    return output_loss(cross_entropy, x, weight, targets, cap)


def validation_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Return the cross-entropy in nats, summed over the counted targets."""
    return output_loss(cross_entropy, x, weight, targets, cap)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits (N, V), summed over the counted targets (N,)."""
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Squash logits smoothly into ± cap (Gemma Team 2024); 0 leaves them unchanged."""
    return cap * torch.tanh(logits.float() / cap) if cap else logits


def output_loss(
    loss_of_logits: LogitsLoss, x: Tensor, weight: Tensor, targets: Tensor, cap: float
) -> Tensor:
    """Apply a loss to the logits soft_cap(x @ weight.T), at most MAX_LOGITS of them at a time."""

    def loss_of_rows(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of_logits(soft_cap(logits.float(), cap), targets)

    num_rows = max(1, MAX_LOGITS // len(weight))
    if len(x) <= num_rows:
        return loss_of_rows(F.linear(x, weight), targets)
    if torch.is_grad_enabled():
        dtype = F.linear(x[:0], weight[:0]).dtype  # that of products, also under autocast
        return ChunkedLoss.apply(loss_of_rows, x, weight, targets, num_rows, dtype)
    total = torch.zeros((), device=x.device)
    for x_chunk, target_chunk in zip(x.split(num_rows), targets.split(num_rows), strict=True):
        total = total + loss_of_rows(F.linear(x_chunk, weight), target_chunk)
    return total


class ChunkedLoss(torch.autograd.Function):
    """A loss of logits, of which only ``num_rows`` rows exist at a time.

    The forward pass also computes the gradients of each chunk, so no logits are computed twice.
    """

    @staticmethod
    def forward(
        ctx,
        loss_of_rows: LogitsLoss,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        num_rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the loss; keep the gradients with respect to x and weight."""
        w = weight.to(dtype)
        grad_and_loss = torch.func.grad_and_value(loss_of_rows)
        total = torch.zeros((), device=x.device)
        x_grads = []
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        x_chunks = x.to(dtype).split(num_rows)
        for x_chunk, target_chunk in zip(x_chunks, targets.split(num_rows), strict=True):
            logits_grad, loss = grad_and_loss(x_chunk @ w.T, target_chunk)  # (num_rows, V)
            total = total + loss  # not in place: torch 2.11 would compile gradients of zero
            x_grads.append(logits_grad @ w)
            weight_grad = weight_grad + logits_grad.T @ x_chunk
        ctx.save_for_backward(torch.cat(x_grads).to(x.dtype), weight_grad)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Scale the gradients that the forward pass computed."""
        x_grad, weight_grad = ctx.saved_tensors
        return None, x_grad * grad, weight_grad * grad, None, None, None
