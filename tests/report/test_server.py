"""The server of the live page: who may use it, one text at a time, and the page in a browser."""

import contextlib
import http.client
import json
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from helpers import ROOT, SMALL, random_model, serve_in_thread

from engine.core.errors import UserError
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.text_generator import TextGenerator
from engine.report.inspector import ModelInspector
from engine.report.server import MAX_BODY_BYTES, PAGE_PATH, PageServer, redirect_file, serve
from model import ModelConfig

OPEN_BROWSER = "engine.report.server.webbrowser.open"
LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))
TEXT = "(&1'*2+,$-0#"
SETTINGS = {"temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 1, "max_new_tokens": 20}


@contextlib.contextmanager
def serving(answers: dict[str, Any]) -> Iterator[PageServer]:
    """A server in a thread."""
    server = PageServer(answers)
    with serve_in_thread(server):
        yield server


@pytest.fixture(scope="module")
def inspector() -> ModelInspector:
    generator = TextGenerator(random_model(SMALL), LETTERS, [0])
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
    "a lone surrogate": (400, {"path": "/read", "body": rb'{"text": "\ud800"}'}),
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


def is_open(client: socket.socket) -> bool:
    """Return whether the server has not closed a connection, after any answers on it."""
    client.setblocking(False)
    try:
        while client.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: ",  # half of a request
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",  # refused
        b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",  # refused before its body
    ],
)
def test_idle_connections_make_room_for_new_ones_and_cost_no_answer(monkeypatch, sent):
    monkeypatch.setattr("engine.report.server.MAX_IDLE_CONNECTIONS", 4)
    release = threading.Event()

    def slow(question: Any) -> Iterator[dict]:
        while not release.is_set():
            time.sleep(0.01)
            yield {}
        yield {"end": True}

    sound = {"sound": lambda question: (line for line in [{}])}
    with serving({"slow": slow, **sound}) as server, contextlib.ExitStack() as stack:
        lines = ask(server, "slow", {})
        assert next(lines) == {}
        clients = []
        for _ in range(12):
            clients.append(socket.create_connection(("127.0.0.1", server.port)))
            stack.enter_context(clients[-1])
            clients[-1].sendall(sent)
            if sent.endswith(b"\r\n\r\n"):  # a connection is idle again when its answer has come
                assert clients[-1].recv(4096)
        assert list(ask(server, "sound", {})) == [{}]
        assert [is_open(client) for client in clients] == [False] * 8 + [True] * 4
        release.set()
        assert list(lines)[-1] == {"end": True}


def test_the_port_of_http_may_be_left_out_of_the_host(server, monkeypatch):
    port = server.port
    cases = [("localhost", 80, True), ("localhost:80", 80, True), ("localhost", port, False)]
    for host, number, is_served in cases:
        monkeypatch.setattr(server, "port", number)
        headers = {"Host": host, "Origin": f"http://{host}"}
        request = make_mocked_request("GET", f"/?token={server.token}", headers)
        assert (server.reject_reason(request) == "") == is_served


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


def test_the_file_that_leads_to_the_address_is_the_users_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with redirect_file("http://127.0.0.1:1/?token=secret") as path:
        assert "url=http://127.0.0.1:1/?token=secret" in path.read_text()
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent)]
        assert modes == [0o600, 0o700] and "secret" not in path.as_uri()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("platform", "variables", "is_terminal", "opens"),
    [
        ("linux", {"DISPLAY": ":0"}, True, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True, True),
        ("linux", {"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "1"}, True, True),
        ("linux", {}, True, False),
        ("linux", {"SSH_CONNECTION": "1"}, True, False),
        ("linux", {"DISPLAY": ":0"}, False, False),
        ("darwin", {}, True, True),
        ("darwin", {"SSH_CONNECTION": "1"}, True, False),
        ("win32", {}, True, True),
    ],
)
def test_a_browser_is_opened_where_there_is_a_display(
    monkeypatch, capsys, tmp_path, platform, variables, is_terminal, opens
):
    opened: list[str] = []
    was_opened = threading.Event()

    async def run(server: PageServer) -> None:
        was_opened.wait(5 if opens else 0.05)
        server.socket.close()

    def open_browser(address: str) -> None:
        opened.append(address + Path(address.removeprefix("file://")).read_text())
        was_opened.set()

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**variables, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr(OPEN_BROWSER, open_browser)
    monkeypatch.setattr(PageServer, "run", run)
    with ThreadPoolExecutor() as pool:  # playwright runs an event loop in this thread
        pool.submit(serve, {}, 0).result()
    address = re.search(
        r"Open (http://127\.0\.0\.1:\d+/\?token=\S{40,}) ", capsys.readouterr().out
    )[1]
    assert len(opened) == opens
    assert all(url.startswith("file:///") and f"url={address}" in url for url in opened)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.browser
def test_a_browser_follows_the_file_to_the_page(page, server, monkeypatch, tmp_path):
    from playwright.sync_api import expect

    monkeypatch.setenv("HOME", str(tmp_path))
    with redirect_file(server.address) as path:
        page.goto(path.as_uri())
        expect(page.locator("#name")).to_have_text("small")


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


def answer_about(**settings: Any) -> Callable[[Any], Iterator[dict]]:
    """Return the answer about a small model that starts with other settings."""
    inspector = ModelInspector(
        TextGenerator(random_model(SMALL), LETTERS, [0]),
        {**SETTINGS, "name": "small", "text": TEXT, **settings},
    )
    return inspector.about


def token_of(text: str, **fields: Any) -> dict[str, Any]:
    return {"id": 1, "text": text, "p": [0.5] * 3, "bits": [1, 1], "likely": [], **fields}


@pytest.mark.browser
def test_a_page_says_that_it_waits_for_another_and_what_became_of_its_text(page, inspector):
    from playwright.sync_api import expect

    release = threading.Event()

    def write(question: Any) -> Iterator[dict]:
        yield {"tokens": [token_of("a")]}
        yield {"token": token_of("b"), "text": "b"}
        release.wait(10)
        yield {"end": "reached the length limit"} if question["seed"] == 1 else {}

    with serving({"about": inspector.about, "write": write}) as server:
        second = page.context.new_page()
        for tab in (page, second):
            tab.goto(server.address)
            expect(tab.locator("#name")).to_have_text("small")
        for tab, seed in ((page, 1), (second, 2)):
            tab.fill("#seed", str(seed))
            tab.click("#write")
            expected = ("Generating", "Waiting")[seed - 1]
            expect(tab.locator("#status")).to_contain_text(expected)
        assert second.locator("#text").inner_text() == TEXT
        release.set()
        expect(page.locator("#status")).to_contain_text("Done: reached the length limit. 2 tokens")
        expect(second.locator("#status")).to_contain_text("incomplete")  # no end came
        expect(second.locator("#status")).to_have_class("wrong")


@pytest.mark.browser
def test_a_text_of_no_token_or_of_one_is_described_truly(page, server):
    from playwright.sync_api import expect

    page.goto(server.address)
    expect(page.locator("#name")).to_have_text("small")
    for text, status in (("", "The text is empty"), ("!", "1 token."), ("!!", "2 tokens, ")):
        page.fill("#prompt", text)
        page.click("#read")
        expect(page.locator("#status")).to_have_text(re.compile(f"^{re.escape(status)}"))
    page.fill("#prompt", "0,!")
    page.click("#read")
    page.locator("#tokens span").nth(1).click()
    expect(page.locator("#token-title")).to_have_text("Token 2: “,”")
    cells = page.locator("#likely td:not(:first-child)").all_inner_texts()
    assert len(cells) == 20 and all(re.fullmatch(r"–|<0\.01%|\d+\.\d\d%", cell) for cell in cells)
    page.check("input[value=attention]")
    expect(page.locator("#looks")).to_have_text("Layer 1, head 1: attention from token 2, “,”.")


@pytest.mark.browser
def test_a_reload_keeps_the_prompt_and_the_settings_of_the_same_server(page, inspector):
    from playwright.sync_api import expect

    def read_fields() -> list[str]:
        expect(page.locator("#name")).to_have_text("small")
        return [page.input_value(f"#{name}") for name in ("prompt", "temperature", "top_k")]

    for text in ("!", '"'):  # of the second server, the prompt is its own
        with serving({"about": answer_about(text=text)}) as server:
            page.goto(server.address)
            assert read_fields() == [text, "0.8", ""]
            page.fill("#prompt", "春 \n</textarea>")
            page.fill("#temperature", "0.5")
            page.fill("#top_k", "3")
            page.reload()
            assert read_fields() == ["春 \n</textarea>", "0.5", "3"]


@pytest.mark.browser
def test_nothing_can_be_typed_before_the_settings_have_come(browser, inspector):
    from playwright.sync_api import expect

    page = browser.new_context().new_page()  # whose console reports the failed request
    page.set_default_timeout(20_000)
    release = threading.Event()
    is_broken = False

    def about(question: Any) -> Iterator[dict]:
        release.wait(60)
        if is_broken:
            raise UserError("The model is gone.")
        yield from inspector.about(question)

    with serving({"about": about}) as server:
        for is_broken in (False, True):
            release.clear()
            page.goto(server.address)
            expect(page.locator("#shape")).to_have_text("Loading…")
            expect(page.locator("#prompt")).to_be_hidden()
            release.set()
            expect(page.locator("#prompt")).to_be_visible(visible=not is_broken)
        expect(page.locator("#shape.wrong")).to_have_text("The model is gone.")
    page.context.close()


@pytest.mark.browser
@pytest.mark.parametrize("key", ["Control+Enter", "Meta+Enter"])
def test_a_key_generates(page, server, key):
    from playwright.sync_api import expect

    page.goto(server.address)
    page.fill("#max_new_tokens", "1")
    page.press("#prompt", "Enter")
    page.fill("#prompt", TEXT)
    page.press("#prompt", key)
    expect(page.locator("#status")).to_contain_text("Done: reached the length limit. 13 tokens")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("text", "characters", "direction"),
    [("a春🚀", "春🚀", "ltr"), ("مر é", "مرé", "rtl"), ("<|🏽|>", "🏽", "ltr")],
)
def test_characters_stand_over_their_tokens(page, text, characters, direction):
    from playwright.sync_api import expect

    config = ModelConfig(vocab_size=257, context_length=32, num_layers=1, d_model=16)
    generator = TextGenerator(random_model(config), ByteTokenizer(), [256])
    settings = {**SETTINGS, "name": "bytes", "text": text, "max_new_tokens": 1}
    with serving(ModelInspector(generator, settings).answers) as server:
        page.goto(server.address)
        expect(page.locator("#name")).to_have_text("bytes")
        for button in ("#read", "#write"):
            page.click(button)
            expect(page.locator("#tokens .shared b")).to_have_text(list(characters))
        expect(page.locator("#status")).to_contain_text("Done")
        options = page.locator("#tokens [role=option]")
        assert options.count() == len(text.encode()) + 1
        index = len(text[: text.index(characters[0])].encode())
        page.locator("#tokens .shared b").first.hover()
        title = f"Token {index + 1}: “⟨{characters[0].encode()[0]:x}⟩” of “{characters[0]}”"
        expect(page.locator("#token-title")).to_have_text(title)
        options.nth(index).press("ArrowLeft" if direction == "rtl" else "ArrowRight")
        expect(page.locator("#token-title")).to_contain_text(f"Token {index + 2}: ")
        directions = [
            page.locator(box).evaluate("e => getComputedStyle(e).direction")
            for box in ("#prompt", "#text", "#tokens > div")
        ]
        assert directions == [direction] * 3


# Chat.

CHAT_SETTINGS = {**SETTINGS, "name": "small", "text": ""}


def chat_inspector(tokenizer: Any = None) -> ModelInspector:
    tokenizer = (tokenizer or ByteTokenizer()).with_special(SPECIAL_TOKENS)
    config = ModelConfig(tokenizer.vocab_size, 64, num_layers=1, d_model=16)
    generator = TextGenerator(random_model(config), tokenizer, [0], is_chat_model=True)
    return ModelInspector(generator, CHAT_SETTINGS)


class Chatbot:
    """Answers "slow …" with one word, and more on release; other questions with themselves."""

    def __init__(self) -> None:
        self.questions: list[dict[str, Any]] = []
        self.release = threading.Event()
        self.num_closed = 0
        self.answers = {"about": chat_inspector().about, "chat": self.chat}

    def chat(self, question: dict[str, Any]) -> Iterator[dict]:
        self.questions.append(question)
        text = question["turns"][-1]
        if "refuse" in text:
            raise UserError("The text: refused.")
        if "break" in text:
            raise RuntimeError("a bug")
        try:
            yield {"text": "" if "silent" in text else f"<b>{text}"}
            while any(word in text for word in ("slow", "silent")) and not self.release.wait(0.02):
                yield {"text": ""}
            yield {"text": f" {question['seed']}</b>"}
            yield {"end": "the model ended its answer", "is_shortened": False}
        finally:
            self.num_closed += 1


@pytest.fixture
def chatbot() -> Iterator[Chatbot]:
    chatbot = Chatbot()
    yield chatbot
    chatbot.release.set()


def open_chat(tab: Any, server: PageServer) -> Any:
    from playwright.sync_api import expect

    tab.goto(server.address)
    expect(tab.locator("#name")).to_have_text("small")
    return tab


def expect_chat(tab: Any, texts: list[str], status: str) -> None:
    from playwright.sync_api import expect

    expect(tab.locator("#talk-status")).to_contain_text(status)
    expect(tab.locator("#turns p")).to_have_text(texts)


@pytest.mark.browser
def test_a_chat_has_turns_of_text_and_retries_with_another_seed(page, chatbot):
    from playwright.sync_api import expect

    with serving(chatbot.answers) as server:
        open_chat(page, server).fill("#draft", "one")
        page.press("#draft", "Shift+Enter")
        page.locator("#draft").press_sequentially("two")
        page.press("#draft", "Enter")
        expect_chat(page, ["one\ntwo", "<b>one\ntwo 1</b>"], "Done: the model ended its answer.")
        assert page.input_value("#draft") == "" and page.locator("#examples").is_hidden()
        page.get_by_label("switch off layer 1, head 2").check()
        page.fill("#draft", "three")
        page.click("#send")
        first = ["one\ntwo", "<b>one\ntwo 1</b>", "three"]
        expect_chat(page, [*first, "<b>three 1</b>"], "Done")
        page.get_by_role("button", name="Retry").click()  # there is one
        expect_chat(page, [*first, "<b>three 2</b>"], "Done")
        assert [question["turns"] for question in chatbot.questions] == [first[:1], first, first]
        assert [question["off"] for question in chatbot.questions] == [[], [[1, 2]], [[1, 2]]]
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy").last.click()
        expect(page.locator("#talk-status")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == "<b>three 2</b>"
        assert page.locator("#turns b").count() == 0
        page.click("#clear")
        expect_chat(page, [], "")
        page.get_by_role("button", name="Hello!").click()
        expect_chat(page, ["Hello!", "<b>Hello! 1</b>"], "Done")


@pytest.mark.browser
def test_an_answer_streams_and_a_stop_keeps_its_beginning(page, chatbot):
    from playwright.sync_api import expect

    with serving(chatbot.answers) as server:
        open_chat(page, server).fill("#draft", "slow")
        page.press("#draft", "Enter")
        expect_chat(page, ["slow", "<b>slow"], "Answering")
        page.fill("#draft", "next")
        page.press("#draft", "Enter")  # waits for the end of the answer
        page.click("#quit")
        expect_chat(page, ["slow", "<b>slow"], "Stopped.")
        page.press("#draft", "Enter")
        expect_chat(page, ["slow", "<b>slow", "next", "<b>next 1</b>"], "Done")
        page.fill("#draft", "silent")
        page.press("#draft", "Enter")
        expect(page.locator("#talk-status")).to_contain_text("Answering")
        page.fill("#draft", "more")
        page.press("#draft", "Escape")
        expect_chat(page, ["slow", "<b>slow", "next", "<b>next 1</b>"], "Stopped.")
        assert page.input_value("#draft") == "silent\nmore"


@pytest.mark.browser
@pytest.mark.parametrize(("text", "message"), [("refuse", "The text: refused."), ("break", "fail")])
def test_an_error_of_the_server_is_shown_and_loses_no_text(browser, chatbot, text, message):
    from playwright.sync_api import expect

    page = browser.new_context().new_page()  # whose console reports the failed request
    with serving(chatbot.answers) as server:
        open_chat(page, server)
        for question in ("first", text):
            page.fill("#draft", question)
            page.press("#draft", "Enter")
            expect(page.locator("#send")).to_be_enabled()
        expect_chat(page, ["first", "<b>first 1</b>"], message)
        expect(page.locator("#talk-status")).to_have_class("wrong")
        assert page.input_value("#draft") == text
        del chatbot.answers["chat"]
        page.get_by_role("button", name="Retry").click()
        expect_chat(page, ["first", "<b>first 1</b>"], "the questions are about")
    page.get_by_role("button", name="Retry").click()
    expect_chat(page, ["first", "<b>first 1</b>"], "does not answer")
    page.context.close()


@pytest.mark.browser
def test_a_reload_keeps_the_chat_and_a_question_without_an_answer(page, chatbot):
    turns = ["one", "<b>one 7</b>", "slow", "<b>slow", "silent", ""]
    with serving(chatbot.answers) as server:
        open_chat(page, server).fill("#seed", "7")
        for end, status, kept in ((2, "Done", 2), (4, "Answering", 4), (6, "Answering", 4)):
            page.fill("#draft", turns[end - 2])
            page.press("#draft", "Enter")
            expect_chat(page, turns[:end], status)
            page.fill("#draft", "more")
            page.reload()
            expect_chat(page, turns[:kept], "")
            draft = "more" if kept == end else "silent\nmore"
            assert page.input_value("#draft") == draft and page.input_value("#seed") == "7"


@pytest.mark.browser
def test_two_tabs_have_their_own_chats_and_wait_for_each_other(page, chatbot):
    from playwright.sync_api import expect

    with serving(chatbot.answers) as server:
        tabs = [page, page.context.new_page(), page.context.new_page()]
        for tab, text in zip(tabs, ("slow", "second", "third"), strict=True):
            open_chat(tab, server).fill("#draft", text)
            tab.press("#draft", "Enter")
            status = "Answering" if tab is page else "Waiting"
            expect(tab.locator("#talk-status")).to_contain_text(status)
        tabs[1].click("#quit")
        expect_chat(tabs[1], [], "Stopped.")
        assert tabs[1].input_value("#draft") == "second"
        expect_chat(page, ["slow", "<b>slow"], "Answering")
        chatbot.release.set()
        expect_chat(page, ["slow", "<b>slow 1</b>"], "Done")
        expect_chat(tabs[2], ["third", "<b>third 1</b>"], "Done")


RUNS_RIGHT_TO_LEFT = """(element) => {
  const text = element.firstChild, range = document.createRange();
  const [number, word] = ["12", "مرحبا"].map((part) => {
    range.setStart(text, text.data.indexOf(part));
    range.setEnd(text, text.data.indexOf(part) + part.length);
    return range.getBoundingClientRect().left;
  });
  return number > word;
}"""


@pytest.mark.browser
def test_a_model_chats_with_a_direction_for_each_line_and_the_page_fits(page):
    from playwright.sync_api import expect

    inspector = chat_inspector()
    text = f"Hi\n12 مرحبا\n{'x' * 30}"
    options = {"max_new_tokens": 8, "temperature": 0.5, "top_p": 0.95, "seed": 1}
    answer = "".join(inspector.generator.stream_answer([("user", text)], **options))
    with serving(inspector.answers) as server:
        page.set_viewport_size({"width": 390, "height": 800})
        open_chat(page, server)
        page.fill("#max_new_tokens", "8")
        page.fill("#temperature", "0.5")
        page.fill("#draft", text)
        page.press("#draft", "Enter")
        expect_chat(page, [text, answer], "Done")
        page.fill("#prompt", text)
        page.click("#write")
        expect(page.locator("#status")).to_contain_text("Done")
        for box in ("#turns p >> nth=0", "#text"):
            assert page.locator(box).evaluate(RUNS_RIGHT_TO_LEFT)
        lines = page.locator("#tokens > div")
        directions = lines.evaluate_all("all => all.map(e => getComputedStyle(e).direction)")
        assert directions[:3] == ["ltr", "rtl", "ltr"]
        first = lines.nth(1).locator("[role=option]").first
        first.click()
        first.press("ArrowLeft")
        expect(page.locator("#token-title")).to_have_text("Token 5: “2”")
        assert page.evaluate("() => document.documentElement.scrollWidth") <= 390


@pytest.mark.browser
def test_a_model_that_is_not_a_chat_model_has_no_chat(page, server):
    assert open_chat(page, server).locator("#chat").is_hidden()
