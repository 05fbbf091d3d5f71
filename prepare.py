"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val-fraction F]
python prepare.py INPUT… --out data/NAME --part 3/16   the third of sixteen parts, each made on any machine
python prepare.py --merge --out data/NAME              all parts → what one run without --part makes
"""

import collections
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from tqdm import tqdm

from engine.command import run_command
from engine.dataset import SPLITS, find_parts, is_made, manifest_of, merge_parts, new_dataset, parts_of
from engine.files import held_alone
from engine.settings import check_ranges, parse
from engine.sources import find_sources, kind_of
from engine.splits import Corpus, Piece, assigned, documents_of
from engine.tokenizer import LARGEST, SMALLEST_BPE, CharTokenizer, Tokenizer, named_tokenizer, train_bpe

VOCAB_SIZE = 4096  # of a BPE trained on the text, unless the settings say otherwise
BATCH_CHARACTERS = 2**19  # about what one thread encodes at a time: enough to do, were documents ever so short
TRAINING_CHARACTERS = 2**16  # what the BPE trainer is fed at a time: more costs it memory, and time
Encoded = tuple[str, np.ndarray, int, int]  # a split, token ids for it, UTF-8 bytes, documents that end
progress = partial(tqdm, None, unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Text files, folders, .jsonl or .ndjson, any of these gzipped, http(s) addresses, - for standard input, stdlib
    (the sources of Python's standard library), or shakespeare (the tiny Shakespeare file, downloaded once)."""
    tokenizer: str = "bpe"  # char, byte, bpe (trained on this text), or a tiktoken encoding: gpt2, cl100k_base, …
    # How many tokens a BPE trained on this text has; None: 4096.
    vocab_size: Annotated[int | None, f"at least {SMALLEST_BPE}, at most {LARGEST}"] = None
    out: Path | None = None  # The folder to make; None: data/ and the first input's name.
    # How much is kept for validation: whole documents, or where that can't be so, the tail of the text.
    val_fraction: Annotated[float, "above 0, below 1"] = 0.1
    glob: str | None = None  # Which files of a folder to take, at any depth; None: all.
    field: str | None = None  # The field of a .jsonl line that holds its text; None: text.
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
    name = "stdin" if config.inputs[0] == "-" else Path(config.inputs[0].split("?")[0]).resolve().name.split(".")[0]
    out = config.out or Path("data") / (name or "text")
    with tempfile.TemporaryDirectory() as spool:
        found = find_sources(config.inputs, config.glob, config.sha256, Path(spool))
        if config.field is not None and not any(kind_of(source.path) for source in found):
            raise ValueError(f"--field {config.field} is for JSON lines (.jsonl, .ndjson), and no input has them")
        sources = [replace(source, field=config.field or "text", errors=config.errors) for source in found]
        with progress("reading", sum(os.path.getsize(source.path) for source in sources)) as bar:
            corpus = Corpus(sources, config.val_fraction, bar.update)
        if not corpus.bytes:
            raise ValueError(f"{' '.join(config.inputs)}: no text in there; an empty corpus can't be prepared")
        origin = {"content": corpus.content, "tokenizer": config.tokenizer, "val_fraction": config.val_fraction}
        if config.tokenizer == "bpe":
            origin["vocab_size"] = config.vocab_size or VOCAB_SIZE
        if corpus.documents > 1 and config.tokenizer == "char":
            origin["separator"] = "\n"
        if corpus.documents > 1 and not corpus.by_document:
            origin["split"] = "tail"
        if config.part:
            origin["part"] = f"{part}/{parts}"
            out = parts_of(out) / f"{part}-of-{parts}"
        if is_made(out, origin, config.force):
            return out, False
        with held_alone(out):
            tokenizer = make_tokenizer(corpus, config)
            with new_dataset(out, tokenizer, origin) as writers, progress("encoding", corpus.bytes // parts) as bar:
                pieces = assigned(corpus, part, parts)
                for split, ids, size, documents in encoded(pieces, tokenizer, origin.get("separator", "")):
                    writers[split].write(ids, size, documents)
                    bar.update(size)
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
    if config.tokenizer not in ("char", "bpe"):
        named_tokenizer(config.tokenizer)
    if config.vocab_size is not None and config.tokenizer != "bpe":
        raise ValueError(f"--vocab-size {config.vocab_size} is for --tokenizer bpe; {config.tokenizer} has its own")
    match = re.fullmatch("([0-9]+)/([0-9]+)", "1/1" if config.part is None else config.part)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"--part is {config.part!r}; of three parts it must be 1/3, 2/3 or 3/3")
    return part, parts


def make_tokenizer(corpus: Corpus, config: PrepareConfig) -> Tokenizer:
    """The tokenizer that the config names, made from the whole corpus if it is char or bpe."""
    if config.tokenizer not in ("char", "bpe"):
        return named_tokenizer(config.tokenizer)
    with progress("training tokenizer", corpus.bytes) as bar:

        def texts() -> Iterator[str]:
            for _, document in documents_of(corpus, 1, 1):
                for text in document():
                    bar.update(len(text.encode()))
                    yield from (text[i : i + TRAINING_CHARACTERS] for i in range(0, len(text), TRAINING_CHARACTERS))

        if config.tokenizer == "bpe":
            return train_bpe(texts(), config.vocab_size or VOCAB_SIZE)
        return CharTokenizer("".join(sorted(reduce(set.union, texts(), set("\n" * (corpus.documents > 1))))))


def encoded(pieces: Iterable[Piece], tokenizer: Tokenizer, separator: str = "") -> Iterator[Encoded]:
    """Pieces encoded on all cores, in order within each split.

    A document ends with the end of text or, where there is none, with the separator. Threads are enough: tiktoken and
    NumPy work outside Python's lock. A few batches wait, never the whole corpus.
    """
    end = tokenizer.end_of_text
    ending = tokenizer.encode(separator) if end is None else np.array([end], np.uint32)
    characters = 0

    def batch_of(piece: Piece) -> int:
        nonlocal characters
        characters += len(piece[1]) + 1
        return characters // BATCH_CHARACTERS

    def encode(batch: list[Piece]) -> list[Encoded]:
        """What one thread does at a time."""
        ids, size, documents = {split: [ending[:0]] for split in SPLITS}, collections.Counter(), collections.Counter()
        for split, text, ends in batch:
            ids[split] += tokenizer.encode(text), ending if ends else ending[:0]
            size[split] += len(text.encode()) + ends * len(separator)
            documents[split] += ends
        return [(split, np.concatenate(ids[split]), size[split], documents[split]) for split in SPLITS]

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = collections.deque()
    with ThreadPoolExecutor(workers) as pool:
        for _, batch in itertools.groupby(pieces, batch_of):
            waiting.append(pool.submit(encode, list(batch)))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()


def summarise(out: Path) -> None:
    """Print what was made."""
    manifest = manifest_of(out)
    splits, found = manifest["splits"], manifest["vocab_size"]
    documents, size, tokens = (sum(c[key] for c in splits.values()) for key in ("documents", "bytes", "tokens"))
    asked = manifest["origin"].get("vocab_size", found)
    fewer = f" (of {asked:,} asked: the text has no more pairs)" if found < asked else ""
    print(f"{out}")
    if manifest["origin"].get("split"):
        share = manifest["origin"]["val_fraction"]
        print(f"  the last {share:.0%} of the text is for validation: whole documents can't be shared out like that")
    print(f"  documents        {documents:>15,}")
    print(f"  UTF-8 bytes      {size:>15,}")
    print(f"  tokens           {tokens:>15,}")
    print(f"  bytes per token  {size / max(1, tokens):>15.2f}")
    print(f"  vocabulary       {found:>15,}  {manifest['tokenizer']['kind']}{fewer}")
    for split, counts in splits.items():
        names = [shard["file"] for shard in counts["shards"]]
        files = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        print(f"  {split:<5} tokens     {counts['tokens']:>15,}  {files} ({counts['documents']:,} documents end here)")


if __name__ == "__main__":
    run_command(main)
