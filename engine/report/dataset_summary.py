"""The summary of a dataset that prepare.py prints."""

import textwrap
from pathlib import Path

from engine.data import chat
from engine.data.dataset import Dataset, Examples, open_dataset
from engine.data.mixture import find_val_problems
from engine.data.tokenizer_training import export_note

NUM_SAMPLE_TOKENS = 60  # of the text that describe_sample shows


def describe_dataset(path: Path) -> str:
    """Return a summary of a dataset. Raises UserError if there is none."""
    dataset = open_dataset(path)
    manifest = dataset.manifest
    facts = manifest["facts"]
    repeats = ""
    if facts["repeats"]:
        repeats = f"exact repeats: {facts['repeats']:,}, see --deduplicate"
    if "dropped" in facts:
        repeats = f"exact repeats left out: {facts['dropped']:,}"
    used_fraction = facts["vocabulary"] / manifest["vocab_size"]
    vocabulary = (
        f"{dataset.tokenizer.kind}, {used_fraction:.0%} of it used{export_note(dataset.tokenizer)}"
    )
    rows = [
        ("documents", dataset.num_documents, repeats),
        ("longest", facts["longest"], "tokens in one document"),
        ("vocabulary", manifest["vocab_size"], vocabulary),
    ]
    for split, counts in manifest["splits"].items():
        ratio = f"{dataset.bytes_per_token(split):.2f} a token"
        note = (
            f"{counts['bytes']:,} UTF-8 bytes, {ratio}, ends of documents: {counts['documents']:,}"
        )
        if "examples" in manifest["origin"]:
            note = f"targets: {counts['targets']:,}, examples: {counts['documents']:,}"
        rows.append((f"{split} tokens", counts["tokens"], note))
    for text, count in facts.get("notes", {}).items():
        noun, _, note = text.partition(" ")
        rows.append((noun.removesuffix("s") if count == 1 else noun, count, note))
    lines = [f"  {name:<12}  {count:>15,}  {note}".rstrip() for name, count, note in rows]
    lines += [f"  {problem}" for problem in find_val_problems(dataset)]
    return "\n".join([str(path), *lines, describe_sample(dataset)])


def describe_sample(dataset: Dataset) -> str:
    """Return the first training example, or text from the middle of the training tokens."""
    train = dataset.train
    if isinstance(train, Examples):
        title = "The first example, its targets between ⟦ and ⟧"
        text = chat.render_with_targets(dataset.tokenizer, train.example(0))
    else:
        title = "From the middle of train"
        start = max(0, len(train) // 2 - NUM_SAMPLE_TOKENS // 2)
        tokens = train[start : start + NUM_SAMPLE_TOKENS].tolist()
        text = chat.escape_unprintable(dataset.tokenizer.decode(tokens))
    return f"  {title}:\n{textwrap.indent(text, '    ')}"
