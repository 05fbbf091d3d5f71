"""OpenAI's API over HTTP: answers, streams, errors, keys, clients that leave, and Ctrl-C."""

import base64
import contextlib
import dataclasses
import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from helpers import ROOT, SMALL, random_model, serve_in_thread

import sample
from engine.data.chats.chat import encode_chat, own_template
from engine.data.chats.examples import parse_messages
from engine.data.tokenizer import ByteTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.sampling import TextOptions
from engine.generation.text_generator import TextGenerator
from engine.serving.api import Api

TEMPLATE = (
    "{{ tools | tojson }}{{ style }}{{ enable_thinking }}"
    "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}Answer:"
)
BYTES = ByteTokenizer().with_special(SPECIAL_TOKENS)
CONFIG = dataclasses.replace(SMALL, vocab_size=BYTES.vocab_size, context_length=2048)
GENERATOR = TextGenerator(random_model(CONFIG), BYTES, [BYTES.end_of_text_id], is_chat_model=True)
API_DEFAULTS = {"temperature": 1.0, "top_p": 1.0}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
LONG = {"prompt": "b", "max_tokens": 2000, "temperature": 0}  # it does not end earlier
TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
WAIT_SECONDS = 30
connect = partial(http.client.HTTPConnection, "127.0.0.1", timeout=WAIT_SECONDS)


@contextlib.contextmanager
def serving(key: str = "", page: str = "", **changes: Any) -> Iterator[SimpleNamespace]:
    """A server in a thread, which needs 8 s for LONG; ``end`` ends it as Ctrl-C does."""
    api = Api(dataclasses.replace(GENERATOR, **changes), "run/small", key, page)
    batch = api.worker.batch
    step = batch.step
    batch.step = lambda: time.sleep(0.004) or step()
    with serve_in_thread(api.app) as server:
        yield SimpleNamespace(api=api, batch=batch, **vars(server))
    api.worker.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with serving() as server:
        yield server


def send(server: Any, path: str, body: Any, method: str = "POST", **headers: str) -> Any:
    """Send a request; returns the status and the answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with contextlib.closing(connect(server.port)) as connection:
        with contextlib.suppress(ConnectionError):  # a large body may be refused early
            connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def complete(server: Any, **body: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the choices of an answer, and the usage."""
    status, answer = send(server, TEXT, body)
    assert status == 200, answer
    return answer["choices"], answer["usage"]


@contextlib.contextmanager
def streaming(server: Any, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the events of a stream; the connection is closed at the end."""
    with contextlib.closing(connect(server.port)) as connection:
        connection.request("POST", TEXT, json.dumps(body | {"stream": True}))
        response = connection.getresponse()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = (line.removeprefix(b"data: ") for line in response if line != b"\n")
        yield map(json.loads, iter(events.__next__, b"[DONE]\n"))


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "options",
    [
        {"user": "me", "best_of": 1, "logit_bias": {}, "stream": None, "model": "run/small"},
        {"min_tokens": 0, "ignore_eos": False, "skip_special_tokens": True},
        {"seed": 5, "temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"seed": -7, "repetition_penalty": 1.5, "stop": ["x", "qu"]},
        {"frequency_penalty": 1.0, "presence_penalty": -0.5, "verbosity": "low"},
        {"temperature": 0, "top_p": 0, "stop": "e"},
    ],
)
def test_a_completion_is_the_text_of_the_generator_whole_and_streamed(server, options):
    names = TextOptions.__optional_keys__ & {*options}
    settings = {"seed": 1, **API_DEFAULTS, **{name: options[name] for name in names}}
    expected = GENERATOR.generate_samples(2, "The cat", max_new_tokens=30, **settings)
    body = {"prompt": "The cat", "max_tokens": 30, "n": 2, "seed": 1, **options}
    choices, usage = complete(server, **body)
    reasons = [choice["finish_reason"] for choice in choices]
    assert [choice["text"] for choice in choices] == expected
    assert usage["prompt_tokens"] == 7 == usage["total_tokens"] - usage["completion_tokens"]
    assert (usage["completion_tokens"] == 60) == (reasons == ["length"] * 2)
    with streaming(server, **body, stream_options={"include_usage": True}) as events:
        *chunks, last = events
    assert last["choices"] == [] and last["usage"] == usage
    for index in range(2):
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == expected[index]
        assert [choice["finish_reason"] for choice in choices[-2:]] == [None, reasons[index]]


def test_prompts_are_texts_or_ids_and_each_has_n_choices(server):
    samples = partial(GENERATOR.generate_samples, 3, max_new_tokens=12, seed=3, **API_DEFAULTS)
    texts = [*samples("ab"), *samples("")]
    for prompt in (["ab", ""], [[97, 98], [BYTES.end_of_text_id]], ["ab", [BYTES.end_of_text_id]]):
        choices, usage = complete(server, prompt=prompt, max_tokens=12, seed=3, n=3)
        assert [choice["text"] for choice in choices] == texts
        assert usage["prompt_tokens"] == 3  # each prompt once
    choices, usage = complete(server, prompt=[97, 98], n=9)  # without a seed and a length
    assert choices != complete(server, prompt="ab", n=9, seed=-1)[0]
    assert 100 < usage["completion_tokens"] <= 9 * 16 and usage["prompt_tokens"] == 2
    (choice,), usage = complete(server, prompt="a" * 2040, max_tokens=-1, temperature=0)
    assert (usage["completion_tokens"], choice["finish_reason"]) == (8, "length")


def test_logprobs_name_each_token_and_its_offset(server):
    body = {"prompt": "aé€b", "max_tokens": 5, "seed": 1, "logprobs": 3, "echo": True}
    (choice,), _ = complete(server, **body)
    (plain,), _ = complete(server, **body | {"echo": False})
    scores = choice["logprobs"]
    assert choice["text"] == body["prompt"] + plain["text"]
    assert scores["tokens"][:7] == ["a", *(rf"bytes:\x{byte:02x}" for byte in "é€".encode()), "b"]
    assert scores["tokens"][7:] == plain["logprobs"]["tokens"]
    assert scores["text_offset"][:8] == [0, 1, 1, 2, 2, 2, 3, 4]
    assert {len(values) for values in scores.values()} == {7 + 5}
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    for token, score, top in zip(*(scores[name][1:] for name in [*scores][:3]), strict=True):
        assert 3 <= len(top) <= 4 and top[token] == score <= max(top.values()) < 0
    with streaming(server, **body) as events:
        chunks = [event["choices"][0]["logprobs"] for event in events]
    for name in ("tokens", "text_offset"):
        assert [value for chunk in chunks if chunk for value in chunk[name]] == scores[name]
    assert complete(server, prompt="a" * CONFIG.context_length, max_tokens=0)


def test_the_official_client_gets_models_texts_streams_and_errors():
    with serving("secret", tokenizer=BYTES.with_chat_template(TEMPLATE)) as server:
        generator = server.api.generator
        url = f"http://127.0.0.1:{server.port}/v1"
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        (model,) = client.models.list()
        assert client.models.retrieve(model.id) == model
        body = {"model": model.id, "max_tokens": 20, "seed": 2, "n": 2}
        sampling = {"max_new_tokens": 20, "seed": 2, **API_DEFAULTS}
        answer = client.completions.create(prompt="a", logprobs=2, echo=True, **body)
        texts = [f"a{text}" for text in generator.generate_samples(2, "a", **sampling)]
        assert [choice.text for choice in answer.choices] == texts and answer.choices[1].logprobs
        body |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
        body |= {"tools": TOOLS, "tool_choice": "none"}  # the template does not get them
        body |= {"function_call": "none", "model": "another"}
        chat = client.chat.completions.create(**body, reasoning_effort="low")
        turns = parse_messages(MESSAGES, own_template(generator.tokenizer))
        assert chat.model == model.id
        assert chat.usage.prompt_tokens == len(encode_chat(generator.tokenizer, turns))
        texts = [choice.message.content for choice in chat.choices]
        assert texts[0] == "".join(generator.stream_answer(turns, **sampling)) != texts[1]
        assert chat.choices[0].logprobs.content[0].top_logprobs
        streamed = ["", ""]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = client.chat.completions.create(**body, **options)
        for chunk in chunks:
            streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert streamed == texts and last.usage == chat.usage
        assert chunks[0].choices[0].delta.role == chat.choices[0].message.role == "assistant"
        server.api.worker.max_waiting = 0
        failures = {openai.BadRequestError: {"temperature": 3}, openai.RateLimitError: {}}
        for error, change in failures.items():
            with pytest.raises(error):
                client.chat.completions.create(**body | change)
        with pytest.raises(openai.NotFoundError, match="run/small"):
            client.models.retrieve("another")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


@pytest.mark.real
def test_openai_for_javascript_gets_models_texts_chats_streams_and_errors(tmp_path):
    npm = shutil.which("npm") or pytest.skip("npm is not installed")
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "openai@6"]
    if subprocess.run(command, cwd=tmp_path).returncode:
        pytest.skip("npm cannot fetch the package")
    with serving("secret") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        script = ROOT / "tests/serving/client.mjs"
        output = subprocess.check_output(["node", script, tmp_path, url], timeout=120)
        results = json.loads(output)
        generator = server.api.generator
        options = {"max_new_tokens": 20, "seed": 2, **API_DEFAULTS}
        text = generator.generate("The cat", **options)
        turns = [("user", "Hello")]
        answer = "".join(generator.stream_answer(turns, frequency_penalty=1.0, **options))
    assert results["text"] == results["texts"] and results["answer"] == results["answers"]
    assert (results["text"]["text"], results["ids"], results["answer"]["text"]) == (
        text,
        text,
        answer,
    )
    assert results["text"]["usage"]["prompt_tokens"] == 7
    assert results["stop"]["text"] == text.partition(text[5])[0]
    assert results["stop"]["finish_reason"] == "stop"
    assert results["failure"] == ["BadRequestError", 400, "temperature"]
    assert results["model"] == "run/small"


WRONG_ARGUMENTS = {
    "prompt": [None, [97, 10**9], [True], "a" * 2048, [[97]] * 512],
    "temperature": ["a: b", 10**400],
    "max_tokens": [1.5, -2],
    "stop": ["", ["a"] * 10**4, ["a" * 201], 5],
    "skip_special_tokens": [False],
    "top_p": [-0.1, True],
    **{name: [[1]] for name in ("presence_penalty", "stream_options", "x" * 10**5)},
}
WRONG_PATHS = ["/v1/embeddings", "/v1/responses", "/v1"]
WRONG_CHATS = [[], [{"role": "x", "content": "a"}], [{"role": "user", "content": None}]]
WRONG_BODIES = [[1], b'{"prompt": ', b"[" * 10**5, b"\xff", b'{"prompt": "\\ud800"}', b""]
REFUSALS = [
    *((400, TEXT, body, None) for body in WRONG_BODIES),
    (400, CHAT, b'{"seed": NaN}', None),
    *((404, path, {}, None) for path in WRONG_PATHS),
    (405, "/v1/models", {}, None),
    (413, TEXT, b" " * 10**8, None),
    (400, TEXT, {"prompt": [[97]] * 128, "n": 3}, "n"),
    (400, TEXT, {"prompt": "a" * 2049, "max_tokens": 0}, "prompt"),
    (400, CHAT, {"messages": MESSAGES, "tools": TOOLS}, "tools"),
    (400, CHAT, {"messages": [{"role": "user", "content": "a" * 4000}]}, "messages"),
    *((400, CHAT, {"messages": messages}, "messages") for messages in WRONG_CHATS),
    (400, CHAT, {"messages": MESSAGES, "continue_final_message": True}, "messages"),
    (400, CHAT, {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
    (400, CHAT, {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
    (400, CHAT, {"messages": MESSAGES, "function_call": "auto"}, "function_call"),
    (400, CHAT, {"messages": MESSAGES, "response_format": {"type": "json"}}, "response_format"),
    *(
        (400, CHAT, {"messages": MESSAGES, "chat_template_kwargs": value}, "chat_template_kwargs")
        for value in (3, {"messages": []})
    ),
]
for name, values in WRONG_ARGUMENTS.items():
    REFUSALS += [(400, TEXT, {"prompt": "a", name: value}, name) for value in values]


@pytest.mark.parametrize(("status", "path", "body", "param"), REFUSALS)
def test_a_mistake_is_an_error_in_openais_form_that_names_the_argument(
    server, status, path, body, param
):
    actual, answer = send(server, path, body)
    if isinstance(body, dict):
        assert send(server, path, body | {"stream": True}) == (actual, answer)
    error = answer["error"]
    assert actual == status and error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param or error["param"][:100] == param[:100] != param
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 400
    assert (param or "")[:50] in error["message"] and ": --" not in error["message"]
    assert path not in WRONG_PATHS or CHAT in error["message"]


def test_a_body_may_be_long_and_have_a_byte_order_mark_and_is_not_compressed(server):
    body = json.dumps({"prompt": "a\r\nb\r", "echo": True, "max_tokens": 0, "logprobs": 0}).encode()
    for path in (TEXT, f"{TEXT}/"):
        status, answer = send(server, path, b"\xef\xbb\xbf" + body)
        assert status == 200 and answer["choices"][0]["text"] == "a\r\nb\r"
        assert answer["choices"][0]["logprobs"]["text_offset"] == [*range(5)]
    for encoding in ("gzip", "br", "x"):
        assert send(server, TEXT, body, **{"Content-Encoding": encoding})[0] == 415
    texts = [[100] * CONFIG.context_length] * 256
    assert len(complete(server, prompt=texts, max_tokens=0)[0]) == 256


def test_a_key_is_needed_for_each_request_and_for_other_machines(server):
    assert send(server, TEXT, {"prompt": "a"}, Host="evil.example")[0] == 403
    assert send(server, TEXT, {"prompt": "a"}, Origin="http://evil.example")[0] == 403
    with serving("secret", "a page", is_chat_model=False) as server:
        login = base64.b64encode(b"me:secret").decode()
        for value in ("", "Bearer wrong", "secret", f"Basic {login}"):
            status, answer = send(server, TEXT, {"prompt": "a"}, Authorization=value)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        headers = {"Authorization": "bearer secret", "Host": "example.com"}
        assert send(server, "/v1/models/", b"", "GET", **headers)[0] == 200
        assert send(server, "/v1/models/run/small/", b"", "GET", **headers)[0] == 200
        status, answer = send(server, CHAT, {"messages": MESSAGES}, **headers)
        assert status == 400 and TEXT in answer["error"]["message"]  # not a model of chats
        for value, status in ((f"Basic {login}", 200), ("Basic %", 401), ("", 401)):
            with contextlib.closing(connect(server.port)) as connection:
                connection.request("GET", "/", headers={"Authorization": value})
                response = connection.getresponse()
                assert response.status == status and (status == 200) == (
                    response.read() == b"a page"
                )
                assert (response.headers["WWW-Authenticate"] == "Basic") == (status == 401)


def test_a_model_recommends_its_sampling_and_ignored_arguments_are_named_once(capsys):
    with serving(sampling={"temperature": 0.0, "top_k": 1}) as server:
        body = {"prompt": "The cat", "max_tokens": 9}
        ((greedy,), _), _ = [complete(server, **body, reasoning_effort="high") for _ in range(2)]
        assert greedy == complete(server, **body, temperature=0)[0][0]
        assert greedy != complete(server, **body, temperature=2, top_k=0)[0][0]
    assert capsys.readouterr().err.count("reasoning_effort") <= 1  # of this process


def test_with_a_key_pages_of_any_origin_may_ask(server):
    def ask(server: Any, method: str, **headers: str) -> tuple[int, str | None]:
        with contextlib.closing(connect(server.port)) as connection:
            headers = {"Origin": "http://app.example", **headers}
            connection.request(method, "/v1/models", headers=headers)
            response = connection.getresponse()
            return response.status, response.headers["Access-Control-Allow-Origin"]

    preflight = {"Access-Control-Request-Method": "POST"}
    assert ask(server, "OPTIONS", **preflight) == (405, None)
    with serving("secret") as keyed:
        assert ask(keyed, "OPTIONS", **preflight) == (200, "*")
        assert ask(keyed, "GET", Authorization="Bearer secret") == (200, "*")


def test_a_request_sets_variables_of_the_template_and_continues_a_message():
    with serving(tokenizer=BYTES.with_chat_template(TEMPLATE)) as server:

        def ask(messages: list[Any], **body: Any) -> tuple[str, int]:
            body |= {"messages": messages, "temperature": 0, "max_tokens": 8}
            status, answer = send(server, CHAT, body)
            assert status == 200, answer
            return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]

        _, size = ask(MESSAGES)
        assert ask(MESSAGES, chat_template_kwargs={"unused": "abc"})[1] == size
        assert ask(MESSAGES, chat_template_kwargs={"style": "<|end|>"})[1] == size + 7
        assert ask(MESSAGES, chat_template_kwargs={"enable_thinking": False})[1] == size + 5
        deep = b"[" * 900 + b"]" * 900
        message = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"b": '
        assert send(server, CHAT, message + deep + b"}}")[0] < 500
        text = "nullBe short.<|end|>Hello<|end|>I li"
        body = {"temperature": 0, "max_tokens": 8, "parse_special": True}
        (choice,), usage = complete(server, prompt=text, **body)
        prefill = {"role": "assistant", "content": "I li"}
        assert ask(MESSAGES, continue_final_message=False)[1] == size  # vLLM's default
        options = {"continue_final_message": True, "add_generation_prompt": False}
        for message, more in ((prefill, options), (prefill, {}), (prefill | {"prefix": True}, {})):
            answer = ask([*MESSAGES, message], **more)
            assert answer == (choice["text"], usage["prompt_tokens"])


def test_names_of_special_tokens_in_a_prompt_are_text_unless_they_are_parsed(server, capsys):
    text = "<|user|>hi<|end|>"
    ids = [BYTES.special_tokens["<|user|>"], *b"hi", BYTES.special_tokens["<|end|>"]]
    body = {"max_tokens": 5, "temperature": 0}
    for _ in range(2):
        assert complete(server, prompt=text, **body)[1]["prompt_tokens"] == len(text)
    assert capsys.readouterr().err.count("special tokens (2 names)") == 1
    parsed = complete(server, prompt=text, parse_special=True, **body)
    assert parsed == complete(server, prompt=ids, **body)
    assert not capsys.readouterr().err


def test_a_bug_ends_answers_with_an_error(monkeypatch, caplog):
    with serving() as server:
        with streaming(server, **LONG) as events:
            assert "choices" in next(events)
            monkeypatch.setattr(server.batch, "step", lambda: 1 / 0)
            assert [*events][-1]["error"]["type"] == "server_error"
            assert send(server, TEXT, LONG)[0] == 500 and "ZeroDivisionError" in caplog.text
        monkeypatch.undo()
        caplog.clear()
        monkeypatch.setattr(GENERATOR, "encode_prompt", lambda *_: 1 / 0)
        monkeypatch.setattr(server.api, "generator", GENERATOR)
        assert send(server, TEXT, LONG)[0] == 500 and "in encode_prompts" in caplog.text


def test_a_full_queue_refuses_and_a_client_that_leaves_frees_its_row_and_its_place():
    with serving() as server, contextlib.ExitStack() as stack:
        worker = server.api.worker
        server.batch.max_rows = worker.max_waiting = 2
        leaving = stack.enter_context(contextlib.ExitStack())
        for clients in (stack, leaving):
            assert next(clients.enter_context(streaming(server, **LONG)))
        requests = [*server.batch.requests]
        assert send(server, TEXT, LONG | {"n": 3})[0] == 429 and not worker.waiting
        waiting = connect(server.port)
        waiting.request("POST", TEXT, json.dumps(LONG | {"n": 2}))
        wait_until(lambda: len(worker.waiting) == 2)
        assert send(server, TEXT, LONG)[1]["error"]["type"] == "rate_limit_error"
        requests += worker.waiting
        waiting.close()
        leaving.close()
        wait_until(lambda: [request.is_cancelled for request in requests] == [False, *[True] * 3])
        assert complete(server, prompt="a", max_tokens=3) and not requests[0].stream.is_finished
        stack.close()
        wait_until(lambda: not server.batch.requests)


def test_a_body_that_does_not_arrive_is_an_error(monkeypatch, server):
    monkeypatch.setattr("engine.serving.server.READ_TIMEOUT_SECONDS", 0.1)
    with contextlib.closing(connect(server.port)) as connection:
        connection.putrequest("POST", TEXT)
        connection.putheader("Content-Length", "9")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408


def test_the_command_answers_a_burst_and_ctrl_c_ends_it(trained):
    run = trained("run", "--steps", 1)
    command = [sys.executable, ROOT / "sample.py", run, "--serve", "--port=0", "--device=cpu"]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in the background
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    popen = subprocess.Popen([*map(str, command)], preexec_fn=listen, **pipes)
    with popen as process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)  # after a failure
        port = re.search(r"http://127\.0\.0\.1:(\d+)/v1\n", process.stdout.readline())[1]
        assert f":{port}/ " in process.stdout.readline()
        server = SimpleNamespace(port=int(port))

        def ask(number: int) -> tuple[int, Any]:
            return send(server, TEXT, {"prompt": f"{number} is", "max_tokens": 3, "seed": number})

        with ThreadPoolExecutor(200) as pool:
            answers = [*pool.map(ask, range(200))]
        generate = partial(sample.load(run, "cpu").generate, max_new_tokens=3, **API_DEFAULTS)
        for number, (status, answer) in [*enumerate(answers)][::9]:
            alone = generate(f"{number} is", seed=number)
            assert status == 200 and answer["choices"][0]["text"] == alone
        events = stack.enter_context(streaming(server, prompt="1", max_tokens=10**6))
        assert "choices" in next(events)  # the rest is being written
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGINT
        assert (process.stdout.read(), process.stderr.read()) == ("", "interrupted\n")
