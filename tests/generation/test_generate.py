"""Decoding: the KV cache, the window, sampling, prompts of many lengths."""

import dataclasses
import itertools

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model

from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.generation.generate import (
    banned_tokens,
    complete_streams,
    generate,
    initial_tokens,
    window_start,
)
from engine.generation.kv_cache import KVCache, new_caches
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGH"
LETTERS = CharTokenizer(CHARACTERS).with_special(["<|endoftext|>", "<|end|>"])  # 36 ids of 37
GREEDY = {"temperature": 0, "top_k": None, "top_p": 1.0}


def decode(model, prompt, **options) -> list[list[int]]:
    return torch.stack(list(generate(model, prompt, **options)), dim=1).tolist()


@pytest.mark.parametrize("window", [0, 1, 2, 5, 60])
@pytest.mark.parametrize(
    "lengths", [[1] * 50, [30] + [1] * 20, [3, 9, 1, 1, 20, 2, 14], [50]], ids=len
)
def test_a_cache_returns_all_visible_positions_in_constant_memory(window, lengths):
    cache = KVCache(2, 3, 50, 4, torch.empty(0, dtype=torch.bfloat16), window)
    size = cache.keys_values.numel()
    keys_values = torch.randn(2, 2, 3, 50, 4).bfloat16()
    swap = torch.tensor([1, 0])
    for end, length in zip(itertools.accumulate(lengths), lengths, strict=True):
        returned = torch.stack(cache.append(*keys_values[:, :, :, end - length : end]))
        num_visible = min(end, length + (window or 50) - 1)
        assert returned[:, :, :, -num_visible:].equal(keys_values[:, :, :, end - num_visible : end])
        assert cache.filled == end
        cache.select(swap)
        keys_values = keys_values[:, swap]
    assert cache.keys_values.numel() == size == 2 * 2 * 3 * min(50, 2 * window or 50) * 4


def test_a_cache_continues_with_selected_rows_that_may_repeat():
    cache = KVCache(3, 2, 10, 4, torch.empty(0))
    key, value = torch.randn(2, 3, 2, 5, 4)
    cache.append(key[:, :, :3], value[:, :, :3])
    rows = torch.tensor([2, 0, 2, 2])
    cache.select(rows)
    keys, values = cache.append(key[rows, :, 3:], value[rows, :, 3:])
    assert keys.equal(key[rows]) and values.equal(value[rows]) and cache.filled == 5


def test_a_rolling_cache_is_moved_once_per_window():
    cache = KVCache(1, 1, 1000, 1, torch.empty(0), 10)
    sizes = []
    for _ in range(500):
        cache.append(*torch.zeros(2, 1, 1, 1, 1))
        sizes.append(cache.stored)
    assert sum(after < before for before, after in itertools.pairwise(sizes)) <= 50


def test_caches_have_the_shape_of_attention_and_room_for_no_more_than_needed():
    caches = new_caches(random_model(SMALL).bfloat16(), 5)
    assert [cache.filled for cache in caches] == [0] * SMALL.num_layers
    assert caches[0].length == 16 and caches[0].keys_values.dtype == torch.bfloat16
    assert caches[0].keys_values.shape == (2, 5, 3, 16, 8)
    long = random_model(dataclasses.replace(SMALL, context_length=10**5))
    assert new_caches(long, 1, max_length=8)[0].keys_values.shape[3] == 8


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 40])
def test_cached_equals_uncached_beyond_the_context_too(name, prompt_length):
    model = random_model(VARIANTS[name])
    torch.manual_seed(1)
    prompt = torch.randint(37, (2, prompt_length))
    for sampling in ({"temperature": 0.0}, {"repetition_penalty": 1.5, "min_p": 0.01}):
        options = {"max_new_tokens": 40, "seed": 3, **sampling}
        tokens = decode(build_decoder(model), prompt, **options)
        assert tokens == decode(model, prompt, use_cache=False, **options)
        assert len(tokens) == 2 and len(tokens[0]) == 40


def test_the_window_grows_then_moves_by_half():
    starts = [window_start(length, 8) for length in range(1, 22)]
    assert starts == [0] * 8 + [4] * 4 + [8] * 4 + [12] * 4 + [16]
    assert [window_start(length, 1) for length in (1, 2, 3)] == [0, 1, 2]


def test_a_token_depends_on_its_window_only():
    model = random_model(SMALL)
    prompt = torch.randint(37, (1, 40))
    start = window_start(40, 16)
    changed = torch.cat(((prompt[:, :start] + 1) % 37, prompt[:, start:]), dim=1)
    expected = [[model(prompt[:, start:])[0, -1].argmax()]]
    for tokens in (prompt, changed):
        assert decode(model, tokens, max_new_tokens=1, temperature=0) == expected


def test_a_seed_determines_the_text_and_global_random_numbers_are_untouched():
    model = random_model(SMALL)
    state = torch.get_rng_state()
    prompt = torch.tensor([[1]])
    texts = [decode(model, prompt, max_new_tokens=30, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(torch.get_rng_state(), state)


# Sampling.


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_banned_ids_are_never_chosen(temperature):
    options = {"max_new_tokens": 20, "banned": range(5, 37), "temperature": temperature}
    rows = decode(random_model(SMALL), torch.tensor([[1]] * 8), **options)
    assert max(max(row) for row in rows) < 5


def test_generated_text_has_only_ids_of_text_or_ends_of_it():
    model = random_model(SMALL)  # 37 ids
    assert banned_tokens(LETTERS, model) == [35, 36]
    assert banned_tokens(LETTERS, model, ends=[35]) == [36]
    texts = complete_all(model, [([0, 2], 60)] * 9, 9, temperature=5.0)
    assert set("".join(texts)) == {*CHARACTERS} and any(len(text) < 60 for text in texts)


def test_initial_tokens_are_the_end_of_a_document_or_a_newline():
    assert initial_tokens(ByteTokenizer(), num_documents=2) == [256]
    assert initial_tokens(ByteTokenizer(), num_documents=1) == [10]
    assert initial_tokens(CharTokenizer("\nab"), num_documents=5) == [0]
    assert initial_tokens(CharTokenizer("ab"), num_documents=5) == [0]


# Prompts of many lengths.


def complete_all(model, prompts, batch_size, stop=(), ends=(), **options) -> list[str]:
    streams = [TextStream(LETTERS, ids, limit, stop, ends) for ids, limit in prompts]
    texts = [""] * len(prompts)
    for index, text in complete_streams(model, streams, batch_size, **options):
        texts[index] += text
    assert all(stream.ended for stream in streams)
    return texts


@pytest.mark.parametrize("name", VARIANTS)
def test_batched_equals_single(name):
    model = build_decoder(random_model(VARIANTS[name]))
    torch.manual_seed(5)
    prompts = []
    for index, length in enumerate([52, 1, 23, 8, 60, 16, 45, 30, 17]):
        prompts.append((torch.randint(34, (length,)).tolist(), 5 + 7 * index % 30))
    for stop, ends in ((), ()), (("b", "Hq"), (35,)):
        single = []
        for prompt, limit in prompts:
            stream = TextStream(LETTERS, stop=stop, ends=ends)
            banned = banned_tokens(LETTERS, model, ends)
            steps = generate(model, torch.tensor(prompt), limit, banned=banned, **GREEDY)
            single.append("".join(stream.push(int(ids)) for ids in steps) + stream.end())
        for batch_size in (1, 4, 100):
            assert complete_all(model, prompts, batch_size, stop, ends, **GREEDY) == single


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "top_p": 0.9}], ids=len)
def test_a_seed_determines_the_text_of_a_prompt_whatever_is_in_its_batch(options):
    model = build_decoder(random_model(SMALL))
    prompts = [([1, 2], 20), ([1, 2], 20), ([3] * 30, 9), ([1, 2, 3], 20), ([1, 2], 30)]
    texts = complete_all(model, prompts, 1, seed=4, **options)
    assert len({text[:9] for text in texts}) == len(texts)
    for batch_size in (2, 3, 5):
        assert complete_all(model, prompts, batch_size, seed=4, **options) == texts
    for stop in ("b", "Hq"):  # rows that end early leave the batch
        stopped = [text.partition(stop)[0] for text in texts]
        assert complete_all(model, prompts, 5, [stop], seed=4, **options) == stopped
    rearranged = [prompts[3], ([7], 40), prompts[2], prompts[0]]
    expected = [texts[3], texts[2], texts[0]]
    actual = complete_all(model, rearranged, 4, seed=4, **options)
    assert [actual[0], *actual[2:]] == expected
    banned = banned_tokens(LETTERS, model)
    rows = decode(
        model, torch.tensor([[1, 2]] * 2), max_new_tokens=20, seed=4, banned=banned, **options
    )
    for row, text in zip(rows, texts, strict=False):
        assert "".join(map(TextStream(LETTERS).push, row)) == text
    assert complete_all(model, prompts, 5, seed=5, **options) != texts


def test_finished_rows_are_removed_and_prompts_are_read_at_once():
    model = random_model(SMALL)
    shapes = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    complete_all(model, [([1, 2], 1)] * 7 + [([1, 2], 6)], 8, **GREEDY)
    assert shapes == [(8, 2), (1, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
    shapes.clear()
    complete_all(model, [([1, 2], 2), ([3] * 12, 2)], 8, **GREEDY)
    assert shapes == [(2, 2), (2, 1), (1, 9), (1, 1)]
