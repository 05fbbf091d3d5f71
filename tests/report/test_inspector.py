"""The page that looks inside a model: who may use it, whether its numbers are the model's, and how it behaves."""

import contextlib
import copy
import http.client
import itertools
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from helpers import ROOT, SMALL, VARIANTS, randomised

import sample
from engine.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, named_tokenizer, train_bpe
from engine.generation.attention_maps import attention_maps, visible
from engine.generation.generate import generate_text, window_start
from engine.report import server as page_server
from engine.report.inspector import LIKELIEST, MOST_TOKENS, Inside
from engine.report.server import LONGEST_BODY, PageServer
from model import GPT

BYTES = ByteTokenizer()
LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))  # as many as the model has
TEXT = "(&1'*2+,$-0#"
LONG = [*range(37), *range(36, -1, -1)]  # ids, more than the context has
SETTINGS = {"name": "small", "text": TEXT, "temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 1}
SETTINGS |= {"max_new_tokens": 20}


def inside_of(model: GPT, tokenizer: Tokenizer = LETTERS) -> Inside:
    return Inside(model, tokenizer, [0], SETTINGS)


@pytest.fixture(scope="module")
def model() -> GPT:
    return randomised(SMALL)


@pytest.fixture(scope="module")
def inside(model) -> Inside:
    return inside_of(model)


@pytest.fixture(scope="module")
def server(inside) -> Iterator[PageServer]:
    """A page's server, in a thread."""
    with serving(inside.answers) as server:
        yield server


@contextlib.contextmanager
def serving(answers: dict[str, Any]) -> Iterator[PageServer]:
    with PageServer(answers) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield server
        server.shutdown()


def asked(server: PageServer, name: str, question: Any) -> Iterator[dict]:
    """What the server answers, object by object; closing it closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", f"/{name}", json.dumps(question), {"X-Token": server.token})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        yield from map(json.loads, answer)


def one(server: PageServer, name: str, question: Any) -> dict:
    (answer,) = asked(server, name, question)
    return answer


def connected(server: PageServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=60)


def sent(server: PageServer, request: bytes) -> bytes:
    """All that comes back for these bytes."""
    with connected(server) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(2**16), b""))
    return b""


# Who may use it.


def test_the_page_may_do_nothing_but_ask_its_server(server):
    head, _, page = sent(server, request(server, "GET", f"/?token={server.token}")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and page == page_server.PAGE.read_bytes()
    policy = re.search(rb"Content-Security-Policy: (.*)", head)[1].decode()
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert b"Cache-Control: no-store" in head and b"X-Content-Type-Options: nosniff" in head
    assert b"http:" not in page and b"https:" not in page and b"innerHTML" not in page
    assert server.server_address[0] == "127.0.0.1" and server.address.startswith("http://127.0.0.1:")


def request(
    server: PageServer, method: str = "POST", path: str = "/about", body: bytes = b"{}", **changed: Any
) -> bytes:
    """A request that is served, but for what is changed: a header's value, several, or None for none."""
    headers = {"Host": f"localhost:{server.server_port}", "X-Token": server.token, "Content-Length": len(body)}
    lines = [f"{method} {path} HTTP/1.1"]
    for name, value in (headers | {name.replace("_", "-"): value for name, value in changed.items()}).items():
        lines += [f"{name}: {each}" for each in (value if isinstance(value, list) else [value]) if each is not None]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


REFUSED = {
    "another host": (403, {"Host": "evil.example:80"}),
    "another port": (403, {"Host": "127.0.0.1:1"}),
    "no host": (403, {"Host": None}),
    "two hosts": (403, {"Host": ["127.0.0.1", "evil.example"]}),
    "another origin": (403, {"Origin": "http://evil.example"}),
    "no page's origin": (403, {"Origin": "null"}),
    "an origin elsewhere on this machine": (403, {"Origin": "https://127.0.0.1:1"}),
    "no token": (403, {"X_Token": None}),
    "another token": (403, {"X_Token": "x" * 43}),
    "a token of other characters": (403, {"X_Token": "\xe4"}),
    "a page without a token": (403, {"method": "GET", "path": "/"}),
    "a page with another token": (403, {"method": "GET", "path": "/?token=%ff"}),
    "an unknown question": (404, {"path": "/answers"}),
    "a way out": (404, {"path": "/../../etc/passwd"}),
    "PUT": (501, {"method": "PUT"}),
    "HEAD": (501, {"method": "HEAD"}),
    "no length": (411, {"Content_Length": None}),
    "chunks": (411, {"Content_Length": None, "Transfer_Encoding": "chunked", "body": b"2\r\n{}\r\n0\r\n\r\n"}),
    "chunks with a length": (411, {"Transfer_Encoding": "chunked"}),
    "two lengths": (411, {"Content_Length": [2, 3]}),
    "a negative length": (411, {"Content_Length": -1}),
    "a length that is none": (411, {"Content_Length": "²"}),
    "100 MB": (413, {"body": bytes(10**8)}),
    "100 MB and no token": (403, {"body": bytes(10**8), "X_Token": None}),
    "broken UTF-8": (400, {"body": b'{"text": "\xff"}'}),
    "broken JSON": (400, {"body": b'{"text": '}),
    "deep JSON": (400, {"body": b"[" * LONGEST_BODY}),
    "an endless number": (400, {"body": b'{"seed": ' + b"9" * 10**5 + b"}"}),
    "half a character": (400, {"path": "/read", "body": rb'{"text": "\ud800"}'}),
    "a long path": (414, {"path": "/" + "x" * 10**5}),
    "a long header": (431, {"X": "x" * 10**5}),
    "many headers": (431, {"X": ["x"] * 200}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_the_pages_is_refused_and_the_server_lives(server, capfd, name):
    status, changed = REFUSED[name]
    head, _, body = sent(server, request(server, **changed)).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == str(status).encode() and b"no-store" in head, head
    assert (name == "HEAD" and not body) or len(json.loads(body)["error"]) < 500
    assert one(server, "about", {})["layers"] == 2
    said = capfd.readouterr().err
    assert server.token not in said and said.count("\n") == (status != 400) and len(said) < 500


@pytest.mark.parametrize(
    "garbage", [b"", b"\0" * 100, b"GET\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01 TLS?\r\n\r\n"]
)
def test_what_is_no_request_leaves_the_server_alive(server, capfd, garbage):
    with connected(server) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 200" not in connection.recv(1000)
    assert one(server, "about", {})
    assert capfd.readouterr().err.count("\n") <= 1


def test_fifty_at_once_are_served_among_fifty_that_say_nothing(server):
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(50) as pool:
        for _ in range(50):
            stack.enter_context(connected(server))
        answers = list(pool.map(lambda _: one(server, "read", {"text": TEXT}), range(50)))
    assert all(answer == answers[0] for answer in answers)


def test_more_than_it_has_room_for_are_turned_away_at_once(inside, monkeypatch):
    monkeypatch.setattr(page_server, "MOST_CONNECTIONS", 3)
    with serving(inside.answers) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(server))
        assert sent(server, request(server)) == b""


def test_a_client_that_sends_bytes_slowly_or_none_is_let_go_and_holds_up_nobody(inside, monkeypatch, capfd):
    monkeypatch.setattr(page_server, "PATIENCE", 1.0)
    with serving(inside.answers) as server, connected(server) as silent, connected(server) as slow:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in request(server):
                slow.sendall(bytes([byte]))
                assert one(server, "about", {})
                time.sleep(0.05)
        assert slow.recv(1) == silent.recv(1) == b"" and 0.9 < time.monotonic() - began < 8
    assert not capfd.readouterr().err


def test_what_a_client_that_went_away_asked_for_ends(capfd):
    ended = threading.Event()

    def endless(question: Any) -> Iterator[dict]:
        try:
            while True:
                yield {"text": "x" * 1000}
        finally:
            ended.set()

    with serving({"endless": endless}) as server:
        answers = asked(server, "endless", {})
        assert next(answers) and not ended.is_set()
        answers.close()
        assert ended.wait(5)
    assert not capfd.readouterr().err


def test_what_breaks_is_a_line_and_the_server_lives(capfd):
    def broken(question: Any) -> Iterator[dict]:
        raise RuntimeError("a defect\nof ours")
        yield {}

    with serving({"broken": broken, "whole": lambda question: (one for one in [{}])}) as server:
        assert sent(server, request(server, path="/broken")) == b""
        assert one(server, "whole", {}) == {}
    assert capfd.readouterr().err == "error: RuntimeError: a defect of ours\n"


def test_an_earlier_click_that_arrives_late_ends_nothing(server):
    newest, late = (asked(server, "write", {"text": TEXT, "max_new_tokens": 2000, "turn": turn}) for turn in (9, 8))
    assert next(newest)["tokens"] and [*late] == [{"text": "", "end": "another was begun"}]
    assert "token" in next(newest)
    elsewhere = asked(server, "write", {"text": TEXT, "turn": 2**40})
    assert next(elsewhere)["tokens"] and [*newest][-1]["end"] == "another was begun"


def test_ten_impatient_clicks_make_one_text(server):
    clicks = [asked(server, "write", {"text": TEXT, "max_new_tokens": 2000}) for _ in range(10)]
    for click in clicks:
        assert next(click)["tokens"]
    assert [list(click)[-1]["end"] for click in clicks[:9]] == ["another was begun"] * 9
    assert "token" in next(clicks[9])
    clicks[9].close()


@pytest.mark.parametrize(
    ("question", "wrong"),
    [
        ([], "question"),
        ({"prompt": "a"}, "'prompt' is not to be asked"),
        ({"text": 5}, "text"),
        ({"text": "!" * 50_001}, "50,000"),
        ({"text": TEXT * 2}, "24 tokens, more than the 16 that fit"),
        ({"text": "é"}, "does not know the character 'é'"),
        ({"ids": []}, "no ids"),
        ({"ids": [37]}, "from 0 to 36"),
        ({"ids": [1] * (MOST_TOKENS + 1)}, "at most 2,048"),
        ({"ids": [True]}, "whole number"),
        ({"ids": [1], "at": 1}, "at is '1'"),
        ({"layer": 3}, "layer is '3'; it must be a whole number from 1 to 2"),
        ({"head": 0}, "head"),
        ({"off": [[1, 4]]}, "head is '4'"),
        ({"off": [[1]]}, "list of [layer, head]"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"temperature": None}, "temperature"),
        ({"top_p": 0}, "top p"),
        ({"top_k": 0}, "top k"),
        ({"max_new_tokens": 10**9}, "max new tokens"),
    ],
)
def test_a_question_that_can_not_be_answered_is_told_in_a_line(inside, question, wrong):
    for answer in inside.answers.values():
        if answer != inside.about:
            with pytest.raises(ValueError, match=re.escape(wrong)) as error:
                next(answer(question))
            assert len(str(error.value)) < 300 and "\n" not in str(error.value)


# The numbers.


def logits_by_hand(model: GPT, ids: list[int]) -> torch.Tensor:
    """What the model says after each of the ids, one window at a time: (T, V)."""
    windows = [ids[window_start(end, SMALL.context_length) : end] for end in range(1, len(ids) + 1)]
    with torch.no_grad():
        return torch.stack([model(torch.tensor([window]))[0, -1] for window in windows])


def close(found: Any, expected: Any) -> bool:
    return torch.allclose(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("ids", [LETTERS.encode(TEXT).tolist(), LONG], ids=["a prompt", "beyond the context"])
def test_probabilities_and_surprises_are_the_models(model, inside, ids):
    (answer,) = inside.read({"ids": ids, "temperature": 0.5, "top_k": 4, "top_p": 0.8})
    log_p = logits_by_hand(model, ids).log_softmax(dim=-1)
    assert [token["id"] for token in answer["tokens"]] == ids and "bits" not in answer["tokens"][0]
    for at, token in enumerate([*answer["tokens"][1:], answer["next"]]):
        p, top = log_p[at].exp(), log_p[at].topk(LIKELIEST)
        assert close([row[1] for row in token["likely"]], top.values.exp())
        assert [row[0] for row in token["likely"]] == [visible(LETTERS, i) for i in top.indices.tolist()]
        four = (p[top.indices[:4]] ** 2) / (p[top.indices[:4]] ** 2).sum()  # temperature 1/2 squares
        kept = four * (four.cumsum(0) - four < 0.8)
        assert close([row[3] for row in token["likely"]], [*(kept / kept.sum()).tolist(), *[0] * (LIKELIEST - 4)])
        if "bits" in token:
            assert close(token["bits"], [-log_p[at, ids[at + 1]] / math.log(2)] * 2)
            assert close(token["p"][:2], [p[ids[at + 1]]] * 2)


def test_what_is_written_is_what_generation_writes_with_the_numbers_that_reading_finds(model, inside):
    question = {"text": TEXT, "temperature": 1.5, "top_p": 0.9, "seed": 7, "max_new_tokens": 30}
    first, *rest, last = inside.write(question)
    choice = {"temperature": 1.5, "top_k": None, "top_p": 0.9, "seed": 7}
    expected = generate_text(model, LETTERS, [LETTERS.encode(TEXT).tolist()], 30, **choice)
    assert [line["token"]["id"] for line in rest] == [int(ids) for ids in expected]
    assert "".join(line["text"] for line in rest) == LETTERS.decode([line["token"]["id"] for line in rest])
    tokens = [*first["tokens"], *[line["token"] for line in rest]]
    (read,) = inside.read({"ids": [token["id"] for token in tokens], "temperature": 1.5, "top_p": 0.9})
    for mine, its in zip(tokens[1:], read["tokens"][1:], strict=True):
        assert close(mine["bits"], its["bits"]) and close(mine["p"], its["p"])
    assert all(line["token"]["p"][2] > 0 for line in rest)
    assert last == {"text": "", "end": "it is as long as was asked"}


def test_the_longest_text_that_can_be_written_can_be_read(inside):
    (about,) = inside.about({})
    assert about["longest"] + about["most_new"] == MOST_TOKENS and about["longest"] == SMALL.context_length
    (answer,) = inside.read({"ids": [*range(32)] * (MOST_TOKENS // 32), "max_new_tokens": about["most_new"]})
    assert len(answer["tokens"]) == MOST_TOKENS and answer["next"]["likely"]


def test_an_end_of_text_ends_it_and_what_is_no_text_never_comes():
    model = randomised(VARIANTS["default"].__class__(vocab_size=300, context_length=16, num_layers=1, d_model=16))
    with torch.no_grad():
        model.head.weight.zero_()
    *_, token, last = Inside(model, BYTES, [256], SETTINGS).write({"max_new_tokens": 2000})
    assert token["token"]["text"] == "<|endoftext|>" and last["end"] == "the model ended it"
    assert all(row[3] == pytest.approx(1 / 257, rel=1e-3) for row in token["token"]["likely"] if "unused" not in row[0])


@pytest.mark.parametrize("name", ["default", "gpt2", "2017", "relu2"])
def test_a_head_switched_off_is_one_whose_values_are_zero(name):
    model = randomised(VARIANTS[name])
    without = copy.deepcopy(model)
    with torch.no_grad():
        for layer, head in ((0, 1), (1, 2)):
            for parameter in without.blocks[layer].attention.heads[head].value.parameters():
                parameter.zero_()
    question, off = {"ids": LONG}, {"off": [[1, 2], [2, 3]]}
    (whole,), (expected,) = inside_of(model).read(question), inside_of(without).read(question)
    (found,) = inside_of(model).read(question | off)
    for mine, its, before in zip(found["tokens"][1:], expected["tokens"][1:], whole["tokens"][1:], strict=True):
        assert close(mine["bits"], [before["bits"][0], its["bits"][0]]) and close(mine["p"][2], its["p"][2])
    assert not close([t["bits"][1] for t in found["tokens"][1:]], [t["bits"][1] for t in whole["tokens"][1:]])
    wanted = {"text": TEXT, "max_new_tokens": 30, "temperature": 1.0}
    mine = [line["token"] for line in inside_of(model).write(wanted | off) if "token" in line]
    its = [line["token"] for line in inside_of(without).write(wanted) if "token" in line]
    assert [token["id"] for token in mine] == [token["id"] for token in its]
    (read,) = inside_of(model).read(off | {"ids": [*LETTERS.encode(TEXT).tolist(), *[token["id"] for token in mine]]})
    assert all(close(one["bits"], other["bits"]) for one, other in zip(mine, read["tokens"][12:], strict=True))


@pytest.mark.parametrize("name", ["qwen3", "2017"])
def test_a_token_looks_where_the_heads_say_also_beyond_the_context(name):
    model = randomised(VARIANTS[name])
    inside, (width, heads) = inside_of(model), (VARIANTS[name].head_width, VARIANTS[name].num_heads)
    without = copy.deepcopy(model)
    without.blocks[0].attention.projection.weight.data[:, :width] = 0
    for at, off in itertools.product((0, 9, 15, 16, 30, len(LONG) - 1), ([], [[1, 1]])):
        start = window_start(at + 1, SMALL.context_length)
        maps = attention_maps(without if off else model, torch.tensor(LONG[start : at + 1]))
        for layer, head in itertools.product(range(2), range(heads)):
            question = {"ids": LONG, "at": at, "layer": layer + 1, "head": head + 1, "off": off}
            (found,) = inside.attention(question)
            assert found["start"] == start and close(found["weights"], maps[layer, head, -1])


def test_a_text_is_read_while_another_is_written(server, inside):
    writing = asked(server, "write", {"text": TEXT, "max_new_tokens": 1000})
    assert next(writing)["tokens"]
    for _ in range(3):
        assert one(server, "read", {"text": TEXT, "off": [[1, 1]]})["next"]
    assert "token" in next(writing)
    writing.close()


@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "gpt2"])
def test_tokens_can_be_seen_whatever_they_are(kind, request, code):
    if kind == "gpt2":
        request.getfixturevalue("tiktoken_cache")
    text = "é €\n\t\0漢🚀\u200b"
    made = {"char": lambda: CharTokenizer("".join(sorted(set(text)))), "bpe": lambda: train_bpe([code], 300)}
    tokenizer = made.get(kind, lambda: named_tokenizer(kind))()
    shown = "".join(visible(tokenizer, token) for token in tokenizer.encode(text).tolist())
    plain, parts = re.sub("⟨(.*?)⟩", "", shown), re.findall("⟨(.*?)⟩", shown)
    assert plain.isprintable() and all("·⏎⇥"[i] in shown for i in range(3)) and r"\x00" in shown
    assert bool(parts) == (kind != "char") and all(re.fullmatch("[0-9a-f]{2}( [0-9a-f]{2})*", part) for part in parts)
    assert visible(tokenizer, tokenizer.vocab_size + 5) == f"⟨unused {tokenizer.vocab_size + 5}⟩"


# The command.


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--page --chat", "--page and --chat can't be used together"),
        ("--page --attention a.png", "--page and --attention can't"),
        ("--page --num-samples 2", "--page and --num-samples can't"),
        ("--port 8000", "--port 8000 is where a --page is served; give both"),
        ("--page --port 70000", "--port is 70000; it must be at least 0, at most 65535"),
    ],
)
def test_settings_that_do_not_go_with_the_page_are_told(flags, said, capsys):
    with pytest.raises(SystemExit):
        sample.main(["out/none", *flags.split()])
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(server, inside):
    with pytest.raises(ValueError, match=f"--port {server.server_port} can't be used .*; choose another"):
        PageServer(inside.answers, server.server_port)


def test_ctrl_c_ends_the_command_cleanly_while_it_writes(trained):
    command = [sys.executable, ROOT / "sample.py", trained("run", "--steps", 1), "--page", "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    pipes["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
    with subprocess.Popen(list(map(str, [*command, "--prompt", "1 is"])), **pipes) as process:
        address = process.stdout.readline()
        port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S{40,})\n", address).groups()
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        for name, expected in (("about", "settings"), ("write", "tokens")):
            question = json.dumps({"text": "1 is", "max_new_tokens": 2000} if name == "write" else {})
            connection.request("POST", f"/{name}", question, {"X-Token": token})
            answer = connection.getresponse()
            assert expected in json.loads(answer.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130 and process.stderr.read() == "interrupted\n" and not process.stdout.read()
        connection.close()


# In a browser.


def expect(found: Any) -> Any:
    """What is awaited of a part of a page."""
    from playwright.sync_api import expect

    return expect(found)


@pytest.fixture
def opened(page: Any, server: PageServer) -> Any:
    """The page, open; afterwards its console was silent, and no request had left the machine."""
    page.goto(server.address)
    expect(page.locator("#name")).to_have_text("small")
    return page


def chip(page: Any, at: int) -> Any:
    return page.locator("#tokens span").nth(at)


def shown(page: Any, table: str) -> list[float]:
    """The last column of a table of the page."""
    cells = page.locator(f"{table} td:last-child").all_inner_texts()
    return [float(cell.strip("%<").replace("–", "0")) for cell in cells]


def percentages(likely: list[list], which: int) -> Any:
    return pytest.approx([100 * row[which] for row in likely], abs=0.06)


# A tiny model has written all before a slow machine's mouse is there: the page's own clock clicks.
STOP_SOON = """() => new Promise((done) => {
  document.querySelector("#write").click();
  const stop = document.querySelector("#stop");
  const timer = setInterval(() => stop.disabled || (clearInterval(timer), stop.click(), done()), 1);
})"""


@pytest.mark.browser
def test_by_mouse_a_text_is_written_and_its_tokens_looked_at(opened, inside):
    status = opened.locator("#status")
    opened.fill("#max_new_tokens", "2000")
    opened.evaluate(STOP_SOON)
    expect(status).to_contain_text("Stopped")
    opened.fill("#max_new_tokens", "20")
    opened.locator("#write").click(click_count=5)
    expect(status).to_contain_text("Done: it is as long as was asked. 32 tokens")
    *_, last, _ = inside.write({name: value for name, value in SETTINGS.items() if name != "name"})
    chip(opened, 5).hover()
    chip(opened, 31).hover()
    expect(opened.locator("#token-title")).to_have_text(f"Token 32: {last['token']['text']}")
    expect(opened.locator("#surprise")).to_contain_text(f"{last['token']['bits'][1]:.2f} bits")
    assert shown(opened, "#likely") == percentages(last["token"]["likely"], 3)
    opened.fill("#prompt", TEXT[::-1])
    opened.click("#read")
    expect(opened.locator("#tokens span")).to_have_count(len(TEXT) + 1)
    (read,) = inside.read({"text": TEXT[::-1], "temperature": 0.8, "top_p": 0.95})
    bits = [token["bits"][1] for token in read["tokens"][1:]]
    expect(status).to_contain_text(f"{sum(bits) / len(bits):.2f} bits each")
    colours = [chip(opened, at).evaluate("(one) => one.style.backgroundColor") for at in range(1, len(TEXT))]
    blue = [243 * (1 - min(1, bit / math.log2(SMALL.vocab_size))) for bit in bits]  # from the panel's to orange's
    assert [int(re.findall(r"\d+", colour)[2]) for colour in colours] == pytest.approx(blue, abs=1)
    chip(opened, len(TEXT)).click()
    expect(opened.locator("#token-title")).to_have_text("What comes next")
    assert shown(opened, "#likely") == percentages(read["next"]["likely"], 3)


@pytest.mark.browser
def test_heads_and_layers_by_mouse_and_by_keyboard(opened, inside):
    opened.click("#read")
    chip(opened, 9).hover()
    opened.select_option("#layer", "2")
    expect(opened.locator("#looks")).to_contain_text("Layer 2, head 1: where it looks from token 10")
    opened.focus("#head")
    opened.keyboard.press("ArrowDown")
    expect(opened.locator("#looks")).to_contain_text("Layer 2, head 2")
    (found,) = inside.attention({"text": TEXT, "at": 9, "layer": 2, "head": 2})
    assert shown(opened, "#weights") == pytest.approx(sorted(found["weights"], reverse=True)[:5], abs=6e-4)
    chip(opened, 9).click()
    for key, at in (("ArrowLeft", 9), ("ArrowRight", 10), ("Home", 1), ("ArrowRight", 2), ("End", 13), ("ArrowUp", 13)):
        opened.keyboard.press(key)
        expect(opened.locator("#tokens [aria-selected=true]")).to_be_focused()
        expect(opened.locator("#looks")).to_contain_text(f"from token {min(at, 12)},")
    chip(opened, 9).hover()
    opened.get_by_label("switch off layer 1, head 3").focus()
    opened.keyboard.press("Space")
    expect(opened.locator("#status")).to_contain_text("with all heads")
    (found,) = inside.read({"text": TEXT, "temperature": 0.8, "top_p": 0.95, "off": [[1, 3]]})
    assert shown(opened, "#likely") == percentages(found["tokens"][9]["likely"], 3)
    expect(opened.locator("#likely th.off")).to_be_visible()
    opened.click("#on")
    expect(opened.locator("#likely th.off")).to_be_hidden()
    opened.focus("#prompt")
    opened.keyboard.press("Control+Enter")
    expect(opened.locator("#status")).to_contain_text("Done")
    for width in (390, 1280):
        opened.set_viewport_size({"width": width, "height": 800})
        assert opened.evaluate("() => document.documentElement.scrollWidth") <= width
