"""Beam search: the continuation with the best score."""

import math

import torch

from engine.core.errors import UserError
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import not_finite_error
from engine.generation.text_batch import banned_tokens
from engine.generation.text_stream import TextStream
from model import GPT

LENGTH_PENALTY_EXPONENT = 0.6  # α of Wu et al. 2016, eq. 14


def length_penalty(length: int) -> float:
    """Return the divisor of log P for a continuation of this length."""
    return ((5 + length) / 6) ** LENGTH_PENALTY_EXPONENT


@torch.inference_mode()
def beam_search(model: GPT, stream: TextStream, num_beams: int) -> tuple[list[int], float]:
    """Return the ids of the continuation of a prompt with the best score, and the score.

    The score is log P / ((5 + length) / 6)^α: Wu et al. 2016, eq. 14. A continuation is finished by
    an id that ends the stream, which it includes, by a stop text, or by the maximum length. The
    search ends when no unfinished continuation can surpass the best finished one.
    """
    tokenizer = stream.tokenizer
    max_tokens = stream.max_tokens
    engine = DecodingEngine(model)
    limit = engine.max_rows(num_beams, len(stream.prompt) + max_tokens)
    if limit < num_beams:
        raise UserError(f"--beams: at most {limit} fit in memory (got {num_beams}). Use fewer.")
    engine.add(stream.prompt, max_tokens)
    logits = engine.read(0)
    banned = torch.tensor(banned_tokens(tokenizer, model, stream.stop_token_ids), dtype=torch.long)
    banned = banned.to(engine.device)
    beams: list[list[int]] = [[]]
    log_probs = torch.zeros(1, device=engine.device)  # of each beam
    best: list[int] = []
    best_score = -math.inf
    for length in range(1, max_tokens + 1):
        if not logits.amax(dim=-1).isfinite().all():
            raise not_finite_error()
        allowed = logits.index_fill(-1, banned, -math.inf).float()
        scores = log_probs[:, None] + allowed.log_softmax(dim=-1)  # (beams, V)
        values, indices = scores.flatten().topk(min(num_beams, scores.numel()))  # descending
        is_allowed = values > -math.inf
        values = values[is_allowed]
        indices = indices[is_allowed]
        parents = (indices // scores.shape[1]).tolist()
        ids = (indices % scores.shape[1]).tolist()
        unfinished = []  # indices of candidates
        candidates = [[*beams[parent], token] for parent, token in zip(parents, ids, strict=True)]
        for index, candidate in enumerate(candidates):
            score = values[index].item() / length_penalty(length)
            is_last = length == max_tokens or candidate[-1] in stream.stop_token_ids
            if not is_last and not any(text in tokenizer.decode(candidate) for text in stream.stop):
                unfinished.append(index)
            elif score > best_score:
                best = candidate
                best_score = score
        if not unfinished:
            break
        log_probs = values[unfinished]
        if best_score >= log_probs[0].item() / length_penalty(max_tokens):
            break
        beams = [candidates[index] for index in unfinished]
        engine.keep([parents[index] for index in unfinished])
        logits = engine.step([ids[index] for index in unfinished])
    return best, best_score


def search_text(model: GPT, stream: TextStream, num_beams: int) -> str:
    """Return the best text after a stream's prompt."""
    ids, _ = beam_search(model, stream, num_beams)
    return "".join(map(stream.push, ids)) + stream.end()
