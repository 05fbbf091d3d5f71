"""The callback that writes a run's page, and what it records: machine, samples and attention."""

import base64
import itertools
import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.core.device import total_memory
from engine.core.errors import UserError
from engine.core.files import atomic_write, to_json
from engine.core.settings import flatten
from engine.data.batches import Mixture
from engine.data.chats.chat import stop_token_ids
from engine.data.dataset import Dataset
from engine.data.split import prompt_ids, token_ids
from engine.generation.sampling import DEFAULT_OPTIONS, SamplingOptions
from engine.generation.text_batch import complete_streams
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from engine.report.attention_maps import attention_maps, shared_character, token_label
from engine.report.baselines import mixture_baselines
from engine.report.page import collect_run_content, describe_data, write_page
from engine.training.callbacks import start_of_sample, trim_incomplete_characters, truncate_records
from engine.training.checkpoint import load_model
from engine.training.config import TrainConfig
from engine.training.run_dir import find_checkpoint
from engine.training.trainer import Callback, Trainer
from model import GPT

NUM_PROMPTS = 2  # of validation text
PROMPT_TOKENS = 12
NEW_TOKENS = 70
ATTENTION_TOKENS = 32
MAX_LINE_TOKENS = 256  # searched for the start of a line
MAX_ATTENTION_BYTES = 220_000  # before base64
TOKENIZER_KEYS = ("tokenizer", "vocab_size", "pattern", "tokenizer_bytes", "separator")


class Report(Callback):
    """Writes report.html at each evaluation, and about.json and samples.jsonl, which it shows."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Drop the samples after the step that is resumed from: they are written again."""
        truncate_records(trainer.config.out / "samples.jsonl", trainer.step)
        about = to_json(describe_environment(trainer), indent=1)
        atomic_write(trainer.config.out / "about.json", about.encode())
        self.baselines = mixture_baselines(trainer.data)
        self.attention: dict[str, Any] | None = None  # of the best checkpoint

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Write samples and the page after an evaluation; a sharded model is not sampled from."""
        if "val_loss" not in record:
            return
        out = trainer.config.out
        content = {"data": describe_data(trainer.data), "baselines": self.baselines}
        if not trainer.dist_ctx.sharded:
            model = build_decoder(trainer.model)
            samples = sample_for_report(model, trainer.data, trainer.step, trainer.config.seed)
            with open(out / "samples.jsonl", "a", encoding="utf-8") as file:
                file.write("".join(f"{to_json(sample)}\n" for sample in samples))
            if trainer.is_best or self.attention is None:  # None: the run was resumed
                best_model = model if trainer.is_best else load_model(find_checkpoint(out))
                self.attention = compute_attention(best_model, trainer.data)
            content["attention"] = self.attention
        write_page([collect_run_content(out) | content], out / "report.html")


def describe_environment(trainer: Trainer) -> dict[str, Any]:
    """Describe a run when it starts: parameters, machine, data, and defaults of all settings."""
    device = trainer.dist_ctx.device
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
    return {
        "parameters": trainer.model.num_parameters,
        "machine": machine,
        "defaults": flatten(TrainConfig()),
        "tokenizer": trainer.data.tokenizer.fingerprint,
        "text": [trainer.config.mix, *map(text_origin, trainer.data.datasets)],
    }


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


def choose_prompts(data: Mixture, num_tokens: int) -> list[list[int]]:
    """Return the beginnings of lines of validation text as token ids; of examples, the prompts."""
    val = data.datasets[0].val
    if val.num_examples:
        return [*map(prompt_ids, itertools.islice(val.examples(), NUM_PROMPTS + 1))]
    prompts = []
    for index in range(NUM_PROMPTS):
        start = (index + 1) * len(val) // (NUM_PROMPTS + 1)
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


def compute_attention(model: GPT, data: Mixture) -> dict[str, Any]:
    """Compute attention maps of a line of validation text, one byte a weight.

    They are of the first layers and heads that fit into MAX_ATTENTION_BYTES.
    """
    val = data.datasets[0].val
    if val.num_examples:
        ids = token_ids(next(val.examples())).tolist()
    else:
        ids = choose_prompts(data, ATTENTION_TOKENS)[-1]
    ids = ids[: min(ATTENTION_TOKENS, model.config.context_length)]
    tokens = torch.tensor(ids, device=next(model.parameters()).device)
    maps = attention_maps(model, tokens).float().cpu().numpy()  # (L, H, T, T)
    num_layers, num_heads = maps.shape[:2]
    max_maps = MAX_ATTENTION_BYTES // len(ids) ** 2
    kept_heads = min(num_heads, max(1, max_maps // num_layers))
    kept_layers = min(num_layers, max_maps // kept_heads)
    weights = np.nan_to_num(maps[:kept_layers, :kept_heads] * 255).round().astype(np.uint8)
    return {
        "tokens": [token_label(data.tokenizer, token) for token in ids],
        "shared": [shared_character(data.tokenizer, ids[: end + 1]) for end in range(len(ids))],
        "layers": kept_layers,
        "heads": kept_heads,
        "of": [num_layers, num_heads],
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }
