"""Estimates against arithmetic by hand, and against what PyTorch counts and allocates."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import GPT2, ROOT, YEAR_2017, exit_code_of, numbers_text
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import train
from engine.core.distributed import SINGLE_PROCESS
from engine.nn.acceleration import checkpoint_activations as recompute_activations
from engine.training import estimate
from engine.training.config import RunConfig
from engine.training.estimate import (
    Hardware,
    activation_bytes,
    bound_memory,
    build_meta_model,
    describe_plan,
    estimate_memory,
    flops_per_token,
    largest_micro_batch,
    optimizer_bytes,
)
from engine.training.optimizer import OptimizerConfig
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

FLOAT32 = torch.float32
BFLOAT16 = torch.bfloat16
DTYPE_BY_NAME = [FLOAT32, BFLOAT16]
CPU = torch.device("cpu")
SMALL = ModelConfig(vocab_size=500, context_length=128, num_layers=2, num_heads=4, d_model=128)
KINDS = [
    {},
    GPT2,
    YEAR_2017,
    {"activation": "relu2"},
    {"dropout": 0.1},
    {"num_layers": 6},
    {"d_model": 320, "context_length": 16},  # copies of weights are a large part
    {"context_length": 640, "num_layers": 1},
    {"windows": (40, 0)},
    {"vocab_size": 50304, "d_model": 64, "num_layers": 1},  # logits in chunks
]
SHAPE_124M = {"vocab_size": 50257, "context_length": 1024, "num_layers": 12, "num_heads": 12}
GPT2_124M = ModelConfig(**SHAPE_124M, d_model=768, **GPT2)


def small(**settings) -> ModelConfig:
    return dataclasses.replace(SMALL, **settings)


# Operations.


@pytest.mark.parametrize("kind", [{}, GPT2, {"num_kv_heads": 2, "head_dim": 16}])
def test_operations_are_those_that_pytorch_counts(kind):
    model = small(**kind, context_length=300)
    tokens = torch.zeros(1, 300, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        GPT(model)(tokens, tokens).backward()
    assert flops_per_token(model) * 300 == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_windows_save_operations():
    saved = flops_per_token(small()) - flops_per_token(small(windows=(32, 0)))
    assert saved == 12 * 128 * (128 - 32)


# Memory.


def peak_allocated(call) -> int:
    """Return the most bytes that PyTorch's allocator held during a call, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    current = 0
    peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            current += event.nbytes()
            peak = max(peak, current)
    return peak


def measure_activations(model: ModelConfig, rows: int, dtype, checkpointing: bool = False) -> int:
    """Measure the second of two micro-batches: weights and gradients are there before."""
    gpt = GPT(model)
    if checkpointing:
        recompute_activations(gpt)

    def micro_batch(num_rows: int) -> None:
        tokens = torch.randint(model.vocab_size, (2, num_rows, model.context_length))
        with torch.autocast("cpu", dtype, enabled=dtype != FLOAT32):
            loss = gpt(*tokens)
        loss.backward()

    micro_batch(1)
    return peak_allocated(lambda: micro_batch(rows))


@pytest.mark.parametrize("dtype", DTYPE_BY_NAME)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(map(str, kind)) or "default")
def test_activations_are_those_that_a_micro_batch_allocates(kind, dtype):
    model = small(**kind)
    rows = 2 if "context_length" in kind else 6
    estimated = activation_bytes(model, rows, Hardware(dtype, is_gpu=False))
    assert estimated == pytest.approx(measure_activations(model, rows, dtype), rel=0.05)
    estimated = activation_bytes(model, rows, Hardware(dtype, is_gpu=False), checkpointing=True)
    measured = measure_activations(model, rows, dtype, checkpointing=True)
    assert estimated == pytest.approx(measured, rel=0.1)


REAL_RUN = """
import sys
from pathlib import Path

import train

train.main(sys.argv[1:])
status = Path("/proc/self/status").read_text().split()  # getrusage() has the peak of the parent
print(1024 * int(status[status.index("VmHWM:") + 1]))
"""
GPT2_FLAGS = "--position learned --norm layernorm --activation gelu --no-qk-norm --bias "
GPT2_FLAGS += "--tie-embeddings --optimizer adamw"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    "flags",
    [
        *("", "--dropout 0.1", "--dropout 0.1 --micro-batch-size 4"),
        *(GPT2_FLAGS, f"--dropout 0.1 {GPT2_FLAGS}"),
    ],
)
def test_planned_memory_is_the_peak_of_a_run(flags, numbers, tmp_path, capsys):
    sizes = "--num-layers 4 --num-heads 4 --d-model 192 --context-length 256 --batch-size 12"
    arguments = ["--data", str(numbers), "--out", str(tmp_path / "run"), "--device", "cpu"]
    arguments += [*sizes.split(), *flags.split(), "--steps", "2", "--eval-tokens", "2000"]
    command = [sys.executable, "-c", REAL_RUN, *arguments]
    output = subprocess.check_output(command, cwd=ROOT, encoding="utf-8")
    measured = int(output.splitlines()[-1]) / 2**20
    train.main([*arguments, "--plan"])
    planned = float(rows_of(capsys.readouterr().out)["= memory"][0].split()[0].replace(",", ""))
    assert planned == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPE_BY_NAME)
def test_attention_on_a_gpu_stores_no_scores(dropout, dtype):
    def ratio(is_gpu: bool) -> float:
        """Of long sequences to short ones with as many tokens."""
        long = small(dropout=dropout, context_length=512)
        short = small(dropout=dropout, context_length=128)
        hardware = Hardware(dtype, is_gpu)
        return activation_bytes(long, 2, hardware) / activation_bytes(short, 8, hardware)

    assert ratio(is_gpu=True) == pytest.approx(1, rel=0.02)
    if dropout or dtype == BFLOAT16:
        assert ratio(is_gpu=False) > 1.2


@pytest.mark.parametrize(("optimizer", "matrix_bytes"), [("adamw", 8), ("muon", 4)])
def test_optimizer_state(optimizer, matrix_bytes):
    num_params = build_meta_model(SMALL).num_parameters
    num_matrix_weights = 2 * (4 * 128**2 + 3 * 128 * 352)
    state, _ = optimizer_bytes(SMALL, OptimizerConfig(optimizer, 0.01, weight_decay=0.1), FLOAT32)
    by_hand = 8 * (num_params - num_matrix_weights) + matrix_bytes * num_matrix_weights
    assert state == pytest.approx(by_hand, rel=0.005)
    if optimizer == "muon":
        _, step = optimizer_bytes(SMALL, OptimizerConfig("muon"), BFLOAT16)
        assert step > 2 * 2 * 2 * 352 * 128  # of both layers, gate and expand, in two bytes


def test_fsdp_divides_all_but_what_is_gathered():
    model = ModelConfig(
        vocab_size=50304, num_layers=32, num_heads=4, d_model=4096, activation="relu2"
    )
    num_params = build_meta_model(model).num_parameters
    block = 12 * 4096**2
    other_params = num_params - 32 * block
    assert other_params == 2 * 50304 * 4096
    config = RunConfig(model=model, batch_size=64)
    single = estimate_memory(config, 8, Hardware(BFLOAT16, True))
    ddp = estimate_memory(config, 8, Hardware(BFLOAT16, True, 8))
    fsdp = estimate_memory(config, 8, Hardware(BFLOAT16, True, 8, True))
    assert single["weights"] == single["gradients"] == 4 * num_params
    assert ddp["gradients"] == 2 * 4 * num_params
    assert fsdp["weights"] == 4 * num_params / 8 + 4 * other_params + 2 * 2 * block
    assert fsdp["gradients"] == 4 * num_params / 8 + 4 * block
    assert fsdp["optimizer state"] == single["optimizer state"] / 8
    num_params = build_meta_model(GPT2_124M).num_parameters
    small_model = RunConfig(model=GPT2_124M, batch_size=128)
    fsdp = estimate_memory(small_model, 8, Hardware(BFLOAT16, True, 8, True))
    assert fsdp["gradients"] == 4 * num_params / 8 + 4 * num_params  # in full, as they fit


# The largest micro-batch.


@pytest.mark.parametrize("kind", [*KINDS, {"num_layers": 8, "num_heads": 8, "d_model": 512}])
@pytest.mark.parametrize("dtype", DTYPE_BY_NAME)
def test_bound_is_above_the_estimate(kind, dtype):
    config = RunConfig(model=small(**kind), batch_size=8)
    for rows in (1, 8):
        memory = estimate_memory(config, rows, Hardware(dtype, False, 2))
        assert bound_memory(config, rows) > sum(memory.values())


def test_largest_micro_batch_divides_the_batch_and_fits(monkeypatch):
    config = RunConfig(model=SMALL, batch_size=24, dtype="float32")
    hardware = Hardware(FLOAT32, is_gpu=False)
    for rows in (12, 2):
        needed = sum(estimate_memory(config, rows, hardware).values())
        monkeypatch.setattr(estimate, "total_memory", lambda device, n=needed: n / 0.9 + 1)
        assert largest_micro_batch(config, SINGLE_PROCESS) == rows
        lean = dataclasses.replace(config, checkpoint_activations=True)
        assert largest_micro_batch(lean, SINGLE_PROCESS) >= rows
    monkeypatch.setattr(estimate, "total_memory", lambda device: 1e12)
    assert largest_micro_batch(config, SINGLE_PROCESS) == 24


# The plan.


def rows_of(plan: str) -> dict[str, list[str]]:
    """Return the cells of each row of the table."""
    lines = plan.split("\n\n")[1].splitlines()
    return {line[:16].strip(): [line[i : i + 14].strip() for i in (16, 30, 44)] for line in lines}


@pytest.mark.parametrize(
    ("batch_size", "cells"), [(512, ["16 × 32", "16 × 32", "2 × 32"]), (36, ["2 × 18"] * 2 + [""])]
)
def test_plan_is_a_table_of_this_device_one_gpu_and_eight(batch_size, cells):
    rows = int(cells[0].split()[-1])
    config = RunConfig(model=SMALL, batch_size=batch_size, micro_batch_size=rows, steps=10_000)
    plan = describe_plan(config, CPU, batch_size * 128, [10**9])
    rows = rows_of(plan)
    assert max(map(len, plan.splitlines())) <= 80
    assert f"{build_meta_model(SMALL).num_parameters:,} parameters" in plan
    assert rows["micro-batches"] == cells
    flops = batch_size * 128 * flops_per_token(SMALL)
    assert rows["one step"][1] == f"{1e3 * flops / (0.4 * 989e12):,.2f} ms"


def test_plan_of_minutes_has_no_number_of_steps_and_marks_what_exceeds_an_h100():
    model = ModelConfig(vocab_size=500, num_layers=2, num_heads=32, d_model=16384)
    config = RunConfig(model=model, batch_size=8, micro_batch_size=1, minutes=60)
    plan = describe_plan(config, CPU, 2048, [1e6])
    rows = rows_of(plan)
    assert "60 min" in plan and "epochs" not in plan
    assert "all steps" not in rows and "one step" in rows
    assert [cell.endswith("!") for cell in rows["= memory"]] == [False, True, False]


def test_command_plans_with_a_dataset_or_a_vocabulary_and_writes_nothing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    flags = "--plan --out planned --num-layers 1 --num-heads 2 --d-model 16 --context-length 16"
    flags = [*flags.split(), "--batch-size", "4", "--device", "cpu"]
    assert train.main([*flags, "--vocab-size", "300", "--data", "nowhere"]) == 0
    assert "1,200 steps of 64 tokens = 76,800\n" in capsys.readouterr().out
    assert exit_code_of(lambda: train.main([*flags, "--data", "nowhere"])) == 1
    (tmp_path / "text.txt").write_text(numbers_text(100), encoding="utf-8")
    prepare(PrepareConfig(inputs=("text.txt",), tokenizer="char", out=tmp_path / "data"))
    capsys.readouterr()
    assert train.main([*flags, "--data", "data", "--steps", "10"]) == 0
    assert " epochs\n" in capsys.readouterr().out
    assert not (tmp_path / "planned").exists()
