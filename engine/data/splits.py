"""Which document belongs to train or to validation, and the units of work of a corpus."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from engine.core.errors import UserError
from engine.data.chat import Encoder
from engine.data.inputs.readers import (
    LARGE_DOCUMENT_BYTES,
    Text,
    count_documents,
    count_parts,
    kind_of,
    read,
)
from engine.data.inputs.sources import Source

SPLITS = ("train", "val")
MIN_EXPECTED_DOCUMENTS = 6  # in the smaller split; with fewer, chance could leave it empty
MIN_UNIT_BYTES = 2**24
MIN_BATCH_CHARACTERS = 2**19  # that a thread encodes at a time, unless a unit has fewer
MAX_WHOLE_DOCUMENT_BYTES = 2**26  # of a document that cannot be encoded in pieces
MAX_UNITS = 2**12  # about: each has its own shards, and a system maps some 65,000 files at most
DIGEST = slice(8, 24)  # of a text's hash: its identity; the bytes before decide its split


class Piece(NamedTuple):
    """Text of one document for one split."""

    split: str
    text: str
    ends: bool  # whether the document, or its part in this split, ends here


@dataclass(frozen=True)
class Unit:
    """Consecutive parts of sources that are encoded together, into their own shards."""

    number: int
    parts: tuple[tuple[Source, int, int], ...]  # source, index and count: see readers.read
    dropped: frozenset[int] = frozenset()  # numbers of its documents that are left out

    @property
    def size(self) -> int:
        """Bytes of its sources, about."""
        return sum(source.size // count for source, _, count in self.parts)

    def texts(self) -> Iterator[Text]:
        """Yield the texts of all documents that are not dropped."""
        document = 0
        for source, index, count in self.parts:
            for text in read(source, index, count):
                if document not in self.dropped:
                    yield text
                document += text.ends


@dataclass(frozen=True)
class Rule:
    """How a text is split, given only the text and this rule.

    A document is assigned by its hash. A large document, or every document if there are few,
    is cut: its tail is for validation.
    """

    val_fraction: float
    few: bool  # whether assignment by hash could leave a split empty
    single: bool  # whether there is one document, which needs no end in the middle
    examples: bool  # examples are never cut
    val_threshold: float  # highest hash fraction that is for validation

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
        # Replaced bytes make the text longer than its bytes in the document.
        train_bytes = max(0, train_bytes * len(data) // length)
        cut = len(data[:train_bytes].decode(errors="replace"))  # after a character, not inside
        val = Piece("val", text.text[cut:], text.ends)
        return [Piece("train", text.text[:cut], not self.single), val] if cut else [val]


class Corpus:
    """The documents of some sources, in order."""

    def __init__(self, sources: list[Source], val_fraction: float):
        """Read only as many documents as tell whether there are few."""
        self.sources = sources
        self.examples = any(source.turns_of for source in sources)
        self.single = len(sources) == 1 and kind_of(sources[0]) == ""
        self.units = make_units(sources)
        few = self.single or self._has_few(MIN_EXPECTED_DOCUMENTS / min(val_fraction, 1 - val_fraction))
        threshold = val_fraction
        if few and self.examples:
            threshold = self._threshold_of_few(val_fraction)
        self.rule = Rule(val_fraction, few, self.single, self.examples, threshold)

    def _has_few(self, num_enough: float) -> bool:
        num_documents = 0
        for source in self.sources:
            count = count_documents(source)
            if count is None:
                for text in read(source):
                    num_documents += text.ends
                    if num_documents >= num_enough:
                        return False
            num_documents += count or 0
            if num_documents >= num_enough:
                return False
        return True

    def _threshold_of_few(self, val_fraction: float) -> float:
        """Return a threshold that gives validation its fraction: at least one, but not all."""
        fractions = sorted({hash_fraction(digest_of(text)) for text in self.texts()})
        count = min(max(1, round(val_fraction * len(fractions))), len(fractions) - 1)
        return fractions[count - 1] if count > 0 else -1.0

    @property
    def bytes(self) -> int:
        """Size of all sources."""
        return sum(source.size for source in self.sources)

    @property
    def is_plain(self) -> bool:
        """Whether the size of the sources is about that of their text."""
        return not any(source.compression or kind_of(source) in (".parquet", "rows") for source in self.sources)

    @property
    def version(self) -> str:
        """A hash that changes when a file does; "" if that cannot be known."""
        infos = [(PurePath(source.name).name, *source.info) for source in self.sources]
        if not all(version for *_, version in infos):
            return ""
        return hashlib.blake2b(repr(infos).encode(), digest_size=16).hexdigest()

    def texts(self) -> Iterator[Text]:
        """Yield the texts of all documents."""
        for unit in self.units:
            yield from unit.texts()

    def digests(self) -> list[np.ndarray]:
        """Return what identifies the texts of each unit: see text_rows."""
        return [text_rows((digest_of(text), 0, text.ends) for text in unit.texts()) for unit in self.units]

    def sample(self, max_bytes: int | None) -> Iterator[str]:
        """Yield all texts, or if they are more than ``max_bytes`` the beginning of each unit.

        The result depends on the sources alone. A unit gives in proportion to its size, and more
        if those before it were too short.
        """
        if max_bytes is None or self._fits(max_bytes):
            yield from (text.text for text in self.texts())
            return
        budget = 0.0
        total_bytes = sum(unit.size for unit in self.units)
        for unit in self.units:
            budget += max_bytes * unit.size / max(1, total_bytes)
            for text in unit.texts() if budget > 0 else ():
                yield text.text
                budget -= len(text.text.encode())
                if budget <= 0:
                    break

    def _fits(self, max_bytes: int) -> bool:
        if self.is_plain:
            return self.bytes <= max_bytes
        num_bytes = 0
        for text in self.texts():
            num_bytes += len(text.text.encode())
            if num_bytes > max_bytes:
                return False
        return True


@dataclass
class Batch:
    """Encoded texts: token ids and counts of each split, and a row for each text."""

    ids: dict[str, list[np.ndarray]] = field(default_factory=lambda: {name: [] for name in SPLITS})
    counts: dict[str, Counter] = field(default_factory=lambda: {name: Counter() for name in SPLITS})
    texts: list[tuple[bytes, int, bool]] = field(default_factory=list)  # see text_rows
    num_characters: int = 0


def encode_batch(texts: Iterable[Text], rule: Rule, encode: Encoder, whole_documents: bool = False) -> Batch:
    """Split, hash and encode texts, or with whole_documents the joined texts of each document."""
    batch = Batch()
    pieces: list[Piece] = []
    for text in texts:
        digest = digest_of(text)
        pieces += rule.pieces(text, digest)
        num_tokens = 0
        if whole_documents and not text.ends:
            batch.texts.append((digest, num_tokens, text.ends))
            continue
        for piece in join_pieces(pieces):
            ids, num_bytes, num_targets = encode(piece.text, piece.ends)
            batch.ids[piece.split].append(ids)
            counts = batch.counts[piece.split]
            counts["tokens"] += len(ids)
            counts["bytes"] += num_bytes
            counts["documents"] += piece.ends
            counts["targets"] += num_targets
            num_tokens += len(ids)
            batch.num_characters += len(piece.text)
        batch.texts.append((digest, num_tokens, text.ends))
        pieces.clear()
    return batch


def join_pieces(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join the pieces of a document that are of the same split."""
    for split, group in itertools.groupby(pieces, key=attrgetter("split")):
        same = list(group)
        yield Piece(split, "".join(piece.text for piece in same), same[-1].ends)


def make_batches(units: Iterable[Unit], whole_documents: bool = False) -> Iterator[tuple[Unit, list[Text], bool]]:
    """Yield texts of a unit that are encoded together, and whether they are its last.

    With whole_documents no document is in two batches. Raises UserError if it is too large.
    """
    for unit in units:
        texts: list[Text] = []
        num_characters = 0
        for text in unit.texts():
            if whole_documents and (text.size or 0) > MAX_WHOLE_DOCUMENT_BYTES:
                limit = f"encodes a document whole, up to {MAX_WHOLE_DOCUMENT_BYTES:,} bytes"
                advice = "Split the document, or use --tokenizer bpe."
                raise UserError(f"--tokenizer: {limit} (got {text.size:,}). {advice}")
            texts.append(text)
            num_characters += len(text.text) + 1
            is_cuttable = text.ends or not whole_documents
            if num_characters >= MIN_BATCH_CHARACTERS and is_cuttable:
                yield unit, texts, False
                texts = []
                num_characters = 0
        yield unit, texts, True


def make_units(sources: list[Source]) -> list[Unit]:
    """Group parts of sources into units, in order.

    Small files share a unit. A large file has its own; of Parquet or of a Hugging Face dataset
    it has several.
    """
    unit_bytes = max(MIN_UNIT_BYTES, sum(source.size for source in sources) // MAX_UNITS)
    units: list[Unit] = []
    parts: list[tuple[Source, int, int]] = []
    num_bytes = 0
    for source in sources:
        count = count_parts(source, unit_bytes)
        for index in range(count):
            if parts and num_bytes + source.size // count > unit_bytes:
                units.append(Unit(len(units), tuple(parts)))
                parts = []
                num_bytes = 0
            parts.append((source, index, count))
            num_bytes += source.size // count
    return [*units, Unit(len(units), tuple(parts))] if parts else units


def digest_of(text: Text) -> bytes:
    """Hash a text and its offset in the document with BLAKE2b, 32 bytes."""
    salt = text.offset.to_bytes(16, "little") if text.offset else b""
    return hashlib.blake2b(text.text.encode(), salt=salt).digest()[:32]


def hash_fraction(digest: bytes) -> float:
    """Map a digest to [0, 1], the same on every machine."""
    return int.from_bytes(digest[:8], "big") / 2**64


def text_rows(texts: Iterable[tuple[bytes, int, bool]]) -> np.ndarray:
    """Return digest (two numbers), tokens and "ends its document" of texts, uint64 (N, 4)."""
    texts = list(texts)
    rows = np.zeros((len(texts), 4), np.uint64)
    digests = b"".join(digest[DIGEST] for digest, _, _ in texts)
    rows[:, :2] = np.frombuffer(digests, "<u8").reshape(-1, 2)
    rows[:, 2:] = np.array([(tokens, ends) for _, tokens, ends in texts], np.uint64).reshape(-1, 2)
    return rows


def document_rows(texts: np.ndarray) -> np.ndarray:
    """Sum the rows of each document's texts: digest and tokens, uint64 (documents, 3)."""
    ends = np.flatnonzero(texts[:, 3])
    if not len(ends):
        return np.empty((0, 3), np.uint64)
    return np.add.reduceat(texts[:, :3], np.append(0, ends[:-1] + 1))


def first_occurrences(documents: np.ndarray) -> np.ndarray:
    """Return which documents repeat no earlier one, bool (N,), given their rows (N, ≥ 2)."""
    identities = np.ascontiguousarray(documents[:, :2]).view("V16").ravel()
    is_first = np.zeros(len(documents), bool)
    is_first[np.unique(identities, return_index=True)[1]] = True
    return is_first


def content_hash(units: Iterable[np.ndarray]) -> str:
    """Hash the digests of all texts, given the rows of each unit."""
    content = hashlib.blake2b(digest_size=16)
    for texts in units:
        content.update(np.ascontiguousarray(texts[:, :2]).tobytes())
    return content.hexdigest()


def find_repeats(rows: list[np.ndarray]) -> list[frozenset[int]]:
    """Return for each unit the numbers of documents that repeat an earlier one of any unit."""
    documents = [document_rows(texts) for texts in rows]
    is_first = first_occurrences(np.concatenate([*documents, np.empty((0, 3), np.uint64)]))
    edges = list(itertools.accumulate((len(unit) for unit in documents), initial=0))
    return [frozenset(np.flatnonzero(~is_first[start:end]).tolist()) for start, end in itertools.pairwise(edges)]
