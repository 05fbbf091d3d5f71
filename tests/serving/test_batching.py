"""Continuous batching: a text does not depend on the requests that come and go beside it."""

import dataclasses
import math
import random
import threading
from typing import Any

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model

from engine.core.errors import UserError
from engine.data.tokenizer import CharTokenizer
from engine.generation.generate import banned_tokens, complete_streams
from engine.generation.kv_cache import KVCache, RowCache, RowLengths, max_cached_rows
from engine.generation.sampling import FilterOptions, row_seeds
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from engine.serving.batching import BatchWorker, QueueFullError, RunningBatch, TextRequest, Token

CONTEXT_LENGTH = 64
LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyzABCDEFGH").with_special(["<|endoftext|>"])
BATCH_VARIANTS = {
    **VARIANTS,
    "windows": dataclasses.replace(SMALL, windows=(1, 5)),
    "learned, grouped": dataclasses.replace(SMALL, position="learned", num_kv_heads=1),
    "sinusoidal": dataclasses.replace(SMALL, position="sinusoidal"),
}
WAIT_SECONDS = 30


class Client:
    """A prompt and its settings, drawn at random, and what the batch sends for them."""

    def __init__(self, draw: random.Random, max_prompt: int = 40):
        self.prompt = [draw.randrange(34) for _ in range(draw.randrange(1, max_prompt))]
        self.limit = draw.randrange(1, CONTEXT_LENGTH - len(self.prompt) + 1)
        self.stop = draw.choice([(), ("a", "bc")])
        self.seed = draw.randrange(99)
        self.penalty = draw.choice([1.0, 1.0, 1.3])
        self.filters = FilterOptions(
            temperature=draw.choice([0.0, 0.8, 1.5]),
            top_k=draw.choice([None, 5]),
            top_p=draw.choice([0.9, 1.0]),
            min_p=draw.choice([0.0, 0.05]),
        )
        self.received: list[Any] = []
        self.has_ended = threading.Event()

    def receive(self, arrival: Token | Exception | None) -> None:
        self.received.append(arrival)
        if not isinstance(arrival, Token):
            self.has_ended.set()

    def stream(self) -> TextStream:
        return TextStream(LETTERS, self.prompt, self.limit, self.stop)

    def request(self, **options: Any) -> TextRequest:
        (seed,) = row_seeds(self.seed, [self.prompt])
        arguments = (self.stream(), seed, self.filters, self.receive, self.penalty)
        return TextRequest(*arguments, **options)

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.received if token)

    def text_alone(self, model) -> str:
        options = {**self.filters, "seed": self.seed, "repetition_penalty": self.penalty}
        return "".join(text for _, text in complete_streams(model, [self.stream()], **options))


def new_model(name: str = "default"):
    config = dataclasses.replace(BATCH_VARIANTS[name], context_length=CONTEXT_LENGTH)
    return build_decoder(random_model(config))


def new_batch(model, max_rows: int) -> RunningBatch:
    return RunningBatch(model, max_rows, banned_tokens(LETTERS, model))


def run_batch(batch: RunningBatch, requests: list[TextRequest], draw: random.Random) -> None:
    """Add each request at a random moment, as soon as there is room."""
    waiting = [*requests]
    while waiting or batch.requests or batch.unfinished_prefill:
        if batch.unfinished_prefill:
            batch.continue_prefill()
        elif waiting and len(batch.requests) < batch.max_rows and draw.random() < 0.7:
            batch.add(waiting.pop(0))
        batch.step()


@pytest.mark.parametrize(
    ("name", "max_rows", "num_clients", "num_prefill_tokens"),
    [
        *((name, 4, 10, 9) for name in BATCH_VARIANTS),
        ("default", 1, 3, 9),
        ("windows", 20, 20, 2),
        ("qwen3", 4, 10, 2),
    ],
)
def test_texts_of_requests_that_join_and_leave_a_batch_are_those_alone(
    name, max_rows, num_clients, num_prefill_tokens, monkeypatch
):
    monkeypatch.setattr("engine.serving.batching.MAX_PREFILL_TOKENS", num_prefill_tokens)
    model = new_model(name)
    draw = random.Random(name)
    clients = [Client(draw) for _ in range(num_clients)]
    run_batch(new_batch(model, max_rows), [client.request() for client in clients], draw)
    for client in clients:
        assert client.text == client.text_alone(model)
        assert client.received.index(None) == len(client.received) - 1
    assert len({client.text for client in clients}) > num_clients // 3


def test_a_long_prompt_is_computed_between_the_steps_of_the_others(monkeypatch):
    monkeypatch.setattr("engine.serving.batching.MAX_PREFILL_TOKENS", 8)
    model = new_model()
    draw = random.Random(4)
    short, long, cancelled = (Client(draw) for _ in range(3))
    short.prompt = [*range(3)]
    for client in (short, long, cancelled):
        client.prompt = client.prompt if client is short else [*range(30)]
        client.filters = FilterOptions(temperature=0.0)
        client.stop = ()
        client.limit = 20
    batch = new_batch(model, 4)
    batch.add(short.request())
    batch.add(long.request())
    while batch.unfinished_prefill:
        num_received = len(short.received)
        batch.step()
        batch.continue_prefill()
        assert len(short.received) == num_received + 1
    assert len(short.received) == 1 + 3 and len(long.received) == 1  # 8, 8, 8 and 6 tokens
    request = cancelled.request()
    batch.add(request)
    request.is_cancelled = True
    batch.continue_prefill()
    assert batch.unfinished_prefill is None and cancelled.received == []
    run_batch(batch, [], draw)
    assert [short.text, long.text] == [client.text_alone(model) for client in (short, long)]


def test_memory_grows_with_the_sequences_and_is_freed_with_the_last():
    batch = new_batch(new_model(), 5)
    draw = random.Random(6)
    for count in range(1, 6):
        client = Client(draw, max_prompt=10)
        client.stop = ()
        client.limit = 20
        batch.add(client.request())
        (num_rows,) = {cache.keys_values.shape[1] for cache in batch.caches}
        assert count <= num_rows <= min(2 * count - 1, 5)
    run_batch(batch, [], draw)
    assert all(cache.keys_values.numel() == 0 for cache in batch.caches)


@pytest.mark.parametrize(("num_rows", "expected"), [(0.0, 1), (7.5, 7), (33.0, 32), (math.inf, 32)])
def test_caches_are_limited_to_a_quarter_of_the_memory(num_rows, expected, monkeypatch):
    row_bytes = 2 * 4 * SMALL.num_layers * SMALL.d_model * CONTEXT_LENGTH
    memory = 4 * num_rows * row_bytes
    monkeypatch.setattr("engine.generation.kv_cache.total_memory", lambda device: memory)
    assert max_cached_rows(new_model(), 32) == expected


def test_requests_that_are_cancelled_change_no_other_and_receive_nothing_more():
    model = new_model("qwen3")
    draw = random.Random(3)
    clients = [Client(draw) for _ in range(16)]
    requests = [client.request() for client in clients]
    batch = new_batch(model, 6)
    waiting = [*requests]
    num_cancelled = 0
    while waiting or batch.requests:
        if waiting and len(batch.requests) < 6:
            batch.add(waiting.pop(0))
        batch.step()
        if batch.requests and draw.random() < 0.2:
            request = draw.choice(batch.requests)
            request.is_cancelled = True
            num_received = len(clients[requests.index(request)].received)
            batch.step()
            assert request not in batch.requests
            assert len(clients[requests.index(request)].received) == num_received
            num_cancelled += 1
    for request, client in zip(requests, clients, strict=True):
        if not request.is_cancelled:
            assert client.text == client.text_alone(model)
    assert 2 < num_cancelled < 14


def test_a_request_whose_options_fail_ends_alone():
    model = new_model()
    draw = random.Random(5)
    clients = [Client(draw) for _ in range(4)]
    requests = [client.request() for client in clients]
    batch = new_batch(model, 4)
    for request in requests:
        batch.add(request)
    failing = batch.requests[0]
    failing.repetition_penalty = math.nan  # its logits are not finite
    while batch.requests:
        batch.step()
    for request, client in zip(requests, clients, strict=True):
        if request is failing:
            assert isinstance(client.received[-1], UserError)
        else:
            assert client.text == client.text_alone(model)


def test_a_text_has_not_ended_if_its_logprobs_fail(monkeypatch):
    client = Client(random.Random(1))
    client.limit = 1
    batch = new_batch(new_model(), 1)
    monkeypatch.setattr(batch, "score", lambda *arguments: 1 / 0)
    request = client.request(num_logprobs=1)
    with pytest.raises(ZeroDivisionError):
        batch.add(request)
    assert not request.stream.ended  # the worker sends the error to texts that have not ended


def test_a_text_of_no_tokens_is_cut():
    client = Client(random.Random(1))
    client.limit = 0
    request = client.request()
    new_batch(new_model(), 1).add(request)
    assert client.received == [None] and request.stream.is_cut


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_a_row_attends_as_a_cache_of_its_own(window, num_groups):
    torch.manual_seed(0)
    lengths = [1, 9, 150, 30]
    rows = RowLengths(4, 200, torch.device("cpu"))
    cache = RowCache(rows, num_groups, 8, torch.empty(0), window)
    alone = [KVCache(1, num_groups, 200, 8, torch.empty(0), window) for _ in lengths]
    for row, (own, length) in enumerate(zip(alone, lengths, strict=True)):
        own.append(*torch.randn(2, 1, num_groups, length, 8))
        cache.insert(row, own)
    rows.replace(torch.tensor(lengths))
    order = [0, 1, 2, 3]
    for step in range(40):
        query = torch.randn(len(order), 4, 1, 8)
        key, value = torch.randn(2, len(order), num_groups, 1, 8)
        assert cache.next_positions(1).flatten().tolist() == [alone[i].filled for i in order]
        output = cache.attend(query, key, value)
        expected = [
            alone[index].attend(*(x[row : row + 1] for x in (query, key, value)))
            for row, index in enumerate(order)
        ]
        torch.testing.assert_close(output, torch.cat(expected))
        rows.replace(rows.lengths + 1)
        if step == 20:  # the first row leaves, and the last takes its place
            cache.move(3, 0, int(rows.lengths[3]))
            order = [3, 1, 2]
            rows.replace(rows.lengths[order])
    rows.replace(torch.tensor([200]))
    with pytest.raises(ValueError, match="200"):
        cache.next_positions(1)


def test_logprobs_are_those_of_the_model_and_the_same_for_a_text_and_for_its_echo():
    model = new_model()
    client = Client(random.Random(5), max_prompt=10)
    client.limit = 20
    client.stop = ()
    client.penalty = 1.0
    batch = new_batch(model, 2)
    run_batch(batch, [client.request(num_logprobs=3, reports_prompt=True)], random.Random(0))
    tokens = client.received[:-1]
    ids = [token.id for token in tokens]
    assert ids[: len(client.prompt)] == client.prompt and tokens[0].logprob is None
    assert client.text.startswith(LETTERS.decode(client.prompt))
    expected = model(torch.tensor([ids]))[0].log_softmax(dim=-1)
    for token, row in zip(tokens[1:], expected, strict=False):
        assert token.logprob == pytest.approx(row[token.id].item(), abs=1e-4)
        values = [value for _, value in token.top_logprobs]
        assert values == sorted(values, reverse=True) and 3 <= len(values) <= 4
        assert (token.id, token.logprob) in token.top_logprobs
        assert values[0] == pytest.approx(row[:35].max().item(), abs=1e-4)
        assert all(id_ != 36 for id_, _ in token.top_logprobs)  # the tokenizer has no id 36
    echo = Client(random.Random(5))
    echo.prompt = ids
    echo.limit = 0
    request = echo.request(num_logprobs=0, reports_prompt=True)
    batch.add(request)
    assert echo.received[-1] is None and not batch.requests
    scores = [token.logprob for token in echo.received[:-1]]
    assert scores[1:] == pytest.approx([token.logprob for token in tokens[1:]], abs=1e-4)
    assert all(len(token.top_logprobs) == 1 for token in echo.received[1:-1])


# The thread.


@pytest.fixture
def worker():
    worker = BatchWorker(new_batch(new_model(), 3), max_waiting=8)
    yield worker
    worker.stop()


def test_requests_of_many_threads_are_answered_as_alone(worker, monkeypatch):
    monkeypatch.setattr("engine.serving.batching.MAX_PREFILL_TOKENS", 9)
    draw = random.Random(7)
    clients = [Client(draw) for _ in range(16)]

    def ask(client: Client) -> None:
        while True:
            try:
                worker.submit([client.request()])
                break
            except QueueFullError:
                client.has_ended.wait(0.01)
        assert client.has_ended.wait(WAIT_SECONDS)

    threads = [threading.Thread(target=ask, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(client.text == client.text_alone(worker.batch.model) for client in clients)


def test_a_full_queue_takes_all_requests_of_a_job_or_none_and_forgets_cancelled_ones(worker):
    hold = threading.Event()
    add = worker.batch.add
    worker.batch.add = lambda request: (hold.wait(WAIT_SECONDS), add(request))
    clients = [Client(random.Random(number)) for number in range(12)]
    first, *requests = [client.request() for client in clients]
    worker.submit([first])
    while worker.waiting:  # the thread takes it, and waits
        pass
    worker.submit(requests[:6])
    with pytest.raises(QueueFullError):
        worker.submit(requests[6:9])
    assert [*worker.waiting] == requests[:6]
    requests[2].is_cancelled = True
    requests[5].is_cancelled = True
    worker.submit(requests[6:10])
    hold.set()
    is_served = [
        client.has_ended.wait(WAIT_SECONDS * (i not in (3, 6, 11)))
        for i, client in enumerate(clients)
    ]
    assert is_served == [i not in (3, 6, 11) for i in range(12)]


@pytest.mark.parametrize("method", ["add", "continue_prefill", "step"])
@pytest.mark.parametrize("error", [UserError("a mistake"), RuntimeError("a bug")])
def test_an_error_goes_to_the_requests_it_concerns_and_the_thread_continues(
    worker, caplog, monkeypatch, method, error
):
    monkeypatch.setattr("engine.serving.batching.MAX_PREFILL_TOKENS", 9)
    clients = [Client(random.Random(number)) for number in range(4)]
    clients[1].prompt = [*range(30)]
    for client in clients:
        client.limit = CONTEXT_LENGTH - len(client.prompt)
        client.stop = ()
    original = getattr(worker.batch, method)
    bad = clients[1].request()

    def raise_error(num_tokens: int) -> None:
        raise error

    def fail(*arguments: Any) -> None:
        prefill = worker.batch.unfinished_prefill
        if method == "continue_prefill" and prefill.request is bad and prefill.caches[0].filled:
            prefill.caches[0].next_positions = raise_error
        elif bad in (*arguments, *(worker.batch.requests if method == "step" else [])):
            raise error
        original(*arguments)

    setattr(worker.batch, method, fail)
    worker.submit([clients[0].request(), bad, clients[2].request()])
    assert clients[1].has_ended.wait(WAIT_SECONDS) and clients[1].received[-1] is error
    worker.submit([clients[3].request()])
    for client in clients:
        assert client.has_ended.wait(WAIT_SECONDS)
    assert clients[3].text == clients[3].text_alone(worker.batch.model)
    if method != "step":
        assert clients[0].text == clients[0].text_alone(worker.batch.model)
    assert ("a bug" in caplog.text) == isinstance(error, RuntimeError)


def test_a_stopped_thread_sends_nothing_more_and_one_that_never_started_stops():
    worker = BatchWorker(new_batch(new_model(), 3), max_waiting=8)
    worker.stop()
    worker = BatchWorker(new_batch(new_model(), 3), max_waiting=8)
    client = Client(random.Random(1))
    worker.submit([client.request()])
    worker.stop()
    num_received = len(client.received)
    worker.submit([client.request()])
    assert not worker.thread.is_alive() and len(client.received) == num_received
