"""Definitions that fast implementations are compared with, and how they are compared."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.generation import sampling
from engine.generation.decoding_engine import window_start
from engine.generation.sampling import draw_ids, noise_states, penalize_repetition, row_seeds


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


def filter_logits(logits: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Return the sampling weights of logits (B, V), and their token ids."""
    weights, ids, _ = sampling.filter_logits(logits, logits.shape[-1], **options)
    return weights, ids


def sample_token(logits: Tensor, draws: Sequence[tuple[int, int]], **options) -> list[int]:
    """Draw the next token of each row of logits (B, V)."""
    return draw_ids(logits, noise_states(draws, logits.device), **options)


@torch.no_grad()
def decoding_definition(
    model,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    seed: int = 0,
    banned: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    special: Sequence[int] = (),
    **filters,
) -> list[list[int]]:
    """The ids after each prompt, computed one by one and without a cache.

    A repetition penalty leaves the ids of special tokens as they are.
    """
    penalties = [filters.get(f"{name}_penalty", 0.0) for name in ("frequency", "presence")]
    texts = []
    for prompt, row_seed in zip(prompts, row_seeds(seed, prompts), strict=True):
        ids = list(prompt)
        for step in range(num_tokens):
            tokens = torch.tensor([ids[window_start(len(ids), model.config.context_length) :]])
            logits = model(tokens)[:, -1]
            logits[:, list(banned)] = -math.inf
            if repetition_penalty != 1:
                logits = penalize_repetition(logits, tokens, repetition_penalty, special)
            for token in ids[len(prompt) :]:
                logits[:, token] -= penalties[0]
            for token in {*ids[len(prompt) :]}:
                logits[:, token] -= penalties[1]
            ids += sample_token(logits, [(row_seed, step)], **filters)
        texts.append(ids[len(prompt) :])
    return texts
