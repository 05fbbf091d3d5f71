"""OpenAI's API over HTTP: answers, streams, errors, keys, clients that leave, and Ctrl-C."""

import contextlib
import dataclasses
import http.client
import itertools
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import ROOT, SMALL, random_model, serve_in_thread

import sample
from engine.core.errors import UserError
from engine.data.chat import encode_chat
from engine.data.tokenizer import ByteTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.text_generator import TextGenerator
from engine.report.server import PageServer
from engine.serving.api import Api
from engine.serving.batching import RunningBatch

CHAT = ByteTokenizer().with_special(SPECIAL_TOKENS)
CONTEXT_LENGTH = 2048
MODEL = dataclasses.replace(SMALL, vocab_size=CHAT.vocab_size, context_length=CONTEXT_LENGTH)
GENERATOR = TextGenerator(random_model(MODEL), CHAT, [CHAT.end_of_text], is_chat_model=True)
DEFAULTS = {"temperature": 1.0, "top_p": 1.0}  # of the API
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
TURNS = [("system", "Be short."), ("user", "Hello")]
LONG = {"prompt": "b", "max_tokens": 2000, "temperature": 0}  # it does not end earlier
WAIT_SECONDS = 30


@contextlib.contextmanager
def serving(key: str = "") -> Iterator[SimpleNamespace]:
    """A server in a thread; ``end`` ends it as Ctrl-C does."""
    api = Api(GENERATOR, "run/small", key)
    server = PageServer({}, api=api)
    with serve_in_thread(server) as end:
        yield SimpleNamespace(api=api, port=server.port, token=server.token, end=end)


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with serving() as server:
        yield server


def connect(server: SimpleNamespace) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_SECONDS)


def send(server, method: str, path: str, body: Any = b"", **headers: str) -> tuple[int, Any]:
    """Send a request; returns the status and the body, which is JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(connect(server)) as connection:
        with contextlib.suppress(ConnectionError):  # a large body may be refused early
            connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def complete(server, path: str = "completions", **body: Any) -> dict:
    status, answer = send(server, "POST", f"/v1/{path}", body)
    assert status == 200, answer
    return answer


def events_of(response: http.client.HTTPResponse) -> Iterator[dict]:
    """Yield the events of a stream, which ends with [DONE]."""
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/event-stream")
    for line in response:
        if line == b"data: [DONE]\n":
            assert response.read() == b"\n"
            return
        if line != b"\n":
            yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("a stream without [DONE]")


@contextlib.contextmanager
def streaming(server, path: str = "completions", **body: Any) -> Iterator[Iterator[dict]]:
    """Yield the events of a stream; the connection is closed at the end."""
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", f"/v1/{path}", json.dumps(body | {"stream": True}))
        yield events_of(connection.getresponse())


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def slow_down(batch: RunningBatch) -> None:
    """Let a long text take as long as this test may take, on a busy machine too."""
    step = batch.step

    def slow_step() -> None:
        time.sleep(0.01)
        step()

    batch.step = slow_step


def test_models_are_listed_and_shown_by_name(server):
    status, models = send(server, "GET", "/v1/models")
    assert status == 200 and models["object"] == "list"
    (model,) = models["data"]
    assert model["id"] == "run/small" and model["object"] == "model"
    for path in ("/v1/models/run/small", "/v1/models/run%2Fsmall"):
        assert send(server, "GET", path) == (200, model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 5, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"seed": -7, "repetition_penalty": 1.5},
        {"temperature": 0, "user": "me", "best_of": 1, "logit_bias": {}, "suffix": None},
    ],
)
def test_a_completion_is_the_text_of_the_generator(server, options):
    options = {"seed": 1, **options}
    answer = complete(server, prompt="The cat", max_tokens=30, **options)
    sampling = {name: options[name] for name in options if name in sample.DEFAULT_OPTIONS}
    expected = GENERATOR.generate("The cat", max_new_tokens=30, **DEFAULTS | sampling)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["index"], choice["logprobs"]) == (expected, 0, None)
    assert answer["object"] == "text_completion" and answer["model"] == "run/small"
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 7
    assert usage["total_tokens"] == 7 + usage["completion_tokens"]
    is_cut = usage["completion_tokens"] == 30
    assert choice["finish_reason"] == ("length" if is_cut else "stop")


def test_without_a_seed_texts_differ_and_the_default_length_is_16(server):
    answers = [complete(server, prompt="a", temperature=2) for _ in range(3)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 3
    assert all(answer["usage"]["completion_tokens"] <= 16 for answer in answers)


def test_prompts_are_texts_or_ids_and_each_has_n_choices(server):
    options = {"max_tokens": 12, "seed": 3, "n": 3}
    texts = [
        *GENERATOR.generate_samples(3, "ab", max_new_tokens=12, seed=3, **DEFAULTS),
        *GENERATOR.generate_samples(3, "", max_new_tokens=12, seed=3, **DEFAULTS),
    ]
    prompts = (["ab", ""], [[97, 98], [CHAT.end_of_text]], ["ab", [CHAT.end_of_text]])
    for prompt in prompts:
        answer = complete(server, prompt=prompt, **options)
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
        assert answer["usage"]["prompt_tokens"] == 3  # each prompt once
    for prompt, n in (([97, 98], 3), (["ab", "ab", "ab"], 1)):
        answer = complete(server, prompt=prompt, **options | {"n": n})
        assert [choice["text"] for choice in answer["choices"]] == texts[:3]


@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_a_stream_has_the_text_logprobs_and_usage_of_the_whole_answer(server, num_logprobs):
    body = {"prompt": ["ab", "c"], "max_tokens": 40, "seed": 4, "n": 2, "logprobs": num_logprobs}
    body |= {"stop": ["zz", "q"], "echo": True}
    full_answer = complete(server, **body)
    texts = [""] * 4
    lists: list[dict] = [{}, {}, {}, {}]
    reasons: list[Any] = [None] * 4
    with streaming(server, **body, stream_options={"include_usage": True}) as events:
        *events, last = events
    assert last["choices"] == [] and last["usage"] == full_answer["usage"]
    assert len({event["id"] for event in events}) == 1
    for event in events:
        (choice,) = event["choices"]
        index = choice["index"]
        assert reasons[index] is None
        texts[index] += choice["text"]
        reasons[index] = choice["finish_reason"]
        for name, values in (choice["logprobs"] or {}).items():
            lists[index][name] = [*lists[index].get(name, []), *values]
    for choice in full_answer["choices"]:
        index = choice["index"]
        assert (texts[index], reasons[index]) == (choice["text"], choice["finish_reason"])
        assert lists[index].keys() == (choice["logprobs"] or {}).keys()
        if num_logprobs is None:
            continue
        for name in ("tokens", "text_offset"):
            assert lists[index][name] == choice["logprobs"][name]
        scores = choice["logprobs"]["token_logprobs"]
        assert lists[index]["token_logprobs"] == pytest.approx(scores, abs=1e-4)


def test_a_stop_text_ends_a_text_before_it_in_a_stream_too(server):
    body = {"prompt": "a", "max_tokens": 60, "seed": 2}
    text = complete(server, **body)["choices"][0]["text"]
    stop = text[10:13]
    for value in (stop, ["never", stop]):
        (choice,) = complete(server, **body, stop=value)["choices"]
        assert choice["text"] == text[: text.index(stop)]
        assert choice["finish_reason"] == "stop"
        with streaming(server, **body, stop=value) as events:
            pieces = [event["choices"][0]["text"] for event in events]
        assert "".join(pieces) == choice["text"]


def test_logprobs_of_a_completion_name_each_token_and_its_offset(server):
    prompt = "aé€b"
    body = {"max_tokens": 5, "seed": 1, "logprobs": 3}
    (choice,) = complete(server, prompt=prompt, echo=True, **body)["choices"]
    (plain,) = complete(server, prompt=prompt, **body)["choices"]
    assert choice["text"] == prompt + plain["text"]
    scores = choice["logprobs"]
    tokens = ["a", r"bytes:\xc3", r"bytes:\xa9", *(rf"bytes:\x{x}" for x in ("e2", "82", "ac"))]
    assert scores["tokens"][:7] == [*tokens, "b"]
    assert scores["text_offset"][:8] == [0, 1, 1, 2, 2, 2, 3, 4]
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    count = len(scores["tokens"])
    assert {len(values) for values in scores.values()} == {count} and count == 7 + 5
    for token, score, top in zip(*(scores[name][1:] for name in [*scores][:3]), strict=True):
        assert 3 <= len(top) <= 4 and top[token] == score <= max(top.values()) < 0
    assert plain["logprobs"]["tokens"] == scores["tokens"][7:]
    assert plain["logprobs"]["token_logprobs"] == pytest.approx(
        scores["token_logprobs"][7:], abs=1e-4
    )


def test_a_text_is_scored_without_a_new_token(server):
    ids = [97, 98, 99]
    answer = complete(server, prompt=ids, echo=True, logprobs=0, max_tokens=0)
    (choice,) = answer["choices"]
    assert choice["text"] == "abc" and answer["usage"]["completion_tokens"] == 0
    logits = GENERATOR.decoder(GENERATOR.decoder.token_embedding.weight.new_tensor([ids]).long())
    expected = logits[0].log_softmax(dim=-1)
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[1:] == pytest.approx([expected[0, 98].item(), expected[1, 99].item()], abs=1e-4)
    full = [97] * CONTEXT_LENGTH
    assert complete(server, prompt=full, max_tokens=0)["choices"][0]["text"] == ""


def test_a_chat_is_answered_whole_and_as_a_stream(server):
    body = {"messages": MESSAGES, "seed": 6, "max_completion_tokens": 30, "n": 2}
    body |= {"logprobs": True, "top_logprobs": 2}
    answer = complete(server, "chat/completions", **body)
    assert answer["object"] == "chat.completion"
    ids = encode_chat(CHAT, TURNS)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    text = "".join(GENERATOR.stream_answer(TURNS, seed=6, max_new_tokens=30, **DEFAULTS))
    first, second = answer["choices"]
    assert first["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert second["message"]["content"] != text
    content = first["logprobs"]["content"]
    assert (
        bytes(itertools.chain(*(each["bytes"] for each in content)))
        .decode(errors="replace")
        .startswith(text)
    )
    assert all(2 <= len(each["top_logprobs"]) <= 3 for each in content)
    with streaming(server, "chat/completions", **body) as events:
        events = [*events]
    for choice in (first, second):
        pieces = [event["choices"][0] for event in events]
        pieces = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        content = "".join(piece["delta"].get("content", "") for piece in pieces)
        assert content == choice["message"]["content"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert pieces[-1]["delta"] == {}
        scored = [
            *itertools.chain(*((p["logprobs"] or {"content": []})["content"] for p in pieces))
        ]
        assert [each["token"] for each in scored] == [
            each["token"] for each in choice["logprobs"]["content"]
        ]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_many_clients_get_what_each_gets_alone(server):
    def ask(number: int) -> str:
        body = {"prompt": f"{number} is", "max_tokens": 20, "seed": number}
        body["temperature"] = 0.8 * (number % 2)
        return complete(server, **body)["choices"][0]["text"]

    with ThreadPoolExecutor(12) as clients:
        texts = [*clients.map(ask, range(24))]
    assert texts == [ask(number) for number in range(24)]


# Errors.

COMPLETION_ERRORS = {
    "no object": ([1], None),
    "no prompt": ({}, "prompt"),
    "a prompt of a wrong type": ({"prompt": 1.5}, "prompt"),
    "no ids": ({"prompt": []}, "prompt"),
    "ids of no token": ({"prompt": [97, 10**9]}, "prompt"),
    "a negative id": ({"prompt": [-1]}, "prompt"),
    "true is no id": ({"prompt": [True]}, "prompt"),
    "a lone surrogate": ({"prompt": "\ud800"}, "prompt"),
    "too long": ({"prompt": "a" * CONTEXT_LENGTH}, "prompt"),
    "too long to score": ({"prompt": "a" * (CONTEXT_LENGTH + 1), "max_tokens": 0}, "prompt"),
    "a text as a number": ({"prompt": "a", "temperature": "a: b"}, "temperature"),
    "a truth as a number": ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    "a fraction of a token": ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    "out of range": ({"prompt": "a", "top_p": 1.1}, "top_p"),
    "a number without end": ({"prompt": "a", "temperature": 10**400}, "temperature"),
    "no choices": ({"prompt": "a", "n": 0}, "n"),
    "many choices": ({"prompt": ["a"] * 100, "n": 100}, "n"),
    "many prompts": ({"prompt": [[97]] * 1000}, "n"),
    "an unknown argument": ({"prompt": "a", "temprature": 1}, "temprature"),
    "an argument of chats": ({"prompt": "a", "messages": MESSAGES}, "messages"),
    "a long unknown argument": ({"prompt": "a", "x" * 10**5: 1}, "x" * 100),
    "an unsupported argument": ({"prompt": "a", "presence_penalty": 1}, "presence_penalty"),
    "an empty stop text": ({"prompt": "a", "stop": ""}, "stop"),
    "a long stop text": ({"prompt": "a", "stop": "a" * 10**5}, "stop"),
    "many stop texts": ({"prompt": "a", "stop": ["a"] * 10**4}, "stop"),
    "a long value": ({"prompt": "a", "seed": "a" * 10**5}, "seed"),
    "wrong stream options": ({"prompt": "a", "stream_options": [1]}, "stream_options"),
}
CHAT_ERRORS = {
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "an unknown role": ({"messages": [{"role": "x", "content": "a"}]}, "messages"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "a lone surrogate": ({"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
    "too long": ({"messages": [{"role": "user", "content": "a" * 4000}]}, "messages"),
    "a prompt": ({"messages": MESSAGES, "prompt": "a"}, "prompt"),
    "tools": ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    "a number of logprobs": ({"messages": MESSAGES, "logprobs": 3}, "logprobs"),
}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *(("completions", *COMPLETION_ERRORS[name]) for name in COMPLETION_ERRORS),
        *(("chat/completions", *CHAT_ERRORS[name]) for name in CHAT_ERRORS),
    ],
    ids=[*COMPLETION_ERRORS, *(f"chat: {name}" for name in CHAT_ERRORS)],
)
def test_a_mistake_is_an_error_in_openais_form_that_names_the_argument(server, path, body, param):
    stream = {"stream": True} if isinstance(body, dict) else {}
    for options in ({}, stream):
        sent = {**body, **options} if stream else body
        status, answer = send(server, "POST", f"/v1/{path}", sent)
        error = answer["error"]
        assert status == 400 and error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == param and error["type"] == "invalid_request_error"
        assert len(error["message"]) < 400
        if param:
            assert param[:50] in error["message"]


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "code"),
    [
        (400, "POST", "/v1/completions", b'{"prompt": ', None),
        (400, "POST", "/v1/completions", b"[" * 10**5, None),
        (400, "POST", "/v1/chat/completions", b"\xff", None),
        (404, "POST", "/v1/completions", {"model": "gpt-4", "prompt": "a"}, "model_not_found"),
        (404, "GET", "/v1/models/gpt-4", b"", "model_not_found"),
        (404, "POST", "/v1/embeddings", {}, None),
        (404, "GET", "/v1/", b"", None),
        (405, "GET", "/v1/completions", b"", None),
        (405, "POST", "/v1/models", {}, None),
        (413, "POST", "/v1/completions", b" " * 10**8, None),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused(server, status, method, path, body, code):
    actual, answer = send(server, method, path, body)
    assert actual == status and answer["error"]["code"] == code
    assert complete(server, prompt="a", max_tokens=1)


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "127.0.0.1:1"}, {"Origin": "http://evil.example"}],
)
def test_other_pages_are_refused_without_a_key(server, headers):
    status, answer = send(server, "POST", "/v1/completions", {"prompt": "a"}, **headers)
    assert status == 403 and answer["error"]["message"]


def test_a_key_is_needed_for_each_request_but_no_host(server):
    with serving("secret") as server:
        for value in ("", "Bearer wrong", "secret", "Basic secret"):
            header = {"Authorization": value} if value else {}
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
                status, answer = send(server, method, path, **header)
                assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        for value in ("Bearer secret", "bearer secret"):
            headers = {"Authorization": value, "Host": "example.com"}
            assert send(server, "GET", "/v1/models", **headers)[0] == 200
        status, _ = send(server, "GET", f"/?token={server.token}", Host="example.com")
        assert status == 403  # the page is only for this machine


@pytest.mark.parametrize("flags", [["--host", "0.0.0.0"], ["--host", "::1"]])
def test_other_machines_are_served_only_with_a_key(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        sample.main(["out/none", "--serve", *flags])
    assert stop.value.code == 2 and "--api-key" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["nosuch.invalid", "192.0.2.1"])  # reserved for examples
def test_a_host_that_is_not_this_machine_is_named(host):
    with pytest.raises(UserError, match="--host"):
        PageServer({}, 0, host)


def test_a_model_without_chats_refuses_them():
    api = Api(dataclasses.replace(GENERATOR, is_chat_model=False), "run")
    with pytest.raises(Exception, match="/v1/completions"):
        api.encode_messages({"messages": MESSAGES})


def test_a_bug_is_an_error_of_the_server_and_is_logged(monkeypatch, caplog):
    def fail(*arguments: Any) -> None:
        raise RuntimeError("a bug")

    with serving() as server:
        body = {**LONG, "stream": True}
        monkeypatch.setattr(server.api.worker.batch, "add", fail)
        status, answer = send(server, "POST", "/v1/completions", body)
        assert status == 500 and answer["error"]["type"] == "server_error"
        monkeypatch.undo()
        with streaming(server, **LONG) as events:
            assert "choices" in next(events)
            monkeypatch.setattr(server.api.worker.batch, "step", fail)
            *_, last = events
            assert last["error"]["type"] == "server_error"
        monkeypatch.undo()
        monkeypatch.setattr(server.api, "encode_messages", fail)
        assert send(server, "POST", "/v1/chat/completions", {})[0] == 500
        assert complete(server, prompt="a", max_tokens=1)
    assert caplog.text.count("RuntimeError: a bug") == 3


# Many clients, and clients that leave.


def test_a_full_queue_refuses_and_a_client_that_leaves_frees_its_row_and_its_place(monkeypatch):
    with serving() as server, contextlib.ExitStack() as stack:
        worker = server.api.worker
        slow_down(worker.batch)
        monkeypatch.setattr(worker.batch, "max_rows", 2)
        monkeypatch.setattr(worker, "max_waiting", 2)
        running = [stack.enter_context(contextlib.ExitStack()) for _ in range(2)]
        for each in running:
            assert next(each.enter_context(streaming(server, **LONG)))
        wait_until(lambda: len(worker.batch.requests) == 2)
        first, second = worker.batch.requests
        waiting = connect(server)
        waiting.request("POST", "/v1/completions", json.dumps({**LONG, "n": 2}))
        wait_until(lambda: len(worker.waiting) == 2)
        status, answer = send(server, "POST", "/v1/completions", LONG)
        assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        queued = [*worker.waiting]
        waiting.close()
        wait_until(lambda: all(request.is_cancelled for request in queued))
        running[0].close()
        wait_until(lambda: len(worker.batch.requests) < 2)
        assert first.is_cancelled and not first.stream.ended and not second.is_cancelled
        assert complete(server, prompt="a", max_tokens=3)["usage"]["completion_tokens"] <= 3
        running[1].close()
        wait_until(lambda: not worker.batch.requests and not worker.waiting)
        wait_until(lambda: not server.api.completions)


def test_a_client_that_does_not_read_loses_its_row(monkeypatch):
    monkeypatch.setattr("engine.serving.api.WRITE_TIMEOUT_SECONDS", 0.2)
    with serving() as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = json.dumps({**LONG, "n": 8, "logprobs": 20, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.api.completions)
        (completion,) = server.api.completions
        wait_until(lambda: not server.api.completions and not server.api.worker.batch.requests)
        assert any(stream.num_tokens for stream in completion.streams)
        assert not any(stream.ended for stream in completion.streams)


def test_a_body_that_does_not_arrive_is_an_error(monkeypatch):
    monkeypatch.setattr("engine.serving.api.READ_TIMEOUT_SECONDS", 0.1)
    with serving() as server, contextlib.closing(connect(server)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        response = connection.getresponse()
        assert response.status == 408 and "error" in json.loads(response.read())


def test_the_end_of_the_server_ends_answers_with_an_error():
    with serving() as server, ThreadPoolExecutor() as pool, streaming(server, **LONG) as events:
        slow_down(server.api.worker.batch)
        assert "choices" in next(events)
        future = pool.submit(send, server, "POST", "/v1/completions", LONG)
        wait_until(lambda: len(server.api.worker.batch.requests) == 2)
        pool.submit(server.end)
        *_, last = events
        status, answer = future.result(WAIT_SECONDS)
        assert status == 503 and answer == last and last["error"]["type"] == "server_error"


def test_ctrl_c_ends_the_command_while_it_answers(trained):
    flags = ["--serve", "--port", "0", "--device", "cpu"]
    command = [sys.executable, ROOT / "sample.py", trained("run", "--steps", 1), *flags]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in the background
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(list(map(str, command)), preexec_fn=listen, **pipes) as process:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/v1\n", process.stdout.readline())[1])
        assert f":{port}/?token=" in process.stdout.readline()
        server = SimpleNamespace(port=port)
        (model,) = send(server, "GET", "/v1/models")[1]["data"]
        assert model["id"] == "run"
        with streaming(server, prompt="1 is", max_tokens=12) as events:
            assert [*events][-1]["choices"][0]["finish_reason"] == "length"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == "interrupted\n" and not process.stdout.read()


# The official client.


def test_the_official_client_gets_models_texts_streams_and_errors():
    openai = pytest.importorskip("openai")
    with serving("secret") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        options = {"base_url": url, "max_retries": 0, "timeout": WAIT_SECONDS}
        client = openai.OpenAI(api_key="secret", **options)
        (model,) = client.models.list()
        assert client.models.retrieve(model.id) == model
        body = {"model": model.id, "max_tokens": 20, "seed": 2, "temperature": 0.8, "stop": "zz"}
        body |= {"n": 2}
        answer = client.completions.create(prompt="The cat", logprobs=2, **body)
        expected = GENERATOR.generate_samples(
            2, "The cat", max_new_tokens=20, seed=2, temperature=0.8, top_p=1.0
        )
        assert [choice.text for choice in answer.choices] == expected
        assert len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.text_offset)
        texts = ["", ""]
        for event in client.completions.create(prompt="The cat", stream=True, **body):
            texts[event.choices[0].index] += event.choices[0].text
        assert texts == expected
        chat = client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=1, **body
        )
        texts = ["", ""]
        usage = {"stream_options": {"include_usage": True}}
        for event in client.chat.completions.create(
            messages=MESSAGES, stream=True, **usage, **body
        ):
            for choice in event.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [choice.message.content for choice in chat.choices]
        assert event.usage == chat.usage
        assert chat.choices[0].logprobs.content[0].top_logprobs
        failures = {
            openai.BadRequestError: {"temperature": 3},
            openai.NotFoundError: {"model": "gpt-4"},
            openai.AuthenticationError: {"extra_headers": {"Authorization": "Bearer wrong"}},
        }
        for error, change in failures.items():
            with pytest.raises(error) as caught:
                client.completions.create(prompt="a", **body | change)
            assert caught.value.body["message"]
        server.api.worker.max_waiting = 0
        with pytest.raises(openai.RateLimitError):
            client.completions.create(prompt="a", **body)
