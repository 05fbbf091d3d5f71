"""How fast each stage is, beside its peers, in one run.

    python bench.py [train|attention|decode|prepare|data|cost|all] [--device cpu] [--nanogpt DIR]

Contestants take turns, and medians are compared: a noisy machine is noisy for all of them. The last line is JSON.
"""

import contextlib
import dataclasses
import importlib.util
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import nn

from engine import shards
from engine.generate import generate
from engine.optimizer import Optimizer, OptimizerConfig
from engine.parallel import World, choose_device, choose_dtype, keep_freed_memory
from engine.plan import PEAK_FLOPS, Shape, flops_per_token
from engine.settings import parse, run_command
from model import GPT, ModelConfig, MultiHeadAttention

GPT2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False}
GPT2 |= {"tie_embeddings": True, "bias": True}
SMALL = ModelConfig(vocab_size=65, context_length=256, num_layers=6, num_heads=6, d_model=384)


@dataclass(frozen=True)
class BenchConfig:
    """Measure each stage beside its peers, in one run."""

    stage: tyro.conf.Positional[Literal["all", "train", "attention", "decode", "prepare", "data", "cost"]] = "all"
    device: str = "auto"  # cpu, cuda, mps, or auto: the best there is.
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # What training's matrix products compute in.
    batch_size: int = 16  # Sequences in a training step.
    rounds: int = 10  # Turns that each contestant takes.
    nanogpt: Path | None = None  # A clone of nanoGPT, to race it too.


def main() -> None:
    """Measure the stages that the command line names; the last line printed is JSON."""
    config = parse(BenchConfig)
    device = choose_device(config.device)
    keep_freed_memory()
    stages = {"train": train, "attention": attention, "decode": decode, "prepare": prepare, "data": data, "cost": cost}
    chosen = stages if config.stage == "all" else {config.stage: stages[config.stage]}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{device} ({name}), {torch.get_num_threads()} threads, torch {torch.__version__}")
    results = {stage: measure(config, device) for stage, measure in chosen.items()}
    print(json.dumps(results))


def take_turns(contestants: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each contestant's call, after one call of each to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 1):
        for name, call in contestants.items():
            begun = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number:
                seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(times) for name, times in seconds.items()}


def show(title: str, unit: str, rows: dict[str, float], baseline: str) -> dict[str, float]:
    """Print a table of rates, each also as a multiple of the baseline's; return the rates."""
    print(f"\n{title}")
    for name, rate in rows.items():
        print(f"  {name:<44} {rate:>12,.1f} {unit}  {rate / rows[baseline]:>6.2f} ×")
    return rows


def stepper(model: nn.Module, loss_of: Callable, optimizer: Any, dtype: torch.dtype, device: torch.device) -> Callable:
    """A training step: forward in mixed precision, backward, clip, update."""

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = loss_of(model)
        loss.backward()
        if isinstance(optimizer, Optimizer):
            optimizer.step(0, 1000)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


def train(config: BenchConfig, device: torch.device) -> dict[str, float]:
    """The same architecture, batch and optimizer step, ours and Hugging Face's; and our default recipe."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dtype = choose_dtype(config.dtype, device, SMALL.d_model)
    shape = dataclasses.replace(SMALL, **GPT2)
    T, V = shape.context_length, shape.vocab_size
    tokens = torch.randint(V, (config.batch_size, T + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    adamw = OptimizerConfig(optimizer="adamw")

    def ours(name: str, shape: ModelConfig, settings: OptimizerConfig) -> Callable:
        model = GPT(shape).to(device)
        if device.type == "cuda":
            model.compile()
        return stepper(
            model, lambda m: m(inputs, targets), Optimizer(model, settings, World(0, 1, device), dtype), dtype, device
        )

    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    sizes = {"n_positions": T, "n_embd": shape.d_model, "n_layer": shape.num_layers, "n_head": shape.num_heads}
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=V, **sizes, **none)).to(device)
    contestants = {
        "ours, GPT-2's architecture, AdamW": ours("gpt2", shape, adamw),
        "Hugging Face GPT2LMHeadModel, AdamW": stepper(
            theirs, lambda m: hugging_face_loss(m, inputs, targets), fused_adamw(theirs), dtype, device
        ),
        "ours, default recipe, Muon": ours("default", SMALL, OptimizerConfig()),
    }
    if config.nanogpt:
        contestants["nanoGPT as it ships"] = nanogpt_step(config.nanogpt, shape, inputs, targets, device)
    seconds = take_turns(contestants, config.rounds, device)
    rates = {name: inputs.numel() / time for name, time in seconds.items()}
    title = f"Training step: {shape.num_layers} layers, {shape.d_model} wide, {config.batch_size} × {T} tokens, {dtype}"
    show(title, "tokens/s", rates, "Hugging Face GPT2LMHeadModel, AdamW")
    with torch.device("meta"):
        flops = flops_per_token(Shape.of(GPT(shape)))
    report_utilisation(rates["ours, GPT-2's architecture, AdamW"] * flops, device)
    return rates | {"muon share at 64": muon_share(config, device, seconds["ours, default recipe, Muon"])}


def fused_adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def hugging_face_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).logits.float().flatten(0, 1), targets.flatten())


def nanogpt_step(folder: Path, shape: ModelConfig, inputs: torch.Tensor, targets: torch.Tensor, device: torch.device):
    """nanoGPT's own model and optimizer, in float32 on a CPU, as its train.py runs them there."""
    specification = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules["nanogpt_model"] = module
    specification.loader.exec_module(module)
    sizes = {"block_size": shape.context_length, "vocab_size": shape.vocab_size, "n_embd": shape.d_model}
    sizes |= {"n_layer": shape.num_layers, "n_head": shape.num_heads, "dropout": 0.0, "bias": shape.bias}
    with contextlib.redirect_stdout(sys.stderr):
        model = module.GPT(module.GPTConfig(**sizes)).to(device)
        optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cuda":
        model = torch.compile(model)
    return stepper(model, lambda m: m(inputs, targets)[1], optimizer, dtype, device)


def report_utilisation(flops: float, device: torch.device) -> None:
    """Print what share of the device's peak the rate of floating-point operations is, where the peak is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for chip, peak in PEAK_FLOPS.items():
        if chip in name:
            print(f"  model FLOP utilisation {flops / peak:.1%} of {peak / 1e12:.0f} TFLOP/s")
            print(f"  peak memory {torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB")


def muon_share(config: BenchConfig, device: torch.device, step_seconds: float) -> float:
    """The share of a default training step that Muon's update takes, here and at the preset's batch of 64."""
    dtype = choose_dtype(config.dtype, device, SMALL.d_model)
    optimizer = Optimizer(GPT(SMALL).to(device), OptimizerConfig(), World(0, 1, device), dtype)
    for parameter in optimizer.parameters.values():
        parameter.grad = torch.randn_like(parameter)
    seconds = take_turns({"muon": optimizer.optimizers[0].step}, 5, device)["muon"]
    at_64 = seconds / (seconds + (step_seconds - seconds) * 64 / config.batch_size)  # all else grows with the batch
    print(f"  Muon takes {seconds * 1e3:.1f} ms, {seconds / step_seconds:.1%} of a step; {at_64:.1%} at a batch of 64")
    return at_64


class JoinedAttention(MultiHeadAttention):
    """The same attention with one joined query-key-value matrix in place of the heads' own."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        weight, _ = super().join_heads()
        self.weight = nn.Parameter(weight.detach().clone())
        for head in self.heads:  # count as heads, hold nothing
            head.query.weight = head.key.weight = head.value.weight = None

    def join_heads(self) -> tuple[torch.Tensor, None]:
        return self.weight, None


def attention(config: BenchConfig, device: torch.device) -> dict[str, float]:
    """What the list of heads costs: whole training steps and decoding, against one joined matrix."""
    dtype = choose_dtype(config.dtype, device, SMALL.d_model)
    tokens = torch.randint(SMALL.vocab_size, (config.batch_size, SMALL.context_length + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps, decoders = {}, {}
    for name in ("list of heads", "one joined matrix"):
        model = GPT(SMALL).to(device)
        if name != "list of heads":
            for block in model.blocks:
                block.attention = JoinedAttention(SMALL).to(device)
        decoders[name] = lambda m=model: list(generate(m, inputs[:1, :1], 64, temperature=0))
        if device.type == "cuda":
            model.compile()
        steps[name] = stepper(model, lambda m: m(inputs, targets), fused_adamw(model), dtype, device)
    seconds = take_turns(steps, config.rounds, device)
    rates = {f"{name}, training": inputs.numel() / time for name, time in seconds.items()}
    show(f"Heads, {SMALL.d_model} wide, {dtype}", "tokens/s", rates, "one joined matrix, training")
    decoding = take_turns(decoders, config.rounds, device)
    more = {f"{name}, decoding": 64 / time for name, time in decoding.items()}
    show("", "tokens/s", more, "one joined matrix, decoding")
    return rates | more


def decode(config: BenchConfig, device: torch.device) -> dict[str, float]:
    """GPT-2-124M's shape, greedy: ours beside Hugging Face generate; how the time grows; a batch of eight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = ModelConfig(vocab_size=50257, context_length=1024, num_layers=12, num_heads=12, d_model=768, **GPT2)
    model = GPT(shape).to(device).eval().pack_for_decoding()  # as sample.py does
    theirs = GPT2LMHeadModel(GPT2Config()).to(device).eval()
    theirs.generation_config.pad_token_id = 0
    prompt = torch.randint(shape.vocab_size, (1, 8), device=device)

    def ours(rows: int) -> None:
        list(generate(model, prompt.expand(rows, -1), 64, temperature=0))

    def hugging_face() -> None:
        theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=64, min_new_tokens=64, do_sample=False
        )

    turns = {"ours": lambda: ours(1), "Hugging Face generate": hugging_face, "ours, batch of 8": lambda: ours(8)}
    seconds = take_turns(turns, max(3, config.rounds // 2), device)
    rates = {name: 64 * (8 if "8" in name else 1) / time for name, time in seconds.items()}
    show("Decoding 64 tokens, GPT-2 124M's shape, float32", "tokens/s", rates, "Hugging Face generate")
    times = []
    for _ in generate(model, prompt, 1010, temperature=0):
        times.append(time.perf_counter())
    gaps = np.diff(times)
    early, late = float(np.median(gaps[24:88])), float(np.median(gaps[-64:]))
    print(f"  a token takes {early * 1e3:.1f} ms near token 64 and {late * 1e3:.1f} ms near token 1,000")
    return rates | {"ms near token 64": early * 1e3, "ms near token 1,000": late * 1e3}


def prepare(config: BenchConfig, device: torch.device) -> dict[str, float]:
    """Encoding the standard library: prepare.py's way beside bare tiktoken with as many threads."""
    from concurrent.futures import ThreadPoolExecutor

    from engine.corpus import documents, find_sources
    from engine.tokenizer import train_bpe

    sources = find_sources(("stdlib",), "*", "", Path())
    text = "\n".join("".join(document()) for source in sources for document in documents(source))
    tokenizer = train_bpe([text], 4096)
    pieces = [text[i : i + 2**19] for i in range(0, len(text), 2**19)]
    threads = torch.get_num_threads()

    def ours() -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(tokenizer.encode, pieces))

    turns = {"ours": ours, "tiktoken": lambda: tokenizer.encoding.encode_ordinary_batch(pieces, num_threads=threads)}
    seconds = take_turns(turns, max(3, config.rounds // 2), torch.device("cpu"))
    rates = {name: len(text.encode()) / 1e6 / time for name, time in seconds.items()}
    return show("Encoding with a BPE of 4,096 tokens", "MB/s", rates, "tiktoken")


def data(config: BenchConfig, device: torch.device) -> dict[str, float]:
    """Assembling batches: alone, ahead of time beside a step, and its memory."""
    tokens = np.random.default_rng(0).integers(0, 65, 10_000_000, dtype=np.uint16)
    T = SMALL.context_length
    loader = shards.Batches(tokens, T, 1, config.batch_size, slice(None), device)
    model = GPT(SMALL).to(device)
    fixed = loader.get(0)
    dtype = choose_dtype(config.dtype, device, SMALL.d_model)
    number = iter(range(10**9))
    optimizer = fused_adamw(model)
    turns = {
        "with loading": stepper(model, lambda m: m(*loader.get(next(number))), optimizer, dtype, device),
        "without": stepper(model, lambda m: m(*fixed), optimizer, dtype, device),
    }
    seconds = take_turns(turns, config.rounds, device)
    rates = {name: fixed[0].numel() / time for name, time in seconds.items()}
    show("Steps with and without loading data", "tokens/s", rates, "without")
    before, begun = resident(), time.perf_counter()
    for step in range(10_000):
        loader.get(step)
    each = (time.perf_counter() - begun) / 10_000
    growth = (resident() - before) / 2**20
    print(f"  a batch takes {each * 1e3:.3f} ms, {each / seconds['without']:.2%} of a step")
    print(f"  memory has grown by {growth:.1f} MiB after 10,000 batches")
    return rates | {"ms a batch": each * 1e3, "growth in MiB": growth}


def cost(config: BenchConfig, device: torch.device) -> dict[str, float]:
    """How a training step's time per token grows with context, width, depth and vocabulary; the same tokens a step."""
    base = dataclasses.replace(SMALL, num_layers=4, num_heads=4, d_model=256)
    changes = [{"context_length": length} for length in (64, 256, 1024)]
    changes += [{"d_model": width, "num_heads": width // 64} for width in (128, 256, 512)]
    changes += [{"num_layers": layers} for layers in (2, 4, 8)] + [{"vocab_size": size} for size in (65, 4096, 50304)]
    turns = {}
    for change in changes:
        shape = dataclasses.replace(base, **change)
        dtype = choose_dtype(config.dtype, device, shape.d_model)
        tokens = torch.randint(shape.vocab_size, (2, 4096 // shape.context_length, shape.context_length), device=device)
        model = GPT(shape).to(device)
        optimizer = Optimizer(model, OptimizerConfig(), World(0, 1, device), dtype)
        name = ", ".join(f"{key} {value}" for key, value in change.items() if key != "num_heads")
        turns[name] = stepper(model, lambda m, t=tokens: m(t[0], t[1]), optimizer, dtype, device)
    seconds = take_turns(turns, max(3, config.rounds // 3), device)
    print(f"\nA step of 4,096 tokens: {base.num_layers} layers, {base.d_model} wide, context 256, vocabulary 65, but")
    for name, time_taken in seconds.items():
        print(f"  {name:<44} {time_taken / 4096 * 1e6:>12,.1f} µs a token")
    return seconds


def resident() -> int:
    """Bytes of this process in memory."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    run_command(main)
