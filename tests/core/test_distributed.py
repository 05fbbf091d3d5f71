"""N ranks = 1 rank: losses, batches, gradients, resuming on other world sizes, faults."""

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
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from helpers import ROOT, logged, newest_checkpoint, numbers_text, same_checkpoint, same_tensors
from in_turn import LENGTH, ROWS, folder_of, masks

import train
from engine.core.distributed import DistributedContext, init_distributed
from engine.core.errors import UserError
from engine.core.settings import load_settings, with_values
from engine.data.dataset import Examples, open_dataset
from engine.training.config import TrainConfig
from engine.training.run_dir import list_checkpoints
from model import GPT
from prepare import PrepareConfig, prepare

SHAPE = (
    "--num-layers 2 --num-heads 2 --d-model 16 --warmup-steps 2 --log-every 1 --eval-tokens 500 "
    f"--context-length {LENGTH} --batch-size {ROWS} --device cpu --dtype float32"
).split()
STEPS = 8
KINDS = {  # of runs that are compared on 1 to 4 ranks
    "ddp-muon": ["--parallel", "ddp"],
    "fsdp-muon": ["--parallel", "fsdp"],
    "ddp-adamw": ["--parallel", "ddp", "--optimizer", "adamw", "--learning-rate", "3e-3"],
    "fsdp-adamw": ["--parallel", "fsdp", "--optimizer", "adamw", "--learning-rate", "3e-3"],
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MANY_HEADS = ["--num-heads", 8]  # two rows a matrix: two of four sharded ranks have none
Play = Callable[[int, list[dict[str, Any]]], None]
EXAMPLES = 3  # steps on pairs


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with datasets, for the runs."""
    folder = tmp_path_factory.mktemp("many")
    numbers, others, pairs = (folder / name for name in ("numbers.txt", "others.txt", "pairs.jsonl"))
    numbers.write_text(numbers_text(2000), encoding="utf-8")
    prepare(PrepareConfig((str(numbers),), tokenizer="char", out=folder / "data"))
    others.write_text(numbers_text(2700)[-9000:], encoding="utf-8")
    tokenizer = str(folder / "data")
    prepare(PrepareConfig((str(others),), tokenizer=tokenizer, out=folder / "others"))
    lengths = {number: number % 14 for number in range(1, 200) if number % 14}
    records = [{"prompt": str(number), "completion": "+" * n} for number, n in lengths.items()]
    pairs.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    config = PrepareConfig((str(pairs),), tokenizer="char", out=folder / "pairs")
    fields = {"prompt_field": "prompt", "completion_field": "completion"}
    prepare(with_values(config, fields))
    return folder


@pytest.fixture(scope="module")
def play(place) -> Iterator[Play]:
    """Runs of in_turn.py on a world size, as forks of a process that has imported torch."""
    command = [sys.executable, ROOT / "tests" / "in_turn.py"]
    errors = place / "errors.txt"
    with open(errors, "w") as file:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, encoding="utf-8")
    stdin, stdout = server.stdin, server.stdout
    assert stdin is not None and stdout is not None

    def play(size: int, runs: list[dict[str, Any]]) -> None:
        stdin.write(json.dumps([size, runs]) + "\n")
        stdin.flush()
        assert stdout.readline() == "0\n", errors.read_text()

    yield play
    stdin.close()
    assert server.wait(timeout=60) == 0


def flags_of(place: Path, name: str, *flags: object) -> list[str]:
    words = ["--data", place / "data", "--out", place / name, *SHAPE, "--steps", STEPS, *flags]
    return list(map(str, words))


def timed_flags(place: Path, name: str, minutes: float = 0.08) -> list[str]:
    """Return the flags of a timed run with an automatic model size."""
    flags = f"--minutes {minutes} --log-every 1 --eval-tokens 500 --device cpu --dtype float32"
    return ["--data", str(place / "data"), "--out", str(place / name), *flags.split()]


def seen(run: Path, rank: int = 0) -> dict:
    return json.loads((folder_of(run) / f"{rank}.json").read_text())


def assert_same(one: Path, other: Path, tolerance: float) -> None:
    """Compare batches and losses of every step; with tolerance 0 weights too."""
    digests = logged(one, "batch_digest")
    assert logged(other, "batch_digest") == digests and len(digests) == STEPS
    for key in ("train_loss", "val_loss"):
        assert logged(other, key) == pytest.approx(logged(one, key), abs=tolerance, rel=0)
    if not tolerance:
        assert same_checkpoint(newest_checkpoint(one), newest_checkpoint(other))


# Runs on 1 to 4 ranks, some stopped and resumed on another world size.


@pytest.fixture(scope="module")
def runs(place, play) -> Path:
    def whole(kind: str, size: int, *flags: object) -> dict:
        return {"flags": flags_of(place, f"{kind}-{size}", *KINDS[kind], *flags)}

    def parts(name: str, *stops: int | None) -> list[dict[str, Any]]:
        kinds, heads = ("ddp-muon", "fsdp-muon"), MANY_HEADS if name == "elastic" else micro
        runs = []
        for kind in kinds:
            flags = flags_of(place, f"{kind}-{name}", *KINDS[kind], "--resume", *heads)
            runs += [{"flags": flags, "stop": stop, "hold": heads is MANY_HEADS} for stop in stops]
        return runs

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
    apart_flags = flags_of(place, "apart", *KINDS["fsdp-muon"], "--resume")
    other_out = ["--out", str(place / "other")]
    apart = [{"flags": apart_flags, "others": other_out, "stop": stop} for stop in (5, None)]
    timed = {"flags": timed_flags(place, "timed"), "others": ["--verify-data"]}  # which may differ
    two = [timed, *(whole(kind, 2, *micro) for kind in KINDS), each, *narrow, *apart]
    two.append(mixed("mixed-2", stop=5))
    play(2, two + parts("elastic", 4))  # … to 2 …
    damaged = shutil.copytree(place / "fsdp-muon-elastic", place / "damaged")
    (list_checkpoints(damaged)[-1] / "model-00002-of-00002.safetensors").write_bytes(b"")
    play(1, parts("elastic", 6))  # … to 1 …
    flags = flags_of(place, "damaged", *KINDS["fsdp-muon"], "--resume", *MANY_HEADS)
    again = {"flags": flags, "stop": 3}
    three = [whole(kind, 3, *micro) for kind in KINDS] + parts("again", 5, None)
    play(3, three + parts("elastic", None) + [again, mixed("mixed-2")])  # … to 3
    return place


@pytest.mark.parametrize("kind, size", [*itertools.product(KINDS, [2, 3]), ("fsdp-adamw", 4)])
def test_n_ranks_equal_one_rank_at_every_step(runs, kind, size):
    assert_same(runs / f"ddp-{kind.split('-')[1]}-1", runs / f"{kind}-{size}", 1e-5)


def test_ranks_agree_on_model_size_and_progress_of_a_timed_run(runs):
    first, second = (seen(runs / "timed", rank) for rank in (0, 1))
    assert first["said"].startswith("chosen depth ") and not second["said"]
    assert first["share"] == second["share"] == 1 and first["steps"] == second["steps"] > 0
    last = newest_checkpoint(runs / "timed")
    assert last.step == first["steps"] and last.state["settings"]["batch_size"] % 2 == 0


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_run_of_4_ranks_resumes_on_2_then_1_then_3(runs, kind):
    run = runs / f"{kind}-elastic"
    assert_same(runs / "heads", run, 1e-5)
    tensors = {path.stem: safetensors.torch.load_file(path) for path in folder_of(run).glob("*.s*")}
    for step in (2, 4, 6):  # resumed on another world size, bit for bit
        assert same_tensors(tensors[f"{step}-ended"], tensors[f"{step}-resumed"])
    last = newest_checkpoint(run)
    optimizer = {f"{key} of the optimizer": value for key, value in last.optimizer()}
    assert same_tensors(dict(last.model()) | optimizer, tensors[f"{STEPS}-ended"])
    assert last.shards == (3 if kind == "fsdp-muon" else 0)


def test_corrupted_shard_of_another_rank_is_reported_by_the_main_process(runs):
    first, second = (seen(runs / "damaged", rank)["said"] for rank in (0, 1))
    assert "step-00000004" in first and "model-00002-of-00002.safetensors" in first
    assert "Resuming after step 2" in first and not second


def test_sharded_ranks_without_a_shared_run_folder_gather_checkpoints(runs):
    run = runs / "apart"
    assert newest_checkpoint(run).shards == 0
    assert newest_checkpoint(runs / "fsdp-muon-2").shards == 2
    assert not (runs / "other").exists()
    assert seen(run)["said"].count("gathered by the main process") == 1
    assert_same(runs / "fsdp-muon-2", run, 1e-5)


def test_dataset_mixture_is_the_same_on_any_world_size(runs):
    assert_same(runs / "mixed-1", runs / "mixed-2", 1e-5)
    for name in ("data", "others"):
        losses = [logged(runs / run, f"val_loss/{name}") for run in ("mixed-1", "mixed-2")]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5) and len(losses[0]) == 1


@pytest.mark.parametrize("kind", ["ddp-muon", "fsdp-muon"])
def test_run_resumed_on_the_same_world_size_is_bit_identical(runs, kind):
    assert "Resuming after step 5" in seen(runs / f"{kind}-again")["said"]
    assert_same(runs / f"{kind}-3", runs / f"{kind}-again", 0)


def test_gradients_reduced_in_every_microbatch_are_the_same(runs):
    assert_same(runs / "ddp-muon-1", runs / "each", 1e-5)
    assert "reduced after each micro-batch" in seen(runs / "each")["said"]
    assert "micro-batch" not in seen(runs / "fsdp-muon-2")["said"]


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_fsdp_equals_ddp_in_bfloat16(runs, optimizer):
    assert_same(runs / f"ddp-{optimizer}-narrow", runs / f"fsdp-{optimizer}-narrow", 2e-4)


# Messages and memory.


@pytest.fixture(scope="module")
def watched(place, play) -> Path:
    """Three steps of every kind on 2 ranks, the third of which is profiled."""
    flags = ["--steps", 3, "--micro-batch-size", 2]
    runs = []
    for kind, kind_flags in KINDS.items():
        run_flags = flags_of(place, f"{kind}-watched", *kind_flags, *flags)
        runs.append({"flags": run_flags, "watch": True, "conclude": kind == "fsdp-muon"})
    play(2, runs)
    return place


def test_gradients_are_reduced_once_a_step_and_updates_gathered_once(watched):
    model = model_of(watched / "ddp-muon-watched")
    total = model.num_parameters
    matrices = sum(parameter.numel() for parameter in model.blocks.parameters())
    settled = 2  # numbers: whether to stop, and how many targets are counted

    def numbers(kind: str, what: str) -> list[int]:
        messages = seen(watched / f"{kind}-watched")["messages"]
        return [math.prod(shape) for name, shape in messages if name == what]

    def names(kind: str) -> set[str]:
        return {name for name, _ in seen(watched / f"{kind}-watched")["messages"]}

    for kind in ("ddp-muon", "ddp-adamw"):  # three micro-batches a step
        assert sum(numbers(kind, "all_reduce")) == total + settled
    assert sum(numbers("ddp-muon", "all_gather")) * 2 == matrices  # each sends its half
    assert names("ddp-muon") == {"all_reduce", "all_gather"}
    assert names("ddp-adamw") == {"all_reduce"}
    norm = 1
    for kind in ("fsdp-muon", "fsdp-adamw"):  # gloo scatters what it reduced by an all_reduce
        padding = 2 * model.config.d_model  # an odd number of embeddings and of outputs
        assert sum(numbers(kind, "all_reduce")) == total + padding + norm + settled
    assert sum(numbers("fsdp-muon", "all_to_all")) == 2 * matrices / 2  # half of them, both ways
    gathers = 3 * (1 + 2 * 2)  # in 3 micro-batches: the root, and 2 blocks forward and backward
    for kind in ("fsdp-muon", "fsdp-adamw"):
        assert len(numbers(kind, "all_gather")) == gathers


def test_each_of_two_sharded_ranks_holds_half(watched):
    for optimizer in ("muon", "adamw"):
        whole, half = (seen(watched / f"{parallel}-{optimizer}-watched") for parallel in ("ddp", "fsdp"))
        for what in ("parameters", "gradients", "optimizer"):
            assert half[what] == pytest.approx(whole[what] / 2, rel=0.02)


def test_only_the_main_process_prints_the_summary(watched):
    first, second = (seen(watched / "fsdp-muon-watched", rank)["said"] for rank in (0, 1))
    assert first.count("A sample:") == 1 and not second


# Targets that are ignored.


@pytest.fixture(scope="module")
def masked(place, play) -> Path:
    """Runs on 1 to 4 ranks in which each step counts other targets of its batch."""
    flags = [
        "--steps",
        len(masks()),
        "--clip-norm",
        0,
        "--learning-rate",
        0,
        "--eval-tokens",
        2 * LENGTH,
    ]
    flags += ["--num-layers", 1]
    for size in (1, 2, 3, 4):
        runs = []
        for parallel in ("ddp", "fsdp")[:size]:
            for micro in ([], ["--micro-batch-size", 1 if ROWS // size % 2 else 2]):
                name = f"masked-{parallel}-{size}{'-micro' * bool(micro)}"
                rank_flags = ["--parallel", parallel, *micro, *flags]
                runs.append({"flags": flags_of(place, name, *rank_flags), "mask": True})
                if size < 4:
                    pairs = ["--steps", EXAMPLES, "--data", place / "pairs"]
                    example_flags = flags_of(place, f"pairs-{name}", *rank_flags, *pairs)
                    runs.append({"flags": example_flags, "mask": True})
        play(size, runs)
    return place


def model_of(run: Path) -> GPT:
    model = GPT(load_settings(TrainConfig, [str(run / "config.toml")]).model)
    model.load_state_dict(dict(newest_checkpoint(run).model()))
    return model


def plain_loss(model: GPT, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the counted targets, or 0 without any."""
    losses = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten().clamp(min=0), reduction="none")
    counts = (targets.flatten() != -1).double()
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def check_gradients(run: Path, step: int, model: GPT) -> dict[str, torch.Tensor]:
    """Compare the gradients and loss of a step with those of the plain loss; return its tensors."""
    tensors = safetensors.torch.load_file(folder_of(run) / f"{step}.safetensors")
    model.zero_grad()
    loss = plain_loss(model, tensors["inputs"], tensors["targets"])
    loss.backward()
    expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    largest = max(gradient.abs().max() for gradient in expected.values())
    assert bool(largest) == bool((tensors["targets"] != -1).any())
    for name, gradient in expected.items():
        assert (tensors[name] - gradient).abs().max() <= 1e-6 * largest, (step, name)
    assert logged(run, "train_loss")[step] == pytest.approx(loss.item(), rel=1e-6)
    return tensors


RANKS = ["ddp-1", "ddp-2", "fsdp-2", "ddp-3", "fsdp-3", "ddp-4", "fsdp-4"]


@pytest.mark.parametrize("micro", ["", "-micro"])
@pytest.mark.parametrize("ranks", RANKS)
def test_gradient_is_that_of_the_mean_over_all_counted_targets(masked, ranks, micro):
    run = masked / f"masked-{ranks}{micro}"
    model = model_of(run).double()
    for step, counts in enumerate(masks().values(), 1):
        tensors = check_gradients(run, step, model)
        assert torch.equal(tensors["targets"] != -1, counts)


@pytest.mark.parametrize("micro", ["", "-micro"])
@pytest.mark.parametrize("ranks", RANKS[:5])
def test_gradient_on_examples_is_that_of_the_mean_over_completions(masked, ranks, micro):
    run = masked / f"pairs-masked-{ranks}{micro}"
    single = masked / "pairs-masked-ddp-1"
    model = model_of(run).double()
    shapes = set()
    for step in range(1, EXAMPLES + 1):
        tensors = check_gradients(run, step, model)
        expected = safetensors.torch.load_file(folder_of(single) / f"{step}.safetensors")
        assert all(torch.equal(tensors[name], expected[name]) for name in ("inputs", "targets"))
        counts = (tensors["targets"] != -1).sum(dim=1)
        assert counts.min() < counts.max()  # ranks count different numbers of targets
        shapes.add(tensors["inputs"].shape)
    assert len(shapes) > 1  # batches are as long as their examples


@pytest.mark.parametrize("ranks", RANKS)
def test_evaluation_is_the_mean_over_all_counted_targets(masked, ranks):
    """The last of two windows scores only new tokens; two of four ranks have no window."""
    run = masked / f"masked-{ranks}"
    val = open_dataset(masked / "data").val
    assert not isinstance(val, Examples)
    tokens = val[:].astype("int64")
    starts = [0, len(tokens) - 1 - LENGTH]
    windows = torch.stack([torch.from_numpy(tokens[i : i + LENGTH + 1]) for i in starts])
    inputs, targets = windows[:, :-1], windows[:, 1:].clone()
    targets[1, : -((len(tokens) - 1) % LENGTH)] = -1
    assert 0 < (targets == -1).sum() < LENGTH
    with torch.no_grad():
        expected = plain_loss(model_of(run).double(), inputs, targets).item()
    assert logged(run, "val_loss")[len(masks())] == pytest.approx(expected, rel=1e-6)


# Faults.


def until(condition: Callable[[], bool], process: subprocess.Popen, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_and_terminated_run_equals_an_uninterrupted_one(place, play):
    longer = ["--steps", 1000, "--save-every", 10, "--eval-every", 1000, "--parallel", "fsdp"]
    out = place / "hit"
    command = [*TORCHRUN, "--standalone", "--max-restarts", 9, ROOT / "train.py"]
    process = start(*command, *flags_of(place, "hit", *longer))

    def train_on() -> None:
        """Wait for two more checkpoints."""
        newest = (list_checkpoints(out) or [out / "step-0"])[-1].name.split("-")[1]
        name = f"step-{int(newest) + 20:08d}"
        until(lambda: any(path.name >= name for path in list_checkpoints(out)), process)

    try:
        train_on()
        command = ["pgrep", "-P", str(process.pid)]
        workers = subprocess.check_output(command, encoding="utf-8").split()
        assert len(workers) == 2
        os.kill(int(workers[1]), signal.SIGKILL)
        train_on()
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1, errors
    assert output.count("Resuming after step") == 1  # only the main process prints
    assert output.count("Resume with: torchrun --nproc-per-node 2") == 1
    hit = newest_checkpoint(out)
    play(2, [{"flags": flags_of(place, "whole", *longer), "stop": hit.step}])
    assert same_checkpoint(newest_checkpoint(place / "whole"), hit)


def test_full_disk_of_a_sharded_rank_ends_the_run(place, play):
    flags = flags_of(place, "full", "--parallel", "fsdp", "--save-every", 5)
    start_time = time.monotonic()
    full_disk = r"model-00002-of-00002\.safetensors: .*File too large"
    with pytest.raises(AssertionError, match=full_disk):
        play(2, [{"flags": flags, "full": 4096}])
    assert time.monotonic() - start_time < 60  # ended, long before the timeout
    assert list((place / "full" / "checkpoints").iterdir()) == []


def test_different_settings_of_ranks_are_named(place, play):
    flags = [*timed_flags(place, "differ", 1), "--timeout", "5"]
    run = {"flags": flags, "others": ["--d-model", "64"]}
    with pytest.raises(AssertionError, match=r"rank 1 .*d_model None → 64"):
        play(2, [run])


def test_rank_that_hangs_ends_the_run(place, play):
    start_time = time.monotonic()
    with pytest.raises(AssertionError, match="Timed out waiting 2000ms"):
        play(2, [{"flags": flags_of(place, "hangs", "--timeout", 2), "hang": 5}])
    assert time.monotonic() - start_time < 2 + 5


# Two ranks.

TWO_RANKS = """
import os, signal, sys, time
import torch
import torch.nn.functional as F
from engine.core.cli import run_command
from engine.core.distributed import init_distributed
from engine.core.errors import UserError

child = os.fork()  # one import of torch for two ranks
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1" if child else "0"
mode = sys.argv[1]

def refuse():
    raise UserError("--data: not found")

def check_collectives(context):
    rank = context.rank
    value = torch.tensor([1.0, rank])
    assert context.sum(value).tolist() == [2, 1] and value.tolist() == [1, rank]
    assert context.any(rank == 1) and not context.any(False)
    assert context.broadcast([rank, None], 1) == [1, None]
    assert context.broadcast_first_non_none("x" if rank else None) == "x"
    assert context.broadcast_first_non_none(None) is None
    assert context.run_on_main(int, "7") == (None if rank else 7)
    assert context.broadcast_from_main(lambda: {"rank": rank}) == {"rank": 0}
    assert context.rank_slice(5) == (slice(2, 5) if rank else slice(0, 2))
    tensors = {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    received = dict(context.broadcast_tensors(() if rank else tensors.items()))
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)
    full = torch.arange(30.0).view(5, 3, 2)
    height = 2 if rank == 0 else 1
    for sharded in (False, True):
        own = full[:, 2 * rank : 2 * rank + height] if sharded else full
        object.__setattr__(context, "sharded", sharded)
        result = context.map_matrices_across_ranks(lambda x: x.cumsum(1), own, 3, 2)
        expected = full.cumsum(1)
        expected = expected[:, 2 * rank : 2 * rank + height] if sharded else expected
        assert torch.equal(result, expected)

def main():
    with init_distributed("cpu", timeout=2) as context:
        steps = 12 if mode == "differ" and context.rank else 10
        settings = {"steps": steps, "out": context.rank, "seed": 1}
        context.assert_equal_across_ranks(settings, ignore={"out"})
        check_collectives(context)
        if mode == "refuse":
            context.broadcast_from_main(refuse)
        with context.keep_alive():
            if mode == "work":
                context.sum(torch.ones(1))  # heartbeats use another group
                time.sleep(3 * context.is_main_process)
            if context.is_main_process and mode == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
        os.write(1, b"done\\n")

try:
    run_command(main)
finally:
    if child:
        os.kill(child, signal.SIGCONT)
        if mode == "hang":
            os.kill(child, signal.SIGKILL)
        os.wait()
"""

DIFFERENT = "error: rank 1 was started with different settings than rank 0: steps 10 → 12. "


@pytest.mark.parametrize(
    ("mode", "output", "errors"),
    [
        ("work", "done\ndone\n", "^$"),  # longer than the timeout
        ("hang", "", "^error: lost the connection to another process .*[Tt]imed out.*\n$"),
        ("differ", "", f"^({DIFFERENT}Start all ranks alike.\n){{2}}$"),
        ("refuse", "", "^(error: --data: not found\n){2}$"),
    ],
)
def test_two_ranks_wait_for_work_and_share_errors(mode, output, errors):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = subprocess.run(
        [sys.executable, "-c", TWO_RANKS, mode],
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        timeout=60,
        env=os.environ | variables | {"MASTER_PORT": str(port)},
    )
    assert process.stdout == output and (process.returncode == 0) == bool(output), process.stderr
    assert re.search(errors, process.stderr), process.stderr


ENDING = """
import os, socket, sys
import torch
import torch.distributed as dist
from engine.core.distributed import init_distributed

codes = []
for _ in range(8):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in ("0", "1"):
        if not (child := os.fork()):
            given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            os.environ.update(given, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            with init_distributed("cpu") as context:
                group = dist.group.WORLD  # as PyTorch's own modules may hold it
                sys.setswitchinterval(1000)  # a thread that waits for the GIL does not request it
                context.sum(torch.ones(100_000))
            sys.exit()
        children.append(child)
    codes += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(sum(map(abs, codes)))
"""


def test_process_exits_without_abort():
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, encoding="utf-8", cwd=ROOT, timeout=60)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "two"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "x"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
    ],
)
def test_incomplete_variables_of_torchrun_are_named(variables, name, monkeypatch):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"^{name}: must be a number"), init_distributed("cpu"):
        pass


def test_process_without_torchrun_has_a_context_of_its_own():
    with init_distributed("cpu") as context:
        assert context == DistributedContext(0, 1, torch.device("cpu"))
        value = torch.ones(2)
        assert context.sum(value) is not value
        with pytest.raises(UserError, match="--x"), context.keep_alive():
            raise UserError("--x: wrong")


# Several machines.


def start(*command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


class Elsewhere(DistributedContext):
    """A rank without peers to wait for."""

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        yield


def test_local_rank_0_of_each_machine_verifies_the_data(place, tmp_path):
    shutil.copytree(place / "data", tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")
    config = TrainConfig(data=tmp_path / "data")
    assert train.open_data(config, Elsewhere(3, 4, torch.device("cpu"), local_rank=1))
    with pytest.raises(UserError, match=r"train-00000\.npy"):
        train.open_data(config, Elsewhere(2, 4, torch.device("cpu"), local_rank=0))


@pytest.fixture
def two_machines() -> Iterator[list[tuple[str, str]]]:
    """Yield the names and addresses of two connected network namespaces."""

    def ip(*words: str) -> bool:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0

    names = [f"gpt{os.getpid()}{side}" for side in "ab"]
    try:
        if shutil.which("ip") is None or not all(ip("netns", "add", name) for name in names):
            pytest.skip("network namespaces can't be made here")
        a, b = names
        ends = ("netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        assert ip("link", "add", "cable", *ends)
        for number, name in enumerate(names, 1):
            assert ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
            assert ip("-n", name, "link", "set", "cable", "up")
            assert ip("-n", name, "link", "set", "lo", "up")
        yield [(name, f"10.77.0.{number}") for number, name in enumerate(names, 1)]
    finally:
        for name in names:
            ip("netns", "delete", name)


def test_two_machines_equal_one_and_only_the_first_has_a_run_folder(place, runs, two_machines, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable")
    machines = []
    for number, (name, address) in enumerate(two_machines):
        data = place / f"data-{number}"
        shutil.copytree(place / "data", data, ignore=shutil.ignore_patterns("verified.json"))
        flags = flags_of(place, f"machine-{number}", "--resume", "--data", data)
        meet = ["--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"]
        meet += ["--rdzv-conf", f"is_host={not number}", "--local-addr", address]
        stopped_and_resumed = json.dumps([{"flags": flags, "stop": 6}, {"flags": flags}])
        script = ROOT / "tests" / "in_turn.py"
        command = [*TORCHRUN, *meet, script, stopped_and_resumed]
        machines.append(start("ip", "netns", "exec", name, *command))
    with contextlib.suppress(subprocess.TimeoutExpired):  # torchrun waits for a failed machine
        for machine in machines:
            machine.wait(timeout=120)
    for machine in machines:
        machine.kill()
    errors = [machine.communicate()[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], errors
    assert_same(runs / "ddp-muon-1", place / "machine-0", 1e-5)
    assert not (place / "machine-1").exists()
    assert all((place / f"data-{number}" / "verified.json").exists() for number in (0, 1))


LAUNCHERS = [(1, 1, "python"), (2, 1, "torchrun --nproc-per-node 2")]
LAUNCHERS += [(4, 2, "torchrun --nnodes 2 RENDEZVOUS --nproc-per-node 2")]


@pytest.mark.parametrize(("size", "nodes", "said"), LAUNCHERS)
def test_command_to_resume_with_has_as_many_processes_and_machines(size, nodes, said, monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", str(nodes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert DistributedContext(0, size, torch.device("cpu")).launcher == said
