"""Many processes are one: losses, windows, gradients, resuming on other numbers, faults."""

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from helpers import ROOT, logged, newest_checkpoint, numbers_text, same_checkpoint, same_tensors
from in_turn import LENGTH, ROWS, folder_of, masks

import train
from engine.core.distributed import DistributedContext, processes
from engine.core.settings import load_settings
from engine.data.dataset import open_dataset
from engine.training.run_dir import list_checkpoints
from model import GPT
from prepare import PrepareConfig, prepare

SHAPE = f"--num-layers 2 --num-heads 2 --d-model 16 --context-length {LENGTH} --batch-size {ROWS} --warmup-steps 2"
SHAPE = [*SHAPE.split(), "--log-every", "1", "--eval-tokens", "500", "--device", "cpu", "--dtype", "float32"]
STEPS = 8
KINDS = {  # what runs on 1 process, and alike on 2, 3 and 4
    "ddp-muon": ["--parallel", "ddp"],
    "fsdp-muon": ["--parallel", "fsdp"],
    "ddp-adamw": ["--parallel", "ddp", "--optimizer", "adamw", "--learning-rate", "3e-3"],
    "fsdp-adamw": ["--parallel", "fsdp", "--optimizer", "adamw", "--learning-rate", "3e-3"],
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MANY_HEADS = ["--num-heads", 8]  # whose matrices have two rows: two of four sharded processes hold nothing of them
Play = Callable[[int, list], None]
EXAMPLES = 3  # steps on pairs


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a dataset of characters, in which runs are made."""
    folder = tmp_path_factory.mktemp("many")
    (folder / "numbers.txt").write_text(numbers_text(2000), encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(folder / "numbers.txt"),), tokenizer="char", out=folder / "data"))
    (folder / "others.txt").write_text(numbers_text(2700)[-9000:], encoding="utf-8")
    others = PrepareConfig((str(folder / "others.txt"),), tokenizer=str(folder / "data"), out=folder / "others")
    prepare(others)
    pairs = [{"prompt": str(number), "completion": "+" * (number % 14)} for number in range(1, 200) if number % 14]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    fields = {"prompt_field": "prompt", "completion_field": "completion"}
    prepare(PrepareConfig((str(folder / "pairs.jsonl"),), tokenizer="char", out=folder / "pairs", **fields))
    return folder


@pytest.fixture(scope="module")
def play(place) -> Iterator[Play]:
    """Does runs, as in_turn.py has them, in so many processes: forks of one that has imported torch."""
    command, pipe, errors = [sys.executable, ROOT / "tests" / "in_turn.py"], subprocess.PIPE, place / "errors.txt"
    with open(errors, "w") as file:
        server = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=file, encoding="utf-8")

    def play(size: int, runs: list) -> None:
        server.stdin.write(json.dumps([size, runs]) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "0\n", errors.read_text()

    yield play
    server.stdin.close()
    assert server.wait(timeout=10) == 0


def flags_of(place: Path, name: str, *flags: object) -> list[str]:
    return list(map(str, ["--data", place / "data", "--out", place / name, *SHAPE, "--steps", STEPS, *flags]))


def timed_flags(place: Path, name: str, minutes: float = 0.08) -> list[str]:
    """Of a run on time, whose size is chosen."""
    flags = ["--data", place / "data", "--out", place / name, "--minutes", minutes, "--log-every", 1]
    return list(map(str, [*flags, "--eval-tokens", 500, "--device", "cpu", "--dtype", "float32"]))


def seen(run: Path, rank: int = 0) -> dict:
    return json.loads((folder_of(run) / f"{rank}.json").read_text())


def assert_same(one: Path, other: Path, tolerance: float) -> None:
    """The same windows at every step, and the same losses within the tolerance; with 0, the same weights too."""
    assert logged(other, "batch_digest") == logged(one, "batch_digest") and len(logged(one, "batch_digest")) == STEPS
    for key in ("train_loss", "val_loss"):
        assert logged(other, key) == pytest.approx(logged(one, key), abs=tolerance, rel=0)
    if not tolerance:
        assert same_checkpoint(newest_checkpoint(one), newest_checkpoint(other))


# One run on 1, 2, 3 and 4 processes, some stopped on the way and resumed on another number.


@pytest.fixture(scope="module")
def runs(place, play) -> Path:
    def whole(kind: str, size: int, *flags: object) -> dict:
        return {"flags": flags_of(place, f"{kind}-{size}", *KINDS[kind], *flags)}

    def parts(name: str, *stops: int | None) -> list[dict]:
        kinds, heads = ("ddp-muon", "fsdp-muon"), MANY_HEADS if name == "elastic" else micro
        flags = {kind: flags_of(place, f"{kind}-{name}", *KINDS[kind], "--resume", *heads) for kind in kinds}
        return [{"flags": flags[kind], "stop": stop, "hold": heads is MANY_HEADS} for kind in kinds for stop in stops]

    def mixed(name: str, **asked: int) -> dict:
        data = ["--data", place / "data", place / "others", "--mix", 0.7, 0.3]
        return {"flags": flags_of(place, name, *data, "--resume")} | asked

    micro = ["--micro-batch-size", 2]
    heads = {"flags": flags_of(place, "heads", *KINDS["ddp-muon"], *MANY_HEADS)}
    play(1, [whole(kind, 1) for kind in ("ddp-muon", "ddp-adamw")] + [heads, mixed("mixed-1")])
    each = {"flags": flags_of(place, "each", *KINDS["fsdp-muon"], *micro), "memory": 1}
    narrow = [{"flags": flags_of(place, f"{kind}-narrow", *KINDS[kind], "--dtype", "bfloat16")} for kind in KINDS]
    four = whole("fsdp-adamw", 4, "--checkpoint-activations")
    play(4, [four, *parts("elastic", 2)])  # from 4 …
    apart = [{"flags": flags_of(place, "apart", *KINDS["fsdp-muon"], "--resume")}]
    apart[0]["others"] = ["--out", str(place / "other")]
    apart = [run | {"stop": stop} for run in apart for stop in (5, None)]
    timed = {"flags": timed_flags(place, "timed"), "others": ["--verify-data"]}  # which may differ
    two = [timed] + [whole(kind, 2, *micro) for kind in KINDS] + [each, *narrow, *apart, mixed("mixed-2", stop=5)]
    play(2, two + parts("elastic", 4))  # … to 2 …
    damaged = shutil.copytree(place / "fsdp-muon-elastic", place / "damaged")
    (list_checkpoints(damaged)[-1] / "model-00002-of-00002.safetensors").write_bytes(b"")
    play(1, parts("elastic", 6))  # … to 1 …
    again = {"flags": flags_of(place, "damaged", *KINDS["fsdp-muon"], "--resume", *MANY_HEADS), "stop": 3}
    three = [whole(kind, 3, *micro) for kind in KINDS] + parts("again", 5, None)
    play(3, three + parts("elastic", None) + [again, mixed("mixed-2")])  # … to 3
    return place


@pytest.mark.parametrize("kind, size", [*itertools.product(KINDS, [2, 3]), ("fsdp-adamw", 4)])
def test_many_processes_are_one_at_every_step(runs, kind, size):
    assert_same(runs / f"ddp-{kind.split('-')[1]}-1", runs / f"{kind}-{size}", 1e-5)


def test_processes_agree_on_the_size_for_a_time_and_on_how_much_of_it_is_gone(runs):
    first, second = (seen(runs / "timed", rank) for rank in (0, 1))
    assert first["said"].startswith("chosen depth ") and not second["said"]
    assert first["share"] == second["share"] == 1 and first["steps"] == second["steps"] > 0
    found = newest_checkpoint(runs / "timed")
    assert found.step == first["steps"] and found.state["settings"]["batch_size"] % 2 == 0


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_a_run_stopped_on_four_goes_on_on_two_and_on_one_and_ends_on_three(runs, kind):
    run = runs / f"{kind}-elastic"
    assert_same(runs / "heads", run, 1e-5)
    held = {path.stem: safetensors.torch.load_file(path) for path in folder_of(run).glob("*.safetensors")}
    for step in (2, 4, 6):  # what was saved by so many processes came back on another number, bit for bit
        assert same_tensors(held[f"{step}-ended"], held[f"{step}-resumed"])
    last = newest_checkpoint(run)
    whole = dict(last.model()) | {f"{key} of the optimizer": value for key, value in last.optimizer()}
    assert same_tensors(whole, held[f"{STEPS}-ended"]) and last.shards == (3 if kind == "fsdp-muon" else 0)


def test_a_shard_that_another_process_finds_damaged_is_told_of_by_the_first(runs):
    first, second = (seen(runs / "damaged", rank)["said"] for rank in (0, 1))
    assert "step-00000004 is damaged: model-00002-of-00002.safetensors is not as it was written" in first
    assert "Resuming after step 2" in first and not second


def test_sharded_processes_that_do_not_see_one_run_folder_gather_their_checkpoints(runs):
    run = runs / "apart"
    assert newest_checkpoint(run).shards == 0 and newest_checkpoint(runs / "fsdp-muon-2").shards == 2
    assert not (runs / "other").exists()
    assert seen(run)["said"].count("Checkpoints are gathered by the first process: not all processes see") == 1
    assert_same(runs / "fsdp-muon-2", run, 1e-5)


def test_a_mix_of_datasets_is_the_same_on_any_number_of_processes(runs):
    assert_same(runs / "mixed-1", runs / "mixed-2", 1e-5)
    for name in ("data", "others"):
        losses = [logged(runs / run, f"val_loss/{name}") for run in ("mixed-1", "mixed-2")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 1


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_a_run_resumed_on_as_many_processes_is_the_same_bit_for_bit(runs, kind):
    assert "Resuming after step 5" in seen(runs / f"{kind}-again")["said"]
    assert_same(runs / f"{kind}-3", runs / f"{kind}-again", 0)


def test_gradients_reduced_in_each_micro_batch_are_the_same(runs):
    assert_same(runs / "ddp-muon-1", runs / "each", 1e-5)
    assert "Gradients are reduced in each micro-batch" in seen(runs / "each")["said"]
    assert "Gradients are reduced" not in seen(runs / "fsdp-muon-2")["said"]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_in_bfloat16_sharded_processes_compute_what_whole_ones_do(runs, optimizer):
    assert_same(runs / f"ddp-{optimizer}-narrow", runs / f"fsdp-{optimizer}-narrow", 2e-4)


# What is sent, held and said.


@pytest.fixture(scope="module")
def watched(place, play) -> Path:
    """Three steps of every kind on 2 processes, the third of which is watched."""
    flags = ["--steps", 3, "--micro-batch-size", 2]
    names = {kind: flags_of(place, f"{kind}-watched", *KINDS[kind], *flags) for kind in KINDS}
    play(2, [{"flags": flags, "watch": True, "conclude": kind == "fsdp-muon"} for kind, flags in names.items()])
    return place


def test_gradients_travel_once_a_step_and_each_updated_matrix_once(watched):
    model = model_of(watched / "ddp-muon-watched")
    total = model.num_parameters
    matrices = sum(parameter.numel() for parameter in model.blocks.parameters())
    settled = 2  # numbers: whether a process was asked to stop, and how many targets count in the whole batch

    def numbers(kind: str, what: str) -> list[int]:
        messages = seen(watched / f"{kind}-watched")["messages"]
        return [math.prod(shape) for name, shape in messages if name == what]

    def names(kind: str) -> set[str]:
        return {name for name, _ in seen(watched / f"{kind}-watched")["messages"]}

    for kind in ("ddp-muon", "ddp-adamw"):  # three micro-batches a step
        assert sum(numbers(kind, "all_reduce")) == total + settled
    assert sum(numbers("ddp-muon", "all_gather")) * 2 == matrices  # each sends its half
    assert names("ddp-muon") == {"all_reduce", "all_gather"} and names("ddp-adamw") == {"all_reduce"}
    norm = 1
    for kind in ("fsdp-muon", "fsdp-adamw"):  # gloo scatters what it reduced by an all_reduce
        padding = 2 * model.config.d_model  # an odd number of embeddings and of outputs
        assert sum(numbers(kind, "all_reduce")) == total + padding + norm + settled
    assert sum(numbers("fsdp-muon", "all_to_all")) == 2 * matrices / 2  # this process's half, there and back
    blocks = 2
    for kind in ("fsdp-muon", "fsdp-adamw"):
        assert len(numbers(kind, "all_gather")) == 3 * (1 + 2 * blocks)  # each micro-batch: forward, and backward


def test_sharded_processes_hold_half_each(watched):
    for optimizer in ("muon", "adamw"):
        whole, half = (seen(watched / f"{parallel}-{optimizer}-watched") for parallel in ("ddp", "fsdp"))
        for what in ("parameters", "gradients", "optimizer"):
            assert half[what] == pytest.approx(whole[what] / 2, rel=0.02)


def test_only_the_first_process_speaks_when_a_sharded_run_ends(watched):
    first, second = (seen(watched / "fsdp-muon-watched", rank)["said"] for rank in (0, 1))
    assert first.count("A sample:") == 1 and not second


# Targets that do not count.


@pytest.fixture(scope="module")
def masked(place, play) -> Path:
    """Runs on batches of which other targets count at each step, on 1, 2, 3 and 4 processes."""
    flags = ["--steps", len(masks()), "--clip-norm", 0, "--learning-rate", 0, "--eval-tokens", 2 * LENGTH]
    flags += ["--num-layers", 1]
    for size in (1, 2, 3, 4):
        runs = []
        for parallel in ("ddp", "fsdp")[:size]:
            for micro in ([], ["--micro-batch-size", 1 if ROWS // size % 2 else 2]):
                name = f"masked-{parallel}-{size}{'-micro' * bool(micro)}"
                runs.append({"flags": flags_of(place, name, "--parallel", parallel, *micro, *flags), "mask": True})
                examples = flags_of(place, f"pairs-{name}", "--parallel", parallel, *micro, *flags, "--steps", EXAMPLES)
                runs += [{"flags": [*examples, "--data", str(place / "pairs")], "mask": True}] * (size < 4)
        play(size, runs)
    return place


def model_of(run: Path) -> GPT:
    model = GPT(load_settings(train.TrainConfig, [str(run / "config.toml")]).model)
    model.load_state_dict(dict(newest_checkpoint(run).model()))
    return model


def plain_loss(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the targets that count; nothing if none does."""
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    counts = (targets.flatten() != -1).double()
    return (losses * counts).sum() / counts.sum().clamp(min=1)


@pytest.mark.parametrize("micro", ["", "-micro"])
@pytest.mark.parametrize("process", ["ddp-1", "ddp-2", "fsdp-2", "ddp-3", "fsdp-3", "ddp-4", "fsdp-4"])
def test_a_steps_gradient_is_that_of_the_mean_over_all_targets_that_count(masked, process, micro):
    run = masked / f"masked-{process}{micro}"
    model = model_of(run).double()
    for step, (case, counts) in enumerate(masks().items(), 1):
        held = safetensors.torch.load_file(folder_of(run) / f"{step}.safetensors")
        assert torch.equal(held["targets"] != -1, counts)
        model.zero_grad()
        loss = plain_loss(model, held["inputs"], held["targets"])
        loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        largest = max(gradient.abs().max() for gradient in expected.values())
        assert bool(largest) == bool(counts.any())
        for name, gradient in expected.items():
            assert (held[name] - gradient).abs().max() <= 1e-6 * largest, (case, name)
        assert logged(run, "train_loss")[step] == pytest.approx(loss.item(), rel=1e-6), case


@pytest.mark.parametrize("micro", ["", "-micro"])
@pytest.mark.parametrize("process", ["ddp-1", "ddp-2", "fsdp-2", "ddp-3", "fsdp-3"])
def test_a_steps_gradient_on_examples_is_that_of_the_mean_over_all_completions(masked, process, micro):
    run, alone = masked / f"pairs-masked-{process}{micro}", masked / "pairs-masked-ddp-1"
    model, shapes = model_of(run).double(), set()
    for step in range(1, EXAMPLES + 1):
        held = safetensors.torch.load_file(folder_of(run) / f"{step}.safetensors")
        whole = safetensors.torch.load_file(folder_of(alone) / f"{step}.safetensors")
        assert all(torch.equal(held[name], whole[name]) for name in ("inputs", "targets"))
        counts = (held["targets"] != -1).sum(dim=1)
        assert counts.min() < counts.max()  # on each process another number
        shapes.add(held["inputs"].shape)
        model.zero_grad()
        loss = plain_loss(model, held["inputs"], held["targets"])
        loss.backward()
        largest = max(parameter.grad.abs().max() for parameter in model.parameters())
        for name, parameter in model.named_parameters():
            assert (held[name] - parameter.grad).abs().max() <= 1e-6 * largest, (step, name)
        assert logged(run, "train_loss")[step] == pytest.approx(loss.item(), rel=1e-6)
    assert len(shapes) > 1  # batches are as long as their examples


@pytest.mark.parametrize("process", ["ddp-1", "ddp-2", "fsdp-2", "ddp-3", "fsdp-3", "ddp-4", "fsdp-4"])
def test_an_evaluation_is_the_mean_over_all_targets_that_count(masked, process):
    """Of two windows, the last scores only what no other one scores; two of four processes have nothing to score."""
    run, tokens = masked / f"masked-{process}", open_dataset(masked / "data").val[:]
    starts = [0, len(tokens) - 1 - LENGTH]
    windows = torch.stack([torch.from_numpy(tokens[start : start + LENGTH + 1].astype("int64")) for start in starts])
    inputs, targets = windows[:, :-1], windows[:, 1:].clone()
    targets[1, : -((len(tokens) - 1) % LENGTH)] = -1
    assert 0 < (targets == -1).sum() < LENGTH
    with torch.no_grad():
        expected = plain_loss(model_of(run).double(), inputs, targets).item()
    assert logged(run, "val_loss")[len(masks())] == pytest.approx(expected, rel=1e-6)


# Faults of processes.


def until(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_and_terminated_a_run_is_where_one_is_that_nothing_happened_to(place, play):
    longer = ["--steps", 1000, "--save-every", 10, "--eval-every", 1000, "--parallel", "fsdp"]  # too many to end
    out, command = place / "hit", [*TORCHRUN, "--standalone", "--max-restarts", 9, ROOT / "train.py"]
    process = start(*command, *flags_of(place, "hit", *longer))

    def train_on() -> None:
        """Wait until two more checkpoints are there."""
        newest = (list_checkpoints(out) or [out / "step-0"])[-1].name.split("-")[1]
        reached = f"step-{int(newest) + 20:08d}"
        until(lambda: list_checkpoints(out) and list_checkpoints(out)[-1].name >= reached, process)

    try:
        train_on()
        workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, encoding="utf-8").stdout
        assert len(workers.split()) == 2
        os.kill(int(workers.split()[1]), signal.SIGKILL)
        train_on()
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    assert output.count("Resuming after step") == 1  # only the first process speaks
    assert output.count("which is saved. Go on with: torchrun --nproc-per-node 2") == 1
    hit = newest_checkpoint(out)
    play(2, [{"flags": flags_of(place, "whole", *longer), "stop": hit.step}])
    assert same_checkpoint(newest_checkpoint(place / "whole"), hit)


def test_a_sharded_process_whose_disk_is_full_says_so_and_ends_the_run(place, play):
    asked = {"flags": flags_of(place, "full", "--parallel", "fsdp", "--save-every", 5), "full": 4096}
    begun = time.monotonic()
    full = r"model-00002-of-00002\.safetensors can't be written \(.*File too large"
    first = "shard 2 of 2 of .* was not written; the error of its process says why"  # if it is the sooner to end
    with pytest.raises(AssertionError, match=f"{full}|{first}"):
        play(2, [asked])
    assert time.monotonic() - begun < 60  # ended, long before the timeout
    assert list((place / "full" / "checkpoints").iterdir()) == []


def test_settings_that_differ_are_told_before_a_size_is_chosen_together(place, play):
    asked = {"flags": [*timed_flags(place, "differ", 1), "--timeout", "5"], "others": ["--d-model", "64"]}
    differing = r"process 1 of 2 does not fit the first: d_model 128 → 64, the settings given .*; start all alike"
    with pytest.raises(AssertionError, match=f"{differing}|process 0 of 2 does not fit the first: another"):
        play(2, [asked])


def test_a_process_that_hangs_ends_the_run(place, play):
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="Timed out waiting 2000ms"):
        play(2, [{"flags": flags_of(place, "hangs", "--timeout", 2), "hang": 5}])
    assert time.monotonic() - begun < 2 + 5


# Processes that differ, work alone, or hang.

TWO = """
import os, signal, sys, time
from engine.core.cli import run_command
from engine.core.distributed import processes
child = os.fork()  # one import of torch serves both
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1" if child else "0"

def main():
    with processes("cpu", timeout=2) as world:
        steps = 12 if sys.argv[1] == "differ" and world.rank else 10
        world.check_same({"steps": steps, "out": world.rank, "seed": 1}, but={"out"})
        with world.patience():
            if world.is_main_process and sys.argv[1] == "work":
                time.sleep(3)
            if world.is_main_process and sys.argv[1] == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
        os.write(1, b"went on\\n")

try:
    run_command(main)
finally:
    if child:
        os.kill(child, signal.SIGCONT)
        if sys.argv[1] == "hang":
            os.kill(child, signal.SIGKILL)
        os.wait()
"""


@pytest.mark.parametrize(
    ("mode", "said", "told"),
    [
        ("work", "went on\nwent on\n", "^$"),  # longer than the timeout
        ("hang", "", "^error: another process ended, or can't be reached .*[Tt]imed out"),
        (
            "differ",
            "",
            "(?s)(?=.*error: process 1 of 2 does not fit the first: steps 10 → 12; start all alike)"
            "(?=.*error: process 0 of 2 does not fit the first: another process has other settings, or text)",
        ),
    ],
)
def test_two_processes_wait_for_work_and_not_for_one_that_hangs_or_differs(mode, said, told):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    options = {"capture_output": True, "encoding": "utf-8", "cwd": ROOT, "timeout": 60, "env": os.environ | given}
    done = subprocess.run([sys.executable, "-c", TWO, mode], **options)
    assert done.stdout == said and (done.returncode == 0) == bool(said)
    assert re.search(told, done.stderr) and "Traceback" not in done.stderr


ENDING = """
import os, socket, sys
import torch
import torch.distributed as dist
from engine.core.distributed import processes

codes = []
for _ in range(8):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in ("0", "1"):
        if not (child := os.fork()):
            given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ.update(given, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            with processes("cpu") as world:
                held = dist.group.WORLD  # as PyTorch's own modules may hold it
                sys.setswitchinterval(1000)  # who waits for Python's lock does not ask for it
                world.sum(torch.ones(100_000))
            sys.exit()
        children.append(child)
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(sum(map(abs, codes)))
"""


def test_a_process_whose_run_is_done_ends_without_being_aborted():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, encoding="utf-8", cwd=ROOT, timeout=60)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(
    ("given", "wrong"), [({}, "RANK is not set"), ({"RANK": "0", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is")]
)
def test_processes_that_nobody_counted_are_refused(given, wrong, monkeypatch):
    for name, value in ({"WORLD_SIZE": "2"} | given).items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(ValueError, match=f"WORLD_SIZE is 2, but {wrong}.*; start many processes with torchrun"),
        processes("cpu"),
    ):
        pass


# Several machines.


def start(*command: object) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(list(map(str, command)), env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


class Elsewhere(DistributedContext):
    """A process that need not wait for any other."""

    def patience(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


def test_the_first_process_of_each_machine_verifies_its_copy_of_the_data(place, tmp_path):
    shutil.copytree(place / "data", tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")
    config = train.TrainConfig(data=tmp_path / "data")
    assert train.open_data(config, Elsewhere(3, 4, torch.device("cpu"), local_rank=1))
    with pytest.raises(ValueError, match=r"train-00000\.npy is not as it was written"):
        train.open_data(config, Elsewhere(2, 4, torch.device("cpu"), local_rank=0))


@pytest.fixture
def two_machines() -> Iterator[list[tuple[str, str]]]:
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
    machines = []
    for number, (name, address) in enumerate(two_machines):
        data = place / f"data-{number}"
        shutil.copytree(place / "data", data, ignore=shutil.ignore_patterns("verified.json"))
        flags = flags_of(place, f"machine-{number}", "--resume", "--data", data)
        meet = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"]
        meet += ["--rdzv-conf", f"is_host={not number}", "--local-addr", address]
        stopped_and_resumed = json.dumps([{"flags": flags, "stop": 6}, {"flags": flags}])
        command = ["ip", "netns", "exec", name, *TORCHRUN, *meet, ROOT / "tests" / "in_turn.py", stopped_and_resumed]
        machines.append(start(*command))
    with contextlib.suppress(subprocess.TimeoutExpired):  # where one fails, torchrun waits for it on the other
        [machine.wait(timeout=120) for machine in machines]
    [machine.kill() for machine in machines]
    errors = [machine.communicate()[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], errors
    assert_same(runs / "ddp-muon-1", place / "machine-0", 1e-5)
    assert not (place / "machine-1").exists()
    assert all((place / f"data-{number}" / "verified.json").exists() for number in (0, 1))


LAUNCHERS = [(1, 1, "python"), (2, 1, "torchrun --nproc-per-node 2")]
LAUNCHERS += [(4, 2, "torchrun --nnodes 2 RENDEZVOUS --nproc-per-node 2")]


@pytest.mark.parametrize(("size", "nodes", "said"), LAUNCHERS)
def test_what_to_go_on_with_has_as_many_machines(size, nodes, said, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert DistributedContext(0, size, torch.device("cpu")).launcher == said
