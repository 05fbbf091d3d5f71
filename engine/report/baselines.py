"""Yardsticks of a dataset: losses of a uniform, a unigram and a bigram model, and what xz needs."""

import lzma

import numpy as np

from engine.data.dataset import Dataset
from engine.data.split import Split

MAX_COUNTED_TOKENS = 2**22  # of a split, from its start; in a mixture, of all datasets
MAX_COMPRESSED_BYTES = 300_000  # likewise, of validation text; xz takes a tenth of a second


def mixture_yardsticks(data: Dataset) -> dict[str, float]:
    """Return the baselines' losses and, of text, "xz_bits_per_byte", weighted as in the mixture."""
    fraction = 1 / len(data.datasets)
    yardsticks = [baseline_losses(dataset, fraction) for dataset in data.datasets]
    for values, dataset in zip(yardsticks, data.datasets, strict=True):
        if not dataset.val.num_examples:
            values["xz_bits_per_byte"] = xz_bits_per_byte(dataset, fraction)
    return {name: data.mean(values[name] for values in yardsticks) for name in yardsticks[0]}


def xz_bits_per_byte(dataset: Dataset, fraction: float = 1.0) -> float:
    """Compute the bits per byte of ``xz -9`` on a fraction of MAX_COMPRESSED_BYTES, as text."""
    special = [*dataset.tokenizer.special_tokens.values()]
    num_tokens = int(fraction * MAX_COMPRESSED_BYTES / dataset.bytes_per_token("val"))
    ids, _ = dataset.val.read(0, num_tokens)
    text = dataset.tokenizer.decode_bytes(ids[~np.isin(ids, special)].tolist())
    return 8 * len(lzma.compress(text)) / max(len(text), 1)  # with so few bytes -6 equals -9


def baseline_losses(dataset: Dataset, fraction: float = 1.0) -> dict[str, float]:
    """Compute the validation losses of three models, {name: nats per token}.

    They learn from a fraction of MAX_COUNTED_TOKENS of the training split, and are evaluated on as
    many. The targets are those of training: not a split's first token, nor an example's prompt.

    unigram: p(w) = (c(w) + 1) / (n + V), where w is c(w) of n targets, and V the vocabulary size.
    bigram: p(w | v) = (c(vw) + N(v) p(w)) / (c(v) + N(v)), where N(v) different tokens follow v, or
    p(w) if c(v) = 0: Witten and Bell 1991, as in Chen and Goodman 1999, section 2.5.
    """
    vocab_size = dataset.tokenizer.vocab_size
    pairs, counts = count_pairs(dataset.train, vocab_size, fraction)
    first, second = np.divmod(pairs, vocab_size)
    val_pairs, val_counts = count_pairs(dataset.val, vocab_size, fraction)
    before, after = np.divmod(val_pairs, vocab_size)
    num_targets = np.bincount(second, counts, vocab_size) + 1
    unigram = (num_targets / num_targets.sum())[after]
    index = np.minimum(np.searchsorted(pairs, val_pairs), len(pairs) - 1)
    pair_counts = np.where(pairs[index] == val_pairs, counts[index], 0)
    num_before = np.bincount(first, counts, vocab_size)[before]
    num_followers = np.bincount(first, minlength=vocab_size)[before]
    bigram = (pair_counts + num_followers * unigram) / np.maximum(num_before + num_followers, 1)
    probabilities = {
        "uniform": np.full(len(val_pairs), 1 / vocab_size),
        "unigram": unigram,
        "bigram": np.where(num_before > 0, bigram, unigram),
    }
    return {
        name: float(np.average(-np.log(p), weights=val_counts)) for name, p in probabilities.items()
    }


def count_pairs(split: Split, vocab_size: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Count the pairs of a target and the token before it: sorted pairs, int64 (N,), and counts.

    A pair is vocab_size · the token before + the target.
    """
    ids, is_target = split.read(0, int(fraction * MAX_COUNTED_TOKENS))
    pairs = (ids[:-1] * vocab_size + ids[1:])[is_target[1:]]
    return np.unique(pairs, return_counts=True)
