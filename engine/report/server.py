"""A page that only this machine, and who has its address, can use: served with Python's own ``http.server``.

Every request must name this server as its host, come from no other page, and bring the token of the address. What it
sends is JSON of bounded size, and never more than text; what it gets are lines of JSON.
"""

import base64
import contextlib
import hashlib
import io
import itertools
import re
import secrets
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from engine.core.errors import UserError
from engine.core.files import parse_json, to_json

PAGE = Path(__file__).with_name("web") / "page.html"
LONGEST_BODY = 2**20  # bytes of a request
PATIENCE = 10.0  # seconds in which a request must have come, and each line of an answer be taken
MOST_CONNECTIONS = 128  # at one time
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# What the page may do beside running its own scripts: ask its server, and show the pictures that it holds.
POLICY = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def own_scripts_alone(page: str) -> str:
    """The beginning of a Content-Security-Policy under which a page may run its own scripts and styles, and no more."""
    hashes = {"style": "", "script": ""}
    for kind, content in re.findall(r"<(style|script)>(.*?)</\1>", page, re.DOTALL):
        hashes[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    return f"default-src 'none'; style-src{hashes['style']}; script-src{hashes['script']}"


class Reader(io.RawIOBase):
    """What comes from a connection in so many seconds, all together; TimeoutError after them."""

    def __init__(self, connection: socket.socket, seconds: float):
        self.connection, self.end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        if (left := self.end - time.monotonic()) <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """One request: answered, or refused with its reason, a line on stderr. HTTP/1.0: a connection has one."""

    disable_nagle_algorithm = True  # lines are small, and awaited

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(Reader(self.connection, PATIENCE))

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if why := self.stranger(parse_qs(query).get("token", [""])[-1]):
            self.send_error(403, why)
        elif path != "/":
            self.send_error(404, "there is only one page, at /")
        else:
            self.begin(200, "text/html; charset=utf-8")
            self.wfile.write(self.server.page)

    def do_POST(self) -> None:
        lengths = self.headers.get_all("Content-Length", [])
        if why := self.stranger(self.headers.get("X-Token", "")):
            self.send_error(403, why)
        elif self.path.removeprefix("/") not in self.server.answers:
            self.send_error(404, f"the page asks for {', '.join(self.server.answers)}")
        elif "Transfer-Encoding" in self.headers or len(lengths) != 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
            self.send_error(411, "a request must say how long it is")
        elif int(lengths[0]) > LONGEST_BODY:
            self.send_error(413, f"a request has at most {LONGEST_BODY:,} bytes; shorten the text")
        elif len(body := self.rfile.read(int(lengths[0]))) == int(lengths[0]):
            self.answer(body)

    def stranger(self, token: str) -> str:
        """Why this is no request of the page's, or ''."""
        allowed = [f"http://{host}:{self.server.server_port}" for host in ("127.0.0.1", "localhost")]
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(hosts) != 1 or f"http://{hosts[0]}" not in allowed:
            return f"it is not for {allowed[0]}"
        if not set(origins) <= set(allowed):
            return "it comes from another page"
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            return "the token of the address is missing or wrong; open the address that was printed"
        return ""

    def answer(self, body: bytes) -> None:
        """Send what is found, a line each; a mistake before the first is an answer of its own."""
        try:
            records = self.server.answers[self.path.removeprefix("/")](parse_json(body, "the request"))
            first = next(records)
        except ValueError as error:
            return self.send_error(400, str(error))
        with contextlib.closing(records):  # when the client goes away, what it asked for ends
            self.begin(200, "application/x-ndjson")
            for record in itertools.chain([first], records):
                self.connection.settimeout(PATIENCE)
                self.wfile.write(to_json(record).encode(errors="replace") + b"\n")

    def begin(self, status: int, content_type: str) -> None:
        self.connection.settimeout(PATIENCE)
        self.send_response(status)
        for name, value in {"Content-Type": content_type, **self.server.headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse, saying why, and take what the client still sends, so that it reads on; also http.server's own."""
        message = message or HTTPStatus(code).phrase
        if code != 400:
            asked = f"{self.command} {self.path.partition('?')[0]}" if self.command else "a request"
            print(f"refused: {asked[:80]!a}: {message}", file=sys.stderr)
        self.begin(code, "application/json")
        if self.command != "HEAD":
            self.wfile.write(to_json({"error": message}).encode(errors="replace"))
        self.connection.shutdown(socket.SHUT_WR)
        while self.rfile.read1(2**16):
            pass

    def log_message(self, *arguments: Any) -> None:
        """Nothing: only what is refused is told."""


class PageServer(ThreadingHTTPServer):
    """Serves the page, and what it asks for: ``answers`` has functions by name, a JSON value → JSON objects."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, answers: dict[str, Callable[[Any], Iterator[dict]]], port: int = 0):
        """At a port, or 0: any that is free. Raises UserError if it can't be had."""
        self.answers, self.page, self.token = answers, PAGE.read_bytes(), secrets.token_urlsafe(32)
        self.headers = HEADERS | {"Content-Security-Policy": f"{own_scripts_alone(self.page.decode())}; {POLICY}"}
        self.room = threading.Semaphore(MOST_CONNECTIONS)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            why = f"--port {port} can't be used ({error.strerror})"
            raise UserError(f"{why}; choose another, or leave it out for any that is free") from None

    address = property(lambda self: f"http://127.0.0.1:{self.server_port}/?token={self.token}")

    def process_request(self, request: socket.socket, client_address: Any) -> None:
        if self.room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket.socket, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: socket.socket, client_address: Any) -> None:
        """A client that went away is no error; what else fails is a line."""
        if not isinstance(error := sys.exception(), OSError):
            print(f"error: {type(error).__name__}: {' '.join(str(error).split())[:200]}", file=sys.stderr)


def serve(answers: dict[str, Callable[[Any], Iterator[dict]]], port: int) -> None:
    """Print the page's address, open it in a browser if this is a terminal, and serve it until Ctrl-C."""
    with PageServer(answers, port) as server:
        print(server.address, flush=True)
        if sys.stdout.isatty():
            threading.Thread(target=webbrowser.open, args=[server.address], daemon=True).start()
        server.serve_forever()
