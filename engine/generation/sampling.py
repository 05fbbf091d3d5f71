"""Sampling: logits → the probabilities of the next token → a drawn token."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from engine.core.errors import UserError

MIN_TEMPERATURE = 1e-4  # below it division could overflow: the most likely token is chosen


class FilterOptions(TypedDict, total=False):
    """Keywords of :func:`filter_logits`."""

    temperature: float
    top_k: int | None
    top_p: float


class SamplingOptions(FilterOptions, total=False):
    """Keywords of sampling."""

    seed: int


class TextOptions(SamplingOptions, total=False):
    """Keywords of text generation, which ends before any text of ``stop``."""

    max_new_tokens: int
    stop: Sequence[str]


# The defaults of sample.py and TextGenerator.
DEFAULT_OPTIONS: SamplingOptions = {"temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 1}


def check_finite(logits: Tensor) -> None:
    """Raise UserError unless logits are finite, or -inf for banned tokens."""
    if not (logits < torch.inf).all():  # false for NaN too
        raise UserError(
            "the model's logits are not finite: it diverged. Use an earlier checkpoint."
        )


def filter_logits(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return sampling weights and their token ids: logits (B, V) → (B, k) twice, descending.

    A temperature of 0 is greedy. top_k keeps the k most likely tokens (None: all), and top_p the
    fewest of them with a total probability of p (Holtzman et al. 2020). Other tokens have weight 0;
    weights need not sum to 1.
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


def sample_token(
    logits: Tensor, generator: torch.Generator, **filters: Unpack[FilterOptions]
) -> Tensor:
    """Draw the next token of each row, (B, V) → (B,)."""
    weights, ids = filter_logits(logits, **filters)
    if weights.shape[-1] > 1:
        ids = ids.gather(-1, torch.multinomial(weights, 1, generator=generator))
    return ids[:, 0]
