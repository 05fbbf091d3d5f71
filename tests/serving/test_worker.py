"""The decoding thread: each client gets its own text, whatever the others do."""

import queue
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
from helpers import SMALL, random_model

from engine.core.errors import UserError
from engine.data.tokenizer import CharTokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import row_seeds
from engine.generation.text_batch import TextBatch, TextRequest, Token, complete_streams
from engine.generation.text_stream import TextStream
from engine.serving.worker import BatchWorker

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHIJK")


class Client:
    """A request, and what a worker sends for it."""

    def __init__(self, number: int, prompt_length: int = 5, max_tokens: int = 20, **options: Any):
        self.settings = (LETTERS, [number] * prompt_length, max_tokens)
        self.arrivals: queue.SimpleQueue[Token | Exception | None] = queue.SimpleQueue()
        (seed,) = row_seeds(1, [self.settings[1]])
        stream = TextStream(*self.settings)
        self.request = TextRequest(stream, seed, {}, self.arrivals.put, **options)

    def has_text_alone(self, model) -> bool:
        """Return whether the text is the one without other clients. Raises a received error."""
        text = ""
        while arrival := self.arrivals.get(timeout=30):
            if isinstance(arrival, Exception):
                raise arrival
            text += arrival.text
        pieces = complete_streams(DecodingEngine(model), [TextStream(*self.settings)], seed=1)
        return text == "".join(piece for _, piece in pieces)


@pytest.fixture
def worker(monkeypatch) -> Iterator[BatchWorker]:
    monkeypatch.setattr("engine.serving.worker.MAX_PREFILL_TOKENS", 4)
    worker = BatchWorker(TextBatch(DecodingEngine(random_model(SMALL)), 3), max_waiting=8)
    yield worker
    worker.stop()


@pytest.mark.parametrize("num_choices", [0, 1, 7])
def test_a_long_prompt_does_not_stop_the_others_and_its_scores_are_computed_once(
    worker, num_choices
):
    model = worker.batch.engine.model
    shapes = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    first = Client(1, prompt_length=1)
    echo = {"reports_prompt": True, "num_logprobs": 2}
    choices = [Client(2, 14, max_tokens=0, **echo) for _ in range(num_choices)]
    clients = [first, *choices] if choices else [first, Client(2, prompt_length=14)]
    worker.submit([client.request for client in clients])
    assert first.has_text_alone(model)
    for choice in choices:
        tokens = [*iter(partial(choice.arrivals.get, timeout=30), None)]
        assert [token.id for token in tokens] == [2] * 14
        assert [len(token.top_logprobs) >= 2 for token in tokens] == [False, *[True] * 13]
    assert choices or clients[1].has_text_alone(model)
    assert shapes[:8] == [(1, 1), (1, 1), *[(1, 4), (1, 1)] * 3]
    assert shapes.count((1, 2)) == 1 and shapes.count((1, 4)) == 3


@pytest.mark.parametrize("num_tokens", [None, 0, 3])
@pytest.mark.parametrize("error", [UserError("a mistake"), RuntimeError("a bug")], ids=repr)
def test_an_error_goes_to_the_requests_it_concerns_and_the_thread_continues(
    worker, caplog, num_tokens, error
):
    first, failing, second, later = [Client(number) for number in range(4)]
    if num_tokens is None:  # its prompt cannot be added
        effects = [DEFAULT, error, DEFAULT, DEFAULT]
        worker.batch.engine.add = Mock(wraps=worker.batch.engine.add, side_effect=effects)
    else:
        stream = failing.request.stream
        effects = [*[DEFAULT] * num_tokens, error]
        stream.push = Mock(wraps=stream.push, side_effect=effects)
    worker.submit([client.request for client in (first, failing, second)])
    with pytest.raises(type(error)):
        failing.has_text_alone(worker.batch.engine.model)
    worker.submit([later.request])
    for client in (later,) if num_tokens else (first, second, later):
        assert client.has_text_alone(worker.batch.engine.model)
    assert bool(caplog.records) == isinstance(error, RuntimeError)
