"""Several datasets as one, of which each gives a fraction of the sequences."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.cli import count_noun, shell_command
from engine.core.errors import UserError
from engine.data.dataset import Dataset, Examples, Tokens, open_dataset, verify_dataset
from engine.data.splits import MIN_EXPECTED_DOCUMENTS
from engine.data.tokenizer import Tokenizer

FIXED_POINT_ONE = 2**32  # a weight of 1 in fixed-point numbers, which make counts exact


@dataclass(frozen=True)
class MixedTokens:
    """The training splits of several datasets. Its length is its number of tokens."""

    datasets: tuple[Tokens, ...]
    weights: tuple[float, ...]  # fraction of the sequences from each; they sum to 1

    def __len__(self) -> int:
        return sum(map(len, self.datasets))


def assign_to_datasets(
    weights: Sequence[float], sequence_index: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each sequence, and its index there: (N,) each, from uint64 (N,).

    The first dataset has sequence n if floor((n + 1) * weight) > floor(n * weight), at index
    floor(n * weight). The other sequences are renumbered from 0 and assigned in the same way. So
    each dataset has its fraction of the first n sequences, up to a few, at consecutive indices.
    """

    def scale(n: np.ndarray, weight: np.uint64) -> np.ndarray:
        """Compute floor(n * weight / FIXED_POINT_ONE) in halves that fit into 64 bits."""
        low = n & np.uint64(FIXED_POINT_ONE - 1)
        return (n >> np.uint64(32)) * weight + (low * weight >> np.uint64(32))

    dataset_index = np.full(len(sequence_index), len(weights) - 1)
    index = sequence_index.copy()
    unassigned = np.ones(len(sequence_index), bool)
    for number in range(len(weights) - 1):
        weight = np.uint64(round(FIXED_POINT_ONE * weights[number] / sum(weights[number:])))
        before = scale(index, weight)
        assigned = unassigned & (scale(index + np.uint64(1), weight) > before)
        dataset_index[assigned] = number
        unassigned &= ~assigned
        index = np.where(assigned, before, np.where(unassigned, index - before, index))
    return dataset_index, index


@dataclass(frozen=True)
class Mixture:
    """The datasets that a model is trained on: one, or several of text with one tokenizer."""

    datasets: tuple[Dataset, ...]
    weights: tuple[float, ...]  # fraction of the sequences from each; they sum to 1

    @property
    def path(self) -> Path:
        """The folder of the first dataset."""
        return self.datasets[0].path

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all datasets."""
        return self.datasets[0].tokenizer

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest; of several datasets, the first with only the sum of training documents."""
        first = self.datasets[0].manifest
        if len(self.datasets) == 1:
            return first
        counts = [dataset.manifest["splits"]["train"]["documents"] for dataset in self.datasets]
        return {**first, "splits": {"train": {"documents": sum(counts)}}}

    @property
    def sha256(self) -> str:
        """The hash of the manifest; of several datasets, the hash of their hashes."""
        if len(self.datasets) == 1:
            return self.datasets[0].sha256
        hashes = "".join(dataset.sha256 for dataset in self.datasets)
        return hashlib.sha256(hashes.encode()).hexdigest()

    @property
    def train(self) -> Tokens | Examples | MixedTokens:
        """The training split."""
        if len(self.datasets) == 1:
            return self.datasets[0].train
        splits = (dataset.train for dataset in self.datasets)
        texts = tuple(split for split in splits if not isinstance(split, Examples))
        return MixedTokens(texts, self.weights)

    @property
    def longest_example(self) -> int:
        """The tokens of the longest example; 0 for text."""
        splits = [split for dataset in self.datasets for split in (dataset.train, dataset.val)]
        lengths = [int(split.lengths.max()) for split in splits if isinstance(split, Examples)]
        return max(lengths, default=0)

    def drop_long_examples(self, context_length: int, cut: bool) -> "Mixture":
        """Remove or cut the examples that are too long. Raises UserError if none remains."""
        datasets = [dataset.drop_long_examples(context_length, cut) for dataset in self.datasets]
        return replace(self, datasets=tuple(datasets))

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
    def epoch_tokens(self) -> list[float]:
        """For each dataset, the tokens of the mixture in one epoch of the dataset."""
        pairs = zip(self.datasets, self.weights, strict=True)
        return [len(dataset.train) / weight for dataset, weight in pairs]

    def describe(self) -> str:
        """Return a line for each dataset: its tokens, and its weight if there are several."""
        lines = []
        for dataset, weight in zip(self.datasets, self.weights, strict=True):
            percent = f"{100 * weight:.3g}% " if len(self.datasets) > 1 else ""
            train = f"{len(dataset.train):,} tokens to train on"
            lines.append(f"{percent}{dataset.path}: {train}, {len(dataset.val):,} to validate")
        return "\n       ".join(lines)

    def verify(self, force: bool) -> None:
        """Verify each dataset: see verify_dataset."""
        for dataset in self.datasets:
            verify_dataset(dataset, force)

    def check_length(self, context_length: int) -> None:
        """Raise UserError if a split of text is shorter than one window."""
        for dataset in self.datasets:
            for split, tokens in (("training", dataset.train), ("validation", dataset.val)):
                if not isinstance(tokens, Examples) and len(tokens) <= context_length:
                    size = f"the {len(tokens)} tokens of the {split} split of {dataset.path}"
                    problem = f"must be less than {size} (got {context_length})"
                    advice = "Lower it, or prepare more text or with another --val-fraction"
                    raise UserError(f"--context-length: {problem}. {advice}.")

    def mean(self, values: Iterable[float]) -> float:
        """Return the weighted mean of one value for each dataset."""
        return sum(value * weight for value, weight in zip(values, self.weights, strict=True))

    def bytes_per_token(self, split: str) -> float:
        """Return the mean UTF-8 bytes of one token."""
        return self.mean(dataset.bytes_per_token(split) for dataset in self.datasets)

    def explain_loss(self, val_loss: float) -> str:
        """Explain a validation loss that is not better than a uniform guess; else return ""."""
        uniform_loss = math.log(self.tokenizer.vocab_size)
        if val_loss <= uniform_loss:  # not if it is NaN
            return ""
        problems = [problem for dataset in self.datasets for problem in find_val_problems(dataset)]
        advice = "Lower --learning-rate, train longer, or prepare validation text that is like the"
        advice += " training text."
        if problems:
            advice = "Train for fewer steps, or see docs/data.md for --val and --deduplicate."
        reason = " ".join([*problems, advice])
        return f"This is worse than a uniform guess, {uniform_loss:.4f}. {reason}"

    def evaluation_record(self, losses: Sequence[float]) -> dict[str, float]:
        """Return the metrics of an evaluation, given each dataset's loss in nats per token."""
        mean_loss = self.mean(losses)
        record = {
            "val_loss": mean_loss,
            "val_bits_per_byte": mean_loss / math.log(2) / self.bytes_per_token("val"),
            "val_perplexity": math.exp(min(mean_loss, 700)),  # exp(710) overflows
        }
        if len(losses) > 1:
            for name, dataset, loss in zip(self.names, self.datasets, losses, strict=True):
                bits = loss / math.log(2) / dataset.bytes_per_token("val")
                record |= {f"val_loss/{name}": loss, f"val_bits_per_byte/{name}": bits}
        return record


def find_val_problems(dataset: Dataset) -> list[str]:
    """Return a sentence for each problem that makes a dataset's validation loss meaningless."""
    facts = dataset.manifest["facts"]
    num_val = dataset.manifest["splits"]["val"]["documents"]
    num_repeats = facts["repeats"]
    problems = []
    if facts["val_copies"]:
        percent = f"{facts['val_copies'] / max(1, num_val):.0%}"
        problems.append(f"{percent} of the validation documents are copies of training documents.")
    if num_repeats and dataset.num_documents - num_repeats == 1:
        problems.append(f"All {dataset.num_documents:,} documents are the same.")
    elif num_repeats and facts["val_distinct"] < min(MIN_EXPECTED_DOCUMENTS, num_val):
        texts = count_noun(facts["val_distinct"], "different text")
        problems.append(f"The {num_val} validation documents have only {texts}.")
    return problems


def dataset_paths(
    data: str | Path | Sequence[str | Path], mix: Sequence[float] | None = None
) -> tuple[Path, ...]:
    """Return the paths of --data. Raises UserError for none, or another number of weights."""
    paths = tuple(map(Path, [data] if isinstance(data, str | Path) else data))
    if not paths:
        raise UserError("--data: no dataset. Give at least one.")
    if mix is not None and (len(paths) == 1 or len(mix) != len(paths)):
        requirement = "needs several datasets in --data and a weight for each"
        raise UserError(f"--mix: {requirement} (got {len(mix)} for {len(paths)}).")
    return paths


def open_mixture(paths: Sequence[Path], mix: Sequence[float] | None = None) -> Mixture:
    """Open datasets to mix in proportion to ``mix``, by default to their tokens.

    Raises UserError for an unusable dataset, and for datasets that cannot be mixed.
    """
    datasets = tuple(open_dataset(path) for path in paths)
    if len(datasets) > 1:
        _check_mixable(datasets)
    sizes = [len(dataset.train) for dataset in datasets] if mix is None else mix
    weights = [max(size / max(sizes), 1 / FIXED_POINT_ONE) for size in sizes]
    return Mixture(datasets, tuple(weight / sum(weights) for weight in weights))


def _check_mixable(datasets: Sequence[Dataset]) -> None:
    """Raise UserError for datasets that cannot be mixed."""
    first = datasets[0]
    paths: dict[str, Path] = {}  # by hash
    for dataset in datasets:
        if isinstance(dataset.train, Examples):
            raise UserError(f"{dataset.path}: examples cannot be mixed. Train on it alone.")
        if dataset.tokenizer.fingerprint != first.tokenizer.fingerprint:
            options = ("--out", dataset.path, "--force", "--tokenizer", first.path)
            command = shell_command("python", "prepare.py", "INPUT", *options)
            reason = f"its tokenizer is not that of {first.path}"
            raise UserError(f"{dataset.path}: {reason}. Run: {command}")
        if dataset.sha256 in paths:
            reason = f"is the same dataset as {paths[dataset.sha256]}"
            raise UserError(f"{dataset.path}: {reason}. Give it once.")
        paths[dataset.sha256] = dataset.path
