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
from engine.data.inputs import readers
from engine.data.inputs.columns import count_parts
from engine.data.inputs.readers import Text, count_documents, hash_prefixes, is_one_document, read
from engine.data.inputs.sources import DEFAULT_ENCODING, Source, kind_of
from engine.data.inputs.text import Notes

SPLIT_NAMES = ("train", "val")
SPLIT_VERSION = 2  # of Corpus.record_split; older datasets have no such record
MIN_EXPECTED_DOCUMENTS = 6  # in the smaller split; with fewer, it could be empty by chance
MAX_FOLLOWED_FILES = 2**12  # of plain text, that are recorded as documents that may grow
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
    cut: its tail is for validation. If a document has grown, each increment is cut.
    """

    val_fraction: float
    few: bool  # whether assignment by hash could leave a split empty
    single: bool  # whether there is one document, which does not end where it is cut
    examples: bool  # examples are never cut
    kept: dict[str, list[int]]  # see Corpus.kept

    def pieces(self, text: Text, digest: bytes, unit_split: str = "") -> list[Piece]:
        """Split a text into pieces, one for each range that it overlaps."""
        if unit_split:
            return [Piece(unit_split, text.text, text.ends)]
        key = digest[HASH_BYTES].hex()
        is_kept = key in self.kept
        is_large = text.is_large
        if self.examples or not (self.few or is_large or is_kept):
            is_val = not self.few and hash_fraction(digest) <= self.val_fraction
            return [Piece("val" if is_val or is_kept else "train", text.text, text.ends)]
        data = text.text.encode()
        size = len(data) if text.document_bytes is None else text.document_bytes
        length = len(data) if text.piece_bytes is None else text.piece_bytes
        is_whole = text.document_bytes is None
        sizes = (self.kept.get(key) if is_whole else self._recorded_sizes.get(size)) or [size]
        ends_at_cut = not self.single or len(sizes) > 1
        pieces: list[Piece] = []
        start = 0
        for split, end in self._ranges(sizes):
            num_bytes = end - text.offset
            if num_bytes >= length:
                ends = text.ends or (num_bytes == length and ends_at_cut)
                return [*pieces, Piece(split, text.text[start:], ends)]
            # Bytes that were replaced by U+FFFD make the text longer than its bytes in the file.
            num_bytes = max(0, num_bytes * len(data) // length)
            cut = len(data[:num_bytes].decode(errors="replace"))  # not inside a character
            if cut > start:
                pieces.append(Piece(split, text.text[start:cut], ends_at_cut))
                start = cut
        raise AssertionError("the last range ends with the document")

    @functools.cached_property
    def _recorded_sizes(self) -> dict[int, list[int]]:
        """The sizes of each document that has grown, by its present size: for those in pieces."""
        return {sizes[-1]: sizes for sizes in self.kept.values() if len(sizes) > 1}

    def _ranges(self, sizes: list[int]) -> Iterator[tuple[str, int]]:
        """Yield the split and the end, in bytes, of each range of a document that is cut."""
        for start, end in itertools.pairwise([0, *sizes]):
            if start or sizes[0] or len(sizes) == 1:
                yield "train", start + int((end - start) * (1 - self.val_fraction))
            yield "val", end


class Corpus:
    """The documents of sources, in order.

    Attributes:
        kept: what must stay in validation, as the previous version of the dataset recorded it. By
            hash: each document that may grow, with its sizes so far, or few examples, without. A
            size of 0 comes before that of a document that was not cut.
    """

    def __init__(
        self,
        sources: list[Source],
        val_fraction: float,
        val_sources: Sequence[Source] = (),
        kept: dict[str, list[int]] | None = None,
    ):
        """Read documents until it is certain whether there are few.

        If there are ``val_sources``, their documents are for validation, and all others for train.
        """
        self.groups = [group for group in (sources, val_sources) if group]
        self.sources = [*sources, *val_sources]
        self.val_fraction = val_fraction
        self.kept = kept or {}
        self.examples = any(source.turns_of for source in self.sources)
        self.single = all(len(group) == 1 and is_one_document(group[0]) for group in self.groups)
        self.units = make_units(sources, "train" if val_sources else "")
        self.units += make_units(val_sources, "val", len(self.units))
        self.bytes = sum(source.size for source in self.sources)
        self.few = not val_sources and (self.single or self._has_few_documents())
        are_files = len(sources) <= MAX_FOLLOWED_FILES and all(map(is_one_document, sources))
        self.can_grow = not val_sources and (self.few or are_files)

    @functools.cached_property
    def rule(self) -> Rule:
        """The rule of the split. Reads the texts if documents may have grown."""
        kept = self.kept
        if self.examples and self.few:
            kept = self._choose_val_examples()
        elif kept and not self.examples:
            kept = self.find_cut_documents()
        return Rule(self.val_fraction, self.few, self.single, self.examples, kept)

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

    def _choose_val_examples(self) -> dict[str, list[int]]:
        """Choose about val_fraction of few examples by their hashes: at least one, but not all."""
        digests = sorted({digest_of(text) for text in self.texts()})
        hashes = [digest[HASH_BYTES].hex() for digest in digests]
        hashes.sort(key=lambda digest: digest not in self.kept)  # stable: kept ones first
        count = min(max(1, round(self.val_fraction * len(hashes))), len(hashes) - 1)
        num_kept = sum(digest in self.kept for digest in hashes)
        return {digest: [] for digest in hashes[: max(count, num_kept, 0)]}

    def find_cut_documents(self) -> dict[str, list[int]]:
        """Return the sizes so far of each document that is cut or may grow, by its hash.

        Of many documents, those are cut that were recorded before, or that start with one of them.
        """
        documents = {}
        sizes = {size for sizes in self.kept.values() for size in sizes}
        for digests in hash_prefixes(self.texts(), sizes):
            size, digest = digests[-1]
            hashes = [prefix_digest[HASH_BYTES].hex() for _, prefix_digest in digests]
            matches = [self.kept[prefix] for prefix in hashes if prefix in self.kept]
            is_cut = self.few or size > readers.LARGE_DOCUMENT_BYTES
            is_val = hash_fraction(digest) <= self.val_fraction
            if size and (matches or (self.can_grow and (is_cut or is_val))):
                earlier_sizes = matches[-1] if matches else [] if is_cut else [0]
                documents[hashes[-1]] = [*(n for n in earlier_sizes if n < size), size]
        return documents

    def record_split(self) -> dict[str, Any]:
        """Return the record of the split, for the next version of the dataset."""
        needs_sizes = self.can_grow and not self.examples and not self.kept
        kept = self.find_cut_documents() if needs_sizes else self.rule.kept
        return {"version": SPLIT_VERSION, "val_fraction": self.val_fraction, "kept": kept}

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
