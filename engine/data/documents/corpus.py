"""Documents → their split into train and validation; units of work; what a corpus is."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from engine.core.errors import UserError
from engine.data.documents.document import Document, read_documents
from engine.data.records.reader import is_one_document
from engine.data.records.tables import count_parts
from engine.data.records.text import DEFAULT_ENCODING, DEFAULT_READER, Reader
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source

MIN_EXPECTED_DOCUMENTS = 6  # in the smaller split; with fewer, it could be empty by chance
MIN_UNIT_BYTES = 2**24
MAX_UNITS = 2**12  # roughly: each has its own shards, and Linux maps at most 65,530 files
MIN_BATCH_CHARACTERS = 2**19  # encoded by a thread at a time, unless a unit has fewer
MAX_JOINED_DOCUMENT_BYTES = 2**26  # of a document that cannot be encoded in pieces
HASH_BYTES = slice(8, 24)  # of a digest, to identify a text; the first 8 decide its split
# For each text: its hash, its number of tokens, and whether its document ends with it.
TEXT_DTYPE = np.dtype([("hash", "V16"), ("tokens", "<u8"), ("ends", "?")])


class Piece(NamedTuple):
    """Text of one document, or of a piece of it, for one split."""

    split: str
    text: str
    starts_document: bool  # whether the document, or its part in this split, starts with this piece
    ends_document: bool


@dataclass(frozen=True)
class Unit:
    """Consecutive parts of sources, encoded together into their own shards."""

    number: int
    parts: tuple[tuple[Source, int, int], ...]  # source, index and count: see count_parts
    reader: Reader
    split: str = ""  # of all its documents; "": by the rule
    dropped: frozenset[int] = frozenset()  # numbers of its documents that are left out
    notes: Notes = field(default_factory=Notes, compare=False)  # of the sources when last read

    @property
    def size(self) -> int:
        """Bytes of its sources, about."""
        return sum(source.size // count for source, _, count in self.parts)

    def documents(self) -> Iterator[Document]:
        """Yield all documents that are not dropped."""
        number = 0
        self.notes.clear()
        for source, index, count in self.parts:
            for document in read_documents(source, index, count, self.notes, self.reader):
                if number not in self.dropped:
                    yield document
                if document.ends_document:
                    number += 1


@dataclass(frozen=True)
class SplitRule:
    """Splits each document into train and validation, independently of the other documents.

    A document is assigned by its hash, an example by the hash of its prompt. A large document, or
    every document if there are few, is cut: its tail is for validation.
    """

    val_fraction: float
    has_few_documents: bool  # whether assignment by hash could leave a split empty
    is_single_document: bool  # whether there is one, which does not end where it is cut
    has_examples: bool  # which are never cut
    val_prompts: tuple[bytes, ...] = ()  # of few prompts: the hashes of those for val

    def pieces(self, document: Document, digest: bytes, unit_split: str = "") -> list[Piece]:
        """Split a document into pieces, at most one for each split."""
        text = document.text
        starts = document.offset == 0
        ends = document.ends_document
        is_cut = self.has_few_documents or document.document_bytes is not None
        if unit_split or self.has_examples or not is_cut:
            split = unit_split or self._split_of(document, digest)
            return [Piece(split, text, starts, ends)]
        data = text.encode()
        length = document.piece_bytes or len(data)
        document_bytes = document.document_bytes or length
        # Of this text, for training: below 0 or above its length if the cut is in another piece.
        train_bytes = int(document_bytes * (1 - self.val_fraction)) - document.offset
        ends_train = not self.is_single_document
        if train_bytes >= length:
            is_cut_here = train_bytes == length and ends_train
            return [Piece("train", text, starts, ends or is_cut_here)]
        # Bytes that were replaced by U+FFFD make the text longer than its bytes in the file.
        num_bytes = max(0, train_bytes) * len(data) // length
        cut = len(data[:num_bytes].decode(errors="replace"))  # not inside a character
        train = [Piece("train", text[:cut], starts, ends_train)] if cut else []
        return [*train, Piece("val", text[cut:], train_bytes >= 0 and ends_train, ends)]

    def _split_of(self, document: Document, digest: bytes) -> str:
        """Return the split of a document that is not cut."""
        if self.has_examples:
            digest = hash_prompt(document)
        # The first bytes as a fraction in [0, 1], the same on every machine.
        is_val = int.from_bytes(digest[:8], "big") / 2**64 <= self.val_fraction
        if self.has_few_documents:
            is_val = digest in self.val_prompts
        return "val" if is_val else "train"


class Corpus:
    """The documents of sources, in order."""

    def __init__(
        self,
        sources: list[Source],
        val_fraction: float,
        val_sources: Sequence[Source] = (),
        reader: Reader = DEFAULT_READER,
        notes: Notes | None = None,
    ):
        """Read documents until it is certain whether there are few.

        If there are ``val_sources``, their documents are for validation, and all others for train.
        Raises UserError if all examples have one prompt and there are none.
        """
        self.sources = [*sources, *val_sources]
        self.num_val_sources = len(val_sources)
        self.reader = reader
        self.notes = notes or Notes()  # of the inputs, before they are read
        self.units = make_units(sources, reader, "train" if val_sources else "", 0)
        self.units += make_units(val_sources, reader, "val", len(self.units))
        self.bytes = sum(source.size for source in self.sources)
        are_plain = all(is_one_document(source, reader) for source in self.sources)
        is_single = are_plain and len(sources) == 1 and len(val_sources) <= 1
        has_examples = reader.examples is not None
        few = None if val_sources else self._find_few(val_fraction)
        val_prompts = () if few is None or not has_examples else self._choose_val(few, val_fraction)
        self.rule = SplitRule(val_fraction, few is not None, is_single, has_examples, val_prompts)

    def _find_few(self, val_fraction: float) -> list[bytes] | None:
        """Return a key of each document, or each prompt's, if they are too few to use hashes."""
        num_enough = MIN_EXPECTED_DOCUMENTS / min(val_fraction, 1 - val_fraction)
        keys: set[bytes] = set()
        for source in self.sources:
            is_one = is_one_document(source, self.reader)  # it need not be read
            documents = [Document("")] if is_one else read_documents(source, reader=self.reader)
            for document in documents:
                if document.ends_document:
                    is_example = self.reader.examples is not None
                    keys.add(hash_prompt(document) if is_example else b"%d" % len(keys))
                if len(keys) >= num_enough:
                    return None
        return sorted(keys)

    def _choose_val(self, prompts: list[bytes], val_fraction: float) -> tuple[bytes, ...]:
        """Return about val_fraction of few prompts: at least one, and not all of them."""
        if len(prompts) == 1:
            problem = "must have different prompts to split its examples (got 1)"
            raise UserError(f"{self.sources[0].name}: {problem}. Give others with --val.")
        num_val = min(max(1, round(val_fraction * len(prompts))), len(prompts) - 1)
        return tuple(prompts[:num_val])

    @property
    def is_plain(self) -> bool:
        """Whether the sizes of the sources are about those of their texts."""
        return self.reader.encoding == DEFAULT_ENCODING and not any(
            source.compression or source.kind in (".parquet", "rows") for source in self.sources
        )

    @property
    def version(self) -> str:
        """A hash that changes with the files; "" if it is unknown whether they change."""
        versions = source_versions(self.sources)
        content = repr((versions, self.num_val_sources)).encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest() if versions else ""

    def hash_content(self) -> str:
        """Hash all texts."""
        return content_hash(self.units, self.digests())

    def digests(self) -> list[np.ndarray]:
        """Hash every text: a TEXT_DTYPE array (N,) for each unit, with 0 tokens."""
        arrays = []
        for unit in self.units:
            pairs = ((digest_of(each), each.ends_document) for each in unit.documents())
            rows = [(digest[HASH_BYTES], 0, ends) for digest, ends in pairs]
            arrays.append(np.array(rows, TEXT_DTYPE))
        return arrays


def make_units(sources: Sequence[Source], reader: Reader, split: str, first: int) -> list[Unit]:
    """Group parts of sources into units, in order, numbered from ``first`` on.

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
    return [Unit(number, tuple(parts), reader, split) for number, parts in enumerate(units, first)]


def make_batches(units: Iterable[Unit], join_pieces: bool) -> Iterator[tuple[Unit, list[Document]]]:
    """Yield (unit, documents to encode together), at least once for each unit.

    With join_pieces, each document is in one batch. Raises UserError for one that is too large.
    """
    max_bytes = MAX_JOINED_DOCUMENT_BYTES if join_pieces else math.inf
    for unit in units:
        batch: list[Document] = []
        num_characters = 0
        for document in unit.documents():
            if (document.document_bytes or 0) > max_bytes:
                problem = f"must have documents of at most {max_bytes:,} bytes"
                got = f"(got {document.document_bytes:,} in {document.source})"
                raise UserError(f"--tokenizer: {problem} {got}. Split them, or use bpe.")
            batch.append(document)
            num_characters += len(document.text) + 1  # empty texts fill a batch too
            can_end = document.ends_document or not join_pieces
            if num_characters >= MIN_BATCH_CHARACTERS and can_end:
                yield unit, batch
                batch = []
                num_characters = 0
        yield unit, batch


def source_versions(sources: Iterable[Source]) -> list[tuple[str, int, str]]:
    """Return (title, size, version) of each source; an empty list if a version is unknown."""
    versions = [(source.title, *source.info) for source in sources]
    return versions if all(version for _, _, version in versions) else []


def digest_of(document: Document) -> bytes:
    """Hash a text and its offset in the document: 32 of the 64 bytes of BLAKE2b."""
    salt = document.offset.to_bytes(16, "little") if document.offset else b""
    return hashlib.blake2b(document.text.encode(), salt=salt).digest()[:32]


def hash_prompt(document: Document) -> bytes:
    """Hash the prompt of an example with BLAKE2b, 32 bytes."""
    return hashlib.blake2b(document.prompt.encode(), digest_size=32).digest()


def content_hash(units: Iterable[Unit], texts: Iterable[np.ndarray]) -> str:
    """Hash the texts of units, TEXT_DTYPE arrays (N,), separately for each Unit.split."""
    content: dict[str, Any] = {}
    for unit, rows in zip(units, texts, strict=True):
        digest = content.setdefault(unit.split, hashlib.blake2b(digest_size=16))
        digest.update(rows["hash"].tobytes())
    return "-".join(digest.hexdigest() for digest in content.values())


def aggregate_documents(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes and numbers of tokens of documents, (M,), from TEXT_DTYPE (N,) of texts."""
    ends = np.flatnonzero(texts["ends"])
    starts = np.append(0, ends + 1)[: len(ends)]
    # The hash of a document is the sum of those of its texts.
    halves = np.ascontiguousarray(texts["hash"]).view("<u8").reshape(-1, 2)
    hashes = np.add.reduceat(halves, starts).view("V16").ravel()
    return hashes, np.add.reduceat(texts["tokens"], starts)


def find_repeats(units: list[np.ndarray]) -> list[frozenset[int]]:
    """Return the numbers of each unit's documents that repeat an earlier document of any unit."""
    hashes = [aggregate_documents(texts)[0] for texts in units]
    is_repeat = np.ones(sum(map(len, hashes)), bool)
    is_repeat[np.unique(np.concatenate(hashes), return_index=True)[1]] = False
    edges = np.cumsum([len(unit_hashes) for unit_hashes in hashes])[:-1]
    return [frozenset(np.flatnonzero(part).tolist()) for part in np.split(is_repeat, edges)]
