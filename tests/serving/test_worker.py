"""The decoding thread: each client gets its own text, whatever the others do."""

import queue
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from helpers import SMALL, random_model

from engine.core.errors import UserError
from engine.data.tokenizer import CharTokenizer
from engine.generation.sampling import row_seeds
from engine.generation.text_batch import TextBatch, Token, complete_streams
from engine.generation.text_stream import TextStream
from engine.serving.worker import BatchWorker, ClientRequest

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGHIJK")


class Client:
    """A request, and what a worker sends for it."""

    def __init__(self, number: int, prompt_length: int = 5, max_tokens: int = 20):
        self.settings = (LETTERS, [number] * prompt_length, max_tokens)
        self.arrivals: queue.SimpleQueue[Token | Exception | None] = queue.SimpleQueue()
        (seed,) = row_seeds(1, [self.settings[1]])
        stream = TextStream(*self.settings)
        self.request = ClientRequest(stream, seed, {}, receive=self.arrivals.put)

    def has_text_alone(self, model) -> bool:
        """Return whether the text is the one without other clients. Raises a received error."""
        text = ""
        while arrival := self.arrivals.get(timeout=30):
            if isinstance(arrival, Exception):
                raise arrival
            text += arrival.text
        pieces = complete_streams(model, [TextStream(*self.settings)], seed=1)
        return text == "".join(piece for _, piece in pieces)


@pytest.fixture
def worker(monkeypatch) -> Iterator[BatchWorker]:
    monkeypatch.setattr("engine.serving.worker.MAX_PREFILL_TOKENS", 4)
    worker = BatchWorker(TextBatch(random_model(SMALL), 3), max_waiting=8)
    yield worker
    worker.stop()


def test_a_long_prompt_does_not_stop_the_others(worker):
    model = worker.batch.engine.model
    shapes = []
    model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    clients = [Client(1, prompt_length=1), Client(2, prompt_length=14)]
    worker.submit([client.request for client in clients])
    assert all(client.has_text_alone(model) for client in clients)
    assert shapes[:8] == [(1, 1), (1, 1), *[(1, 4), (1, 1)] * 3]


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("error", [UserError("a mistake"), RuntimeError("a bug")], ids=repr)
def test_an_error_goes_to_the_requests_it_concerns_and_the_thread_continues(
    worker, caplog, num_tokens, error
):
    first, failing, second, later = [Client(number) for number in range(4)]
    failing.request.stream.push = Mock(side_effect=[*["a"] * num_tokens, error])
    worker.submit([client.request for client in (first, failing, second)])
    with pytest.raises(type(error)):
        failing.has_text_alone(worker.batch.engine.model)
    worker.submit([later.request])
    for client in (later,) if num_tokens else (first, second, later):
        assert client.has_text_alone(worker.batch.engine.model)
    assert bool(caplog.records) == isinstance(error, RuntimeError)
