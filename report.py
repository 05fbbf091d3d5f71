"""Write the page of a run, or of several to compare: out/<run>/ → report.html.

python report.py out/NAME                     out/NAME/report.html, with memorized passages
python report.py out/A out/B … [--out FILE]   out/compare.html
"""

from engine.core.cli import run_command, tune_openmp_spinning

if __name__ == "__main__":
    tune_openmp_spinning("decode")  # before torch is loaded

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.batches import drop_long_examples
from engine.data.mixture import Mixture, as_paths, open_mixture
from engine.report.baselines import mixture_baselines
from engine.report.memorization import MIN_PASSAGE_BYTES, find_passages, sample_validation
from engine.report.page import describe_data, describe_run, write_page
from engine.report.samples import compute_attention
from engine.training.checkpoint import load_model, open_checkpoint
from engine.training.run_dir import find_checkpoint, list_checkpoints


@dataclass(frozen=True)
class ReportConfig:
    """Write the page of a run, or of several to compare."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # Run folders; several are compared.
    out: Path | None = None  # The page. None: RUN/report.html, or compare.html beside the first.

    def __post_init__(self) -> None:
        if not self.runs:
            raise UserError("runs: must name at least one folder. Give one, such as out/stdlib.")
        if self.out and self.out.suffix != ".html":
            raise UserError(f"--out: must end in .html (got {self.out}).")
        if self.out and not self.out.parent.is_dir():
            raise UserError(f"--out: the folder {self.out.parent} was not found. Create it first.")


def main(arguments: list[str] | None = None) -> None:
    """Write the page that the command line names, and print its path."""
    print(report(parse(ReportConfig, arguments)))


def report(config: ReportConfig) -> Path:
    """Write a page and return its path. Raises UserError for a folder that is not a run."""
    first = config.runs[0]
    if len(config.runs) == 1:
        path = config.out or first / "report.html"
        runs = [describe_fully(first)]
    else:
        path = config.out or first.resolve().parent / "compare.html"
        runs = [describe_run(folder) for folder in config.runs]
    write_page(runs, path)
    return path


def describe_fully(folder: Path) -> dict[str, Any]:
    """Describe a run with its data and its model, and note what is missing.

    Raises UserError if the folder is not a run.
    """
    run = describe_run(folder)
    try:
        data = open_data(run["settings"])
        check_data(folder, data)
        context_length = run["settings"].get("context_length")
        cut = run["settings"].get("long_examples") == "cut"
        run["data"] = describe_data(data)
        run["memorization"] = describe_memorization(run["samples"], data)
        run["baselines"] = mixture_baselines(drop_long_examples(data, context_length, cut))
        run["attention"] = compute_attention(load_model(find_checkpoint(folder)), data)
    except UserError as error:
        missing = "attention" if run["data"] else "data"
        run["notes"].append(f"The {missing} cannot be shown. {error}")
    return run


def open_data(settings: dict[str, Any]) -> Mixture:
    """Open the data of a run. Raises UserError if it is not where the run found it."""
    data = settings.get("data", [])
    paths = as_paths(data if isinstance(data, list) else str(data), settings.get("mix"))
    return open_mixture(paths, settings.get("mix"))


def check_data(folder: Path, data: Mixture) -> None:
    """Raise UserError if the newest checkpoint was trained on other data."""
    for path in list_checkpoints(folder)[-1:]:
        if open_checkpoint(path).state["data_sha256"] != data.sha256:
            raise UserError(f"{data.path}: is not what the run was trained on. Prepare that again.")


def describe_memorization(samples: list[dict[str, Any]], data: Mixture) -> dict[str, Any] | None:
    """Find the passages of the last samples in the training text; for comparison, of validation."""
    if not samples:
        return None
    last_step = samples[-1]["step"]
    texts = [sample["text"] for sample in samples if sample["step"] == last_step]
    texts = [text.encode(errors="replace").decode() for text in texts]  # no half characters
    val_texts = sample_validation(texts, data.datasets)
    passages, fraction = find_passages(texts + val_texts, data.datasets)
    lengths = [max((length for _, length, _ in p), default=0) for p in passages[len(texts) :]]
    note = (
        f"For comparison, {len(lengths)} pieces of validation text of the same lengths: their "
        f"longest such passages have {', '.join(map(str, lengths))} characters. "
        f"Passages of less than {MIN_PASSAGE_BYTES} bytes are not counted."
    )
    if fraction < 1:
        note += f" Only {fraction:.2%} of the training text was searched."
    return {"passages": passages[: len(texts)], "note": note}


if __name__ == "__main__":
    run_command(main)
