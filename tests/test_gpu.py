"""A GPU computes what a CPU does: attention, the loss, training in every dtype, compiled, sharded, resumed.

Most tests run on a CPU too, so that the tests themselves are tested.
"""

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import GPT2, ROOT, VARIANTS, assert_same_run, logged, randomised
from reference import assert_same_gradients, attention_definition, loss_definition, random_heads

import train
from engine.core.device import DTYPE_BY_NAME, mixed_precision
from engine.core.distributed import DistributedContext
from engine.core.settings import load_settings
from engine.generation.generate import generate
from engine.nn import loss as loss_module
from engine.nn.acceleration import checkpoint_activations
from engine.nn.attention import attend
from engine.nn.inference import for_decoding
from engine.nn.loss import IGNORE_INDEX, training_loss
from engine.training.callbacks import MetricsFile
from engine.training.config import TrainConfig
from engine.training.estimate import Hardware, activation_bytes
from engine.training.trainer import Callback, Trainer
from model import GPT, ModelConfig

FLAGS = "--num-layers 2 --num-heads 2 --d-model 16 --context-length 16 --batch-size 4 --warmup-steps 2 --log-every 1"
FLAGS += " --eval-tokens 2000 --dtype float32 --steps 30"
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


# The model, and its fast implementations.


@pytest.mark.parametrize("dtype", DTYPE_BY_NAME.values(), ids=str)
@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (4, 9), (20, 20), (600, 600)], ids=str)
def test_attention_is_the_definition(device, sizes, dtype):
    inputs = random_heads(*sizes, dtype, device)
    mixed = attend(*inputs)
    assert mixed.dtype == dtype and mixed.device == device
    assert_same_gradients(mixed, attention_definition(*inputs), inputs, 1e-3 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize(
    ("compiled", "dtype"), [(False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16)], ids=str
)
def test_attention_with_a_window_is_the_definition(device, compiled, dtype):
    inputs = random_heads(300, 300, dtype, device, num_groups=1)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compute = torch.compile(attend, fullgraph=True, backend=backend) if compiled else attend
    mixed = compute(*inputs, window=70)
    tolerance = 1e-3 if dtype == torch.float32 else 0.07
    assert_same_gradients(mixed, attention_definition(*inputs, 70), inputs, tolerance)
    torch.compiler.reset()


@pytest.mark.parametrize("rows", [100, 5], ids=["whole", "in chunks"])
@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_the_output_loss_is_the_definition(device, monkeypatch, rows, cap):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", rows * 37)
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 24).to(device).requires_grad_() for n in (48, 37))
    targets = torch.randint(37, (48,)).to(device)
    targets[:7] = IGNORE_INDEX
    loss = training_loss(x, weight, targets, cap)
    assert_same_gradients(loss, loss_definition(x, weight, targets, cap), [x, weight], 1e-3)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_logits_and_tokens_equal_those_of_a_cpu(device, name):
    model = randomised(VARIANTS[name])
    tokens = torch.randint(37, (2, 3, 16))
    with torch.no_grad():
        loss, logits = model(*tokens), model(tokens[0])
    expected = torch.stack(list(generate(model, tokens[0, :, :4], 20, temperature=0, use_cache=False)))
    model.to(device)
    with torch.no_grad():
        torch.testing.assert_close(model(*tokens.to(device)).cpu(), loss, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(model(tokens[0].to(device)).cpu(), logits, rtol=1e-3, atol=1e-3)
    decoded = generate(for_decoding(model), tokens[0, :, :4].to(device), 20, temperature=0)
    assert torch.equal(torch.stack(list(decoded)).cpu(), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_in_bfloat16_is_close_to_that_in_float32(device, name):
    model = randomised(VARIANTS[name]).to(device)
    tokens = torch.randint(37, (2, 3, 16)).to(device)
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        with mixed_precision(dtype, device), torch.no_grad():
            losses.append(model(*tokens).item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize(("name", "dtype"), [("default", torch.bfloat16), ("gpt2", torch.float32)])
def test_a_model_compiles_into_one_graph_with_the_same_results(device, name, dtype, monkeypatch):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 20 * 37)  # in chunks too
    model = randomised(dataclasses.replace(VARIANTS[name], num_layers=1)).to(device)
    tokens = torch.randint(37, (2, 3, 16)).to(device)
    results = []
    for _ in range(2):
        with mixed_precision(dtype, device):
            loss = model(*tokens)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        model.compile(fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    for plain, compiled in zip(*results, strict=True):
        assert (plain - compiled).norm() <= tolerance * plain.norm()
    torch.compiler.reset()


# Training.


def train_on(
    device: torch.device,
    data: Path,
    out: Path,
    *flags: object,
    world: DistributedContext | None = None,
    callbacks: Sequence[Callback] = (),
    should_stop: Callable[[], bool] = lambda: False,
    compiled: bool = False,
) -> Path:
    """A tiny run on a device; returns its folder."""
    arguments = ["--data", data, "--out", out, *FLAGS.split(), *flags]
    config = load_settings(TrainConfig, list(map(str, arguments)))
    config = dataclasses.replace(config, compile=compiled, device=str(device))
    train.train(config, world or DistributedContext(0, 1, device), [MetricsFile(), *callbacks], should_stop)
    return out


@pytest.fixture
def trained(device, numbers, tmp_path) -> Callable[..., Path]:
    """Trains on the device; returns the run folder."""
    return lambda name, *flags, **options: train_on(device, numbers, tmp_path / name, *flags, **options)


@pytest.fixture(scope="module")
def plain(device, numbers, tmp_path_factory) -> Path:
    """A run in float32 on the device."""
    return train_on(device, numbers, tmp_path_factory.mktemp("plain") / str(device.type))


class StopAt(Callback):
    """Stops after a step."""

    def __init__(self, step: int):
        self.step, self.now = step, False

    def on_step(self, trainer: Trainer) -> None:
        self.now = trainer.step == self.step

    def __call__(self) -> bool:
        return self.now


def test_a_run_that_was_stopped_resumes_bit_for_bit(trained):
    whole, stop = trained("whole", "--dropout", 0.1), StopAt(13)
    stopped = trained("stopped", "--dropout", 0.1, callbacks=[stop], should_stop=stop)
    assert max(logged(stopped, "train_loss")) == 13
    assert_same_run(whole, trained("stopped", "--dropout", 0.1, "--resume"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_in_16_bits_learns_as_in_32(plain, trained, dtype):
    exact, half = logged(plain, "train_loss"), trained("half", "--dtype", dtype)
    losses = logged(half, "train_loss")
    assert losses[30] < losses[1] - 0.5 and losses[30] == pytest.approx(exact[30], abs=0.1)
    assert logged(half, "skipped_steps")[30] < 10


def test_checkpointing_activations_does_not_change_the_loss(plain, trained):
    lean = trained("lean", "--checkpoint-activations")
    assert logged(lean, "train_loss") == pytest.approx(logged(plain, "train_loss"), abs=1e-5)


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[DistributedContext]:
    """A sharded world of this process alone: NCCL's on a GPU."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedContext(0, 1, device, sharded=True)
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_sharded_run_is_a_plain_run(plain, trained, device, dtype, tolerance):
    with group_of_one(device) as world:
        sharded = trained("sharded", "--dtype", dtype, world=world)
    for key in ("train_loss", "val_loss"):
        assert logged(sharded, key) == pytest.approx(logged(plain, key), abs=tolerance)


# What only a GPU can show.


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_torchrun_with_one_process_is_a_plain_run(gpu, numbers, tmp_path, parallel):
    plain = train_on(gpu, numbers, tmp_path / "plain")
    (tmp_path / "plain.toml").write_text("compile = false\n", encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += [ROOT / "train.py", tmp_path / "plain.toml", "--data", numbers, "--out", tmp_path / parallel]
    command += [*FLAGS.split(), "--device", "cuda", "--parallel", parallel]
    done = subprocess.run(list(map(str, command)), capture_output=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    assert logged(tmp_path / parallel, "train_loss") == pytest.approx(logged(plain, "train_loss"), abs=1e-4)


class NoMoreCompiling(Callback):
    """Makes compiling an error between the third step and the last, after which an evaluation compiles its own."""

    def on_step(self, trainer: Trainer) -> None:
        torch.compiler.set_stance("fail_on_recompile" if 3 <= trainer.step < trainer.config.steps else "default")

    def closed(self) -> None:
        torch.compiler.set_stance("default")
        torch.compiler.reset()


def test_nothing_is_compiled_after_the_first_steps(gpu, numbers, tmp_path):
    flags = ["--micro-batch-size", 2]
    plain = train_on(gpu, numbers, tmp_path / "plain", *flags)
    options = {"compiled": True, "callbacks": [NoMoreCompiling()]}
    compiled = train_on(gpu, numbers, tmp_path / "compiled", *flags, **options)
    assert logged(compiled, "train_loss") == pytest.approx(logged(plain, "train_loss"), abs=1e-2)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("kind", [{}, GPT2], ids=["default", "gpt2"])
def test_a_plan_s_memory_is_what_a_micro_batch_allocates(gpu, kind, lean):
    shape = ModelConfig(vocab_size=50304, context_length=1024, num_layers=4, num_heads=12, d_model=768)
    shape = dataclasses.replace(shape, **kind)
    model, tokens = GPT(shape).to(gpu), torch.randint(shape.vocab_size, (2, 8, shape.context_length), device=gpu)
    if lean:
        checkpoint_activations(model)
    for _ in range(2):  # gradients, and what libraries keep, are there before the second
        torch.cuda.synchronize(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
        before = torch.cuda.memory_allocated(gpu)
        with mixed_precision(torch.bfloat16, gpu):
            loss = model(*tokens)
        loss.backward()
        del loss
    measured = torch.cuda.max_memory_allocated(gpu) - before
    hardware = Hardware(torch.bfloat16, is_gpu=True)
    assert activation_bytes(shape, 8, hardware, lean) == pytest.approx(measured, rel=0.2)
