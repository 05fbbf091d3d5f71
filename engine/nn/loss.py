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
MAX_FUSED_ROWS = 16_384  # of logits in the dtype of their product, which a compiler reads at once
MAX_FUSED_LOGITS = 2**30

# Logits (N, V) and targets (N,) → the gradient (N, V) of the summed loss, and the loss.
GradAndValue = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def training_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Return the loss that training minimizes, summed over the counted targets.

    x is (N, D), weight (V, D), and targets (N,), of which IGNORE_INDEX is not counted. For another
    loss of logits and targets pass torch.func.grad_and_value(loss).
    """
    return chunked_loss(cross_entropy_grad_and_value, x, weight, targets, cap)


def validation_loss(x: Tensor, weight: Tensor, targets: Tensor, cap: float = 0.0) -> Tensor:
    """Return the cross-entropy in nats, summed over the counted targets."""
    num_rows = max_chunk_rows(weight)
    total = torch.zeros((), device=x.device)
    for x_chunk, target_chunk in zip(x.split(num_rows), targets.split(num_rows), strict=True):
        logits = soft_cap(F.linear(x_chunk, weight), cap)
        total = total + cross_entropy(logits, target_chunk)
    return total


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits (N, V), summed over the counted targets (N,)."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


def cross_entropy_grad_and_value(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient and the value of :func:`cross_entropy`, for float32 logits.

    The gradient (N, V) is softmax - one-hot. It overwrites the log-probabilities: autograd would
    use more memory.
    """
    log_probs = logits.log_softmax(dim=-1)
    value = F.nll_loss(log_probs, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    grad = log_probs.exp_()
    ids = targets.clamp(min=0)[:, None]
    grad.scatter_(-1, ids, grad.gather(-1, ids) - 1)
    grad.masked_fill_((targets == IGNORE_INDEX)[:, None], 0)
    return grad, value


def fused_grad_and_value(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return :func:`cross_entropy_grad_and_value` by operations that a compiler fuses.

    Logits have any dtype. Comparing ids with the targets avoids a scatter.
    """
    wide = logits.float()
    log_sum = wide.logsumexp(dim=-1, keepdim=True)
    is_counted = (targets != IGNORE_INDEX)[:, None]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    probability = (wide - log_sum).exp()
    grad = torch.where(ids == targets[:, None], probability - 1, probability) * is_counted
    target_logits = wide.gather(-1, targets.clamp(min=0)[:, None])
    return grad, ((log_sum - target_logits) * is_counted).sum()


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Squash logits smoothly into ± cap (Gemma Team 2024); 0 leaves them unchanged."""
    return cap * torch.tanh(logits.float() / cap) if cap else logits


def max_chunk_rows(weight: Tensor, is_fused: bool = False) -> int:
    """Return the number of rows whose logits, (rows, V), exist at one time."""
    if is_fused:
        return max(1, min(MAX_FUSED_ROWS, MAX_FUSED_LOGITS // len(weight)))
    num_rows = max(1, MAX_LOGITS // len(weight))
    if weight.device.type == "cpu" and not torch.compiler.is_compiling():
        num_rows = min(num_rows, max(MIN_CHUNK_ROWS, MAX_CACHED_LOGITS // len(weight)))
    return num_rows


def is_compiled_on_gpu(weight: Tensor) -> bool:
    """Return whether a compiler fuses operations for a GPU, at the time of this call."""
    return weight.is_cuda and torch.compiler.is_compiling()


def chunked_loss(
    grad_and_value: GradAndValue, x: Tensor, weight: Tensor, targets: Tensor, cap: float
) -> Tensor:
    """Apply a loss to the logits soft_cap(x @ weight.T), of which some rows exist at a time."""
    return ChunkedLoss.apply(grad_and_value, x, weight, targets, cap)


class ChunkedLoss(torch.autograd.Function):
    """The sum of a loss over chunks of logits.

    The forward pass also computes the gradients of each chunk, so no logits are computed twice.
    """

    @staticmethod
    def forward(
        ctx, grad_and_value: GradAndValue, x: Tensor, weight: Tensor, targets: Tensor, cap: float
    ) -> Tensor:
        """Return the loss; keep the gradients with respect to x and weight."""
        is_fused = grad_and_value is cross_entropy_grad_and_value and is_compiled_on_gpu(weight)
        if is_fused:
            grad_and_value = fused_grad_and_value
        num_rows = max_chunk_rows(weight, is_fused)
        dtype = F.linear(x[:0], weight[:0]).dtype  # that of products, also under autocast
        w = weight.to(dtype)
        total = torch.zeros((), device=x.device)
        x_grads = []
        weight_grad = None
        if ctx.needs_input_grad[2]:  # not if the weight is frozen
            weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        x_chunks = x.to(dtype).split(num_rows)
        for x_chunk, target_chunk in zip(x_chunks, targets.split(num_rows), strict=True):
            logits = x_chunk @ w.T  # (num_rows, V)
            logits = soft_cap(logits if is_fused else logits.float(), cap)
            grad, loss = grad_and_value(logits, target_chunk)
            if cap:
                grad = grad * (1 - (logits / cap).square())  # the derivative of soft_cap
            grad = grad.to(dtype)
            total = total + loss  # not in place: torch 2.11 would compile gradients of zero
            x_grads.append(grad @ w)
            if weight_grad is not None:
                weight_grad = weight_grad + (grad.T @ x_chunk).float()
            del logits, grad  # before the next chunk needs memory
        ctx.save_for_backward(torch.cat(x_grads).to(x.dtype), weight_grad)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        """Scale the gradients that the forward pass computed. Raises RuntimeError for a graph."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("create_graph: unsupported, the loss has no second derivative.")
        x_grad, weight_grad = ctx.saved_tensors
        weight_grad = None if weight_grad is None else weight_grad * grad
        return None, x_grad * grad, weight_grad, None, None
