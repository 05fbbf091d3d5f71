"""The summary of a dataset that prepare.py prints."""

import textwrap
from pathlib import Path

import numpy as np

from engine.core.files import read_json
from engine.data.dataset import Dataset, open_dataset
from engine.data.split import is_target, token_ids
from engine.data.tokenizer import Tokenizer

MAX_NOTE_LINES = 10
NUM_SAMPLE_TOKENS = 60  # of the text that describe_sample shows
MAX_RENDERED_CHARACTERS = 500  # of an example
MAX_RUN_CHARACTERS = 200  # of consecutive targets, or of tokens between targets


def describe_dataset(path: Path) -> str:
    """Return a summary of a dataset. Raises UserError if there is none."""
    dataset = open_dataset(path)
    manifest = dataset.manifest
    statistics = manifest["statistics"]
    repeats = "see --deduplicate" if statistics["repeats"] else ""
    rows = [
        ("documents", statistics["documents"], ""),
        ("repeats", statistics["repeats"], repeats),
        ("left out", statistics["dropped"], "exact repeats"),
        ("longest", statistics["longest"], "tokens in one document"),
        ("vocabulary", manifest["vocab_size"], dataset.tokenizer.kind),
    ]
    for split, counts in manifest["splits"].items():
        ratio = f"{dataset.bytes_per_token(split):.2f} a token"
        note = (
            f"{counts['bytes']:,} UTF-8 bytes, {ratio}, {counts['documents']:,} ends of documents"
        )
        if "examples" in manifest["origin"]:
            num_examples = sum(shard["tokens"] for shard in counts["lengths"])
            note = f"targets: {counts['targets']:,}, examples: {num_examples:,}"
        rows.append((f"{split} tokens", counts["tokens"], note))
    lines = [format_row(*row) for row in rows if row[1]]
    return "\n".join([str(path), *lines, *describe_notes(path), describe_sample(dataset)])


def format_row(name: str, count: int, note: str) -> str:
    """Return a line of the summary."""
    return f"  {name:<12}  {count:>15,}  {note}".rstrip()


def describe_notes(path: Path) -> list[str]:
    """Return a line for each note for the user on a dataset, at most MAX_NOTE_LINES."""
    notes = [*read_json(path / "manifest.json")["statistics"]["notes"].items()]
    if len(notes) > MAX_NOTE_LINES:
        num_more = len(notes) - MAX_NOTE_LINES + 1
        notes[-num_more:] = [("notes more, in manifest.json", num_more)]
    lines = []
    for text, count in notes:
        noun, _, note = text.partition(" ")
        lines.append(format_row(noun.removesuffix("s") if count == 1 else noun, count, note))
    return lines


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
    return f"  {title}:\n{textwrap.indent(escape_unprintable(text), '    ')}"


def escape_unprintable(text: str) -> str:
    """Escape the unprintable characters of a text, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def render_with_targets(tokenizer: Tokenizer, example: np.ndarray) -> str:
    """Decode an example, with ⟦ and ⟧ around its targets; long runs are shortened."""
    targets = is_target(example)
    rendered = ""
    for run in np.split(np.arange(len(example)), np.flatnonzero(np.diff(targets)) + 1):
        text = tokenizer.decode(token_ids(example[run]).tolist())
        text = text if len(text) <= MAX_RUN_CHARACTERS else f"{text[:MAX_RUN_CHARACTERS]} …"
        if len(rendered) + len(text) > MAX_RENDERED_CHARACTERS:
            return f"{rendered} …"
        rendered += f"⟦{text}⟧" if targets[run[0]] else text
    return rendered
