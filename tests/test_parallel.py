"""Many processes under torchrun are one process: losses, windows, resuming on other numbers, faults."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import train
from engine.checkpoint import newest_checkpoint
from prepare import PrepareConfig, prepare

SHAPE = "--num-layers 2 --num-heads 2 --d-model 16 --context-length 16 --batch-size 12 --warmup-steps 2 --log-every 1"
SHAPE = [*SHAPE.split(), "--eval-tokens", "2000", "--device", "cpu", "--dtype", "float32"]
STEPS = 50
KINDS = {  # what runs on 1 process, and alike on 2, 3 and 4
    "ddp-muon": ["--parallel", "ddp"],
    "fsdp-muon": ["--parallel", "fsdp"],
    "ddp-adamw": ["--parallel", "ddp", "--optimizer", "adamw", "--learning-rate", "3e-3"],
    "fsdp-adamw": ["--parallel", "fsdp", "--optimizer", "adamw", "--learning-rate", "3e-3"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a dataset of characters, in which runs are made."""
    folder = tmp_path_factory.mktemp("many")
    text = "".join(f"{number} is followed by {number + 1}.\n" for number in range(2000))
    (folder / "numbers.txt").write_text(text, encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "numbers.txt"),), tokenizer="char", out=folder / "data"))
    return folder


def flags_of(place: Path, name: str, *flags: object) -> list[str]:
    return list(map(str, ["--data", place / "data", "--out", place / name, *SHAPE, "--steps", STEPS, *flags]))


def torchrun(processes: int, *arguments: object, launcher: tuple = ("--standalone",), **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", processes, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(list(map(str, command)), env=environment, **pipes, **options)


def finish(process: subprocess.Popen, code: int = 0, timeout: float = 120) -> str:
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == code, errors
    return output


def in_turn(processes: int, runs: list) -> str:
    return finish(torchrun(processes, ROOT / "tests" / "in_turn.py", json.dumps(runs)))


def alone(place: Path, name: str, *flags: object, stop: int = 0) -> None:
    """A run in this very process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *flags_of(place, name, *flags)])
        assert train.main() == 0


def logged(run: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def assert_same(one: Path, other: Path, tolerance: float) -> None:
    """The same windows at every step, and the same losses within the tolerance; with 0, the same weights too."""
    assert logged(other, "batch_digest") == logged(one, "batch_digest") and len(logged(one, "batch_digest")) == STEPS
    for key in ("train_loss", "val_loss"):
        assert logged(other, key) == pytest.approx(logged(one, key), abs=tolerance, rel=0)
    if not tolerance:
        a, b = newest_checkpoint(one, print), newest_checkpoint(other, print)
        for mine, others in ((dict(a.model()), dict(b.model())), (dict(a.optimizer()), dict(b.optimizer()))):
            assert mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.fixture(scope="module")
def runs(place) -> Path:
    """Every kind of run on 1, 2, 3 and 4 processes; some stopped on the way and resumed on another number."""
    for kind, flags in KINDS.items():
        alone(place, f"{kind}-1", *flags)

    def whole(kind: str, size: int, *flags: object) -> list:
        return [flags_of(place, f"{kind}-{size}", *KINDS[kind], *flags), None]

    def part(kind: str, name: str, stop: int | None) -> list:
        return [flags_of(place, f"{kind}-{name}", *KINDS[kind], "--resume", "--save-every", 1000), stop]

    in_turn(2, [whole(kind, 2) for kind in KINDS] + [part(k, "elastic", 20) for k in ("ddp-muon", "fsdp-muon")])
    for kind in ("ddp-muon", "fsdp-muon"):  # from 2 to 1 …
        flags = part(kind, "elastic", None)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py", *flags])
            patch.setattr(train, "log", stopping_at(30, train.log))
            assert train.main() == 143
    more = [part(k, "elastic", None) for k in ("ddp-muon", "fsdp-muon")]  # … to 4
    same = [part(k, "again", stop) for k in ("ddp-muon", "fsdp-muon") for stop in (20, None)]
    in_turn(4, [whole(kind, 4) for kind in KINDS] + more + same)
    micro = ["--micro-batch-size", 2]
    in_turn(3, [whole("ddp-muon", 3, *micro), whole("fsdp-muon", 3, *micro, "--checkpoint-activations")])
    return place


def stopping_at(step: int, log):
    def log_and_stop(run, *arguments):
        log(run, *arguments)
        if run.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return log_and_stop


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_many_processes_are_one_at_every_step(runs, kind, size):
    assert_same(runs / f"{kind}-1", runs / f"{kind}-{size}", 1e-5)


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_three_processes_with_micro_batches_and_recomputed_activations(runs, kind):
    assert_same(runs / f"{kind}-1", runs / f"{kind}-3", 1e-5)


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_a_run_stopped_on_two_goes_on_on_one_and_ends_on_four(runs, kind):
    assert_same(runs / f"{kind}-1", runs / f"{kind}-elastic", 1e-5)


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_a_run_resumed_on_as_many_processes_is_the_same_bit_for_bit(runs, kind):
    assert_same(runs / f"{kind}-4", runs / f"{kind}-again", 0)
