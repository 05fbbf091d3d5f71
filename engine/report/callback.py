"""The callback that writes a run's page, and what it records: settings, machine and samples."""

import contextlib
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine.core.cli import shell_command
from engine.core.files import atomic_write, read_json, to_json
from engine.core.settings import flatten
from engine.data.dataset import Dataset
from engine.generation.samples import choose_prompts, stream_samples
from engine.report.attention_maps import compute_attention
from engine.report.baselines import mixture_yardsticks
from engine.report.page import read_run, write_page
from engine.training.callbacks import MetricsFile, Terminal, WeightsAndBiases, truncate_records
from engine.training.config import TrainConfig
from engine.training.trainer import Callback, Record, Trainer
from model import GPT

SAMPLE_TOKENS = 100
EARLY_SAMPLE_TOKENS = 20  # before the first evaluation
MAX_EARLY_TIME = 0.04  # fraction of the run, to draw steps before the first evaluation
LAST_FREE_STEP = 4  # steps up to this one are drawn whatever the time
MAX_FRAME_BYTES = 30_000  # of attention at a step, before base64: 20 doublings fill 0.8 MB
MIN_PAGE_SECONDS = 10.0  # between two pages
MAX_PAGE_TIME = 0.01  # fraction of the run, to write pages
TOKENIZER_KEYS = ("tokenizer", "vocab_size", "pattern", "separator")


class Report(Callback):
    """Writes report.html during a run, and about.json, samples and attention, which it shows."""

    def __init__(self, config: TrainConfig | None = None):
        """Make the callback of a run with settings as they were typed."""
        self.config = config or TrainConfig()

    def on_train_start(self, trainer: Trainer) -> None:
        """Drop the samples after the step that is resumed from: they are written again."""
        truncate_records(trainer.config.out / "samples.jsonl", trainer.step)
        truncate_records(trainer.config.out / "attention.jsonl", trainer.step)
        self.about = describe_run(trainer, self.config)
        self.next_frame = trainer.step + 1  # step at which the attention is recorded next
        self.is_early = trainer.step == 0  # before the first evaluation
        self.early_seconds = 0.0
        self.write_at = 0.0
        self.write(trainer, "training")

    def on_step(self, trainer: Trainer) -> None:
        """Write short samples and the attention at doublings of the step, until an evaluation."""
        budget = trainer.budget
        is_due = budget.exhausted or budget.is_due("evaluate", trainer.step)
        is_power_of_two = trainer.step.bit_count() == 1
        if is_due or not (self.is_early and is_power_of_two):
            return
        planned_seconds = budget.elapsed / max(budget.progress, 1e-9)
        # Samples are expected to take at most as long as all earlier ones together.
        max_seconds = 2 * self.early_seconds
        if trainer.step <= LAST_FREE_STEP or max_seconds < MAX_EARLY_TIME * planned_seconds:
            started_at = time.monotonic()
            with budget.pause():
                self.sample(trainer, EARLY_SAMPLE_TOKENS)
            self.early_seconds += time.monotonic() - started_at

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Write the page after an evaluation, with samples, and every few seconds."""
        if "val_loss" in record:
            self.is_early = False
            self.sample(trainer)
        elif time.monotonic() < self.write_at:
            return
        self.write(trainer, "training")

    def on_train_end(self, trainer: Trainer) -> None:
        """Write that the run is complete, or how to resume it."""
        if hasattr(self, "about"):
            is_done = trainer.budget.exhausted and not trainer.failed
            self.write(trainer, "done" if is_done else "stopped")

    def sample(self, trainer: Trainer, num_tokens: int = SAMPLE_TOKENS) -> None:
        """Write samples, and compute the attention of a new best model; not of a sharded one.

        Once the step has doubled, the attention is recorded too.
        """
        if trainer.dist_ctx.sharded:
            return
        config = trainer.config
        step = trainer.step
        with trainer.passes.decoder() as (model, cache_dtype):
            options = (config.seed, cache_dtype, num_tokens)
            samples = write_samples(model, trainer.data, step, *options)
            append_records(config.out / "samples.jsonl", samples)
            if step >= self.next_frame:
                frame = compute_attention(model, trainer.data, MAX_FRAME_BYTES)
                append_records(config.out / "attention.jsonl", [{"step": step, **frame}])
                self.next_frame = 2 * step
            if self.is_early or trainer.is_best:
                attention = to_json(compute_attention(model, trainer.data))
                atomic_write(config.out / "attention.json", attention.encode())

    def write(self, trainer: Trainer, state: str) -> None:
        """Write about.json and, if there are records, the page; seldom if that takes long."""
        started_at = time.monotonic()
        out = trainer.config.out
        self.about["state"] = state_record(trainer, state)
        atomic_write(out / "about.json", to_json(self.about, indent=1).encode())
        if (out / "metrics.jsonl").exists():
            write_page([read_run(out)], out / "report.html")
            seconds = time.monotonic() - started_at
            self.write_at = started_at + max(MIN_PAGE_SECONDS, seconds / MAX_PAGE_TIME)


def default_callbacks(config: TrainConfig) -> list[Callback]:
    """Return the callbacks of the command line."""
    callbacks: list[Callback] = [MetricsFile(), Terminal(), Report(config)]
    if config.wandb:
        callbacks.append(WeightsAndBiases())
    return callbacks


def describe_run(trainer: Trainer, config: TrainConfig) -> dict[str, Any]:
    """Describe a run when it starts: parameters, machine, data, and which settings were typed."""
    device = trainer.dist_ctx.device
    data = trainer.data
    machine = {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "device": str(device),
        "processes": trainer.dist_ctx.size,
        "system": platform.platform(terse=True),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "commit": code_commit(),
    }
    if device.type == "cuda":
        memory = f"{torch.cuda.get_device_properties(device).total_memory / 2**30:,.0f} GiB"
        machine["GPU"] = f"{torch.cuda.get_device_name(device)}, {memory}"
    defaults = flatten(TrainConfig())
    settings = flatten(config)
    typed = {name: value for name, value in settings.items() if value != defaults[name]}
    about_path = trainer.config.out / "about.json"
    if trainer.step and about_path.exists():  # a resume takes the others from the run
        changed = {name for change in trainer.changes for name in change} & defaults.keys()
        typed = read_json(about_path).get("typed", {}) | {name: settings[name] for name in changed}
    baselines = mixture_yardsticks(data)
    return {
        "parameters": trainer.model.num_parameters,
        "machine": {name: value for name, value in machine.items() if value},
        "defaults": defaults,
        "typed": typed,
        "is_chat": data.learns_chats,
        "prompts": [*map(data.tokenizer.decode, choose_prompts(data))],
        "data": [*map(dataset_facts, data.datasets)],
        "epoch_tokens": data.epoch_tokens,
        "xz_bits_per_byte": baselines.pop("xz_bits_per_byte", None),  # of text
        "baselines": baselines,
        # Losses of runs with equal tokenizer and text are comparable.
        "tokenizer": data.tokenizer.fingerprint,
        "text": [trainer.config.mix, *map(text_origin, data.datasets)],
    }


def dataset_facts(dataset: Dataset) -> dict[str, str]:
    """Return figures of a dataset as prepare.py prints them."""
    return {
        "dataset": str(dataset.path),
        "tokens to train on": f"{len(dataset.train):,}",
        "tokens to validate on": f"{len(dataset.val):,}",
        "documents": f"{dataset.manifest['statistics']['documents']:,}",
        "bytes to train on": f"{dataset.manifest['splits']['train']['bytes']:,}",
        "bytes per token": f"{dataset.bytes_per_token('train'):.2f}",
    }


def write_samples(
    model: GPT,
    data: Dataset,
    step: int,
    seed: int,
    cache_dtype: torch.dtype | None = None,
    num_tokens: int = SAMPLE_TOKENS,
) -> list[Record]:
    """Continue the prompts of a run, the same at each step: records of step, prompt and text."""
    prompts = choose_prompts(data)
    texts = [""] * len(prompts)
    for index, text in stream_samples(model, data, prompts, num_tokens, seed, cache_dtype):
        texts[index] += text
    pairs = zip(map(data.tokenizer.decode, prompts), texts, strict=True)
    return [{"step": step, "prompt": prompt, "text": text} for prompt, text in pairs]


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append records to a .jsonl file."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(f"{to_json(record)}\n" for record in records)


def text_origin(dataset: Dataset) -> dict[str, Any]:
    """Return what the text of a dataset and its splits depend on, whatever the tokenizer."""
    origin = dataset.manifest["origin"]
    return {key: value for key, value in origin.items() if key not in TOKENIZER_KEYS}


def code_commit() -> str:
    """Return the commit of this code, and whether files differ from it; "" without git."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "--no-optional-locks", f"--git-dir={root}/.git", f"--work-tree={root}"]
    command += ["describe", "--always", "--exclude=*", "--dirty= with changed files"]
    with contextlib.suppress(OSError):  # git is not installed
        return subprocess.run(command, capture_output=True, encoding="utf-8").stdout.strip()
    return ""


def processor_name() -> str:
    """Return the processor's name, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.exists() else ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def state_record(trainer: Trainer, state: str) -> Record:
    """Return the state of a run, for about.json."""
    budget = trainer.budget
    progress = budget.progress
    config = trainer.config
    command = shell_command("train.py", "--out", config.out, "--resume")
    command = f"{trainer.dist_ctx.torchrun_command} {command}"
    limit = f"--steps {2 * trainer.step}"
    if config.minutes and trainer.step != config.steps:
        limit = f"--minutes {2 * config.minutes:g}"
    return {
        "state": state,
        "step": trainer.step,
        "total_steps": round(budget.total_steps) if math.isfinite(budget.total_steps) else None,
        "progress": progress,
        "seconds": budget.elapsed,
        "seconds_left": budget.elapsed * (1 - progress) / progress if progress else None,
        "updated_at": time.time(),
        "resume": command,
        "longer": f"{command} {limit}",
    }
