"""HTTP, whatever is served: the socket, who may ask, bodies, and errors as JSON."""

import asyncio
import codecs
import contextlib
import logging
import re
import socket
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Message, Send

from engine.core.cli import LOCAL_HOST, describe_error
from engine.core.errors import UserError
from engine.serving.openai_format import ApiError

MAX_PENDING_CONNECTIONS = 1024  # accepted later; the system refuses more
MAX_SILENT_SECONDS = 30  # of a connection after an answer
READ_TIMEOUT_SECONDS = 30.0  # for receiving a body
STOP_TIMEOUT_SECONDS = 1  # for the answers in progress
LOCAL_HOST_PATTERN = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")


def listen(port: int = 0, host: str = LOCAL_HOST) -> socket.socket:
    """Return a socket on a port; 0: any free one. Raises UserError if it is not available."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = min(infos)  # IPv4 if a name has both
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(address, family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        problem = f"--host and --port: not available (got {host}:{port}: {reason})"
        raise UserError(f"{problem}. Choose others, or leave them out.") from None
    # Connections inherit it; otherwise the first chunk waits 40 ms for a receipt of the headers.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def make_server(app: Starlette) -> uvicorn.Server:
    """Return the server of an application. Its ``run`` ends with Ctrl-C or ``should_exit``."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=logging.CRITICAL,  # errors are logged by to_api_error
        access_log=False,
        server_header=False,
        backlog=MAX_PENDING_CONNECTIONS,
        timeout_keep_alive=MAX_SILENT_SECONDS,
        timeout_graceful_shutdown=STOP_TIMEOUT_SECONDS,
    )
    return uvicorn.Server(config)


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Return the answer of a request that raised an error."""
    if isinstance(error, HTTPException):  # of a path or a method
        request_line = f"{request.method} {request.url.path}"[:100]
        paths = "/v1/chat/completions, /v1/completions or /v1/models"
        error = ApiError(f"{request_line}: {error.detail}. Use {paths}.", error.status_code)
    api_error = to_api_error(error)
    headers = {"WWW-Authenticate": "Basic"} if api_error.status == 401 else None
    return JSONResponse(api_error.to_json(), api_error.status, headers)


def to_api_error(error: Exception) -> ApiError:
    """Return the error that a client receives; log the traceback of a bug."""
    if isinstance(error, ApiError):
        return error
    description = describe_error(error)
    if description is None:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
    return ApiError(description or "internal error. See the server's output.", 500)


def refuse_foreign(request: Request) -> None:
    """Raise ApiError for a request that a page of another site may have sent."""
    host = request.headers.get("host", "")
    if not LOCAL_HOST_PATTERN.fullmatch(host):
        raise ApiError("the host must be localhost", 403)
    if request.headers.get("origin") not in (None, f"http://{host}"):
        raise ApiError("the request comes from another page", 403)


async def read_body(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a request. Raises ApiError."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError("the body: must not be compressed. Leave Content-Encoding out.", 415)
    content = bytearray()
    num_bytes = 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes <= max_bytes:  # of a longer one the rest is read and left out
                    content += chunk
    except (TimeoutError, ClientDisconnect):
        raise ApiError("the body: not received in time. Send it again.", 408) from None
    if num_bytes > max_bytes:
        raise ApiError(f"the body: at most {max_bytes:,} bytes (got {num_bytes:,})", 413)
    try:
        body = from_json(content.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body: not valid JSON ({error})") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


class ChunkedResponse(StreamingResponse):
    """Sends the chunks of an answer as they arrive, and closes them if the client leaves.

    The status is sent with the first chunk, so that an error before it is the answer.
    """

    body_iterator: AsyncGenerator[str, None]

    async def stream_response(self, send: Send) -> None:
        """Send the chunks, by the protocol of ASGI."""
        waiting: list[Message] = []

        async def send_with_chunk(message: Message) -> None:
            waiting.append(message)
            while waiting and "body" in message:
                await send(waiting.pop(0))

        async with contextlib.aclosing(self.body_iterator):
            await super().stream_response(send_with_chunk)
