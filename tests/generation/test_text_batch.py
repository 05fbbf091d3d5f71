"""Texts that are decoded together: each depends on its own prompt, seed and settings only."""

import dataclasses
import itertools
import math
import random
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from helpers import SMALL, VARIANTS, numbers_text, random_model, train_sentencepiece
from reference import decoding_definition

from engine.core.errors import UserError
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.generation import decoding_engine, text_batch
from engine.generation.beam_search import search_text
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import row_seeds
from engine.generation.text_batch import TextBatch, TextRequest, Token
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGH"
LETTERS = CharTokenizer(CHARACTERS).with_special(["<|endoftext|>", "<|end|>"])  # 36 ids of 37
BANNED = [35, 36]
SPECIAL = [34, 35]
SEED = 4
FILTERS = [{"temperature": 0.0}, {}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.9, "min_p": 0.1}]
FILTERS += [{"temperature": 0.0, "frequency_penalty": 0.5}, {"presence_penalty": -2.0}]


def draw_request(draw: random.Random, **changes: Any) -> TextRequest:
    """Return a request for a text, which is drawn at random except for the changes."""
    prompt = changes.pop("prompt", draw.choices(range(34), k=draw.randrange(1, 40)))
    limit = changes.pop("limit", draw.randrange(40))
    stream = TextStream(LETTERS, prompt, limit, changes.pop("stop", draw.choice([(), "ab"])))
    penalty = changes.pop("repetition_penalty", draw.choice([1.0, 1.3, 2.0]))
    options = {"repetition_penalty": penalty, **draw.choice(FILTERS)}
    return TextRequest(stream, row_seeds(SEED, [prompt])[0], options, [].append, **changes)


def run(
    batch: TextBatch, requests: list[TextRequest], max_tokens: int = 9, cancelling: Any = None
) -> dict[TextRequest, list[Any]]:
    """Return what each request receives until all end. With random numbers, some are canceled."""
    arrivals: dict[TextRequest, list[Any]] = {request: [] for request in requests}

    def receive(request: TextRequest, arrival: Any) -> None:
        assert not (isinstance(arrival, Token) and request.is_cancelled)
        arrivals[request].append(arrival)

    for request in requests:
        request.receive = partial(receive, request)
    waiting = deque(requests)
    while waiting or batch.unread or batch.requests:
        batch.add(waiting)
        if batch.unread:
            batch.read(max_tokens)
        texts = [request for request in batch.unread if not request.stream.is_finished]
        assert len(batch.requests) + len(texts) <= batch.max_rows
        batch.step()
        assert len(batch.engine.rows) == len(batch.requests) + bool(batch.unread)
        if cancelling and cancelling.random() < 0.1:
            cancelling.choice([*batch.requests, *batch.unread, *requests]).is_cancelled = True
    return arrivals


def text_of(tokens: list[Any]) -> str:
    return "".join(token.text for token in tokens if isinstance(token, Token))


def text_alone(model, request: TextRequest) -> str:
    """Return the text of a request by the definition of decoding."""
    stream = request.stream
    settings = (stream.max_tokens, SEED, BANNED)
    options = {"special": SPECIAL, **request.options}
    (ids,) = decoding_definition(model, [stream.prompt], *settings, **options)
    return "".join(map(TextStream(LETTERS, stream.prompt, len(ids), stream.stop).push, ids))


@pytest.mark.parametrize(
    ("name", "max_rows", "max_tokens", "are_cancelled"),
    [*((name, 4, 9, False) for name in VARIANTS), ("default", 1, 9, True), ("qwen3", 20, 2, True)],
)
def test_texts_of_requests_that_join_leave_and_fail_in_a_batch_are_those_alone(
    each_path, name, max_rows, max_tokens, are_cancelled
):
    model = random_model(VARIANTS[name])
    draw = random.Random(name)
    requests = [draw_request(draw) for _ in range(10)]
    requests += [draw_request(draw, prompt=requests[-1].stream.prompt) for _ in range(3)]
    failing = draw_request(draw, prompt=[1, 2], limit=9, repetition_penalty=math.nan)
    requests += [draw_request(draw, prompt=[1, 2]), failing, draw_request(draw, prompt=[1, 2])]
    batch = TextBatch(DecodingEngine(build_decoder(model)), max_rows, BANNED)
    received = run(batch, requests, max_tokens, draw if are_cancelled else None)
    for request, arrivals in received.items():
        text = text_of(arrivals)
        if request is failing:
            assert text == "" and (are_cancelled or isinstance(arrivals[0], UserError))
        elif request.is_cancelled:
            assert text_alone(model, request).startswith(text)
        else:
            assert text == text_alone(model, request)
            assert arrivals.index(None) == len(request.stream.new_ids) == len(arrivals) - 1
    assert sum(request.is_cancelled for request in requests) > 1 or not are_cancelled
    assert batch.engine.rows == []


@pytest.mark.parametrize("kind", ["prompt", "text"])
def test_a_text_whose_logits_are_not_finite_ends_alone(plain_steps, kind):
    model = random_model(SMALL)
    draw = random.Random(5)
    prompts = ([1] * 9, [35 if kind == "prompt" else 2] * 9, [3, 4])
    options = {"stop": (), "limit": 9}
    requests = [draw_request(draw, prompt=prompt, **options) for prompt in prompts]
    for request in requests:
        request.options = {"repetition_penalty": 1.3}  # their tokens are drawn together
    expected = [text_alone(model, request) for request in requests]

    def spoil(module, inputs, logits: torch.Tensor) -> None:
        if len(logits) == 3:
            logits[1] = torch.nan

    batch = TextBatch(DecodingEngine(model), 3, BANNED)
    if kind == "prompt":
        model.token_embedding.weight.data[35] = torch.nan  # an id that no text has
    else:
        model.register_forward_hook(spoil)
    first, (*tokens, error), last = run(batch, requests).values()
    assert bool(tokens) == (kind != "prompt") and isinstance(error, UserError)
    assert text_of(first) == expected[0]
    assert text_of(last) == expected[2]  # of a prompt, it has the row of the second


def test_logprobs_are_those_of_the_model_and_the_same_for_a_text_and_for_its_echo():
    model = random_model(SMALL)
    draw = random.Random(5)
    options = {"stop": (), "repetition_penalty": 1.5, "reports_prompt": True}
    request = draw_request(draw, prompt=[1, 2, 3, 4, 5], limit=9, num_logprobs=3, **options)
    batch = TextBatch(DecodingEngine(model), 2, BANNED)
    tokens = run(batch, [request, draw_request(draw)])[request][:-1]
    ids = [token.id for token in tokens]
    assert ids[:5] == [1, 2, 3, 4, 5] and [token.offset for token in tokens] == [*range(14)]
    assert "".join(token.text for token in tokens) == LETTERS.decode(ids)
    expected = model(torch.tensor([ids]))[0].log_softmax(dim=-1)
    for token, row in zip(tokens[1:], expected, strict=False):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        values = [value for _, value in token.top_logprobs]
        assert values == sorted(values, reverse=True) and 3 <= len(values) <= 4
        assert values[0] == pytest.approx(row[:35].max().item(), abs=1e-4)
        assert (token.id, token.logprob) in token.top_logprobs
        assert not {*BANNED} & {token_id for token_id, _ in token.top_logprobs}
    echo = draw_request(draw, prompt=ids, limit=0, num_logprobs=0, **options)
    first, *rest, end = run(batch, [echo], 2)[echo]
    assert (first.logprob, first.top_logprobs, tokens[0].logprob, end) == (None, [], None, None)
    scores = [token.logprob for token in tokens[1:]]
    assert [token.logprob for token in rest] == pytest.approx(scores, abs=1e-4)
    assert all(len(token.top_logprobs) == 1 for token in rest)


@pytest.mark.parametrize("reports_prompt", [False, True])
@pytest.mark.parametrize("prompt", ["7 is followed", "</s>"])
def test_offsets_are_those_of_the_text_also_if_the_tokenizer_adds_a_space(prompt, reports_prompt):
    tokenizer = train_sentencepiece([numbers_text(200)])
    end = tokenizer.special_tokens["</s>"]
    ids = [end] if prompt == "</s>" else tokenizer.encode(prompt).tolist()
    pieces = {token: tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)}
    word = next(token for token, piece in pieces.items() if piece.startswith(b" "))
    model = random_model(dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size))
    batch = TextBatch(DecodingEngine(model), 1, banned=[*pieces.keys() - {word}])
    stream = TextStream(tokenizer, ids, 3)
    request = TextRequest(stream, 0, {}, [].append, reports_prompt=reports_prompt)
    (*tokens, _) = run(batch, [request])[request]
    text = (pieces[word] * 3).decode()[prompt == "</s>" :]
    assert text_of(tokens) == (prompt + text if reports_prompt else text)
    lengths = [len(token.text) for token in tokens]
    offsets = [token.offset for token in tokens]
    assert offsets == [sum(lengths[:index]) for index in range(len(offsets))]


def complete_all(model, prompts, limit: int, batch_size: int, stop=(), **options) -> list[str]:
    """Return the texts after prompts."""
    streams = [TextStream(LETTERS, ids, limit, stop) for ids in prompts]
    texts = [""] * len(prompts)
    engine = DecodingEngine(model)
    options["batch_size"] = batch_size
    for index, text in text_batch.complete_streams(engine, streams, **options):
        texts[index] += text
    return texts


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3, "top_p": 0.9}], ids=len)
def test_a_seed_determines_the_texts_of_prompts_in_any_batch(options):
    model = random_model(SMALL)
    state = torch.get_rng_state()
    prompts = [[1, 2], [1, 2], [3] * 30, [1, 2, 3], [1, 2]]
    rows = decoding_definition(model, prompts, 20, SEED, BANNED, special=SPECIAL, **options)
    texts = ["".join(map(TextStream(LETTERS, [0]).push, row)) for row in rows]
    assert len({text[:9] for text in texts}) == len(texts)
    for batch_size, stop in itertools.product((1, 2, 3, 100), ("", "b")):
        expected = [text.partition(stop)[0] if stop else text for text in texts]
        assert complete_all(model, prompts, 20, batch_size, stop, seed=SEED, **options) == expected
    assert complete_all(model, prompts, 20, 5, seed=5, **options) != texts
    assert torch.get_rng_state().equal(state)


def test_rows_are_limited_by_memory_wherever_texts_start(monkeypatch):
    model = random_model(SMALL)
    expected = complete_all(model, [[1, 2]] * 9, 20, 9)
    row_bytes = 4 * 2 * SMALL.num_layers * SMALL.d_model * SMALL.context_length
    monkeypatch.setattr(decoding_engine, "usable_memory", lambda device: 3.5 * 4 * row_bytes)
    sizes = set()
    model.register_forward_pre_hook(lambda module, inputs: sizes.add(len(inputs[0])))
    assert complete_all(model, [[1, 2]] * 9, 20, 9) == expected and max(sizes) == 3
    assert TextBatch(DecodingEngine(model), 9).max_rows == 3
    stream = TextStream(LETTERS, [1, 2], 20)
    with pytest.raises(UserError, match=r"--beams.* 3 .*\(got 4\)"):
        search_text(model, stream, 4)
    assert len(search_text(model, stream, 3)) > 0


def test_equal_prompts_are_read_once_and_a_finished_text_makes_room_at_once():
    model = random_model(SMALL)
    shapes = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    prompts = [([1], 1), ([1], 4), ([2, 2], 1), ([3, 3, 3], 2), ([1], 1)]
    streams = [TextStream(LETTERS, ids, limit) for ids, limit in prompts]
    assert len([*text_batch.complete_streams(DecodingEngine(model), streams, batch_size=2)]) == 9
    assert shapes == [(1, 1), (1, 2), (1, 3), (2, 1), (1, 1), (1, 1), (1, 1)]


def test_generated_text_has_only_ids_of_text_or_ends_of_it():
    model = random_model(SMALL)
    assert text_batch.banned_tokens(LETTERS, model, ()) == BANNED
    assert text_batch.banned_tokens(LETTERS, model, stop_token_ids=[35]) == [36]
    texts = complete_all(model, [[0, 2]] * 9, 60, 9, temperature=5.0)
    assert set("".join(texts)) == {*CHARACTERS} and any(len(text) < 60 for text in texts)


def test_initial_tokens_are_the_end_of_a_document_or_a_newline():
    assert text_batch.initial_tokens(ByteTokenizer(), num_documents=2) == [256]
    assert text_batch.initial_tokens(ByteTokenizer(), num_documents=1) == [10]
    assert text_batch.initial_tokens(CharTokenizer("\nab"), num_documents=5) == [0]
    assert text_batch.initial_tokens(CharTokenizer("ab"), num_documents=5) == [0]
