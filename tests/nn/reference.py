"""Definitions that fast implementations are compared with, and how they are compared."""

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class OperationRecorder(TorchDispatchMode):
    """Records the names of PyTorch's operations, and the elements of their largest result."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.names.add(str(function))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result

    @property
    def has_fused_attention(self) -> bool:
        names = [name for name in self.names if "backward" not in name]
        return any("scaled_dot_product" in name for name in names)


def assert_same_gradients(
    actual: Tensor, expected: Tensor, inputs: list[Tensor], tolerance: float
) -> None:
    """Compare two results, and the gradients of a random projection of them."""
    weight = torch.randn(actual.shape, device=actual.device)
    results = []
    for result in (actual, expected):
        grads = torch.autograd.grad((result.float() * weight).sum(), inputs)
        results.append([result, *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def attention_definition(query: Tensor, key: Tensor, value: Tensor, window: int = 0) -> Tensor:
    """Causal attention of the last T of S positions, in double precision."""
    T = query.shape[-2]
    S = key.shape[-2]
    group_size = query.shape[1] // key.shape[1]
    key = key.double().repeat_interleave(group_size, dim=1)
    value = value.double().repeat_interleave(group_size, dim=1)
    scores = query.double() @ key.mT / math.sqrt(query.shape[-1])
    positions = torch.arange(S, device=query.device)
    distance = positions[S - T :, None] - positions
    is_hidden = (distance < 0) | (distance >= (window or S))
    return scores.masked_fill(is_hidden, -math.inf).softmax(dim=-1) @ value


def random_heads(
    T: int, S: int, dtype: torch.dtype, device: str = "cpu", num_groups: int = 3
) -> list[Tensor]:
    """Queries of three heads, and keys and values of groups of them, that need gradients."""
    torch.manual_seed(0)
    sizes = ((3, T), (num_groups, S), (num_groups, S))
    return [torch.randn(2, n, length, 8).to(device, dtype).requires_grad_() for n, length in sizes]


def loss_definition(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    """Cross-entropy of the output layer, summed over the targets that count."""
    logits = x @ weight.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    probabilities = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    counted = targets >= 0
    return -probabilities[counted, targets[counted]].log().sum()
