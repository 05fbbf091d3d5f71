"""The HTTP server: who may ask, and connections without a request."""

import asyncio
import contextlib
import http.client
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from helpers import serve_in_thread

from engine.core.errors import UserError
from engine.serving.openai_format import ApiError
from engine.serving.server import Server, refuse_foreign, send_stream


@pytest.mark.parametrize("port", [80, 8000])
def test_the_port_of_http_may_be_left_out_of_the_host(port):
    transport: Any = SimpleNamespace(get_extra_info=lambda name, default=None: ("", port))
    headers = {"Host": "localhost", "Origin": "http://localhost"}
    with contextlib.nullcontext() if port == 80 else pytest.raises(ApiError):
        refuse_foreign(make_mocked_request("GET", "/", headers, transport=transport))


def test_a_port_in_use_is_an_error():
    server = Server()
    with pytest.raises(UserError, match="--port"):
        Server(server.port)


def test_only_a_connection_that_stays_silent_is_closed(monkeypatch):
    monkeypatch.setattr("engine.serving.server.MAX_SILENT_SECONDS", 0.3)
    release = asyncio.Event()

    async def chunks() -> AsyncIterator[str]:
        yield "first\n"
        await release.wait()
        yield "last\n"

    async def answer(request: web.Request) -> web.StreamResponse:
        return await send_stream(request, "text/plain", chunks())

    async def end(request: web.Request) -> web.Response:
        release.set()
        return web.Response()

    server = Server()
    server.app.add_routes([web.get("/slow", answer), web.get("/end", end)])
    address = ("127.0.0.1", server.port)
    with serve_in_thread(server), contextlib.ExitStack() as stack:
        connections = [http.client.HTTPConnection(*address, timeout=30) for _ in range(2)]
        for connection, path in zip(connections, ("/slow", "/end"), strict=True):
            stack.callback(connection.close)
            if path == "/end":
                for sent in (b"", b"GET / HTTP/1.1\r\nHost: "):
                    silent = stack.enter_context(socket.create_connection(address, 30))
                    silent.sendall(sent)
                    assert silent.recv(1) == b""
            connection.request("GET", path)
        assert connections[0].getresponse().read() == b"first\nlast\n"
