"""The page of a run: curves, figures, samples and attention in one HTML file without a server."""

import json
import math
import re
import tomllib
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.core.files import atomic_write, read_json, to_json
from engine.data.mixture import Mixture
from engine.report.security import content_security_policy
from engine.training.run_dir import read_records

WEB_DIR = Path(__file__).with_name("web")
MAX_CURVE_POINTS = 400
MAX_SHOWN_EVALUATIONS = 40  # with their samples
MAX_SAMPLE_CHARACTERS = 2000  # of a sample
MAX_EXACT_INTEGER = 2**53  # of JavaScript
MAX_SECONDS = 1e9  # of a timedelta
TRAINING_CURVES = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second")
AXIS_KEYS = {"step": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}

Record = dict[str, Any]


def describe_run(folder: Path, data: Mixture | None = None, **extras: Any) -> dict[str, Any]:
    """Collect what the page shows of a run. Raises UserError if there is none, or it is corrupted.

    The extras are attention, baselines, memorization, and notes on what is missing.
    """
    settings_path = folder / "config.toml"
    about_path = folder / "about.json"
    if not (settings_path.exists() or (folder / "metrics.jsonl").exists()):
        raise UserError(f"{folder}: is not a run. Give a folder that train.py made.")
    try:
        text = settings_path.read_text(encoding="utf-8") if settings_path.exists() else ""
        settings = json.loads(json.dumps(tomllib.loads(text), default=str))  # TOML has dates
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{settings_path}: corrupted, not valid TOML ({error}).") from None
    about = read_json(about_path) if about_path.exists() else {}
    about = about if isinstance(about, dict) else {}
    records = read_sorted_records(folder / "metrics.jsonl")
    training = [record for record in records if "train_loss" in record]
    evaluations = [record for record in records if "val_loss" in record]
    return {
        "name": folder.resolve().name,
        "training": training_curves(training),
        "validation": validation_curves(evaluations, training),
        "figures": key_figures(training, evaluations, settings, about),
        "settings": settings,
        "defaults": about.get("defaults") or {},
        "machine": about.get("machine") or {},
        "data": describe_data(data) if data else [],
        "samples": select_samples(read_sorted_records(folder / "samples.jsonl")),
        "attention": None,
        "notes": [],
        "baselines": {},
        "memorization": None,
        **extras,
    }


def read_sorted_records(path: Path) -> list[Record]:
    """Read the records of a .jsonl file in the order of their steps."""
    records = [
        record
        for record in read_records(path)[0]
        if type(record["step"]) is int and 0 <= record["step"] < MAX_EXACT_INTEGER
    ]
    return sorted(records, key=lambda record: record["step"])


def read_values(records: Sequence[Record], key: str) -> np.ndarray:
    """Read the values of a key, float64 (N,); NaN if a value is missing or not finite."""
    values = []
    for record in records:
        value = record.get(key)
        is_number = type(value) is float or (type(value) is int and value.bit_length() < 64)
        values.append(value if is_number else math.nan)
    array = np.array(values, np.float64)
    return np.where(np.isfinite(array), array, math.nan)


def downsample(values: np.ndarray) -> dict[str, list[float | None]]:
    """Average runs of values, with their minima and maxima, to at most MAX_CURVE_POINTS."""
    stride = max(1, math.ceil(len(values) / MAX_CURVE_POINTS))
    padded = np.pad(values, (0, -len(values) % stride), constant_values=math.nan)
    groups = np.ma.masked_invalid(padded.reshape(-1, stride))
    columns = {"mean": groups.mean(1)}
    if stride > 1:
        columns |= {"min": groups.min(1), "max": groups.max(1)}
    return {name: to_list(column.filled(math.nan)) for name, column in columns.items()}


def to_list(values: np.ndarray) -> list[float | None]:
    """Round numbers for a reader; None, which is JSON's null, for NaN."""
    return [None if math.isnan(value) else float(f"{value:.6g}") for value in values.tolist()]


def read_axes(records: Sequence[Record]) -> dict[str, np.ndarray]:
    """Read the steps, tokens and seconds of training records, increasing, (N,) each."""
    steps = read_values(records, "step")
    axes = {}
    for name, key in AXIS_KEYS.items():
        values = read_values(records, key)
        is_known = np.isfinite(values)
        if is_known.any():
            values = np.interp(steps, steps[is_known], values[is_known])
            axes[name] = np.maximum.accumulate(values)
    return axes


def training_curves(records: Sequence[Record]) -> dict[str, Any]:
    """Return the curves of training, and their axes."""
    axes = {name: downsample(values)["mean"] for name, values in read_axes(records).items()}
    return axes | {key: downsample(read_values(records, key)) for key in TRAINING_CURVES}


def validation_curves(records: Sequence[Record], training: Sequence[Record]) -> dict[str, Any]:
    """Return the curves of evaluations, also of each dataset of a mix, on the axes of training."""
    steps = read_values(records, "step")
    axes = read_axes(training)
    columns: dict[str, Any] = {"step": downsample(steps)["mean"]}
    for name in axes.keys() - columns.keys():
        values = np.interp(steps, np.append(0, axes["step"]), np.append(0, axes[name]))
        columns[name] = downsample(values)["mean"]
    for key in records[-1] if records else ():
        if key.split("/")[0] in ("val_loss", "val_bits_per_byte"):
            columns[key] = downsample(read_values(records, key))
    return columns


def key_figures(
    training: Sequence[Record], evaluations: Sequence[Record], settings: Record, about: Record
) -> dict[str, str]:
    """Return the figures of a run for a person. A figure without a finite number is left out."""
    figures = {}
    losses = read_values(evaluations, "val_loss")
    if np.isfinite(losses).any():
        bits = read_values(evaluations, "val_bits_per_byte")[-1]
        best = int(np.nanargmin(losses))
        figures["validation loss, nats per token"] = f"{losses[-1]:.4f}"
        figures["perplexity"] = f"{math.exp(min(losses[-1], 700)):,.2f}"
        figures["bits per byte"] = f"{bits:.4f}"
        best_step = evaluations[best]["step"]
        figures["lowest validation loss"] = f"{losses[best]:.4f} at step {best_step:,}"
    if training:
        recent = finite_values(training[-max(1, len(training) // 20) :], "train_loss")
        speeds = finite_values(training, "tokens_per_second")
        seconds = min([*finite_values(training[-1:], "elapsed_seconds"), MAX_SECONDS])
        last_step = max(record["step"] for record in (training[-1], *evaluations[-1:]))
        planned = settings.get("steps")
        planned_text = f" of {planned:,}" if isinstance(planned, int) else ""
        figures["training loss, mean of the last 5%"] = f"{np.mean(recent or math.nan):.4f}"
        figures["steps"] = f"{last_step:,}{planned_text}"
        figures["tokens"] = f"{read_values(training, 'tokens')[-1]:,.0f}"
        figures["hours:minutes:seconds"] = str(timedelta(seconds=round(seconds)))
        figures["tokens per second, median"] = f"{np.median(speeds or math.nan):,.0f}"
        skipped = read_values(training, "skipped_steps")[-1]
        figures["skipped steps (gradients not finite)"] = f"{skipped:,.0f}"
    if isinstance(about.get("parameters"), int):
        figures["parameters"] = f"{about['parameters']:,}"
    return {name: figure for name, figure in figures.items() if "nan" not in figure}


def finite_values(records: Sequence[Record], key: str) -> list[float]:
    """Read the finite values of a key."""
    values = read_values(records, key)
    return values[np.isfinite(values)].tolist()


def describe_data(data: Mixture) -> list[dict[str, str]]:
    """Return a table for each dataset that a run was trained on."""
    return [
        {
            "dataset": str(dataset.path),
            "share of sequences": f"{weight:.3g}",
            "tokens to train on": f"{len(dataset.train):,}",
            "tokens to validate on": f"{len(dataset.val):,}",
            "documents": f"{sum(n['documents'] for n in dataset.manifest['splits'].values()):,}",
            "bytes per token": f"{dataset.bytes_per_token('train'):.2f}",
            "vocabulary": f"{dataset.tokenizer.vocab_size:,} ({dataset.tokenizer.kind})",
        }
        for dataset, weight in zip(data.datasets, data.weights, strict=True)
    ]


def select_samples(samples: Sequence[Record]) -> list[Record]:
    """Select the samples of at most MAX_SHOWN_EVALUATIONS steps, with the first and the last."""
    samples = [sample for sample in samples if sample.keys() >= {"prompt", "text"}]
    steps = sorted({sample["step"] for sample in samples})
    count = min(len(steps), MAX_SHOWN_EVALUATIONS)
    shown = {steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)}
    return [
        {
            "step": sample["step"],
            "prompt": str(sample["prompt"])[:MAX_SAMPLE_CHARACTERS],
            "text": str(sample["text"])[:MAX_SAMPLE_CHARACTERS],
        }
        for sample in samples
        if sample["step"] in shown
    ]


def write_page(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the page of a run, or of several to compare.

    Its policy forbids all scripts and styles but the template's, whatever a run's files hold.
    """
    template = (WEB_DIR / "report.html").read_text(encoding="utf-8")
    for name in re.findall(r"\{\{(uPlot\S+)\}\}", template):
        content = (WEB_DIR / name).read_text(encoding="utf-8")
        template = template.replace(f"{{{{{name}}}}}", content)
    data = to_json({"runs": list(runs)}).replace("<", "\\u003c")
    page = template.replace("{{policy}}", content_security_policy(template))
    page = page.replace("{{data}}", data)
    atomic_write(path, page.encode(errors="replace"))  # JSON can spell half a character
