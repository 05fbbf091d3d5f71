"""Memorization: the longest passages of a text that occur verbatim in the training text."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from engine.core.cli import progress_bar
from engine.data.dataset import Dataset
from engine.data.tokenizer import Tokenizer

MIN_PASSAGE_BYTES = 24  # without white space
MAX_SEARCHED_BYTES = 2**28  # of the training text
MAX_CANDIDATE_BYTES = 2**21
DECODED_CHUNK_TOKENS = 2**18  # decoded at a time
SEED_BYTES = 8
SEED_HASH_BITS = 20
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
NON_TEXT_BYTE = b"\xff"  # in place of special tokens; no UTF-8 has this byte

Passages = list[tuple[int, int, str]]  # first character, number of characters, location
# The first occurrence of each run of training text, each SEED_BYTES of which occur in the texts:
# the dataset, the first token, and the byte at which each token ends.
Candidates = dict[bytes, tuple[Dataset, int, list[int]]]


def find_passages(texts: list[str], datasets: Sequence[Dataset]) -> tuple[list[Passages], float]:
    """Find each text's longest passages in the training splits, and the fraction searched.

    The longest is taken first, then the longest in the rest. Memory is bounded: the search ends
    after MAX_SEARCHED_BYTES, or when there are MAX_CANDIDATE_BYTES of candidates.
    """
    is_seed = np.zeros(2**SEED_HASH_BITS, bool)
    for text in texts:
        is_seed[hash_seeds(text.encode())] = True
    overlap = max((len(text.encode()) for text in texts), default=0)  # bytes: enough tokens
    candidates: Candidates = {}
    num_searched = 0
    for dataset in datasets:
        num_bytes = 0
        spellings = spell_tokens(dataset.tokenizer)
        chunks = range(0, len(dataset.train), DECODED_CHUNK_TOKENS)
        for first in progress_bar(chunks, desc="searching training text"):
            ids, _ = dataset.train.read(first, first + DECODED_CHUNK_TOKENS + overlap)
            pieces = [spellings[token] for token in ids.tolist()]
            data = b"".join(pieces)
            ends = np.cumsum([len(piece) for piece in pieces])
            for start, end in find_seed_runs(data, is_seed):
                token, last = np.searchsorted(ends, (start, end), "right").tolist()
                origin = (dataset, first + token, (ends[token : last + 1] - start).tolist())
                candidates.setdefault(data[start:end], origin)
            num_searched += min(DECODED_CHUNK_TOKENS, len(ids))
            num_bytes += len(data)
            is_full = sum(map(len, candidates)) > MAX_CANDIDATE_BYTES
            if is_full or num_bytes > MAX_SEARCHED_BYTES // len(datasets):
                break
    fraction = num_searched / sum(len(dataset.train) for dataset in datasets)
    return [find_longest(text, candidates) for text in texts], fraction


def find_seed_runs(data: bytes, is_seed: np.ndarray) -> list[tuple[int, int]]:
    """Find the runs of bytes, each SEED_BYTES of which are a seed: (start, end) of each."""
    begins_seed = np.pad(is_seed[hash_seeds(data)], 1)  # False before the first, after the last
    changes = np.flatnonzero(begins_seed[1:] != begins_seed[:-1])
    starts = changes[::2].tolist()
    ends = (changes[1::2] + SEED_BYTES - 1).tolist()
    runs = zip(starts, ends, strict=True)
    return [(start, end) for start, end in runs if end - start >= MIN_PASSAGE_BYTES]


def hash_seeds(data: bytes) -> np.ndarray:
    """Hash the SEED_BYTES that begin at each byte: (N - SEED_BYTES + 1,)."""
    count = max(0, len(data) - SEED_BYTES + 1)
    # Numbers of eight bytes that overlap: one begins at each byte.
    seeds = np.ndarray((count,), np.uint64, data.ljust(SEED_BYTES), strides=(1,))
    return (seeds * HASH_MULTIPLIER >> np.uint64(64 - SEED_HASH_BITS)).astype(np.int64)


def find_longest(text: str, candidates: Candidates) -> Passages:
    """Find the longest passages of a text that do not overlap, longest first."""
    training_text = NON_TEXT_BYTE.join(candidates)
    lengths = []  # of the longest match from each character on
    end = 0
    for start in range(len(text)):
        end = max(start, end)
        while end < len(text) and text[start : end + 1].encode() in training_text:
            end += 1
        lengths.append(end - start)
    passages = []
    while longest := max(lengths, default=0):
        first = lengths.index(longest)
        passage = text[first : first + longest]
        if len("".join(passage.split()).encode()) < MIN_PASSAGE_BYTES:
            lengths[first] = 0
            continue
        passages.append((first, longest, locate(passage, candidates)))
        lengths[first : first + longest] = [0] * longest
        lengths[:first] = [min(length, first - i) for i, length in enumerate(lengths[:first])]
    return passages


def locate(passage: str, candidates: Candidates) -> str:
    """Return the source in which a passage first begins; if none are listed, the shard."""
    data = next(data for data in candidates if passage.encode() in data)
    dataset, token, ends = candidates[data]
    token += bisect_right(ends, data.index(passage.encode()))
    train = dataset.manifest["splits"]["train"]
    entries = train["sources"] or train["shards"]
    entry = entries[bisect_right(np.cumsum([entry["tokens"] for entry in entries]), token)]
    return entry.get("source") or str(dataset.path / entry["file"])


def spell_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """List the bytes of each token, and NON_TEXT_BYTE for those that text never has."""
    non_text = {*tokenizer.unused_ids(), *tokenizer.special_tokens.values()}
    ids = range(tokenizer.vocab_size)
    return [NON_TEXT_BYTE if i in non_text else tokenizer.decode_bytes([i]) for i in ids]
