"""The callback that writes a run's page, and what it records: machine, samples and attention."""

import itertools
import math
import os
import platform
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.core.device import total_memory
from engine.core.errors import UserError
from engine.core.files import atomic_write, read_json, to_json
from engine.core.settings import flatten
from engine.data.batches import Mixture
from engine.data.chats.chat import first_question, stop_token_ids
from engine.data.dataset import Dataset
from engine.data.split import prompt_ids, token_ids
from engine.data.tokenizer import Tokenizer
from engine.generation.sampling import DEFAULT_OPTIONS, SamplingOptions
from engine.generation.text_batch import complete_streams
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from engine.report.attention_maps import (
    attention_maps,
    encode_triangles,
    shared_character,
    token_label,
)
from engine.report.baselines import compress_validation, mixture_baselines
from engine.report.habits import name_heads
from engine.report.overview import describe_state
from engine.report.page import collect_run_content, write_page
from engine.runs.checkpoint import load_model
from engine.runs.run_files import find_checkpoint
from engine.training.callbacks import start_of_sample, trim_incomplete_characters, truncate_records
from engine.training.config import TrainConfig
from engine.training.resolve import learns_chats
from engine.training.trainer import Callback, Trainer
from model import GPT

NUM_PROMPTS = 2  # of validation text
PROMPT_TOKENS = 12
NEW_TOKENS = 100
ATTENTION_TOKENS = 64
NUM_ATTENTION_TEXTS = 32  # of which one is chosen
MAX_LINE_TOKENS = 256  # searched for the start of a line
MAX_ATTENTION_BYTES = 1_000_000  # before base64
MIN_SHOWN_RECORDS = 10  # before the first evaluation
MIN_PAGE_SECONDS = 10.0  # between two pages
MAX_PAGE_TIME = 0.01  # fraction of the run, to write pages
TOKENIZER_KEYS = ("tokenizer", "vocab_size", "pattern", "separator")


class Report(Callback):
    """Writes report.html during a run, and about.json and samples.jsonl, which it shows."""

    def __init__(self, config: TrainConfig | None = None):
        """Make the callback of a run with settings as they were typed."""
        self.config = config or TrainConfig()

    def on_train_start(self, trainer: Trainer) -> None:
        """Drop the samples after the step that is resumed from: they are written again."""
        truncate_records(trainer.config.out / "samples.jsonl", trainer.step)
        self.about = describe_environment(trainer, self.config)
        self.attention: dict[str, Any] | None = None  # of the best checkpoint
        self.num_records = 0
        self.write_at = 0.0
        self.write(trainer, "training")

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Write the page after an evaluation, with samples, and every few seconds."""
        self.num_records += 1
        if "val_loss" in record:
            self.sample(trainer)
        elif self.num_records < MIN_SHOWN_RECORDS or time.monotonic() < self.write_at:
            return
        self.write(trainer, "training")

    def on_train_end(self, trainer: Trainer) -> None:
        """Write that the run is complete, or how to resume it."""
        if hasattr(self, "attention"):
            is_done = trainer.budget.exhausted and not trainer.failed
            self.write(trainer, "done" if is_done else "stopped")

    def sample(self, trainer: Trainer) -> None:
        """Write samples, and compute the attention of a new best model; not of a sharded one."""
        if trainer.dist_ctx.sharded:
            return
        out = trainer.config.out
        model = build_decoder(trainer.model)
        samples = sample_for_report(model, trainer.data, trainer.step, trainer.config.seed)
        with open(out / "samples.jsonl", "a", encoding="utf-8") as file:
            file.write("".join(f"{to_json(sample)}\n" for sample in samples))
        if trainer.is_best or self.attention is None:  # None: the run was resumed
            if not trainer.is_best:
                model = load_model(find_checkpoint(out), modify_model=trainer.modify_model)
            self.attention = compute_attention(model, trainer.data)

    def write(self, trainer: Trainer, state: str) -> None:
        """Write about.json and, if there are records, the page; seldom if that takes long."""
        started_at = time.monotonic()
        out = trainer.config.out
        self.about["state"] = describe_state(trainer, state)
        atomic_write(out / "about.json", to_json(self.about, indent=1).encode())
        if (out / "metrics.jsonl").exists():
            run = collect_run_content(out, self.about["state"])
            write_page([run | {"attention": self.attention}], out / "report.html")
            seconds = time.monotonic() - started_at
            self.write_at = started_at + max(MIN_PAGE_SECONDS, seconds / MAX_PAGE_TIME)


def describe_environment(trainer: Trainer, config: TrainConfig) -> dict[str, Any]:
    """Describe a run when it starts: parameters, machine, data, and which settings were typed."""
    device = trainer.dist_ctx.device
    data = trainer.data
    has_affinity = hasattr(os, "sched_getaffinity")
    machine = {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count(),
        "memory": f"{total_memory(torch.device('cpu')) / 2**30:,.0f} GiB",
        "device": str(device),
        "processes": trainer.dist_ctx.size,
        "system": platform.platform(terse=True),
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
    }
    if device.type == "cuda":
        memory = f"{total_memory(device) / 2**30:,.0f} GiB"
        machine["GPU"] = f"{torch.cuda.get_device_name(device)}, {memory}"
    defaults = flatten(TrainConfig())
    typed = [name for name, value in flatten(config).items() if value != defaults[name]]
    about_path = trainer.config.out / "about.json"
    if trainer.step and about_path.exists():  # a resume takes the others from the run
        changed = {name for change in trainer.changes for name in change}
        typed = sorted({*read_json(about_path).get("typed", []), *changed} & defaults.keys())
    return {
        "parameters": trainer.model.num_parameters,
        "machine": machine,
        "defaults": defaults,
        "typed": typed,
        "is_chat": learns_chats(data),
        "prompts": describe_prompts(data),
        "data": describe_data(data),
        "epoch_tokens": min(data.epoch_tokens),
        "baselines": mixture_baselines(data),
        "xz_bits_per_byte": compress_validation(data),
        # Losses of runs with equal tokenizer and text are comparable.
        "tokenizer": data.tokenizer.fingerprint,
        "text": [trainer.config.mix, *map(text_origin, data.datasets)],
    }


def describe_data(data: Mixture) -> list[dict[str, Any]]:
    """Describe each dataset that a run is trained on, with figures as prepare.py prints them."""
    return [
        {
            "dataset": str(dataset.path),
            "fraction of sequences": f"{weight:.3g}",
            "tokens to train on": f"{len(dataset.train):,}",
            "tokens to validate on": f"{len(dataset.val):,}",
            "documents": f"{dataset.manifest['statistics']['documents']:,}",
            "bytes to train on": f"{dataset.manifest['splits']['train']['bytes']:,}",
            "bytes per token": f"{dataset.bytes_per_token('train'):.2f}",
            "vocabulary": f"{dataset.tokenizer.vocab_size:,} ({dataset.tokenizer.kind})",
        }
        for dataset, weight in zip(data.datasets, data.weights, strict=True)
    ]


def describe_prompts(data: Mixture) -> list[str]:
    """Return prompts of validation text to begin with; of chats, their first questions."""
    tokenizer = data.tokenizer
    prompts = choose_prompts(data, PROMPT_TOKENS)
    if learns_chats(data):
        return [*filter(None, (first_question(tokenizer, ids) for ids in prompts))]
    special = {*tokenizer.special_tokens.values()}
    return [tokenizer.decode([i for i in ids if i not in special]) for ids in prompts]


def text_origin(dataset: Dataset) -> dict[str, Any]:
    """Return what the text of a dataset and its splits depend on, whatever the tokenizer."""
    origin = dataset.manifest["origin"]
    return {key: value for key, value in origin.items() if key not in TOKENIZER_KEYS}


def processor_name() -> str:
    """Return the processor's name, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.exists() else ""
    match = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def choose_prompts(data: Mixture, num_tokens: int, count: int = NUM_PROMPTS) -> list[list[int]]:
    """Return the beginnings of lines of validation text as token ids; of examples, the prompts."""
    val = data.datasets[0].val
    if val.num_examples:
        return [*map(prompt_ids, itertools.islice(val.examples(), count + 1))]
    prompts = []
    for index in range(count):
        start = (index + 1) * len(val) // (count + 1)
        ids = val.read(start, start + MAX_LINE_TOKENS + num_tokens)[0].tolist()
        pieces = [data.tokenizer.decode_bytes([token]) for token in ids[:MAX_LINE_TOKENS]]
        line_ends = [end for end, piece in enumerate(pieces, 1) if piece.endswith(b"\n")]
        first = min(line_ends, default=0)
        prompt = ids[first : first + num_tokens]
        ends = (data.tokenizer.end_of_text_id, *data.tokenizer.text_start)
        text_ids = [token for token in prompt if token not in ends]
        text_ids = trim_incomplete_characters(data.tokenizer, text_ids)
        prompts.append([*data.tokenizer.text_start, *text_ids] if text_ids else prompt)
    return prompts


def sample_for_report(model: GPT, data: Mixture, step: int, seed: int) -> list[dict[str, Any]]:
    """Continue the same prompts each time: records of step, prompt and text."""
    tokenizer = data.tokenizer
    has_examples = data.datasets[0].val.num_examples > 0
    prompts = [(ids, tokenizer.decode(ids)) for ids in choose_prompts(data, PROMPT_TOKENS) if ids]
    if not (has_examples and prompts):
        prompts.insert(0, start_of_sample(data))
    ends = stop_token_ids(tokenizer) if has_examples else []
    streams = [TextStream(tokenizer, ids, NEW_TOKENS, stop_token_ids=ends) for ids, _ in prompts]
    options: SamplingOptions = {**DEFAULT_OPTIONS, "seed": seed}
    texts = [""] * len(streams)
    try:
        for index, text in complete_streams(model, streams, len(streams), **options):
            texts[index] += text
    except UserError as error:  # the model diverged
        texts = [f"none: {error}"] * len(streams)
    return [
        {"step": step, "prompt": name, "text": text}
        for (_, name), text in zip(prompts, texts, strict=True)
    ]


def choose_attention_text(data: Mixture, num_tokens: int) -> list[int]:
    """Return ids of validation text that shows what heads do: varied words that come again."""
    val = data.datasets[0].val
    if val.num_examples:
        examples = itertools.islice(val.examples(), NUM_ATTENTION_TEXTS)
        texts = [token_ids(example).tolist() for example in examples]
    else:
        texts = choose_prompts(data, num_tokens, NUM_ATTENTION_TEXTS)
    return max((ids[:num_tokens] for ids in texts), key=partial(rate_variety, data.tokenizer))


def rate_variety(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    """Rate a text: its repeated tokens with letters, times its different tokens."""
    repeated = [token for index, token in enumerate(ids) if token in ids[:index]]
    words = sum(any(map(str.isalpha, tokenizer.decode([token]))) for token in repeated)
    return words * len(set(ids))


def compute_attention(model: GPT, data: Mixture) -> dict[str, Any]:
    """Compute attention maps of validation text for the page, and name the heads.

    The more heads there are, the shorter is the text: at most MAX_ATTENTION_BYTES.
    """
    config = model.config
    num_tokens = math.isqrt(2 * MAX_ATTENTION_BYTES // (config.num_layers * config.num_heads)) - 1
    num_tokens = min(num_tokens, ATTENTION_TOKENS, config.context_length)
    ids = choose_attention_text(data, max(2, num_tokens))
    tokens = torch.tensor(ids)
    maps = attention_maps(model, tokens.to(next(model.parameters()).device)).float().cpu()
    texts = [data.tokenizer.decode([token]) for token in ids]
    return {
        "labels": [token_label(data.tokenizer, token) for token in ids],
        "shared": [shared_character(data.tokenizer, ids[: end + 1]) for end in range(len(ids))],
        "layers": config.num_layers,
        "heads": config.num_heads,
        "weights": encode_triangles(maps),
        "habits": name_heads(maps.flatten(0, 1), tokens, texts),
    }
