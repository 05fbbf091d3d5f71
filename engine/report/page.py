"""The page of a run: curves, figures, samples and attention in one HTML file without a server."""

import base64
import contextlib
import hashlib
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.core.files import acquire_lock, atomic_write, propose_path, read_json, to_json
from engine.core.settings import read_toml
from engine.core.values import convert
from engine.report.overview import LOSS_KEYS, compare, summarize
from engine.runs.run_files import check_values, list_checkpoints, rank_evaluations, read_records
from engine.training.trainer import Record

WEB_DIR = Path(__file__).with_name("web")
# What a page may do besides running its own scripts.
PAGE_POLICY = "worker-src blob:; img-src data:; base-uri 'none'; form-action 'none'"
MAX_CURVE_POINTS = 400
MAX_LISTED_RECORDS = 50  # of a run on the page that lists runs, besides evaluations
MAX_SHOWN_EVALUATIONS = 40  # with their samples
COMPARED_CURVES = ("val_loss", "val_loss_partial", "val_tokens", "val_tokens_partial")
VALIDATION_CURVES = (*COMPARED_CURVES, "val_bits_per_byte", "val_score")
TRAINING_CURVES = ("train_loss", "learning_rate", "grad_norm", "tokens_per_second")
SETTING_TYPES = {"data": tuple[Path, ...], "mix": tuple[float, ...] | None}
AXIS_KEYS = {"step": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}


def read_run(folder: Path, max_lines: int | None = None) -> Record:
    """Return the content of a run's page; a run that was killed is "stopped", after its last step.

    max_lines is as for :func:`read_records`. Raises UserError for a folder that is not a run.
    """
    settings_path = folder / "config.toml"
    about_path = folder / "about.json"
    if not (settings_path.exists() or (folder / "metrics.jsonl").exists()):
        fix = "Give a folder that train.py made."
        fix = propose_path(folder, Path("out"), "metrics.jsonl", fix)
        raise UserError(f"{folder}: is not a run. {fix}")
    settings = read_toml(settings_path) if settings_path.exists() else {}
    about = convert(read_json(about_path) if about_path.exists() else {}, dict, str(about_path))
    state = convert(about.get("state", {}), dict, f"{about_path}: state")
    check_values(about | state, about_path)
    check_values(settings, settings_path, SETTING_TYPES)
    records = read_records(folder / "metrics.jsonl", max_lines)
    last_step = records[-1]["step"] if records else 0
    if state.get("state") == "training":
        with contextlib.suppress(UserError):  # in use: still training
            acquire_lock(folder / ".lock", folder).release()
            state |= {"state": "stopped", "step": last_step}
    training = [record for record in records if "train_loss" in record]
    evaluations = [record for record in records if {*LOSS_KEYS} <= record.keys()]
    best = find_best(folder, evaluations, settings.get("best_by", "loss"))
    last = evaluations[-1] if evaluations else {}
    val_names = [name for name in last if name.split("/")[0] in VALIDATION_CURVES]
    best_step = best["step"] if best else None
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        "state": state or None,
        "last_step": last_step,
        "num_tokens": training[-1].get("tokens", 0) if training else 0,
        "training": make_curves(training, training, TRAINING_CURVES),
        "validation": make_curves(evaluations, training, val_names),
        "best": best,  # the evaluation of the checkpoint that is used
        "best_step": best_step,
        "settings": settings,
        "about": about,
        "samples": select_samples(read_records(folder / "samples.jsonl"), best_step),
        "frames": read_records(folder / "attention.jsonl"),  # attention at doublings of the step
        "attention": read_attention(folder / "attention.json"),  # of the best
        # What needs the data, and notes on what is missing.
        "memorization": None,
        "notes": [],
    }


def read_attention(path: Path) -> Any:
    """Return the attention of the best checkpoint; None without it. Raises UserError."""
    return convert(read_json(path), Any, str(path)) if path.exists() else None


def find_best(folder: Path, evaluations: Sequence[Record], best_by: str) -> Record | None:
    """Return the evaluation of the checkpoint that is used; None without one."""
    # The checkpoints of these steps, and of later ones that are not yet written, may be used.
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)] or [0]
    kept = [each for each in evaluations if each["step"] in steps or each["step"] > steps[-1]]
    finite = [record for record in kept if None not in record.values()]
    order = rank_evaluations(finite, best_by)
    return finite[order[0]] if order else None


def list_runs(folder: Path) -> list[Record]:
    """Return the content of all runs under a folder, by name, for the page that lists them.

    Samples are those of the best step. A damaged run has a problem instead.
    """
    runs = []
    for path, names, files in os.walk(folder):
        names.sort()
        if not {"config.toml", "metrics.jsonl"} & {*files}:
            continue
        names.clear()  # no run is inside a run
        name = str(Path(path).relative_to(folder))
        try:
            run = read_run(Path(path), MAX_LISTED_RECORDS)
        except (UserError, OSError) as error:
            runs.append({"name": name, "folder": path, "problem": str(error)})
            continue
        run["about"].pop("defaults", None)
        samples = [sample for sample in run["samples"] if sample["step"] == run["best_step"]]
        runs.append(run | {"name": name, "samples": samples, "frames": [], "attention": None})
    return runs


def read_values(records: Sequence[Record], key: str) -> np.ndarray:
    """Read the values of a key, float64 (N,), with NaN where one is missing."""
    return np.array([record.get(key) for record in records], np.float64)


def downsample(values: np.ndarray) -> list[float | None]:
    """Average runs of finite values to at most MAX_CURVE_POINTS; None without one."""
    stride = max(1, math.ceil(len(values) / MAX_CURVE_POINTS))
    if stride == 1:  # NumPy's masked arrays take a millisecond
        return [value if math.isfinite(value) else None for value in values.tolist()]
    padded = np.pad(values, (0, -len(values) % stride), constant_values=math.nan)
    return np.ma.masked_invalid(padded.reshape(-1, stride)).mean(1).tolist()


def make_curves(
    records: Sequence[Record], training: Sequence[Record], names: Sequence[str]
) -> dict[str, Any]:
    """Return the axes of records, interpolated from those of training, and the named curves."""
    steps = read_values(records, "step")
    training_steps = np.append(0, read_values(training, "step"))
    curves: dict[str, Any] = {}
    for name, key in AXIS_KEYS.items():
        values = np.append(0, read_values(training, key))
        axis = steps if name == "step" else np.interp(steps, training_steps, values)
        curves[name] = downsample(axis)
    return curves | {name: downsample(read_values(records, name)) for name in names}


def select_samples(samples: Sequence[Record], best_step: int | None = None) -> list[Record]:
    """Select samples of MAX_SHOWN_EVALUATIONS steps, with first and last, and of the best step."""
    samples = [sample for sample in samples if isinstance(sample.get("text"), str)]
    steps = sorted({sample["step"] for sample in samples})
    count = min(len(steps), MAX_SHOWN_EVALUATIONS)
    shown = {steps[i] for i in np.linspace(0, len(steps) - 1, count).round().astype(int)}
    return [sample for sample in samples if sample["step"] in shown | {best_step}]


def fill_template(name: str, data: Any, **values: str) -> str:
    """Return a page's template with its scripts and style sheets, with data and with values in it.

    Its policy allows only these scripts and styles, by their hashes: a run's text may contain some.
    """
    template = (WEB_DIR / name).read_text(encoding="utf-8")
    for asset in re.findall(r"\{\{([\w.]+\.(?:css|js|LICENSE))\}\}", template):
        content = (WEB_DIR / asset).read_text(encoding="utf-8")
        template = template.replace(f"{{{{{asset}}}}}", content)
    hashes = {"style": "", "script": ""}
    for kind, content in re.findall(r"<(style|script)>(.*?)</\1>", template, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        hashes[kind] += f" 'sha256-{digest}'"
    policy = f"default-src 'none'; style-src{hashes['style']}; script-src{hashes['script']}"
    values["policy"] = f"{policy}; {PAGE_POLICY}"
    # A folder's name may not be UTF-8.
    values["data"] = to_json(data).replace("<", "\\u003c").encode(errors="replace").decode()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def write_page(runs: Sequence[Record], path: Path, is_list: bool = False) -> None:
    """Write the page of a run, of several to compare, or of a list of runs."""
    shown: dict[str, Any] = {"runs": runs, "winner": None, "is_list": is_list}
    if not is_list:
        shown |= {"runs": [run | summarize(run) for run in runs], "winner": compare(runs)}
    atomic_write(path, fill_template("report.html", shown).encode())
