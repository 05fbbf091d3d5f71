"""What is in a dataset, for a person who is about to train on it."""

from pathlib import Path
from typing import Any

from engine.core.errors import UserError
from engine.data.chat import marked
from engine.data.dataset import Examples, Tokens, manifest_of, open_dataset
from engine.data.tokenizer import Tokenizer

SAMPLE = 60  # tokens of a split that are shown
RARE = 0.5  # a vocabulary of which less occurs is worth a line


def describe(out: Path) -> str:
    """The lines that tell a dataset, or a part of one. Raises UserError if there is none."""
    manifest = manifest_of(out)
    if not manifest:
        raise UserError(f"{out} holds no dataset; make it with: python prepare.py INPUT --out {out}")
    splits, origin, facts = manifest["splits"], manifest["origin"], manifest.get("facts", {})
    examples = "examples" in origin
    what = "examples" if examples else "documents"
    size, tokens, ends = (sum(counts[key] for counts in splits.values()) for key in ("bytes", "tokens", "documents"))
    lines = [f"{out}", *_how_split(origin, splits, examples)]
    lines += [_line(what, facts.get("documents", ends), _repeats(facts, origin))]
    lines += [_line("UTF-8 bytes", size, "of what is to be learned" if examples else "")]
    lines += [_line("tokens", tokens)]
    if examples:
        lines += [_line("that count", sum(counts["targets"] for counts in splits.values()))]
    else:
        lines += [f"  {'bytes per token':<15}  {size / max(1, tokens):>15.2f}"]
    if facts:
        lines += [_line("longest", facts["longest"], f"tokens in one {what[:-1]}")]
    lines += _vocabulary(manifest, facts)
    for split, counts in splits.items():
        names = [shard["file"] for shard in counts["shards"]]
        files = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        ending = "" if examples else " end here"
        lines += [_line(f"{split:<5} tokens", counts["tokens"], f"{files} ({counts['documents']:,} {what}{ending})")]
    if "part" not in origin:
        opened = open_dataset(out)
        for split in splits:
            lines += _sample(split, opened.tokenizer, getattr(opened, split))
    return "\n".join(lines)


def _line(name: str, amount: int, note: str = "") -> str:
    return f"  {name:<15}  {amount:>15,}  {note}".rstrip()


def _how_split(origin: dict[str, Any], splits: dict[str, Any], examples: bool) -> list[str]:
    if origin.get("split") != "few":
        return []
    if examples:
        return [f"  {splits['val']['documents']:,} examples are for validation: so few can't be drawn by lot"]
    share = f"{100 * origin['val_fraction']:.3g}%"
    return [f"  the last {share} of each document is for validation: so few can't be drawn whole"]


def _repeats(facts: dict[str, Any], origin: dict[str, Any]) -> str:
    if "dropped" in facts:
        return f"and {facts['dropped']:,} exact repeats, which were left out"
    found = facts.get("repeats", 0)
    return f"of which {found:,} exact repeats (see --deduplicate)" if found else ""


def _vocabulary(manifest: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    size, asked = manifest["vocab_size"], manifest["origin"].get("vocab_size", manifest["vocab_size"])
    fewer = f" (of {asked:,} asked: the text has no more pairs)" if size < asked else ""
    lines = [_line("vocabulary", size, f"{manifest['tokenizer']['kind']}{fewer}")]
    if facts and facts["vocabulary"] < RARE * size and size > 1000:
        share = f"{facts['vocabulary']:,}, {facts['vocabulary'] / size:.0%},"
        lines += [f"  only {share} of its tokens occur: --tokenizer bpe makes a smaller one, which trains faster"]
    elif facts:
        lines += [_line("that occur", facts["vocabulary"], f"{facts['vocabulary'] / size:.0%}")]
    return lines


def _sample(split: str, tokenizer: Tokenizer, tokens: Tokens | Examples) -> list[str]:
    if isinstance(tokens, Examples):
        if split == "val":
            return []
        shown = marked(tokenizer, tokens.example(0))
        head = "  The first example, what is to be learned between ⟦ and ⟧:"
    else:
        middle = max(0, len(tokens) // 2 - SAMPLE // 2)
        text = tokenizer.decode(tokens[middle : middle + SAMPLE].tolist())
        shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
        head = f"  From the middle of {split}:"
    return [head, *(f"    {line}" for line in shown.split("\n"))]


def format_duration(seconds: float) -> str:
    """A time as a person says it."""
    for limit, unit, name in ((100, 1, "seconds"), (6000, 60, "minutes"), (172_800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:,.0f} days"
