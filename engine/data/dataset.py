"""A dataset, data/<name>/: write its shards, open it, verify it."""

import contextlib
import hashlib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from engine.core import files
from engine.core.cli import shell_command
from engine.core.errors import UserError
from engine.core.values import convert
from engine.data.ids import count_targets
from engine.data.shards.shard_file import open_shards
from engine.data.split import EXAMPLES_DTYPE, Examples, Split
from engine.data.tokenizer import Tokenizer, load_tokenizer

FORMAT_VERSION = 7
SPLIT_NAMES = ("train", "val")
LENGTHS_DTYPE = "uint32"
MAX_LISTED_SOURCES = 10_000  # in a split; with more, none are listed
MAX_REMOVED_FRACTION = 0.1  # of the examples, as they are longer than the context
VERSION_FILE = "prepared_from.json"  # holds Corpus.version
DATASET_FILE_PATTERN = re.compile(
    r"(manifest|tokenizer|verified|prepared_from)\.json|(train|val)(-lengths)?-[0-9]{5,}\.npy"
)


def hash_manifest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own, which is its last value."""
    content = files.to_json({**manifest, "sha256": ""})
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()


def dataset_name(first_input: str) -> str:
    """Return the default name of a dataset's folder."""
    if first_input == "-":
        return "stdin"
    path = re.sub(r"[*?#].*", "", first_input.removeprefix("hf:")).rstrip("/")
    return Path(os.path.abspath(path)).name.split(".")[0] or "text"


@dataclass(frozen=True)
class Dataset:
    """Two splits of text or of examples, and their tokenizer: a folder, or a mixture of several.

    A mixture has the path, the tokenizer and the validation split of the first: see open_mixture.
    """

    path: Path
    manifest: dict[str, Any]  # of a mixture, the first with only the sum of training documents
    tokenizer: Tokenizer
    train: Split
    val: Split
    sha256: str  # of the manifest; of a mixture, of those of the datasets
    mixed: tuple["Dataset", ...] = ()  # of a mixture
    weights: tuple[float, ...] = (1.0,)  # fraction of the sequences from each; they sum to 1

    @property
    def datasets(self) -> tuple["Dataset", ...]:
        """The datasets of a mixture, or this one."""
        return self.mixed or (self,)

    @property
    def splits(self) -> list[Split]:
        """The training and validation splits of all datasets."""
        return [split for dataset in self.datasets for split in (dataset.train, dataset.val)]

    @property
    def names(self) -> list[str]:
        """The datasets' names in records: the folders' names, numbered if not unique."""
        names: list[str] = []
        for dataset in self.datasets:
            folder = dataset.path.absolute().name
            candidates = [folder, *(f"{folder}-{n}" for n in range(2, len(self.datasets) + 1))]
            names.append(next(name for name in candidates if name not in names))
        return names

    @property
    def learns_chats(self) -> bool:
        """Whether the examples are chats."""
        return self.manifest["origin"].get("examples") == "chats"

    @property
    def document_start(self) -> int | None:
        """The id at which a document starts: its first, or the end of the one before."""
        return [*self.tokenizer.text_start, self.tokenizer.end_of_text_id][0]

    @property
    def longest_example(self) -> int:
        """The tokens of the longest example; 0 for text."""
        return max(self.train.longest_example, self.val.longest_example)

    @property
    def epoch_tokens(self) -> list[float]:
        """For each dataset, the tokens of the mixture in one epoch of the dataset."""
        pairs = zip(self.datasets, self.weights, strict=True)
        return [len(dataset.train) / weight for dataset, weight in pairs]

    @property
    def num_removed(self) -> int:
        """The number of examples that drop_long_examples removed."""
        return self.train.num_removed + self.val.num_removed

    @property
    def lacks_examples(self) -> bool:
        """Whether drop_long_examples removed all of a split, or too many in all."""
        num_kept = [self.train.num_examples, self.val.num_examples]
        limit = MAX_REMOVED_FRACTION * (sum(num_kept) + self.num_removed)
        return self.num_removed > limit or (self.num_removed > 0 and 0 in num_kept)

    def row_length(self, context_length: int) -> int:
        """Return the most inputs of a row: examples are not padded to the context."""
        return int(min(context_length, (self.longest_example or math.inf) - 1))

    def bytes_per_token(self, split: str) -> float:
        """Return the mean UTF-8 bytes of text of one token; of examples, of one target."""
        counts = self.manifest["splits"][split]
        return counts["bytes"] / counts.get("targets", counts["tokens"])

    def drop_long_examples(self, context_length: int) -> "Dataset":
        """Apply Examples.drop_long to both splits, and correct the manifest's counts of val."""
        train = self.train.drop_long(context_length)
        val = self.val.drop_long(context_length)
        splits = self.manifest["splits"]
        if val.num_examples and val.num_removed:
            counts = [count_targets(self.tokenizer, example) for example in val.examples()]
            num_targets, num_bytes = map(sum, zip(*counts, strict=True))
            counted = {"targets": num_targets, "bytes": num_bytes}
            splits = {**splits, "val": {**splits["val"], **counted}}
        return replace(self, train=train, val=val, manifest={**self.manifest, "splits": splits})

    def check_length(self, context_length: int) -> None:
        """Raise UserError if a split of text is shorter than one window."""
        for dataset in self.datasets:
            for name in SPLIT_NAMES:
                split: Split = getattr(dataset, name)
                if not split.num_examples and len(split) <= context_length:
                    size = f"the {len(split)} tokens of the {name} split of {dataset.path}"
                    problem = f"must be less than {size} (got {context_length})"
                    advice = "Lower it, or prepare more text or with another --val-fraction"
                    raise UserError(f"--context-length: {problem}. {advice}.")

    def tokenizer_error(self, path: Path) -> UserError:
        """Return the error that the tokenizer is not that of another dataset, or of a model."""
        options = ("--out", self.path, "--force", "--tokenizer", path)
        command = shell_command("python", "prepare.py", "INPUT", *options)
        problem = f"its tokenizer is not that of {path}"
        return UserError(f"{self.path}: {problem}. Prepare it with: {command}")

    def describe(self) -> str:
        """Return a line for each dataset: its tokens, and its weight if there are several."""
        lines = []
        for dataset, weight in zip(self.datasets, self.weights, strict=True):
            percent = f"{100 * weight:.3g}% " if self.mixed else ""
            train = f"{len(dataset.train):,} tokens to train on"
            lines.append(f"{percent}{dataset.path}: {train}, {len(dataset.val):,} to validate")
        return "\n       ".join(lines)

    def mean(self, values: Iterable[float]) -> float:
        """Return the weighted mean of one value for each dataset."""
        return sum(value * weight for value, weight in zip(values, self.weights, strict=True))

    def evaluation_record(self, losses: Sequence[float]) -> dict[str, float]:
        """Return the metrics of an evaluation, given each dataset's loss in nats per token."""
        mean_loss = self.mean(losses)
        bytes_per_token = [dataset.bytes_per_token("val") for dataset in self.datasets]
        record = {
            "val_loss": mean_loss,
            "val_bits_per_byte": mean_loss / math.log(2) / self.mean(bytes_per_token),
            "val_perplexity": math.exp(min(mean_loss, 700)),  # exp(710) overflows
        }
        if self.mixed:
            for name, loss, num_bytes in zip(self.names, losses, bytes_per_token, strict=True):
                record[f"val_loss/{name}"] = loss
                record[f"val_bits_per_byte/{name}"] = loss / math.log(2) / num_bytes
        return record


def open_dataset(path: Path) -> Dataset:
    """Map a dataset into memory. Raises UserError if it is missing, corrupted or unsupported."""
    if not (path / "manifest.json").is_file():
        is_input = path.exists() and not (path / "checkpoints").exists()
        options = () if path.exists() else ("--out", path)
        command = shell_command("python", "prepare.py", path if is_input else "INPUT", *options)
        advice = files.propose_path(path, Path("data"), "*.npy", f"Make it with: {command}")
        raise UserError(f"{path}: is not a dataset. {advice}")
    try:
        manifest = convert(files.read_json(path / "manifest.json"), dict, "manifest.json")
        if manifest.get("format") != FORMAT_VERSION:
            version = manifest.get("format")
            raise UserError(f"its format must be {FORMAT_VERSION} (got {version})")
        if manifest.get("sha256") != hash_manifest(manifest):
            raise UserError("manifest.json: SHA-256 mismatch")
        if files.sha256(path / "tokenizer.json") != manifest["tokenizer"]["sha256"]:
            raise UserError("tokenizer.json is not the one that encoded the text")
        train, val = (_open_split(path, manifest, split) for split in SPLIT_NAMES)
        tokenizer = load_tokenizer(path / "tokenizer.json")
    except (OSError, UserError) as error:
        raise _dataset_error(path, error) from None
    return Dataset(path, manifest, tokenizer, train, val, manifest["sha256"])


def _open_split(path: Path, manifest: dict[str, Any], split: str) -> Split:
    """Map a split into memory. Raises UserError or OSError unless it matches the manifest."""
    counts = manifest["splits"][split]
    tokens = open_shards(path, counts["shards"], manifest["dtype"])
    if manifest["dtype"] != EXAMPLES_DTYPE:
        return Split(tokens)
    lengths = open_shards(path, counts.get("lengths", []), LENGTHS_DTYPE)[:].astype(np.int64)
    if lengths.sum() != len(tokens) or not lengths.all() or not counts.get("targets"):
        raise UserError(f"the lengths of the examples of its {split} split are wrong")
    return Examples(tokens, np.cumsum(lengths) - lengths, lengths)


def _dataset_error(path: Path, problem: object) -> UserError:
    reason = " ".join(str(problem).removesuffix(".").split())
    return UserError(f"{path}: can't be used ({reason}). Prepare it again with --force.")


def list_shards(manifest: dict[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of each shard of tokens and of lengths, by file name."""
    counts = [manifest["splits"][split] for split in SPLIT_NAMES]
    shards = [shard for count in counts for shard in (*count["shards"], *count.get("lengths", ()))]
    return {shard["file"]: shard["sha256"] for shard in shards}


def merge_sources(sources: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up the tokens of neighbors, {source, tokens} each, that are of one source."""
    tokens = itemgetter("tokens")
    groups = itertools.groupby(filter(tokens, sources), itemgetter("source"))
    return [{"source": source, "tokens": sum(map(tokens, group))} for source, group in groups]


def add_up(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the counts of a split in all units; join their lists of shards and of sources."""
    totals: dict[str, Any] = {}
    for name, first in entries[0].items():
        values = [entry[name] for entry in entries]
        totals[name] = [*itertools.chain(*values)] if isinstance(first, list) else sum(values)
    sources = merge_sources(totals["sources"])
    totals["sources"] = sources if len(sources) <= MAX_LISTED_SOURCES else []
    return totals


def verify_dataset(dataset: Dataset, force: bool) -> None:
    """Check the hash of every shard, and that every token id is in the vocabulary.

    Of a mixture, each dataset is verified. Unless ``force``, files that are unchanged since the
    last check, by verified.json, are skipped. Raises UserError for a corrupted shard.
    """
    if dataset.mixed:
        for mixed in dataset.mixed:
            verify_dataset(mixed, force)
        return
    record = dataset.path / "verified.json"
    hashes = list_shards(dataset.manifest)
    stats = [(dataset.path / name).stat() for name in ("manifest.json", *hashes)]
    state = [[stat.st_size, stat.st_mtime_ns] for stat in stats]
    with contextlib.suppress(OSError, UserError):
        if not force and files.read_json(record) == state:
            return
    vocab_size = dataset.tokenizer.vocab_size
    for name, expected_hash in hashes.items():
        if files.sha256(dataset.path / name) != expected_hash:
            raise _dataset_error(dataset.path, f"{name}: SHA-256 mismatch")
        if "-lengths-" not in name:
            tokens = np.load(dataset.path / name, mmap_mode="r")
            largest = max(int(tokens.max()), ~int(tokens.min()))
            if largest >= vocab_size:
                raise _dataset_error(dataset.path, f"{name} has token {largest} of {vocab_size}")
    with contextlib.suppress(OSError):  # a read-only folder is verified each time
        files.write_json(record, state)


def is_up_to_date(
    out: Path, origin: dict[str, Any], force: bool, version: str, hash_content: Callable[[], str]
) -> bool:
    """Return whether ``out`` is a dataset of this origin and text.

    ``version`` changes with the input files; only if it differs is their content hashed. Raises
    UserError for a folder that must not be replaced, or only by ``force``.
    """
    names = sorted(path.name for path in out.glob("*"))
    if not names and not out.is_file():
        return False
    foreign_names = [name for name in names if not DATASET_FILE_PATTERN.fullmatch(name)]
    if foreign_names or not {"manifest.json", "tokenizer.json"} <= {*names}:
        contents = [*foreign_names, *names, "not a folder"][0]
        problem = f"must be a new folder, or a dataset alone (got {out}: {contents})"
        raise UserError(f"--out: {problem}. Choose another.")
    if force:
        return False
    old = dict(open_dataset(out).manifest["origin"])
    content = old.pop("content")
    changed = {key for key in old.keys() | origin.keys() if old.get(key) != origin.get(key)}
    is_same_text = False
    with contextlib.suppress(OSError, UserError):
        is_same_text = files.read_json(out / VERSION_FILE) == version
    if not changed and (is_same_text or hash_content() == content):
        return True
    settings = sorted(changed - {"split", "separator"})  # these two depend on the text
    difference = ", ".join(f"{key} {old.get(key)}" for key in settings) or "other text"
    advice = "Use --force to replace it (docs/data.md: My text has grown), or another --out"
    raise UserError(f"{out}: was made with {difference}. {advice}.")
