"""The loss of the output layer, in chunks of logits that fit in memory or a CPU's caches.

Training and validation loss are separate functions. To train with another loss (label smoothing,
z-loss), change :func:`training_loss` alone: validation losses stay comparable.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -1  # the target of positions that are not counted
MAX_LOGITS = 2**25  # float32 logits (rows, V) in memory at one time: 128 MiB
MAX_CACHED_LOGITS = 2**21  # on a CPU, to stay in its caches; MIN_CHUNK_ROWS has priority
MIN_CHUNK_ROWS = 512  # on a CPU: products of fewer rows are slow

LogitsLoss = Callable[[Tensor, Tensor], Tensor]  # float32 logits (N, V), targets (N,) → a sum
GradAndValue = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # of a LogitsLoss


def training_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Return the loss that training minimizes, summed over the counted targets.

    x is (N, D), weight (V, D), and targets (N,), of which IGNORE_INDEX is not counted.
    """
    return output_loss(cross_entropy, x, weight, targets, cap)


def validation_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Return the cross-entropy in nats, summed over the counted targets."""
    return output_loss(cross_entropy, x, weight, targets, cap)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits (N, V), summed over the counted targets (N,).

    Its gradient in training is that of :func:`cross_entropy_grad_and_value`: change both together.
    """
    return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def cross_entropy_grad_and_value(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient and the value of :func:`cross_entropy`, for logits of any dtype.

    The gradient (N, V) is softmax - one-hot. It overwrites the log-probabilities: autograd would
    use more memory.
    """
    log_probs = logits.float().log_softmax(dim=-1)
    value = F.nll_loss(log_probs, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    grad = log_probs.exp_()
    ids = targets.clamp(min=0)[:, None]
    grad.scatter_(-1, ids, grad.gather(-1, ids) - 1)
    grad.masked_fill_((targets == IGNORE_INDEX)[:, None], 0)
    return grad.to(logits.dtype), value


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Squash logits smoothly into ± cap (Gemma Team 2024); 0 leaves them unchanged."""
    return cap * torch.tanh(logits.float() / cap) if cap else logits


def output_loss(
    loss_of_logits: LogitsLoss, x: Tensor, weight: Tensor, targets: Tensor, cap: float
) -> Tensor:
    """Apply a loss to the logits soft_cap(x @ weight.T), in chunks of at most MAX_LOGITS."""

    def loss_of_rows(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of_logits(soft_cap(logits.float(), cap), targets)

    is_eager = not torch.compiler.is_compiling()
    num_rows = max(1, MAX_LOGITS // len(weight))
    if is_eager and x.device.type == "cpu":
        num_rows = min(num_rows, max(MIN_CHUNK_ROWS, MAX_CACHED_LOGITS // len(weight)))
    is_closed_form = is_eager and loss_of_logits is cross_entropy and not cap
    if torch.is_grad_enabled() and (is_closed_form or len(x) > num_rows):
        grad_and_value = torch.func.grad_and_value(loss_of_rows)
        if is_closed_form:
            grad_and_value = cross_entropy_grad_and_value
        dtype = F.linear(x[:0], weight[:0]).dtype  # that of products, also under autocast
        return ChunkedLoss.apply(grad_and_value, x, weight, targets, num_rows, dtype)
    if len(x) <= num_rows:
        return loss_of_rows(F.linear(x, weight), targets)
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
        grad_and_value: GradAndValue,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        num_rows: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the loss; keep the gradients with respect to x and weight."""
        w = weight.to(dtype)
        total = torch.zeros((), device=x.device)
        x_grads = []
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        x_chunks = x.to(dtype).split(num_rows)
        for x_chunk, target_chunk in zip(x_chunks, targets.split(num_rows), strict=True):
            logits_grad, loss = grad_and_value(x_chunk @ w.T, target_chunk)  # (num_rows, V)
            total = total + loss  # not in place: torch 2.11 would compile gradients of zero
            x_grads.append(logits_grad @ w)
            weight_grad = weight_grad + (logits_grad.T @ x_chunk).float()
        ctx.save_for_backward(torch.cat(x_grads).to(x.dtype), weight_grad)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Scale the gradients that the forward pass computed. Raises RuntimeError for a graph."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("create_graph: unsupported, the loss has no second derivative.")
        x_grad, weight_grad = ctx.saved_tensors
        return None, x_grad * grad, weight_grad * grad, None, None, None
