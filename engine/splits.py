"""Which documents, cut where, belong to which split, and to which part of the work where many machines share it."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from engine.sources import Document, Source, documents

# All up to the last offset where text can be cut so that every BPE here encodes the two sides to the ids of the whole:
# between a line's end and a next line that starts without space (o200k joins "\n" with "/"), or between two words.
CUT = re.compile(r".+(?:(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z]))", re.DOTALL)


Piece = tuple[str, str, bool]  # its split, its text, and whether it ends its document; examples are whole


class Corpus:
    """All documents of some sources, and what reading them once has found."""

    def __init__(self, sources: list[Source], val_fraction: float, advance: Callable[[int], Any]):
        """Read everything; advance is told the bytes as they are read. Raises ValueError for what is not text."""
        self.sources, self.val_fraction = sources, val_fraction
        self.examples = any(source.turns_of for source in sources)
        self.sizes: list[int] = []  # UTF-8 bytes of each source
        self.documents = drawn = 0
        content = hashlib.blake2b()
        for source in sources:
            self.sizes.append(0)
            for document in documents(source):
                hasher = hashlib.blake2b()
                before = self.sizes[-1]
                for text in document():
                    encoded = text.encode()
                    hasher.update(encoded)
                    self.sizes[-1] += len(encoded)
                    advance(len(encoded))
                self.documents += 1
                drawn += (self.sizes[-1] - before) * is_for_validation(hasher.digest(), val_fraction)
                content.update(hasher.digest())
        self.bytes = sum(self.sizes)
        least, most = val_fraction / 2, min(2 * val_fraction, (1 + val_fraction) / 2)
        # Few documents, or one larger than all others, can't be shared out whole.
        self.by_document = self.bytes > 0 and least <= drawn / self.bytes <= most
        self.content = content.hexdigest()  # tells whether two corpora have the same documents, in the same order


def is_for_validation(digest: bytes, val_fraction: float) -> bool:
    """Whether a document's lot, drawn by the hash of its text, falls on validation: on any machine the same."""
    return int.from_bytes(digest[:8], "big") / 2**64 < val_fraction


def documents_of(corpus: Corpus, part: int, parts: int) -> Iterator[tuple[int, Document]]:
    """The documents of one of so many parts, counted from 1, and the offset of each in all bytes.

    A part's are those whose first byte falls in its stretch. The parts end to end are all documents in order; one may
    be empty. A source that has none of a part is not read.
    """
    first, end = (corpus.bytes * number // parts for number in (part - 1, part))
    end += part == parts  # for documents without text, after the last byte
    source_end = 0
    for source, size in zip(corpus.sources, corpus.sizes, strict=True):
        offset, source_end = source_end, source_end + size
        if offset >= end or source_end < first:
            continue
        previous = tuple  # no document yet, so no text; the last of a source need not be measured
        for document in documents(source):
            offset += sum(len(text.encode()) for text in previous())
            if offset >= end:
                break
            if offset >= first:
                yield offset, document
            previous = document


def assigned(corpus: Corpus, part: int = 1, parts: int = 1) -> Iterator[Piece]:
    """Every piece of a part's documents, with the split, train or val, that it is for.

    Whole documents are drawn for validation where that gives about the fraction wanted; else it is the text's tail.
    Of examples it begins with a whole one, and each split has at least one if there are two.
    """
    boundary = int(corpus.bytes * (1 - corpus.val_fraction))
    for offset, document in documents_of(corpus, part, parts):
        if corpus.examples:
            text = "".join(document())
            encoded = text.encode()
            is_val = offset > 0 and offset + len(encoded) > boundary
            if corpus.by_document:
                is_val = is_for_validation(hashlib.blake2b(encoded).digest(), corpus.val_fraction)
            yield "val" if is_val else "train", text, True
            continue
        if corpus.by_document:
            hasher = hashlib.blake2b()
            for text in document():
                hasher.update(text.encode())
            split = "val" if is_for_validation(hasher.digest(), corpus.val_fraction) else "train"
            yield from ((split, text, ends) for text, ends in pieces(document))
            continue
        left = boundary - offset  # bytes for training
        for text, ends in pieces(document):
            encoded = text.encode()
            if left >= len(encoded):
                yield "train", text, ends
            else:
                cut = len(encoded[: max(0, left)].decode(errors="replace"))  # a character begun is for training
                if cut:
                    yield "train", text[:cut], False
                yield "val", text[cut:], ends
            left -= len(encoded)


def pieces(document: Document, length: int = 2**20, longest: int = 2**24) -> Iterator[tuple[str, bool]]:
    """A document's text in pieces of about ``length`` characters, and whether each is the last.

    They are cut where they encode apart to the ids of the whole, or where ``longest`` characters have no such place.
    Memory is a few pieces, whatever the document.
    """
    waiting = ""
    for text in document():
        waiting += text
        while len(waiting) > length:
            match = CUT.match(waiting)
            if not match and len(waiting) < longest:
                break
            cut = match.end() if match else longest
            yield waiting[:cut], False
            waiting = waiting[cut:]
    yield waiting, True
