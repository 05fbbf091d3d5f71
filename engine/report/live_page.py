"""The routes of the live page, for users of this machine who have its address.

Every request must name this machine as its host, come from no other page, and carry the token of
the address. A question is a JSON object; its answer is a stream of JSON objects, one a line.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from engine.core.cli import LOCAL_HOST, LOCAL_HOSTS
from engine.core.errors import UserError
from engine.core.files import read_json, to_json
from engine.report.inspector import Lines
from engine.report.page import content_security_policy, read_template
from engine.serving.api import API_PREFIX, Api
from engine.serving.openai_format import ApiError
from engine.serving.server import Server, read_body, refuse_foreign, send_stream

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
ANY_HOST = "0.0.0.0"  # all addresses of this machine
WRONG_TOKEN = "The token is missing or wrong. Open the address that sample.py printed at its start."
Answers = Mapping[str, Callable[[Any], Lines]]


class LivePage:
    """The page, and for POST /name the lines of answers[name](question).

    One thread computes. Answers of one name wait for each other, and end when their client
    disconnects.
    """

    def __init__(self, answers: Answers, server: Server):
        """Add the routes of the page to a server."""
        self.answers = answers
        self.token = secrets.token_urlsafe(32)
        self.address = f"http://{LOCAL_HOST}:{server.port}/?token={self.token}"
        self.page = read_template("live.html")
        policy = f"{content_security_policy(self.page)}; {PAGE_POLICY}"
        self.headers = {**SECURITY_HEADERS, "Content-Security-Policy": policy}
        self.locks = {name: asyncio.Lock() for name in answers}
        self.executor = ThreadPoolExecutor(max_workers=1)
        server.app.add_routes([web.get("/", self.send_page)])
        server.app.add_routes([web.post(f"/{name}", self.send_answer) for name in answers])
        server.app.on_response_prepare.append(self.add_headers)
        server.app.on_cleanup.append(self.stop)

    async def stop(self, app: web.Application) -> None:
        """Wait for the computing thread: Python crashes if a thread computes while it ends."""
        self.executor.shutdown()

    def authorize(self, request: web.Request) -> None:
        """Raise ApiError for a request that is not of the page."""
        refuse_foreign(request)
        token = request.headers.get("X-Token") or request.query.get("token", "")
        if not secrets.compare_digest(token.encode(errors="replace"), self.token.encode()):
            raise ApiError(WRONG_TOKEN, 403)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Restrict what a browser does with an answer of the page."""
        if request.path == "/" or request.path[1:] in self.answers:
            response.headers.update(self.headers)

    async def send_page(self, request: web.Request) -> web.Response:
        """Answer GET /, with the page: its script shows why a token is refused."""
        try:
            self.authorize(request)
        except ApiError as error:
            return web.Response(text=self.page, content_type="text/html", status=error.status)
        return web.Response(text=self.page, content_type="text/html")

    async def send_answer(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /name line by line; a mistake in the question is an error of status 400."""
        self.authorize(request)
        name = request.path[1:]
        async with self.locks[name]:
            lines = self.answers[name](await read_body(request))
            try:
                return await send_stream(request, "application/x-ndjson", self.compute(lines))
            finally:
                await self.call(lines.close)

    async def compute(self, lines: Lines) -> AsyncIterator[str]:
        """Yield the lines of an answer as text. Raises ApiError for a mistake in the question."""
        try:
            line = await self.call(next, lines, None)
            while line is not None:
                yield f"{to_json(line)}\n"
                line = await self.call(next, lines, None)
        except UserError as error:
            raise ApiError(str(error)) from None

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the computing thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a run, from its folder or that of a checkpoint; an import has none."""
    folders = (path, *path.resolve().parents[:2])
    abouts = (folder / "about.json" for folder in folders)
    about = next((path for path in abouts if path.exists()), None)
    return read_json(about).get("prompts", []) if about else []


def serve(answers: Answers, port: int, host: str, api: Api | None = None) -> None:
    """Print the address of the page, and of the API if there is one; serve until Ctrl-C.

    With an API, other machines may ask it if the host is not this one.
    """
    server = Server(port, host)
    page = LivePage(answers, server)
    if api:
        api.add_to(server)
        print(f"OpenAI-compatible API: http://{host}:{server.port}{API_PREFIX.rstrip('/')}")
    stop_hint = "(Ctrl-C stops the server)"
    is_local = host in (*LOCAL_HOSTS, ANY_HOST)
    print(f"Open {page.address} {stop_hint}" if is_local else stop_hint, flush=True)
    try:
        server.serve()
    finally:  # after a second Ctrl-C too
        if api:
            api.worker.stop()
