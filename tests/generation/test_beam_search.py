"""Beam search: exact with enough beams, greedy with one."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model

from engine.core.errors import UserError
from engine.data.tokenizer import CharTokenizer
from engine.generation.beam_search import beam_search, search_text
from engine.generation.generate import generate, window_start
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHI")  # 35 ids of 37


def log_probability(model, prompt, ids, banned=()) -> float:
    """The log-probability of ids after a prompt, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :].double()
    logits[:, list(banned)] = -math.inf
    return sum(logits.log_softmax(dim=-1)[at, token].item() for at, token in enumerate(ids))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("banned", [(), (4,)])
def test_enough_beams_find_the_best_of_all_continuations(seed, banned):
    model = random_model(dataclasses.replace(SMALL, vocab_size=5), seed)
    prompt = [1, 3, 2]
    tokenizer = CharTokenizer("abcde"[: 5 - len(banned)])
    ends = (0, 2)
    length = 4
    allowed = [token for token in range(5) if token not in banned]
    scores = {}
    for n in range(1, length + 1):
        for ids in itertools.product(allowed, repeat=n):
            if not set(ids[:-1]) & set(ends) and (ids[-1] in ends or n == length):
                scores[ids] = log_probability(model, prompt, ids, banned) / ((5 + n) / 6) ** 0.6
    best = max(scores, key=scores.__getitem__)
    stream = TextStream(tokenizer, prompt, length, ends=ends)
    ids, score = beam_search(model, stream, 5**length)
    assert tuple(ids) == best and score == pytest.approx(scores[best], abs=1e-4)
    ids, score = beam_search(model, stream, 2)
    assert scores[tuple(ids)] == pytest.approx(score, abs=1e-4) and score <= scores[best] + 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_one_beam_is_greedy_beyond_the_context_too(name):
    model = build_decoder(random_model(VARIANTS[name]))
    prompt = torch.randint(37, (7,))
    greedy = torch.cat([*generate(model, prompt, 30, temperature=0, banned=[35, 36])]).tolist()
    assert beam_search(model, TextStream(LETTERS, prompt.tolist(), 30), 1)[0] == greedy
    expected = greedy[: greedy.index(greedy[12]) + 1]
    stream = TextStream(LETTERS, prompt.tolist(), 30, ends=[greedy[12]])
    assert beam_search(model, stream, 1)[0] == expected


def test_beams_beyond_the_context_have_the_scores_of_their_windows():
    model = random_model(SMALL)
    ids = torch.randint(35, (13,)).tolist()
    best, score = beam_search(model, TextStream(LETTERS, ids, 9), 3)
    total = 0.0
    for token in best:
        total += log_probability(model, ids[window_start(len(ids), 16) :], [token], (35, 36))
        ids.append(token)
    assert len(best) == 9 and score == pytest.approx(total / (14 / 6) ** 0.6, abs=1e-3)


def test_a_search_ends_when_no_beam_can_surpass_the_best():
    model = random_model(dataclasses.replace(SMALL, vocab_size=5))
    calls = []
    model.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    stream = TextStream(CharTokenizer("abcde"), [1], 1000, ends=[0, 2, 3])
    ids, score = beam_search(model, stream, 4)
    assert 1 <= len(ids) <= len(calls) < 1000 and score < 0


def test_a_text_ends_with_the_end_of_text_or_an_end_or_a_stop_text():
    tokenizer = CharTokenizer("abcd").with_special(["<|endoftext|>", "<|end|>"])
    model = random_model(dataclasses.replace(SMALL, vocab_size=8))
    for prompt in range(4):
        stream = TextStream(tokenizer, [prompt], 10)
        text = search_text(model, stream, 3)
        assert set(text) <= set("abcd") and stream.num_tokens in (10, len(text) + 1)
        for num_beams, ends in ((3, ()), (300, [5])):
            stream = TextStream(tokenizer, [prompt], 10, "abcd", ends)
            assert search_text(model, stream, num_beams) == "" and stream.num_tokens == 1


def test_logits_that_are_not_finite_are_an_error():
    model = random_model(SMALL)
    model.head.weight.data *= torch.nan
    with pytest.raises(UserError, match="not finite"):
        beam_search(model, TextStream(LETTERS, [1], 5), 2)
