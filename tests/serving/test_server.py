"""The HTTP server: its addresses, and who may ask."""

import http.client
import socket
from typing import Any

import pytest
from helpers import serve_in_thread
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from engine.core.errors import UserError
from engine.serving.openai_format import ApiError
from engine.serving.server import answer_error, listen, refuse_foreign


async def answer(request: Any) -> PlainTextResponse:
    refuse_foreign(request)
    return PlainTextResponse("right")


APP = Starlette(routes=[Route("/", answer)], exception_handlers={ApiError: answer_error})


def test_only_pages_of_this_machine_and_port_may_ask():
    with serve_in_thread(APP) as server:

        def ask(host: str, **headers: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request("GET", "/", headers={"Host": host, **headers})
            return connection.getresponse().status

        for host in ("localhost", f"localhost:{server.port}", "127.0.0.1:8000", "[::1]:8000"):
            assert ask(host) == ask(host, Origin=f"http://{host}") == 200
            for origin in ("http://evil.example", "http://localhost:3000", "null"):
                assert ask(host, Origin=origin) == 403
        for host in ("evil.example", "localhost.evil.example:80", "a@localhost", "[::1", "", "::1"):
            assert ask(host) == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "::", "0.0.0.0"])
def test_addresses_of_both_kinds_are_served_and_a_port_in_use_is_an_error(host):
    if ":" in host and not socket.has_ipv6:
        pytest.skip("needs IPv6")
    with listen(host=host) as listening:
        port = listening.getsockname()[1]
        for address in {"::": ["::1", "127.0.0.1"], "0.0.0.0": ["127.0.0.1"]}.get(host, [host]):
            socket.create_connection((address, port), 30).close()
        with pytest.raises(UserError, match="--port"):
            listen(port, host)
