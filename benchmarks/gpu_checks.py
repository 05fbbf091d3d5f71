"""Checks of what only a GPU can show. benchmarks.gpu prints them, and tests/test_gpu.py calls them.

Each takes a device and a dataset, and returns a figure. It raises an error for a wrong result.
"""

import gc
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.device import ROUNDING_TOLERANCES, mixed_precision, release_memory
from engine.core.distributed import DistributedContext
from engine.data.dataset import Dataset
from engine.generation.decoding_engine import DecodingEngine
from engine.nn.acceleration import can_capture_graphs
from engine.nn.attention import DocumentAttention, attend
from engine.nn.inference import build_decoder
from engine.training.config import TrainConfig, load_config
from engine.training.passes import describe_update_difference
from engine.training.resolve import resolve
from engine.training.trainer import NUM_CHECKED_PASSES, Trainer
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare
from train import measure_step_seconds, open_data, train_step

SKIPPED_TEXT = "skipped: no GPU"
NUM_STEPS_TO_CAPTURE = 3  # the second call of a function is captured
MAX_TIMING_RATIO = 1.5  # of the seconds of a timed step to those of a step in a run, or inversely
TINY_FLAGS = (
    *("--num-layers", "2", "--num-heads", "2", "--d-model", "64", "--context-length", "64"),
    *("--vocab-size", "320", "--batch-size", "4", "--micro-batch-size", "2"),
)
WIDE_FLAGS = (
    *("--num-layers", "4", "--num-heads", "12", "--d-model", "768", "--context-length", "1024"),
    *("--vocab-size", "320", "--batch-size", "8"),
)


class CheckError(RuntimeError):
    """What a check found."""


def require(condition: object, problem: str) -> None:
    """Raise CheckError unless a condition is true."""
    if not condition:
        raise CheckError(problem)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_seconds(device: torch.device, call: Callable[[], Any]) -> float:
    """Return the seconds of a call and of all that it starts on a GPU."""
    synchronize(device)
    started_at = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started_at


def measure_peak_bytes(device: torch.device, call: Callable[[], Any]) -> int:
    """Return the bytes that the second of two calls allocates on a GPU at its peak.

    The first call allocates gradients and the workspaces of libraries.
    """
    call()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    bytes_before = torch.cuda.memory_allocated(device)
    call()
    return torch.cuda.max_memory_allocated(device) - bytes_before


def release(device: torch.device) -> None:
    """Free what no variable refers to, compiled functions too."""
    torch.compiler.reset()
    gc.collect()  # a module whose forward is replaced refers to itself
    release_memory(device)


def resolve_run(device: torch.device, data: Path, *flags: str) -> tuple[TrainConfig, Dataset]:
    """Return the settings of a run without a folder, and its data."""
    dist_ctx = DistributedContext(device=device)
    config = load_config([*flags, "--data", str(data)])
    measure = partial(measure_step_seconds, dist_ctx)
    mixture = open_data(config, dist_ctx)
    return resolve(config, mixture, dist_ctx, time.monotonic(), None, None, measure)


class BenchTrainer(Trainer):
    """A trainer without a run folder, which collects the warnings of its captures and compiler."""

    def __init__(self, device: torch.device, data: Path, *flags: str):
        """Set initial weights. Free the trainer before it, if no variable refers to that."""
        release(device)
        config, mixture = resolve_run(device, data, *flags)
        super().__init__(config, DistributedContext(device=device), mixture)
        self.reasons: list[str] = []
        self.passes.acceleration.warn = self.reasons.append
        self.initialize()

    def start(self) -> None:
        """Make the first step of a run, with the comparisons of a run that has a folder."""
        self.passes.num_checked_passes = NUM_CHECKED_PASSES
        pool = self.passes.acceleration.pool
        if pool and (problem := describe_update_difference(self.config, self.dist_ctx, self.data)):
            pool.fail(f"captured {problem}")
        self.passes.wrap_model()
        self.repeat(1)

    def repeat(self, num_steps: int) -> None:
        """Make steps."""
        for _ in range(num_steps):
            train_step(self)
            self.budget.update(self.step)


def describe_steps(trainer: Trainer, reasons: list[str]) -> tuple[str, str]:
    """Return how a trainer's steps run, and the problem with that, of which there are reasons."""
    acceleration = trainer.passes.acceleration
    optimizer = trainer.optimizer
    calls = (trainer.passes.captured_pass, optimizer.captured_norm, optimizer.captured_update)
    is_captured = acceleration.captures and all(each.num_captures for each in calls)
    is_compiled = acceleration.undo_compilation is not None
    expects_capture = trainer.config.capture and can_capture_graphs(trainer.dist_ctx.device)
    problems = []
    if expects_capture and trainer.step >= NUM_STEPS_TO_CAPTURE and not is_captured:
        problems.append("not captured")
    if trainer.config.compile and not is_compiled:
        problems.append("not compiled")
    if problems:
        problems += dict.fromkeys(reasons)
    ways = ["captured"] * is_captured + ["compiled"] * is_compiled
    return ", ".join(ways) or "plain", ", ".join(problems)


def describe_tokens(
    engine: DecodingEngine, reasons: list[str], expects_capture: bool = True
) -> tuple[str, str]:
    """Return how an engine computes tokens, and the problem with that."""
    if engine.captures and engine.captured_step.num_captures:
        return "captured", ""
    is_right = not (expects_capture and can_capture_graphs(engine.device))
    return "plain", "" if is_right else ", ".join(["not captured", *reasons])


def check_failed_capture(device: torch.device, data: Path) -> str:
    """After a capture that fails, the stream is right, and all works, captures too."""
    if not can_capture_graphs(device):
        return SKIPPED_TEXT
    reason = fail_capture(device, data)
    trainer = BenchTrainer(device, data, *TINY_FLAGS, "--dropout", "0.1", "--no-compile")
    trainer.start()
    trainer.repeat(2)
    _, problem = describe_steps(trainer, trainer.reasons)
    require(not problem, f"the capture after it: {problem}")
    return reason


def fail_capture(device: torch.device, data: Path) -> str:
    """Let a capture fail by a hook that waits for the device; return the warning."""
    trainer = BenchTrainer(device, data, *TINY_FLAGS, "--dropout", "0.1", "--no-compile")
    hook = trainer.model.final_norm.register_forward_hook(
        lambda layer, _, y: y * y.abs().max().item() ** 0
    )
    trainer.start()
    trainer.repeat(2)
    hook.remove()
    require(not trainer.passes.acceleration.captures, "a hook that waits was captured")
    require(len(trainer.reasons) == 1, f"{len(trainer.reasons)} warnings of one failed capture")
    if device.type == "cuda":
        is_default = torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
        require(is_default, "the stream of the failed capture is still the current one")
        torch.cuda.empty_cache()
    loss, _, norm = train_step(trainer)
    require(math.isfinite(loss.item() + norm.item()), "the step after it is not finite")
    return trainer.reasons[0]


def check_lengths(device: torch.device, data: Path) -> str:
    """Captured steps of examples of several lengths are plain steps."""
    rows = [{"prompt": f"{n}", "completion": "so " * (n % 40 + 1)} for n in range(300)]
    flags = (*TINY_FLAGS, "--context-length", "160", "--batch-size", "2", "--dtype", "float32")
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "pairs.jsonl")
        text.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        pairs = Path(folder, "pairs")
        config = PrepareConfig((str(text),), prompt_field="prompt", completion_field="completion")
        prepare(replace(config, tokenizer="byte", out=pairs))
        for flag in ("--capture", "--no-capture"):
            trainer = BenchTrainer(device, pairs, *flags, "--no-compile", flag)
            losses.append([train_step(trainer)[0].item() for _ in range(20)])
            _, problem = describe_steps(trainer, trainer.reasons)
            require(not problem, problem)
    differences = [abs(actual / expected - 1) for actual, expected in zip(*losses, strict=True)]
    require(
        max(differences) <= ROUNDING_TOLERANCES[torch.float32],
        f"losses differ by {max(differences)}",
    )
    return f"losses differ by {max(differences):.1e}"


class RecordingAttention(DocumentAttention):
    """Attention of documents that records the dtypes of its inputs."""

    def __init__(self, tokens: Tensor):
        super().__init__(tokens, start_id=0, window=0, dropout_p=0.0)
        self.dtypes: set[torch.dtype] = set()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention to earlier positions of the same document, (B, H, T, K)."""
        self.dtypes |= {query.dtype, key.dtype, value.dtype}
        return super().attend(query, key, value)


def check_masked_attention(device: torch.device, data: Path) -> str:
    """In bfloat16, attention gets bfloat16, and with a mask it stores no T × T weights."""
    T = 1024 if device.type == "cuda" else 64
    config = ModelConfig(vocab_size=320, context_length=T, num_layers=2, num_heads=12, d_model=768)
    model = GPT(config).to(device)
    tokens = torch.randint(320, (2, 8, T), device=device)
    context = RecordingAttention(tokens[0])

    def step(contexts: list[RecordingAttention] | None) -> None:
        with mixed_precision(torch.bfloat16, device):
            loss = model(*tokens, contexts)
        loss.backward()

    step([context] * 2)
    require(context.dtypes == {torch.bfloat16}, f"attention gets {context.dtypes}")
    if device.type != "cuda":
        return "bfloat16"
    peaks = [measure_peak_bytes(device, partial(step, each)) for each in (None, [context] * 2)]
    score_bytes = 4 * 8 * config.num_heads * T * T  # of a block, in float32
    text = " and ".join(f"{peak / 2**20:,.0f} MiB" for peak in peaks)
    require(peaks[1] - peaks[0] < score_bytes, f"without and with a mask: {text}")
    return f"bfloat16; without and with a mask {text}"


def check_grouped_heads(device: torch.device, data: Path) -> str:
    """Heads that share keys train in float32 without T × T weights."""
    if device.type != "cuda":
        return SKIPPED_TEXT
    H = 8
    T = 4096
    query, key, value = (
        torch.randn(1, n, T, 64, device=device, requires_grad=True) for n in (H, 2, 2)
    )
    peak = measure_peak_bytes(device, lambda: attend(query, key, value).sum().backward())
    score_bytes = 4 * H * T * T
    text = f"{peak / 2**20:,.0f} MiB"
    require(peak < score_bytes / 2, f"{text}; T × T weights have {score_bytes / 2**20:,.0f} MiB")
    return text


def check_memory_of_new_key(device: torch.device, data: Path) -> str:
    """A new window, at the end of its warmup, needs no second memory for activations."""
    if device.type != "cuda":
        return SKIPPED_TEXT
    flags = (*WIDE_FLAGS, "--window-warmup", "0.5", "--steps", "10", "--no-compile")
    trainer = BenchTrainer(device, data, *flags)
    calls = []

    def make_room() -> bool:
        calls.append(trainer.step)
        return trainer.make_room()

    trainer.passes.acceleration.make_room = make_room
    trainer.repeat(5)  # with the window of the warmup
    num_captures = trainer.num_captures
    allocated = torch.cuda.memory_allocated(device)
    activations = torch.cuda.max_memory_allocated(device) - allocated
    reserved = torch.cuda.memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((reserved + activations / 2) / total, device)
    try:
        trainer.repeat(3)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    growth = torch.cuda.max_memory_reserved(device) - reserved
    text = f"{growth / 2**20:,.0f} MiB more; activations have {activations / 2**20:,.0f} MiB"
    require(not calls, f"out of memory: {text}")
    require(trainer.num_captures > num_captures, f"not captured again: {text}")
    return text


def check_moved_cache(device: torch.device, data: Path) -> str:
    """Captured tokens are right after the memory of keys and values has moved."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=320, context_length=512, num_layers=2, num_heads=4, num_kv_heads=2
    )
    model = GPT(config).to(device).eval()
    for param in model.parameters():  # initial values are zeros for some
        nn.init.normal_(param, std=0.2)
    decoder = build_decoder(model)
    engine = DecodingEngine(decoder)
    plain_engine = DecodingEngine(decoder)
    plain_engine.pool = None
    difference = 0.0
    for lengths in ([8], [300], [8, 400]):  # more positions; more rows and positions
        logits = [decode_steps(each, lengths) for each in (engine, plain_engine)]
        actual, expected = map(torch.stack, logits)
        change = (actual - expected).abs().max() / expected.abs().max()
        difference = max(difference, change.item())
    require(difference <= ROUNDING_TOLERANCES[torch.float32], f"logits differ by {difference:.1%}")
    state, problem = describe_tokens(engine, [])
    require(not problem, problem)
    return state


def decode_steps(engine: DecodingEngine, lengths: list[int]) -> list[Tensor]:
    """Return the logits of four tokens after new prompts of these lengths."""
    engine.keep([])
    for index, length in enumerate(lengths):
        engine.add([token % engine.model.config.vocab_size for token in range(length)])
        engine.read(index)
    return [engine.step([token] * len(lengths)) for token in range(4)]


def check_timed_step(device: torch.device, data: Path) -> str:
    """A step that is timed to choose a size takes as long as one of a run."""
    if device.type != "cuda":
        return SKIPPED_TEXT
    flags = (*WIDE_FLAGS, "--window-warmup", "0", "--no-compile")
    config, mixture = resolve_run(device, data, *flags)
    timed = measure_step_seconds(DistributedContext(device=device), config, mixture)
    trainer = BenchTrainer(device, data, *flags)
    trainer.start()
    trainer.repeat(5)
    seconds = measure_seconds(device, partial(trainer.repeat, 20)) / 20
    text = f"timed {1e3 * timed:.2f} ms, trained {1e3 * seconds:.2f} ms"
    require(1 / MAX_TIMING_RATIO < timed / seconds < MAX_TIMING_RATIO, text)
    return text


DEVICE_CHECKS = {
    "a capture that fails, and the next one": check_failed_capture,
    "examples of several lengths": check_lengths,
    "attention in bfloat16, with a mask": check_masked_attention,
    "grouped heads in float32, memory": check_grouped_heads,
    "a new window, memory": check_memory_of_new_key,
    "tokens after their cache has moved": check_moved_cache,
    "a step that is timed": check_timed_step,
}
