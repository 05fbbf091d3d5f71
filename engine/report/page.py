"""A run's page: records, settings, samples and attention in one HTML file, which needs no server and no network."""

import base64
import json
import math
import os
import platform
import re
import tomllib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.core.device import total_memory
from engine.core.errors import UserError
from engine.core.files import read_json, to_json, write_whole
from engine.core.settings import flatten
from engine.data.chat import ends_of, prompt_of
from engine.data.dataset import Examples
from engine.data.mixture import Mixture
from engine.generation.attention_maps import attention_maps, visible
from engine.generation.generate import complete, opening
from engine.report.baselines import baselines
from engine.report.server import own_scripts_alone
from engine.training.run_dir import read_records

WEB = Path(__file__).with_name("web")
POINTS = 400  # of a curve: as many as a small screen has pixels for
MAP_BYTES = 220_000  # of attention; a third more as base64
EVALUATIONS = 40  # whose samples are shown
LONGEST = 2000  # characters of a sample that are shown
PROMPTS, PROMPT_TOKENS, SAMPLE_TOKENS = 2, 12, 70  # of validation text, beside the opening; and what comes after
SENTENCE_TOKENS = 32  # whose attention is shown
LARGE = 2**53  # up to which JavaScript's numbers count
MOST_SECONDS = 1e9  # of a run: timedelta holds not many more
LINE = 256  # tokens within which a line of validation text should begin
CURVES = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second")


# What a run keeps for its page.


def about(run: Any) -> dict[str, Any]:
    """What is known of a run when it starts: its size, the defaults of its settings, and the machine."""
    device, memory = run.world.device, f"{total_memory(torch.device('cpu')) / 2**30:,.0f} GiB"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {"processor": processor_name(), "cores": cores, "memory": memory, "device": str(device)}
    if device.type == "cuda":
        machine["GPU"] = f"{torch.cuda.get_device_name(device)}, {total_memory(device) / 2**30:,.0f} GiB"
    machine |= {"processes": run.world.size, "system": platform.platform(terse=True)}
    machine |= {"Python": platform.python_version(), "PyTorch": torch.__version__}
    defaults = flatten(type(run.config)())
    return {"parameters": run.model.num_parameters, "machine": machine, "defaults": defaults}


def processor_name() -> str:
    """The processor's name, as far as the system tells."""
    known = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", known.read_text(errors="replace"), re.M) if known.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def beginnings(dataset: Mixture, length: int) -> list[list[int]]:
    """Token ids of so many tokens that lines of validation text begin with; of examples, their prompts."""
    val, tokenizer, found = dataset.datasets[0].val, dataset.tokenizer, []
    if isinstance(val, Examples):
        examples = [val.example(index).tolist() for index in range(min(PROMPTS + 1, val.num_examples))]
        return [prompt_of(ids) for ids in examples]
    for index in range(PROMPTS):
        start = index * len(val) // PROMPTS
        ids = val[start : start + LINE + length].tolist()
        ends = [at for at, token in enumerate(ids[:LINE]) if tokenizer.decode_bytes([token]).endswith(b"\n")]
        first = ends[0] + 1 if start and ends else 0
        line = [token for token in ids[first : first + length] if token != tokenizer.end_of_text]
        found.append(line or ids[:length])
    return found


def new_samples(model: Any, dataset: Mixture, step: int, seed: int) -> list[dict[str, Any]]:
    """What the model writes after the same prompts each time: {"step", "prompt", "text"} of each, drawn alike."""
    tokenizer, examples = dataset.tokenizer, isinstance(dataset.datasets[0].val, Examples)
    prompts = [(tokenizer.decode(ids), ids) for ids in beginnings(dataset, PROMPT_TOKENS) if ids]
    if not (examples and prompts):
        prompts.insert(0, ("", opening(tokenizer, dataset.manifest["splits"]["train"]["documents"])))
    ends = ends_of(tokenizer) if examples else []
    choice = {"temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": seed}
    limited = [(ids, SAMPLE_TOKENS) for _, ids in prompts]
    try:
        found = complete(model, tokenizer, limited, len(prompts), ends=ends, **choice)
        texts = {index: text for index, text, _ in found}
    except ValueError as error:  # it diverged
        texts = dict.fromkeys(range(len(prompts)), f"none: {error}")
    return [{"step": step, "prompt": prompt, "text": texts[index]} for index, (prompt, _) in enumerate(prompts)]


def attention_of(model: Any, dataset: Mixture) -> dict[str, Any]:
    """Who attends to whom in a line of validation text: a byte for each weight, of the first heads that fit."""
    val, tokenizer = dataset.datasets[0].val, dataset.tokenizer
    if isinstance(val, Examples):
        ids = [max(token, ~token) for token in val.example(0).tolist()]
    else:
        ids = beginnings(dataset, SENTENCE_TOKENS)[-1]
    ids = ids[: min(SENTENCE_TOKENS, model.config.context_length)]
    tokens = torch.tensor(ids, device=next(model.parameters()).device)
    maps = attention_maps(model, tokens).float().cpu().numpy()  # (L, H, T, T)
    (layers, heads), fit = maps.shape[:2], MAP_BYTES // len(ids) ** 2
    kept_heads = min(heads, max(1, fit // layers))
    kept_layers = min(layers, fit // kept_heads)
    weights = np.nan_to_num(maps[:kept_layers, :kept_heads] * 255).round().astype(np.uint8)
    return {
        "tokens": [visible(tokenizer, token) for token in ids],
        "layers": kept_layers,
        "heads": kept_heads,
        "of": [layers, heads],
        "weights": base64.b64encode(weights.tobytes()).decode(),
    }


# What the page shows.


def describe_run(
    folder: Path, dataset: Mixture | None = None, attention: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """All that the page shows of the run in a folder. Raises UserError if there is none, or its settings are damaged.

    ``more`` may be ``notes``: lines that say what is missing; ``baselines``: {name: nats per token}; and ``copies``:
    {"samples": for each of the last samples [(start, length, where), …] in characters, "yardstick": a line}.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give a run's, such as out/stdlib, or train one: python train.py")
    settings, metrics = folder / "config.toml", folder / "metrics.jsonl"
    if not (settings.exists() or metrics.exists()):
        raise UserError(f"{folder} holds no run: neither config.toml nor metrics.jsonl; give a folder of train.py's")
    try:
        values = tomllib.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        values = json.loads(json.dumps(values, default=str))  # TOML has dates too
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{settings} is not valid TOML: {error}") from None
    known = read_json(folder / "about.json") if (folder / "about.json").exists() else {}
    known = {name: value for name, value in known.items() if value} if isinstance(known, dict) else {}
    records, samples = (records_of(folder / name) for name in ("metrics.jsonl", "samples.jsonl"))
    training = [record for record in records if "train_loss" in record]
    evaluations = [record for record in records if "val_loss" in record]
    return {
        "name": folder.resolve().name,
        "training": training_curves(training),
        "validation": validation_curves(evaluations, training),
        "figures": figures(training, evaluations, values, known),
        "settings": values,
        "defaults": known.get("defaults", {}),
        "machine": known.get("machine", {}),
        "data": describe_data(dataset) if dataset else [],
        "samples": shown_samples(samples),
        "attention": attention,
        "notes": [],
        "baselines": {},
        "copies": None,
    } | more


def records_of(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl file, by their steps."""
    found = [record for record in read_records(path)[0] if type(record["step"]) is int and 0 <= record["step"] < LARGE]
    return sorted(found, key=lambda record: record["step"])


def numbers(records: Sequence[dict[str, Any]], key: str) -> np.ndarray:
    """The records' values under a key, float64 (N,); NaN for what is missing or not finite."""
    values = [record.get(key) for record in records]
    usable = [type(value) is float or (type(value) is int and abs(value) < LARGE) for value in values]
    found = np.array([value if ok else math.nan for value, ok in zip(values, usable, strict=True)], np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def axes(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Steps, tokens and seconds of training's records, none falling; (N,) each, by their names."""
    steps, found = numbers(records, "step"), {}
    for name, key in (("step", "step"), ("tokens", "tokens"), ("seconds", "elapsed_seconds")):
        values = numbers(records, key)
        known = np.isfinite(values)
        if known.any():
            found[name] = np.maximum.accumulate(np.interp(steps, steps[known], values[known]))
    return found


def thinned(values: np.ndarray) -> dict[str, list[float | None]]:
    """At most POINTS means of as many records each, and their least and most if these are several; null for none."""
    starts = np.linspace(0, len(values), min(len(values), POINTS), endpoint=False).astype(int)
    if not len(starts):
        return {"mean": []}
    finite = np.isfinite(values)
    counts = np.add.reduceat(finite, starts, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {"mean": np.add.reduceat(np.where(finite, values, 0.0), starts) / counts}
    if len(starts) < len(values):
        found |= {"min": np.fmin.reduceat(values, starts), "max": np.fmax.reduceat(values, starts)}
    return {name: rounded(numbers_) for name, numbers_ in found.items()}


def rounded(values: np.ndarray) -> list[float | None]:
    """Numbers as JSON has them, to as many digits as a reader needs."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def training_curves(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each of CURVES, thinned, over steps, tokens and seconds."""
    found = {name: [round(x, 3) for x in thinned(values)["mean"]] for name, values in axes(records).items()}
    return found | {key: thinned(numbers(records, key)) for key in CURVES}


def validation_curves(records: Sequence[dict[str, Any]], training: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The losses of evaluations, in nats per token and bits per byte, and on each dataset of a mix."""
    steps, known = numbers(records, "step"), axes(training)
    places = {"step": steps} | {
        name: np.interp(steps, np.append(0, known["step"]), np.append(0, values))
        for name, values in known.items()
        if name != "step"
    }
    keys = [key for key in (records[-1] if records else ()) if key.split("/")[0] in ("val_loss", "val_bits_per_byte")]
    return {name: [round(x, 3) for x in thinned(values)["mean"]] for name, values in places.items()} | {
        key: thinned(numbers(records, key)) for key in keys
    }


def figures(training: Sequence, evaluations: Sequence, settings: dict[str, Any], known: dict[str, Any]) -> dict:
    """What a run has come to, {what: amount}, both for a person."""
    found: dict[str, str] = {}
    losses, steps = numbers(evaluations, "val_loss"), numbers(evaluations, "step")
    if np.isfinite(losses).any():
        best = int(np.nanargmin(losses))
        found["validation loss, nats per token"] = f"{losses[-1]:.4f}"
        found["perplexity"] = f"{math.exp(min(losses[-1], 700)):,.2f}"
        found["bits per byte"] = f"{numbers(evaluations, 'val_bits_per_byte')[-1]:.4f}"
        found["lowest validation loss"] = f"{losses[best]:.4f} at step {steps[best]:,.0f}"
    if training:
        last, lately = training[-1], numbers(training, "train_loss")[-max(1, len(training) // 20) :]
        if np.isfinite(lately).any():
            found["training loss, mean of the last 5%"] = f"{np.nanmean(lately):.4f}"
        planned = f" of {settings['steps']:,}" if isinstance(settings.get("steps"), int) else ""
        found["steps"] = f"{max(one['step'] for one in (last, *evaluations[-1:])):,}{planned}"
        amounts = {name: numbers([last], name)[0] for name in ("tokens", "elapsed_seconds", "skipped_steps")}
        found["tokens"] = f"{amounts['tokens']:,.0f}"
        seconds = min(np.nan_to_num(amounts["elapsed_seconds"]), MOST_SECONDS)
        found["hours:minutes:seconds"] = str(timedelta(seconds=round(seconds)))
        speeds = numbers(training, "tokens_per_second")
        found["tokens per second, median"] = (
            f"{np.nanmedian(np.append(speeds, 0) if np.isnan(speeds).all() else speeds):,.0f}"
        )
        found["skipped steps (gradients not finite)"] = f"{amounts['skipped_steps']:,.0f}"
    if isinstance(known.get("parameters"), int):
        found["parameters"] = f"{known['parameters']:,}"
    return {what: amount for what, amount in found.items() if "nan" not in amount}


def describe_data(dataset: Mixture) -> list[dict[str, str]]:
    """What a run was trained on, a table for each dataset."""
    return [
        {
            "dataset": str(one.path),
            "share of sequences": f"{share:.3g}",
            "tokens to train on": f"{len(one.train):,}",
            "tokens to validate on": f"{len(one.val):,}",
            "documents": f"{sum(counts['documents'] for counts in one.manifest['splits'].values()):,}",
            "bytes per token": f"{one.bytes_per_token('train'):.2f}",
            "vocabulary": f"{one.tokenizer.vocab_size:,} ({one.tokenizer.kind})",
        }
        for one, share in zip(dataset.datasets, dataset.shares, strict=True)
    ]


def baseline_losses(dataset: Mixture) -> dict[str, float]:
    """The losses of the simplest models, {name: nats per token}; on a mix, as its sequences are drawn."""
    each = [baselines(one) for one in dataset.datasets]
    return {name: dataset.mean(one[name] for one in each) for name in each[0]}


def shown_samples(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples of at most EVALUATIONS steps, the first and the last among them."""
    samples = [one for one in samples if {"prompt", "text"} <= one.keys()]
    steps = sorted({one["step"] for one in samples})
    places = np.linspace(0, len(steps) - 1, min(len(steps), EVALUATIONS)).round().astype(int)
    kept = {steps[place] for place in places}
    texts = ("prompt", "text")
    chosen = [one for one in samples if one["step"] in kept]
    return [{"step": one["step"]} | {name: str(one[name])[:LONGEST] for name in texts} for one in chosen]


def write_page(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Make the page of a run, or of several to compare, whole or not at all.

    Its policy forbids all but the scripts and styles that are in the template, whatever a run's files may hold.
    """
    template = (WEB / "report.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(uPlot\S+)\}\}", lambda found: (WEB / found[1]).read_text(encoding="utf-8"), template)
    policy = own_scripts_alone(page)
    data = to_json({"runs": list(runs)}).replace("<", "\\u003c")
    for name, value in (("policy", policy), ("data", data)):
        page = page.replace(f"{{{{{name}}}}}", value)
    write_whole(path, page.encode(errors="replace"))  # JSON can spell half a character
