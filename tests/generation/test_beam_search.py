"""Beam search: exact with enough beams, greedy with one."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model
from reference import decoding_definition

from engine.core.errors import UserError
from engine.data.chats.chat import TurnEnds
from engine.data.tokenizer import CharTokenizer
from engine.generation.beam_search import beam_search, search_text
from engine.generation.decoding_engine import window_start
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHI")  # 35 ids of 37


@pytest.mark.parametrize(
    ("seed", "banned", "ends"), [(0, [], ()), (1, [4], (0, 2)), (2, [4], ()), (3, [], (0, 2))]
)
@torch.no_grad()
def test_enough_beams_find_the_best_of_all_continuations_beyond_the_context_too(
    each_path, seed, banned, ends
):
    model = random_model(dataclasses.replace(SMALL, vocab_size=5, context_length=4), seed)
    prompt = [1, 3, 2]
    length = 4

    @functools.cache
    def log_probs(ids: tuple[int, ...]) -> list[float]:
        """Return those of the next id after the prompt and ids, without a cache."""
        window = [*prompt, *ids][window_start(len(prompt) + len(ids), 4) :]
        logits = model(torch.tensor([window]))[0, -1].double()
        logits[banned] = -math.inf
        return logits.log_softmax(dim=-1).tolist()

    scores = {}
    for n in range(1, length + 1):
        for ids in itertools.product({*range(5)} - {*banned}, repeat=n):
            if not {*ids[:-1]} & {*ends} and (ids[-1] in ends or n == length):
                total = sum(log_probs(ids[:at])[token] for at, token in enumerate(ids))
                scores[ids] = total / ((5 + n) / 6) ** 0.6
    best = max(scores.values())
    letters = CharTokenizer("abcde"[: 5 - len(banned)])
    stream = TextStream(letters, prompt, length, ends=TurnEnds(tuple(ends)))
    for num_beams, worst in ((5**length, best), (2, -math.inf)):
        ids, score = beam_search(model, stream, num_beams)
        assert score == pytest.approx(scores[tuple(ids)], abs=1e-4)
        assert worst - 1e-4 <= score <= best + 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_one_beam_is_greedy_beyond_the_context_too(name):
    model = random_model(VARIANTS[name])
    prompt = torch.randint(37, (7,)).tolist()
    (greedy,) = decoding_definition(model, [prompt], 30, banned=[35, 36], temperature=0)
    for ends, expected in (([], greedy), ([greedy[12]], greedy[: greedy.index(greedy[12]) + 1])):
        stream = TextStream(LETTERS, prompt, 30, ends=TurnEnds(tuple(ends)))
        assert beam_search(build_decoder(model), stream, 1)[0] == expected


def test_a_text_ends_with_the_end_of_text_or_an_end_or_a_stop_text():
    tokenizer = CharTokenizer("abcd").with_special(["<|endoftext|>", "<|end|>"])
    model = random_model(dataclasses.replace(SMALL, vocab_size=8))
    for prompt in range(4):
        stream = TextStream(tokenizer, [prompt], 10)
        text = search_text(model, stream, 3)
        assert set(text) <= set("abcd") and len(stream.new_ids) in (10, len(text) + 1)
        for num_beams, ends in ((3, TurnEnds()), (300, TurnEnds((5,)))):
            stream = TextStream(tokenizer, [prompt], 10, "abcd", ends)
            assert search_text(model, stream, num_beams) == "" and len(stream.new_ids) == 1


def test_logits_that_are_not_finite_are_an_error():
    model = random_model(SMALL)
    model.head.weight.data *= torch.nan
    with pytest.raises(UserError, match="not finite"):
        beam_search(model, TextStream(LETTERS, [1], 5), 2)
