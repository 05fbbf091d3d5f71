"""How fast each stage is, beside its peers, in one run.

    python -m benchmarks.speed [train|attention|decode|prepare|data|cost|all] [--device cpu] [--nanogpt DIR]

Contestants take turns, and medians are compared: a noisy machine is noisy for all of them. The last line is JSON.
"""

from engine.core.cli import run_command, wait_briefly

if __name__ == "__main__":
    wait_briefly("decode")  # before torch is loaded

import contextlib
import dataclasses
import importlib.util
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor, nn

from engine.core.device import choose_device, choose_dtype, keep_freed_memory, mixed_precision
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.batches import Batches
from engine.data.readers import read
from engine.data.sources import find_sources, needed
from engine.data.tokenizer import train_bpe
from engine.generation.generate import generate
from engine.nn.inference import for_decoding
from engine.report.page import processor_name
from engine.training.estimate import PEAK_FLOPS, Plan
from engine.training.optimizer import Optimizer, OptimizerConfig
from model import GPT, ModelConfig, MultiHeadAttention

GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False}
GPT2 |= {"tie_embeddings": True, "bias": True}
SMALL = ModelConfig(vocab_size=65, context_length=256, num_layers=6, num_heads=6, d_model=384)
BATCHES = 10_000  # that show whether loading keeps memory
STAGES = Literal["all", "train", "attention", "decode", "prepare", "data", "cost"]


@dataclass(frozen=True)
class BenchConfig:
    """Measure each stage beside its peers, in one run."""

    stage: tyro.conf.Positional[STAGES] = "all"  # The stage to measure.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best there is.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # What training's matrix products compute in.
    batch_size: Annotated[int, "at least 1, at most 1e6"] = 16  # Sequences in a training step.
    rounds: Annotated[int, "at least 1"] = 10  # Turns that each contestant takes.
    nanogpt: Path | None = None  # A clone of nanoGPT, to race it too.

    def __post_init__(self):
        if self.nanogpt and not (self.nanogpt / "model.py").is_file():
            raise UserError(f"--nanogpt {self.nanogpt} has no model.py; give the folder of a clone")
        if self.nanogpt and self.stage not in ("all", "train"):
            raise UserError(f"--nanogpt runs in the stage train, not in {self.stage}; leave it out")


def main(arguments: list[str] | None = None) -> None:
    """Measure the stages that the command line names; the last line printed is JSON."""
    config = parse(BenchConfig, arguments)
    bench = Bench(config, choose_device(config.device))
    keep_freed_memory()
    print(f"{bench.device} ({bench.name}), {torch.get_num_threads()} threads, torch {torch.__version__}")
    stages = STAGES.__args__[1:] if config.stage == "all" else (config.stage,)
    print(json.dumps({stage: getattr(bench, stage)() for stage in stages}))


def mean_loss(inputs: Tensor, targets: Tensor) -> Callable[[nn.Module], Tensor]:
    """What one of our models is trained with: a function of the model."""
    return lambda model: model(inputs, targets) / targets.numel()


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def show(title: str, unit: str, rows: dict[str, float], baseline: str) -> dict[str, float]:
    """Print a table of rates, each also as a multiple of the baseline's; return the rates."""
    print(f"\n{title}")
    for name, rate in rows.items():
        print(f"  {name:<44} {rate:>12,.1f} {unit}  {rate / rows[baseline]:>6.2f} ×")
    return rows


class Bench:
    """The stages, each a method that prints its table and returns the figures."""

    def __init__(self, config: BenchConfig, device: torch.device):
        self.config, self.device, self.cuda = config, device, device.type == "cuda"
        self.name = torch.cuda.get_device_name(device) if self.cuda else processor_name()
        self.dtype = choose_dtype(config.dtype, device, SMALL.d_model)

    def take_turns(self, contestants: dict[str, Callable[[], Any]], rounds: int | None = None) -> dict[str, float]:
        """Median seconds of each contestant's call, after one call of each to warm up."""
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for round_number in range((rounds or self.config.rounds) + 1):
            for name, call in contestants.items():
                begun = time.perf_counter()
                call()
                if self.cuda:
                    torch.cuda.synchronize(self.device)
                if round_number:
                    seconds[name].append(time.perf_counter() - begun)
        return {name: statistics.median(times) for name, times in seconds.items()}

    def step(self, model: nn.Module, loss_of: Callable, optimizer: Any, dtype: torch.dtype | None = None) -> Callable:
        """A training step: forward in mixed precision, backward, clip, update."""

        def step() -> None:
            with mixed_precision(dtype or self.dtype, self.device):
                loss = loss_of(model)
            loss.backward()
            if isinstance(optimizer, Optimizer):
                optimizer.step(0, 1000)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        return step

    def optimizer(self, model: nn.Module, dtype: torch.dtype, kind: str = "muon") -> Optimizer:
        return Optimizer(model, OptimizerConfig(optimizer=kind), DistributedContext(0, 1, self.device), dtype)

    def batch(self, shape: ModelConfig) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        tokens = torch.randint(shape.vocab_size, (self.config.batch_size, shape.context_length + 1), device=self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def train(self) -> dict[str, float]:
        """The same architecture, batch and optimizer step, ours and Hugging Face's; and our default recipe."""
        transformers = needed("transformers", "benchmarks.speed train", extra="dev")
        shape = dataclasses.replace(SMALL, **GPT2)
        inputs, targets = self.batch(shape)

        def ours(shape: ModelConfig, kind: str) -> Callable:
            model = GPT(shape).to(self.device)
            if self.cuda:
                model.compile()
            return self.step(model, mean_loss(inputs, targets), self.optimizer(model, self.dtype, kind))

        def their_loss(model: nn.Module) -> Tensor:
            return nn.functional.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())

        sizes = {"n_positions": shape.context_length, "n_embd": shape.d_model, "n_layer": shape.num_layers}
        sizes |= {"vocab_size": shape.vocab_size, "n_head": shape.num_heads, "use_cache": False}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **none)).to(self.device)
        contestants = {
            "ours, GPT-2's architecture, AdamW": ours(shape, "adamw"),
            "Hugging Face GPT2LMHeadModel, AdamW": self.step(theirs, their_loss, fused_adamw(theirs)),
            "ours, default recipe, Muon": ours(SMALL, "muon"),
        }
        if self.config.nanogpt:
            contestants["nanoGPT as it ships"] = self.nanogpt_step(shape, inputs, targets)
        seconds = self.take_turns(contestants)
        rates = {name: inputs.numel() / time for name, time in seconds.items()}
        size = f"{shape.num_layers} layers, {shape.d_model} wide, {len(inputs)} × {shape.context_length} tokens"
        show(f"Training step: {size}, {self.dtype}", "tokens/s", rates, "Hugging Face GPT2LMHeadModel, AdamW")
        if peak := next((peak for chip, peak in PEAK_FLOPS.items() if chip in self.name), None):
            plan = Plan(lambda layers: GPT(dataclasses.replace(shape, num_layers=layers)), shape.num_layers)
            used = rates["ours, GPT-2's architecture, AdamW"] * plan.flops_per_token() / peak
            print(f"  model FLOP utilisation {used:.1%} of {peak / 1e12:.0f} TFLOP/s")
            print(f"  peak memory {torch.cuda.max_memory_allocated(self.device) / 2**30:.1f} GiB")
        return rates | {"muon share at 64": self.muon_share(seconds["ours, default recipe, Muon"])}

    def nanogpt_step(self, shape: ModelConfig, inputs: Tensor, targets: Tensor) -> Callable:
        """nanoGPT's own model and optimizer, in float32 on a CPU, as its train.py runs them there."""
        specification = importlib.util.spec_from_file_location("nanogpt_model", self.config.nanogpt / "model.py")
        module = importlib.util.module_from_spec(specification)
        sys.modules["nanogpt_model"] = module
        specification.loader.exec_module(module)
        sizes = {"block_size": shape.context_length, "vocab_size": shape.vocab_size, "n_embd": shape.d_model}
        sizes |= {"n_layer": shape.num_layers, "n_head": shape.num_heads, "dropout": 0.0, "bias": shape.bias}
        with contextlib.redirect_stdout(sys.stderr):
            model = module.GPT(module.GPTConfig(**sizes)).to(self.device)
            optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), self.device.type)
        model = torch.compile(model) if self.cuda else model
        dtype = torch.bfloat16 if self.cuda else torch.float32
        return self.step(model, lambda model: model(inputs, targets)[1], optimizer, dtype)

    def muon_share(self, step_seconds: float) -> float:
        """The fraction of a default training step that Muon's update takes, here and at the preset's batch of 64."""
        optimizer = self.optimizer(GPT(SMALL).to(self.device), self.dtype)
        for parameter in optimizer.parameters.values():
            parameter.grad = torch.randn_like(parameter)
        none = torch.zeros((), device=self.device)
        muon = self.take_turns({"muon": lambda: optimizer.optimizers[0].step(1e-3, none)}, 5)["muon"]
        at_64 = muon / (muon + (step_seconds - muon) * 64 / self.config.batch_size)  # all else grows with the batch
        print(f"  Muon takes {muon * 1e3:.1f} ms, {muon / step_seconds:.1%} of a step; {at_64:.1%} at a batch of 64")
        return at_64

    def attention(self) -> dict[str, float]:
        """What the list of heads costs: whole training steps and decoding, against one joined matrix."""
        inputs, targets = self.batch(SMALL)
        steps, decoders = {}, {}
        for name in ("list of heads", "one joined matrix"):
            model = GPT(SMALL).to(self.device)
            for block in model.blocks if name != "list of heads" else ():
                block.attention = JoinedAttention(SMALL).to(self.device)
            decoder = for_decoding(model, pack=False)
            decoders[name] = lambda m=decoder: list(generate(m, inputs[:1, :1], 64, temperature=0))
            if self.cuda:
                model.compile()
            steps[name] = self.step(model, mean_loss(inputs, targets), fused_adamw(model))
        rates = {f"{name}, training": inputs.numel() / time for name, time in self.take_turns(steps).items()}
        show(f"Heads, {SMALL.d_model} wide, {self.dtype}", "tokens/s", rates, "one joined matrix, training")
        more = {f"{name}, decoding": 64 / time for name, time in self.take_turns(decoders).items()}
        return rates | show("", "tokens/s", more, "one joined matrix, decoding")

    def decode(self) -> dict[str, float]:
        """GPT-2-124M's shape, greedy: ours beside Hugging Face generate; how the time grows; a batch of eight."""
        transformers = needed("transformers", "benchmarks.speed decode", extra="dev")
        shape = ModelConfig(vocab_size=50257, context_length=1024, num_layers=12, num_heads=12, d_model=768, **GPT2)
        model = for_decoding(GPT(shape).to(self.device))
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config()).to(self.device).eval()
        theirs.generation_config.pad_token_id = 0
        prompt = torch.randint(shape.vocab_size, (1, 8), device=self.device)
        length = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
        turns = {
            "ours": lambda: list(generate(model, prompt, 64, temperature=0)),
            "Hugging Face generate": lambda: theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **length),
            "ours, batch of 8": lambda: list(generate(model, prompt.expand(8, -1), 64, temperature=0)),
        }
        seconds = self.take_turns(turns, max(3, self.config.rounds // 2))
        rates = {name: 64 * (8 if "8" in name else 1) / time for name, time in seconds.items()}
        show("Decoding 64 tokens, GPT-2 124M's shape, float32", "tokens/s", rates, "Hugging Face generate")
        gaps = np.diff([time.perf_counter() for _ in generate(model, prompt, 1010, temperature=0)])
        early, late = float(np.median(gaps[24:88])), float(np.median(gaps[-64:]))
        print(f"  a token takes {early * 1e3:.1f} ms near token 64 and {late * 1e3:.1f} ms near token 1,000")
        return rates | {"ms near token 64": early * 1e3, "ms near token 1,000": late * 1e3}

    def prepare(self) -> dict[str, float]:
        """Encoding the standard library: prepare.py's way beside bare tiktoken with as many threads."""
        sources = find_sources(("stdlib",), None, "", Path())
        text = "\n".join("".join(text.text for text in read(source)) for source in sources)
        tokenizer, threads = train_bpe([text], 4096), torch.get_num_threads()
        pieces = [text[i : i + 2**19] for i in range(0, len(text), 2**19)]

        def ours() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(tokenizer.encode, pieces))

        batch = tokenizer.encoding.encode_ordinary_batch
        turns = {"ours": ours, "tiktoken": lambda: batch(pieces, num_threads=threads)}
        seconds = self.take_turns(turns, max(3, self.config.rounds // 2))
        rates = {name: len(text.encode()) / 1e6 / time for name, time in seconds.items()}
        return show("Encoding with a BPE of 4,096 tokens", "MB/s", rates, "tiktoken")

    def data(self) -> dict[str, float]:
        """Assembling batches: alone, ahead of time beside a step, and its memory."""
        tokens = np.random.default_rng(0).integers(0, 65, 10_000_000, dtype=np.uint16)
        loader = Batches(tokens, SMALL.context_length, 1, self.config.batch_size, slice(None), self.device)
        model, fixed, number = GPT(SMALL).to(self.device), loader.get(0), iter(range(10**9))
        optimizer = fused_adamw(model)
        turns = {
            "with loading": self.step(model, lambda m: mean_loss(*loader.get(next(number)))(m), optimizer),
            "without": self.step(model, mean_loss(*fixed), optimizer),
        }
        seconds = self.take_turns(turns)
        rates = {name: fixed[0].numel() / time for name, time in seconds.items()}
        show("Steps with and without loading data", "tokens/s", rates, "without")
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        for step in range(BATCHES):
            loader.get(step)
        each = (time.perf_counter() - begun) / BATCHES
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
        print(f"  a batch takes {each * 1e3:.3f} ms, {each / seconds['without']:.2%} of a step")
        print(f"  peak memory has grown by {growth:.1f} MiB after {BATCHES:,} batches")
        return rates | {"ms a batch": each * 1e3, "growth in MiB": growth}

    def cost(self) -> dict[str, float]:
        """How a step's time per token grows with context, width, depth and vocabulary; of as many tokens, if it can."""
        base = dataclasses.replace(SMALL, num_layers=4, num_heads=4, d_model=256)
        changes = [{"context_length": length} for length in (64, 256, 1024)]
        changes += [{"context_length": length, "windows": (256,)} for length in (1024, 8192)]
        changes += [{"d_model": width, "num_heads": width // 64} for width in (128, 256, 512)]
        changes += [{"num_layers": layers} for layers in (2, 4, 8)] + [{"vocab_size": V} for V in (65, 4096, 50304)]
        turns, counts = {}, {}
        for change in changes:
            shape = dataclasses.replace(base, **change)
            dtype, rows = choose_dtype(self.config.dtype, self.device, shape.d_model), -(-4096 // shape.context_length)
            tokens = torch.randint(shape.vocab_size, (2, rows, shape.context_length), device=self.device)
            model = GPT(shape).to(self.device)
            name = ", ".join(f"{key} {value}" for key, value in change.items() if key != "num_heads")
            counts[name] = rows * shape.context_length
            turns[name] = self.step(model, mean_loss(*tokens), self.optimizer(model, dtype), dtype)
        seconds = self.take_turns(turns, max(3, self.config.rounds // 3))
        print(
            f"\nA step of 4,096 tokens: {base.num_layers} layers, {base.d_model} wide, context 256, vocabulary 65, but"
        )
        for name, time_taken in seconds.items():
            print(f"  {name:<44} {time_taken / counts[name] * 1e6:>12,.1f} µs a token")
        return seconds


class JoinedAttention(MultiHeadAttention):
    """The same attention with one joined query-key-value matrix in place of the heads' own."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.weight = nn.Parameter(super().join_heads()[0].detach().clone())
        for head in self.heads:  # count as heads, hold nothing
            head.query.weight = head.key.weight = head.value.weight = None

    def join_heads(self) -> tuple[Tensor, None]:
        return self.weight, None


if __name__ == "__main__":
    run_command(main)
