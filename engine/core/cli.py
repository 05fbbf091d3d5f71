"""How a command starts and ends: OpenMP threads, signals, messages, errors and exit codes."""

import io
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TextIO

from tqdm import tqdm

from engine.core.errors import UserError

SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
STOP_SIGNALS = [getattr(signal, name) for name in SIGNAL_NAMES if hasattr(signal, name)]
PROCESS_START = time.monotonic()  # about when this process started
SAME_SIGNAL_SECONDS = 1.0  # torchrun passes on a signal that the process group received too
OUT_OF_MEMORY = re.compile("out of memory|can.t allocate memory|Storage size calculation overflowed", re.IGNORECASE)
PEER_LOST = re.compile("gloo|NCCL|by peer", re.IGNORECASE)
MAX_MESSAGE_CHARS = 1000
# How often an OpenMP thread polls for work before it sleeps. libgomp's default of 300,000 takes
# about 3 ms, too long where other processes need the core; decoding suffers from sleeping threads.
SPIN_COUNTS = {"train": 3000, "decode": 12000}

progress = partial(tqdm, None, unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)


def tune_openmp_spinning(work: Literal["train", "decode"]) -> None:
    """Let waiting OpenMP threads sleep soon, unless the environment sets how they wait.

    Takes effect only before torch is imported.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNTS[work])


def say(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print above the progress bar, on stdout by default; a closed pipe is ignored."""
    file = file or sys.stdout
    try:
        tqdm.write(text, file=file, end=end)
        file.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def warn(text: str) -> None:
    """Print a warning on stderr, above the progress bar."""
    say(f"warning: {text}", file=sys.stderr)


class Interruption:
    """Record Ctrl-C, SIGTERM or SIGHUP in ``signal``, so that a loop can save and stop.

    A second Ctrl-C raises KeyboardInterrupt. So does another signal's second delivery, unless it
    follows within SAME_SIGNAL_SECONDS.
    """

    def __init__(self) -> None:
        self.signal = 0
        self.received_at = 0.0

    def __enter__(self) -> "Interruption":
        self.previous = {number: signal.signal(number, self.handle) for number in STOP_SIGNALS}
        return self

    def handle(self, number: int, frame: Any) -> None:
        """Record the first signal; raise KeyboardInterrupt for the same one again."""
        seconds = time.monotonic() - self.received_at
        if self.signal == number and (number == signal.SIGINT or seconds > SAME_SIGNAL_SECONDS):
            raise KeyboardInterrupt
        if not self.signal:
            self.signal = number
            self.received_at = time.monotonic()

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def command_line(arguments: Sequence[str] | None, flag: str) -> str:
    """Return the command of this process with the flag at its end; None: its own arguments."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return shlex.join([sys.argv[0], *(word for word in arguments if word != flag), flag])


def explain(error: Exception) -> str | None:
    """Return one line for an error that is not a bug, and None for a bug.

    Not bugs are a UserError, too little memory, a lost rank and an error of the operating system.
    """
    message = " ".join(str(error).split())[:MAX_MESSAGE_CHARS]
    if isinstance(error, UserError):
        return message
    is_runtime_error = isinstance(error, RuntimeError)
    if isinstance(error, MemoryError) or (is_runtime_error and OUT_OF_MEMORY.search(message)):
        return f"out of memory ({message[:200]}). Use a smaller model or batch."
    if is_runtime_error and PEER_LOST.search(message):
        return f"lost the connection to another process ({message[:200]}). See its own error."
    if isinstance(error, OSError):
        if error.filename:
            message = " ".join(f"{error.strerror}: {error.filename}".split())
        return message[:MAX_MESSAGE_CHARS]
    return None


def take_debug_flag(arguments: list[str]) -> bool:
    """Remove ``--debug`` from a command line, in place; return whether it was there."""
    debug = "--debug" in arguments
    arguments[:] = [argument for argument in arguments if argument != "--debug"]
    return debug


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's main and exit. Errors that are not bugs are one line and exit code 1.

    A bug keeps its traceback; with ``--debug`` on the command line every error does.
    """
    code = 1
    debug = take_debug_flag(sys.argv)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  None without a console
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs `finally`
    try:
        code = main() or 0
    except BrokenPipeError:  # the reader of stdout, head for example, is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        line = None if debug else explain(error)
        if line is None:
            raise
        sys.stderr.write(f"error: {line}\n")  # one write: other ranks may write at the same time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is saved: ignore a late Ctrl-C
    sys.exit(code)
