"""The decoding engine: cached rows have the logits of their tokens alone."""

import dataclasses
import math
import random

import pytest
import torch
from helpers import SMALL, VARIANTS, decode, random_model
from reference import decoding_definition

from engine.generation import decoding_engine
from engine.generation.decoding_engine import DecodingEngine, window_start
from engine.nn.acceleration import CapturedCalls
from engine.nn.inference import build_decoder

CHANGES = [{"windows": (1, 5)}, {"windows": (3, 60), "num_kv_heads": 1}, {"context_length": 1}]
CHANGES += [{"context_length": 7, "windows": (0, 2)}]
CHANGES += [{"attention": "loop", "windows": (3, 60), "num_kv_heads": 1}]
CONFIGS = VARIANTS | {str(change): dataclasses.replace(SMALL, **change) for change in CHANGES}


def start_engine(model, *lengths: int, num_new_tokens: int = 0) -> DecodingEngine:
    """Return an engine that has read prompts of these lengths."""
    engine = DecodingEngine(model)
    for row, length in enumerate(lengths):
        engine.add([row + 1] * length, num_new_tokens)
        engine.read(row)
    return engine


def test_the_window_grows_then_moves_by_half():
    starts = [window_start(length, 8) for length in range(1, 22)]
    assert starts == [0] * 8 + [4] * 4 + [8] * 4 + [12] * 4 + [16]
    assert [window_start(length, 1) for length in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lengths", [(16, 16), (1, 5, 16, 40)], ids=str)
def test_cached_equals_uncached_beyond_the_context_too(each_path, name, lengths):
    model = random_model(CONFIGS[name])
    prompts = [torch.randint(37, (length,)).tolist() for length in lengths]
    for options in ({"temperature": 0.0}, {"repetition_penalty": 1.5, "min_p": 0.01}):
        ids = decode(build_decoder(model), prompts, 26, seed=3, **options)
        assert ids == decoding_definition(model, prompts, 26, seed=3, **options)
        assert [*map(len, ids)] == [26] * len(prompts)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_rows_that_are_read_in_chunks_kept_dropped_and_repeated_depend_on_their_ids_only(
    each_path, name, monkeypatch
):
    model = random_model(CONFIGS[name])
    draw = random.Random(name)
    engine = DecodingEngine(model)
    texts: list[list[int]] = []

    def check(logits: torch.Tensor, texts: list[list[int]]) -> None:
        windows = [text[window_start(len(text), model.config.context_length) :] for text in texts]
        expected = torch.cat([model(torch.tensor([window]))[:, -1] for window in windows])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)

    def step(num_rows: int) -> None:
        ids = draw.choices(range(37), k=num_rows)
        for text, token in zip(texts, ids, strict=False):
            text.append(token)
        check(engine.step(ids), texts[:num_rows])

    limits = (decoding_engine.MAX_PADDING_BYTES, -1)  # in one product, or row by row
    for num_kept in (1, 2, 4, 5, 2, 7, 1, 3):
        monkeypatch.setattr(decoding_engine, "MAX_PADDING_BYTES", draw.choice(limits))
        texts.append(draw.choices(range(37), k=draw.randrange(1, 40)))
        engine.add(texts[-1])
        while engine.rows[-1].num_unread:
            logits = engine.read(len(texts) - 1, draw.choice([1, 3, 7, None]))
            if len(texts) > 1:
                step(len(texts) - 1)
        check(logits, texts[-1:])
        for _ in range(draw.randrange(12)):
            step(len(texts))
        rows = draw.choices(range(len(texts)), k=num_kept)
        engine.keep(rows)
        texts = [[*texts[row]] for row in rows]


def test_a_row_does_not_depend_on_what_its_memory_held_before(each_path):
    model = random_model(SMALL)
    model.token_embedding.weight.data[2] = torch.nan  # the id of the second row
    engine = start_engine(model, 9, 9)
    engine.keep([0])
    engine.add([3, 4])
    engine.read(1)
    assert engine.step([5, 5]).isfinite().all()


def test_memory_doubles_as_rows_and_positions_grow(plain_steps):
    model = random_model(dataclasses.replace(SMALL, context_length=300)).bfloat16()
    engine = start_engine(model, 5)
    cache = engine.caches[-1]
    shapes = [cache.keys_values.shape]
    for num_rows in (*[1] * 300, 2, 3, 4, 5, 1):
        engine.keep([0] * num_rows)
        engine.step([0] * num_rows)
        shapes.append(cache.keys_values.shape)
    sizes = [(1, 128), (1, 256), (1, 300), (2, 300), (4, 300), (8, 300)]
    assert [*dict.fromkeys(shapes)] == [(2, rows, 3, length, 8) for rows, length in sizes]
    assert cache.keys_values.dtype == torch.bfloat16
    assert DecodingEngine(model, torch.float32).caches[0].keys_values.dtype == torch.float32


@pytest.mark.parametrize(("num_rows", "expected"), [(0.0, 1), (7.5, 7), (33.0, 32), (math.inf, 32)])
def test_caches_are_limited_to_a_quarter_of_the_memory(num_rows, expected, monkeypatch):
    memory = 4 * num_rows * 2 * 4 * SMALL.num_layers * SMALL.d_model * SMALL.context_length
    monkeypatch.setattr("engine.generation.decoding_engine.usable_memory", lambda device: memory)
    model = random_model(SMALL)
    engine = DecodingEngine(model)
    assert engine.max_rows(32, 10**9) == engine.max_rows(32, 8) == expected  # 8 become 16
    assert engine.max_rows(99, 4) == max(1, min(99, int(2 * min(num_rows, 99))))
    assert DecodingEngine(model, torch.float64).max_rows(32, 16) in (expected // 2 or 1, 32)


def test_few_numbers_of_rows_are_captured_while_memory_stays(graphs):
    model = random_model(dataclasses.replace(SMALL, context_length=300))
    engine = start_engine(model, 5, 9, 7, num_new_tokens=200)
    address = engine.caches[0].keys_values.data_ptr()
    for _ in range(130):
        engine.step([3, 4, 5])
    assert graphs.captures == 1
    engine.keep([])
    for num_rows in (1, 2, 3, 2):  # a second text, and others that join it
        engine.add([2, 1], num_new_tokens=100)
        engine.read(len(engine.rows) - 1)
        for _ in range(3):
            engine.step([3] * min(num_rows, len(engine.rows)))
    assert graphs.captures == 1 + 3  # a new number of rows drops the graphs of others
    assert engine.caches[0].keys_values.data_ptr() == address
    engine.add([2] * 250)  # more positions than are reserved
    engine.read(len(engine.rows) - 1)
    for _ in range(3):
        engine.step([3])
    assert graphs.captures == 1 + 4
    assert engine.caches[0].keys_values.data_ptr() != address


def test_logits_of_a_step_stay_when_the_next_is_made(each_path):
    engine = start_engine(random_model(SMALL), 4)
    logits = [engine.step([index]) for index in range(5)]
    copies = [step_logits.clone() for step_logits in logits]
    engine.step([7])
    assert all(map(torch.equal, logits, copies))
    assert len({*map(tuple, torch.cat(logits).tolist())}) == 5


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_token_that_cannot_be_captured_or_differs_is_computed_plainly(
    is_captured, graphs, capfd, monkeypatch
):
    model = random_model(SMALL)
    decoding_engine.warn_of_capture.cache_clear()
    expected = decode(model, [[1, 2], [3]], 20, temperature=0)
    original = CapturedCalls.__call__

    def call(calls, *inputs):
        logits = original(calls, *inputs)
        return logits.flip(-1) if calls.num_captures and calls.pool.is_enabled else logits

    if is_captured:
        monkeypatch.setattr(CapturedCalls, "__call__", call)
    else:
        model.blocks[0].register_forward_hook(lambda block, _, y: y * (y.sum().item() != 0))
    assert decode(model, [[1, 2], [3]], 20, temperature=0) == expected
    assert capfd.readouterr().err.count("warning") == 1


def test_what_a_long_text_may_need_is_not_reserved_at_once(graphs):
    model = random_model(dataclasses.replace(SMALL, context_length=2000))
    engine = start_engine(model, 9, num_new_tokens=10**6)
    assert engine.caches[0].keys_values.shape[3] == 9 + decoding_engine.MAX_RESERVED_TOKENS
