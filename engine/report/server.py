"""The server of the live page, for users of this machine who have its address.

Every request must name this server as its host, come from no other page, and carry the token of
the address. A question is a JSON object; its answer is a stream of JSON objects, one a line.
"""

import asyncio
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from engine.core.errors import UserError
from engine.core.files import parse_json, to_json
from engine.report.page import WEB_DIR, content_security_policy

PAGE_PATH = WEB_DIR / "page.html"
MAX_BODY_BYTES = 2**20
# Beside its own scripts: the page may ask its server, and show the pictures that it contains.
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
WRITE_TIMEOUT_SECONDS = 10.0  # in which a client must take a line

Lines = Generator[dict[str, Any], None, None]


class PageServer:
    """Serves the page, and POST /name by answers[name], a function from a question to lines.

    One thread computes. Answers of one name wait for each other, and end when their client leaves.
    """

    def __init__(self, answers: Mapping[str, Callable[[Any], Lines]], port: int = 0):
        """Port 0 is any free one. Raises UserError if the port is not available."""
        self.answers = answers
        self.token = secrets.token_urlsafe(32)
        self.page = PAGE_PATH.read_text(encoding="utf-8")
        self.headers = {
            **SECURITY_HEADERS,
            "Content-Security-Policy": f"{content_security_policy(self.page)}; {PAGE_POLICY}",
        }
        self.locks = {name: asyncio.Lock() for name in answers}
        self.executor = ThreadPoolExecutor(max_workers=1)
        try:
            self.socket = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            problem = f"--port: not available (got {port}: {error.strerror})"
            raise UserError(f"{problem}. Choose another, or leave it out.") from None
        self.port = self.socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/?token={self.token}"

    async def run(self) -> None:
        """Serve until cancelled."""
        app = web.Application(middlewares=[self.guard], client_max_size=MAX_BODY_BYTES)
        app.add_routes([web.get("/", self.send_page), web.post("/{name}", self.send_answer)])
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        try:
            await web.SockSite(runner, self.socket).start()
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            self.executor.shutdown()  # Python crashes if a thread computes while it ends

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests that are not from the page; answer {"error": reason} to any refused."""
        try:
            if reason := self.reject_reason(request):
                raise web.HTTPForbidden(text=reason)
            return await handler(request)
        except web.HTTPException as error:
            message = {"error": error.text}
            return web.json_response(message, status=error.status, headers=self.headers)

    def reject_reason(self, request: web.Request) -> str:
        """Return why a request cannot be from the page, or an empty string."""
        hosts = [f"127.0.0.1:{self.port}", f"localhost:{self.port}"]
        if request.headers.getall("Host", []) not in [[host] for host in hosts]:
            return f"the host must be {hosts[0]}"
        if not {*request.headers.getall("Origin", [])} <= {f"http://{host}" for host in hosts}:
            return "the request comes from another page"
        token = request.headers.get("X-Token") or request.query.get("token", "")
        if not secrets.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return "the token is missing or wrong; open the address that sample.py printed"
        return ""

    async def send_page(self, request: web.Request) -> web.Response:
        """Answer GET /."""
        return web.Response(text=self.page, content_type="text/html", headers=self.headers)

    async def send_answer(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /name line by line; a mistake in the question is an error of status 400."""
        name = request.match_info["name"]
        if name not in self.answers:
            raise web.HTTPNotFound(text=f"the questions are {', '.join(self.answers)}")
        body = await request.read()
        async with self.locks[name]:
            try:
                lines = self.answers[name](parse_json(body, Path("the question")))
                line = await self.compute(next, lines, None)
            except UserError as error:
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
                pass  # the client left, or does not read
            finally:
                await self.compute(lines.close)
            return response

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread that computes."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)


def serve(answers: Mapping[str, Callable[[Any], Lines]], port: int) -> None:
    """Print the page's address, in a terminal also open it in a browser; serve until Ctrl-C."""
    server = PageServer(answers, port)
    print(f"Open {server.address} (Ctrl-C ends it)", flush=True)
    if sys.stdout.isatty():
        threading.Thread(target=webbrowser.open, args=[server.address], daemon=True).start()
    asyncio.run(server.run())
