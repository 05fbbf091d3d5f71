"""Which documents, cut where, belong to which split, and to which part of the work where many machines share it."""

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from engine.sources import Document, Source, documents

# All up to the last offset where text can be cut so that every BPE here encodes the two sides to the ids of the whole:
# between a line's end and a next line that starts without space (o200k joins "\n" with "/"), or between two words.
CUT = re.compile(r".+(?:(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z]))", re.DOTALL)


Piece = tuple[str, str, bool]  # its split, its text, and whether it ends its document


class Corpus:
    """All documents of some sources, and what reading them once has found."""

    def __init__(self, sources: list[Source], advance: Callable[[int], Any]):
        """Read everything; advance is told the bytes as they are read. Raises ValueError for what is not text."""
        self.sources = sources
        self.sizes: list[int] = []  # UTF-8 bytes of each source
        self.documents = 0
        self.smallest_digest = b"\xff" * hashlib.blake2b().digest_size
        content = hashlib.blake2b()
        for source in sources:
            self.sizes.append(0)
            for document in documents(source):
                hasher = hashlib.blake2b()
                for text in document():
                    encoded = text.encode()
                    hasher.update(encoded)
                    self.sizes[-1] += len(encoded)
                    advance(len(encoded))
                self.documents += 1
                self.smallest_digest = min(self.smallest_digest, hasher.digest())
                content.update(hasher.digest())
        self.bytes = sum(self.sizes)
        self.content = content.hexdigest()  # tells whether two corpora have the same documents, in the same order


def documents_of(corpus: Corpus, part: int, parts: int) -> Iterator[Document]:
    """The documents of one of so many parts, counted from 1: those whose first byte falls in its stretch of all bytes.

    The parts end to end are all documents in order; one may be empty. A source that has none of a part is not read.
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
                yield document
            previous = document


def assigned(corpus: Corpus, val_fraction: float, part: int = 1, parts: int = 1) -> Iterator[Piece]:
    """Every piece of a part's documents, with the split, train or val, that it is for.

    A corpus of one document gives its tail to validation. Of many, each goes whole where its lot falls, drawn by the
    hash of its text: the same in any order, on any machine. The smallest is always for validation, so that few
    documents too leave something to validate on.
    """
    chosen = documents_of(corpus, part, parts)
    if corpus.documents > 1:
        for document in chosen:
            hasher = hashlib.blake2b()
            for text in document():
                hasher.update(text.encode())
            lot = int.from_bytes(hasher.digest()[:8], "big") / 2**64
            split = "val" if lot < val_fraction or hasher.digest() == corpus.smallest_digest else "train"
            yield from ((split, text, ends) for text, ends in pieces(document))
        return
    left = int(corpus.bytes * (1 - val_fraction))  # bytes for training
    for document in chosen:
        for text, ends in pieces(document):
            encoded = text.encode()
            cut = len(encoded[: max(0, left)].decode(errors="replace"))  # a character begun is for training
            left -= len(encoded)
            if cut:
                yield "train", text[:cut], False
            if cut < len(text) or ends:
                yield "val", text[cut:], ends


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
