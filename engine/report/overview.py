"""The first screen of a run's page: its state, what it is, how good it is, and what to do next."""

import time
from pathlib import Path

from engine.core.cli import count_noun, shell_command
from engine.training.config import DEFAULT_STEPS
from engine.training.trainer import Record

MIN_CHANGE = 0.005  # of a validation loss, as a fraction, that is not noise
MIN_COPIED_CHARACTERS = 60  # of a passage that suggests copying
COPIED_RATIO = 2  # its length beside the longest match of validation text


def summarize(run: Record) -> Record:
    """Return what the first screen shows of a run, besides its state and its best evaluation."""
    return {
        "sentence": describe_run(run),
        "yardsticks": list_yardsticks(run),
        "verdict": judge(run),
        "next": suggest_commands(run),
    }


def describe_run(run: Record) -> str:
    """Return a sentence: size, shape, data, epochs, machine and date; "" if files are missing."""
    about = run["about"]
    settings = run["settings"]
    if not ("num_layers" in settings and {"data", "machine", "state"} <= about.keys()):
        return ""
    names = " and ".join(dataset["dataset"] for dataset in about["data"])
    num_bytes = sum(int(data["bytes to train on"].replace(",", "")) for data in about["data"])
    epochs = run["num_tokens"] / about["epoch_tokens"]
    layers = count_noun(settings["num_layers"], "layer")
    machine = about["machine"]
    cores = f"{count_noun(machine['cores'], 'core')}, {machine['processor']}"
    updated_at = time.localtime(about["state"]["updated_at"])
    parts = [
        f"{about['parameters'] / 1e6:,.2f}M parameters",
        f"{layers} × {count_noun(settings['num_heads'], 'head')}",
        f"{count_noun(settings['context_length'], 'token')} of context",
        f"on {names} ({num_bytes / 1e6:,.2f} MB, {epochs:.2g} epochs)",
        machine.get("GPU", cores),
        time.strftime("%d %b %Y, %H:%M", updated_at).lstrip("0"),
    ]
    return f"{', '.join(parts)}."


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


def judge(run: Record) -> tuple[str, str] | None:
    """Return a verdict on a run, ("good" or "warning", text), from its evaluations; or None."""
    curve = run["validation"].get("val_loss", {"mean": []})["mean"]
    losses = [loss for loss in curve if loss is not None]
    if not losses:
        return None
    is_training = bool(run["state"]) and run["state"]["state"] == "training"
    lowest = min(losses)
    bigram = run["about"].get("baselines", {}).get("bigram")
    copied, usual = (run["memorization"] or {}).get("longest", (0, 0))
    if copied >= MIN_COPIED_CHARACTERS and copied > COPIED_RATIO * usual:
        text = f"a sample has {copied} characters in a row of the training text"
        return "warning", f"Copies its text: {text}, validation text at most {usual}."
    if bigram and lowest >= bigram:
        return "warning", "No better than bigrams so far: it needs longer training, or other data."
    if losses[-1] > lowest * (1 + MIN_CHANGE):
        step = run["validation"]["step"][curve.index(lowest)]
        text = f"Overfitting since step {step:,.0f}: the validation loss rises"
        return "warning", f"{text}. sample.py and export use step {run['best_step']:,}."
    gain = f" {1 - lowest / bigram:.0%} below bigrams." if bigram else ""
    if len(losses) < 2:
        return "good", f"Evaluated once.{gain}"
    if losses[-2] - losses[-1] > MIN_CHANGE * losses[-2]:
        return "good", f"Still improving{'' if is_training else ': train longer'}.{gain}"
    return "good", f"Converged: the last two evaluations are about equal.{gain}"


def suggest_commands(run: Record) -> list[tuple[str, str]]:
    """List (what for, command) of what to do with a run that has a model."""
    if not run["best"]:
        return []
    folder = Path(run["folder"])
    settings = run["settings"]
    chat = ["--chat"] if run["about"].get("is_chat") else []
    limit = "minutes" if settings.get("minutes") else "steps"
    longer = 2 * (settings.get(limit) or DEFAULT_STEPS)
    commands: dict[str, tuple[object, ...]] = {
        "Look inside": ("sample.py", folder, "--page"),
        "Chat" if chat else "Generate": ("sample.py", folder, *chat),
        "Compare": ("report.py", folder, "out/OTHER"),
        "Export": ("huggingface.py", "export", folder, f"hf/{folder.resolve().name}"),
        "Train longer": ("train.py", "--out", folder, "--resume", f"--{limit}", longer),
    }
    return [(title, shell_command("python", *words)) for title, words in commands.items()]
