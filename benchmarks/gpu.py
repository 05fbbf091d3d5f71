"""Measure training and decoding on one GPU, next to nanoGPT and transformers where they are found.

    python -m benchmarks.gpu [--nanogpt DIR] [--text FILE]

It takes up to five minutes, and prints the rows of a table, the most important first. A part that
fails prints its error, and the next one begins. --tiny measures small models, to try the command.
"""

import contextlib
import gc
import queue
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.decoding import GPT2_CONFIG
from engine.core.cli import run_command
from engine.core.device import choose_device, mixed_precision
from engine.core.distributed import DistributedContext
from engine.core.settings import parse
from engine.data.tokenizer import named_tokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import FilterOptions
from engine.generation.text_batch import TextBatch, banned_tokens, complete_streams
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from engine.report.callback import processor_name
from engine.serving.worker import BatchWorker, ClientRequest
from engine.training.config import load_config
from engine.training.estimate import estimate_memory
from engine.training.resolve import resolve
from engine.training.trainer import Trainer
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare
from train import measure_step_seconds, open_data, train_step

NUM_ROUNDS = 5
NUM_SAMPLED_TOKENS = 512
NUM_TEXTS = 32
PRESET_PATH = "config/shakespeare-char.toml"
FLAGS_BY_SHAPE = {
    "124M, GPT-2's shape, AdamW, 16 × 1,024": (
        *("config/gpt2-124m.toml", "--batch-size", "16", "--micro-batch-size", "16"),
    ),
    "10.7M, default recipe, 64 × 256": (
        *("--num-layers", "6", "--num-heads", "6", "--d-model", "384", "--vocab-size", "320"),
        *("--context-length", "256", "--batch-size", "64", "--micro-batch-size", "64"),
    ),
}
TINY_FLAGS = ("--num-layers", "2", "--num-heads", "2", "--d-model", "64", "--context-length", "64")
DEFAULT_FILTERS: FilterOptions = {"temperature": 0.8, "top_p": 0.95}  # the defaults of sample.py


@dataclass(frozen=True)
class GPUBenchConfig:
    """Measure training and decoding on one GPU, next to other projects."""

    nanogpt: Path | None = None  # A clone of nanoGPT, to measure it too.
    text: Path | None = None  # Tiny Shakespeare, to train its preset too.
    tiny: bool = False  # Measure small models, to try the command.


class GPUBench:
    """The parts of the benchmark; each prints rows of the table."""

    def __init__(self, config: GPUBenchConfig, folder: Path):
        self.config = config
        self.folder = folder
        self.device = choose_device("auto")
        self.is_cuda = self.device.type == "cuda"
        self.num_steps = 2 if config.tiny else 20  # in a turn
        self.num_new_tokens = 16 if config.tiny else NUM_SAMPLED_TOKENS
        self.data = folder / "data"
        prepare(PrepareConfig(("docs",), glob="*.md", tokenizer="byte", out=self.data))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a call and of all that it starts on the GPU."""
        self.synchronize()
        started_at = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - started_at

    def print_rates(self, name: str, unit: str, amount: float, calls: dict[str, Callable]) -> None:
        """Print the amount that each call makes in a second: the median of calls in turn."""
        times: dict[str, list[float]] = {contestant: [] for contestant in calls}
        for _ in range(NUM_ROUNDS):
            for contestant, call in calls.items():
                times[contestant].append(self.seconds(call))
        rates = {each: amount / sorted(times[each])[NUM_ROUNDS // 2] for each in calls}
        for contestant, rate in rates.items():
            ratio = rates["ours"] / rate
            print(f"| {name}, {contestant} | {rate:,.0f} {unit} | ours is {ratio:.2f} × |")

    @contextlib.contextmanager
    def trainer(self, flags: Sequence[str]) -> Iterator[Trainer]:
        """Yield the trainer of a run, before its first step."""
        flags = (*flags, "--data", str(self.data), "--steps", "10000")
        dist_ctx = DistributedContext(device=self.device)
        config = load_config([*flags, *(TINY_FLAGS if self.config.tiny else ())])
        data = open_data(config, dist_ctx)
        measure = partial(measure_step_seconds, dist_ctx)
        resolved = resolve(config, data, dist_ctx, time.monotonic(), None, None, measure)
        trainer = Trainer(resolved[0], dist_ctx, resolved[1])
        trainer.initialize()
        yield trainer
        del trainer
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def repeat(self, step: Callable[[], Any]) -> None:
        """Make the steps of a turn."""
        for _ in range(self.num_steps):
            step()

    def train(self, name: str) -> None:
        """Compare steps with nanoGPT's of the same sizes, and memory with the plan."""
        with self.trainer(FLAGS_BY_SHAPE[name]) as trainer:
            config = trainer.config
            step = partial(train_step, trainer)
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            first = self.seconds(trainer.passes.wrap_model) + self.seconds(step)
            print(f"| {name}, until the first step | {first:.1f} s | |")
            self.repeat(step)
            if self.is_cuda:
                peak = torch.cuda.max_memory_allocated(self.device)
                plan = estimate_memory(config, config.batch_size, trainer.dist_ctx)
                share = peak / sum(plan.values())
                print(f"| {name}, memory | {peak / 2**20:,.0f} MiB | {share:.2f} of the plan |")
            calls: dict[str, Callable[[], Any]] = {"ours": partial(self.repeat, step)}
            if self.config.nanogpt:
                batch = trainer.passes.example_batch()
                peer_step = self.make_nanogpt_step(self.config.nanogpt, config.model, batch)
                self.repeat(peer_step)
                calls["nanoGPT"] = partial(self.repeat, peer_step)
            num_tokens = self.num_steps * trainer.tokens_per_step
            self.print_rates(name, "tokens/s", num_tokens, calls)

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

    def decode(self) -> None:
        """Compare sampled texts with ``generate`` of transformers: one text, and 32 in a batch."""
        model = GPT(self.decoded_config).to(self.device, torch.bfloat16).eval()
        engine = DecodingEngine(build_decoder(model))
        hf_model = None
        with contextlib.suppress(Exception):  # it is not installed, or does not fit this torch
            hf_model = peers.make_hf_gpt2(self.decoded_config).to(self.device, torch.bfloat16)
        for num_texts in (1, NUM_TEXTS):

            def complete(num_texts: int = num_texts) -> None:
                streams = self.make_streams(num_texts)
                list(complete_streams(engine, streams, num_texts, **DEFAULT_FILTERS))

            complete()  # the first text of a process
            calls: dict[str, Callable[[], Any]] = {"ours": complete}
            if hf_model:
                calls["generate"] = partial(self.generate, hf_model, num_texts)
            name = f"decoding 124M in bfloat16, {num_texts} at once"
            self.print_rates(name, "tokens/s", num_texts * self.num_new_tokens, calls)

    def generate(self, hf_model: Any, num_texts: int) -> None:
        """Sample texts with transformers."""
        ids = torch.ones(num_texts, 8, dtype=torch.long, device=self.device)
        length = dict.fromkeys(("max_new_tokens", "min_new_tokens"), self.num_new_tokens)
        options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
        hf_model.generate(ids, attention_mask=torch.ones_like(ids), **length, **options)

    def serve(self) -> None:
        """Measure the server's thread, with a request of each of 32 clients."""
        model = GPT(self.decoded_config).to(self.device, torch.bfloat16).eval()
        banned = banned_tokens(named_tokenizer("byte"), model, ())
        batch = TextBatch(DecodingEngine(build_decoder(model)), NUM_TEXTS, banned)
        worker = BatchWorker(batch, NUM_TEXTS)

        def ask() -> None:
            arrivals: queue.Queue[Any] = queue.Queue()
            for index, stream in enumerate(self.make_streams(NUM_TEXTS)):
                request = ClientRequest(stream, index, DEFAULT_FILTERS, receive=arrivals.put)
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
            self.print_rates("server of 124M, 32 clients", "tokens/s", amount, {"ours": ask})
        finally:
            worker.stop()

    def train_preset(self) -> None:
        """Train on tiny Shakespeare by characters, from start to exit."""
        data = self.folder / "shakespeare"
        prepare(PrepareConfig((str(self.config.text),), tokenizer="char", out=data))
        out = self.folder / "run"
        command = [sys.executable, "train.py", PRESET_PATH, "--data", str(data), "--out", str(out)]
        if self.config.tiny:
            command += [*TINY_FLAGS, "--steps", "20"]
        started_at = time.perf_counter()
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - started_at
        losses = re.findall(r"val_loss\W+([\d.]+)", (out / "metrics.jsonl").read_text())
        for line in result.stderr.splitlines():
            if "warning" in line:
                print(line)
        print(f"| {PRESET_PATH}, from start to exit | {seconds:.0f} s | loss {losses[-1]} |")


def main(arguments: list[str] | None = None) -> None:
    """Measure all parts."""
    config = parse(GPUBenchConfig, arguments)
    with tempfile.TemporaryDirectory() as folder:
        bench = GPUBench(config, Path(folder))
        name = torch.cuda.get_device_name() if bench.is_cuda else processor_name()
        print(f"{name}, torch {torch.__version__}")
        parts: list[Callable[[], Any]] = [partial(bench.train, name) for name in FLAGS_BY_SHAPE]
        parts += [bench.decode, bench.serve]
        if config.text:
            parts.append(bench.train_preset)
        for part in parts:
            try:
                part()
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    run_command(main)
