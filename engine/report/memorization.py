"""Memorization: the longest passages of a text that occur verbatim in the training text."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
from tqdm import tqdm

from engine.data.dataset import Dataset, Examples, Tokens
from engine.data.tokenizer import Tokenizer

MIN_PASSAGE_BYTES = 24
MAX_SEARCHED_BYTES = 2**28  # of the training text
MAX_CANDIDATE_BYTES = 2**21
DECODED_CHUNK_TOKENS = 2**18  # decoded at a time
SEED_BYTES = 8
SEED_HASH_BITS = 20
HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
NO_TEXT = b"\xff"  # in place of special tokens; no UTF-8 has this byte

Datasets = Sequence[Dataset]
Passage = tuple[int, int, str]  # first character, number of characters, place in the training text
# Runs of training text, each SEED_BYTES of which occur in the texts → the dataset, the first
# token, and the byte at which each token ends. The first occurrence of a run is kept.
Candidates = dict[bytes, tuple[Dataset, int, list[int]]]


def find_passages(texts: list[str], datasets: Datasets) -> tuple[list[list[Passage]], float]:
    """Find each text's longest passages in the training splits, and the fraction searched.

    The longest is taken first, then the longest in the rest. Memory is bounded: the search ends
    after MAX_SEARCHED_BYTES, or when there are MAX_CANDIDATE_BYTES of candidates.
    """
    is_seed = np.zeros(2**SEED_HASH_BITS, bool)
    for text in texts:
        is_seed[hash_seeds(text.encode())] = True
    overlap = max((len(text.encode()) for text in texts), default=0)  # in tokens, so enough
    candidates: Candidates = {}
    num_searched = 0
    for dataset in datasets:
        num_bytes = 0
        table = spell_tokens(dataset.tokenizer)
        chunks = range(0, len(dataset.train), DECODED_CHUNK_TOKENS)
        for first in tqdm(chunks, "searching training text", disable=None, leave=False):
            ids = read_ids(dataset.train, first, DECODED_CHUNK_TOKENS + overlap)
            pieces = [table[token] for token in ids]
            data = b"".join(pieces)
            ends = np.cumsum([len(piece) for piece in pieces])
            for start, end in find_seed_runs(data, is_seed):
                token, last = np.searchsorted(ends, (start, end), "right").tolist()
                place = (dataset, first + token, (ends[token : last + 1] - start).tolist())
                candidates.setdefault(data[start:end], place)
            num_searched += min(DECODED_CHUNK_TOKENS, len(ids))
            num_bytes += len(data)
            is_full = sum(map(len, candidates)) > MAX_CANDIDATE_BYTES
            if is_full or num_bytes > MAX_SEARCHED_BYTES // len(datasets):
                break
    training_text = NO_TEXT.join(candidates)
    passages = [
        [
            (start, length, locate(text[start : start + length], candidates))
            for start, length in longest_spans(text, training_text)
        ]
        for text in texts
    ]
    return passages, num_searched / sum(len(dataset.train) for dataset in datasets)


def find_seed_runs(data: bytes, is_seed: np.ndarray) -> Iterator[tuple[int, int]]:
    """Find the runs of bytes, each SEED_BYTES of which are a seed, and yield (start, end)."""
    edges = np.flatnonzero(np.diff(is_seed[hash_seeds(data)], prepend=False, append=False))
    for start, end in edges.reshape(-1, 2).tolist():
        if end - start > MIN_PASSAGE_BYTES - SEED_BYTES:
            yield start, end + SEED_BYTES - 1


def hash_seeds(data: bytes) -> np.ndarray:
    """Hash the SEED_BYTES that begin at each byte: (N - SEED_BYTES + 1,)."""
    count = max(0, len(data) - SEED_BYTES + 1)
    seeds = np.ndarray((count,), np.uint64, data.ljust(SEED_BYTES), strides=(1,))
    return (seeds * HASH_MULTIPLIER >> np.uint64(64 - SEED_HASH_BITS)).astype(np.int64)


def longest_spans(text: str, training_text: bytes) -> Iterator[tuple[int, int]]:
    """Yield (start, length), in characters, of the longest matches that do not overlap."""
    data = text.encode()
    lengths = []  # of the longest match from each character on
    start = 0
    end = 0
    for character in text:
        end = max(end, start)
        while end < len(data) and data[start : end + 1] in training_text:
            end += 1
        lengths.append(len(data[start:end].decode(errors="ignore")))
        start += len(character.encode())
    while True:
        for i, length in enumerate(lengths):
            if len(text[i : i + length].encode()) < MIN_PASSAGE_BYTES:
                lengths[i] = 0
        longest = max(lengths, default=0)
        if longest == 0:
            return
        first = lengths.index(longest)
        yield first, longest
        lengths[first : first + longest] = [0] * longest
        lengths[:first] = [min(length, first - i) for i, length in enumerate(lengths[:first])]


def locate(passage: str, candidates: Candidates) -> str:
    """Name the token in which a passage first begins in the training text."""
    data = next(data for data in candidates if passage.encode() in data)
    dataset, token, ends = candidates[data]
    token += bisect_right(ends, data.index(passage.encode()))
    for shard in dataset.manifest["splits"]["train"]["shards"]:
        if token < shard["tokens"]:
            return f"token {token:,} of {dataset.path / shard['file']}"
        token -= shard["tokens"]
    raise IndexError(token)


def sample_validation(texts: list[str], datasets: Datasets) -> list[str]:
    """Take as many pieces of validation text, of the same lengths, spread evenly."""
    pieces = []
    for index, text in enumerate(texts):
        dataset = datasets[index % len(datasets)]
        num_tokens = len(text.encode())  # enough, or more
        start = max(0, len(dataset.val) - num_tokens) * index // max(1, len(texts) - 1)
        table = spell_tokens(dataset.tokenizer)
        data = b"".join(table[token] for token in read_ids(dataset.val, start, num_tokens))
        pieces.append(data.decode(errors="ignore")[: len(text)])
    return pieces


def spell_tokens(tokenizer: Tokenizer) -> list[bytes]:
    """List the bytes of each token, and NO_TEXT for those that text never has."""
    no_text = {*tokenizer.unused_ids(), *tokenizer.special_tokens.values()}
    ids = range(tokenizer.vocab_size)
    return [NO_TEXT if i in no_text else tokenizer.decode_bytes([i]) for i in ids]


def read_ids(split: Tokens | Examples, start: int, count: int) -> list[int]:
    """Read token ids; of examples, ~id is an id that is not a target."""
    tokens = split.tokens if isinstance(split, Examples) else split
    ids = tokens[start : start + count].astype(np.int64)
    return np.where(ids < 0, ~ids, ids).tolist()
