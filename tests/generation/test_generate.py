"""Decoding: the cache, the window, choosing, what may not come, beams, streaming, prompts of many lengths."""

import dataclasses
import itertools
import math

import pytest
import torch
from helpers import SMALL, VARIANTS, randomised

from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.generation.generate import (
    Cache,
    TextStream,
    beam_search,
    choose,
    complete,
    generate,
    generate_text,
    new_caches,
    not_text,
    opening,
    search_text,
    texts,
    window_start,
)
from engine.nn.inference import for_decoding
from model import GPT


def decoded(model, prompt, **options) -> list[list[int]]:
    return torch.stack(list(generate(model, prompt, **options)), dim=1).tolist()


# The cache and the window.


def test_a_cache_holds_what_was_appended_and_how_much():
    cache = Cache(2, 3, 10, 4, torch.empty(0, dtype=torch.bfloat16))
    pieces = torch.randn(2, 2, 3, 9, 4).bfloat16().split([4, 1, 4], dim=3)
    for end, (key, value) in zip((4, 5, 9), pieces, strict=True):
        keys, values = cache.append(key, value)
        assert cache.filled == end and keys.dtype == torch.bfloat16
    whole = torch.cat(pieces, dim=3)
    assert torch.equal(keys, whole[0]) and torch.equal(values, whole[1])


def test_a_cache_goes_on_with_the_rows_that_are_selected():
    cache, (key, value) = Cache(3, 2, 10, 4, torch.empty(0)), torch.randn(2, 3, 2, 5, 4)
    cache.append(key[:, :, :3], value[:, :, :3])
    rows = torch.tensor([2, 0, 2, 2])  # another order, another number, and one of them several times
    cache.select(rows)
    keys, values = cache.append(key[rows, :, 3:], value[rows, :, 3:])
    assert keys.equal(key[rows]) and values.equal(value[rows]) and cache.filled == 5
    key[2] = 0  # each row has its own values
    cache.keys_values[:, 0] = 0
    assert cache.keys_values[:, 2].any()


@pytest.mark.parametrize("window", [1, 2, 5, 60])
@pytest.mark.parametrize("pieces", [[1] * 50, [30] + [1] * 20, [3, 9, 1, 1, 20, 2, 14], [50]], ids=len)
def test_a_cache_with_a_window_holds_what_it_shows_in_memory_that_stays(window, pieces):
    cache = Cache(2, 3, 50, 4, torch.empty(0), window)
    whole, rows, size = torch.randn(2, 2, 3, 50, 4), torch.tensor([1, 0]), cache.keys_values.numel()
    for end, length in zip(itertools.accumulate(pieces), pieces, strict=True):
        shown = torch.stack(cache.append(*whole[:, :, :, end - length : end]))
        seen = min(end, length + window - 1)
        assert cache.filled == end and shown[:, :, :, -seen:].equal(whole[:, :, :, end - seen : end])
        cache.select(rows)
        whole = whole[:, rows]
    assert cache.keys_values.numel() == size == 2 * 2 * 3 * min(50, 2 * window) * 4


def test_a_cache_with_a_window_seldom_moves_what_it_holds():
    cache, starts = Cache(1, 1, 1000, 1, torch.empty(0), 10), []
    for _ in range(500):
        cache.append(*torch.zeros(2, 1, 1, 1, 1))
        starts.append(cache.held)
    assert sum(later < earlier for earlier, later in itertools.pairwise(starts)) <= 50


def test_caches_have_the_shape_of_the_model_s_attention():
    caches = new_caches(randomised(SMALL).bfloat16(), 5)
    assert [cache.filled for cache in caches] == [0] * SMALL.num_layers and caches[0].length == 16
    assert caches[0].keys_values.shape == (2, 5, 3, 16, 8) and caches[0].keys_values.dtype == torch.bfloat16


def test_caches_have_room_for_what_is_asked_and_no_more():
    model = randomised(dataclasses.replace(SMALL, context_length=10**5))
    held, append = [], Cache.append

    def seen(cache: Cache, *new: torch.Tensor) -> tuple:
        held.append(cache.keys_values.shape[3])
        return append(cache, *new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "append", seen)
        list(generate(model, torch.zeros(2, 3, dtype=torch.long), 5))
        beam_search(model, torch.zeros(3, dtype=torch.long), 2, 5)
        list(complete(model, ByteTokenizer(), [([1, 2], 6), ([3, 4, 5], 5)], 2, temperature=0, top_k=None, top_p=1.0))
    assert set(held) == {8}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 40])
def test_decoding_with_a_cache_gives_the_tokens_without_one_past_the_context_too(name, prompt_length):
    model = randomised(VARIANTS[name])
    torch.manual_seed(1)
    prompt = torch.randint(37, (2, prompt_length))
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
        tokens = decoded(for_decoding(model), prompt, **options)
        assert tokens == decoded(model, prompt, use_cache=False, **options)
        assert len(tokens) == 2 and len(tokens[0]) == 40


def test_a_token_depends_on_the_window_that_ends_with_it_and_on_nothing_before():
    model = randomised(SMALL)
    prompt = torch.randint(37, (1, 40))
    start = window_start(40, 16)
    assert 0 < start < 40
    other = torch.cat(((prompt[:, :start] + 1) % 37, prompt[:, start:]), dim=1)
    choice = {"max_new_tokens": 1, "temperature": 0}
    assert decoded(model, prompt, **choice) == decoded(model, other, **choice)
    expected = model(prompt[:, start:])[0, -1].argmax()
    assert decoded(model, prompt, **choice) == [[expected]]


def test_the_window_grows_then_slides_by_half():
    starts = [window_start(length, 8) for length in range(1, 22)]
    assert starts == [0] * 8 + [4] * 4 + [8] * 4 + [12] * 4 + [16]
    assert [window_start(length, 1) for length in (1, 2, 3)] == [0, 1, 2]
    for context in range(1, 20):
        for length in range(1, 80):
            assert (context + 1) // 2 - 1 <= length - window_start(length, context) - 1 < context or length <= context


# Choosing.


def test_greedy_decoding_takes_the_most_likely_token_each_time():
    model = randomised(SMALL)
    tokens = [1, 2, 3]
    for token in decoded(model, torch.tensor([tokens]), max_new_tokens=10, temperature=0)[0]:
        assert token == model(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token)


def test_the_same_seed_gives_the_same_text_and_another_another():
    model = randomised(SMALL)
    texts = [decoded(model, torch.tensor([[1]]), max_new_tokens=30, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_generating_leaves_the_global_random_numbers_alone():
    model = randomised(SMALL)
    state = torch.get_rng_state()
    decoded(model, torch.tensor([[1]]), max_new_tokens=5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.5, 0.2, 0.2]),
        ({"temperature": 0.5}, [0.01 / 0.34, 0.25 / 0.34, 0.04 / 0.34, 0.04 / 0.34]),
        ({"temperature": 0}, [0, 1, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 3}, [0, 5 / 9, 2 / 9, 2 / 9]),
        ({"top_k": 100}, [0.1, 0.5, 0.2, 0.2]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 0.85}, [0, 5 / 9, 2 / 9, 2 / 9]),
        ({"top_k": 3, "top_p": 0.5}, [0, 1, 0, 0]),  # of the three's 0.9, not of all
    ],
    ids=str,
)
def test_choosing_draws_from_the_distribution_that_is_asked_for(options, expected):
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.1, 0.5, 0.2, 0.2]]).log().expand(4000, 4)
    options = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | options
    ids = choose(logits, **options, generator=generator)
    shares = (ids.bincount(minlength=4) / 4000).tolist()
    assert shares == pytest.approx(expected, abs=0.04)
    assert all(share == 0 for share, likely in zip(shares, expected, strict=True) if not likely)


def test_no_more_tokens_are_kept_than_have_the_probability_asked_for():
    ids = choose(torch.zeros(100, 4), 1.0, None, 0.5, torch.Generator().manual_seed(0))  # a quarter each
    assert len(set(ids.tolist())) == 2


def test_what_must_never_come_does_not():
    model = randomised(SMALL)
    for temperature in (0, 1.0):
        choice = {"max_new_tokens": 20, "never": list(range(5, 37)), "temperature": temperature}
        tokens = decoded(model, torch.tensor([[1]] * 8), **choice)
        assert {token for row in tokens for token in row} <= set(range(5))


def test_generated_text_has_only_ids_that_stand_for_text():
    class WithHoles(CharTokenizer):
        def unused_ids(self) -> list[int]:
            return [1]

    model = randomised(SMALL)  # a vocabulary of 37, padded
    for tokenizer, known in ((CharTokenizer("abc"), {0, 1, 2}), (WithHoles("abc"), {0, 2})):
        tokens = torch.stack(list(generate_text(model, tokenizer, [[0, 2]] * 4, 30, temperature=5.0)))
        assert tokens.shape == (30, 4) and set(tokens.flatten().tolist()) == known


def test_opening():
    assert opening(ByteTokenizer(), documents=2) == [256]
    assert opening(ByteTokenizer(), documents=1) == [10]
    assert opening(CharTokenizer("\nab"), documents=5) == [0]
    assert opening(CharTokenizer("ab"), documents=5) == [0]


# Streaming.


def test_a_stream_never_cuts_a_character():
    text = TextStream(ByteTokenizer())
    parts = [text.push(byte) for byte in "aé€😀".encode()]
    assert parts == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    text.push(0xE2)
    assert text.end() == "�" and text.end() == ""


def test_a_stop_text_ends_the_stream_even_across_tokens_and_is_not_written():
    text = TextStream(ByteTokenizer(), ["END", "\n\n"])
    parts = [text.push(byte) for byte in b"an EN ENDof"]
    assert "".join(parts) == "an EN " and text.ended
    assert parts[3] == parts[4] == ""  # EN might have been it
    assert text.end() == ""


def test_of_several_stop_texts_the_first_in_the_text_ends_it():
    class Words(CharTokenizer):
        def decode_bytes(self, ids) -> bytes:
            return b"one two three"

    text = TextStream(Words("a"), ["three", "two"])
    assert text.push(0) == "one " and text.ended


def test_text_held_back_for_a_stop_text_comes_at_the_end():
    text = TextStream(ByteTokenizer(), ["END"])
    assert [text.push(byte) for byte in b"EEN"] == ["", "E", ""]
    assert text.end() == "EN"


def test_the_end_of_text_ends_the_stream():
    text = TextStream(ByteTokenizer())
    assert [text.push(token) for token in (97, 256, 98)] == ["a", "", ""]
    assert text.ended


def test_texts_come_until_all_have_ended_and_no_more_tokens_are_asked_for():
    tokens = iter(torch.tensor([[97, 256], [98, 256], [256, 256], [99, 99]]))
    assert list(texts(tokens, ByteTokenizer(), 2)) == [["a", ""], ["b", ""], ["", ""], ["", ""]]
    assert next(tokens).tolist() == [99, 99]


def test_a_model_that_is_training_decodes_without_dropout_and_trains_on():
    model = GPT(dataclasses.replace(SMALL, dropout=0.5)).train()
    prompt = torch.randint(37, (1, 5))
    tokens = decoded(model, prompt, max_new_tokens=10, temperature=0)
    assert model.training and model.blocks[0].training
    assert decoded(model.eval(), prompt, max_new_tokens=10, temperature=0) == tokens


def test_a_prompt_may_be_one_row():
    model, prompt = randomised(SMALL), torch.randint(37, (5,))
    choice = {"max_new_tokens": 5, "temperature": 0}
    assert decoded(model, prompt, **choice) == decoded(model, prompt[None], **choice)


def test_no_number_of_tokens_is_too_many_to_begin_with():
    tokens = generate(randomised(SMALL), torch.tensor([[1]]), 10**15, temperature=0)
    assert len([next(tokens) for _ in range(3)]) == 3


@pytest.mark.parametrize("temperature", [1e-45, 1e-9])
def test_the_coldest_temperatures_choose_the_most_likely(temperature):
    logits = torch.randn(5, 37)
    assert choose(logits, temperature, None, 1.0, torch.Generator()).equal(logits.argmax(dim=-1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_named(bad, temperature):
    logits = torch.zeros(1, 5).index_fill(1, torch.tensor([2]), bad)
    with pytest.raises(ValueError, match="the model's logits are not finite: it diverged in training"):
        choose(logits, temperature, None, 1.0, torch.Generator())


# Beam search.


def log_probability(model, prompt, ids, never=()) -> float:
    """The log-probability of ids after a prompt, from the model without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids[:-1]]]))[0, len(prompt) - 1 :].double()
    if never:
        logits[:, list(never)] = -math.inf
    return sum(logits.log_softmax(dim=-1)[at, token].item() for at, token in enumerate(ids))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("never", [(), (3,)])
def test_a_search_with_enough_beams_is_exhaustive(seed, never):
    model = randomised(dataclasses.replace(SMALL, vocab_size=5), seed)
    prompt, ends, longest, allowed = [1, 4, 2], (0, 2), 4, [token for token in range(5) if token not in never]
    every = [ids for n in range(1, longest + 1) for ids in itertools.product(allowed, repeat=n)]
    done = [
        ids
        for ids in every
        if not set(ids[:-1]) & set(ends) and (ids[-1] in ends or len(ids) == longest)  # ended, or of full length
    ]
    scores = {ids: log_probability(model, prompt, ids, never) / ((5 + len(ids)) / 6) ** 0.6 for ids in done}
    best = max(scores, key=scores.get)
    found, score = beam_search(model, torch.tensor(prompt), 5**longest, longest, ends, never)
    assert tuple(found) == best and score == pytest.approx(scores[best], abs=1e-4)
    narrow, score = beam_search(model, torch.tensor(prompt), 2, longest, ends, never)
    assert scores[tuple(narrow)] == pytest.approx(score, abs=1e-4) and score <= scores[best] + 1e-4


def test_length_counts_in_the_score():
    class Sure(torch.nn.Module):
        """Ends at once with probability 0.5, or after three tokens with 0.45 in all."""

        def __init__(self):
            super().__init__()
            self.config, self.weight = dataclasses.replace(SMALL, vocab_size=3), torch.nn.Parameter(torch.zeros(()))
            self.train(False)

        def forward(self, tokens, caches=None):
            caches[0].filled = tokens.shape[1] + caches[0].filled
            after = {1: [0.5, 0.45, 0.05], 2: [1e-9, 1.0, 1e-9], 3: [1e-9, 1.0, 1e-9], 4: [1.0, 1e-9, 1e-9]}
            return torch.tensor(after[caches[0].filled]).log().expand(len(tokens), 1, 3)

    best, score = beam_search(Sure(), torch.tensor([2]), 3, 4, ends=[0])
    assert best == [1, 1, 1, 0] and score == pytest.approx(math.log(0.45) / (9 / 6) ** 0.6, abs=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_one_beam_is_greedy_past_the_context_too(name):
    model, prompt = for_decoding(randomised(VARIANTS[name])), torch.randint(37, (7,))
    greedy = decoded(model, prompt, max_new_tokens=30, temperature=0, never=[5, 6])[0]
    assert beam_search(model, prompt, 1, 30, never=[5, 6])[0] == greedy
    ends = [greedy[12]]
    assert beam_search(model, prompt, 1, 30, ends, [5, 6])[0] == greedy[: greedy.index(ends[0]) + 1]


def test_beams_past_the_context_have_the_scores_of_their_windows():
    model, prompt = randomised(SMALL), torch.randint(37, (13,))
    found, score = beam_search(model, prompt, 3, 9)
    ids, total = prompt.tolist(), 0.0
    for token in found:
        start = window_start(len(ids), 16)
        total += log_probability(model, ids[start:], [token])
        ids.append(token)
    assert len(found) == 9 and score == pytest.approx(total / (14 / 6) ** 0.6, abs=1e-3)


def test_a_search_is_over_when_no_beam_can_beat_the_best():
    model, asked = randomised(dataclasses.replace(SMALL, vocab_size=5)), []
    model.register_forward_pre_hook(lambda module, arguments: asked.append(arguments[0].shape))
    ids, score = beam_search(model, torch.tensor([1]), 4, 1000, ends=[0, 2, 3])
    assert 1 <= len(ids) <= len(asked) < 1000 and score < 0


def test_a_search_of_text_ends_with_the_end_of_text_or_a_stop_text():
    tokenizer = CharTokenizer("abcd").with_special(["<|endoftext|>", "<|end|>"])
    model = randomised(dataclasses.replace(SMALL, vocab_size=8))
    for prompt in range(4):
        text, count = search_text(model, tokenizer, [prompt], 10, 3)
        assert set(text) <= set("abcd") and count in (10, len(text) + 1)
        said, count = search_text(model, tokenizer, [prompt], 10, 3, stops=["a", "b", "c", "d"])
        assert said == "" and count == 1
        said, count = search_text(model, tokenizer, [prompt], 10, 300, ends=[5], stops=["a", "b", "c", "d"])
        assert said == "" and count == 1


def test_a_search_names_logits_that_are_not_finite():
    model = randomised(SMALL)
    model.head.weight.data *= torch.nan
    with pytest.raises(ValueError, match="the model's logits are not finite"):
        beam_search(model, torch.tensor([1]), 2, 5)


# Prompts of many lengths.


CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGH"
LETTERS = CharTokenizer(CHARACTERS).with_special(["<|endoftext|>", "<|end|>"])  # 36 of SMALL's 37
CHOICE = {"temperature": 0, "top_k": None, "top_p": 1.0}


def many_prompts(count: int, longest: int) -> list[tuple[list[int], int]]:
    """Prompts of all lengths up to the longest, in no order, and how much may follow each."""
    torch.manual_seed(5)
    lengths = [1 + at * (longest - 1) // (count - 1) for at in torch.randperm(count).tolist()]
    return [(torch.randint(34, (length,)).tolist(), 5 + 7 * at % 30) for at, length in enumerate(lengths)]


@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_of_many_lengths_are_continued_as_if_each_were_alone(name):
    model, prompts = for_decoding(randomised(VARIANTS[name])), many_prompts(9, 60)
    for stops, ends in ((), ()), (("b", "Hq"), (35,)):
        alone = {}
        for at, (prompt, limit) in enumerate(prompts):
            tokens = list(generate_text(model, LETTERS, [prompt], limit, ends, **CHOICE))
            steps = list(texts(iter(tokens), LETTERS, 1, stops, ends))
            alone[at] = ["".join(text for (text,) in steps), len(steps) - 1]
        for batch_size in (1, 4, 100):
            found = complete(model, LETTERS, prompts, batch_size, stops, ends, **CHOICE)
            assert {at: rest for at, *rest in found} == alone, batch_size


def test_the_same_seed_completes_alike_and_rows_differ():
    model, prompts = randomised(SMALL), [([1, 2], 20), ([1, 2], 20), ([1, 2, 3], 20), ([1, 2], 20)]
    choice = CHOICE | {"temperature": 1.0}
    runs = [
        dict((at, text) for at, text, _ in complete(model, LETTERS, prompts, 2, seed=s, **choice)) for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2] and len(set(runs[0].values())) == 4


def test_rows_that_ended_cost_nothing_for_long_and_known_tokens_are_read_at_once():
    model, asked = randomised(SMALL), []
    model.register_forward_pre_hook(lambda module, arguments: asked.append(tuple(arguments[0].shape)))
    list(complete(model, LETTERS, [([1, 2], 1)] * 7 + [([1, 2], 6)], 8, **CHOICE))
    assert asked == [(8, 2), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    asked.clear()
    list(complete(model, LETTERS, [([1, 2], 2), ([3] * 12, 2)], 8, **CHOICE))
    assert asked == [(2, 2), (2, 1), (1, 9), (1, 1)]


def test_only_text_and_its_ends_are_chosen():
    model, prompts = randomised(SMALL), [([1], 30)] * 16
    choice = CHOICE | {"temperature": 5.0}
    said = "".join(text for _, text, _ in complete(model, LETTERS, prompts, 16, **choice))
    assert set(said) == set(CHARACTERS)
    assert not_text(LETTERS, model) == [35, 36] and not_text(LETTERS, model, ends=[35]) == [36]
    counts = [count for *_, count in complete(model, LETTERS, prompts, 16, ends=range(36), **choice)]
    assert counts == [1] * 16
