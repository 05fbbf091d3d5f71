"""Memorization: the longest passages of a text that occur verbatim in the training text."""

from collections.abc import Iterator, Sequence

from engine.core.cli import progress_bar
from engine.data.dataset import Dataset

MIN_PASSAGE_BYTES = 24  # without white space
MAX_SEARCHED_BYTES = 2**24  # of the training text, approximately
NON_TEXT_BYTE = b"\xff"  # in place of special tokens; no UTF-8 has this byte

Passages = list[tuple[int, int, str]]  # first character, number of characters, location


def find_passages(texts: list[str], datasets: Sequence[Dataset]) -> tuple[list[Passages], float]:
    """Find each text's longest passages in the first training text, and the fraction searched.

    The longest is taken first, then the longest in the rest.
    """
    training_text = b""
    locations: dict[int, str] = {}  # by the first byte
    num_searched = 0
    for dataset in datasets:
        num_bytes = MAX_SEARCHED_BYTES / len(datasets)
        num_tokens = min(round(num_bytes / dataset.bytes_per_token("train")), len(dataset.train))
        num_searched += num_tokens
        for location, text in read_sources(dataset, num_tokens):
            locations[len(training_text)] = location
            training_text += text
    passages: list[Passages] = []
    for text in progress_bar(texts, desc="searching training text"):
        passages.append([])
        for first, passage in sorted(find_longest(text, training_text)):
            position = training_text.index(passage.encode())
            source_start = max(start for start in locations if start <= position)
            passages[-1].append((first, len(passage), locations[source_start]))
    return passages, num_searched / sum(len(dataset.train) for dataset in datasets)


def read_sources(dataset: Dataset, num_tokens: int) -> Iterator[tuple[str, bytes]]:
    """Yield the first sources, or shards if none are listed, each with its text."""
    spellings = dict.fromkeys(dataset.tokenizer.special_tokens.values(), NON_TEXT_BYTE)
    train = dataset.manifest["splits"]["train"]
    start = 0
    for entry in train["sources"] or train["shards"]:
        end = min(start + entry["tokens"], num_tokens)
        ids = dataset.train.read(start, end)[0].tolist() if start < end else []
        for token in {*ids} - spellings.keys():
            spellings[token] = dataset.tokenizer.decode_bytes([token])
        location = entry.get("source") or str(dataset.path / entry["file"])
        yield location, b"".join([spellings[token] for token in ids])
        start = end


def find_longest(text: str, training_text: bytes, offset: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the first character of the longest passage, and the passage; then those beside it."""
    longest = ""
    min_start = 0  # of passages that end later
    for end in range(len(text) + 1):
        for start in range(end - len(longest) - 1, min_start - 1, -1):
            passage = text[start:end]
            if len("".join(passage.split()).encode()) < MIN_PASSAGE_BYTES:
                continue
            if passage.encode() not in training_text:
                middle = (start + end) // 2
                is_half_copied = text[middle:end].encode() in training_text
                min_start = (start if is_half_copied else middle) + 1
                break
            longest = passage
    if longest:
        first = text.index(longest)
        last = first + len(longest)
        yield offset + first, longest
        yield from find_longest(text[:first], training_text, offset)
        yield from find_longest(text[last:], training_text, offset + last)
