"""The server of the live page: who may use it, one text at a time, and the page in a browser."""

import asyncio
import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from helpers import ROOT, SMALL, randomised

from engine.core.errors import UserError
from engine.data.tokenizer import CharTokenizer
from engine.generation.text_generator import TextGenerator
from engine.report.inspector import ModelInspector
from engine.report.server import MAX_BODY_BYTES, PAGE_PATH, PageServer

LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))
TEXT = "(&1'*2+,$-0#"
SETTINGS = {"temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 1, "max_new_tokens": 20}


@contextlib.contextmanager
def serving(answers: dict[str, Any]) -> Iterator[PageServer]:
    """A server in a thread."""
    server = PageServer(answers)
    loop = asyncio.new_event_loop()
    task = loop.create_task(server.run())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


@pytest.fixture(scope="module")
def inspector() -> ModelInspector:
    generator = TextGenerator(randomised(SMALL), LETTERS, [0])
    return ModelInspector(generator, {**SETTINGS, "name": "small", "text": TEXT})


@pytest.fixture(scope="module")
def server(inspector) -> Iterator[PageServer]:
    with serving(inspector.answers) as server:
        yield server


def connect(server: PageServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)


def ask(server: PageServer, name: str, question: Any) -> Iterator[dict]:
    """Yield the lines of an answer; closing the iterator closes the connection."""
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", f"/{name}", json.dumps(question), {"X-Token": server.token})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield from map(json.loads, response)


def send(server: PageServer, method: str, path: str, headers: Any = (), body: Any = b"{}") -> Any:
    """Send a request of the page, with other headers; returns the response, read."""
    sent = {"Host": f"localhost:{server.port}", "X-Token": server.token, **dict(headers)}
    with contextlib.closing(connect(server)) as connection:
        connection.putrequest(method, path, skip_host=True)
        for name, value in {**sent, "Content-Length": str(len(body))}.items():
            for each in [value] if isinstance(value, str) else value:
                connection.putheader(name, each)
        connection.endheaders()
        with contextlib.suppress(ConnectionError):  # a large body may be refused early
            connection.send(body)
        response = connection.getresponse()
        response.body = response.read()
        return response


def test_the_page_may_only_run_its_own_scripts_and_ask_its_server(server):
    response = send(server, "GET", f"/?token={server.token}", {"X-Token": ()})
    assert response.status == 200 and response.body == PAGE_PATH.read_bytes()
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert response.headers["Cache-Control"] == "no-store"
    assert not re.search(rb"https?:|innerHTML", response.body)
    assert server.socket.getsockname()[0] == "127.0.0.1"


PAGE = {"method": "GET", "path": "/", "headers": {"X-Token": ()}}
REFUSED = {
    "another host": (403, {"headers": {"Host": "evil.example:80"}}),
    "another port": (403, {"headers": {"Host": "127.0.0.1:1"}}),
    "another origin": (403, {"headers": {"Origin": "http://evil.example"}}),
    "no page's origin": (403, {"headers": {"Origin": "null"}}),
    "no token": (403, {"headers": {"X-Token": ()}}),
    "another token": (403, {"headers": {"X-Token": "x" * 43}}),
    "a page without a token": (403, PAGE),
    "a page with another token": (403, {**PAGE, "path": "/?token=%ff"}),
    "an unknown question": (404, {"path": "/answers"}),
    "a path of a file": (404, {"path": "/../../etc/passwd"}),
    "another method": (405, {"method": "PUT"}),
    "a large body": (413, {"body": bytes(2 * MAX_BODY_BYTES)}),
    "broken JSON": (400, {"body": b'{"text": '}),
    "deep JSON": (400, {"body": b"[" * MAX_BODY_BYTES}),
    "half of a character": (400, {"path": "/read", "body": rb'{"text": "\ud800"}'}),
    "an unknown field": (400, {"path": "/read", "body": b'{"prompt": "a"}'}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_are_not_the_pages_are_refused_and_the_server_continues(server, name):
    status, changes = REFUSED[name]
    response = send(server, **{"method": "POST", "path": "/about", **changes})
    assert response.status == status
    assert "no-store" in response.headers["Cache-Control"]
    assert len(json.loads(response.body)["error"]) < 500
    (about,) = ask(server, "about", {})
    assert about["layers"] == 2


def test_texts_are_written_one_at_a_time():
    active = []

    def write(question: Any) -> Iterator[dict]:
        active.append(question)
        yield {"active": len(active)}
        yield {"active": len(active)}
        active.remove(question)

    with serving({"write": write}) as server, ThreadPoolExecutor(5) as clients:
        answers = clients.map(lambda i: list(ask(server, "write", i)), range(5))
    assert list(answers) == [[{"active": 1}] * 2] * 5


def test_clients_that_leave_while_they_wait_cost_nothing():
    answered = []
    release = threading.Event()

    def write(question: Any) -> Iterator[dict]:
        answered.append(question)
        yield {}
        release.wait(10)
        yield {}

    with serving({"write": write}) as server:
        clients = [connect(server) for _ in range(5)]
        for number, client in enumerate(clients):
            client.request("POST", "/write", str(number), {"X-Token": server.token})
            if number == 0:
                response = client.getresponse()
        for client in clients[1:4]:
            client.close()
        time.sleep(0.3)  # the server notices
        release.set()
        response.read()
        clients[4].getresponse().read()
    assert answered == [0, 4]


def test_an_answer_delays_no_answer_of_another_name_and_ends_when_its_client_leaves():
    ended = threading.Event()

    def endless(question: Any) -> Iterator[dict]:
        try:
            while True:
                yield {"text": "x" * 1000}
        finally:
            ended.set()

    sound = {"sound": lambda question: (line for line in [{}])}
    with serving({"endless": endless, **sound}) as server:
        lines = ask(server, "endless", {})
        assert next(lines) and list(ask(server, "sound", {})) == [{}] and not ended.is_set()
        lines.close()
        assert ended.wait(10)


def test_a_bug_is_logged_with_its_traceback_and_the_server_continues(caplog):
    def broken(question: Any) -> Iterator[dict]:
        yield {}
        raise RuntimeError("a bug")

    with serving({"broken": broken, "sound": lambda question: (line for line in [{}])}) as server:
        assert list(ask(server, "broken", {})) == [{}]
        assert list(ask(server, "sound", {})) == [{}]
    assert "RuntimeError: a bug" in caplog.text


def test_a_port_in_use_is_an_error(server, inspector):
    with pytest.raises(UserError, match="--port"):
        PageServer(inspector.answers, server.port)


def test_ctrl_c_ends_the_command_while_it_writes(trained):
    flags = ["--page", "--device", "cpu", "--prompt", "1 is"]
    command = [sys.executable, ROOT / "sample.py", trained("run", "--steps", 1), *flags]
    listen = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # ignored in the background
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(list(map(str, command)), preexec_fn=listen, **pipes) as process:
        address = process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S{40,})", address)
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
        question = json.dumps({"text": "1 is", "max_new_tokens": 2000})
        connection.request("POST", "/write", question, {"X-Token": match[2]})
        assert "tokens" in json.loads(connection.getresponse().readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == "interrupted\n" and not process.stdout.read()
        connection.close()


@pytest.mark.browser
def test_the_page_writes_reads_and_switches_heads_off(page, server, inspector):
    from playwright.sync_api import expect

    page.goto(server.address)
    expect(page.locator("#name")).to_have_text("small")
    assert "small" in page.title()
    page.fill("#max_new_tokens", "20")
    page.locator("#write").click(click_count=3)  # the last click counts
    status = page.locator("#status")
    expect(status).to_contain_text("Done: reached the length limit. 32 tokens")
    *_, last, _ = inspector.write({"text": TEXT, **SETTINGS})
    page.locator("#tokens span").nth(31).hover()
    label = last["token"]["text"]
    expect(page.locator("#token-title")).to_have_text(f"Token 32: “{label}”")
    expect(page.locator("#surprise")).to_contain_text(f"{last['token']['bits'][1]:.2f} bits")
    page.click("#read")
    expect(page.locator("#tokens span")).to_have_count(len(TEXT) + 1)
    page.locator("#tokens span").nth(9).click()
    page.select_option("#layer", "2")
    expect(page.locator("#looks")).to_contain_text("Layer 2, head 1: attention from token 10")
    (attention,) = inspector.attention({"text": TEXT, "at": 9, "layer": 2})
    weights = [float(cell) for cell in page.locator("#weights td:last-child").all_inner_texts()]
    assert weights == pytest.approx(sorted(attention["weights"], reverse=True)[:5], abs=6e-4)
    page.get_by_label("switch off layer 1, head 3").check()
    expect(status).to_contain_text("with all heads")
    expect(page.locator("#likely th.off")).to_be_visible()
    page.click("#on")
    expect(page.locator("#likely th.off")).to_be_hidden()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 390
