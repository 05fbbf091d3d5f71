"""Write the page of a run, or of several to compare: out/<run>/ → report.html; or list all runs.

python report.py                              a table of the runs under out/, and out/index.html
python report.py out/NAME                     out/NAME/report.html, with memorized passages
python report.py out/A out/B … [--out FILE]   out/compare.html, and which is better
"""

from engine.core.cli import escape_controls, run_command, say, tune_openmp_spinning

if __name__ == "__main__":
    tune_openmp_spinning("decode")  # before torch is loaded

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.batches import dataset_paths, open_mixture
from engine.data.dataset import Dataset
from engine.generation.samples import read_lines
from engine.report.attention_maps import compute_attention
from engine.report.memorization import find_passages
from engine.report.overview import compare, format_runs
from engine.report.page import list_runs, read_run, write_page
from engine.runs.checkpoint import ModifyModel, load_model, open_checkpoint
from engine.runs.run_files import find_checkpoint, list_checkpoints

MAX_UTF8_BYTES = 4  # of a character in UTF-8


@dataclass(frozen=True)
class ReportConfig:
    """Write the report of one run, a comparison of several, or a list of all, for a browser."""

    # Run directories, or their reports; several are compared. None: those in out/ are listed.
    runs: Positional[tuple[Path, ...]] = ()
    # The page to write. None: RUN/report.html, compare.html beside them, or out/index.html.
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.out and self.out.suffix != ".html":
            raise UserError(f"--out: must end in .html (got {self.out}).")
        if self.out and not self.out.parent.is_dir():
            raise UserError(f"--out: the folder {self.out.parent} was not found. Create it first.")


def main(arguments: list[str] | None = None) -> None:
    """Write the page that the command line names, and print its path."""
    print(escape_controls(str(report(parse(ReportConfig, arguments)))))


def report(config: ReportConfig, modify_model: ModifyModel | None = None) -> Path:
    """Write a page and return its path. Raises UserError for a folder that is not a run.

    ``modify_model`` is the function that changed the model in train().
    """
    if not config.runs:
        path = config.out or Path("out", "index.html")
        listed = list_runs(Path("out"))
        if not listed:
            raise UserError("out: contains no run. Train one with: python train.py")
        print(format_runs(listed))
        write_page(listed, path, is_list=True)
        return path
    runs = [path.parent if path.suffix == ".html" else path for path in config.runs]
    if len(runs) == 1:
        path = config.out or runs[0] / "report.html"
        described = [read_fully(runs[0], modify_model)]
    else:
        path = config.out or runs[0].resolve().parent / "compare.html"
        described = [read_run(folder) for folder in runs]
        say(escape_controls(compare(described)[1]))
    write_page(described, path)
    return path


def read_fully(folder: Path, modify_model: ModifyModel | None = None) -> dict[str, Any]:
    """Read a run with its data and its model, and note what is missing.

    Raises UserError if the folder is not a run.
    """
    run = read_run(folder)
    try:
        data = open_run_data(folder, run["settings"])
        run["memorization"] = find_memorized(run["samples"], run["best_step"], data)
        model = load_model(find_checkpoint(folder), modify_model=modify_model)
        run["attention"] = compute_attention(model, data)
    except UserError as error:
        run["notes"].append(f"Not all can be shown. {error}")
    return run


def open_run_data(folder: Path, settings: dict[str, Any]) -> Dataset:
    """Open the data of a run. Raises UserError if it is missing, or not that of the checkpoint."""
    mix = settings.get("mix")
    data = open_mixture(dataset_paths(settings.get("data", []), mix), mix)
    for path in list_checkpoints(folder)[-1:]:
        if open_checkpoint(path).state.data_sha256 != data.sha256:
            raise UserError(f"{data.path}: is not the dataset of the run. Prepare that one again.")
    return data


def find_memorized(
    samples: list[dict[str, Any]], best_step: int | None, data: Dataset
) -> dict[str, Any] | None:
    """Find passages of the training text in the best samples and, to compare, in validation."""
    if not samples:
        return None
    steps = [sample["step"] for sample in samples]
    shown_step = best_step if best_step in steps else steps[-1]
    texts = [sample["text"] for sample in samples if sample["step"] == shown_step]
    num_tokens = max(map(len, texts)) * MAX_UTF8_BYTES  # a token has at least one byte
    lines = map(data.tokenizer.decode, read_lines(data, len(texts), num_tokens))
    val_texts = [line[: len(text)] for line, text in zip(lines, texts, strict=True)]
    passages, fraction = find_passages(texts + val_texts, data.datasets)
    lengths = [max((length for _, length, _ in spans), default=0) for spans in passages]
    longest = max(lengths[: len(texts)])
    longest_val = max(lengths[len(texts) :])
    copies = [[span for span in spans if span[1] > longest_val] for spans in passages[: len(texts)]]
    note = (
        f"{'Marked passages are' if any(copies) else 'No passage is'} copied from the training "
        f"text, of which {fraction:.0%} was searched: samples share at most {longest or 'a few'} "
        f"characters in a row with it, validation text {longest_val or 'a few'}."
    )
    return {"passages": copies, "note": note}


if __name__ == "__main__":
    run_command(main)
