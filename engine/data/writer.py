"""A corpus → data/<name>/: its shards, encoded by threads or on a Ray cluster, and a manifest.

Each finished unit has a summary beside its shards, so that a later run skips it.
"""

import hashlib
import io
import itertools
import json
import os
import re
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine.core import files
from engine.core.cli import count_noun, progress_bar
from engine.core.errors import UserError, import_optional
from engine.data import dataset
from engine.data.chats.chat import count_targets, encode_example, encode_text
from engine.data.dataset import SPLIT_NAMES
from engine.data.inputs import documents
from engine.data.inputs.documents import Corpus, Piece, SplitRule, Unit
from engine.data.inputs.readers import Text
from engine.data.inputs.sources import wrap_errors
from engine.data.inputs.text import merge_notes
from engine.data.split import EXAMPLES_DTYPE
from engine.data.tokenizer import Tokenizer, load_tokenizer

RAY_TIMEOUT_SECONDS = 10  # to reach a cluster
MAX_RAY_RETRIES = 5  # of a unit, after its worker or machine was lost


class EncodedText(NamedTuple):
    """Consecutive pieces of a document for one split, as token ids."""

    split: str
    ids: np.ndarray
    num_targets: int  # of an example
    num_bytes: int  # in UTF-8; of an example, those of its targets
    ends_document: bool
    source: str


@dataclass
class Batch:
    """Encoded texts of a unit."""

    unit: Unit
    encoded: list[EncodedText] = field(default_factory=list)
    texts: list[tuple[bytes, int, bool, bool]] = field(default_factory=list)  # see TEXT_DTYPE
    num_characters: int = 0


@dataclass(frozen=True)
class EncodingJob:
    """How a process, on this or another machine, encodes units."""

    folder: Path  # for the files of units, and tokenizer.json
    rule: SplitRule
    vocab_size: int
    settings: str  # JSON of all other settings that the shards depend on
    parse_special: bool = False  # names of special tokens in texts become these tokens
    separator: str = ""  # ends a document where the tokenizer has no token for it

    @property
    def dtype(self) -> str:
        """The dtype of token shards."""
        if self.rule.has_examples:
            return EXAMPLES_DTYPE
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def summary_path(self, unit: Unit) -> Path:
        """Return the path of a finished unit's summary, which depends on inputs and settings."""
        versions = documents.source_versions(source for source, _, _ in unit.parts)
        parts = [(unit.split, index, count) for _, index, count in unit.parts]
        content = [versions, parts, sorted(unit.dropped), repr(self.rule), self.settings]
        key = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
        return self.folder / f"unit-{unit.number:05d}-{key if versions else 'unknown'}.npz"

    def is_finished(self, unit: Unit) -> bool:
        """Return whether a unit has a summary, and its shards are intact and in the folder."""
        if not self.summary_path(unit).exists():
            return False
        shards = dataset.list_shards(self.read_summary(unit))
        paths = {self.folder / name: sha256 for name, sha256 in shards.items()}
        return all(path.exists() and files.sha256(path) == paths[path] for path in paths)

    def read_summary(self, unit: Unit) -> dict[str, Any]:
        """Read the summary of a finished unit."""
        with np.load(self.summary_path(unit)) as arrays:
            return {**json.loads(str(arrays["content"])), "texts": arrays["texts"]}


def encode_batch(
    unit: Unit, texts: Iterable[Text], job: EncodingJob, tokenizer: Tokenizer
) -> Batch:
    """Split, hash and encode texts, of which the pieces of a document may be joined first."""
    batch = Batch(unit)
    pieces: list[Piece] = []
    for text in texts:
        digest = documents.digest_of(text)
        pieces += job.rule.pieces(text, digest, unit.split)
        is_val = any(piece.split == "val" for piece in pieces)
        num_tokens = 0
        if text.ends_document or tokenizer.can_encode_pieces:
            for split, group in itertools.groupby(pieces, key=attrgetter("split")):
                _, contents, starts, ends = zip(*group, strict=True)
                content = "".join(contents)
                encoded = encode_content(job, tokenizer, content, starts[0], ends[-1])
                batch.encoded.append(EncodedText(split, *encoded, ends[-1], text.source))
                num_tokens += len(encoded[0])
            pieces.clear()
        batch.texts.append((digest[documents.HASH_BYTES], num_tokens, text.ends_document, is_val))
        batch.num_characters += len(text.text)
    return batch


def encode_content(
    job: EncodingJob, tokenizer: Tokenizer, content: str, starts: bool, ends: bool
) -> tuple[np.ndarray, int, int]:
    """Return the ids of text, or of an example as JSON; its targets, and bytes: see EncodedText."""
    if job.rule.has_examples:
        ids = encode_example(tokenizer, json.loads(content), job.parse_special)
        return ids, *count_targets(tokenizer, ids)
    ids = encode_text(tokenizer, content, job.parse_special, starts, ends, job.separator)
    return ids, 0, len(content.encode()) + len(job.separator) * ends


def map_in_order(function: Callable, items: Iterable[tuple], num_threads: int) -> Iterator[Any]:
    """Yield the results of function(*item) in order; threads compute a few items ahead."""
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            pending.append(pool.submit(function, *item))
            if len(pending) > 2 * num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def encode_units(
    job: EncodingJob,
    units: Sequence[Unit],
    threads: int | None = None,
    advance: Callable[[int], Any] = lambda num_characters: None,
) -> int:
    """Encode units in order with ``threads`` threads; None: one for each core.

    Threads suffice for text, because tiktoken and NumPy release Python's lock; rows and chats
    are parsed in one thread at a time. ``advance`` gets the number of characters of each batch.
    Returns the size of the sources in bytes.
    """
    tokenizer = load_tokenizer(job.folder / "tokenizer.json")
    encode = partial(encode_batch, job=job, tokenizer=tokenizer)
    items = documents.make_batches(units, join_pieces=not tokenizer.can_encode_pieces)
    batches = map_in_order(encode, items, threads or os.cpu_count() or 1)
    for unit, group in itertools.groupby(batches, key=attrgetter("unit")):
        write_unit(job, unit, group, advance)
    return sum(unit.size for unit in units)


def write_unit(
    job: EncodingJob, unit: Unit, batches: Iterable[Batch], advance: Callable[[int], Any]
) -> None:
    """Write the shards of a unit, then its summary."""
    has_examples = job.rule.has_examples
    names = ["tokens", "bytes", "documents", *["targets"] * has_examples]
    zeros: dict[str, Any] = dict.fromkeys(names, 0)
    splits = {split: {**zeros, "shards": [], "sources": []} for split in SPLIT_NAMES}
    texts = []
    names = [*SPLIT_NAMES, *(f"{split}-lengths" for split in SPLIT_NAMES if has_examples)]
    paths = {name: job.folder / f"{name}-{unit.number:05d}.npy" for name in names}
    writers = {name: dataset.ShardWriter(path) for name, path in paths.items()}
    for batch in batches:
        for split, counts in splits.items():
            encoded = [text for text in batch.encoded if text.split == split]
            ids = np.concatenate([text.ids for text in encoded] or [np.empty(0, np.uint32)])
            writers[split].write(ids.astype(job.dtype, copy=False))
            if has_examples:
                lengths = [len(text.ids) for text in encoded]
                writers[f"{split}-lengths"].write(np.array(lengths, dataset.LENGTHS_DTYPE))
                counts["targets"] += sum(text.num_targets for text in encoded)
            counts["tokens"] += len(ids)
            counts["bytes"] += sum(text.num_bytes for text in encoded)
            counts["documents"] += sum(text.ends_document for text in encoded)
            tokens = [{"source": text.source, "tokens": len(text.ids)} for text in encoded]
            counts["sources"] += dataset.merge_sources(tokens)
        texts.append(np.array(batch.texts, documents.TEXT_DTYPE))
        advance(batch.num_characters)
    for split, counts in splits.items():
        counts["shards"] = writers[split].close()
        if has_examples:
            counts["lengths"] = writers[f"{split}-lengths"].close()
    content = files.to_json({"splits": splits, "notes": unit.notes})
    summary = io.BytesIO()
    np.savez(summary, content=content, texts=np.concatenate(texts))
    files.atomic_write(job.summary_path(unit), summary.getvalue())


def encode_on_ray(job: EncodingJob, units: Sequence[Unit], address: str) -> Iterator[int]:
    """Encode units as tasks of Ray. Yields the size in bytes of each finished unit.

    ``address`` is local, local:4 (workers), or that of a running cluster, whose machines need this
    project, the sources and the output at the same paths. Raises UserError if it is unreachable.
    """
    ray = import_optional("ray", f"--ray {address}", extra="ray")
    local = re.fullmatch("local(?::([1-9][0-9]*))?", address)
    host = None if local else re.fullmatch(r"(?:ray://)?(.*):([0-9]+)", address)
    with wrap_errors(f"--ray {address}", "Give local, local:4 (workers) or a running cluster."):
        if host:  # fail now: Ray would retry for minutes
            socket.create_connection((host[1], int(host[2])), RAY_TIMEOUT_SECONDS).close()
        ray.init(
            address="local" if local else address,
            num_cpus=int(local[1]) if local and local[1] else None,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    try:
        task = ray.remote(num_cpus=1, max_retries=MAX_RAY_RETRIES)(encode_units)
        pending = [task.remote(job, [unit], threads=1) for unit in units]
        while pending:
            (finished,), pending = ray.wait(pending)
            yield ray.get(finished)
    except ray.exceptions.RayTaskError as error:  # raised by encode_units
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--ray: lost a task ({reason}). Run it again.") from None
    finally:
        ray.shutdown()


def work_folder(out: Path) -> Path:
    """Return the folder beside a dataset that holds its finished units until it is complete."""
    return out.resolve().with_name(f".{out.resolve().name}.work")


def write_dataset(
    out: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    origin: dict[str, Any],
    threads: int | None = None,
    ray: str | None = None,
) -> None:
    """Encode a corpus into ``out``, which appears when it is complete.

    ``origin`` holds the settings of the dataset. Units that an interrupted run has finished are
    not encoded again. Raises UserError for unusable text.
    """
    folder = work_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("unit-*-unknown.npz"):
        path.unlink()  # it is unknown whether a source has changed since
    tokenizer.save(folder / "tokenizer.json")
    settings = files.to_json([dataset.FORMAT_VERSION, origin, tokenizer.fingerprint])
    options = (origin.get("parse_special", False), origin.get("separator", ""))
    job = EncodingJob(folder, corpus.rule, tokenizer.vocab_size, settings, *options)
    units = corpus.units
    try:
        if origin.get("deduplicate"):
            texts = corpus.digests()
            origin = {"content": documents.content_hash(units, texts), **origin}
            repeats = documents.find_repeats(texts)
            units = [replace(unit, dropped=repeats[unit.number]) for unit in units]
        missing = [unit for unit in units if not job.is_finished(unit)]
        total = sum(unit.size for unit in missing) if corpus.is_plain or ray else None
        with progress_bar(desc="encoding", total=total, unit="B", unit_scale=True) as bar:
            if ray and missing:
                for num_bytes in encode_on_ray(job, missing, ray):
                    bar.update(num_bytes)
            else:
                encode_units(job, missing, threads, bar.update)
        manifest = make_manifest(job, units, origin, tokenizer)
    except BaseException as error:
        num_finished = len([*folder.glob("unit-*.npz")])
        if num_finished == 0 or (num_finished == len(units) and isinstance(error, UserError)):
            shutil.rmtree(folder)  # nothing to resume from
        raise
    manifest["sha256"] = dataset.hash_manifest(manifest)
    with files.atomic_directory(out) as directory:
        files.write_json(directory / "manifest.json", manifest)
        if corpus.version:
            files.write_json(directory / dataset.VERSION_FILE, corpus.version)
        for name in ["tokenizer.json", *dataset.list_shards(manifest)]:
            (folder / name).rename(directory / name)
        shutil.rmtree(folder)


def make_manifest(
    job: EncodingJob, units: Sequence[Unit], origin: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Make the manifest from the summaries of units. Raises UserError if a split is too short."""
    summaries = [job.read_summary(unit) for unit in units]
    texts = [summary["texts"] for summary in summaries]
    hashes, lengths, is_val = documents.aggregate_documents(np.concatenate(texts))
    statistics: dict[str, Any] = {
        "documents": len(hashes),
        "repeats": len(hashes) - len(np.unique(hashes)),
        "longest": int(lengths.max(initial=0)),
        "val_distinct": len(np.unique(hashes[is_val])),
        "val_copies": int(np.isin(hashes[is_val], hashes[~is_val]).sum()),
        "dropped": sum(len(unit.dropped) for unit in units),
        "notes": merge_notes((summary["notes"] for summary in summaries), len(hashes)),
    }
    splits = {}
    for split in SPLIT_NAMES:
        splits[split] = dataset.add_up([summary["splits"][split] for summary in summaries])
        num_tokens = splits[split]["tokens"]
        if num_tokens < 2 or not splits[split]["bytes"]:
            size = count_noun(len(hashes), "document")
            source = f"{size}, {statistics['repeats']} of them repeats"
            problem = f"must have text of at least 2 tokens (got {num_tokens}, of {source})"
            advice = "Give other documents, another --val-fraction or --val"
            raise UserError(f"the {split} split {problem}. {advice}.")
    return {
        "format": dataset.FORMAT_VERSION,
        "tokenizer": {"kind": tokenizer.kind, "sha256": tokenizer.fingerprint},
        "vocab_size": job.vocab_size,
        "dtype": job.dtype,
        "splits": splits,
        "origin": {"content": documents.content_hash(units, texts), **origin},
        "statistics": statistics,
    }
