"""The summary of a dataset that prepare.py prints."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.cli import count_noun
from engine.core.files import read_json
from engine.data.dataset import Dataset, open_dataset
from engine.data.split import is_target, token_ids
from engine.data.tokenizer import Tokenizer

MIN_VAL_DOCUMENTS = 6  # with fewer different ones, a validation loss says little
MAX_NOTE_LINES = 10
NUM_SAMPLE_TOKENS = 60  # of the text that describe_sample shows
MAX_RENDERED_CHARACTERS = 500  # of an example
MAX_RUN_CHARACTERS = 200  # of consecutive targets, or of tokens between targets


def describe_dataset(path: Path) -> str:
    """Return a summary of a dataset. Raises UserError if there is none."""
    dataset = open_dataset(path)
    manifest = dataset.manifest
    statistics = manifest["statistics"]
    repeats = ""
    if statistics["repeats"]:
        repeats = f"exact repeats: {statistics['repeats']:,}, see --deduplicate"
    if statistics["dropped"]:
        repeats = f"exact repeats left out: {statistics['dropped']:,}"
    rows = [
        ("documents", statistics["documents"], repeats),
        ("longest", statistics["longest"], "tokens in one document"),
        ("vocabulary", manifest["vocab_size"], dataset.tokenizer.kind),
    ]
    for split, counts in manifest["splits"].items():
        ratio = f"{dataset.bytes_per_token(split):.2f} a token"
        documents = f"{counts['documents']:,}"
        note = f"{counts['bytes']:,} UTF-8 bytes, {ratio}, ends of documents: {documents}"
        if "examples" in manifest["origin"]:
            num_examples = sum(shard["tokens"] for shard in counts["lengths"])
            note = f"targets: {counts['targets']:,}, examples: {num_examples:,}"
        rows.append((f"{split} tokens", counts["tokens"], note))
    lines = [str(path), *(format_row(*row) for row in rows), *describe_notes(path)]
    lines += [f"  {problem}" for problem in find_val_problems(manifest)]
    return "\n".join([*lines, describe_sample(dataset)])


def format_row(name: str, count: int, note: str) -> str:
    """Return a line of the summary."""
    return f"  {name:<12}  {count:>15,}  {note}".rstrip()


def describe_notes(path: Path) -> list[str]:
    """Return a line for each note for the user on a dataset, at most MAX_NOTE_LINES."""
    lines = []
    manifest = read_json(path / "manifest.json")
    for text, count in manifest["statistics"]["notes"].items():
        noun, _, note = text.partition(" ")
        lines.append(format_row(noun.removesuffix("s") if count == 1 else noun, count, note))
    if len(lines) > MAX_NOTE_LINES:
        rest = len(lines) - MAX_NOTE_LINES + 1
        lines[-rest:] = [format_row("notes", rest, "more, in manifest.json")]
    return lines


def find_val_problems(manifest: dict[str, Any]) -> list[str]:
    """Return a sentence for each problem that makes the validation loss meaningless."""
    statistics = manifest["statistics"]
    num_val = manifest["splits"]["val"]["documents"]
    problems = []
    if statistics["val_copies"]:
        percent = f"{statistics['val_copies'] / max(1, num_val):.0%}"
        problems.append(f"{percent} of the validation documents are copies of training ones.")
    if statistics["val_distinct"] < min(MIN_VAL_DOCUMENTS, num_val):
        texts = count_noun(statistics["val_distinct"], "different text")
        problems.append(f"The {num_val} validation documents have only {texts}.")
    return problems


def describe_sample(dataset: Dataset) -> str:
    """Return the first training example, or text from the middle of the training tokens."""
    train = dataset.train
    if train.num_examples:
        title = "The first example, its targets between ⟦ and ⟧"
        text = render_with_targets(dataset.tokenizer, next(train.examples()))
    else:
        title = "From the middle of train"
        start = max(0, len(train) // 2 - NUM_SAMPLE_TOKENS // 2)
        ids, _ = train.read(start, start + NUM_SAMPLE_TOKENS)
        text = dataset.tokenizer.decode(ids.tolist()).strip("\ufffd")  # incomplete characters
        text = escape_unprintable(text)
    return f"  {title}:\n{textwrap.indent(text, '    ')}"


def escape_unprintable(text: str) -> str:
    """Escape the unprintable characters of a text, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def render_with_targets(tokenizer: Tokenizer, example: np.ndarray) -> str:
    """Decode an example, with ⟦ and ⟧ around its targets; long runs are shortened."""
    targets = is_target(example)
    rendered = ""
    for run in np.split(np.arange(len(example)), np.flatnonzero(np.diff(targets)) + 1):
        text = escape_unprintable(tokenizer.decode(token_ids(example[run]).tolist()))
        text = text if len(text) <= MAX_RUN_CHARACTERS else f"{text[:MAX_RUN_CHARACTERS]} …"
        if len(rendered) + len(text) > MAX_RENDERED_CHARACTERS:
            return f"{rendered} …"
        rendered += f"⟦{text}⟧" if targets[run[0]] else text
    return rendered
