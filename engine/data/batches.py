"""The data of a run, one dataset or a mixture of several, and batch t of it."""

import hashlib
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.data.dataset import Dataset, open_dataset
from engine.data.order import FIXED_POINT_ONE
from engine.data.split import PADDING_TOKEN, BatchSpec, MixedText, Split, token_ids
from engine.nn.loss import IGNORE_INDEX


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


def open_mixture(paths: Sequence[Path], mix: Sequence[float] | None = None) -> Dataset:
    """Open datasets to mix in proportion to ``mix``, by default to their tokens; or one alone.

    Raises UserError for an unusable dataset, and for datasets that cannot be mixed.
    """
    datasets = tuple(map(open_dataset, paths))
    first = datasets[0]
    if len(datasets) == 1:
        return first
    if len({dataset.sha256 for dataset in datasets}) < len(datasets):
        raise UserError("--data: must be different datasets (got one twice). Give each once.")
    for dataset in datasets:
        if dataset.train.num_examples:
            raise UserError(f"{dataset.path}: examples cannot be mixed. Train on it alone.")
        if dataset.manifest["tokenizer"] != first.manifest["tokenizer"]:
            raise dataset.tokenizer_error(first.path)
    sizes = [len(dataset.train) for dataset in datasets] if mix is None else mix
    # order.py counts in fixed point, in which a smaller weight is 0.
    weights = [max(size / max(sizes), 1 / FIXED_POINT_ONE) for size in sizes]
    fractions = tuple(weight / sum(weights) for weight in weights)
    counts = [dataset.manifest["splits"]["train"]["documents"] for dataset in datasets]
    return replace(
        first,
        manifest={**first.manifest, "splits": {"train": {"documents": sum(counts)}}},
        train=MixedText([dataset.train for dataset in datasets], fractions),
        sha256=hashlib.sha256("".join(each.sha256 for each in datasets).encode()).hexdigest(),
        mixed=datasets,
        weights=fractions,
    )


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
