"""A corpus → data/<name>/: its shards, encoded by threads or on a Ray cluster, and a manifest.

Each finished unit has a summary beside its shards, so that a later run skips it.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import secrets
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import files
from engine.core.cli import count_noun, progress_bar
from engine.core.errors import UserError, import_optional
from engine.data import dataset
from engine.data.dataset import SPLIT_NAMES
from engine.data.documents import corpus as documents
from engine.data.documents.corpus import Corpus, Unit
from engine.data.ids import Batch, EncodingRule, encode_batch
from engine.data.shards.shard_file import ShardWriter
from engine.data.sources.notes import Notes
from engine.data.sources.source import wrap_errors
from engine.data.split import EXAMPLES_DTYPE
from engine.data.tokenizer import Tokenizer, load_tokenizer

RAY_TIMEOUT_SECONDS = 10  # to reach a cluster
MAX_RAY_RETRIES = 5  # of a unit, after its worker or machine was lost


@dataclass(frozen=True)
class EncodingJob:
    """How a process, on this or another machine, encodes units."""

    folder: Path  # for the files of units, and tokenizer.json
    rule: EncodingRule
    vocab_size: int
    settings: str  # JSON of all other settings that the shards depend on

    @property
    def dtype(self) -> str:
        """The dtype of token shards."""
        if self.rule.split_rule.has_examples:
            return EXAMPLES_DTYPE
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def summary_path(self, unit: Unit) -> Path:
        """Return the path of a finished unit's summary, which depends on inputs and settings."""
        versions = documents.source_versions(source for source, _, _ in unit.parts)
        parts = [(unit.split, index, count) for _, index, count in unit.parts]
        content = [versions, parts, sorted(unit.dropped), repr(self.rule), self.settings]
        key = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
        return self.folder / f"unit-{unit.number:05d}-{key}.npz"

    def is_finished(self, unit: Unit) -> bool:
        """Return whether a unit has a summary, and its shards are intact and in the folder."""
        with contextlib.suppress(FileNotFoundError):
            shards = dataset.list_shards(self.read_summary(unit)).items()
            return all(files.sha256(self.folder / name) == sha256 for name, sha256 in shards)
        return False

    def read_summary(self, unit: Unit) -> dict[str, Any]:
        """Read the summary of a finished unit."""
        with np.load(self.summary_path(unit)) as arrays:
            return {**json.loads(str(arrays["content"])), "texts": arrays["texts"]}


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
    tokenizer: Tokenizer | None = None,
) -> int:
    """Encode units in order with ``threads`` threads; None: one for each core.

    Threads suffice for text, because splintr and NumPy release Python's lock; rows and chats
    are parsed in one thread at a time. ``advance`` gets the number of characters of each batch.
    Returns the size of the sources in bytes.
    """
    tokenizer = tokenizer or load_tokenizer(job.folder / "tokenizer.json")
    tokenizer.load_runner()
    encode = partial(encode_batch, rule=job.rule, tokenizer=tokenizer)
    items = documents.make_batches(units, join_pieces=not tokenizer.can_encode_pieces)
    batches = map_in_order(encode, items, threads or os.cpu_count() or 1)
    for unit, group in itertools.groupby(batches, key=attrgetter("unit")):
        write_unit(job, unit, group, advance)
    return sum(unit.size for unit in units)


def write_unit(
    job: EncodingJob, unit: Unit, batches: Iterable[Batch], advance: Callable[[int], Any]
) -> None:
    """Write the shards of a unit, then its summary."""
    has_examples = job.rule.split_rule.has_examples
    numbers = ["tokens", "bytes", "documents", *["targets"] * has_examples]
    splits: dict[str, Any] = {
        split: {**dict.fromkeys(numbers, 0), "sources": []} for split in SPLIT_NAMES
    }
    shards = {"shards": "", "lengths": "-lengths"} if has_examples else {"shards": ""}
    writers = {}
    texts = []
    notes = Notes()
    with contextlib.ExitStack() as stack:
        for split, (name, suffix) in itertools.product(SPLIT_NAMES, shards.items()):
            path = job.folder / f"{split}{suffix}-{unit.number:05d}.npy"
            writers[split, name] = ShardWriter(path)
            stack.callback(writers[split, name].file.close)
        for batch in batches:
            for split, counts in splits.items():
                encoded = [text for text in batch.encoded if text.split == split]
                arrays = [np.empty(0, np.uint32), *(text.ids for text in encoded)]
                ids = np.concatenate(arrays, dtype=job.dtype, casting="unsafe")
                writers[split, "shards"].write(ids)
                if has_examples:
                    lengths = [len(text.ids) for text in encoded]
                    writers[split, "lengths"].write(np.array(lengths, dataset.LENGTHS_DTYPE))
                    counts["targets"] += sum(text.num_targets for text in encoded)
                tokens = [{"source": text.source, "tokens": len(text.ids)} for text in encoded]
                counts["sources"] += dataset.merge_sources(tokens)
                counts["tokens"] += len(ids)
                counts["bytes"] += sum(text.num_bytes for text in encoded)
                counts["documents"] += sum(text.ends_document for text in encoded)
            texts.append(batch.texts)
            notes.merge(batch.notes)
            advance(batch.num_characters)
        for (split, name), writer in writers.items():
            splits[split][name] = writer.close()
    notes.merge(unit.notes)
    content = files.to_json({"splits": splits, "notes": notes})
    summary = io.BytesIO()
    np.savez(summary, content=content, texts=np.concatenate(texts))
    files.atomic_write(job.summary_path(unit), summary.getvalue())


def encode_on_ray(job: EncodingJob, units: Sequence[Unit], address: str) -> Iterator[int]:
    """Encode units as tasks of Ray. Yields the size in bytes of each finished unit.

    ``address`` is local, local:4 (workers), or that of a running cluster, whose machines need this
    project, the sources and the output at the same paths. Raises UserError if it is unreachable.
    """
    ray = import_optional("ray", f"--ray {address}", extra="ray")
    host, _, number = address.removeprefix("ray://").rpartition(":")
    is_local = "local" in (host, address)
    with wrap_errors(f"--ray {address}", "Give local, local:4 (workers) or a running cluster."):
        if host and not is_local:  # fail now: Ray would retry for minutes
            socket.create_connection((host, int(number)), RAY_TIMEOUT_SECONDS).close()
        ray.init(
            address="local" if is_local else address,
            num_cpus=int(number) if is_local and host else None,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}},
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
    tokenizer.save(folder / "tokenizer.json")
    run = "" if corpus.version else secrets.token_hex()  # the sources may change until the next
    settings = files.to_json([dataset.FORMAT_VERSION, origin, tokenizer.fingerprint, run])
    is_parsed = origin.get("parse_special", False)
    rule = EncodingRule(corpus.rule, is_parsed, origin.get("separator", ""))
    job = EncodingJob(folder, rule, tokenizer.vocab_size, settings)
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
                encode_units(job, missing, threads, bar.update, tokenizer)
        manifest = make_manifest(job, units, origin, tokenizer, corpus.notes)
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
    job: EncodingJob,
    units: Sequence[Unit],
    origin: dict[str, Any],
    tokenizer: Tokenizer,
    notes: Notes,
) -> dict[str, Any]:
    """Make the manifest from the summaries of units. Raises UserError if a split is too short."""
    summaries = [job.read_summary(unit) for unit in units]
    texts = [summary["texts"] for summary in summaries]
    counts = Notes().merge(notes, *(summary["notes"] for summary in summaries)).counts()
    hashes, lengths = documents.aggregate_documents(np.concatenate(texts))
    statistics: dict[str, Any] = {
        "documents": len(hashes),
        "repeats": len(hashes) - len(np.unique(hashes)),
        "longest": int(lengths.max(initial=0)),
        "dropped": sum(len(unit.dropped) for unit in units),
        "notes": counts,
    }
    splits = {}
    for split in SPLIT_NAMES:
        splits[split] = dataset.add_up([summary["splits"][split] for summary in summaries])
        num_tokens = splits[split]["tokens"]
        if num_tokens < 2 or not splits[split]["bytes"]:
            rows = [f"{count:,} {note}" for note, count in counts.items() if note[:4] == "rows"]
            source = ", ".join([count_noun(len(hashes), "document"), *rows])
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
