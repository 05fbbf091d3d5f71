"""Sampling: logits → the probabilities of the next token → a drawn token."""

from typing import TypedDict

import torch
from torch import Tensor

from engine.core.errors import UserError

MIN_TEMPERATURE = 1e-4  # below it division overflows: the most likely token is chosen


class SamplingOptions(TypedDict, total=False):
    """Keywords of sampling: a temperature of 0 is greedy, top_k=None keeps every token."""

    temperature: float
    top_k: int | None
    top_p: float
    seed: int


# Of sample.py and TextGenerator.
DEFAULT_OPTIONS: SamplingOptions = {"temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 1}


def check_finite(logits: Tensor) -> None:
    """Raise UserError unless logits are finite, or -inf for banned tokens."""
    if not (logits < torch.inf).all():  # false for NaN too
        raise UserError("the model's logits are not finite: it diverged. Use an earlier checkpoint.")


def filter_logits(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return weights to draw by, and their token ids: logits (B, V) → (B, k) twice, descending.

    top_k keeps the k most likely tokens; top_p keeps the fewest of those that have probability p
    together (Holtzman et al. 2020). Other tokens have weight 0; weights need not sum to 1.
    """
    check_finite(logits)
    if temperature < MIN_TEMPERATURE:
        ids = logits.argmax(dim=-1, keepdim=True)
        return torch.ones_like(ids, dtype=torch.float32), ids
    logits = logits.float() / temperature
    values, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
    probs = values.softmax(dim=-1)
    probs_before = probs.cumsum(dim=-1) - probs
    return probs.masked_fill(probs_before >= top_p, 0), ids


def draw(weights: Tensor, ids: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one id from each row of :func:`filter_logits`: (B, k) twice → (B,)."""
    if weights.shape[-1] == 1:
        return ids[:, 0]
    return ids.gather(-1, torch.multinomial(weights, 1, generator=generator))[:, 0]


def sample_token(
    logits: Tensor,
    generator: torch.Generator,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Draw the next token of each row, (B, V) → (B,)."""
    return draw(*filter_logits(logits, temperature, top_k, top_p), generator)
