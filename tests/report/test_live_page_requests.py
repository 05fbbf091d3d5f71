"""The server of the live page: who may use it, and one text at a time."""

import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import serve_page

from engine.core.errors import UserError
from engine.report.page import read_template


def sound(question: Any) -> Iterator[dict]:
    yield {}


def refuse(question: Any) -> Iterator[dict]:
    raise UserError("The question: unsuitable.")
    yield


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    with serve_page({"about": sound, "read": refuse}) as server:
        yield server


def connect(server: Any) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)


def ask(server: Any, name: str, question: Any) -> Iterator[dict]:
    """Yield the lines of an answer; closing the iterator closes the connection."""
    with contextlib.closing(connect(server)) as connection:
        connection.request("POST", f"/{name}", json.dumps(question), {"X-Token": server.token})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        yield from map(json.loads, response)


def send(server: Any, method: str, path: str, headers: Any = (), body: Any = b"{}") -> Any:
    """Send a request of the page, with other headers; returns the response, read."""
    with contextlib.closing(connect(server)) as connection:
        with contextlib.suppress(ConnectionError):  # a large body may be refused early
            connection.request(method, path, body, {"X-Token": server.token, **dict(headers)})
        response = connection.getresponse()
        response.body = response.read()
        return response


def test_the_page_may_only_run_its_own_scripts_and_ask_its_server(server):
    headers = {"X-Token": "", "Host": f"localhost:{server.port}"}
    response = send(server, "GET", f"/?token={server.token}", headers)
    assert response.status == 200 and response.body.decode() == read_template("live.html")
    policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    assert not re.search(rb"https?:|innerHTML", response.body)
    assert server.socket.getsockname()[0] == "127.0.0.1"


REFUSED = {
    "another host": (403, {"headers": {"Host": "evil.example:80"}}),
    "another origin": (403, {"headers": {"Origin": "http://evil.example"}}),
    "no token": (403, {"headers": {"X-Token": ""}}),
    "an unknown question": (404, {"path": "/answers"}),
    "another method": (405, {"method": "PUT"}),
    "an unsuitable question": (400, {"path": "/read"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_requests_that_are_not_the_pages_are_refused_and_the_server_continues(server, name):
    status, changes = REFUSED[name]
    path = changes.get("path", "/about")
    response = send(server, **{"method": "POST", **changes, "path": path})
    assert response.status == status
    assert path == "/answers" or "no-store" in response.headers["Cache-Control"]
    assert len(json.loads(response.body)["error"]["message"]) < 500
    assert list(ask(server, "about", {}))


def test_an_answer_delays_those_of_its_name_alone_and_ends_when_its_client_leaves():
    answered = []
    ended = threading.Event()

    def endless(question: Any) -> Iterator[dict]:
        answered.append(question)
        try:
            while True:
                yield {"text": "x" * 1000}
        finally:
            ended.set()

    with serve_page({"endless": endless, "sound": sound}) as server:
        first = ask(server, "endless", {"n": 1})
        assert next(first)
        with contextlib.closing(connect(server)) as second:
            second.request("POST", "/endless", '{"n": 2}', {"X-Token": server.token})
            time.sleep(0.2)  # the server receives it
            assert list(ask(server, "sound", {})) == [{}]
            assert answered == [{"n": 1}] and not ended.is_set()
        time.sleep(0.2)  # the server notices that the second client left
        first.close()
        assert ended.wait(10)
        assert next(ask(server, "endless", {"n": 3}))
    assert answered == [{"n": 1}, {"n": 3}]
