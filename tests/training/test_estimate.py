"""Estimates against arithmetic by hand, and against what PyTorch counts and allocates."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import GPT2
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from engine.core.device import DTYPE_BY_NAME, mixed_precision
from engine.core.distributed import SINGLE_PROCESS, DistributedContext
from engine.core.errors import UserError
from engine.nn.acceleration import checkpoint_activations
from engine.nn.lora import add_lora
from engine.training import estimate
from engine.training.config import TrainConfig, make_run_config
from engine.training.estimate import (
    MEMORY_ERROR,
    cached_meta_model,
    estimate_memory,
    fit_micro_batches,
    flops_per_token,
    lora_arguments,
    memory_fraction,
)
from engine.training.optimizer import Optimizer, OptimizerConfig
from model import GPT, ModelConfig

CPU = torch.device("cpu")
GPU = torch.device("cuda")


def run_config(**settings: Any) -> TrainConfig:
    """Return the settings of a run, by default in float32."""
    return make_run_config(TrainConfig(**{"dtype": "float32", **settings}), {}, SINGLE_PROCESS)


SMALL = ModelConfig(vocab_size=500, context_length=128, num_layers=2, num_heads=4, d_model=128)


def small(**settings) -> ModelConfig:
    return dataclasses.replace(SMALL, **settings)


# Operations.


@pytest.mark.parametrize("kind", [{}, GPT2, {"num_kv_heads": 2, "head_dim": 16}])
def test_operations_are_those_that_pytorch_counts(kind):
    model = small(**kind, context_length=300)
    tokens = torch.zeros(1, 300, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        GPT(model)(tokens, tokens).backward()
    flops = flops_per_token(run_config(model=model))
    assert flops * 300 == pytest.approx(counter.get_total_flops(), rel=1e-6)
    full, windowed = (run_config(model=small(**kind)) for kind in ({}, {"windows": (32, 0)}))
    assert flops_per_token(full) - flops_per_token(windowed) == 12 * 128 * (128 - 32)


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


def measure_memory(config: TrainConfig, rows: int) -> dict[str, int]:
    """Measure what a plan estimates, in the second of two micro-batches and after a step."""
    gpt = GPT(config.model)
    if config.lora_rank:
        add_lora(gpt, *lora_arguments(config))
    optimizer = Optimizer(gpt, config.optimizer)
    if config.checkpoint_activations:
        checkpoint_activations(gpt)

    def micro_batch(num_rows: int) -> None:
        shape = (2, num_rows, config.model.context_length)
        with mixed_precision(DTYPE_BY_NAME[config.dtype], CPU):
            loss = gpt(*torch.randint(config.model.vocab_size, shape))
        loss.backward()

    micro_batch(1)
    params = [*gpt.parameters()]
    measured = {
        "weights": sum(param.nbytes for param in params),
        "gradients": sum(param.grad.nbytes for param in params if param.grad is not None),
        "activations": peak_allocated(lambda: micro_batch(rows)),
    }
    optimizer.step(0, 10)
    return measured | {"optimizer state": sum(x.nbytes for x in optimizer.state().values())}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ({}, {"dtype": "bfloat16", "frozen_dtype": "bfloat16", "lora_rank": 16}),
        (GPT2, {"optimizer": OptimizerConfig(optimizer="adamw")}),
        ({"dropout": 0.1}, {"dtype": "bfloat16"}),
        ({"context_length": 640, "num_layers": 1}, {"lora_rank": 16, "train_tokens": True}),
        ({"vocab_size": 20000, "d_model": 64, "num_layers": 1}, {"dtype": "bfloat16"}),  # chunks
    ],
    ids=str,
)
def test_a_plan_is_near_what_a_micro_batch_and_a_step_allocate(kind, settings):
    model = small(**kind)
    for is_lean in (False, True):
        settings = {"dtype": "float32", **settings}
        config = run_config(model=model, checkpoint_activations=is_lean, **settings)
        planned = estimate_memory(config, 2, SINGLE_PROCESS)
        measured = measure_memory(config, 2)
        assert measured.keys() == planned.keys() - {"process, saves"}
        for purpose in ("weights", "gradients"):
            assert planned[purpose] == measured[purpose]
        assert planned["optimizer state"] == pytest.approx(measured["optimizer state"], rel=0.02)
        total = sum(planned[purpose] for purpose in measured)
        assert total == pytest.approx(sum(measured.values()), rel=MEMORY_ERROR)


def test_fsdp_divides_all_but_what_is_gathered():
    model = ModelConfig(vocab_size=50304, num_layers=4, num_heads=4, d_model=4096)
    num_params = cached_meta_model(model).num_parameters
    other_params = 2 * 50304 * 4096
    blocks = num_params - other_params
    config = run_config(model=model, batch_size=64, dtype="bfloat16", capture=False)
    single = estimate_memory(config, 8, DistributedContext(device=GPU))
    captured = dataclasses.replace(config, capture=True)
    captured_memory = estimate_memory(captured, 8, DistributedContext(device=GPU))
    assert captured_memory["gradients"] == 2 * single["gradients"]
    ddp = estimate_memory(config, 8, DistributedContext(0, 8, GPU))
    fsdp = estimate_memory(config, 8, DistributedContext(0, 8, GPU, sharded=True))
    assert single["weights"] == single["gradients"] == 4 * num_params
    assert ddp["gradients"] == 2 * 4 * num_params
    assert fsdp["weights"] == 4 * num_params / 8 + 4 * other_params + 4 * blocks / 2
    for purpose in ("gradients", "optimizer state"):
        assert fsdp[purpose] == single[purpose] / 8


def test_micro_batches_divide_the_batch_and_are_the_largest_that_fit(monkeypatch):
    config = run_config(model=SMALL, batch_size=24, dtype="float32")
    for limit, expected in ((12, 12), (2, 2), (24, 0), (0, 1)):
        needed = sum(estimate_memory(config, limit, SINGLE_PROCESS).values()) if limit else 1
        monkeypatch.setattr(estimate, "usable_memory", lambda device, n=needed: n / 0.9 + 1)
        assert fit_micro_batches(config, SINGLE_PROCESS, 128).micro_batch_size == expected
    typed = dataclasses.replace(config, micro_batch_size=6)
    assert fit_micro_batches(typed, SINGLE_PROCESS, 128) == typed


def test_ranks_on_cpus_share_the_memory_and_the_fullest_one_counts(monkeypatch):
    monkeypatch.setattr(estimate, "usable_memory", lambda device: 10**9)
    monkeypatch.setattr(DistributedContext, "gather_json", lambda self, value: [value, 3 * value])
    ranks = DistributedContext(size=2)
    config = run_config(model=SMALL)
    needed = sum(estimate_memory(config, 1, ranks).values())
    assert memory_fraction(config, 1, ranks) == pytest.approx(3 * 2 * needed / 10**9)


def test_a_run_that_needs_over_10_percent_more_memory_is_refused(monkeypatch):
    config = run_config(model=SMALL)
    needed = sum(estimate_memory(config, 1, SINGLE_PROCESS).values())
    monkeypatch.setattr(estimate, "usable_memory", lambda _: needed / 1.09)
    config = dataclasses.replace(config, init_from=Path("base"))
    assert fit_micro_batches(config, SINGLE_PROCESS, 128).micro_batch_size == 1
    with pytest.raises(UserError, match="--init-from"):
        fit_micro_batches(config, SINGLE_PROCESS, 2**14)
