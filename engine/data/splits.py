"""The split of documents into train and validation, and the units of work of a corpus."""

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from engine.core.errors import UserError
from engine.data.inputs.columns import count_parts
from engine.data.inputs.readers import Text, count_documents, is_one_document, read
from engine.data.inputs.sources import DEFAULT_ENCODING, Source, kind_of
from engine.data.inputs.text import Notes

SPLIT_NAMES = ("train", "val")
MIN_EXPECTED_DOCUMENTS = 6  # in the smaller split; with fewer, it could be empty by chance
MIN_UNIT_BYTES = 2**24
MAX_UNITS = 2**12  # roughly: each has its own shards, and Linux maps at most 65,530 files
MIN_BATCH_CHARACTERS = 2**19  # encoded by a thread at a time, unless a unit has fewer
MAX_JOINED_DOCUMENT_BYTES = 2**26  # of a document that cannot be encoded in pieces
HASH_BYTES = slice(8, 24)  # of a digest, to identify a text; the first 8 decide its split
# For each text: its hash, its number of tokens, whether its document ends with it, and whether
# some of it is for validation.
TEXT_DTYPE = np.dtype([("hash", "V16"), ("tokens", "<u8"), ("ends", "?"), ("val", "?")])


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
    split: str = ""  # of all its documents; "": by the rule

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
    """Splits each document into train and validation, independently of the other documents.

    A document is assigned by its hash. A large document, or every document if there are few, is
    cut: its tail is for validation.
    """

    val_fraction: float
    few: bool  # whether assignment by hash could leave a split empty
    single: bool  # whether there is one document, which does not end where it is cut
    examples: bool  # examples are never cut
    val_hashes: frozenset[bytes] = frozenset()  # of few examples: those for validation

    def pieces(self, text: Text, digest: bytes, unit_split: str = "") -> list[Piece]:
        """Split a text into pieces, at most one for each split."""
        if unit_split:
            return [Piece(unit_split, text.text, text.ends)]
        if self.examples or not (self.few or text.is_large):
            is_val = hash_fraction(digest) <= self.val_fraction
            if self.few:
                is_val = digest[HASH_BYTES] in self.val_hashes
            return [Piece("val" if is_val else "train", text.text, text.ends)]
        data = text.text.encode()
        size = len(data) if text.document_bytes is None else text.document_bytes
        length = len(data) if text.piece_bytes is None else text.piece_bytes
        num_train_bytes = max(0, int(size * (1 - self.val_fraction)) - text.offset)
        if num_train_bytes >= length:
            ends = text.ends or (num_train_bytes == length and not self.single)
            return [Piece("train", text.text, ends)]
        # Bytes that were replaced by U+FFFD make the text longer than its bytes in the file.
        num_bytes = num_train_bytes * len(data) // length
        cut = len(data[:num_bytes].decode(errors="replace"))  # not inside a character
        train_pieces = [Piece("train", text.text[:cut], not self.single)] if cut else []
        return [*train_pieces, Piece("val", text.text[cut:], text.ends)]


class Corpus:
    """The documents of sources, in order."""

    def __init__(
        self, sources: list[Source], val_fraction: float, val_sources: Sequence[Source] = ()
    ):
        """Read documents until it is certain whether there are few.

        If there are ``val_sources``, their documents are for validation, and all others for train.
        """
        self.groups = [group for group in (sources, val_sources) if group]
        self.sources = [*sources, *val_sources]
        self.val_fraction = val_fraction
        self.examples = any(source.turns_of for source in self.sources)
        self.single = all(len(group) == 1 and is_one_document(group[0]) for group in self.groups)
        self.units = make_units(sources, "train" if val_sources else "")
        self.units += make_units(val_sources, "val", len(self.units))
        self.bytes = sum(source.size for source in self.sources)
        self.few = not val_sources and (self.single or self._has_few_documents())

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule of the split. Reads the texts if there are few examples."""
        val_hashes = frozenset(self._choose_val_examples() if self.examples and self.few else ())
        return Rule(self.val_fraction, self.few, self.single, self.examples, val_hashes)

    def _has_few_documents(self) -> bool:
        num_enough = MIN_EXPECTED_DOCUMENTS / min(self.val_fraction, 1 - self.val_fraction)
        return all(total < num_enough for total in itertools.accumulate(self._document_counts()))

    def _document_counts(self) -> Iterator[int]:
        """Yield numbers whose sum is the number of documents."""
        for source in self.sources:
            count = count_documents(source)
            if count is None:
                yield from (text.ends for text in read(source))
            else:
                yield count

    def _choose_val_examples(self) -> list[bytes]:
        """Choose about val_fraction of few examples by their hashes: at least one, but not all."""
        digests = sorted({digest_of(text) for text in self.texts()})
        count = min(max(1, round(self.val_fraction * len(digests))), len(digests) - 1)
        return [digest[HASH_BYTES] for digest in digests[:count]]

    @property
    def is_plain(self) -> bool:
        """Whether the sizes of the sources are about those of their texts."""
        return not any(
            source.compression
            or source.encoding != DEFAULT_ENCODING
            or kind_of(source) in (".parquet", "rows")
            for source in self.sources
        )

    @property
    def version(self) -> str:
        """A hash that changes with the files; "" if it is unknown whether they change."""
        versions = [source_versions(group) for group in self.groups]
        if not all(versions):
            return ""
        content = repr(versions if len(versions) > 1 else versions[0])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def texts(self) -> Iterator[Text]:
        """Yield the texts of all documents."""
        for unit in self.units:
            yield from unit.texts()

    def digests(self) -> list[np.ndarray]:
        """Return TEXT_DTYPE arrays (N,), one for each unit, without numbers of tokens."""
        arrays = []
        for unit in self.units:
            rows = [(digest_of(text)[HASH_BYTES], 0, text.ends, False) for text in unit.texts()]
            arrays.append(np.array(rows, TEXT_DTYPE))
        return arrays


def make_units(sources: Sequence[Source], split: str = "", first: int = 0) -> list[Unit]:
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
    return [Unit(number, tuple(parts), split=split) for number, parts in enumerate(units, first)]


def make_batches(
    units: Iterable[Unit], join_pieces: bool = False
) -> Iterator[tuple[Unit, list[Text]]]:
    """Yield (unit, texts to encode together), at least once for each unit.

    With join_pieces, each document is in one batch. Raises UserError for one that is too large.
    """
    for unit in units:
        texts: list[Text] = []
        num_characters = 0
        for text in unit.texts():
            if join_pieces and (text.document_bytes or 0) > MAX_JOINED_DOCUMENT_BYTES:
                limit = f"can encode documents of at most {MAX_JOINED_DOCUMENT_BYTES:,} bytes"
                advice = "Split the document, or use --tokenizer bpe."
                raise UserError(f"--tokenizer: {limit} (got {text.document_bytes:,}). {advice}")
            texts.append(text)
            num_characters += len(text.text) + 1
            can_end = text.ends or not join_pieces
            if num_characters >= MIN_BATCH_CHARACTERS and can_end:
                yield unit, texts
                texts = []
                num_characters = 0
        yield unit, texts


def source_versions(sources: Iterable[Source]) -> list[tuple[str, int, str]]:
    """Return (name, size, version) of each source; an empty list if a version is unknown."""
    versions = [(PurePath(source.name).name, *source.info) for source in sources]
    return versions if all(version for _, _, version in versions) else []


def digest_of(text: Text) -> bytes:
    """Hash a text and its offset in the document with BLAKE2b, 32 bytes."""
    salt = text.offset.to_bytes(16, "little") if text.offset else b""
    return hashlib.blake2b(text.text.encode(), salt=salt).digest()[:32]


def hash_fraction(digest: bytes) -> float:
    """Map a digest to [0, 1], the same on every machine."""
    return int.from_bytes(digest[:8], "big") / 2**64


def content_hash(units: Iterable[Unit], texts: Iterable[np.ndarray]) -> str:
    """Hash the texts of units, TEXT_DTYPE arrays (N,), separately for each Unit.split."""
    content: dict[str, Any] = {}
    for unit, rows in zip(units, texts, strict=True):
        digest = content.setdefault(unit.split, hashlib.blake2b(digest_size=16))
        digest.update(rows["hash"].tobytes())
    return "-".join(digest.hexdigest() for digest in content.values())


def sum_documents(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return hash, tokens and ``val`` of documents, (M,) each, from TEXT_DTYPE (N,) of texts."""
    ends = np.flatnonzero(texts["ends"])
    if not len(ends):
        return np.empty(0, "V16"), np.empty(0, np.uint64), np.empty(0, bool)
    starts = np.append(0, ends[:-1] + 1)
    halves = np.frombuffer(texts["hash"].tobytes(), "<u8").reshape(-1, 2)
    hashes = np.add.reduceat(halves, starts).view("V16").ravel()
    is_val = np.logical_or.reduceat(texts["val"], starts)
    return hashes, np.add.reduceat(texts["tokens"], starts), is_val


def find_repeats(units: list[np.ndarray]) -> list[frozenset[int]]:
    """Return the numbers of each unit's documents that repeat an earlier document of any unit."""
    hashes = [sum_documents(texts)[0] for texts in units]
    is_repeat = np.ones(sum(map(len, hashes)), bool)
    is_repeat[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    edges = np.cumsum([len(unit_hashes) for unit_hashes in hashes])[:-1]
    return [frozenset(np.flatnonzero(part).tolist()) for part in np.split(is_repeat, edges)]
