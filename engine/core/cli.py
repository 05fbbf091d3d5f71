"""How a command starts and ends: OpenMP threads, signals, messages, errors and exit codes."""

import io
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TextIO

from tqdm import tqdm

from engine.core.errors import UserError

LOCAL_HOST = "127.0.0.1"  # the address of this machine, which no other reaches
LOCAL_HOSTS = (LOCAL_HOST, "localhost", "::1")
PROCESS_START = time.monotonic()  # of this process, approximately
# A terminal that closes, and job schedulers before a time limit. Windows has SIGTERM only.
END_SIGNAL_NAMES = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
SAME_SIGNAL_SECONDS = 1.0  # torchrun repeats a signal to processes that already received it
OUT_OF_MEMORY_PATTERN = re.compile(
    "out of memory|can.t allocate memory|size calculation overflowed", re.I
)
LOST_CONNECTION_PATTERN = re.compile(r"/gloo/|NCCL error|(closed|reset) by peer", re.I)
LOG_SECONDS = 30.0  # between lines about the progress of long work
MAX_MESSAGE_CHARS = 1000
CONTROL_PATTERN = re.compile("[\x00-\x1f\x7f-\x9f]")  # a name may contain commands of a terminal
# Polls of an idle OpenMP thread before it sleeps. libgomp's default, 300,000 or about 3 ms, takes
# cores from other processes. Decoding is slow if threads sleep too often.
SPIN_COUNTS = {"train": 8000, "decode": 12000}


def tune_openmp_spinning(work: Literal["train", "decode"]) -> None:
    """Let idle OpenMP threads sleep soon, unless set otherwise. Call it before torch is loaded."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNTS[work])


def say(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text above the progress bar, on stdout by default. Ignores a closed pipe."""
    file = file or sys.stdout
    try:
        tqdm.write(text, file=file, end=end)
        file.flush()
    except BrokenPipeError:
        _discard_output(file)


def _discard_output(file: TextIO) -> None:
    """Redirect a stream whose pipe is closed to the null device."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def _print_progress(text: str) -> None:
    """Print a state of a progress bar as a line, without the spaces that erase an earlier one."""
    if text.strip():
        say(text.strip(), file=sys.stderr)


def progress_bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Return a progress bar on stderr; outside a terminal, print a line every LOG_SECONDS."""
    if not sys.stderr.isatty():
        intervals = dict.fromkeys(("mininterval", "delay"), LOG_SECONDS)
        options |= {"file": SimpleNamespace(write=_print_progress), "miniters": 0, **intervals}
    return tqdm(iterable, **{"leave": False, "dynamic_ncols": True, **options})


def warn(text: str) -> None:
    """Print a warning on stderr, above the progress bar."""
    say(f"warning: {text}", file=sys.stderr)


def count_noun(count: float, noun: str) -> str:
    """Return a number and a noun, in the plural unless the number is 1."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def find_end_signals() -> list[int]:
    """Return the signals that ask for an end, without those that are ignored, as under nohup."""
    numbers = [getattr(signal, name) for name in END_SIGNAL_NAMES if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


class Interruption:
    """Record Ctrl-C or another signal to end in ``signal``, so that a loop can save and stop.

    A repeated one raises KeyboardInterrupt: Ctrl-C at once, others after SAME_SIGNAL_SECONDS.
    """

    def __enter__(self) -> "Interruption":
        self.signal = 0
        self.received_at = 0.0
        numbers = [signal.SIGINT, *find_end_signals()]
        self.handlers = {number: signal.signal(number, self.handle) for number in numbers}
        return self

    def handle(self, number: int, frame: Any) -> None:
        """Record the first signal; raise KeyboardInterrupt when it is repeated."""
        seconds = time.monotonic() - self.received_at
        if self.signal == number and (number == signal.SIGINT or seconds > SAME_SIGNAL_SECONDS):
            raise KeyboardInterrupt
        if not self.signal:
            self.signal = number
            self.received_at = time.monotonic()

    def __exit__(self, *exception: Any) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


def shell_command(*words: object) -> str:
    """Return a command to paste into a shell, in which each word stays one argument.

    A path that looks like a flag gets ``./``.
    """
    paths = [word for word in words if isinstance(word, Path) and str(word).startswith("-")]
    return shlex.join(f"./{word}" if word in paths else str(word) for word in words)


def escape_controls(text: str) -> str:
    """Return a text with ``?`` for control characters, which could command a terminal."""
    return CONTROL_PATTERN.sub("?", text)


def describe_error(error: Exception) -> str | None:
    """Return one line that describes an error of the user or the system; None: it is a bug."""
    message = " ".join(str(error).split())[:MAX_MESSAGE_CHARS]
    text = message if isinstance(error, RuntimeError) else ""
    class_names = [cls.__name__ for cls in type(error).__mro__]
    if isinstance(error, MemoryError) or OUT_OF_MEMORY_PATTERN.search(text):
        return f"out of memory ({message[:200]}). Use a smaller model or batch."
    if LOST_CONNECTION_PATTERN.search(text) or "DistError" in class_names:  # of torch.distributed
        return f"lost the connection to another process ({message[:200]}). See its own error."
    if isinstance(error, OSError) and error.filename:
        return " ".join(f"{error.strerror}: {error.filename}".split())[:MAX_MESSAGE_CHARS]
    return message if isinstance(error, UserError | OSError) else None


def run_command(main: Callable[[], int | None]) -> None:
    """Run the main function of a command and exit, with code 1 after an error.

    An error is printed as one line. A bug, and with ``--debug`` every error, shows its traceback.
    """
    code = 1
    debug = "--debug" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--debug"]
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  a closed stream is None
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print ? for characters that the terminal lacks
    for end_signal in find_end_signals():  # so that `finally` clauses run
        signal.signal(end_signal, lambda number, frame: sys.exit(128 + number))
    try:
        code = main() or 0
    except BrokenPipeError:  # the reader of stdout, such as head, has ended
        _discard_output(sys.stdout)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        line = None if debug else describe_error(error)
        if line is None:
            cause: BaseException | None = error
            while cause:  # let the traceback show the errors that were replaced
                cause.__suppress_context__ = False
                cause = cause.__context__
            raise
        sys.stderr.write(f"error: {escape_controls(line)}\n")  # one write: other ranks may write
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is saved: ignore a late Ctrl-C
    sys.exit(code)
