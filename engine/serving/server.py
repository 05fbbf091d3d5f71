"""The HTTP server, to which an API and pages add routes: errors, streams, and who may ask."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from engine.core.cli import LOCAL_HOST, LOCAL_HOSTS, describe_error, find_end_signals
from engine.core.errors import UserError
from engine.core.files import parse_json
from engine.serving.openai_format import ApiError

MAX_BODY_BYTES = 2**20
HTTP_PORT = 80  # which an address need not name
MAX_PENDING_CONNECTIONS = 1024  # accepted later; the system refuses more
MAX_SILENT_SECONDS = 30.0  # of a connection without a request
READ_TIMEOUT_SECONDS = 30.0  # for receiving a body
WRITE_TIMEOUT_SECONDS = 10.0  # for sending a chunk


class Server:
    """Serves the routes of ``app``. A mistake in a request is answered as OpenAI's API does.

    A connection without a request is closed after MAX_SILENT_SECONDS.
    """

    def __init__(self, port: int = 0, host: str = LOCAL_HOST):
        """Listen on a port; 0: any free one. Raises UserError if it is not available."""
        self.app = web.Application(middlewares=[answer_errors], client_max_size=MAX_BODY_BYTES)
        try:
            self.socket = socket.create_server((socket.gethostbyname(host), port))
        except OSError as error:
            reason = str(error.strerror).partition(" (")[0]
            problem = f"--host and --port: not available (got {host}:{port}: {reason})"
            raise UserError(f"{problem}. Choose others, or leave them out.") from None
        self.port = self.socket.getsockname()[1]

    def serve(self) -> None:
        """Serve until Ctrl-C or another signal to end, which then ends the process."""
        received: list[int] = []

        def end(number: int, frame: Any) -> None:
            received.append(number)
            loop.call_soon_threadsafe(task.cancel)

        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            task = loop.create_task(self.run())
            for number in find_end_signals():
                signal.signal(number, end)
            try:
                runner.run(wait_for(task))
            except asyncio.CancelledError:
                sys.exit(128 + received[0])

    async def run(self) -> None:
        """Serve until cancelled."""
        logging.getLogger("aiohttp.server").addFilter(is_error_of_server)
        runner = web.AppRunner(
            self.app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=0.1,
            keepalive_timeout=MAX_SILENT_SECONDS,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self.socket, backlog=MAX_PENDING_CONNECTIONS).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


async def wait_for(task: "asyncio.Task[None]") -> None:
    """Wait for a task; Ctrl-C cancels both."""
    await task


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Handle a request; an error becomes an answer."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        paths = {resource.canonical for resource in request.app.router.resources()}
        message = f"{error.text}. The paths are {', '.join(sorted(paths))}."
        api_error = ApiError(message, error.status)
    except Exception as error:
        api_error = to_api_error(error)
    return web.json_response(api_error.to_json(), status=api_error.status)


def to_api_error(error: Exception) -> ApiError:
    """Return the error that a client receives; log the traceback of a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return ApiError("the body: nested too deeply")
    description = describe_error(error)
    if description is None:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
    return ApiError(description or "internal error. See the server's output.", 500)


def refuse_foreign(request: web.Request) -> None:
    """Raise ApiError for a request that a page of another site may have sent."""
    port = request.get_extra_info("sockname")[1]
    hosts = [f"{host}:{port}" for host in LOCAL_HOSTS]
    hosts += LOCAL_HOSTS if port == HTTP_PORT else ()
    if request.headers.getall("Host", []) not in [[host] for host in hosts]:
        raise ApiError(f"the host must be {hosts[0]}", 403)
    if not {*request.headers.getall("Origin", [])} <= {f"http://{host}" for host in hosts}:
        raise ApiError("the request comes from another page", 403)


async def read_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a request. Raises ApiError."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            body = parse_json(await request.read(), Path("the body"))
    except TimeoutError:
        raise ApiError("the body: not received in time. Send it again.", 408) from None
    except web.RequestPayloadError:
        raise ApiError("the body: differs from its Content-Encoding. Send it again.") from None
    except UserError as error:
        raise ApiError(str(error)) from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


async def send_stream(
    request: web.Request, content_type: str, chunks: AsyncIterator[str]
) -> web.StreamResponse:
    """Answer with chunks, until the client leaves or does not read.

    An error before the first chunk is raised; a later one ends the connection.
    """
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = content_type
    try:
        async for chunk in chunks:
            if not response.prepared:
                await response.prepare(request)
            async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
                await response.write(chunk.encode())
    except (ConnectionError, TimeoutError):
        pass
    except Exception as error:
        if not response.prepared:
            raise
        to_api_error(error)  # logs a bug
        if request.transport:
            request.transport.abort()
    return response


def is_error_of_server(record: logging.LogRecord) -> bool:
    """Return whether a log record is not about a malformed request of a client."""
    errors = (HttpProcessingError, web.RequestPayloadError)
    return not (record.exc_info and isinstance(record.exc_info[1], errors))
