"""The loss of the output layer, in chunks where the logits would not fit in memory.

Training and validation loss are separate functions: change :func:`training_loss` alone to train
with another loss (label smoothing, z-loss), and validation stays comparable.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -1  # a target that does not count
MAX_LOGITS = 2**25  # elements of float32 logits (rows, V) that exist at one time: 128 MiB

LogitsLoss = Callable[[Tensor, Tensor], Tensor]  # float32 logits (N, V), targets (N,) → a sum


def training_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """The loss that training minimizes, summed over the counted targets.

    x (N, D), weight (V, D), targets (N,), IGNORE_INDEX where one does not count → float32 scalar.
    """
    return output_loss(cross_entropy, x, weight, targets, cap)


def validation_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Cross-entropy in nats, summed over the counted targets. Shapes as in training_loss."""
    return output_loss(cross_entropy, x, weight, targets, cap)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of logits (N, V) in nats, summed over the counted targets (N,)."""
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Squash logits smoothly into ± cap (Gemma Team 2024); 0 leaves them unchanged."""
    return cap * torch.tanh(logits.float() / cap) if cap else logits


def output_loss(
    loss_of_logits: LogitsLoss,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    cap: float,
) -> Tensor:
    """Apply a loss to the logits soft_cap(x @ weight.T), at most MAX_LOGITS of them at a time."""
    num_rows = max(1, MAX_LOGITS // len(weight))
    if len(x) <= num_rows:
        logits = soft_cap(F.linear(x, weight), cap).float()
        return loss_of_logits(logits, targets)
    if torch.is_grad_enabled():
        return ChunkedLoss.apply(loss_of_logits, x, weight, targets, cap, num_rows)
    total = torch.zeros((), device=x.device)
    for x_chunk, target_chunk in zip(x.split(num_rows), targets.split(num_rows), strict=True):
        total = total + output_loss(loss_of_logits, x_chunk, weight, target_chunk, cap)
    return total


class ChunkedLoss(torch.autograd.Function):
    """A loss of logits that exist a few rows at a time.

    The forward pass computes the gradients of each chunk too, so that nothing is computed twice.
    """

    @staticmethod
    def forward(
        ctx,
        loss_of_logits: LogitsLoss,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        cap: float,
        num_rows: int,
    ) -> Tensor:
        """Return the loss; keep the gradients with respect to x and weight."""
        device_type = x.device.type
        has_autocast = torch.amp.is_autocast_available(device_type)  # not on the meta device
        is_autocast = has_autocast and torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_autocast else x.dtype
        w = weight.to(dtype)

        def loss_of_chunk(logits: Tensor, targets: Tensor) -> Tensor:
            return loss_of_logits(soft_cap(logits.float(), cap), targets)

        grad_and_loss = torch.func.grad_and_value(loss_of_chunk)
        total = torch.zeros((), device=x.device)
        x_grads = []
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        x_chunks = x.to(dtype).split(num_rows)
        for x_chunk, target_chunk in zip(x_chunks, targets.split(num_rows), strict=True):
            logits = x_chunk @ w.T  # (num_rows, V)
            logits_grad, loss = grad_and_loss(logits, target_chunk)
            total = total + loss  # in place, torch 2.11 compiles gradients of zero
            x_grads.append(logits_grad @ w)
            weight_grad = weight_grad + logits_grad.T @ x_chunk
        ctx.save_for_backward(torch.cat(x_grads).to(x.dtype), weight_grad)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Scale the gradients that the forward pass computed."""
        x_grad, weight_grad = ctx.saved_tensors
        return None, x_grad * grad, weight_grad * grad, None, None, None
