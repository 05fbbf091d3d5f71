"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val-fraction F]
"""

import collections
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from tqdm import tqdm

from engine.corpus import Document, Source, documents, find_sources, pieces
from engine.files import new_directory, read_json, sha256, write_json
from engine.settings import parse, run_command
from engine.shards import FORMAT, ShardWriter
from engine.tokenizer import SMALLEST_BPE, CharTokenizer, Tokenizer, named_tokenizer, train_bpe

BATCH_CHARACTERS = 2**19  # what one thread encodes at a time
TRAINING_CHARACTERS = 2**16  # what the BPE trainer is fed at a time: more costs it memory, and time
SPLITS = ("train", "val")


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Text files, folders, .jsonl, any of these gzipped, http(s) addresses, - for standard input, stdlib (the sources
    of Python's standard library), or shakespeare (the tiny Shakespeare file, downloaded once)."""
    tokenizer: str = "bpe"  # char, byte, bpe (trained on this text), or a tiktoken encoding: gpt2, cl100k_base, …
    vocab_size: int = 4096  # Tokens of a trained BPE.
    out: Path | None = None  # The folder to make; None: data/ and the first input's name.
    val_fraction: float = 0.1  # Share kept for validation: the tail of one document, or whole documents of many.
    glob: str = "*"  # Which files of a folder, at any depth.
    field: str = "text"  # The field of a .jsonl line that holds its text.
    sha256: str = ""  # What a download must hash to.
    errors: Literal["strict", "replace"] = "strict"  # Refuse bytes that are not UTF-8, or put U+FFFD in their place.
    force: bool = False  # Make it anew, and replace what other arguments, or other text, made there.


@dataclass
class Census:
    """What one pass over the whole corpus finds, before anything is written."""

    documents: int = 0
    characters: int = 0
    bytes: int = 0  # of UTF-8
    alphabet: set[str] = field(default_factory=set)
    smallest_lot: float = 1.0
    content: str = ""  # a hash of all documents, in order


def main() -> None:
    config = parse(PrepareConfig)
    out, changed = prepare(config)
    if not changed:
        print(f"{out} is up to date: the same arguments and the same text made it. Nothing changed.")
    print(f"Train on it: python train.py --data {out} --out out/{out.name}")


def prepare(config: PrepareConfig) -> tuple[Path, bool]:
    """Make the dataset that the config describes; return its folder, and whether it had to be made.

    Raises ValueError for what can't be prepared. Until the end nothing is there, and then all of it.
    """
    check(config)
    out = config.out or Path("data") / default_name(config.inputs[0])
    with tempfile.TemporaryDirectory() as spool:
        sources = find_sources(config.inputs, config.glob, config.sha256, Path(spool))
        census = count(sources, config)
        origin = {"content": census.content, "tokenizer": config.tokenizer, "val_fraction": config.val_fraction}
        if config.tokenizer == "bpe":
            origin["vocab_size"] = config.vocab_size
        if is_made(out, origin, config.force):
            return out, False
        tokenizer = make_tokenizer(sources, config, census)
        with new_directory(out) as directory:
            tokenizer.save(directory / "tokenizer.json")
            dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
            splits = encode(sources, config, census, tokenizer, {s: ShardWriter(directory, s, dtype) for s in SPLITS})
            identity = {"kind": tokenizer.kind, "sha256": sha256(directory / "tokenizer.json")}
            manifest = {"format": FORMAT, "tokenizer": identity, "vocab_size": tokenizer.vocab_size, "dtype": dtype}
            write_json(directory / "manifest.json", manifest | {"splits": splits, "origin": origin})
    summarise(out, census, tokenizer, splits, config)
    return out, True


def check(config: PrepareConfig) -> None:
    """Refuse, before any work, arguments that can't lead anywhere."""
    if not config.inputs or "" in config.inputs:
        raise ValueError(
            "no input: give a file, a folder, an http(s) address, - for standard input, stdlib or shakespeare"
        )
    if not 0 < config.val_fraction < 1:
        raise ValueError(f"--val-fraction is {config.val_fraction}; it must lie between 0 and 1")
    if config.tokenizer == "bpe" and config.vocab_size < SMALLEST_BPE:
        train_bpe([], config.vocab_size)  # says so
    if config.tokenizer not in ("char", "bpe"):
        named_tokenizer(config.tokenizer)


def default_name(name: str) -> str:
    """The dataset's name for an input: a file or address without its endings, a folder's own name."""
    return "stdin" if name == "-" else Path(name.split("?")[0]).resolve().name.split(".")[0] or "text"


def is_made(out: Path, origin: dict[str, Any], force: bool) -> bool:
    """Whether out holds this very dataset, and may keep it. Raises ValueError for what must not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    manifest = read_json(out / "manifest.json") if (out / "manifest.json").is_file() else None
    if not isinstance(manifest, dict) or "origin" not in manifest:  # checkpoints have a manifest too
        raise ValueError(f"{out} exists and is not a dataset; choose another place with --out")
    if force:
        return False
    found = manifest["origin"]
    if found == origin:
        return True
    names = {"content": "other text"}
    other = [
        names.get(key, f"{key} {found.get(key)}") for key in found.keys() | origin if found.get(key) != origin.get(key)
    ]
    raise ValueError(f"{out} was made with {', '.join(sorted(other))}; use --force to replace it, or another --out")


def progress(what: str, total: int) -> tqdm:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)


def every_document(sources: list[Source], config: PrepareConfig) -> Iterator[Document]:
    for source in sources:
        yield from documents(source, config.field, config.errors)


def lot(digest: bytes) -> float:
    """A document's place between 0 and 1, by the hash of its text: the same in any order, on any machine."""
    return int.from_bytes(digest[:8], "big") / 2**64


def digest_of(document: Document) -> bytes:
    hasher = hashlib.blake2b()
    for text in document():
        hasher.update(text.encode())
    return hasher.digest()


def count(sources: list[Source], config: PrepareConfig) -> Census:
    """Read everything once: check that it is text, count it, hash it. Raises ValueError for what is not text."""
    census = Census()
    content = hashlib.blake2b()
    with progress("reading", sum(os.path.getsize(source.path) for source in sources)) as bar:
        for document in every_document(sources, config):
            hasher = hashlib.blake2b()
            for text in document():
                encoded = text.encode()
                hasher.update(encoded)
                census.characters += len(text)
                census.bytes += len(encoded)
                if config.tokenizer == "char":
                    census.alphabet.update(text)
                bar.update(len(encoded))
            census.documents += 1
            census.smallest_lot = min(census.smallest_lot, lot(hasher.digest()))
            content.update(hasher.digest())
    if not census.characters:
        raise ValueError(f"{' '.join(config.inputs)}: no text in there; an empty corpus can't be prepared")
    census.content = content.hexdigest()
    return census


def make_tokenizer(sources: list[Source], config: PrepareConfig, census: Census) -> Tokenizer:
    """The tokenizer that the config names, trained on the corpus if it is one that trains."""
    if config.tokenizer == "char":
        return CharTokenizer("".join(sorted(census.alphabet)))
    if config.tokenizer != "bpe":
        return named_tokenizer(config.tokenizer)
    with progress("training BPE", census.bytes) as bar:

        def texts() -> Iterator[str]:
            for document in every_document(sources, config):
                for text in document():
                    for start in range(0, len(text), TRAINING_CHARACTERS):
                        yield text[start : start + TRAINING_CHARACTERS]
                    bar.update(len(text.encode()))

        return train_bpe(texts(), config.vocab_size)


def assigned(sources: list[Source], config: PrepareConfig, census: Census) -> Iterator[tuple[str, str, bool]]:
    """Every piece of text with its split, and whether it ends its document.

    One document gives its tail to validation. Of many, each goes whole where its lot falls; the one with the smallest
    always to validation, so that few documents too leave something to validate on.
    """
    if census.documents > 1:
        for document in every_document(sources, config):
            mine = lot(digest_of(document))
            split = "val" if mine < config.val_fraction or mine == census.smallest_lot else "train"
            for text, ends in pieces(document):
                yield split, text, ends
        return
    left = int(census.bytes * (1 - config.val_fraction))  # bytes for training
    for document in every_document(sources, config):
        for text, ends in pieces(document):
            encoded = text.encode()
            place = max(0, min(left, len(encoded)))
            while place < len(encoded) and encoded[place] & 0xC0 == 0x80:  # inside a character
                place += 1
            left -= place
            if place:
                yield "train", encoded[:place].decode(), False
            if place < len(encoded) or ends:
                yield "val", encoded[place:].decode(), ends


def batches(assigned_pieces: Iterable[tuple[str, str, bool]]) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """The pieces of each split in lists of at least BATCH_CHARACTERS, so that a thread has enough to do."""
    waiting = {split: [] for split in SPLITS}
    lengths = dict.fromkeys(SPLITS, 0)
    for split, text, ends in assigned_pieces:
        waiting[split].append((text, ends))
        lengths[split] += len(text) + 1
        if lengths[split] >= BATCH_CHARACTERS:
            yield split, waiting[split]
            waiting[split], lengths[split] = [], 0
    yield from waiting.items()


def encode(
    sources: list[Source], config: PrepareConfig, census: Census, tokenizer: Tokenizer, writers: dict[str, ShardWriter]
) -> dict[str, Any]:
    """Encode the corpus on all cores and write it in order; return the manifest's account of the splits.

    Raises ValueError if a split is too short for one window.
    """

    def encoded(batch: list[tuple[str, bool]]) -> np.ndarray:
        parts = []
        for text, ends in batch:
            parts.append(tokenizer.encode(text))
            if ends and tokenizer.end_of_text is not None:
                parts.append(np.array([tokenizer.end_of_text], np.uint32))
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    # Threads are enough: tiktoken and NumPy work outside Python's lock. A few batches wait, never the whole corpus.
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = collections.deque()
    with ThreadPoolExecutor(workers) as pool, progress("encoding", census.bytes) as bar:

        def write_oldest() -> None:
            split, batch, ids = waiting.popleft()
            writers[split].write(ids.result())
            size = sum(len(text.encode()) for text, _ in batch)
            writers[split].counts["bytes"] += size
            writers[split].counts["documents"] += sum(ends for _, ends in batch)
            bar.update(size)

        for split, batch in batches(assigned(sources, config, census)):
            waiting.append((split, batch, pool.submit(encoded, batch)))
            if len(waiting) > 2 * workers:
                write_oldest()
        while waiting:
            write_oldest()
    splits = {split: writer.close() for split, writer in writers.items()}
    for split, counts in splits.items():
        if counts["tokens"] < 2:
            raise ValueError(
                f"the {split} split has {counts['tokens']} tokens of {census.documents} documents, too few for one "
                f"window; give more text, or change --val-fraction"
            )
    return splits


def summarise(out: Path, census: Census, tokenizer: Tokenizer, splits: dict[str, Any], config: PrepareConfig) -> None:
    """Print what was made."""
    tokens = sum(counts["tokens"] for counts in splits.values())
    asked = config.vocab_size if config.tokenizer == "bpe" else tokenizer.vocab_size
    fewer = f" (of {asked:,} asked: the text has no more pairs)" if tokenizer.vocab_size < asked else ""
    print(f"{out}")
    print(f"  documents        {census.documents:>15,}")
    print(f"  characters       {census.characters:>15,}")
    print(f"  UTF-8 bytes      {census.bytes:>15,}")
    print(f"  tokens           {tokens:>15,}")
    print(f"  bytes per token  {census.bytes / tokens:>15.2f}")
    print(f"  vocabulary       {tokenizer.vocab_size:>15,}  {tokenizer.kind}{fewer}")
    for split, counts in splits.items():
        files = ", ".join(shard["file"] for shard in counts["shards"][:3]) + (
            ", …" if len(counts["shards"]) > 3 else ""
        )
        print(f"  {split:<5} tokens     {counts['tokens']:>15,}  {files} ({counts['documents']:,} documents end here)")


if __name__ == "__main__":
    run_command(main)
