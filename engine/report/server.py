"""The server of the live page, for users of this machine who have its address.

Every request must name this server as its host, come from no other page, and carry the token of
the address. A question is a JSON object; its answer is a stream of JSON objects, one a line.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.typedefs import Handler

from engine.core.cli import LOCAL_HOST, LOCAL_HOSTS
from engine.core.errors import UserError
from engine.core.files import parse_json, to_json
from engine.report.inspector import Lines
from engine.report.page import content_security_policy, read_template
from engine.serving.api import API_PREFIX, WRITE_TIMEOUT_SECONDS, Api

MAX_BODY_BYTES = 2**20
# Besides running its own scripts, the page may query its server and show embedded pictures.
PAGE_POLICY = (
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
WRONG_TOKEN = "the token is missing or wrong; open the address that sample.py printed"
ANY_HOST = "0.0.0.0"  # all addresses of this machine
HTTP_PORT = 80  # which an address need not name
MAX_PENDING_CONNECTIONS = 1024  # accepted later; the system refuses more
MAX_SILENT_SECONDS = 30.0  # of a connection without a request
Answers = Mapping[str, Callable[[Any], Lines]]


class PageServer:
    """Serves the page, and for POST /name the lines of answers[name](question).

    One thread computes. Answers of one name wait for each other, and end when their client
    disconnects. A connection without a request is closed after MAX_SILENT_SECONDS.
    """

    def __init__(
        self, answers: Answers, port: int = 0, host: str = LOCAL_HOST, api: Api | None = None
    ):
        """Listen on a port; 0: any free one. Raises UserError if it is not available.

        With an API its routes are served too, to other machines if the host is not this one. The
        page answers only to this machine.
        """
        self.answers = answers
        self.api = api
        self.token = secrets.token_urlsafe(32)
        self.page = read_template("live.html")
        policy = f"{content_security_policy(self.page)}; {PAGE_POLICY}"
        self.headers = {**SECURITY_HEADERS, "Content-Security-Policy": policy}
        self.locks = {name: asyncio.Lock() for name in answers}
        self.executor = ThreadPoolExecutor(max_workers=1)
        try:
            self.socket = socket.create_server((socket.gethostbyname(host), port))
        except OSError as error:
            reason = str(error.strerror).partition(" (")[0]
            problem = f"--host and --port: not available (got {host}:{port}: {reason})"
            raise UserError(f"{problem}. Choose others, or leave them out.") from None
        self.port = self.socket.getsockname()[1]
        self.address = f"http://{LOCAL_HOST}:{self.port}/?token={self.token}"

    async def run(self) -> None:
        """Serve until cancelled."""
        logging.getLogger("aiohttp.server").addFilter(is_error_of_server)
        app = web.Application(middlewares=[self.guard], client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.get("/", self.send_page)])
        app.add_routes([web.post(f"/{name}", self.send_answer) for name in self.answers])
        if self.api:
            app.add_routes(self.api.routes())
            app.on_response_prepare.append(self.api.add_headers)
        runner = web.AppRunner(
            app,
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
            if self.api:
                await self.api.stop()
            await runner.cleanup()
            self.executor.shutdown()  # Python crashes if a thread computes while it ends

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request of the page or of the API; refuse any other with {"error": reason}."""
        reason = self.foreign_reason(request)
        token = request.headers.get("X-Token") or request.query.get("token", "")
        is_token = secrets.compare_digest(token.encode(errors="replace"), self.token.encode())
        try:
            is_of_page = request.path == "/" or request.path[1:] in self.answers
            if self.api and not is_of_page:
                return await self.api.respond(request, handler, "" if self.api.key else reason)
            if reason or not is_token:
                raise web.HTTPForbidden(text=reason or WRONG_TOKEN)
            return await handler(request)
        except web.HTTPException as error:
            content = {"error": error.text}
            return web.json_response(content, status=error.status, headers=self.headers)

    def foreign_reason(self, request: web.Request) -> str:
        """Return the reason to refuse a request that another site may have sent; "" if none."""
        hosts = [f"{host}:{self.port}" for host in LOCAL_HOSTS]
        hosts += LOCAL_HOSTS if self.port == HTTP_PORT else ()
        if request.headers.getall("Host", []) not in [[host] for host in hosts]:
            return f"the host must be {hosts[0]}"
        if not {*request.headers.getall("Origin", [])} <= {f"http://{host}" for host in hosts}:
            return "the request comes from another page"
        return ""

    async def send_page(self, request: web.Request) -> web.Response:
        """Answer GET /."""
        return web.Response(text=self.page, content_type="text/html", headers=self.headers)

    async def send_answer(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /name line by line; a mistake in the question is an error of status 400."""
        name = request.path[1:]
        async with self.locks[name]:
            try:
                body = await request.read()
                lines = self.answers[name](parse_json(body, Path("the question")))
                line = await self.compute(next, lines, None)
            except (UserError, web.RequestPayloadError) as error:
                raise web.HTTPBadRequest(text=str(error)) from None
            response = web.StreamResponse(headers=self.headers)
            response.content_type = "application/x-ndjson"
            try:
                await response.prepare(request)
                while line is not None:
                    async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
                        await response.write(f"{to_json(line)}\n".encode())
                    line = await self.compute(next, lines, None)
            except (ConnectionResetError, TimeoutError):
                pass  # the client disconnected, or does not read
            finally:
                await self.compute(lines.close)
            return response

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the computing thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)


def is_error_of_server(record: logging.LogRecord) -> bool:
    """Return whether a log record is not about a malformed request of a client."""
    errors = (HttpProcessingError, web.RequestPayloadError)
    return not (record.exc_info and isinstance(record.exc_info[1], errors))


def serve(answers: Answers, port: int, host: str = LOCAL_HOST, api: Api | None = None) -> None:
    """Print the address of the page, and of the API if there is one; serve until Ctrl-C."""
    server = PageServer(answers, port, host, api)
    if api:
        print(f"OpenAI-compatible API: http://{host}:{server.port}{API_PREFIX.rstrip('/')}")
    stop_hint = "(Ctrl-C stops the server)"
    is_local = host in (*LOCAL_HOSTS, ANY_HOST)
    print(f"Open {server.address} {stop_hint}" if is_local else stop_hint, flush=True)
    try:
        asyncio.run(server.run())
    finally:  # after a second Ctrl-C too
        if api:
            api.worker.stop()
