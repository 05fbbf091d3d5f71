"""The summary of a dataset that prepare.py prints."""

import textwrap
from pathlib import Path

import numpy as np

from engine.data.dataset import Dataset, open_dataset
from engine.data.split import is_target, token_ids
from engine.data.tokenizer import Tokenizer

NUM_SAMPLE_TOKENS = 60  # of the text that describe_sample shows
MAX_RENDERED_CHARACTERS = 500  # of an example
MAX_RENDERED_RUN_CHARACTERS = 200  # of consecutive targets, or of tokens between targets


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
            note = f"targets: {counts['targets']:,}, examples: {documents}"
        rows.append((f"{split} tokens", counts["tokens"], note))
    for text, count in statistics["notes"].items():
        noun, _, note = text.partition(" ")
        rows.append((noun.removesuffix("s") if count == 1 else noun, count, note))
    lines = [f"  {name:<12}  {count:>15,}  {note}".rstrip() for name, count, note in rows]
    lines += [f"  {problem}" for problem in dataset.find_val_problems()]
    return "\n".join([str(path), *lines, describe_sample(dataset)])


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
        if len(text) > MAX_RENDERED_RUN_CHARACTERS:
            half = MAX_RENDERED_RUN_CHARACTERS // 2
            text = f"{text[:half]} … {text[-half:]}"
        if len(rendered) + len(text) > MAX_RENDERED_CHARACTERS:
            return f"{rendered} …"
        rendered += f"⟦{text}⟧" if targets[run[0]] else text
    return rendered
