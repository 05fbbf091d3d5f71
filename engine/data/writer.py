"""A corpus → data/<name>/: its shards, encoded by threads or on a Ray cluster, and a manifest.

Each unit of work that is finished leaves a record beside its shards. A later run with the same
text and settings skips it.
"""

import collections
import contextlib
import hashlib
import os
import re
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from engine.core import files
from engine.core.cli import progress
from engine.core.errors import UserError
from engine.data import dataset, splits
from engine.data.chat import make_encoder
from engine.data.inputs.sources import import_optional, wrap_errors
from engine.data.splits import SPLITS, Batch, Corpus, Rule, Unit
from engine.data.tokenizer import Tokenizer, load_tokenizer

RAY_TIMEOUT_SECONDS = 10  # to reach a cluster
MAX_RAY_RETRIES = 5  # of a unit whose worker or machine was lost


@dataclass(frozen=True)
class Job:
    """How units are encoded, in any process."""

    folder: Path  # for the files of units, and tokenizer.json
    rule: Rule
    separator: str  # ends a document where the tokenizer has no token for it
    vocab_size: int
    settings: str  # everything else that the tokens depend on

    @property
    def dtype(self) -> str:
        """The dtype of token shards."""
        if self.rule.examples:
            return dataset.EXAMPLES_DTYPE
        return "uint16" if self.vocab_size <= 2**16 else "uint32"

    def key(self, unit: Unit) -> str:
        """Hash what a unit's shards depend on; "" if the version of a source is unknown."""
        parts = [(PurePath(source.name).name, *source.info, index, count) for source, index, count in unit.parts]
        if not all(version for _, _, version, _, _ in parts):
            return ""
        content = [parts, sorted(unit.dropped), repr(self.rule), self.separator, self.settings]
        return hashlib.sha256(files.to_json(content).encode()).hexdigest()

    def path(self, unit: Unit, suffix: str) -> Path:
        """Return the path of a unit's record (.json), or of its arrays (.npz)."""
        return self.folder / f"unit-{unit.number:05d}{suffix}"

    def read_record(self, unit: Unit) -> dict[str, Any] | None:
        """Read the record of a finished unit; None if it is missing or of other text."""
        key = self.key(unit)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = files.read_json(self.path(unit, ".json"))
            hashes = record["files"].items()
            is_intact = all(files.sha256(self.folder / name) == sha256 for name, sha256 in hashes)
            if key and record["key"] == key and is_intact:
                return record
        return None


class UnitWriter:
    """Writes the shards of a unit, and at last its record."""

    def __init__(self, job: Job, unit: Unit):
        self.job = job
        self.unit = unit
        self.counts: dict[str, Counter] = {split: Counter() for split in SPLITS}
        self.used = np.zeros(job.vocab_size, bool)  # which token ids occur
        self.texts: list[np.ndarray] = []
        dtypes = {split: job.dtype for split in SPLITS}
        if job.rule.examples:
            dtypes |= {f"{split}-lengths": dataset.LENGTHS_DTYPE for split in SPLITS}
        self.writers = {
            name: dataset.ShardWriter(job.folder, f"{name}-{unit.number:05d}", dtype) for name, dtype in dtypes.items()
        }

    def write(self, batch: Batch) -> None:
        """Append a batch."""
        for split in SPLITS:
            ids = np.concatenate(batch.ids[split] or [np.empty(0, np.uint32)])
            self.used[np.maximum(ids, ~ids) if self.job.rule.examples else ids] = True
            self.writers[split].write(ids)
            if self.job.rule.examples:
                lengths = np.array([len(ids) for ids in batch.ids[split]], np.uint32)
                self.writers[f"{split}-lengths"].write(lengths)
            self.counts[split].update(batch.counts[split])
        self.texts.append(splits.text_rows(batch.texts))

    def close(self) -> None:
        """Complete the shards and then the record, which makes the unit finished."""
        arrays = self.job.path(self.unit, ".npz")
        np.savez(arrays, texts=np.concatenate(self.texts), used=self.used)
        files.fsync(arrays)
        shards = {name: writer.close() for name, writer in self.writers.items()}
        hashes = {shard["file"]: shard["sha256"] for series in shards.values() for shard in series}
        record = {
            "key": self.job.key(self.unit),
            "files": {arrays.name: files.sha256(arrays), **hashes},
            "counts": self.counts,
            "shards": shards,
        }
        files.atomic_write(self.job.path(self.unit, ".json"), files.to_json(record).encode())


def encode_units(
    job: Job,
    units: Iterable[Unit],
    threads: int | None = None,
    advance: Callable[[int], Any] = lambda num_characters: None,
) -> None:
    """Encode units in order with this many threads; None: one for each core.

    Threads suffice: tiktoken and NumPy release Python's lock. A few batches wait in memory.
    """
    tokenizer = load_tokenizer(job.folder / "tokenizer.json")
    is_whole = not tokenizer.can_encode_pieces
    encode = make_encoder(tokenizer, job.separator, job.rule.examples)
    num_threads = threads or os.cpu_count() or 1
    waiting: collections.deque[tuple[Unit, bool, Future[Batch]]] = collections.deque()
    writers: dict[int, UnitWriter] = {}  # of the one unit that is begun

    def write_next() -> None:
        """Write the batch that was submitted first."""
        unit, is_last, future = waiting.popleft()
        batch = future.result()
        if unit.number not in writers:
            writers[unit.number] = UnitWriter(job, unit)
        writers[unit.number].write(batch)
        advance(batch.num_characters)
        if is_last:
            writers.pop(unit.number).close()

    with ThreadPoolExecutor(num_threads) as pool:
        for unit, texts, is_last in splits.make_batches(units, is_whole):
            future = pool.submit(splits.encode_batch, texts, job.rule, encode, is_whole)
            waiting.append((unit, is_last, future))
            if len(waiting) > 2 * num_threads:
                write_next()
        while waiting:
            write_next()


def encode_unit(job: Job, unit: Unit) -> int:
    """Encode one unit with one thread, as a task of Ray. Returns the size of its sources."""
    encode_units(job, [unit], threads=1)
    return unit.size


def work_folder(out: Path) -> Path:
    """Return the folder beside a dataset that holds its finished units while it is made."""
    return out.resolve().with_name(f".{out.resolve().name}.work")


def remove_work_folder(out: Path) -> None:
    """Remove what a run left that died just after its dataset was complete."""
    if work_folder(out).exists():
        with contextlib.suppress(UserError, OSError), files.exclusive_lock(out):
            shutil.rmtree(work_folder(out))


def write_dataset(
    out: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    origin: dict[str, Any],
    threads: int | None = None,
    ray: str | None = None,
) -> None:
    """Encode a corpus into ``out``, which appears when it is complete.

    origin tells what the dataset is made from. Units that an interrupted run has finished are
    not encoded again. Raises UserError for text that cannot be used.
    """
    folder = work_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    tokenizer_sha256 = files.sha256(folder / "tokenizer.json")
    settings = files.to_json([dataset.FORMAT_VERSION, origin, tokenizer_sha256])
    job = Job(folder, corpus.rule, origin.get("separator", ""), tokenizer.vocab_size, settings)
    units = corpus.units
    content = None
    try:
        if origin.get("deduplicate"):
            texts = corpus.digests()
            content = splits.content_hash(texts)
            repeats = splits.find_repeats(texts)
            units = [replace(unit, dropped=repeats[unit.number]) for unit in units]
        encode_missing(job, units, corpus.is_plain, threads, ray)
        manifest = make_manifest(job, units, origin, content)
    except BaseException as error:
        finished = [*folder.glob("unit-*.json")]
        if not finished or (len(finished) == len(units) and isinstance(error, UserError)):
            shutil.rmtree(folder)  # there is nothing to continue from
        raise
    with files.atomic_directory(out) as directory:
        for path in [folder / "tokenizer.json", *folder.glob("*.npy")]:
            link_or_move(path, directory / path.name)
        manifest["tokenizer"] = {"kind": tokenizer.kind, "sha256": tokenizer_sha256}
        files.write_json(directory / "manifest.json", manifest)
        if corpus.version:
            files.write_json(directory / dataset.VERSION_FILE, corpus.version)
    shutil.rmtree(folder)


def link_or_move(path: Path, target: Path) -> None:
    """Link a file, so that a run that dies now loses nothing; move it where links fail."""
    try:
        os.link(path, target)
    except OSError:
        path.rename(target)


def encode_missing(job: Job, units: Sequence[Unit], is_plain: bool, threads: int | None, ray: str | None) -> None:
    """Encode the units that have no valid record, after removing all other files."""
    missing = []
    valid_names = {"tokenizer.json"}
    for unit in units:
        record = job.read_record(unit)
        if record is None:
            missing.append(unit)
        else:
            valid_names |= {job.path(unit, ".json").name, *record["files"]}
    for path in job.folder.iterdir():
        if path.name not in valid_names:
            path.unlink()
    total_bytes = sum(unit.size for unit in missing) if is_plain or ray else None
    with progress("encoding", total_bytes) as bar:
        if not ray:
            encode_units(job, missing, threads, bar.update)
        elif missing:
            with ray_cluster(ray) as run:
                for num_bytes in run(encode_unit, [(job, unit) for unit in missing]):
                    bar.update(num_bytes)


def make_manifest(job: Job, units: Sequence[Unit], origin: dict[str, Any], content: str | None) -> dict[str, Any]:
    """Join the records of all units. Raises UserError if a split is too short."""
    records = [files.read_json(job.path(unit, ".json")) for unit in units]
    texts = []
    used = np.zeros(job.vocab_size, bool)
    for unit in units:
        with np.load(job.path(unit, ".npz")) as arrays:
            texts.append(arrays["texts"])
            used |= arrays["used"]
    rows = np.concatenate([splits.document_rows(unit_texts) for unit_texts in texts])
    facts = {
        "documents": len(rows),
        "repeats": len(rows) - int(splits.first_occurrences(rows).sum()),
        "longest": int(rows[:, 2].max(initial=0)),
        "vocabulary": int(used.sum()),
    }
    if origin.get("deduplicate"):
        facts["dropped"] = sum(len(unit.dropped) for unit in units)
    return {
        "format": dataset.FORMAT_VERSION,
        "vocab_size": job.vocab_size,
        "dtype": job.dtype,
        "splits": {split: join_split(split, records, facts["documents"]) for split in SPLITS},
        "origin": {"content": content or splits.content_hash(texts), **origin},
        "facts": facts,
    }


def join_split(split: str, records: list[dict[str, Any]], num_documents: int) -> dict[str, Any]:
    """Return what the manifest says of a split. Raises UserError if it is too short."""
    counts: Counter = Counter()
    for record in records:
        counts.update(record["counts"][split])
    if counts["tokens"] < 2:
        size = f"at least 2 tokens (got {counts['tokens']}, of {num_documents} documents)"
        raise UserError(f"the {split} split must have {size}. Change --val-fraction.")
    names = ["tokens", "bytes", "documents"]
    shards = {"shards": split}
    if f"{split}-lengths" in records[0]["shards"]:
        names.append("targets")
        shards["lengths"] = f"{split}-lengths"
    series = {key: [shard for record in records for shard in record["shards"][name]] for key, name in shards.items()}
    return {**{name: counts[name] for name in names}, **series}


@contextlib.contextmanager
def ray_cluster(address: str) -> Iterator[Callable[[Callable, Sequence[tuple]], Iterator[Any]]]:
    """Yield run(function, argument tuples), which yields results as they become available.

    address is local, local:4 for four workers on this machine, or that of a cluster. Its machines
    need this project, the sources and the output at the same paths.
    Raises UserError if the cluster cannot be reached.
    """
    ray = import_optional("ray", f"--ray {address}", extra="ray")
    local = re.fullmatch("local(?::([1-9][0-9]*))?", address)
    host = None if local else re.fullmatch(r"(?:ray://)?(.*):([0-9]+)", address)
    with wrap_errors(f"--ray {address}", "Give local, local:4 (workers) or a running cluster."):
        if host:  # Ray itself would try for minutes
            socket.create_connection((host[1], int(host[2])), RAY_TIMEOUT_SECONDS).close()
        ray.init(
            address="local" if local else address,
            num_cpus=int(local[1]) if local and local[1] else None,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}},
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )

    def run(function: Callable, tasks: Sequence[tuple]) -> Iterator[Any]:
        """Run tasks, again if their worker is lost; the first error of a task ends all."""
        remote = ray.remote(num_cpus=1, max_retries=MAX_RAY_RETRIES)(function)
        waiting = [remote.remote(*task) for task in tasks]
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            try:
                yield ray.get(done)
            except ray.exceptions.RayTaskError as error:  # raised by the function
                for task in waiting:
                    ray.cancel(task)
                raise error.cause from None
            except ray.exceptions.RayError as error:
                reason = " ".join(str(error).split())[:300]
                raise UserError(f"--ray: lost a task ({reason}). Run it again.") from None

    try:
        yield run
    finally:
        ray.shutdown()
