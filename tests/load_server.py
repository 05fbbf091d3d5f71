"""Load ``sample.py --serve``, and compare every answer with the one given alone.

    python tests/load_server.py out/NAME                 32 clients for 60 s
    python tests/load_server.py out/NAME --seconds 20

Prints the throughput next to that of one client, and the server's memory. Exit code 0: all answers
are equal, and the memory did not grow.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEY = "secret"
NUM_CLIENTS = 32
NUM_LEAVING = 10
NUM_REQUESTS = 96  # different ones, which the clients repeat
MAX_TOKENS = 64
WARMUP_SHARE = 0.3  # of the time, after which memory must not grow
MAX_GROWTH_BYTES = 16 * 2**20
WORDS = ("def ", "class ", "import os\n", "The ", "for i in range(", "return ", "\n", "x = ")


class Server:
    """The command, serving a model on a free port."""

    def __init__(self, run: str):
        flags = ["--serve", "--port", "0", "--device", "cpu", "--api-key", KEY]
        command = [sys.executable, str(ROOT / "sample.py"), run, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8")
        assert self.process.stdout
        match = re.search(r":(\d+)/v1", self.process.stdout.readline())
        assert match, "the server did not start"
        self.port = int(match[1])

    def memory(self) -> int:
        """Return the bytes of memory in use (Linux)."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def send(self, body: Any, key: str = KEY) -> tuple[int, dict[str, Any]]:
        """Send a completion request; returns status and answer."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Authorization": f"Bearer {key}"}
        with contextlib.suppress(ConnectionError):  # refused before the end of the body
            connection.request("POST", "/v1/completions", content, headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer

    def leave(self, body: dict[str, Any]) -> None:
        """Start a stream, and close the connection after its first piece."""
        content = json.dumps({**body, "stream": True, "max_tokens": 10**6}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            head += f"Content-Length: {len(content)}\r\n\r\n"
            connection.sendall(head.encode() + content)
            connection.recv(100)


def make_request(number: int) -> dict[str, Any]:
    """Return a request with its own prompt, length and seed; each second one is greedy."""
    draw = random.Random(number)
    prompt = "".join(draw.choices(WORDS, k=draw.randint(1, 8)))
    length = draw.randint(MAX_TOKENS // 2, MAX_TOKENS)
    temperature = 0.8 * (number % 2)
    return {"prompt": prompt, "max_tokens": length, "temperature": temperature, "seed": number}


def ask(server: Server, number: int) -> tuple[str, int]:
    """Return the text of a request and its number of tokens."""
    status, answer = server.send(make_request(number))
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def ask_repeatedly(server: Server, client: int, deadline: float, answers: list[Any]) -> None:
    """Collect (number of a request, text, number of tokens) until a time."""
    number = client
    while time.monotonic() < deadline:
        answers.append((number % NUM_REQUESTS, *ask(server, number % NUM_REQUESTS)))
        number += NUM_CLIENTS


def disturb(server: Server) -> list[int]:
    """Send what no client should while others are answered; return the statuses."""
    statuses = []
    for number in range(NUM_LEAVING):
        server.leave(make_request(number))
    for body, key in ((b" " * 10**8, KEY), (b'{"prompt": ', KEY), ({"prompt": "a"}, "wrong")):
        statuses.append(server.send(body, key)[0])
    return statuses


def main() -> int:
    """Load a server; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    server = Server(arguments.run)
    try:
        return load(server, arguments.seconds)
    finally:
        server.process.terminate()
        server.process.wait()


def load(server: Server, seconds: float) -> int:
    """Ask for each text alone, then with all clients at once, and compare."""
    start = time.monotonic()
    alone = [ask(server, number) for number in range(NUM_REQUESTS)]
    rate_alone = sum(num_tokens for _, num_tokens in alone) / (time.monotonic() - start)
    answers: list[Any] = []
    memory: list[tuple[float, int]] = []
    start = time.monotonic()
    deadline = start + seconds
    with ThreadPoolExecutor(NUM_CLIENTS + 1) as clients:
        futures = [
            clients.submit(ask_repeatedly, server, client, deadline, answers)
            for client in range(NUM_CLIENTS)
        ]
        disturbance = clients.submit(disturb, server)
        while time.monotonic() < deadline:
            time.sleep(0.2)
            memory.append((time.monotonic() - start, server.memory()))
        for future in futures:
            future.result()
    rate = sum(num_tokens for *_, num_tokens in answers) / (time.monotonic() - start)
    num_different = sum((text, count) != alone[number] for number, text, count in answers)
    settled = [size for moment, size in memory if moment > WARMUP_SHARE * seconds]
    growth = settled[-1] - settled[0]
    print(f"{len(answers):,} answers, {num_different:,} different from those alone")
    print(f"alone {rate_alone:,.0f} tokens/s, together {rate:,.0f}: {rate / rate_alone:.2f} times")
    print(f"memory {settled[0] / 1e6:,.0f} MB, then {settled[-1] / 1e6:,.0f} MB")
    print(f"100 MB, broken JSON, wrong key: {disturbance.result()}; {NUM_LEAVING} clients left")
    is_refused = disturbance.result() == [413, 400, 401]
    return 0 if not num_different and growth < MAX_GROWTH_BYTES and is_refused else 1


if __name__ == "__main__":
    sys.exit(main())
