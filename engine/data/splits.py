"""Which document belongs to train or to validation, and the units of work of a corpus."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from engine.core.errors import UserError
from engine.data.inputs.columns import count_parts
from engine.data.inputs.readers import LARGE_DOCUMENT_BYTES, Text, count_documents, kind_of, read
from engine.data.inputs.sources import DEFAULT_ENCODING, Source
from engine.data.inputs.text import Notes

SPLIT_NAMES = ("train", "val")
MIN_EXPECTED_DOCUMENTS = 6  # in the smaller split; with fewer, it could be empty by chance
MIN_UNIT_BYTES = 2**24
MAX_UNITS = 2**12  # about: each has its own shards, and Linux maps at most some 65,000 files
MIN_BATCH_CHARACTERS = 2**19  # encoded by a thread at a time, unless a unit has fewer
MAX_WHOLE_DOCUMENT_BYTES = 2**26  # if a document cannot be encoded in pieces
HASH_BYTES = slice(8, 24)  # of a digest, to identify a text; the first 8 decide its split
# For each text: its hash, its number of tokens, and whether its document ends with it.
TEXT_DTYPE = np.dtype([("hash", "V16"), ("tokens", "<u8"), ("ends", "?")])


class Piece(NamedTuple):
    """Text of one document for one split."""

    split: str
    text: str
    ends: bool  # whether the document, or its part in this split, ends with this piece


@dataclass(frozen=True)
class Unit:
    """Consecutive parts of sources, encoded together into their own shards."""

    number: int
    parts: tuple[tuple[Source, int, int], ...]  # source, index and count: see readers.read
    dropped: frozenset[int] = frozenset()  # numbers of its documents that are left out
    notes: Notes = field(default_factory=Counter, compare=False)  # of the sources when last read

    @property
    def size(self) -> int:
        """Bytes of its sources, about."""
        return sum(source.size // count for source, _, count in self.parts)

    def texts(self) -> Iterator[Text]:
        """Yield the texts of all documents that are not dropped."""
        document = 0
        self.notes.clear()
        for source, index, count in self.parts:
            for text in read(source, index, count, self.notes):
                if document not in self.dropped:
                    yield text
                document += text.ends


@dataclass(frozen=True)
class Rule:
    """How documents are split into train and validation, independently of each other.

    A document is assigned by its hash. A large document, or every document if there are few,
    is cut: its tail is for validation.
    """

    val_fraction: float
    few: bool  # whether assignment by hash could leave a split empty
    single: bool  # whether there is one document, which needs no end where it is cut
    examples: bool  # examples are never cut
    val_threshold: float  # documents with a hash_fraction up to this are for validation

    def pieces(self, text: Text, digest: bytes) -> list[Piece]:
        """Split a text into one piece or two."""
        is_large = (text.size or 0) > LARGE_DOCUMENT_BYTES
        if self.examples or not (self.few or is_large):
            split = "val" if hash_fraction(digest) <= self.val_threshold else "train"
            return [Piece(split, text.text, text.ends)]
        data = text.text.encode()
        size = len(data) if text.size is None else text.size
        length = len(data) if text.length is None else text.length
        train_bytes = int(size * (1 - self.val_fraction)) - text.offset
        if train_bytes >= length:
            ends = text.ends or (train_bytes == length and not self.single)
            return [Piece("train", text.text, ends)]
        # Bytes that were replaced by U+FFFD make the text longer than its bytes in the document.
        train_bytes = max(0, train_bytes * len(data) // length)
        cut = len(data[:train_bytes].decode(errors="replace"))  # not inside a character
        val = Piece("val", text.text[cut:], text.ends)
        return [Piece("train", text.text[:cut], not self.single), val] if cut else [val]


class Corpus:
    """The documents of sources, in order."""

    def __init__(self, sources: list[Source], val_fraction: float):
        """Read documents only until it is certain whether there are few."""
        self.sources = sources
        self.examples = any(source.turns_of for source in sources)
        is_plain = kind_of(sources[0]) == "" and not sources[0].separator
        self.single = len(sources) == 1 and is_plain
        self.units = make_units(sources)
        self.bytes = sum(source.size for source in sources)
        num_enough = MIN_EXPECTED_DOCUMENTS / min(val_fraction, 1 - val_fraction)
        totals = itertools.accumulate(self._document_counts())
        few = self.single or all(total < num_enough for total in totals)
        threshold = val_fraction
        if few and self.examples:
            threshold = self._threshold_of_few(val_fraction)
        self.rule = Rule(val_fraction, few, self.single, self.examples, threshold)

    def _document_counts(self) -> Iterator[int]:
        """Yield numbers whose sum is the number of documents."""
        for source in self.sources:
            count = count_documents(source)
            if count is None:
                yield from (text.ends for text in read(source))
            else:
                yield count

    def _threshold_of_few(self, val_fraction: float) -> float:
        """Return the val_threshold for val_fraction of few examples: at least one, not all."""
        fractions = sorted({hash_fraction(digest_of(text)) for text in self.texts()})
        count = min(max(1, round(val_fraction * len(fractions))), len(fractions) - 1)
        return fractions[count - 1] if count > 0 else -1.0

    @property
    def is_plain(self) -> bool:
        """Whether the sources have about the size of their text."""
        return not any(
            source.compression
            or source.encoding != DEFAULT_ENCODING
            or kind_of(source) in (".parquet", "rows")
            for source in self.sources
        )

    @property
    def version(self) -> str:
        """A hash that changes with the files; "" if it is unknown whether they change."""
        versions = source_versions(self.sources)
        if not versions:
            return ""
        return hashlib.blake2b(repr(versions).encode(), digest_size=16).hexdigest()

    def texts(self) -> Iterator[Text]:
        """Yield the texts of all documents."""
        for unit in self.units:
            yield from unit.texts()

    def digests(self) -> list[np.ndarray]:
        """Return TEXT_DTYPE arrays (N,), one for each unit, without numbers of tokens."""
        arrays = []
        for unit in self.units:
            rows = [(digest_of(text)[HASH_BYTES], 0, text.ends) for text in unit.texts()]
            arrays.append(np.array(rows, TEXT_DTYPE))
        return arrays

    def sample(self, max_bytes: int | None) -> Iterator[str]:
        """Yield all texts, or if they exceed ``max_bytes`` the beginning of each unit.

        The result depends on the sources alone. A unit contributes in proportion to its size, and
        more if earlier units were too short.
        """
        if max_bytes is None or self._fits(max_bytes):
            yield from (text.text for text in self.texts())
            return
        budget = 0.0
        total_bytes = sum(unit.size for unit in self.units)
        for unit in self.units:
            budget += max_bytes * unit.size / max(1, total_bytes)
            if budget <= 0:
                continue
            for text in unit.texts():
                yield text.text
                budget -= len(text.text.encode())
                if budget <= 0:
                    break

    def _fits(self, max_bytes: int) -> bool:
        """Return whether the texts have at most ``max_bytes``, without reading plain sources."""
        if self.is_plain:
            return self.bytes <= max_bytes
        totals = itertools.accumulate(len(text.text.encode()) for text in self.texts())
        return all(total <= max_bytes for total in totals)


def make_units(sources: list[Source]) -> list[Unit]:
    """Group parts of sources into units, in order.

    Small files share a unit. A large file has its own; a large Parquet file or Hugging Face
    dataset has several.
    """
    unit_bytes = max(MIN_UNIT_BYTES, sum(source.size for source in sources) // MAX_UNITS)
    units: list[list[tuple[Source, int, int]]] = []
    num_bytes = 0  # of the last unit
    for source in sources:
        count = count_parts(source, unit_bytes)
        part_bytes = source.size // count
        for index in range(count):
            if not units or num_bytes + part_bytes > unit_bytes:
                units.append([])
                num_bytes = 0
            units[-1].append((source, index, count))
            num_bytes += part_bytes
    return [Unit(number, tuple(parts)) for number, parts in enumerate(units)]


def make_batches(
    units: Iterable[Unit], whole_documents: bool = False
) -> Iterator[tuple[Unit, list[Text]]]:
    """Yield texts to encode together, after their unit: at least one batch for each unit.

    With whole_documents no document is in two batches; raises UserError if one is too large.
    """
    for unit in units:
        texts: list[Text] = []
        num_characters = 0
        for text in unit.texts():
            if whole_documents and (text.size or 0) > MAX_WHOLE_DOCUMENT_BYTES:
                limit = f"this one is for documents of up to {MAX_WHOLE_DOCUMENT_BYTES:,} bytes"
                advice = "Split the document, or use --tokenizer bpe."
                raise UserError(f"--tokenizer: {limit} (got {text.size:,}). {advice}")
            texts.append(text)
            num_characters += len(text.text) + 1
            can_end = text.ends or not whole_documents
            if num_characters >= MIN_BATCH_CHARACTERS and can_end:
                yield unit, texts
                texts = []
                num_characters = 0
        yield unit, texts


def source_versions(sources: Iterable[Source]) -> list[tuple[str, int, str]]:
    """Return the name, size and version of each source; none if a version is unknown."""
    versions = [(PurePath(source.name).name, *source.info) for source in sources]
    return versions if all(version for _, _, version in versions) else []


def digest_of(text: Text) -> bytes:
    """Hash a text and its offset in the document with BLAKE2b, 32 bytes."""
    salt = text.offset.to_bytes(16, "little") if text.offset else b""
    return hashlib.blake2b(text.text.encode(), salt=salt).digest()[:32]


def hash_fraction(digest: bytes) -> float:
    """Map a digest to [0, 1], the same on every machine."""
    return int.from_bytes(digest[:8], "big") / 2**64


def content_hash(units: Iterable[np.ndarray]) -> str:
    """Hash the content of all units, each a TEXT_DTYPE array (N,)."""
    content = hashlib.blake2b(digest_size=16)
    for texts in units:
        content.update(texts["hash"].tobytes())
    return content.hexdigest()


def sum_documents(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up texts (N,) of TEXT_DTYPE: hashes and numbers of tokens of documents, (M,) each."""
    ends = np.flatnonzero(texts["ends"])
    if not len(ends):
        return np.empty(0, "V16"), np.empty(0, np.uint64)
    starts = np.append(0, ends[:-1] + 1)
    halves = np.frombuffer(texts["hash"].tobytes(), "<u8").reshape(-1, 2)
    hashes = np.add.reduceat(halves, starts).view("V16").ravel()
    return hashes, np.add.reduceat(texts["tokens"], starts)


def find_repeats(units: list[np.ndarray]) -> list[frozenset[int]]:
    """Return the numbers of each unit's documents that repeat an earlier one of any unit."""
    hashes = [sum_documents(texts)[0] for texts in units]
    is_repeat = np.ones(sum(map(len, hashes)), bool)
    is_repeat[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    edges = np.cumsum([len(unit_hashes) for unit_hashes in hashes])[:-1]
    return [frozenset(np.flatnonzero(part).tolist()) for part in np.split(is_repeat, edges)]
