"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val-fraction F]
python prepare.py PAIRS.jsonl --prompt-field A --completion-field B        examples: prompts, and what comes after them
python prepare.py CHATS.jsonl --chat                                       examples: chats, and what the assistant says
python prepare.py INPUT… --out data/NAME --part 3/16   the third of sixteen parts, each made on any machine
python prepare.py --merge --out data/NAME              all parts → what one run without --part makes
"""

import collections
import hashlib
import itertools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from tqdm import tqdm

from engine.command import run_command
from engine.dataset import SPLITS, find_parts, is_made, manifest_of, merge_parts, new_dataset, open_split, parts_of
from engine.examples import chat_of, encode_example, is_target, learned_bytes, marked, pair_of, special_names
from engine.files import held_alone, to_json
from engine.settings import check_ranges, parse
from engine.sources import Source, find_sources, kind_of
from engine.splits import Corpus, Piece, assigned, documents_of
from engine.tokenizer import (
    LARGEST,
    PATTERNS,
    SMALLEST_BPE,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
    named_tokenizer,
    train_bpe,
)

PATTERN = "pairs"  # of a BPE trained on the text, unless the settings say otherwise
VOCAB_SIZE = 4096  # of a BPE trained on the text, unless the settings say otherwise
BATCH_CHARACTERS = 2**19  # about what one thread encodes at a time: enough to do, were documents ever so short
TRAINING_CHARACTERS = 2**16  # what the BPE trainer is fed at a time: more costs it memory, and time
TRAINED = ("char", "bpe")  # tokenizers that are made from the text
progress = partial(tqdm, None, unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Text files, folders, .jsonl or .ndjson, any of these gzipped, http(s) addresses, - for standard input, stdlib
    (the sources of Python's standard library), or shakespeare (the tiny Shakespeare file, downloaded once)."""
    # char, byte, bpe (trained on this text), a tiktoken encoding (gpt2, cl100k_base, …), or that of a path: a run, a
    # dataset or a tokenizer.json.
    tokenizer: str = "bpe"
    # How a BPE trained on this text cuts it into words; None: pairs. What is to become a GGUF file needs another: gpt2,
    # llama3, qwen2 or smollm.
    pattern: str | None = None
    # How many tokens a BPE trained on this text has; None: 4096.
    vocab_size: Annotated[int | None, f"at least {SMALLEST_BPE}, at most {LARGEST}"] = None
    out: Path | None = None  # The folder to make; None: data/ and the first input's name.
    # How much is kept for validation: whole documents, or where that can't be so, the tail of the text.
    val_fraction: Annotated[float, "above 0, below 1"] = 0.1
    glob: str | None = None  # Which files of a folder to take, at any depth; None: all.
    field: str | None = None  # The field of a .jsonl line that holds its text; None: text.
    prompt_field: str | None = None  # For examples: the field of a .jsonl line with the prompt.
    completion_field: str | None = None  # The field with the completion, which alone is learned.
    # Each .jsonl line is a chat, {"messages": [{"role": …, "content": …}, …]}: what the assistant says is learned.
    chat: bool = False
    sha256: str = ""  # What a download must hash to.
    errors: Literal["strict", "replace"] = "strict"  # Refuse bytes that are not UTF-8, or put U+FFFD in their place.
    force: bool = False  # Make it anew, and replace what other arguments, or other text, made there.
    part: str | None = None  # Make only one part of the work, say 3/16, the third of sixteen, in a folder beside --out.
    merge: bool = False  # Join all parts of --out to what one run without --part makes; it takes no input.


def main(arguments: list[str] | None = None) -> None:
    """Prepare or merge as the command line says, and say what to do next."""
    config = parse(PrepareConfig, arguments)
    out, changed = merge(config) if config.merge else prepare(config)
    if not changed:
        print(f"{out} is up to date: the same arguments and the same text made it. Nothing changed.")
    if config.part:
        print(f"Once all parts are there: python prepare.py --merge --out {out.parent.with_suffix('')}")
        return
    if config.merge:
        print(f"Its parts are no longer needed: rm -r {parts_of(out)}")
    print(f"Train on it: python train.py --data {out} --out out/{out.name}")


def prepare(config: PrepareConfig) -> tuple[Path, bool]:
    """Make the dataset that the config describes, or a part; return its folder, and whether it had to be made.

    Raises ValueError for what can't be prepared. Until the end nothing is there, and then all of it.
    """
    part, parts = check(config)
    given = None if config.tokenizer in TRAINED else named_tokenizer(config.tokenizer)
    name = "stdin" if config.inputs[0] == "-" else Path(config.inputs[0].split("?")[0]).resolve().name.split(".")[0]
    out = config.out or Path("data") / (name or "text")
    with tempfile.TemporaryDirectory() as spool:
        sources = sources_of(config, Path(spool))
        with progress("reading", sum(os.path.getsize(source.path) for source in sources)) as bar:
            corpus = Corpus(sources, config.val_fraction, bar.update)
        if not corpus.bytes:
            raise ValueError(f"{' '.join(config.inputs)}: no text in there; an empty corpus can't be prepared")
        origin = origin_of(corpus, config, given)
        if config.part:
            origin["part"] = f"{part}/{parts}"
            out = parts_of(out) / f"{part}-of-{parts}"
        if is_made(out, origin, config.force):
            return out, False
        with held_alone(out):
            tokenizer = given or trained_tokenizer(corpus, config)
            if corpus.examples:
                tokenizer = tokenizer.with_special(special_names(tokenizer, config.chat))
            separator = origin.get("separator", "")
            encode = partial(encode_examples if corpus.examples else partial(encode_text, separator), tokenizer)
            unit, total = (" examples", corpus.documents) if corpus.examples else ("B", corpus.bytes)
            with new_dataset(out, tokenizer, origin) as writers, progress("encoding", total // parts, unit=unit) as bar:
                for split, found in encoded(assigned(corpus, part, parts), encode):
                    writers[split].write(found.ids, *found.amounts)
                    if corpus.examples:
                        writers[f"{split}-lengths"].write(found.lengths)
                    bar.update(len(found.lengths) if corpus.examples else found.amounts[0])
    summarise(out)
    return out, True


def merge(config: PrepareConfig) -> tuple[Path, bool]:
    """Join the parts of a dataset to what one run makes, byte for byte; return its folder, and whether it had to be.

    Raises ValueError for a part that is missing, damaged, or of other text or arguments than the first.
    """
    out = config.out
    if out is None or config != PrepareConfig((), out=out, force=config.force, merge=True):
        raise ValueError("--merge needs --out, the dataset whose parts to join, and takes nothing else but --force")
    parts = find_parts(out)
    origin = {key: value for key, value in next(iter(parts.values()))["origin"].items() if key != "part"}
    total = sum(counts["bytes"] for found in parts.values() for counts in found["splits"].values())
    if is_made(out, origin, config.force):
        return out, False
    with held_alone(out), progress("merging", total) as bar:
        merge_parts(out, parts, origin, bar.update)
    summarise(out)
    return out, True


def check(config: PrepareConfig) -> tuple[int, int]:
    """Which part of how many to make: 1, 1 is all. Raises ValueError for arguments that can't lead anywhere."""
    if not config.inputs or "" in config.inputs:
        advice = "give a file, a folder, an http(s) address, - for standard input, stdlib or shakespeare"
        raise ValueError(f"no input: {advice}")
    check_ranges(config)
    for flag, value in (("--vocab-size", config.vocab_size), ("--pattern", config.pattern)):
        if value is not None and config.tokenizer != "bpe":
            raise ValueError(f"{flag} {value} is for --tokenizer bpe; {config.tokenizer} has its own")
    if config.pattern not in (None, *PATTERNS):
        raise ValueError(f"--pattern {config.pattern} is unknown; the known ones are {', '.join(PATTERNS)}")
    if (config.prompt_field is None) != (config.completion_field is None):
        raise ValueError("--prompt-field and --completion-field go together: give both, or --field for plain text")
    given = {"--chat": config.chat or None, "--prompt-field": config.prompt_field, "--field": config.field}
    if len(ways := [flag for flag, value in given.items() if value is not None]) > 1:
        raise ValueError(f"{' and '.join(ways)} exclude each other: a line is a chat, a pair, or text; give only one")
    match = re.fullmatch("([0-9]+)/([0-9]+)", "1/1" if config.part is None else config.part)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"--part is {config.part!r}; of three parts it must be 1/3, 2/3 or 3/3")
    return part, parts


def sources_of(config: PrepareConfig, spool: Path) -> list[Source]:
    """The files to read, and how. Raises ValueError for what the fields, or a chat, can't be read from."""
    turns_of = chat_of if config.chat else None
    if config.prompt_field is not None:
        turns_of = partial(pair_of, prompt_field=config.prompt_field, completion_field=config.completion_field)
    found = find_sources(config.inputs, config.glob, config.sha256, spool)
    others = [source.name for source in found if not kind_of(source.path)]
    if config.field is not None and len(others) == len(found):
        raise ValueError(f"--field {config.field} is for JSON lines (.jsonl, .ndjson), and no input has them")
    if turns_of and others:
        flag = "--chat" if config.chat else "--prompt-field"
        advice = "leave it out, convert it, or choose a folder's files with --glob '*.jsonl'"
        raise ValueError(f"{flag} is for JSON lines (.jsonl, .ndjson), which {others[0]} is not; {advice}")
    how = {"field": config.field or "text", "errors": config.errors, "turns_of": turns_of}
    return [replace(source, **how) for source in found]


def origin_of(corpus: Corpus, config: PrepareConfig, given: Tokenizer | None) -> dict[str, Any]:
    """What a dataset is made from: two of the same origin are the same. given is a tokenizer that is not trained."""
    name = config.tokenizer
    if given and name != given.kind:  # a path, where another tokenizer may stand tomorrow
        name = f"{given.kind} {hashlib.sha256(to_json(given.state()).encode()).hexdigest()}"
    origin = {"content": corpus.content, "tokenizer": name, "val_fraction": config.val_fraction}
    if config.tokenizer == "bpe":
        origin["vocab_size"] = config.vocab_size or VOCAB_SIZE
    if config.pattern not in (None, PATTERN):
        origin["pattern"] = config.pattern
    if corpus.examples:
        origin["examples"] = "chats" if config.chat else "pairs"
    elif corpus.documents > 1 and (given.end_of_text is None if given else config.tokenizer == "char"):
        origin["separator"] = "\n"
    if corpus.documents > 1 and not corpus.by_document:
        origin["split"] = "tail"
    return origin


def trained_tokenizer(corpus: Corpus, config: PrepareConfig) -> Tokenizer:
    """The tokenizer, char or bpe, that the config names, made from the whole corpus."""
    with progress("training tokenizer", corpus.bytes) as bar:

        def texts() -> Iterator[str]:
            for _, document in documents_of(corpus, 1, 1):
                for piece in document():
                    bar.update(len(piece.encode()))
                    for text in (text for _, text in json.loads(piece)) if corpus.examples else (piece,):
                        yield from (text[i : i + TRAINING_CHARACTERS] for i in range(0, len(text), TRAINING_CHARACTERS))

        if config.tokenizer == "bpe":
            return train_bpe(texts(), config.vocab_size or VOCAB_SIZE, config.pattern or PATTERN)
        separator = "" if corpus.examples else "\n" * (corpus.documents > 1)
        return CharTokenizer("".join(sorted(reduce(set.union, texts(), {*separator}))))


class Encoded(NamedTuple):
    """What some pieces have for one split."""

    ids: np.ndarray  # tokens (N,)
    amounts: tuple[int, ...]  # UTF-8 bytes, documents that end, and of examples the targets
    lengths: Sequence[int] = ()  # of examples, in tokens


def encode_text(separator: str, tokenizer: Tokenizer, pieces: Sequence[Piece]) -> Encoded:
    """Pieces of text of one split; a document ends with the end of text or, where there is none, with the separator."""
    end = tokenizer.end_of_text
    ending = tokenizer.encode(separator) if end is None else np.array([end], np.uint32)
    ids, size = [ending[:0]], 0
    for _, text, ends in pieces:
        ids += tokenizer.encode(text), ending if ends else ending[:0]
        size += len(text.encode()) + ends * len(separator)
    return Encoded(np.concatenate(ids), (size, sum(ends for *_, ends in pieces)))


def encode_examples(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> Encoded:
    """Examples of one split; bytes are those of what counts."""
    turns = [json.loads(text) for _, text, _ in pieces]
    found = [np.empty(0, np.int32), *(encode_example(tokenizer, one) for one in turns)]
    amounts = (sum(map(learned_bytes, turns)), len(turns), sum(int(is_target(one).sum()) for one in found))
    return Encoded(np.concatenate(found), amounts, np.array([len(one) for one in found[1:]], np.uint32))


def encoded(pieces: Iterable[Piece], encode: Callable[[list[Piece]], Encoded]) -> Iterator[tuple[str, Encoded]]:
    """Each split's pieces, encoded on all cores, in order.

    Threads are enough: tiktoken and NumPy work outside Python's lock. A few batches wait, never the whole corpus.
    """
    characters = 0

    def batch_of(piece: Piece) -> int:
        nonlocal characters
        characters += len(piece[1]) + 1
        return characters // BATCH_CHARACTERS

    def encode_batch(batch: list[Piece]) -> list[tuple[str, Encoded]]:
        """What one thread does at a time."""
        return [(split, encode([piece for piece in batch if piece[0] == split])) for split in SPLITS]

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = collections.deque()
    with ThreadPoolExecutor(workers) as pool:
        for _, batch in itertools.groupby(pieces, batch_of):
            waiting.append(pool.submit(encode_batch, list(batch)))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def summarise(out: Path) -> None:
    """Print what was made."""
    manifest = manifest_of(out)
    splits, found, origin = manifest["splits"], manifest["vocab_size"], manifest["origin"]
    what = "examples" if "examples" in origin else "documents"
    documents, size, tokens = (sum(c[key] for c in splits.values()) for key in ("documents", "bytes", "tokens"))
    asked = origin.get("vocab_size", found)
    fewer = f" (of {asked:,} asked: the text has no more pairs)" if found < asked else ""
    print(f"{out}")
    if origin.get("split"):
        share, why = f"{origin['val_fraction']:.0%} of the text is", "whole documents can't be shared out like that"
        if what == "examples":
            share, why = f"{splits['val']['documents']:,} examples are", "so few can't be drawn by lot"
        print(f"  the last {share} for validation: {why}")
    print(f"  {what:<15}  {documents:>15,}")
    print(f"  UTF-8 bytes      {size:>15,}" + "  of what is to be learned" * (what == "examples"))
    print(f"  tokens           {tokens:>15,}")
    if what == "examples":
        print(f"  that count       {sum(counts['targets'] for counts in splits.values()):>15,}")
    else:
        print(f"  bytes per token  {size / max(1, tokens):>15.2f}")
    print(f"  vocabulary       {found:>15,}  {manifest['tokenizer']['kind']}{fewer}")
    for split, counts in splits.items():
        names = [shard["file"] for shard in counts["shards"]]
        files = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        ends = "" if what == "examples" else " end here"
        print(f"  {split:<5} tokens     {counts['tokens']:>15,}  {files} ({counts['documents']:,} {what}{ends})")
    if what == "examples" and splits["train"]["documents"]:
        first = marked(load_tokenizer(out / "tokenizer.json"), open_split(out, manifest, "train").example(0))
        print("  The first example, what is to be learned between ⟦ and ⟧:")
        print("\n".join(f"    {line}" for line in first.split("\n")))


if __name__ == "__main__":
    run_command(main)
