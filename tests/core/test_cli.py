"""How a command begins and ends: what it sets, signals, errors, exit codes."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, exit_code_of

from engine.core.cli import SPINS, TOGETHER, Interruption, command_line, explain, wait_briefly
from engine.core.errors import UserError
from engine.core.settings import load_settings
from train import TrainConfig

THREADS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def python(code: str, *arguments: str) -> subprocess.Popen:
    """Python code in a process of its own, with the project to import, and nothing said of how threads wait."""
    environment = {name: value for name, value in os.environ.items() if name not in THREADS} | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "env": environment}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], **pipes)


# Beginning.


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": str(SPINS["train"])}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
    ],
    ids=str,
)
def test_threads_wait_briefly_unless_the_user_says_how(monkeypatch, said, expected):
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    wait_briefly("train")
    assert dict(os.environ) == before | expected
    os.environ.pop("GOMP_SPINCOUNT", None)


@pytest.mark.parametrize("command", ["train.py", "sample.py", "report.py"])
def test_how_threads_wait_is_set_before_torch_is_loaded(command):
    stop_at_torch = """
import os, runpy, sys

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, AtTorch())
runpy.run_path(sys.argv[1], run_name=sys.argv[2])
"""
    spins = SPINS["train" if command == "train.py" else "decode"]
    started = [python(stop_at_torch, str(ROOT / command), name) for name in ("__main__", "imported")]
    assert [process.communicate(timeout=60)[0] for process in started] == [f"{spins}\n", "None\n"]


def test_importing_a_module_does_nothing(tmp_path):
    code = """
import importlib, json, os, signal, sys, threading
import torch

def state():
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    numbers = [torch.get_num_threads(), torch.initial_seed(), str(torch.get_default_dtype()), torch.is_grad_enabled()]
    return [dict(os.environ), handlers, numbers, threading.active_count(), os.getcwd(), os.listdir()]

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([before == state(), torch.cuda.is_initialized()]))
"""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("*.py")]
    packages = [path for folder in ("engine", "benchmarks", "examples") for path in ROOT.glob(f"{folder}/**/*.py")]
    modules += [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in packages]
    assert {"train", "sample", "benchmarks.speed", "engine.nn.loss"} <= set(modules)
    process = python(code, *modules)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "") and json.loads(output) == [True, False]


# Signals.


def test_an_interruption_is_noted_and_what_was_there_before_comes_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        with Interruption() as interruption:
            assert interruption.signal == 0
            os.kill(os.getpid(), number)
            assert interruption.signal == number
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_second_ctrl_c_stops_at_once_another_signal_only_later():
    with Interruption() as interruption:  # torchrun passes on what the whole group was sent
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert interruption.signal == signal.SIGTERM  # the first
        interruption.since -= TOGETHER
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with Interruption(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_signals_are_as_before_after_an_error_too():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), Interruption():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_command_to_go_on_with_is_the_one_given_and_a_flag():
    arguments = ["config/a b.toml", "--resume", "--out", "it's", "--steps", "5"]
    said = command_line(arguments, "--resume")
    assert shlex.split(said) == [sys.argv[0], "config/a b.toml", "--out", "it's", "--steps", "5", "--resume"]
    process = python("from engine.core.cli import command_line\nprint(command_line(None, '--resume'))", "--out", "a b")
    assert process.communicate(timeout=60)[0] == "-c --out 'a b' --resume\n"


# Ending.


def raising(error: BaseException):
    def main():
        raise error

    return main


def test_a_command_s_exit_code_is_what_its_main_returns():
    assert [exit_code_of(lambda code=code: code) for code in (None, 0, 3, 130)] == [0, 0, 3, 130]
    assert exit_code_of(raising(SystemExit(2))) == 2


def test_our_own_errors_are_one_line_and_a_library_s_keep_their_traceback(capsys):
    assert exit_code_of(lambda: load_settings(TrainConfig, ["run.yaml"])) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: run.yaml is not a settings file") and printed.err.count("\n") == 1
    assert not printed.out
    assert exit_code_of(lambda: TrainConfig(out=Path("data/stdlib/run"))) == 1  # of a command, not of the engine
    assert re.match(r"error: --out .* lies in the dataset data/stdlib; [^\n]*\n$", capsys.readouterr().err)
    for ours in (lambda: json.loads("["), raising(ValueError("a defect")), raising(RuntimeError("a defect"))):
        with pytest.raises((ValueError, RuntimeError), match=r"Expecting value|a defect"):
            exit_code_of(ours)
    assert capsys.readouterr().err == ""


def test_an_error_of_the_system_names_the_file(capsys):
    assert exit_code_of(lambda: Path("/not/there").read_text()) == 1
    assert capsys.readouterr().err == "error: No such file or directory: /not/there\n"
    assert exit_code_of(raising(OSError("the disk is full"))) == 1
    assert capsys.readouterr().err == "error: the disk is full\n"


def test_ctrl_c_is_one_line(capsys):
    assert exit_code_of(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_sigterm_cleans_up_and_is_told_by_the_exit_code():
    code = """
import time
from engine.core.cli import run_command

def main():
    try:
        print("started", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)

run_command(main)
"""
    process = python(code)
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("cleaned up\n", "") and process.returncode == 143


def test_a_ctrl_c_when_all_is_done_stops_nothing():
    code = """
import atexit, os, signal
from engine.core.cli import run_command
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), print("to the end", flush=True)))
run_command(lambda: 0)
"""
    process = python(code)
    assert process.communicate(timeout=60) == ("to the end\n", "") and process.returncode == 0


def test_a_reader_that_has_seen_enough_is_no_error():
    code = """
from engine.core.cli import run_command

def main():
    while True:
        print("line " * 1000, flush=True)

run_command(main)
"""
    process = python(code)
    process.stdout.readline()
    process.stdout.close()
    begun = time.monotonic()
    assert process.stderr.read() == "" and process.wait(timeout=60) in (0, 1)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("Unable to allocate 7 TiB"), "not enough memory (Unable to allocate 7 TiB); make the model, or "),
        (RuntimeError("x\nDefaultCPUAllocator: can't allocate memory: 7"), "not enough memory (x DefaultCPUAllocator"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "not enough memory (CUDA out of memory. Tried); make"),
        (RuntimeError("[../gloo/pair.cc:5] Connection closed by peer"), "another process ended, or can't be reached ("),
        (IsADirectoryError(21, "Is a directory", "a\nb"), "Is a directory: a b"),
    ],
    ids=str,
)
def test_what_the_machine_refuses_is_one_line(error, told, capsys):
    assert exit_code_of(raising(error)) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {told}") and printed.count("\n") == 1


def test_output_that_is_closed_or_can_not_say_a_character_stops_nothing():
    says = "from engine.core.cli import run_command\nrun_command(lambda: print('→ done'))"
    process = python(f"import sys\nsys.stdout = sys.stderr = None\n{says}")
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0
    process = python(f"import sys\nsys.stdout.reconfigure(encoding='latin-1')\n{says}")
    assert process.communicate(timeout=60) == ("? done\n", "") and process.returncode == 0


# Errors.


@pytest.mark.parametrize(("flags", "shows_traceback"), [((), False), (("--debug",), True)])
def test_a_mistake_of_the_user_is_one_line_unless_debugging(run, flags, shows_traceback):
    process = run("train.py", "--data", "nowhere", *flags)
    assert process.returncode == 1 and "nowhere" in process.stderr
    assert ("Traceback" in process.stderr) == shows_traceback
    assert shows_traceback or process.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("a bug"), RuntimeError("a bug")])
def test_a_bug_keeps_its_traceback_whichever_file_raises_it(error):
    assert explain(error) is None
    assert explain(UserError("--steps: must be at least 1 (got 0). Use a larger value.")).startswith("--steps")
