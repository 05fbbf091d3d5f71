"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val-fraction F]
python prepare.py INPUT… --out data/NAME --part 3/16   the third of sixteen parts, each made on any machine
python prepare.py --merge --out data/NAME              all parts → what one run without --part makes
"""

import collections
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from tqdm import tqdm

from engine.corpus import Census, Source, assigned, count, find_sources, share
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
    part: str | None = None  # Make only a share of it, say 3/16, the third of sixteen, in a folder beside --out.
    merge: bool = False  # Join all parts of --out to what one run without --part makes; it takes no input.


def main() -> None:
    """Prepare or merge as the command line says, and say what to do next."""
    config = parse(PrepareConfig)
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
    check(config)
    out = config.out or Path("data") / default_name(config.inputs[0])
    with tempfile.TemporaryDirectory() as spool:
        sources = find_sources(config.inputs, config.glob, config.sha256, Path(spool))
        with progress("reading", sum(os.path.getsize(source.path) for source in sources)) as bar:
            census = count(sources, config.field, config.errors, config.tokenizer == "char", bar.update)
        if not census.bytes:
            raise ValueError(f"{' '.join(config.inputs)}: no text in there; an empty corpus can't be prepared")
        origin = {"content": census.content, "tokenizer": config.tokenizer, "val_fraction": config.val_fraction}
        if config.tokenizer == "bpe":
            origin["vocab_size"] = config.vocab_size
        if config.part:
            part, parts = part_of(config)
            origin["part"] = f"{part}/{parts}"
            out = parts_of(out) / f"{part}-of-{parts}"
        if is_made(out, origin, config.force):
            return out, False
        tokenizer = make_tokenizer(sources, config, census)
        with new_directory(out) as directory:
            tokenizer.save(directory / "tokenizer.json")
            dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
            writers = {split: ShardWriter(directory, split, dtype) for split in SPLITS}
            encode(sources, config, census, tokenizer, writers)
            identity = {"kind": tokenizer.kind, "sha256": sha256(directory / "tokenizer.json")}
            manifest = {"format": FORMAT, "tokenizer": identity, "vocab_size": tokenizer.vocab_size, "dtype": dtype}
            manifest = complete(directory, manifest, origin, writers)
    summarise(out, manifest)
    return out, True


def merge(config: PrepareConfig) -> tuple[Path, bool]:
    """Join the parts of a dataset to what one run makes, byte for byte; return its folder, and whether it had to be.

    Raises ValueError for a part that is missing, damaged, or of other text or arguments than the first.
    """
    out = config.out
    if out is None or config != PrepareConfig((), out=out, force=config.force, merge=True):
        raise ValueError("--merge needs --out, the dataset whose parts to join, and takes nothing else but --force")
    parts = find_parts(out)
    first, manifest = next(iter(parts.items()))
    origin = {key: value for key, value in manifest["origin"].items() if key != "part"}
    if is_made(out, origin, config.force):
        return out, False
    total = sum(counts["bytes"] for found in parts.values() for counts in found["splits"].values())
    with new_directory(out) as directory, progress("merging", total) as bar:
        shutil.copyfile(intact(first, "tokenizer.json", manifest["tokenizer"]["sha256"]), directory / "tokenizer.json")
        writers = {split: ShardWriter(directory, split, manifest["dtype"]) for split in SPLITS}
        for part, found in parts.items():
            for split, counts in found["splits"].items():
                for shard in counts["shards"]:
                    writers[split].write(np.load(intact(part, shard["file"], shard["sha256"]), mmap_mode="r"))
                writers[split].counts["bytes"] += counts["bytes"]
                writers[split].counts["documents"] += counts["documents"]
                bar.update(counts["bytes"])
        manifest = complete(directory, manifest, origin, writers)
    summarise(out, manifest)
    return out, True


def parts_of(out: Path) -> Path:
    return out.parent / f"{out.name}.parts"


def remedy(part: Path) -> str:
    return f"python prepare.py INPUT --out {part.parent.with_suffix('')} --part {part.name.replace('-of-', '/')}"


def find_parts(out: Path) -> dict[Path, dict[str, Any]]:
    """The folders and manifests of a dataset's parts, in order. Raises ValueError if they don't make a whole."""
    folder = parts_of(out)
    names = [path.name for path in folder.glob("*") if re.fullmatch("[0-9]+-of-[0-9]+", path.name)]
    counts = sorted({int(name.split("-")[-1]) for name in names})
    if not counts:
        raise ValueError(f"{folder} holds no parts; make each with: {remedy(folder / '1-of-N')}")
    if len(counts) > 1:
        sorts = " and ".join(f"{folder}/*-of-{count}" for count in counts)
        raise ValueError(f"there are parts of different counts, {sorts}; remove those that you don't want")
    parts = {}
    for number in range(1, counts[0] + 1):
        part = folder / f"{number}-of-{counts[0]}"
        found = manifest_of(part)
        if not found:
            state = "damaged; remove it, and" if part.exists() else "missing;"
            raise ValueError(f"{part} is {state} make it with: {remedy(part)}")
        parts[part] = found
        first, expected = next(iter(parts.items()))
        expected = expected | {"origin": expected["origin"] | {"part": f"{number}/{counts[0]}"}}
        if other := differences(found, expected):
            raise ValueError(f"{part} was made with {other}, unlike {first}; make it again: {remedy(part)} --force")
    return parts


def intact(part: Path, file: str, expected_sha256: str) -> Path:
    """The path of a part's file. Raises ValueError if it is not what was written."""
    if not (part / file).is_file() or sha256(part / file) != expected_sha256:
        raise ValueError(f"{part / file} is damaged; make it again: {remedy(part)} --force")
    return part / file


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
    part_of(config)


def part_of(config: PrepareConfig) -> tuple[int, int]:
    """Which part of how many to make: 1, 1 is all. Raises ValueError if there is no such part."""
    match = re.fullmatch("([0-9]+)/([0-9]+)", "1/1" if config.part is None else config.part)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise ValueError(f"--part is {config.part!r}; of three parts it must be 1/3, 2/3 or 3/3")
    return part, parts


def default_name(name: str) -> str:
    """The dataset's name for an input: a file or address without its endings, a folder's own name."""
    return "stdin" if name == "-" else Path(name.split("?")[0]).resolve().name.split(".")[0] or "text"


def is_made(out: Path, origin: dict[str, Any], force: bool) -> bool:
    """Whether out holds this very dataset, and may keep it. Raises ValueError for what must not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    manifest = manifest_of(out)
    if not manifest:
        raise ValueError(f"{out} exists and is not a dataset; choose another place with --out")
    if force:
        return False
    if other := differences(manifest, manifest | {"origin": origin}):
        raise ValueError(f"{out} was made with {other}; use --force to replace it, or another --out")
    return True


def manifest_of(path: Path) -> dict[str, Any]:
    """The manifest of a dataset or a part of one; empty where there is none that can be read."""
    try:
        found = read_json(path / "manifest.json")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    ours = isinstance(found, dict) and found.keys() >= {"origin", "tokenizer"}  # checkpoints have a manifest too
    return found if ours else {}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What a manifest's dataset was made with that another's was not; empty if with the same."""
    names = {"content": "other text", "sha256": "another tokenizer.json"}
    found, expected = (manifest["origin"] | manifest["tokenizer"] for manifest in (found, expected))
    keys = [key for key in found.keys() | expected if found.get(key) != expected.get(key)]
    return ", ".join(sorted(names.get(key, f"{key} {found.get(key)}") for key in keys))


def progress(what: str, total: int) -> tqdm:
    return tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=None, dynamic_ncols=True, leave=False)


def make_tokenizer(sources: list[Source], config: PrepareConfig, census: Census) -> Tokenizer:
    """The tokenizer that the config names, trained on the corpus if it is one that trains."""
    if config.tokenizer == "char":
        return CharTokenizer("".join(sorted(census.alphabet)))
    if config.tokenizer != "bpe":
        return named_tokenizer(config.tokenizer)
    with progress("training BPE", census.bytes) as bar:

        def texts() -> Iterator[str]:
            for document in share(sources, census, config.field, config.errors):
                for text in document():
                    for start in range(0, len(text), TRAINING_CHARACTERS):
                        yield text[start : start + TRAINING_CHARACTERS]
                    bar.update(len(text.encode()))

        return train_bpe(texts(), config.vocab_size)


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
) -> None:
    """Encode the part on all cores and write it in order."""

    def encoded(batch: list[tuple[str, bool]]) -> np.ndarray:
        parts = []
        for text, ends in batch:
            parts.append(tokenizer.encode(text))
            if ends and tokenizer.end_of_text is not None:
                parts.append(np.array([tokenizer.end_of_text], np.uint32))
        return np.concatenate(parts) if parts else np.empty(0, np.uint32)

    # Threads are enough: tiktoken and NumPy work outside Python's lock. A few batches wait, never the whole corpus.
    part, parts = part_of(config)
    mine = share(sources, census, config.field, config.errors, part, parts)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    waiting = collections.deque()
    with ThreadPoolExecutor(workers) as pool, progress("encoding", census.bytes // parts) as bar:

        def write_oldest() -> None:
            split, batch, ids = waiting.popleft()
            writers[split].write(ids.result())
            size = sum(len(text.encode()) for text, _ in batch)
            writers[split].counts["bytes"] += size
            writers[split].counts["documents"] += sum(ends for _, ends in batch)
            bar.update(size)

        for split, batch in batches(assigned(mine, census, config.val_fraction)):
            waiting.append((split, batch, pool.submit(encoded, batch)))
            if len(waiting) > 2 * workers:
                write_oldest()
        while waiting:
            write_oldest()


def complete(
    directory: Path, manifest: dict[str, Any], origin: dict[str, Any], writers: dict[str, ShardWriter]
) -> dict[str, Any]:
    """Close the writers; write, and return, the manifest with their account of the splits, made from that origin.

    Raises ValueError if a split of a whole dataset is too short for one window.
    """
    splits = {split: writer.close() for split, writer in writers.items()}
    for split, counts in splits.items():
        if counts["tokens"] < 2 and "part" not in origin:
            documents = sum(counts["documents"] for counts in splits.values())
            raise ValueError(
                f"the {split} split has {counts['tokens']} tokens of {documents} documents, too few for one window; "
                f"give more text, or change --val-fraction"
            )
    manifest = manifest | {"splits": splits, "origin": origin}
    write_json(directory / "manifest.json", manifest)
    return manifest


def summarise(out: Path, manifest: dict[str, Any]) -> None:
    """Print what was made."""
    splits, found = manifest["splits"], manifest["vocab_size"]
    documents, size, tokens = (sum(c[key] for c in splits.values()) for key in ("documents", "bytes", "tokens"))
    asked = manifest["origin"].get("vocab_size", found)
    fewer = f" (of {asked:,} asked: the text has no more pairs)" if found < asked else ""
    print(f"{out}")
    print(f"  documents        {documents:>15,}")
    print(f"  UTF-8 bytes      {size:>15,}")
    print(f"  tokens           {tokens:>15,}")
    print(f"  bytes per token  {size / max(1, tokens):>15.2f}")
    print(f"  vocabulary       {found:>15,}  {manifest['tokenizer']['kind']}{fewer}")
    for split, counts in splits.items():
        files = ", ".join(shard["file"] for shard in counts["shards"][:3]) + (
            ", …" if len(counts["shards"]) > 3 else ""
        )
        print(f"  {split:<5} tokens     {counts['tokens']:>15,}  {files} ({counts['documents']:,} documents end here)")


if __name__ == "__main__":
    run_command(main)
