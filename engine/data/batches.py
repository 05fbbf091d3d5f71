"""The data of a run, one dataset or a mixture of several; and batch t of it."""

import hashlib
import math
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.core.cli import shell_command
from engine.core.errors import UserError
from engine.data.dataset import Dataset, open_dataset, verify_dataset
from engine.data.order import FIXED_POINT_ONE
from engine.data.split import PADDING_TOKEN, BatchSpec, MixedText, Split, token_ids
from engine.data.tokenizer import Tokenizer
from engine.nn.loss import IGNORE_INDEX

MAX_REMOVED_FRACTION = 0.1  # of the examples, as they are longer than the context


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
    def train(self) -> Split:
        """The training split."""
        if len(self.datasets) == 1:
            return self.datasets[0].train
        return MixedText([dataset.train for dataset in self.datasets], self.weights)

    @property
    def splits(self) -> list[Split]:
        """The training and validation splits of all datasets."""
        return [split for dataset in self.datasets for split in (dataset.train, dataset.val)]

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
        return max(split.longest_example for split in self.splits)

    def row_length(self, context_length: int) -> int:
        """Return the most inputs of a row: examples are not padded to the context."""
        return int(min(context_length, (self.longest_example or math.inf) - 1))

    def drop_long_examples(self, context_length: int, cut: bool) -> "Mixture":
        """Remove or cut the examples that are too long: see Examples.drop_long."""
        datasets = [dataset.drop_long_examples(context_length, cut) for dataset in self.datasets]
        return replace(self, datasets=tuple(datasets))

    @property
    def num_removed(self) -> int:
        """The number of examples that drop_long_examples removed."""
        return sum(split.num_removed for split in self.splits)

    @property
    def lacks_examples(self) -> bool:
        """Whether drop_long_examples removed all of a split, or too many in all."""
        num_kept = [split.num_examples for split in self.splits]
        limit = MAX_REMOVED_FRACTION * (sum(num_kept) + self.num_removed)
        return self.num_removed > limit or (self.num_removed > 0 and 0 in num_kept)

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
            for name, split in (("training", dataset.train), ("validation", dataset.val)):
                if not split.num_examples and len(split) <= context_length:
                    size = f"the {len(split)} tokens of the {name} split of {dataset.path}"
                    problem = f"must be less than {size} (got {context_length})"
                    advice = "Lower it, or prepare more text or with another --val-fraction"
                    raise UserError(f"--context-length: {problem}. {advice}.")

    def mean(self, values: Iterable[float]) -> float:
        """Return the weighted mean of one value for each dataset."""
        return sum(value * weight for value, weight in zip(values, self.weights, strict=True))

    def explain_loss(self, val_loss: float) -> str:
        """Explain a validation loss that is not better than a uniform guess; else return ""."""
        uniform_loss = math.log(self.tokenizer.vocab_size)
        if val_loss <= uniform_loss:  # not if it is NaN
            return ""
        advice = "Lower --learning-rate, train for fewer steps, or see docs/data.md for --val."
        return f"This is worse than a uniform guess, {uniform_loss:.4f}. {advice}"

    def evaluation_record(self, losses: Sequence[float]) -> dict[str, float]:
        """Return the metrics of an evaluation, given each dataset's loss in nats per token."""
        mean_loss = self.mean(losses)
        bytes_per_token = [dataset.bytes_per_token("val") for dataset in self.datasets]
        record = {
            "val_loss": mean_loss,
            "val_bits_per_byte": mean_loss / math.log(2) / self.mean(bytes_per_token),
            "val_perplexity": math.exp(min(mean_loss, 700)),  # exp(710) overflows
        }
        if len(losses) > 1:
            for name, loss, num_bytes in zip(self.names, losses, bytes_per_token, strict=True):
                bits = loss / math.log(2) / num_bytes
                record |= {f"val_loss/{name}": loss, f"val_bits_per_byte/{name}": bits}
        return record


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
    if len({dataset.sha256 for dataset in datasets}) < len(datasets):
        raise UserError("--data: must be different datasets (got one twice). Give each once.")
    for dataset in datasets:
        if len(datasets) > 1 and dataset.train.num_examples:
            raise UserError(f"{dataset.path}: examples cannot be mixed. Train on it alone.")
        if dataset.manifest["tokenizer"] != datasets[0].manifest["tokenizer"]:
            options = ("--out", dataset.path, "--force", "--tokenizer", datasets[0].path)
            command = shell_command("python", "prepare.py", "INPUT", *options)
            reason = f"its tokenizer is not that of {datasets[0].path}"
            raise UserError(f"{dataset.path}: {reason}. Run: {command}")
    sizes = [len(dataset.train) for dataset in datasets] if mix is None else mix
    weights = [max(size / max(sizes), 1 / FIXED_POINT_ONE) for size in sizes]
    return Mixture(datasets, tuple(weight / sum(weights) for weight in weights))


def inputs_and_targets(rows: np.ndarray) -> Tensor:
    """Split rows of ids, in which ~id is not a target: (B, T + 1) → (2, B, T)."""
    inputs = token_ids(rows)[:, :-1]
    return torch.from_numpy(np.stack((inputs, np.maximum(rows, IGNORE_INDEX)[:, 1:])))


@dataclass(eq=False)
class Batches:
    """The training batches of one rank. A thread assembles the next batch while one is in use."""

    split: Split
    spec: BatchSpec
    device: torch.device
    length_multiple: int = 1  # of rows, which are padded up to their greatest length

    def __post_init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.pending: dict[int, Future] = {}  # the batch of the next step
        self.digest = 0  # of the last batch; the sum over ranks does not depend on the world size

    def get(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step on the device, int64 (B, T) each.

        T is the context length, or for examples at most that: see Examples.rows.
        """
        future = self.pending.pop(step, None) or self.thread.submit(self._assemble, step)
        pair, self.digest = future.result()
        self.pending = {step + 1: self.thread.submit(self._assemble, step + 1)}
        inputs, targets = pair.to(self.device, non_blocking=True)
        return inputs, targets

    def _assemble(self, step: int) -> tuple[Tensor, int]:
        """Return inputs and targets of a step, (2, B, T), and their digest."""
        rows = self.split.rows(step, self.spec)
        numbers = np.arange(self.spec.batch_size)[self.spec.rank_slice]
        digest = sum(map(zlib.crc32, rows, numbers.tolist()))
        num_missing = -(rows.shape[1] - 1) % self.length_multiple
        num_missing = min(num_missing, self.spec.context_length + 1 - rows.shape[1])
        rows = np.pad(rows, ((0, 0), (0, num_missing)), constant_values=PADDING_TOKEN)
        pair = inputs_and_targets(rows)
        return pair.pin_memory() if self.device.type == "cuda" else pair, digest


def check_sizes(batch_size: int, world_size: int, micro_batch_size: int | None) -> None:
    """Raise UserError unless ranks divide a batch evenly, and micro-batches the slice of a rank."""
    rank_size, remainder = divmod(batch_size, world_size)
    if remainder:
        next_multiple = (rank_size + 1) * world_size
        reason = f"must be a multiple of {world_size}, the number of processes (got {batch_size})"
        raise UserError(f"--batch-size: {reason}. Try {next_multiple}.")
    if micro_batch_size and (micro_batch_size < 1 or rank_size % micro_batch_size):
        divisors = ", ".join(str(n) for n in range(1, rank_size + 1) if rank_size % n == 0)
        reason = f"must divide the {rank_size} sequences of a rank (got {micro_batch_size})"
        raise UserError(f"--micro-batch-size: {reason}. Try one of {divisors}.")
