"""Many processes under torchrun are one process: losses, windows, resuming on other numbers, faults."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

import train
from engine.checkpoint import newest_checkpoint
from engine.settings import load_settings
from model import GPT
from prepare import PrepareConfig, prepare

SHAPE = "--num-layers 2 --num-heads 2 --d-model 16 --context-length 16 --batch-size 12 --warmup-steps 2 --log-every 1"
SHAPE = [*SHAPE.split(), "--eval-tokens", "500", "--device", "cpu", "--dtype", "float32"]
STEPS = 50
LONGER = ["--steps", 150, "--save-every", 20, "--eval-every", 150]  # long enough to be hit on the way
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


def torchrun(processes: int, *arguments: object, launcher: tuple = ("--standalone",)) -> subprocess.Popen:
    return start([sys.executable, "-m", "torch.distributed.run", *launcher, "--nproc-per-node", processes, *arguments])


def start(command: list) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(list(map(str, command)), env=environment, **pipes)


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
        return [flags_of(place, f"{kind}-{size}", *KINDS[kind], *flags), None, size == 2]

    def part(kind: str, name: str, stop: int | None) -> list:
        return [flags_of(place, f"{kind}-{name}", *KINDS[kind], "--resume", "--save-every", 1000), stop, False]

    micro = ["--micro-batch-size", 2]
    two = [whole(kind, 2, *micro) for kind in KINDS] + [part(k, "elastic", 20) for k in ("ddp-muon", "fsdp-muon")]
    seen = [json.loads(line) for line in in_turn(2, two).splitlines() if line.startswith('{"parameters"')]
    (place / "seen.json").write_text(json.dumps(dict(zip(KINDS, seen, strict=False))))
    for kind in ("ddp-muon", "fsdp-muon"):  # from 2 to 1 …
        flags = part(kind, "elastic", None)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py", *flags])
            patch.setattr(train, "log", stopping_at(30, train.log))
            assert train.main() == 143
    more = [part(k, "elastic", None) for k in ("ddp-muon", "fsdp-muon")]  # … to 4
    same = [part(k, "again", stop) for k in ("ddp-muon", "fsdp-muon") for stop in (20, None)]
    four = [whole(kind, 4, *(["--checkpoint-activations"] if kind == "fsdp-adamw" else [])) for kind in KINDS]
    in_turn(4, four + more + same)
    in_turn(3, [whole("ddp-muon", 3, *micro)])
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


def test_three_processes_with_micro_batches(runs):
    assert_same(runs / "ddp-muon-1", runs / "ddp-muon-3", 1e-5)


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_a_run_stopped_on_two_goes_on_on_one_and_ends_on_four(runs, kind):
    assert_same(runs / f"{kind}-1", runs / f"{kind}-elastic", 1e-5)


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_a_run_resumed_on_as_many_processes_is_the_same_bit_for_bit(runs, kind):
    assert_same(runs / f"{kind}-4", runs / f"{kind}-again", 0)


def test_gradients_travel_once_a_step_and_each_updated_matrix_once(runs):
    seen = json.loads((runs / "seen.json").read_text())
    model = GPT(load_settings(train.TrainConfig, [str(runs / "ddp-muon-1" / "config.toml")]).model)
    total = model.num_parameters()
    matrices = sum(p.numel() for p in model.blocks.parameters())

    def numbers(kind: str, what: str) -> list[int]:
        return [math.prod(shape) for name, shape in seen[kind]["messages"] if name == f"gloo:{what}"]

    for kind in ("ddp-muon", "ddp-adamw"):  # three micro-batches a step
        assert sum(numbers(kind, "all_reduce")) == total
    assert sum(numbers("ddp-muon", "all_gather")) * 2 == matrices  # each sends its half
    assert {name for name, _ in seen["ddp-muon"]["messages"]} == {"gloo:all_reduce", "gloo:all_gather"}
    assert {name for name, _ in seen["ddp-adamw"]["messages"]} == {"gloo:all_reduce"}
    norm = 1
    for kind in ("fsdp-muon", "fsdp-adamw"):  # gloo scatters what it reduced by an all_reduce
        padding = 2 * model.config.d_model  # an odd number of embeddings and of outputs
        assert sum(numbers(kind, "all_reduce")) == total + padding + norm
    sent = numbers("fsdp-muon", "all_to_all")
    assert sum(sent) == 2 * matrices / 2  # this process's half, there and back
    blocks = 2
    assert len(numbers("fsdp-muon", "all_gather")) == 3 * (1 + 2 * blocks)  # each micro-batch: forward, and back


def test_sharded_processes_hold_half_each(runs):
    seen = json.loads((runs / "seen.json").read_text())
    for optimizer in ("muon", "adamw"):
        whole, half = seen[f"ddp-{optimizer}"], seen[f"fsdp-{optimizer}"]
        for what in ("parameters", "gradients", "optimizer"):
            assert half[what] == pytest.approx(whole[what] / 2, rel=0.02)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def started(place: Path, name: str, *flags: object, launcher: tuple = ("--standalone",)) -> tuple:
    """A run on 2 processes that has come to step 40, and their ids."""
    process = torchrun(2, ROOT / "train.py", *flags_of(place, name, *LONGER, *flags), launcher=launcher)
    wait_for(place / name / "checkpoints" / "step-00000040", process)
    found = subprocess.run(["pgrep", "-f", f"train.py .*--out {place / name} "], capture_output=True, encoding="utf-8")
    workers = [int(pid) for pid in found.stdout.split() if int(pid) != process.pid]
    assert len(workers) == 2
    return process, workers


def same_weights(one: Path, other: Path) -> bool:
    a, b = (dict(newest_checkpoint(run, print).model()) for run in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_terminated_and_killed_runs_end_in_the_same_weights(place):
    process, _ = started(place, "terminated")
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=1, timeout=30)
    assert "which is saved. Go on with: torchrun --nproc-per-node 2" in output
    process, workers = started(place, "killed", launcher=("--standalone", "--max-restarts", 2))
    os.kill(workers[1], signal.SIGKILL)
    said = finish(process)
    assert "Resuming after step" in said and said.count("A sample:") == 1  # only the first process speaks
    names = ("terminated", "uninterrupted")
    assert "Resuming after step" in in_turn(2, [[flags_of(place, n, *LONGER, "--resume"), None, False] for n in names])
    for name in ("terminated", "killed"):
        assert same_weights(place / "uninterrupted", place / name)


def test_a_process_that_hangs_ends_the_run(place):
    process, workers = started(place, "hangs", "--timeout", 3)
    os.kill(workers[1], signal.SIGSTOP)
    begun = time.monotonic()
    while Path(f"/proc/{workers[0]}/cmdline").exists() and Path(f"/proc/{workers[0]}/cmdline").read_bytes():
        assert time.monotonic() - begun < 3 + 5
        time.sleep(0.05)
    os.kill(workers[1], signal.SIGCONT)  # or torchrun would kill it, after 30 seconds of its own
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "Timed out waiting 3000ms" in errors


@pytest.fixture
def two_machines():
    """Two network namespaces joined by a cable: their names and addresses."""

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    names = [f"gpt{os.getpid()}{side}" for side in "ab"]
    try:
        if shutil.which("ip") is None or not all(ip("netns", "add", name) for name in names):
            pytest.skip("network namespaces can't be made here")
        a, b = names
        assert ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for number, name in enumerate(names, 1):
            assert ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            assert ip("-n", name, "link", "set", "cable", "up") and ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)]
    finally:
        for name in names:
            ip("netns", "delete", name)


def test_two_machines_are_one_run_and_the_second_needs_no_run_folder(place, runs, two_machines, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable")
    processes = []
    for number, (name, address) in enumerate(two_machines):
        flags = flags_of(place, f"machine-{number}", "--resume")
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", 2]
        command += ["--nproc-per-node", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"]
        command += ["--rdzv-conf", f"is_host={not number}", "--local-addr", address]
        stopped_and_resumed = [[flags, 25, False], [flags, None, False]]
        processes.append(start([*command, ROOT / "tests" / "in_turn.py", json.dumps(stopped_and_resumed)]))
    for process in processes:
        finish(process)
    assert_same(runs / "ddp-muon-1", place / "machine-0", 1e-5)
    assert not (place / "machine-1").exists()
