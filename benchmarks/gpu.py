"""Check and measure training and decoding on one GPU, next to nanoGPT and transformers.

    python -m benchmarks.gpu [--nanogpt DIR] [--text FILE] [--parts first checks …]

Each row says whether steps or tokens were captured and compiled. A row that should have been and
was not, and a part that fails, is FAILED: the next part begins, and the command ends with 1.
Parts in their order, with estimates of their seconds on an H200:

    first     30   captured steps are plain steps; a model and a resumed run on the GPU
    checks    60   a capture that fails, dtypes, memory of masks and of a new window: gpu_checks.py
    minutes   75   python train.py --minutes 1 on the text
    memory    75   124M with the largest micro-batch that the plan accepts
    compiled  150  compiled gradients of all kinds of models and attention
    train     120  steps of two shapes, next to nanoGPT
    decode    60   one text, and 32, next to transformers; grouped heads
    serve     30   the server with 32 clients
    preset    60   config/shakespeare-char.toml on the text, from start to exit
    tests     240  all tests that need a GPU

Without the last two it takes ten minutes. --tiny measures small models, to try the command on a
CPU.
"""

import contextlib
import io
import queue
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import torch
from torch import Tensor, nn

import train
from benchmarks import peers
from benchmarks.decoding import GPT2_CONFIG
from benchmarks.gpu_checks import (
    DEVICE_CHECKS,
    SKIPPED_TEXT,
    TINY_FLAGS,
    BenchTrainer,
    CheckError,
    describe_steps,
    describe_tokens,
    measure_seconds,
    release,
    resolve_run,
)
from engine.core.cli import run_command
from engine.core.device import choose_device, mixed_precision, usable_memory
from engine.core.distributed import DistributedContext
from engine.core.settings import parse
from engine.data.tokenizer import named_tokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import TextOptions
from engine.generation.text_batch import TextBatch, TextRequest, banned_tokens, complete_streams
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from engine.report.callback import processor_name
from engine.serving.worker import BatchWorker
from engine.training.estimate import MAX_MEMORY_FRACTION, estimate_memory, memory_fraction
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare

NUM_ROUNDS = 5
NUM_SAMPLED_TOKENS = 512
NUM_TEXTS = 32
NUM_GROUPS = 4
MAX_FIRST_STEP_SECONDS = 15  # of 124M
MAX_PRESET_SECONDS = 35
MIN_TOKENS_PER_SECOND = 600  # of one text
MAX_MICRO_BATCH_ROWS = 4096
PRESET_PATH = "config/shakespeare-char.toml"
NUM_MEMORY_STEPS = 20  # with a warmup of the window in the first 4
MEMORY_FLAGS = (
    *("config/124m.toml", "--window-warmup", "0.2", "--warmup-steps", "1"),
    *("--steps", str(NUM_MEMORY_STEPS)),
)
GPT2_SHAPE = "124M, GPT-2's shape, AdamW, 16 × 1,024"
SMALL_SHAPE = "10.7M, default recipe, 64 × 256"
FLAGS_BY_SHAPE = {
    GPT2_SHAPE: ("config/gpt2-124m.toml", "--batch-size", "16", "--micro-batch-size", "16"),
    SMALL_SHAPE: (
        *("--num-layers", "6", "--num-heads", "6", "--d-model", "384", "--vocab-size", "320"),
        *("--context-length", "256", "--batch-size", "64", "--micro-batch-size", "64"),
    ),
}
MIN_RATIO_BY_SHAPE = {GPT2_SHAPE: 0.97, SMALL_SHAPE: 1.35}  # to nanoGPT
FIRST_TESTS = (
    "test_captured_steps_are_plain_steps or test_loss_logits_and_tokens_equal"
    " or test_a_run_that_was_stopped_resumes"
)
COMPILED_TESTS = "test_attention_is_the_definition or test_a_model_compiles"
DEFAULT_FILTERS: TextOptions = {"temperature": 0.8, "top_p": 0.95}  # the defaults of sample.py
Part = Literal[
    "first",
    "checks",
    "minutes",
    "memory",
    "compiled",
    "train",
    "decode",
    "serve",
    "preset",
    "tests",
]


@dataclass(frozen=True)
class GPUBenchConfig:
    """Check and measure training and decoding on one GPU, next to other projects."""

    nanogpt: Path | None = None  # A clone of nanoGPT, to measure it too.
    text: Path | None = None  # Tiny Shakespeare, for the parts that train on it.
    parts: tuple[Part, ...] = get_args(Part)  # In this order, whatever the order of the flag.
    capture: bool = True  # Replay CUDA graphs where they can be captured.
    tiny: bool = False  # Measure small models, to try the command.


class GPUBench:
    """The parts of the benchmark, which are methods; each prints rows of the table."""

    def __init__(self, config: GPUBenchConfig, folder: Path):
        self.config = config
        self.folder = folder
        self.device = choose_device("auto")
        self.is_cuda = self.device.type == "cuda"
        self.num_steps = 2 if config.tiny else 20  # in a turn
        self.num_rounds = 1 if config.tiny else NUM_ROUNDS
        self.num_new_tokens = 16 if config.tiny else NUM_SAMPLED_TOKENS
        self.num_failed = 0
        self.data = folder / "data"
        prepare(PrepareConfig(("docs",), glob=("*.md",), tokenizer="byte", out=self.data))

    def run_part(self, name: str, call: Callable[[], Any]) -> None:
        """Run a part, or a check of it; print a row if it fails. Then free its memory."""
        try:
            call()
        except CheckError as error:
            self.print_row(name, "", problem=str(error))
        except (Exception, SystemExit) as error:  # the next part must begin
            traceback.print_exc()
            self.print_row(name, "", problem=f"{type(error).__name__}: {error}".splitlines()[0])
        release(self.device)

    def print_row(self, name: str, figure: str, note: str = "", problem: str = "") -> None:
        """Print a row of the table, and count it as failed if there is a problem."""
        if problem:
            self.num_failed += 1
            note = ", ".join(filter(None, (note, f"FAILED: {problem}")))
        print(f"| {name} | {figure} | {note} |", flush=True)

    def describe_bar(self, figure: float, low: float = 0.0, high: float = 0.0) -> str:
        """Describe the bound of a figure; "missed" on a GPU with models of full size."""
        is_missed = figure < low or 0 < high < figure
        bar = f"bar: at most {high:g}" if high else f"bar: at least {low:g}"
        return f"{bar}, missed" if is_missed and self.is_cuda and not self.config.tiny else bar

    def print_rates(
        self,
        name: str,
        unit: str,
        amount: float,
        calls: Mapping[str, Callable[[], Any]],
        describe: Callable[[], tuple[str, str]],
        min_rate: float = 0.0,
        min_ratio: float = 0.0,
    ) -> None:
        """Print the amount that each call makes in a second: the median of calls in turn.

        ``describe`` returns how ours ran, and the problem with that.
        """
        times: dict[str, list[float]] = {contestant: [] for contestant in calls}
        for _ in range(self.num_rounds):
            for contestant, call in calls.items():
                times[contestant].append(measure_seconds(self.device, call))
        rates = {each: amount / sorted(times[each])[self.num_rounds // 2] for each in calls}
        note, problem = describe()
        if min_rate:
            note += f", {self.describe_bar(rates['ours'], low=min_rate)}"
        self.print_row(f"{name}, ours", f"{rates['ours']:,.0f} {unit}", note, problem)
        for contestant in calls.keys() - {"ours"}:
            ratio = rates["ours"] / rates[contestant]
            bar = f", {self.describe_bar(ratio, low=min_ratio)}" if min_ratio else ""
            figure = f"{rates[contestant]:,.0f} {unit}"
            self.print_row(f"{name}, {contestant}", figure, f"ours is {ratio:.2f} ×{bar}")

    # Checks.

    def first(self) -> None:
        """Run the tests that all other parts rely on."""
        self.run_tests("the first tests", "-x", "-k", FIRST_TESTS)

    def compiled(self) -> None:
        """Compare compiled and plain gradients."""
        self.run_tests("compiled gradients", "-k", COMPILED_TESTS)

    def tests(self) -> None:
        """Run all tests that need a GPU."""
        self.run_tests("pytest -m gpu")

    def run_tests(self, name: str, *flags: str) -> None:
        """Run tests in a process of their own, and print their last line."""
        if not self.is_cuda:
            self.print_row(name, SKIPPED_TEXT)
            return
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-p", "no:cacheprovider"]
        command += [*flags, "tests/test_gpu.py"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            print(result.stdout, result.stderr, file=sys.stderr)
        lines = (result.stdout + result.stderr).strip().splitlines()
        failures = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))]
        problem = "; ".join(failures) or lines[-1] if result.returncode else ""
        self.print_row(name, lines[-1].strip("= "), problem=problem)

    def checks(self) -> None:
        """Run the checks of gpu_checks.py."""
        for name, check in DEVICE_CHECKS.items():

            def call(name: str = name, check: Callable = check) -> None:
                self.print_row(name, check(self.device, self.data))

            self.run_part(name, call)

    def minutes(self) -> None:
        """Train for a minute: which size is chosen, from what times, and with what warnings."""
        name = "python train.py --minutes 1"
        if not self.config.text:
            self.print_row(name, "skipped: no --text")
            return
        data = self.folder / "text"
        out = self.folder / "minutes"
        minutes = "0.2" if self.config.tiny else "1"
        timed: list[str] = []
        measure_step_seconds = train.measure_step_seconds

        def measure(*arguments: Any, **options: Any) -> float:
            seconds = measure_step_seconds(*arguments, **options)
            timed.append(f"{1e3 * seconds:.2f}")
            return seconds

        output = io.StringIO()
        errors = io.StringIO()
        with (
            mock.patch("train.measure_step_seconds", measure),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            prepare(PrepareConfig((str(self.config.text),), out=data))
            flags = ["--data", str(data), "--out", str(out), "--minutes", minutes]
            trainer = train.train(train.load_config([*flags, *self.capture_flags]))
        warnings = find_warnings(errors.getvalue())
        model = trainer.config.model
        size = f"{model.num_layers} layers, {model.d_model} wide"
        figure = f"{size}, timed steps of {', '.join(timed)} ms, {len(warnings)} warnings"
        self.print_row(name, figure, *describe_steps(trainer, warnings))

    def memory(self) -> None:
        """Train with the largest micro-batch that the plan accepts, until its window changes."""
        name = "124M, window warmup, largest micro-batch"
        if not self.is_cuda:
            self.print_row(name, SKIPPED_TEXT)
            return
        dist_ctx = DistributedContext(device=self.device)
        flags = (*MEMORY_FLAGS, *self.capture_flags, *(TINY_FLAGS if self.config.tiny else ()))
        config, _ = resolve_run(self.device, self.data, *flags)
        limit = 4 if self.config.tiny else MAX_MICRO_BATCH_ROWS
        rows = 1
        while rows < limit:
            if memory_fraction(config, rows + 1, dist_ctx) > MAX_MEMORY_FRACTION:
                break
            rows += 1
        flags += ("--batch-size", str(2 * rows), "--micro-batch-size", str(rows))
        trainer = BenchTrainer(self.device, self.data, *flags)
        usable_bytes = usable_memory(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        trainer.start()
        trainer.repeat(NUM_MEMORY_STEPS - 1)
        share = torch.cuda.max_memory_reserved(self.device) / usable_bytes
        way, problem = describe_steps(trainer, trainer.reasons)
        if trainer.config.micro_batch_size != rows:
            problem = f"out of memory, micro-batches became {trainer.config.micro_batch_size}"
        figure = f"{rows} rows, {share:.2f} of the memory reserved"
        num_graphs = trainer.passes.captured_pass.num_captures
        self.print_row(name, figure, f"{way}, {num_graphs} captures of passes", problem)

    # Speed.

    @property
    def capture_flags(self) -> tuple[str, ...]:
        """The flags of every run."""
        return () if self.config.capture else ("--no-capture",)

    def train(self) -> None:
        """Measure training steps of each shape."""
        for name in FLAGS_BY_SHAPE:
            self.run_part(name, partial(self.train_shape, name))

    def train_shape(self, name: str) -> None:
        """Compare steps with nanoGPT's of the same sizes, and memory with the plan."""
        flags = (*FLAGS_BY_SHAPE[name], *self.capture_flags)
        trainer = BenchTrainer(
            self.device, self.data, *flags, *(TINY_FLAGS if self.config.tiny else ())
        )
        config = trainer.config
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = measure_seconds(self.device, trainer.start)
        bar = self.describe_bar(seconds, high=MAX_FIRST_STEP_SECONDS) if name == GPT2_SHAPE else ""
        self.print_row(f"{name}, until the first step", f"{seconds:.1f} s", bar)
        trainer.repeat(max(self.num_steps, 4))  # until passes are not compared any more
        if self.is_cuda:
            peak = torch.cuda.max_memory_allocated(self.device)
            plan = estimate_memory(
                config, config.micro_batch_rows(trainer.dist_ctx), trainer.dist_ctx
            )
            share = peak / sum(plan.values())
            self.print_row(
                f"{name}, memory", f"{peak / 2**20:,.0f} MiB", f"{share:.2f} of the plan"
            )
        calls = {"ours": partial(trainer.repeat, self.num_steps)}
        if self.config.nanogpt:
            batch = trainer.passes.example_batch()
            step = self.make_nanogpt_step(self.config.nanogpt, config.model, batch)
            calls["nanoGPT"] = partial(self.repeat, step)
            calls["nanoGPT"]()
        num_tokens = self.num_steps * trainer.tokens_per_step
        describe = partial(describe_steps, trainer, trainer.reasons)
        ratio = MIN_RATIO_BY_SHAPE[name]
        self.print_rates(name, "tokens/s", num_tokens, calls, describe, min_ratio=ratio)

    def repeat(self, step: Callable[[], Any]) -> None:
        """Make the steps of a turn."""
        for _ in range(self.num_steps):
            step()

    def make_nanogpt_step(
        self, clone: Path, config: ModelConfig, batch: Tensor
    ) -> Callable[[], None]:
        """Return a training step as in nanoGPT's train.py, compiled on a GPU."""
        model, optimizer = peers.make_nanogpt(clone, config, self.device)
        inputs, targets = batch

        def step() -> None:
            with mixed_precision(torch.bfloat16, self.device):
                _, loss = model(inputs, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    @property
    def decoded_config(self) -> ModelConfig:
        """The configuration of the model that decodes."""
        if self.config.tiny:
            return replace(GPT2_CONFIG, num_layers=2, d_model=96, d_ff=384, vocab_size=320)
        return GPT2_CONFIG

    def make_streams(self, num_texts: int) -> list[TextStream]:
        """Return texts that no token ends, with different prompts."""
        tokenizer = named_tokenizer("byte")
        prompts = [[1 + index] * 8 for index in range(num_texts)]
        streams = [TextStream(tokenizer, prompt, self.num_new_tokens) for prompt in prompts]
        for stream in streams:
            stream.stop_token_ids = set()
        return streams

    def make_engine(self, config: ModelConfig) -> tuple[DecodingEngine, Callable]:
        """Return an engine with random weights, and a function that describes its tokens."""
        model = GPT(config).to(self.device, torch.bfloat16).eval()
        engine = DecodingEngine(build_decoder(model))
        reasons: list[str] = []
        if not self.config.capture:
            engine.pool = None
        elif engine.pool:
            engine.pool.on_failure = reasons.append
        return engine, partial(describe_tokens, engine, reasons, self.config.capture)

    def decode(self) -> None:
        """Compare sampled texts with ``generate`` of transformers: one text, and 32 in a batch."""
        config = self.decoded_config
        self.decode_model("decoding 124M in bfloat16", config)
        grouped = replace(config, num_kv_heads=NUM_GROUPS)
        self.decode_model(f"the same, keys of {NUM_GROUPS} groups", grouped)

    def decode_model(self, name: str, config: ModelConfig) -> None:
        """Measure sampled texts of a model."""
        engine, describe = self.make_engine(config)
        hf_model = None
        if config == self.decoded_config:
            with contextlib.suppress(Exception):  # not installed, or unfit for this torch
                hf_model = peers.make_hf_gpt2(config).to(self.device, torch.bfloat16)
        for num_texts in (1, NUM_TEXTS):

            def complete(num_texts: int = num_texts) -> None:
                streams = self.make_streams(num_texts)
                options: TextOptions = {**DEFAULT_FILTERS, "batch_size": num_texts}
                list(complete_streams(engine, streams, **options))

            complete()  # the first text of a process
            calls: dict[str, Callable[[], Any]] = {"ours": complete}
            if hf_model:
                calls["generate"] = partial(self.generate, hf_model, num_texts)
            num_tokens = num_texts * self.num_new_tokens
            title = f"{name}, {num_texts} at once"
            min_rate = MIN_TOKENS_PER_SECOND if num_texts == 1 else 0
            self.print_rates(title, "tokens/s", num_tokens, calls, describe, min_rate)

    def generate(self, hf_model: Any, num_texts: int) -> None:
        """Sample texts with transformers."""
        ids = torch.ones(num_texts, 8, dtype=torch.long, device=self.device)
        length = dict.fromkeys(("max_new_tokens", "min_new_tokens"), self.num_new_tokens)
        options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
        hf_model.generate(ids, attention_mask=torch.ones_like(ids), **length, **options)

    def serve(self) -> None:
        """Measure the server's thread, with a request of each of 32 clients."""
        engine, describe = self.make_engine(self.decoded_config)
        banned = banned_tokens(named_tokenizer("byte"), engine.model, ())
        batch = TextBatch(engine, NUM_TEXTS, banned)
        worker = BatchWorker(batch, NUM_TEXTS)

        def ask() -> None:
            arrivals: queue.Queue[Any] = queue.Queue()
            for index, stream in enumerate(self.make_streams(NUM_TEXTS)):
                request = TextRequest(stream, index, DEFAULT_FILTERS, arrivals.put)
                worker.submit([request])
            num_ended = 0
            while num_ended < NUM_TEXTS:
                arrival = arrivals.get(timeout=60)
                if isinstance(arrival, Exception):
                    raise arrival
                num_ended += arrival is None

        try:
            ask()
            amount = NUM_TEXTS * self.num_new_tokens
            name = f"server of 124M, {NUM_TEXTS} clients"
            self.print_rates(name, "tokens/s", amount, {"ours": ask}, describe)
        finally:
            worker.stop()

    def preset(self) -> None:
        """Train on tiny Shakespeare by characters, from start to exit."""
        name = f"{PRESET_PATH}, from start to exit"
        if not self.config.text:
            self.print_row(name, "skipped: no --text")
            return
        data = self.folder / "shakespeare"
        prepare(PrepareConfig((str(self.config.text),), tokenizer="char", out=data))
        out = self.folder / "run"
        command = [sys.executable, "train.py", PRESET_PATH, "--data", str(data), "--out", str(out)]
        command += self.capture_flags
        if self.config.tiny:
            command += [*TINY_FLAGS, "--steps", "20"]
        started_at = time.perf_counter()
        result = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - started_at
        if result.returncode:
            raise CheckError(result.stderr.strip().splitlines()[-1])
        losses = re.findall(r"val_loss\W+([\d.]+)", (out / "metrics.jsonl").read_text())
        bar = self.describe_bar(seconds, high=MAX_PRESET_SECONDS)
        warnings = find_warnings(result.stderr)
        problem = "; ".join(line for line in warnings if "continues without" in line)
        self.print_row(name, f"{seconds:.0f} s", f"loss {float(losses[-1]):.3f}, {bar}", problem)


def find_warnings(errors: str) -> list[str]:
    """Return the warnings of a run from its stderr, and print them there again."""
    warnings = [line for line in errors.splitlines() if "warning: " in line]
    for line in warnings:
        print(line, file=sys.stderr)
    return [line.partition("warning: ")[2] for line in warnings]


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, and return 1 if one has failed."""
    config = parse(GPUBenchConfig, arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = GPUBench(config, Path(folder))
        name = torch.cuda.get_device_name() if bench.is_cuda else processor_name()
        models = ", tiny models" if config.tiny else ""
        print(f"{name}, torch {torch.__version__}{models}", flush=True)
        for part in get_args(Part):
            if part in config.parts:
                bench.run_part(part, getattr(bench, part))
    if bench.num_failed:
        print(f"{bench.num_failed} rows FAILED")
    return int(bench.num_failed > 0)


if __name__ == "__main__":
    run_command(main)
