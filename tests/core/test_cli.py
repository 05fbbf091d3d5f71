"""How a command starts and ends: OpenMP threads, signals, errors and exit codes."""

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import ROOT, exit_code_of

from engine.core.cli import SAME_SIGNAL_SECONDS, SPIN_COUNTS, Interruption, shell_command
from engine.core.errors import UserError

OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python code in a process that can import the project."""
    environment = {name: x for name, x in os.environ.items() if name not in OPENMP_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=environment | {"PYTHONPATH": str(ROOT)},
    )


def run_python(code: str, *arguments: str) -> tuple[str, str, int]:
    """Run Python code; return its stdout, stderr and exit code."""
    process = start_python(code, *arguments)
    return *process.communicate(timeout=60), process.returncode


# Start.


def test_openmp_threads_sleep_soon_from_before_torch_is_imported():
    stop_at_torch = """
import os, runpy, sys

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtTorch())
os.environ.update(word.split("=") for word in sys.argv[3:])
runpy.run_path(sys.argv[1], run_name=sys.argv[2])
"""
    for values, expected in (
        ("train.py imported", None),
        ("train.py __main__", SPIN_COUNTS["train"]),
        ("sample.py __main__", SPIN_COUNTS["decode"]),
        ("train.py __main__ GOMP_SPINCOUNT=7", 7),
        ("train.py __main__ OMP_WAIT_POLICY=active", None),
    ):
        script, *options = values.split()
        assert run_python(stop_at_torch, str(ROOT / script), *options)[0] == f"{expected}\n"


def test_importing_a_module_has_no_side_effects():
    code = """
import importlib, json, os, signal, sys, threading
import torch

def state():
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    torch_state = [torch.get_num_threads(), torch.initial_seed(), str(torch.get_default_dtype())]
    return [dict(os.environ), handlers, torch_state, threading.active_count(), os.listdir()]

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([before == state(), torch.cuda.is_initialized()]))
"""
    folders = [ROOT / name for name in ("engine", "benchmarks", "examples")]
    paths = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    modules = {name.removesuffix(".__init__") for name in names}
    assert {"train", "sample", "benchmarks.speed", "engine.core.files"} <= modules
    output, errors, code = run_python(code, *modules)
    assert (errors, code) == ("", 0) and json.loads(output) == [True, False]


# Signals.


def test_second_ctrl_c_stops_at_once_and_another_signal_only_later():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = [signal.getsignal(number) for number in numbers]
    with Interruption() as interruption:  # torchrun passes on a signal of the process group
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        assert interruption.signal == signal.SIGTERM
        interruption.received_at -= SAME_SIGNAL_SECONDS
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with Interruption(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in numbers] == handlers


def test_a_hangup_ends_a_run_unless_it_is_ignored_as_under_nohup():
    code = "import os, signal\nfrom engine.core.cli import Interruption\n"
    code += "signal.signal(signal.SIGHUP, signal.{})\nwith Interruption() as interruption:\n"
    code += "    os.kill(os.getpid(), signal.SIGHUP)\nprint(int(interruption.signal))"
    for handler, number in (("SIG_DFL", signal.SIGHUP), ("SIG_IGN", 0)):
        assert run_python(code.format(handler))[:2] == (f"{int(number)}\n", "")


def test_a_printed_command_is_one_line_and_passes_each_word_on(tmp_path):
    words = ["a b", "$(touch hacked)", "it's", "a\\b'c", "é漢", ""]
    command = shell_command("printf", r"%s\0", *words)
    assert command.isprintable()
    output = subprocess.check_output(["bash", "-c", command], cwd=tmp_path)
    assert output == b"".join(os.fsencode(word) + b"\0" for word in words)
    assert not list(tmp_path.iterdir())
    assert shell_command("cat", Path("-n"), "-n", Path("a/-n")) == "cat ./-n -n a/-n"  # no flags


# End.


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (UserError("--steps: at least 1\n(got 0)."), "--steps: at least 1 (got 0)."),
        (MemoryError("Unable to allocate 7 TiB"), "Unable to allocate 7 TiB"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory. Tried"),
        (RuntimeError("[gloo/pair.cc:5] Connection closed by peer"), "closed by peer"),
        (OSError("the disk is full"), "the disk is full"),
        (IsADirectoryError(21, "Is a directory", "a\nb"), "Is a directory: a b"),
        (FileNotFoundError(2, "No such file", "a\x9b2Jé👩\u200d💻"), "a?2Jé👩\u200d💻"),
    ],
    ids=repr,
)
def test_error_that_is_not_a_bug_is_one_line_and_exit_code_1(error, expected, capsys):
    assert exit_code_of(Mock(side_effect=error)) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert expected in printed.err and not printed.out


@pytest.mark.parametrize(
    "error", [KeyError("gloo"), ValueError("out of memory"), UserError("--steps: 1")], ids=repr
)
def test_bug_and_with_debug_a_user_error_keeps_its_traceback(error, capsys, monkeypatch):
    def main() -> None:
        try:
            {}["the origin"]
        except KeyError:
            raise error from None

    monkeypatch.setattr(sys, "argv", ["train.py", *["--debug"] * isinstance(error, UserError)])
    with pytest.raises(type(error)) as caught:
        exit_code_of(main)
    assert capsys.readouterr().err == "" and sys.argv == ["train.py"]
    if isinstance(error, UserError):
        assert "KeyError: 'the origin'" in "".join(traceback.format_exception(caught.value))


def test_exit_code_is_what_main_returns_or_130_after_ctrl_c(capsys):
    codes = [exit_code_of(lambda code=code: code) for code in (None, 0, 3, 130)]
    assert codes == [0, 0, 3, 130] and exit_code_of(Mock(side_effect=SystemExit(2))) == 2
    assert exit_code_of(Mock(side_effect=KeyboardInterrupt)) == 130
    assert capsys.readouterr().err == "interrupted\n"


SIGNAL_IN_MAIN = """
def main():
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)
    finally:
        print("cleaned up")
"""
CTRL_C_AFTER_MAIN = """
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print("to the end")))
main = int
"""
NO_STDOUT = """
sys.stdout = sys.stderr = None
main = print
"""
UNSUPPORTED_CHARACTER = """
sys.stdout.reconfigure(encoding="latin-1")
main = lambda: print("→ done")
"""


@pytest.mark.parametrize(
    ("code", "output", "exit_code"),
    [
        (SIGNAL_IN_MAIN, "cleaned up\n", 128 + signal.SIGUSR1),
        (CTRL_C_AFTER_MAIN, "to the end\n", 0),
        (NO_STDOUT, "", 0),
        (UNSUPPORTED_CHARACTER, "? done\n", 0),
    ],
    ids=["sigusr1", "late-ctrl-c", "no-stdout", "unsupported-character"],
)
def test_command_ends_in_order(code, output, exit_code):
    imports = "import atexit, os, signal, sys, time\nfrom engine.core.cli import run_command\n"
    assert run_python(f"{imports}{code}run_command(main)") == (output, "", exit_code)


def test_closed_pipe_is_not_an_error():
    code = "from engine.core.cli import run_command\n"
    code += "run_command(lambda: [print('line ' * 1000, flush=True) for _ in iter(int, 1)])"
    process = start_python(code)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 1) and process.stderr.read() == ""
