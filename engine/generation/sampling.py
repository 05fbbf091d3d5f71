"""Sampling: logits → weights of the next token → a drawn token."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from engine.core.device import any_kernels
from engine.core.errors import UserError

MIN_TEMPERATURE = 1e-4  # below it the most likely token is chosen
NUM_FIRST_CANDIDATES = 256  # for top_p; sorting a large vocabulary takes twice as long
TOP_P_RELATIVE_ROUNDING = 2**-23  # a total probability this close to top_p reaches it
LOW_32_BITS = 2**32 - 1
NOT_FINITE = -1  # instead of an id: the logits are not finite
IS_CUT = -2  # instead of an id: more candidates must be considered
# Weights and token ids (B, K) each, and whether more candidates must be considered (B,).
Candidates = tuple[Tensor, Tensor, Tensor]
# Of SplitMix64 (Steele et al. 2014), as int64.
GOLDEN_GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


class TextOptions(TypedDict, total=False):
    """Keywords of text generation. What is left out changes nothing."""

    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    batch_size: int
    num_beams: int | None  # of a beam search, which uses none of those above
    max_new_tokens: int
    stop: Sequence[str]  # texts, before which a text ends


# The defaults of sample.py and TextGenerator, for a model without its own.
DEFAULT_OPTIONS = TextOptions(
    temperature=0.8, top_k=None, top_p=0.95, min_p=0.0, repetition_penalty=1.0, seed=1
)


def not_finite_error() -> UserError:
    """Return the error of a model whose logits are not finite."""
    return UserError("the logits are not finite: the model diverged. Use an earlier checkpoint.")


def penalize_repetition(
    logits: Tensor, tokens: Tensor, penalty: float, exempt: Sequence[int] = ()
) -> Tensor:
    """Return logits (B, V) in which the tokens (B, T) that occurred are less likely.

    Their positive logits are divided by the penalty, negative ones multiplied (Keskar et al. 2019).
    Exempt ids keep their logits: a penalty of the tokens that end turns would lengthen answers.
    """
    scores = logits.gather(-1, tokens)
    scores = torch.where(scores < 0, scores * penalty, scores / penalty)
    ids = torch.tensor(list(exempt), dtype=torch.long, device=logits.device)
    return logits.scatter(-1, tokens, scores).index_copy(-1, ids, logits[:, ids])


def penalize_frequency(
    logits: Tensor, texts: Sequence[Sequence[int]], frequency: float, presence: float
) -> Tensor:
    """Return logits (B, V) minus the penalties of OpenAI's API for the ids of B texts.

    An id loses ``frequency`` for each time it occurs, and ``presence`` once.
    """
    rows = [torch.tensor(ids, dtype=torch.long) for ids in texts]
    counts = torch.stack([row.bincount(minlength=logits.shape[-1]) for row in rows])
    counts = counts.to(logits.device)
    return logits - frequency * counts - presence * (counts > 0)


def filter_logits(
    logits: Tensor, max_candidates: int, **options: Unpack[TextOptions]
) -> Candidates:
    """Return sampling weights and their token ids: logits (B, V) → (B, K) twice.

    A temperature or top_p of 0 is greedy. In this order, top_k keeps the k most likely tokens
    (None, 0: all), top_p the fewest of these with a total probability of p (Holtzman et al. 2020),
    and min_p those at least min_p times as likely as the most likely one (Nguyen et al. 2024). Of
    equally likely tokens, the lowest ids are kept. Other tokens have weight 0; the largest weight
    is 1. A row is cut if top_p alone keeps more than max_candidates.
    """
    top_k = options.get("top_k") or None
    top_p = options.get("top_p", 1.0)
    temperature = options.get("temperature", 1.0)
    is_cut = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if temperature < MIN_TEMPERATURE or top_p == 0:
        ids = logits.argmax(dim=-1, keepdim=True)
        return torch.ones_like(ids, dtype=torch.float32), ids, is_cut
    logits = (logits.float() - logits.amax(dim=-1, keepdim=True).float()) / temperature
    if top_k is None and top_p == 1:
        ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
        weights = logits.exp()
    else:
        weights, ids, is_cut = keep_likely_tokens(logits, top_k, top_p, max_candidates)
    return weights.masked_fill(weights < options.get("min_p", 0.0), 0), ids, is_cut


def keep_likely_tokens(
    logits: Tensor, top_k: int | None, top_p: float, max_candidates: int
) -> Candidates:
    """Return the candidates after top_k and top_p, most likely first.

    The largest of the logits of each row, (B, V), must be 0.
    """
    vocab_size = logits.shape[-1]
    num_candidates = min(top_k or max_candidates, vocab_size)
    # Sort keys: nonnegative float32 numbers are ordered as their bits. Ties are ordered by id.
    keys = logits.abs().view(torch.int32).long() << 32
    keys += torch.arange(vocab_size, device=logits.device)
    ids = smallest(keys, num_candidates) & LOW_32_BITS
    dtype = torch.float32 if logits.is_mps else torch.float64
    weights = logits.gather(-1, ids).to(dtype).exp()
    if top_k is None:
        total = logits.exp().sum(dim=-1, keepdim=True, dtype=dtype)
    else:
        total = weights.sum(dim=-1, keepdim=True)
    limit = top_p * (1 - TOP_P_RELATIVE_ROUNDING) if top_p < 1 else math.inf
    is_kept = weights.cumsum(dim=-1) - weights < limit * total
    is_cut = is_kept[:, -1] & (top_k is None and num_candidates < vocab_size)
    return (weights * is_kept).float(), ids, is_cut


def smallest(keys: Tensor, num_keys: int) -> Tensor:
    """Return the smallest keys of each row in ascending order, (B, V) → (B, num_keys)."""
    if num_keys < keys.shape[-1]:
        return keys.topk(num_keys, largest=False).values
    if keys.device.type == "cpu":
        return torch.from_numpy(np.sort(keys.numpy()))  # ten times as fast as torch.sort
    return keys.sort().values


def row_seeds(seed: int, prompts: Iterable[Sequence[int]]) -> list[int]:
    """Return the seed of each prompt, which does not depend on other prompts of a batch.

    It depends on the ids, and on the number of equal prompts before: samples of a prompt differ.
    """
    num_equal: Counter[bytes] = Counter()
    seeds = []
    for prompt in prompts:
        ids = np.array(prompt, "<i8").tobytes()
        content = f"{seed} {num_equal[ids]} ".encode() + ids
        num_equal[ids] += 1
        seeds.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little"))
    return seeds


def noise_states(draws: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Return the state of a generator of noise for each draw, int64 (B,).

    A draw (seed, step) is the seed of a row, and the number of tokens drawn for it before.
    """
    starts = [(seed + GOLDEN_GAMMA * (step << 32)) % 2**64 for seed, step in draws]
    return torch.from_numpy(np.array(starts, np.uint64).view(np.int64)).to(device)


def exponential_noise(states: Tensor, ids: Tensor) -> Tensor:
    """Return samples of Exponential(1), (B, K), a pure function of states (B,) and ids (B, K)."""
    state = states[:, None] + ids * GOLDEN_GAMMA
    for shift, factor in zip((30, 27), MIX_FACTORS, strict=True):
        state = (state ^ ((state >> shift) & (2 ** (64 - shift) - 1))) * factor
    uniform = (((state >> 32) & LOW_32_BITS).float() + 0.5) * ((1 - 2**-24) / 2**32)  # below 1
    return -torch.log1p(-uniform)


@any_kernels()  # CUDA has no deterministic sums of all candidates before each
def draw_ids(logits: Tensor, states: Tensor, **options: Unpack[TextOptions]) -> list[int]:
    """Draw the next token of each row, from logits (B, V) and the states of noise (B,).

    It is NOT_FINITE for a row of such logits. The id of the largest weight / noise is drawn: its
    probability is proportional to its weight. As each id has noise of its own, a batch that rounds
    logits differently rarely changes a token. Waits for the device once, and once more if there are
    more likely tokens than NUM_FIRST_CANDIDATES.
    """
    is_finite = logits.amax(dim=-1).isfinite()
    for max_candidates in (NUM_FIRST_CANDIDATES, logits.shape[-1]):
        weights, ids, is_cut = filter_logits(logits, max_candidates, **options)
        if weights.shape[-1] > 1:
            noise = exponential_noise(states, ids)
            ids = ids.gather(-1, (weights / noise).argmax(-1, keepdim=True))
        drawn = ids[:, 0].masked_fill(is_cut, IS_CUT).masked_fill(~is_finite, NOT_FINITE).tolist()
        if IS_CUT not in drawn:
            break
    return drawn
