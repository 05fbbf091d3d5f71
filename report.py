"""Make a page to look at of a run, or of several to compare: out/<run>/ → report.html.

python report.py out/NAME                     out/NAME/report.html, as the run makes it, with what its samples copy
python report.py out/A out/B … [--out FILE]   compare.html beside out/A
"""

from engine.core.cli import run_command, wait_briefly

if __name__ == "__main__":
    wait_briefly("decode")  # before torch is loaded

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.batches import fitting
from engine.data.mixture import Mixture, as_paths, open_mixture
from engine.report.memorization import SHORTEST, Place, copied, validation_texts
from engine.report.page import attention_of, baseline_losses, describe_data, describe_run, write_page
from engine.training.checkpoint import Checkpoint, load_model
from engine.training.run_dir import find_checkpoint
from model import GPT, ModelConfig


@dataclass(frozen=True)
class ReportConfig:
    """Make a page to look at of a run, or of several to compare."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # Run folders: of one, all there is; of several, what differs.
    out: Path | None = None  # The page; None: report.html in the run's folder, or compare.html beside the first.

    def __post_init__(self):
        if not self.runs:
            raise UserError("give a run's folder, such as out/stdlib, or several to compare")
        if self.out and (self.out.suffix != ".html" or not self.out.parent.is_dir()):
            wrong = "is in no folder; make that first" if self.out.suffix == ".html" else "is a page; end it in .html"
            raise UserError(f"--out {self.out} {wrong}")


def main(arguments: list[str] | None = None) -> None:
    """Make the page that the command line says."""
    config = parse(ReportConfig, arguments)
    print(report(config))


def report(config: ReportConfig) -> Path:
    """Make the page; its path. Raises UserError for a folder that holds no run."""
    first, *others = config.runs
    if others:
        runs = [describe_run(folder) for folder in config.runs]
        path = config.out or first.resolve().parent / "compare.html"
    else:
        runs, path = [whole_run(first)], config.out or first / "report.html"
    write_page(runs, path)
    return path


def whole_run(folder: Path) -> dict[str, Any]:
    """All that can be shown of a run; its notes say what can't be, and why. Raises UserError if there is none."""
    run = describe_run(folder)
    try:
        dataset = dataset_of(run["settings"])
        found, missing = checkpoint_of(folder)
        if found and found.state["data_sha256"] != dataset.sha256:
            raise UserError(f"{dataset.path} is not the text that it was trained on; prepare that again")
        length, cut = run["settings"].get("context_length"), run["settings"].get("long_examples") == "cut"
        trained_on = fitting(dataset, length, cut) if isinstance(length, int) else dataset
        run |= {"data": describe_data(dataset), "baselines": baseline_losses(trained_on)}
        run["copies"] = copies_of(run, dataset)
        if missing:
            raise missing
        run["attention"] = attention_of(load_model(found, ModelConfig, GPT), dataset)
    except ValueError as error:
        run["notes"].append(f"The {'attention' if run['data'] else 'data'} can't be shown: {error}.")
    return run


def checkpoint_of(folder: Path) -> tuple[Checkpoint | None, ValueError | None]:
    """The best checkpoint of a run; or why there is none."""
    try:
        return find_checkpoint(folder), None
    except ValueError as error:
        return None, error


def copies_of(run: dict[str, Any], dataset: Mixture) -> dict[str, Any] | None:
    """What the last samples have word for word of the training text, and the yardstick: what validation text has."""
    last = [one["text"] for one in run["samples"] if one["step"] == run["samples"][-1]["step"]]
    texts = [text.encode(errors="replace").decode() for text in last]  # half a character is none
    if not texts:
        return None
    pieces = validation_texts(dataset.datasets, texts)
    found = copied([*texts, *pieces], dataset.datasets)
    longest = [max((one.length for one in runs), default=0) for runs in found[len(texts) :]]
    yardstick = (
        f"The yardstick, validation text in {len(pieces)} pieces as long as these samples: their longest runs have "
        f"{', '.join(map(str, longest))} characters (0: none of {SHORTEST} bytes). So much is common; longer is copied."
    )
    shown = [[(one.start, one.length, format_place(one.place)) for one in runs] for runs in found[: len(texts)]]
    return {"samples": shown, "yardstick": yardstick}


def format_place(place: Place) -> str:
    """Where a run stands in the training data."""
    document = "" if place.document is None else f"document {place.document:,}, "
    return f"{document}byte {place.byte:,} of the text, token {place.token:,} of {place.shard.name}"


def dataset_of(settings: dict[str, Any]) -> Mixture:
    """The data that a run of these settings was trained on. Raises UserError if it is not where the run had it."""
    data, mix = settings.get("data", []), settings.get("mix")
    named = data if isinstance(data, list) and all(isinstance(one, str) for one in data) else [str(data)]
    shares = mix if isinstance(mix, list) and all(isinstance(one, float) for one in mix) else None
    return open_mixture(as_paths(named, shares), shares)


if __name__ == "__main__":
    run_command(main)
