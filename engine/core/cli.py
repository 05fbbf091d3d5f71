"""How a command starts and ends: OpenMP threads, signals, messages, errors and exit codes."""

import io
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from engine.core.errors import UserError

LOCAL_HOST = "127.0.0.1"  # the address of this machine, which no other reaches
LOCAL_HOSTS = (LOCAL_HOST, "localhost")
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
    """Let idle OpenMP threads sleep soon, unless environment variables set how they wait.

    Takes effect only before torch is imported.
    """
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


class _LogLines:
    """A stream for a progress bar that prints each of its states as a line on stderr."""

    def write(self, text: str) -> None:
        """Print the text without the spaces that erase an earlier state."""
        if text.strip():
            say(text.strip(), file=sys.stderr)


def progress_bar(iterable: Iterable[Any] | None = None, **options: Any) -> tqdm:
    """Return a progress bar on stderr; outside a terminal, print a line every LOG_SECONDS."""
    if sys.stderr.isatty():
        options["dynamic_ncols"] = True
    else:
        options |= {"file": _LogLines(), "mininterval": LOG_SECONDS, "delay": LOG_SECONDS}
        options["miniters"] = 0
    return tqdm(iterable, **{"leave": False, **options})


progress = partial(progress_bar, unit="B", unit_scale=True)


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

    A second Ctrl-C raises KeyboardInterrupt. So does another signal when it is repeated, unless it
    follows within SAME_SIGNAL_SECONDS.
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


def command_line(arguments: Sequence[str] | None, flag: str) -> str:
    """Return the command line of this process with ``flag`` at the end.

    ``arguments`` replace those of the process, unless None.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    return shell_command(sys.argv[0], *(word for word in arguments if word != flag), flag)


def shell_command(*words: object) -> str:
    """Return a command to paste into a shell, in which each word stays one argument.

    Control characters are shown as bash's escapes. A path that looks like a flag gets ``./``.
    """
    quoted_words = []
    for word in words:
        text = f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
        escaped = f"$'{''.join(map(escape_character, text))}'"
        quoted_words.append(shlex.quote(text) if text.isprintable() else escaped)
    return " ".join(quoted_words)


def escape_character(char: str) -> str:
    """Return a character as bash reads it between ``$'`` and ``'``."""
    if char.isprintable() and char not in "'\\":
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def describe_error(error: Exception) -> str | None:
    """Return one line that describes an error, or None if it is a bug.

    Not bugs: UserError, OSError, too little memory, and a lost connection to another rank.
    """
    message = " ".join(str(error).split())[:MAX_MESSAGE_CHARS]
    is_runtime_error = isinstance(error, RuntimeError)
    class_names = [cls.__name__ for cls in type(error).__mro__]
    if isinstance(error, MemoryError) or (
        is_runtime_error and OUT_OF_MEMORY_PATTERN.search(message)
    ):
        return f"out of memory ({message[:200]}). Use a smaller model or batch."
    if "DistError" in class_names or (  # of torch.distributed
        is_runtime_error and LOST_CONNECTION_PATTERN.search(message)
    ):
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
        line = CONTROL_PATTERN.sub(lambda match: escape_character(match[0]), line)
        sys.stderr.write(f"error: {line}\n")  # one write, because other ranks may write now
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # everything is saved: ignore a late Ctrl-C
    sys.exit(code)
