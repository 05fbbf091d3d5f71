"""Several datasets as one: which share of the sequences is drawn from each, and which sequence is whose."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.data.dataset import Dataset, Examples, Tokens, open_dataset, verify_dataset
from engine.data.tokenizer import Tokenizer

ONE = 2**32  # the share that is all; in whole numbers, so that counts are exact


@dataclass(frozen=True)
class MixedTokens:
    """A split of several datasets. Its length is its number of tokens, as one's is."""

    parts: tuple[Tokens, ...]
    shares: tuple[float, ...]  # of the sequences, drawn from each part; they sum to 1

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def draw(shares: Sequence[float], serial: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which part each sequence comes from, and its serial number there, of serial numbers (N,), uint64: (N,) each.

    The first part has sequence n if floor((n + 1) · share) > floor(n · share), and of it number floor(n · share); what
    is left is numbered on and divided among the others in the same way. So after any n, each part's count is right but
    for a few, its numbers come one after the other, and nothing is kept but the shares.
    """

    def times(n: np.ndarray, share: np.uint64) -> np.ndarray:  # floor(n · share / ONE), in halves that fit into 64 bits
        return (n >> np.uint64(32)) * share + ((n & np.uint64(ONE - 1)) * share >> np.uint64(32))

    part, number = np.full(len(serial), len(shares) - 1), serial.copy()
    left = np.ones(len(serial), bool)
    for index in range(len(shares) - 1):
        share = np.uint64(round(ONE * shares[index] / sum(shares[index:])))
        before, after = times(number, share), times(number + np.uint64(1), share)
        own = left & (after > before)
        part[own] = index
        left &= ~own
        number = np.where(own, before, np.where(left, number - before, number))
    return part, number


@dataclass(frozen=True)
class Mixture:
    """The datasets that a model is trained on, mostly one; several are of text, and have the same tokenizer."""

    datasets: tuple[Dataset, ...]
    shares: tuple[float, ...]  # of the sequences, drawn from each; they sum to 1

    @property
    def path(self) -> Path:
        """The first one's folder."""
        return self.datasets[0].path

    @property
    def tokenizer(self) -> Tokenizer:
        """That of each."""
        return self.datasets[0].tokenizer

    @property
    def manifest(self) -> dict[str, Any]:
        """The first one's; with others, it counts only the documents to train on, of all."""
        manifests = [one.manifest for one in self.datasets]
        documents = sum(one["splits"]["train"]["documents"] for one in manifests)
        several = {"splits": {"train": {"documents": documents}}} if len(manifests) > 1 else {}
        return manifests[0] | several

    @property
    def sha256(self) -> str:
        """Of one, its own; of several, that of theirs, in order."""
        first, *others = (one.sha256 for one in self.datasets)
        return hashlib.sha256("".join((first, *others)).encode()).hexdigest() if others else first

    @property
    def train(self) -> Tokens | Examples | MixedTokens:
        """What is trained on."""
        splits = tuple(one.train for one in self.datasets)
        return MixedTokens(splits, self.shares) if len(splits) > 1 else splits[0]

    @property
    def names(self) -> list[str]:
        """What each is called in records: its folder's name, and a number if that is taken."""
        names: list[str] = []
        for folder in (one.path.absolute().name for one in self.datasets):
            candidates = (folder if n == 1 else f"{folder}-{n}" for n in range(1, len(self.datasets) + 1))
            names.append(next(name for name in candidates if name not in names))
        return names

    @property
    def epochs(self) -> list[float]:
        """The tokens of training in which those of each come once."""
        return [len(one.train) / share for one, share in zip(self.datasets, self.shares, strict=True)]

    def describe(self) -> str:
        """How much there is of each, a line for each, with its share if there are others."""
        shares = [f"{100 * share:.3g}% " if len(self.shares) > 1 else "" for share in self.shares]
        return "\n       ".join(
            f"{share}{one.path}: {len(one.train):,} tokens to train on, {len(one.val):,} to validate"
            for share, one in zip(shares, self.datasets, strict=True)
        )

    def verify(self, again: bool) -> None:
        """Check every token of each: see :func:`engine.data.dataset.verify_dataset`."""
        for one in self.datasets:
            verify_dataset(one, again)

    def mean(self, values: Iterable[float]) -> float:
        """The mean of one value of each, weighted by the shares, as training weights losses."""
        return sum(value * share for value, share in zip(values, self.shares, strict=True))

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text that one token stands for, on average, where sequences are drawn by the shares."""
        return self.mean(one.bytes_per_token(split) for one in self.datasets)

    def evaluation(self, losses: Sequence[float]) -> dict[str, float]:
        """What records hold of an evaluation, given the loss on each in nats per token: of all, and of each."""
        loss = self.mean(losses)
        found = {"val_loss": loss, "val_bits_per_byte": loss / math.log(2) / self.bytes_per_token("val")}
        found |= {"val_perplexity": math.exp(min(loss, 700))}
        if len(losses) > 1:
            for name, one, loss in zip(self.names, self.datasets, losses, strict=True):
                bits = loss / math.log(2) / one.bytes_per_token("val")
                found |= {f"val_loss/{name}": loss, f"val_bits_per_byte/{name}": bits}
        return found


def as_paths(given: str | Path | Sequence[str | Path], mix: Sequence[float] | None = None) -> tuple[Path, ...]:
    """The folders of datasets, of which one may be given as it is.

    Raises UserError if there is none, or a mix does not have a share for each of several.
    """
    paths = tuple(map(Path, [given] if isinstance(given, str | Path) else given))
    if not paths:
        raise UserError("--data names no dataset; give at least one")
    if mix is not None and len(paths) == 1:
        raise UserError(f"--mix is for several datasets, but --data is only {paths[0]}; leave it out, or give more")
    if mix is not None and len(mix) != len(paths):
        raise UserError(f"--mix has {len(mix)} shares for {len(paths)} datasets in --data; give one for each")
    return paths


def open_mixture(paths: Sequence[Path], mix: Sequence[float] | None = None) -> Mixture:
    """Map datasets into memory, to be drawn from in proportion to mix, by default to their tokens.

    Raises UserError for a dataset that can't be used, or not beside the others.
    """
    datasets = [open_dataset(path) for path in paths]
    first, known = datasets[0], {}
    for one in datasets if len(datasets) > 1 else ():
        if isinstance(one.train, Examples):
            raise UserError(f"{one.path} is of examples, which can't be mixed; train on it alone")
        if one.manifest["tokenizer"]["sha256"] != first.manifest["tokenizer"]["sha256"]:
            remedy = f"python prepare.py INPUT --out {one.path} --force --tokenizer {first.path}"
            raise UserError(f"{one.path} has another tokenizer than {first.path}; prepare it with that one: {remedy}")
        if one.sha256 in known:
            raise UserError(f"{one.path} is the same dataset as {known[one.sha256]}; give it once")
        known[one.sha256] = one.path
    weights = [len(one.train) for one in datasets] if mix is None else mix
    weights = [max(weight / max(weights), 1 / ONE) for weight in weights]
    return Mixture(tuple(datasets), tuple(weight / sum(weights) for weight in weights))
