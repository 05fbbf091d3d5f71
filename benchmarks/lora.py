"""A step of LoRA fine-tuning beside full fine-tuning, and beside PEFT with transformers.

    python -m benchmarks.lora [--steps 20] [--rounds 3] [--rows 4] [--length 256]

Each contestant is a process of its own, in turn: SmolLM2-135M's shape with random weights in
bfloat16, rank 16 on the linear layers of all blocks. Prints the median seconds of a step, and the
peak of resident memory.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.core.cli import run_command
from engine.core.settings import build, parse
from engine.data.tokenizer import named_tokenizer
from engine.runs.checkpoint import RunState, write_checkpoint
from engine.training.config import TrainConfig
from engine.training.trainer import Callback, Trainer
from model import GPT, ModelConfig
from prepare import PrepareConfig, prepare
from train import train

LORA_RANK = 16
NUM_WARMUP_STEPS = 2
SMOLLM2_135M_CONFIG = ModelConfig(
    vocab_size=49152,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    d_model=576,
    d_ff=1536,
    context_length=2048,
    rope_base=100_000.0,
    norm="weighted_rmsnorm",
    norm_epsilon=1e-5,
    qk_norm=False,
    tie_embeddings=True,
)


@dataclass(frozen=True)
class BenchmarkConfig:
    """Measure a step of LoRA beside full fine-tuning and PEFT."""

    steps: int = 20
    rounds: int = 3
    rows: int = 4
    length: int = 256
    contestant: str = ""  # of one process; "": all, in turn
    folder: Path | None = None  # with the base model and the text


CONTESTANT_SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"optimizer": "adamw"},
    "LoRA": {"lora_rank": LORA_RANK, "optimizer": "adamw"},
    "LoRA, 2 micro-batches": {"lora_rank": LORA_RANK, "optimizer": "adamw", "micro_batch_size": 2},
    "PEFT": {},
    "PEFT, autocast": {},
}


class Stopwatch(Callback):
    """Measures the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_start(self, trainer: Trainer) -> None:
        self.started_at = time.perf_counter()

    def on_step(self, trainer: Trainer) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.started_at)
        self.started_at = now


def make_base(folder: Path) -> None:
    """Write a base model with random weights, and a dataset for it."""
    with torch.device("meta"):
        params = list(GPT(SMOLLM2_135M_CONFIG).named_parameters())
    weights = {}
    for name, param in params:
        is_norm = name.endswith("norm.weight")
        weights[name] = torch.full(param.shape, float(is_norm), dtype=torch.bfloat16)
        if not is_norm:
            weights[name].normal_(0, 0.02)
    tokenizer = named_tokenizer("byte")
    checkpoint = folder / "base" / "checkpoints" / "step-00000000"
    write_checkpoint(checkpoint, RunState(SMOLLM2_135M_CONFIG), weights, {}, tokenizer.save)
    prepare(PrepareConfig(("docs",), glob=("*.md",), tokenizer="byte", out=folder / "data"))


def time_ours(config: BenchmarkConfig, folder: Path) -> list[float]:
    """Return the seconds of each step of train.py."""
    stopwatch = Stopwatch()
    settings = {
        "data": (folder / "data",),
        "out": folder / config.contestant,
        "init_from": folder / "base",
        "steps": config.steps,
        "batch_size": config.rows,
        "context_length": config.length,
        "eval_tokens": config.length,
        "dtype": "bfloat16",
        **CONTESTANT_SETTINGS[config.contestant],
    }
    train(build(TrainConfig, settings), callbacks=[stopwatch])
    return stopwatch.seconds


def time_peft(config: BenchmarkConfig) -> list[float]:
    """Return the seconds of each step of PEFT with transformers and PyTorch's AdamW."""
    import peft
    import transformers

    hf_config = transformers.LlamaConfig(
        vocab_size=SMOLLM2_135M_CONFIG.vocab_size,
        hidden_size=SMOLLM2_135M_CONFIG.d_model,
        intermediate_size=SMOLLM2_135M_CONFIG.feed_forward_width,
        num_hidden_layers=SMOLLM2_135M_CONFIG.num_layers,
        num_attention_heads=SMOLLM2_135M_CONFIG.num_heads,
        num_key_value_heads=SMOLLM2_135M_CONFIG.num_groups,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=torch.bfloat16)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM", r=LORA_RANK, lora_alpha=32, target_modules="all-linear"
    )
    model = peft.get_peft_model(model, lora).train()
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, 1e-3, fused=True)
    seconds = []
    for _ in range(config.steps):
        started_at = time.perf_counter()
        ids = torch.randint(256, (config.rows, config.length))
        with torch.autocast("cpu", torch.bfloat16, config.contestant.endswith("autocast")):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started_at)
    return seconds


def main(arguments: list[str] | None = None) -> None:
    """Run one contestant, or all in turn."""
    arguments = sys.argv[1:] if arguments is None else arguments
    config = parse(BenchmarkConfig, arguments)
    if config.contestant:
        assert config.folder is not None
        is_peft = config.contestant.startswith("PEFT")
        seconds = time_peft(config) if is_peft else time_ours(config, config.folder)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps([statistics.median(seconds[NUM_WARMUP_STEPS:]), peak]))
        return
    results: dict[str, list[list[float]]] = {name: [] for name in CONTESTANT_SETTINGS}
    for number in range(config.rounds):
        for name in CONTESTANT_SETTINGS:
            with tempfile.TemporaryDirectory() as folder:
                if not name.startswith("PEFT"):
                    make_base(Path(folder))
                flags = ["--contestant", name, "--folder", folder]
                command = [sys.executable, "-m", "benchmarks.lora", *arguments, *flags]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                results[name].append(json.loads(output.splitlines()[-1]))
        print(f"round {number + 1} of {config.rounds}", file=sys.stderr)
    for name, pairs in results.items():
        seconds, peaks = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"{name:<26}{seconds:8.2f} s a step{peaks:8.2f} GiB")


if __name__ == "__main__":
    run_command(main)
