"""The files of a run: its checkpoints, the best of them, and its records."""

import contextlib
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from annotated_types import Gt

from engine.core.cli import say, shell_command, warn
from engine.core.errors import UserError
from engine.core.files import propose_path
from engine.core.settings import check_flags, read_toml
from engine.core.values import Seconds, convert
from engine.data.tokenizer import load_tokenizer
from engine.generation.sampling import TextOptions
from engine.generation.text_batch import initial_tokens
from engine.generation.text_generator import TextGenerator
from engine.runs.checkpoint import Checkpoint, open_checkpoint, read_state
from model import GPT

CHECKPOINT_NAME = re.compile("step-[0-9]{8,}")  # directories with other names are the user's
NUMBER_KEYS = "train_loss learning_rate grad_norm tokens_per_second elapsed_seconds val_perplexity "
NUMBER_KEYS += "val_loss val_loss_partial val_tokens val_tokens_partial val_bits_per_byte "
NUMBER_KEYS += "val_score xz_bits_per_byte"
# Key → type, in a run's .jsonl files, in about.json and in its "state".
VALUE_TYPES: dict[str, Any] = {
    **dict.fromkeys(("parameters", "seconds", "step", "tokens"), Seconds),
    **dict.fromkeys(NUMBER_KEYS.split(), float | None),
    **dict.fromkeys(("longer", "prompt", "resume", "tokenizer"), str),
    **dict.fromkeys(("defaults", "machine", "typed"), dict[str, Any]),
    "baselines": dict[str, float],
    "data": list[dict[str, str]],
    "epoch_tokens": list[Annotated[float, Gt(0)]],
    "state": Literal["training", "done", "stopped"],
}


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoint directories of a run, the oldest first."""
    directories = (run / "checkpoints").glob("step-*")
    checkpoints = [path for path in directories if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(checkpoints, key=lambda path: int(path.name.removeprefix("step-")))


def rank_checkpoints(run: Path, best_by: str = "") -> list[Path]:
    """Return the checkpoints of a run, the best evaluation first, then the newest first.

    The default of best_by is the setting in config.toml.
    """
    with contextlib.suppress(OSError, UserError):
        best_by = best_by or read_toml(run / "config.toml").get("best_by", "")
    evaluations: dict[Path, Any] = dict.fromkeys(list_checkpoints(run))
    for path in evaluations:
        with contextlib.suppress(OSError, UserError):  # it is reported when it is opened
            evaluations[path] = read_state(path).evaluation
    paths = list(evaluations)
    return [paths[index] for index in rank_evaluations([*evaluations.values()], best_by)]


def compare_by(record: dict[str, Any], best_by: str) -> tuple[Any, tuple[float, float]]:
    """Return what an evaluation counted, and its sort key among those that counted the same.

    A last evaluation on more tokens is compared by its loss on the tokens of those before.
    """
    suffix = "_partial" if "val_loss_partial" in record else ""
    num_tokens = record.get(f"val_tokens{suffix}")
    loss = record[f"val_loss{suffix}"]
    if best_by == "score":
        return (num_tokens, record.get("questions_digest")), (-record.get("val_score", 0.0), loss)
    return num_tokens, (loss, 0.0)


def rank_evaluations(records: Sequence[dict[str, Any] | None], best_by: str) -> list[int]:
    """Return the indices of evaluations, given the oldest first: the best, then the newest first.

    None, and those that did not count the same as the newest, come last.
    """
    pairs = [record and compare_by(record, best_by) for record in records]
    counted, _ = next(filter(None, reversed(pairs)), (None, None))
    keys = [pair[1] if pair and pair[0] == counted else (math.inf, math.inf) for pair in pairs]
    return sorted(reversed(range(len(records))), key=keys.__getitem__)


def find_newest_run(pattern: str = "step-*") -> Path:
    """Return the run in out/ with the newest checkpoint, and print it. Raises UserError."""
    manifests = Path("out").glob(f"**/checkpoints/{pattern}/manifest.json")
    newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise UserError("out: contains no run. Train one with: python train.py")
    run = newest.parents[2]
    say(f"The newest run in out/: {shell_command(run)}", file=sys.stderr)
    return run


def find_checkpoint(path: Path, base: Path | None = None) -> Checkpoint:
    """Return the checkpoint at path, or the best one of the run at path, to read its model.

    Only the model's files are verified. ``base`` is where an adapter's base model is now. Raises
    UserError if no checkpoint is complete.
    """
    is_checkpoint = (path / "manifest.json").is_file() and not any(path.glob("*.npy"))
    candidates = [path] if is_checkpoint else rank_checkpoints(path)
    for candidate in candidates:
        try:
            checkpoint = open_checkpoint(candidate)
            checkpoint.verify(checkpoint.model_files)
            break
        except UserError as error:
            if candidate == candidates[-1]:
                raise
            warn(f"{error} Using the next best checkpoint instead.")
    else:
        raise UserError(f"{path}: {explain_missing_checkpoint(path)}")
    return replace(checkpoint, base=find_base(checkpoint, base))


def find_base(checkpoint: Checkpoint, path: Path | None = None) -> Checkpoint | None:
    """Return the base model of an adapter, at path or where it was; None for other checkpoints.

    Raises UserError if it is missing, or another model.
    """
    reference = checkpoint.state.base
    if reference is None:
        check_flags([("--base", path, False, f"a LoRA run (got {checkpoint.path})")])
        return None
    path = path or Path(reference.path)
    fix = "Name its base model with --base DIRECTORY."
    if not path.exists():
        raise UserError(f"{checkpoint.path}: its base model is not in {path}. {fix}")
    base = find_checkpoint(path)
    if base.reference().sha256 != reference.sha256:
        raise UserError(f"{checkpoint.path}: trained on another base model than {base.path}. {fix}")
    return base


def make_generator(
    checkpoint: Checkpoint, model: GPT, should_quantize: bool = False
) -> TextGenerator:
    """Return the model of a checkpoint with its tokenizer, to generate text."""
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    start = initial_tokens(tokenizer, checkpoint.state.documents)
    sampling = cast(TextOptions, tokenizer.sampling)
    is_chat_model = checkpoint.is_chat_model
    return TextGenerator(model, tokenizer, start, is_chat_model, should_quantize, sampling=sampling)


def explain_missing_checkpoint(path: Path) -> str:
    """Return what a path is that has no checkpoint, and the path or command that helps."""
    name = path.resolve().name
    if any(path.glob("*.npy")):
        return f"is a dataset. Train on it: {shell_command('python', 'train.py', '--data', path)}"
    if (path / "config.json").is_file():
        command = shell_command("python", "huggingface.py", "import", path, f"out/{name}")
        return f"is a model of transformers. Import it: {command}"
    flags = ("--data", Path("data", name), "--out", Path("out", name))
    advice = f"Train one with: {shell_command('python', 'train.py', *flags)}"
    fix = propose_path(path, Path("out"), "checkpoints/step-*", advice)
    return f"contains no checkpoint. {fix}"


def read_records(path: Path, max_lines: int | None = None) -> list[dict[str, Any]]:
    """Return the records of a .jsonl file, if it exists, without corrupted and unfinished lines.

    With max_lines: evaluations, the last line, and about as many of the others, evenly spaced.
    """
    records = []
    lines = (path.read_bytes() if path.exists() else b"").split(b"\n")[:-1]
    if max_lines:
        spaced = {*range(0, len(lines), math.ceil(max(1, len(lines)) / max_lines)), len(lines) - 1}
        lines = [line for i, line in enumerate(lines) if i in spaced or b"val_loss" in line]
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, UserError):
            record = json.loads(line.decode(), parse_constant=lambda name: None)
            json.dumps(record, ensure_ascii=False).encode()  # raises for half a surrogate pair
            check_values(record, path)
            if "step" in record:
                records.append(record)
    return records


def check_values(values: Any, path: Path, types: dict[str, Any] = VALUE_TYPES) -> None:
    """Raise UserError for a value of a JSON object in a file that does not have its key's type."""
    for key, value in convert(values, dict, str(path)).items():
        name = key.partition("/")[0]  # val_loss/DATASET
        if name in types:
            convert(value, types[name], f"{path}: {key}")
