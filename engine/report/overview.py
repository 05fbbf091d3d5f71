"""The first screen of a run's page: its state, what it is, how good it is, and what to do next."""

from pathlib import Path

from engine.core.cli import shell_command
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
    """Return a sentence: size, data and processor; "" if files are missing."""
    about = run["about"]
    if not {"data", "machine", "parameters"} <= about.keys():
        return ""
    names = " and ".join(dataset["dataset"] for dataset in about["data"])
    machine = about["machine"]
    processor = machine.get("GPU", machine["processor"])
    return f"{about['parameters'] / 1e6:,.2f}M parameters, trained on {names} with {processor}."


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
    """Return a verdict on a run, ("good" or "warning", text), from two evaluations or more."""
    curve = run["validation"].get("val_loss", {"mean": []})
    losses = [loss for loss in curve["mean"] if loss is not None]
    if len(losses) < 2:
        return None
    lowest = min(losses)
    bigram = run["about"].get("baselines", {}).get("bigram")
    copied, usual = (run["memorization"] or {}).get("longest", (0, 0))
    if copied >= MIN_COPIED_CHARACTERS and copied > COPIED_RATIO * usual:
        text = f"a sample has {copied} characters in a row of the training text"
        return "warning", f"Copies its text: {text}, validation text at most {usual}."
    if bigram and lowest >= bigram:
        return "warning", "No better than bigrams so far: it needs longer training, or other data."
    if losses[-1] > lowest * (1 + MIN_CHANGE):
        text = f"sample.py and export use step {run['best_step']:,}"
        return "warning", f"Overfitting: the validation loss rises. {text}."
    if losses[-2] - losses[-1] > MIN_CHANGE * losses[-2]:
        return "good", "Still improving: longer training would help."
    return "good", "Converged: the last two evaluations are about equal."


def suggest_commands(run: Record) -> list[tuple[str, str]]:
    """List (what for, command) of what to do with a run that has a model."""
    if not run["best"]:
        return []
    folder = Path(run["folder"])
    chat = ["--chat"] if run["about"].get("is_chat") else []
    commands: dict[str, tuple[object, ...]] = {
        "Look inside": ("sample.py", folder, "--page"),
        "Chat" if chat else "Generate": ("sample.py", folder, *chat),
        "Compare": ("report.py", folder, "out/OTHER"),
        "Export": ("huggingface.py", "export", folder, f"hf/{folder.resolve().name}"),
    }
    return [(title, shell_command("python", *words)) for title, words in commands.items()]
