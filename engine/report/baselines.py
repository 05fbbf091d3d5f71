"""What the simplest models reach on the same data: every token as likely, unigrams, bigrams."""

import math

import numpy as np

from engine.data.dataset import Dataset, Examples, Tokens

CHUNK = 2**22  # tokens that are counted at once
MOST = 2**25  # tokens of a split that are counted, the first ones


def baselines(dataset: Dataset) -> dict[str, float]:
    """The validation losses of a uniform, a unigram and a bigram model, {name: nats per token}.

    They learn from the training split, at most its first MOST tokens, and are measured on at most as many. All
    targets count that count in training: not a split's first token, nor an example's prompt.

    unigram: p(w) = (c(w) + 1) / (n + V), with c(w) of n targets being w, and V tokens in the vocabulary.
    bigram: p(w | v) = (max(c(vw) - D, 0) + D · N(v·) · q(w)) / c(v), or q(w) where c(v) = 0: interpolated Kneser-Ney
    (Kneser and Ney 1995, as in Chen and Goodman 1999, section 2.7). N(v·) counts the kinds of tokens after v, and
    q(w) = (N(·w) + 1) / (N(··) + V), where N(·w) counts those before w, and N(··) all kinds of pairs. D = n1 / (n1 + 2
    n2), with n1 pairs that occur once and n2 twice; 1/2 where no pair occurs once.
    """
    size = dataset.tokenizer.vocab_size
    pairs, counts = count_pairs(dataset.train, size)
    val_pairs, val_counts = count_pairs(dataset.val, size)
    before, after = np.divmod(val_pairs, size)
    unigrams = np.bincount(pairs % size, counts, size) + 1
    losses = {
        "uniform": np.full(len(val_pairs), math.log(size)),
        "unigram": -np.log(unigrams[after] / unigrams.sum()),
        "bigram": -np.log(_kneser_ney(pairs, counts, size, before, after)),
    }
    return {name: float(np.average(values, weights=val_counts)) for name, values in losses.items()}


def _kneser_ney(pairs: np.ndarray, counts: np.ndarray, size: int, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Probabilities (N,) of tokens after others (N,), given pairs of training and how often each occurs: (M,)."""
    first, second = np.divmod(pairs, size)
    total, kinds = np.bincount(first, counts, size)[before], np.bincount(first, minlength=size)[before]
    once, twice = (np.count_nonzero(counts == times) for times in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    back_off = np.bincount(second, minlength=size) + 1
    back_off = back_off[after] / back_off.sum()
    wanted = before * size + after
    index = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    seen = np.where(pairs[index] == wanted, np.maximum(counts[index] - discount, 0), 0)
    return np.where(total > 0, (seen + discount * kinds * back_off) / np.maximum(total, 1), back_off)


def count_pairs(split: Tokens | Examples, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a target and the token before it, sorted, int64 (N,), and how often each occurs.

    A pair is size · the token before + the target; size is that of the vocabulary.
    """
    tokens = getattr(split, "tokens", split)
    pairs = counts = np.empty(0, np.int64)
    for start in range(0, min(len(tokens), MOST) - 1, CHUNK):
        ids = np.asarray(tokens[start : min(start + CHUNK, MOST - 1) + 1], np.int64)
        counted = ids[1:] >= 0
        if isinstance(split, Examples):  # the first of an example has none before it; some are left out, or cut
            at = np.arange(start + 1, start + len(ids))
            example = np.searchsorted(split.starts, at, "right") - 1
            counted &= (at > split.starts[example]) & (at < split.starts[example] + split.lengths[example])
        ids = np.where(ids < 0, ~ids, ids)
        new, times = np.unique((ids[:-1] * size + ids[1:])[counted], return_counts=True)
        pairs, where = np.unique(np.concatenate((pairs, new)), return_inverse=True)
        counts = np.bincount(where, np.concatenate((counts, times))).astype(np.int64)
    return pairs, counts
