"""How a command begins and ends: how its threads wait, signals, errors, exit codes."""

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

STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
STARTED = time.monotonic()  # about when this process began
TOGETHER = 1.0  # seconds within which a second signal is the first, passed on
NO_MEMORY = re.compile("out of memory|can.t allocate memory|Storage size calculation overflowed", re.IGNORECASE)
PEER_LOST = re.compile("gloo|NCCL|by peer", re.IGNORECASE)
LONGEST = 1000  # characters of a message
# How often OpenMP's threads look for work before they sleep. libgomp's own 300,000 take some 3 ms, in which a busy
# neighbour's turn comes and stays; decoding's many small products suffer where threads sleep between them.
SPINS = {"train": 3000, "decode": 12000}

progress = partial(tqdm, None, unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)


def wait_briefly(work: Literal["train", "decode"]) -> None:
    """Have OpenMP's threads sleep soon when they wait for each other, unless the user says how: before torch is loaded.

    As it is they spin, and where another process is busy, they spin away the time of the one that they wait for.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS[work])


def say(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print above the progress bar, on stdout unless told otherwise; a reader that has left costs nothing."""
    file = file or sys.stdout
    try:
        tqdm.write(text, file=file, end=end)
        file.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def warn(text: str) -> None:
    """Print a line on stderr, above the progress bar."""
    say(f"warning: {text}", file=sys.stderr)


class Interruption:
    """Ctrl-C, SIGTERM or a closed terminal, noted and left to the loop, which saves.

    A second Ctrl-C stops at once, and so does a second of another signal, unless it comes together with the first, as
    when a whole group of processes is signalled and then torchrun passes it on.
    """

    def __init__(self):
        self.signal, self.since = 0, 0.0

    def __enter__(self) -> "Interruption":
        self.before = {number: signal.signal(number, self.note) for number in STOPPING}
        return self

    def note(self, number: int, frame: Any) -> None:
        if self.signal == number and (number == signal.SIGINT or time.monotonic() - self.since > TOGETHER):
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self.since = number, time.monotonic()

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def command_line(arguments: Sequence[str] | None, flag: str) -> str:
    """The command that this process runs, with its arguments (None: its own), and the flag at their end."""
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join([sys.argv[0], *(argument for argument in given if argument != flag), flag])


def explain(error: Exception) -> str | None:
    """Describe an error that is not a bug in one line; None for a bug.

    Not bugs are: a mistake of the user, too little memory, a lost rank, and what the operating system refuses.
    """
    message = " ".join(str(error).split())[:LONGEST]
    if isinstance(error, UserError):
        return message
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY.search(message)):
        return f"not enough memory ({message[:200]}); make the model, or what it works on at once, smaller"
    if isinstance(error, RuntimeError) and PEER_LOST.search(message):
        return f"another process ended, or can't be reached ({message[:200]}); its own error says why"
    if isinstance(error, OSError):
        return " ".join(f"{error.strerror}: {error.filename}".split())[:LONGEST] if error.filename else message
    return None


def take_debug_flag(arguments: list[str]) -> bool:
    """Remove ``--debug`` from a command line, in place; return whether it was there."""
    debug = "--debug" in arguments
    arguments[:] = [argument for argument in arguments if argument != "--debug"]
    return debug


def run_command(main: Callable[[], int | None]) -> None:
    """Run a command's main and exit: an error that can be explained is one line on stderr, and exit code 1.

    A bug keeps its traceback; with ``--debug`` on the command line every error does.
    """
    code = 1
    debug = take_debug_flag(sys.argv)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ?
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # lets `finally` clean up
    try:
        code = main() or 0
    except BrokenPipeError:  # the reader of our output, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        line = None if debug else explain(error)
        if line is None:
            raise
        sys.stderr.write(f"error: {line}\n")  # one write: other ranks may write at the same time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said and saved: a late Ctrl-C has nothing to stop
    sys.exit(code)
