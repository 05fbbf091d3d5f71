"""Which texts belong to which split and which part of the work, known from the list of sources and each text alone."""

import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from engine.data.ledger import SPLITS, content_of
from engine.data.readers import LARGE, READERS, Text, can_be_cut, kind_of, read
from engine.data.sources import Source

DRAWN = 6  # documents that should fall to the smaller split, so that drawing lots can be left to chance
RECORDED = slice(8, 24)  # bytes of a text's digest that a ledger has; those before are its lot
SAMPLE = 2**20  # bytes of text that a sample takes at a place


class Piece(NamedTuple):
    """Text of one document for one split."""

    split: str
    text: str
    ends: bool  # whether the document, or what this split has of it, ends here
    last: bool  # whether the document ends here


def digest_of(text: Text) -> bytes:
    """32 bytes of BLAKE2b of a text and where it stands in its document."""
    salt = text.offset.to_bytes(16, "little") if text.offset else b""
    return hashlib.blake2b(text.text.encode(), salt=salt).digest()[:32]


def lot_of(digest: bytes) -> float:
    """A document's lot, from 0 to 1, drawn by the hash of its text: on any machine the same."""
    return int.from_bytes(digest[:8], "big") / 2**64


@dataclass(frozen=True)
class Rule:
    """How texts are split: by what a text is and by this, whatever else there is and wherever it is read.

    Documents are drawn by their hashes. A large one, or where documents are few each one, gives its tail.
    """

    val_fraction: float
    few: bool  # documents, so that lots might leave a split with none
    single: bool  # one document, which needs no end in the middle
    examples: bool  # which are never cut
    highest_lot: float  # that is drawn for validation

    def pieces(self, text: Text, digest: bytes) -> list[Piece]:
        """A text's one or two pieces."""
        if self.examples or not (self.few or (text.size or 0) > LARGE):
            return [Piece(SPLITS[lot_of(digest) <= self.highest_lot], text.text, text.ends, text.ends)]
        data = text.text.encode()
        size = len(data) if text.size is None else text.size
        length = len(data) if text.length is None else text.length
        left = int(size * (1 - self.val_fraction)) - text.offset  # bytes for training
        if left >= length:
            ends = text.ends or (left == length and not self.single)
            return [Piece("train", text.text, ends, text.ends)]
        left = left * len(data) // length  # more, where bytes that are not UTF-8 were replaced
        cut = len(data[: max(0, left)].decode(errors="replace"))  # a character begun is for training
        train = [Piece("train", text.text[:cut], not self.single, False)] if cut else []
        return [*train, Piece("val", text.text[cut:], text.ends, text.ends)]


class Corpus:
    """The texts of some sources, end to end, which is also how their bytes are numbered."""

    def __init__(self, sources: list[Source], val_fraction: float):
        """Read only so many documents as tell whether there are few. Raises UserError for what is not text."""
        self.sources = sources
        self.starts = [0, *itertools.accumulate(source.size for source in sources)]
        self.bytes = self.starts[-1]
        self.examples = any(source.turns_of for source in sources)
        self.single = len(sources) == 1 and not kind_of(sources[0])
        least = DRAWN / min(val_fraction, 1 - val_fraction)
        few = self.single or self._are_few(least)
        highest = val_fraction
        if few and self.examples:  # about as many as wanted, at least one, but not all
            lots = sorted({lot_of(digest_of(text)) for text in self.texts()})  # repeats share one
            count = min(max(1, round(val_fraction * len(lots))), len(lots) - 1)
            highest = lots[count - 1] if count > 0 else -1.0
        self.rule = Rule(val_fraction, few, self.single, self.examples, highest)

    def _are_few(self, enough: float) -> bool:
        """Whether there are fewer documents than enough."""
        count = 0
        for source in self.sources:
            known = READERS[kind_of(source)].count(source)
            for text in [] if known else read(source):
                count += text.ends
                if count >= enough:
                    return False
            count += known or 0
            if count >= enough:
                return False
        return True

    @property
    def counted(self) -> bool:
        """Whether its bytes are about those of its text."""
        return not any(source.compression or kind_of(source) in (".parquet", "rows") for source in self.sources)

    @property
    def listing(self) -> str:
        """What two copies of the same files have in common: their names, sizes and, on the hub, revisions, hashed."""
        return self._hashed([(PurePath(one.name).name, one.size, one.revision) for one in self.sources])

    @property
    def stamp(self) -> str:
        """What changes when a file does; empty where that can't be known."""
        infos = [(PurePath(source.name).name, *source.info) for source in self.sources]
        return self._hashed(infos) if all(stamp for *_, stamp in infos) else ""

    def _hashed(self, found: object) -> str:
        return hashlib.blake2b(repr(found).encode(), digest_size=16).hexdigest()

    def stretch(self, part: int, parts: int) -> tuple[int, int]:
        """The bytes of one of so many parts, counted from 1; the last has what comes after the last byte too."""
        start, end = (self.bytes * number // parts for number in (part - 1, part))
        return start, end + (part == parts)

    def texts(self, start: int = 0, end: float = float("inf")) -> Iterator[Text]:
        """What begins in bytes [start, end); a source that has none of it is not read."""
        for number in range(max(0, bisect_left(self.starts, start) - 1), len(self.sources)):
            source, offset = self.sources[number], self.starts[number]
            if offset >= end:
                break
            if offset + source.size > start or offset >= start:
                yield from read(source, start - offset, end - offset)

    def content(self, start: int, end: float) -> str:
        """The digest of what begins in bytes [start, end), as a ledger of it has it."""
        return content_of(
            np.frombuffer(digest_of(text)[RECORDED], "<u8").reshape(1, 2) for text in self.texts(start, end)
        )

    def sample(self, size: int) -> Iterator[str]:
        """About so many bytes of text, from places spread evenly, or if there are no more all: the same each time.

        What can't be read from the middle gives its beginning, more of it for each place that it holds.
        """
        places, wanted = max(1, -(-(min(size, self.bytes) if self.counted else size) // SAMPLE)), {}
        for place in (self.bytes * number // places for number in range(places)):
            number = min(bisect_right(self.starts, place), len(self.sources)) - 1
            begin = self.starts[number] + self._snap(self.sources[number], place - self.starts[number])
            wanted[begin] = wanted.get(begin, 0) + -(-size // places)
        begins = [*wanted, float("inf")]
        left = 0  # what one place gives too much or too little, the next ones make up for
        for begin, end in itertools.pairwise(begins):
            left += wanted[begin]
            for text in self.texts(begin, end) if left > 0 else ():
                yield text.text
                left -= len(text.text.encode())
                if left <= 0:
                    break

    def _snap(self, source: Source, offset: int) -> int:
        return READERS[kind_of(source)].snap(source, offset) if can_be_cut(source) else 0
