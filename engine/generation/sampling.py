"""The choice of the next token: which may come, with which probabilities, and the draw."""

import torch
from torch import Tensor

from engine.core.errors import UserError

COLDEST = 1e-4  # a temperature below it could only choose the most likely token, were its quotients finite


def check_finite(logits: Tensor) -> None:
    """Raise UserError unless logits are finite, or -inf for what must not be chosen."""
    if not (logits < torch.inf).all():  # nor NaN
        raise UserError("the model's logits are not finite: it diverged in training; try an earlier checkpoint")


def candidates(logits: Tensor, temperature: float, top_k: int | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The weights that tokens are drawn by, and the tokens' ids: logits (B, V) → (B, k) twice, in falling order.

    top_k keeps the k most likely (None: all); top_p the fewest that together have probability p (Holtzman et al. 2020):
    the others weigh 0, so that weights need not sum to 1. At temperature 0 there is the most likely token alone.
    """
    check_finite(logits)
    if temperature < COLDEST:
        ids = logits.argmax(dim=-1, keepdim=True)
        return torch.ones_like(ids, dtype=torch.float32), ids
    logits = logits.float() / temperature
    values, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    return probabilities.masked_fill(before >= top_p, 0), ids


def choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator) -> Tensor:
    """Draw token ids (B,) from the :func:`candidates` that logits (B, V) leave; at temperature 0 the most likely."""
    weights, ids = candidates(logits, temperature, top_k, top_p)
    if weights.shape[-1] == 1:
        return ids[:, 0]
    return ids.gather(-1, torch.multinomial(weights, 1, generator=generator))[:, 0]
