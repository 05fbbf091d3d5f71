"""Beam search: the continuation with the best score."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.data.tokenizer import Tokenizer
from engine.generation.generate import Sequences, banned_tokens
from engine.generation.sampling import check_finite
from engine.generation.text_stream import TextStream
from model import GPT

LENGTH_PENALTY_EXPONENT = 0.6  # α of Wu et al. 2016, eq. 14


@torch.inference_mode()
def beam_search(
    model: GPT,
    prompt: Tensor,
    num_beams: int,
    max_new_tokens: int,
    ends: Sequence[int] = (),
    banned: Sequence[int] = (),
    is_stopped: Callable[[list[int]], bool] = lambda ids: False,
) -> tuple[list[int], float]:
    """Find the continuation of a prompt (T,) with the best score: returns its ids and the score.

    The score is log P / ((5 + length) / 6)^α: Wu et al. 2016, eq. 14. A continuation is finished by
    an id of ends, which it includes, by is_stopped(ids), or by max_new_tokens. The search is
    over when no unfinished one can surpass the best finished one.
    """
    sequences = Sequences(model, prompt.view(1, -1), len(prompt) + max_new_tokens, banned)
    beams: list[list[int]] = [[]]
    log_probs = torch.zeros(1, device=prompt.device)  # of each beam
    best: list[int] = []
    best_score = -math.inf
    for length in range(1, max_new_tokens + 1):
        logits = sequences.logits()
        check_finite(logits)
        scores = log_probs[:, None] + logits.float().log_softmax(dim=-1)  # (beams, V)
        values, places = scores.flatten().topk(min(num_beams, scores.numel()))  # descending
        places = places[values > -math.inf]
        values = values[values > -math.inf]
        parents = places // scores.shape[1]
        ids = places % scores.shape[1]
        pairs = zip(parents.tolist(), ids.tolist(), strict=True)
        candidates = [[*beams[parent], token] for parent, token in pairs]
        unfinished = []
        for index, (value, candidate) in enumerate(zip(values.tolist(), candidates, strict=True)):
            is_last = length == max_new_tokens or candidate[-1] in ends
            score = value / length_penalty(length)
            if not is_last and not is_stopped(candidate):
                unfinished.append(index)
            elif score > best_score:
                best = candidate
                best_score = score
        if not unfinished:
            break
        if best_score >= values[unfinished[0]].item() / length_penalty(max_new_tokens):
            break
        log_probs = values[unfinished]
        beams = [candidates[index] for index in unfinished]
        sequences.select(parents[unfinished])
        sequences.append(ids[unfinished][:, None])
    return best, best_score


def length_penalty(length: int) -> float:
    """The divisor of a continuation's log P, which grows with its length."""
    return ((5 + length) / 6) ** LENGTH_PENALTY_EXPONENT


def search_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: list[int],
    max_new_tokens: int,
    num_beams: int,
    stops: Sequence[str] = (),
    ends: Sequence[int] = (),
) -> tuple[str, int]:
    """Find the best text after a prompt's ids: returns it and its number of tokens."""
    stream = TextStream(tokenizer, stops, ends, prompt)
    ids, _ = beam_search(
        model,
        torch.tensor(prompt, device=next(model.parameters()).device),
        num_beams,
        max_new_tokens,
        ends=list(stream.ends),
        banned=banned_tokens(tokenizer, model, ends),
        is_stopped=lambda ids: any(stop in tokenizer.decode(ids) for stop in stops),
    )
    return "".join(map(stream.push, ids)) + stream.end(), len(ids)
