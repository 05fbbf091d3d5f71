"""A GPU gives the same results as a CPU, in every dtype, compiled, sharded and resumed.

Most tests run on a CPU too, so that the tests themselves are tested.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import (
    GPT2,
    ROOT,
    SMALL,
    VARIANTS,
    SpoilWeights,
    StopAfter,
    assert_same_run,
    decode,
    logged,
    random_model,
    tiny,
    train_tiny,
)
from reference import decoding_definition

from benchmarks.gpu_checks import DEVICE_CHECKS, SKIPPED_TEXT, measure_peak_bytes
from engine.core.device import mixed_precision
from engine.core.distributed import DistributedContext
from engine.nn import loss as loss_module
from engine.nn.acceleration import checkpoint_activations
from engine.nn.inference import build_decoder
from engine.nn.loss import IGNORE_INDEX
from engine.training.config import TrainConfig, make_run_config
from engine.training.estimate import activation_bytes
from engine.training.trainer import Callback, Trainer
from model import GPT, ModelConfig

RUN_FLAGS = ("--warmup-steps", 2, "--dtype", "float32", "--steps", 30, "--no-compile")
cuda = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(scope="module", params=["cpu", cuda])
def device(request) -> torch.device:
    return device_named(request.param)


@pytest.fixture(params=[cuda])
def gpu(request) -> torch.device:
    return device_named(request.param)


def device_named(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA here")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def backend_of(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "aot_eager"


# The model, and its fast implementations.


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_gradients_logits_and_tokens_equal_those_of_a_cpu(device, name, monkeypatch):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 20 * 37)  # in chunks
    model = random_model(VARIANTS[name])
    tokens = torch.randint(37, (2, 3, 16))
    tokens[1, 0] = IGNORE_INDEX
    prompts = tokens[0, :, :4].tolist()

    def compute() -> list[torch.Tensor]:
        inputs, targets = tokens.to(next(model.parameters()).device)
        losses = [model.train(is_training)(inputs, targets) for is_training in (True, False)]
        grads = torch.autograd.grad(losses[0], list(model.parameters()))
        return [result.detach().cpu() for result in (*losses, *grads, model(inputs))]

    expected = compute()
    expected_tokens = decoding_definition(model, prompts, 20, temperature=0)
    model.to(device)
    torch.testing.assert_close(compute(), expected, rtol=1e-3, atol=1e-3)
    assert decode(build_decoder(model), prompts, 20, temperature=0) == expected_tokens


MODELS = VARIANTS | {"window": dataclasses.replace(SMALL, windows=(5,), num_kv_heads=1)}
COMPILED = [("cpu", "default", torch.bfloat16)]
COMPILED += [
    pytest.param("cuda", name, dtype, marks=pytest.mark.gpu)
    for name in MODELS
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize(("device", "name", "dtype"), COMPILED, ids=str, indirect=["device"])
def test_a_model_compiles_into_one_graph_with_the_same_results(device, name, dtype, monkeypatch):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 20 * 37)  # in chunks too
    model = random_model(dataclasses.replace(MODELS[name], num_layers=1)).to(device)
    tokens = torch.randint(37, (2, 3, 16)).to(device)
    # Windows of grouped heads in float32 are not compiled on a GPU.
    is_one_graph = dtype != torch.float32 or not model.config.windows
    results = []
    for _ in range(2):
        with mixed_precision(dtype, device):
            loss = model(*tokens)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        model.compile(fullgraph=is_one_graph, backend=backend_of(device))
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    rounding = tolerance * max(grad.norm() for grad in results[0][1:])  # for a key's bias: it is 0
    for plain, compiled in zip(*results, strict=True):
        assert (plain - compiled).norm() <= tolerance * max(plain.norm(), rounding)
    torch.compiler.reset()


# Training.


@pytest.fixture
def trained(trained) -> Callable[..., Path]:
    """Train a tiny model on a device; return the run folder."""
    return lambda device, name, *flags, **options: trained(
        name, "--device", device, *RUN_FLAGS, *flags, **options
    )


@pytest.fixture(scope="module")
def plain(device, numbers, tmp_path_factory) -> Path:
    """A run in float32 on the device."""
    out = tmp_path_factory.mktemp("plain") / device.type
    train_tiny(numbers, out, "--device", device, *RUN_FLAGS)
    return out


def test_a_run_that_was_stopped_resumes_bit_for_bit(gpu, trained):
    uninterrupted = trained(gpu, "uninterrupted", "--dropout", 0.1)
    stopped = trained(gpu, "stopped", "--dropout", 0.1, should_stop=StopAfter(13))
    assert max(logged(stopped, "train_loss")) == 13
    assert_same_run(uninterrupted, trained(gpu, "stopped", "--dropout", 0.1, "--resume"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_in_16_bits_learns_as_in_32(device, plain, trained, dtype):
    run = trained(device, "half", "--dtype", dtype)
    losses = logged(run, "train_loss")
    assert losses[30] < losses[1] - 0.5
    assert losses[30] == pytest.approx(logged(plain, "train_loss")[30], abs=0.1)
    assert logged(run, "skipped_steps")[30] < 10


def test_checkpointing_activations_does_not_change_the_loss(device, plain, trained):
    run = trained(device, "lean", "--checkpoint-activations")
    assert logged(run, "train_loss") == pytest.approx(logged(plain, "train_loss"), abs=1e-5)


# What only a GPU can show.


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun_with_one_process_is_a_plain_run(gpu, numbers, trained, tmp_path, parallel):
    plain = trained(gpu, "plain")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "1", str(ROOT / "train.py")]
    flags = tiny(numbers, tmp_path / parallel, *RUN_FLAGS, "--device", "cuda")
    subprocess.run([*torchrun, *flags, "--parallel", parallel], check=True, timeout=300)
    losses = logged(tmp_path / parallel, "train_loss")
    assert losses == pytest.approx(logged(plain, "train_loss"), abs=1e-4)


class RefuseCompilation(Callback):
    """Make compilation an error from the first step on."""

    def on_train_start(self, trainer: Trainer) -> None:
        wrap_model = trainer.passes.wrap_model

        def wrap_model_and_refuse() -> None:
            wrap_model()
            torch.compiler.set_stance("fail_on_recompile")

        trainer.passes.wrap_model = wrap_model_and_refuse

    def on_train_end(self, trainer: Trainer) -> None:
        torch.compiler.set_stance("default")
        torch.compiler.reset()


@pytest.mark.parametrize("flags", ["--capture", "--no-capture", "--dropout 0.1 --dtype bfloat16"])
def test_nothing_is_compiled_after_the_first_step(gpu, trained, capsys, flags):
    tolerance = 0.1 if "dropout" in flags else 1e-2  # compiled dropout draws other numbers
    flags = ["--micro-batch-size", 2, *flags.split()]
    plain = trained(gpu, "plain", *flags)
    compiled = trained(gpu, "compiled", *flags, "--compile", callbacks=[RefuseCompilation()])
    losses = logged(compiled, "train_loss")
    assert losses == pytest.approx(logged(plain, "train_loss"), abs=tolerance)
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("callbacks", [[], [SpoilWeights()]], ids=["finite", "with a NaN"])
def test_captured_steps_are_plain_steps(gpu, trained, capsys, callbacks):
    flags = ["--micro-batch-size", 2, "--dropout", 0.1, "--eval-every", 30]
    captured = trained(gpu, "captured", *flags, callbacks=callbacks)
    assert "warning" not in capsys.readouterr().err
    assert_same_run(captured, trained(gpu, "plain", *flags, "--no-capture", callbacks=callbacks))
    assert logged(captured, "skipped_steps")[30] == len(callbacks)


def test_a_deterministic_run_writes_samples(gpu, run, numbers, tmp_path):
    flags = tiny(numbers, tmp_path / "run", *RUN_FLAGS, "--device", gpu, "--deterministic")
    assert "warning" not in run("train.py", *flags, check=True).stderr
    assert [*(tmp_path / "run").glob("samples*")]


@pytest.mark.parametrize("check", DEVICE_CHECKS.values(), ids=DEVICE_CHECKS)
def test_the_checks_of_the_benchmark_pass(device, numbers, request, check):
    if device.type == "cpu":
        request.getfixturevalue("graphs")
    if check(device, numbers) == SKIPPED_TEXT:
        pytest.skip(SKIPPED_TEXT)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("kind", [{}, GPT2], ids=["default", "gpt2"])
def test_a_plan_s_memory_is_what_a_micro_batch_allocates(gpu, kind, lean):
    config = ModelConfig(
        vocab_size=50304, context_length=1024, num_layers=4, num_heads=12, d_model=768, **kind
    )
    model = GPT(config).to(gpu)
    tokens = torch.randint(config.vocab_size, (2, 8, config.context_length), device=gpu)
    if lean:
        checkpoint_activations(model)

    def compute() -> None:
        with mixed_precision(torch.bfloat16, gpu):
            loss = model(*tokens)
        loss.backward()

    measured = measure_peak_bytes(gpu, compute)
    typed = TrainConfig(model=config, dtype="bfloat16", checkpoint_activations=lean)
    dist_ctx = DistributedContext(device=gpu)
    estimate = activation_bytes(make_run_config(typed, {}, dist_ctx), 8, dist_ctx)
    assert estimate == pytest.approx(measured, rel=0.2)
