"""N ranks = 1 rank: losses, batches, gradients, resuming on other world sizes, faults."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch
import torch._dynamo
import torch.distributed.fsdp  # before ranks are forked
import torch.nn.functional as F
from helpers import (
    TINY,
    fork,
    logged,
    make_dataset,
    newest_checkpoint,
    numbers_text,
    same_checkpoint,
    same_tensors,
    wait_for,
    write_lines,
)
from helpers import run_ranks as run_on_ranks
from in_turn import LENGTH, ROWS, Run, folder_of, masks, play
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train
from engine.core import distributed
from engine.core.distributed import (
    RANK_VARIABLES,
    SINGLE_PROCESS,
    DistributedContext,
    has_torchrun_ended,
    init_distributed,
)
from engine.core.errors import UserError
from engine.core.settings import load_settings
from engine.runs.checkpoint import load_model
from engine.runs.run_files import list_checkpoints
from engine.training.config import TrainConfig

COMMON_FLAGS = "--log-every 1 --eval-tokens 500 --device cpu --dtype float32"
MODEL_FLAGS = (
    "--num-layers 2 --num-heads 2 --d-model 16 --warmup-steps 2 "
    f"--context-length {LENGTH} --batch-size {ROWS}"
)
NUM_STEPS = 8
ADAMW_FLAGS = ["--optimizer", "adamw", "--learning-rate", "3e-3"]
FLAGS_OF_KIND = {  # of runs that are compared on 1 to 4 ranks
    "ddp-muon": ["--parallel", "ddp"],
    "fsdp-muon": ["--parallel", "fsdp"],
    "ddp-adamw": ["--parallel", "ddp", *ADAMW_FLAGS],
    "fsdp-adamw": ["--parallel", "fsdp", *ADAMW_FLAGS],
}
MUON_KINDS = ("ddp-muon", "fsdp-muon")
START_TIMEOUT_SECONDS = 60  # of two ranks, on shared cores
MASKED_RUNS = ["ddp-1", "ddp-2-micro", "fsdp-2", "ddp-3-micro", "fsdp-3"]
MANY_HEADS = ["--num-heads", 8]  # two rows a matrix: two of four sharded ranks have none
RunRanks = Callable[[int, list[Run]], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with datasets, for the runs."""
    folder = tmp_path_factory.mktemp("ranks")
    data = make_dataset(folder, numbers_text(2000), tokenizer="char")
    second = numbers_text(2700)[-9000:]
    make_dataset(folder, second, tokenizer=str(data), out=folder / "second")
    make_dataset(folder, numbers_text(20), separator="1", out=folder / "documents")
    numbers = [*map(str, range(9))]
    choices = [{"prompt": "is", "choices": numbers[i:], "answer": numbers[-1]} for i in range(8)]
    answers = [{"prompt": number, "answer": "is"} for number in numbers]
    for name, records in (("choice", choices), ("exact_match", answers)):
        write_lines(folder / f"{name}.jsonl", records)
    train.train(new_run(folder / "base", "--steps", 4).config, callbacks=())
    return folder


@pytest.fixture(scope="module")
def run_ranks(folder) -> RunRanks:
    """Runs of in_turn.py on a world size."""
    log = folder / "log"

    def run_ranks(size: int, runs: list[Run]) -> None:
        codes = run_on_ranks(log, size, lambda rank: play(runs))
        assert codes == [0] * size, log.read_text()

    return run_ranks


def flags_of(run: Path, *flags: object) -> list[str]:
    """Return the flags of a run beside its dataset, of automatic size if it is timed."""
    sizes = [] if "--minutes" in flags else [*MODEL_FLAGS.split(), "--steps", NUM_STEPS]
    paths = ["--data", run.parent / "data", "--out", run]
    return list(map(str, [*paths, *COMMON_FLAGS.split(), *sizes, *flags]))


def new_run(run: Path, *flags: object, **options: Any) -> Run:
    """Return a run of in_turn.py with its options."""
    return Run(load_settings(TrainConfig, flags_of(run, *flags)), **options)


def record_of(run: Path, rank: int = 0) -> dict:
    """Return what in_turn.py recorded of a rank."""
    return json.loads((folder_of(run) / f"{rank}.json").read_text())


# Runs on 1 to 4 ranks, some stopped and resumed on another world size.


@pytest.fixture(scope="module")
def runs(folder, run_ranks) -> Path:
    micro = ["--micro-batch-size", 2]

    def kind_run(kind: str, name: object, *flags: object, **options: Any) -> Run:
        return new_run(folder / f"{kind}-{name}", *FLAGS_OF_KIND[kind], *flags, **options)

    def lora_run(kind: str, name: object, *flags: object, **options: Any) -> Run:
        base = ["--init-from", folder / "base", "--lora-rank", 3, "--parallel", kind.split("-")[0]]
        base += ["--score", "exact_match", "--score-file", folder / "exact_match.jsonl"]
        return new_run(folder / f"{kind}-{name}", *base, *ADAMW_FLAGS, *flags, **options)

    def documents_run(parallel: str, name: object, *flags: object) -> Run:
        flags += ("--score", "choice", "--score-file", folder / "choice.jsonl", "--document-mask")
        paths = ["--data", folder / "documents", "--parallel", parallel]
        return new_run(folder / f"{parallel}-documents-{name}", *paths, *flags)

    def elastic(stop: float) -> list[Run]:
        flags = ["--auto-resume", *MANY_HEADS]
        return [kind_run(kind, "elastic", *flags, stop=stop, hold=True) for kind in MUON_KINDS]

    def mixture(size: int, stop: float = math.inf) -> Run:
        flags = ["--data", folder / "data", folder / "second", "--mix", 0.7, 0.3, "--auto-resume"]
        return new_run(folder / f"mixed-{size}", *flags, stop=stop)

    def masked(size: int) -> list[Run]:
        """Return the runs of a world size whose steps each count other targets of their batch."""
        flags = ["--steps", len(masks()), "--clip-norm", 0, "--learning-rate", 0]
        flags += ["--num-layers", 1, "--eval-tokens", 2 * LENGTH]
        runs = []
        for name in (name for name in MASKED_RUNS if f"-{size}" in name):
            run_flags = ["--parallel", name.split("-")[0], *flags, *micro * name.endswith("-micro")]
            runs.append(new_run(folder / f"masked-{name}", *run_flags, mask=True))
        return runs

    four = kind_run("fsdp-adamw", 4, "--checkpoint-activations")
    run_ranks(4, [four, *elastic(2)])  # from 4 …

    timed = new_run(folder / "timed", "--minutes", 0.03, other_settings={"verify_data": True})
    options = {"watch": True, "summarize": True}
    two = [timed, *(kind_run(kind, 2, *micro, **options) for kind in MUON_KINDS)]
    two.append(documents_run("fsdp", 2, *micro))
    two.append(lora_run("ddp-lora", 2, *micro, "--checkpoint-activations"))
    two += [lora_run("fsdp-lora", "again", "--auto-resume", stop=n) for n in (5, 9)]
    two += [kind_run(kind, "bfloat16", "--dtype", "bfloat16") for kind in MUON_KINDS]
    apart = {"other_settings": {"out": folder / "unused"}}  # without a shared run folder
    two += [kind_run("fsdp-muon", "apart", "--auto-resume", stop=n, **apart) for n in (5, math.inf)]
    run_ranks(2, [*two, *masked(2), mixture(2, stop=5), *elastic(4)])  # … to 2 …

    damaged = shutil.copytree(folder / "fsdp-muon-elastic", folder / "fsdp-muon-damaged")
    (list_checkpoints(damaged)[-1] / "model-00002-of-00002.safetensors").write_bytes(b"")
    single = [kind_run(kind, 1) for kind in ("ddp-muon", "ddp-adamw")]
    single += [lora_run("ddp-lora", 1), documents_run("ddp", 1), mixture(1), *masked(1)]
    run_ranks(1, [*single, kind_run("ddp-muon", "heads", *MANY_HEADS), *elastic(6)])  # … to 1 …

    # Without memory, sharded gradients are reduced in every micro-batch.
    three = [kind_run(kind, 3, *micro, memory=1) for kind in MUON_KINDS]
    again = partial(kind_run, "ddp-muon", "again", "--auto-resume", *micro)
    three += [again(stop=5), again(), *elastic(math.inf)]
    three.append(kind_run("fsdp-muon", "damaged", "--resume", *MANY_HEADS, stop=3))
    run_ranks(3, [*three, *masked(3), mixture(2)])  # … to 3
    return folder


RUN_PAIRS = [  # a run, the run that it equals, and the tolerance
    *((f"{kind}-{n}", "ddp-muon-1", 1e-5) for kind in MUON_KINDS for n in (2, 3)),
    ("fsdp-adamw-4", "ddp-adamw-1", 1e-5),
    ("ddp-muon-elastic", "ddp-muon-heads", 1e-5),
    ("fsdp-muon-elastic", "ddp-muon-heads", 1e-5),
    ("fsdp-muon-apart", "fsdp-muon-2", 1e-5),
    ("mixed-2", "mixed-1", 1e-5),
    ("fsdp-muon-bfloat16", "ddp-muon-bfloat16", 2e-4),
    *((run, "ddp-lora-1", 1e-5) for run in ("ddp-lora-2", "fsdp-lora-again")),
    ("fsdp-documents-2", "ddp-documents-1", 1e-5),
    ("ddp-muon-again", "ddp-muon-3", 0),  # resumed on the same world size
]


@pytest.mark.parametrize(("run", "reference", "tolerance"), RUN_PAIRS)
def test_n_ranks_equal_one_rank_at_every_step(runs, run, reference, tolerance):
    run = runs / run
    reference = runs / reference
    digests = logged(reference, "batch_digest")
    assert logged(run, "batch_digest") == digests and len(digests) == NUM_STEPS
    for key in ("train_loss", "val_loss", "val_score", "val_loss/data", "val_loss/second"):
        expected = logged(reference, key)
        assert logged(run, key) == pytest.approx(expected, abs=tolerance, rel=0)
    if not tolerance:
        assert same_checkpoint(newest_checkpoint(run), newest_checkpoint(reference))


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ("timed", "chosen depth "),
        ("fsdp-muon-damaged", "Resuming after step 2"),
        ("fsdp-muon-3", "reduced after each micro-batch"),
        ("fsdp-muon-2", "A sample:"),
    ],
)
def test_only_the_main_process_prints(runs, run, text):
    first, second = (record_of(runs / run, rank)["output"] for rank in (0, 1))
    assert first.count(text) == 1 and not second


def test_ranks_agree_on_model_size_and_progress_of_a_timed_run(runs):
    first, second = (record_of(runs / "timed", rank) for rank in (0, 1))
    assert first["progress"] == second["progress"] == 1 and first["steps"] == second["steps"] > 0
    checkpoint = newest_checkpoint(runs / "timed")
    assert checkpoint.step == first["steps"]
    assert checkpoint.state.settings["batch_size"] % 2 == 0


@pytest.mark.parametrize("kind", MUON_KINDS)
def test_run_of_4_ranks_resumes_on_2_then_1_then_3_bit_for_bit(runs, kind):
    run = runs / f"{kind}-elastic"
    tensors = {path.stem: safetensors.torch.load_file(path) for path in folder_of(run).glob("*.s*")}
    for step in (2, 4, 6):
        assert same_tensors(tensors[f"{step}-ended"], tensors[f"{step}-resumed"])
    checkpoint = newest_checkpoint(run)
    optimizer = {f"{key} of the optimizer": value for key, value in checkpoint.optimizer()}
    assert same_tensors(dict(checkpoint.model()) | optimizer, tensors[f"{NUM_STEPS}-ended"])
    assert checkpoint.shards == (3 if kind == "fsdp-muon" else 0)


def test_sharded_ranks_without_a_shared_run_folder_gather_checkpoints(runs):
    assert newest_checkpoint(runs / "fsdp-muon-apart").shards == 0
    assert newest_checkpoint(runs / "fsdp-muon-2").shards == 2
    assert not (runs / "unused").exists()
    assert record_of(runs / "fsdp-muon-apart")["output"].count("gathered by the main process") == 1


# Traffic and memory.


def test_each_of_two_sharded_ranks_holds_half(runs):
    full, half = (record_of(runs / f"{kind}-2") for kind in MUON_KINDS)
    for name in ("parameters", "gradients", "optimizer"):
        assert half[name] == pytest.approx(full[name] / 2, rel=0.02)


# Targets that are ignored.


@pytest.mark.parametrize("name", MASKED_RUNS)
def test_gradient_is_that_of_the_mean_over_all_counted_targets(runs, name):
    run = runs / f"masked-{name}"
    model = load_model(newest_checkpoint(run)).train().double()
    train_losses = logged(run, "train_loss")
    for step, mask in enumerate(masks().values(), 1):
        tensors = safetensors.torch.load_file(folder_of(run) / f"{step}.safetensors")
        targets = tensors["targets"].flatten()
        assert torch.equal(targets != -1, mask.flatten())
        logits = model(tensors["inputs"]).flatten(0, 1)
        sum_of_losses = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        loss = sum_of_losses / mask.sum().clamp(min=1)
        assert train_losses[step] == pytest.approx(loss.item(), rel=1e-6)
        model.zero_grad()
        loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        largest = max(gradient.abs().max() for gradient in expected.values())
        assert bool(largest) == bool(mask.any())
        for name, gradient in expected.items():
            assert (tensors[name] - gradient).abs().max() <= 1e-6 * largest, (step, name)
    # Of three ranks one has no window of validation.
    losses, expected = (logged(path, "val_loss") for path in (run, runs / "masked-ddp-1"))
    assert losses == pytest.approx(expected, rel=1e-6) and list(losses) == [len(masks())]


# Faults.


def test_killed_and_terminated_run_equals_an_uninterrupted_one(plain_steps, folder, run_ranks):
    flags = ["--steps", 1000, "--save-every", 10, "--eval-every", 1000, "--parallel", "fsdp"]
    run = folder / "interrupted"
    log = folder / "interrupted.log"
    options = {"run_id": "1", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    config = LaunchConfig(1, 1, 2, **options, max_restarts=9, start_method="fork")

    def start_rank() -> None:
        distributed.PARENT_ID = os.getppid()  # as in a process that imports it
        sys.exit(train.main(flags_of(run, *flags)))

    def wait_for_two_checkpoints() -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        names = [path.name for path in list_checkpoints(run)] or ["step-0"]
        target = f"step-{int(names[-1].removeprefix('step-')) + 20:08d}"
        while not any(path.name >= target for path in list_checkpoints(run)):
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)

    torchrun = fork(log, elastic_launch(config, start_rank))  # what torchrun calls
    try:
        wait_for_two_checkpoints()
        workers = subprocess.check_output(["pgrep", "-P", str(torchrun)], encoding="utf-8").split()
        os.kill(int(workers[1]), signal.SIGKILL)
        wait_for_two_checkpoints()
    finally:
        os.kill(torchrun, signal.SIGTERM)
        code = wait_for(torchrun)
    output = log.read_text()
    assert code, output
    assert output.count("Resuming after step") == 1  # only the main process prints
    assert output.count("torchrun --nproc-per-node 2") == 1  # the command to resume with
    checkpoint = newest_checkpoint(run)
    run_ranks(2, [new_run(folder / "uninterrupted", *flags, stop=checkpoint.step)])
    assert same_checkpoint(newest_checkpoint(folder / "uninterrupted"), checkpoint)


# Two ranks.


def check_collectives(context: DistributedContext) -> None:
    rank = context.rank
    value = torch.tensor([1.0, rank])
    assert context.sum(value).tolist() == [2, 1] and value.tolist() == [1, rank]
    assert context.any(rank == 1) and not context.any(False)
    assert context.broadcast([rank, None]) == [0, None]
    assert context.run_on_main(int, "7") == (None if rank else 7)
    assert context.broadcast_from_main(lambda: {"rank": rank}) == {"rank": 0}
    assert context.rank_slice(5) == (slice(2, 5) if rank else slice(0, 2))
    tensors = {"a": torch.arange(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    received = dict(context.broadcast_tensors(() if rank else tensors.items()))
    assert same_tensors(received, tensors)
    full = torch.arange(30.0).view(5, 3, 2)
    rows = slice(2, 3) if rank else slice(0, 2)
    for sharded in (False, True):
        own_rows = rows if sharded else slice(None)
        context = dataclasses.replace(context, sharded=sharded)
        result = context.map_matrices_across_ranks(lambda x: x.cumsum(1), full[:, own_rows], 3, 2)
        assert torch.equal(result, full.cumsum(1)[:, own_rows])


def test_two_ranks_share_values_and_errors_and_wait_for_each_other(tmp_path):
    refuse = Mock(side_effect=UserError("--data: not found"))

    def read_slowly() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(3)  # longer than the timeout
        yield "weight", torch.ones(2)
        raise UserError("base: corrupted")

    def check_rank(rank: int) -> None:
        with init_distributed("cpu", timeout=2) as context:
            check_collectives(context)
            settings = {"steps": 10 + 2 * rank, "out": rank, "seed": 1}
            context.assert_equal_across_ranks(settings, ignore={"out", "steps"})
            with pytest.raises(UserError, match=r"rank 1 .*steps 10 → 12"):
                context.assert_equal_across_ranks(settings, ignore={"out"})
            with pytest.raises(UserError, match=r"^--data: not found$"):
                context.broadcast_from_main(refuse)
            reader = context.broadcast_tensors(read_slowly())
            assert same_tensors(dict([next(reader)]), {"weight": torch.ones(2)})
            with pytest.raises(UserError, match=r"^base: corrupted$"):
                next(reader)
            main_process = context.broadcast(os.getpid())
            if rank == 0:
                os.kill(main_process, signal.SIGSTOP)
            with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
                context.sum(torch.ones(1))
            os.kill(main_process, signal.SIGKILL)
            killed_at = time.monotonic()
            with pytest.raises(RuntimeError), context.wait_for_all():
                pass
            assert time.monotonic() - killed_at < 2

    log = tmp_path / "log"
    assert run_on_ranks(log, 2, check_rank) == [-signal.SIGKILL, 0], log.read_text()


def test_a_rank_notices_when_torchrun_is_gone(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert not has_torchrun_ended()
    monkeypatch.setattr(distributed, "PARENT_ID", -1)  # init, or a subreaper, is the parent now
    assert has_torchrun_ended()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert not has_torchrun_ended()


def test_ranks_need_their_variables_and_a_process_is_alone_without_them(monkeypatch):
    for variable in (*RANK_VARIABLES, "WORLD_SIZE"):
        monkeypatch.setenv(variable, "2")
    monkeypatch.delenv(RANK_VARIABLES[0])
    with pytest.raises(UserError, match=f"^{RANK_VARIABLES[0]}: "), init_distributed("cpu"):
        pass
    for size in ("", "1"):  # 1: torchrun with one process
        monkeypatch.setenv("WORLD_SIZE", size)
        for variable in (*RANK_VARIABLES, "TORCHELASTIC_RESTART_COUNT"):
            monkeypatch.setenv(variable, size and "0")
        with init_distributed("cpu") as context:
            assert context == SINGLE_PROCESS and not context.is_restart


def test_the_main_process_prepares_the_text_of_all_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(numbers_text(60))
    command = ["book.txt", *TINY, "--steps", "2"]
    assert run_on_ranks(tmp_path / "log", 2, lambda rank: train.main(command)) == [0, 0]
    assert (tmp_path / "log").read_text().count("$ python prepare.py book.txt\n") == 1


# Several machines.


def test_local_rank_0_of_each_machine_verifies_the_data(folder, tmp_path):
    shutil.copytree(folder / "data", tmp_path / "data")
    shard = tmp_path / "data" / "train-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")
    config = TrainConfig(data=tmp_path / "data")
    assert train.open_data(config, DistributedContext(local_rank=1))
    with pytest.raises(UserError, match=r"train-00000\.npy"):
        train.open_data(config, DistributedContext(local_rank=0))
