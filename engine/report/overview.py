"""The first screen of a run's page: its state, what it is, how good it is, and what to do next."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from engine.core.cli import escape_controls, shell_command
from engine.core.files import to_json
from engine.training.trainer import Record

LOSS_KEYS = ("val_loss", "val_bits_per_byte")
MIN_CHANGE = 0.005  # of a validation loss, as a fraction, that is not noise
MIN_GAIN = 0.001  # of one run over another, as a fraction, to call it better
MIN_GAP = 0.1  # between validation and training loss, as a fraction, that suggests memorization
MAX_USEFUL_EPOCHS = 4  # Muennighoff et al. 2023


def summarize(run: Record) -> Record:
    """Return what the first screen shows of a run, besides its state and its best evaluation."""
    about = run["about"]
    sentence = ""
    if {"data", "machine", "parameters"} <= about.keys():
        names = " and ".join(dataset.get("dataset", "-") for dataset in about["data"])
        processor = about["machine"].get("GPU") or about["machine"].get("processor", "-")
        size = f"{about['parameters'] / 1e6:,.2f}M parameters"
        sentence = f"{size}, trained on {names} with {processor}."
    return {
        "sentence": sentence,
        "yardsticks": list_yardsticks(run),
        "verdict": judge(run),
        "next": suggest_commands(run),
    }


def compare(runs: Sequence[Record]) -> tuple[str, str]:
    """Return ("good" or "warning", which run is better); none, where their texts differ."""
    ranked = [run for run in runs if run["best"]]
    ranked.sort(key=lambda run: run["best"]["val_bits_per_byte"])
    if len(ranked) < 2:
        return "warning", "Fewer than two of the runs have been evaluated."
    if len({to_json(run["about"].get("text")) for run in runs}) > 1:
        problem = "The runs have different texts: their bits per byte are comparable only roughly"
        return "warning", f"{problem}, and none is called better."
    counts: dict[Any, set[int]] = {}  # of evaluated tokens, by tokenizer
    text_sizes = []  # proportional to bytes
    for run in ranked:
        best = run["best"]
        num_tokens = best.get("val_tokens", 0)
        counts.setdefault(run["about"].get("tokenizer"), set()).add(num_tokens)
        # Nats per token / bits per byte = bytes per token × ln 2.
        text_sizes.append(num_tokens * best["val_loss"] / (best["val_bits_per_byte"] or 1))
    has_other_tokens = any(len(numbers) > 1 for numbers in counts.values())
    if has_other_tokens or max(text_sizes) > (1 + MIN_CHANGE) * min(text_sizes):
        problem = "The best evaluations counted different tokens, and none is called better"
        return "warning", f"{problem}. Train with --eval-tokens 0."
    first, second, *rest = (run["name"] for run in ranked)
    lowest, next_lowest, *_ = (run["best"]["val_bits_per_byte"] for run in ranked)
    gain = 1 - lowest / next_lowest if next_lowest else 0.0
    if gain < MIN_GAIN:
        return "good", f"{first} and {second} are equally good, to 0.1% in bits per byte."
    place = f", the next of {len(ranked)}" if rest else ""
    return "good", f"{first} is better than {second}{place}, by {gain:.1%} in bits per byte."


def format_runs(runs: Sequence[Record]) -> str:
    """Return a table of runs as text, a line each; the problems of damaged ones come last."""
    complete = [run for run in runs if "problem" not in run]
    rows: list[tuple[str, ...]] = [
        ("run", "state", "data", "parameters", "steps", "minutes", "loss", "bits per byte")
    ]
    rows += map(list_cells, complete)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [f"{run['name']}: damaged. {run['problem']}" for run in runs if "problem" in run]
    return "\n".join(map(escape_controls, lines))


def list_cells(run: Record) -> tuple[str, ...]:
    """Return the cells of a run in the table of runs; "-" for what it does not have."""
    state = run["state"] or {}
    best = run["best"] or {}
    data = run["settings"].get("data", "-")
    names = data if isinstance(data, list) else [data]
    return (
        run["name"],
        state.get("state", "-"),
        " ".join(map(str, names)),
        f"{run['about'].get('parameters', 0) / 1e6:.2f}M",
        f"{run['last_step']:,}",
        f"{state.get('seconds', 0) / 60:.1f}",
        *(f"{best[key]:.4f}" if best.get(key) else "-" for key in LOSS_KEYS),
    )


def list_yardsticks(run: Record) -> list[tuple[str, float]]:
    """List (name, bits per byte) of baselines, xz and the model, the worst first."""
    best = run["best"]
    if not (best and best["val_loss"]):
        return []
    ratio = best["val_bits_per_byte"] / best["val_loss"]
    rows = [(name, loss * ratio) for name, loss in run["about"].get("baselines", {}).items()]
    if xz := run["about"].get("xz_bits_per_byte"):
        rows.append(("xz -9", xz))
    rows.append(("this model", best["val_bits_per_byte"]))
    return sorted(rows, key=lambda row: row[1], reverse=True)


def judge(run: Record) -> tuple[str, str, str] | None:
    """Return what two evaluations or more say of a run: its problems, or else its progress.

    That is "good" or "warning", sentences, and a command that helps or "". Losses are compared on
    equal tokens. Longer training is not suggested to a model that needs more text.
    """
    losses, counts = (list_compared(run["validation"], name) for name in ("val_loss", "val_tokens"))
    pairs = zip(losses, counts, strict=True)
    losses = [loss for loss, count in pairs if loss is not None and count == counts[-1]]
    if len(losses) < 2:
        return None
    about = run["about"]
    state = run["state"] or {}
    before, last = losses[-2:]
    lowest = min(losses)
    is_improving = before - last > MIN_CHANGE * before
    num_epochs = run["num_tokens"] / min(about.get("epoch_tokens", [math.inf]))
    shown = run["validation"]["val_loss"][-1] or last
    gap = shown - mean_training_loss(run["training"], run["validation"]["step"][-1])
    problems = []
    if last > lowest * (1 + MIN_CHANGE):
        problems.append(f"the validation loss rose by {last / lowest - 1:.1%} from its lowest")
    if num_epochs > 1 and gap > MIN_GAP * shown:
        problems.append(f"the validation loss is {gap:.2f} above the training loss")
    if num_epochs > MAX_USEFUL_EPOCHS and (problems or not is_improving):
        problems.append(f"the text was read {num_epochs:.1f} times")
    if problems:
        advice = "More text helps, more steps do not: docs/data.md, My text has grown."
        return "warning", f"Too little text: {', '.join(problems)}. {advice}", ""
    longer = state.get("longer", "") if state.get("state") == "done" else ""
    if lowest >= about.get("baselines", {}).get("bigram", math.inf):
        text = "No better than the bigram model: train longer, or on other data."
        return "warning", text, longer
    if is_improving:
        text = f"Still improving: the last evaluation's loss is {1 - last / before:.1%} lower."
        return "good", text, longer
    return "good", "Converged: the last two evaluations are about equal.", ""


def list_compared(validation: Record, name: str) -> list[Any]:
    """List a value of each evaluation; of a last one on more tokens, on those of the others."""
    missing = [None] * len(validation["step"])
    curves = [validation.get(key, missing) for key in (f"{name}_partial", name)]
    return [value if partial is None else partial for partial, value in zip(*curves, strict=True)]


def mean_training_loss(training: Record, step: int) -> float:
    """Return the mean training loss of the last fifth of the steps; NaN without a record."""
    pairs = zip(training["step"], training["train_loss"], strict=True)
    return fmean([loss for at, loss in pairs if loss and 0.8 * step < at <= step] or [math.nan])


def suggest_commands(run: Record) -> list[tuple[str, str]]:
    """List (what for, command) of what to do with a run that has a model."""
    if not run["best"]:
        return []
    folder = Path(run["folder"])
    chat = ["--chat"] if run["about"].get("is_chat") else []
    siblings = sorted(path.parent for path in folder.parent.glob("*/metrics.jsonl"))
    sibling = next((path for path in siblings if path.name != folder.name), None)
    commands: dict[str, tuple[object, ...]] = {
        "Look inside": ("sample.py", folder, "--page"),
        "Chat" if chat else "Generate": ("sample.py", folder, *chat),
        **({"Compare": ("report.py", folder, sibling)} if sibling else {}),
        "Export": ("huggingface.py", "export", folder, f"hf/{folder.resolve().name}"),
    }
    return [(title, shell_command("python", *words)) for title, words in commands.items()]
