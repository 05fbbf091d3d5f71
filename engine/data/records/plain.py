"""Plain text → records: files, pieces of large ones, documents between separators, notebooks."""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from engine.core.errors import UserError
from engine.data.records.text import Reader, Record, Transcoder, clean_text, decode_utf8, open_text
from engine.data.sources import source as sources
from engine.data.sources.notes import LEFT_OUT_NOTE, Notes
from engine.data.sources.source import Source

LARGE_TEXT_BYTES = 2**18  # a larger text is read in pieces
PIECE_BYTES = 2**16
# Cuts that change the ids of no BPE: before a line without indentation (but o200k joins "\n" and
# "/"), between words, and before Chinese or Japanese punctuation.
CUT_PATTERN = re.compile(
    r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])"
    r"|(?<=[\u3041-\u3096\u4e00-\u9fff])(?=[。、，！？])"
)
CUT_MARGIN = 8  # characters, at least as many as CUT_PATTERN looks at, and bytes of a character


def is_one_document(source: Source, reader: Reader) -> bool:
    """Return whether all of a source is one document: plain text without a separator."""
    return source.kind == "text" and not reader.separator


def read_plain(source: Source, reader: Reader, notes: Notes) -> Iterator[Record]:
    """Yield the text of a file, or the pieces of a large one.

    A large one is read twice if it is compressed or converted, as its size must be known. A small
    file in a folder that is not text is left out.
    """

    def decode(data: bytes, offset: int = 0) -> str:
        try:
            text = decode_utf8(data, reader, notes, offset == 0, offset)
        except UserError as error:
            raise UserError(f"{source.name}: {error}") from None
        return _join_cells(text, source) if is_notebook else clean_text(text, notes)

    is_notebook = source.suffix == ".ipynb"
    with open_text(source, reader, notes) as file:
        head = file.read(-1 if is_notebook else LARGE_TEXT_BYTES + 1)
        if len(head) > LARGE_TEXT_BYTES and not is_notebook:
            size = source.size
            if source.compression or isinstance(file.raw, Transcoder) or not size:
                with open_text(source, reader, Notes()) as copy:
                    size = sum(map(len, iter(partial(copy.read, sources.BLOCK_BYTES), b"")))
            for offset, data in split_text(file, size, source.name, head):
                yield Record(source.name, decode(data, offset), offset, size, len(data))
            return
    try:
        yield Record(source.name, decode(head))
    except UserError:
        if not source.folder or reader.errors == "replace":
            raise
        notes.add(LEFT_OUT_NOTE, 1, source.title)


def _join_cells(text: str, source: Source) -> str:
    """Return the texts of a notebook's cells. Raises UserError for a file that is no notebook."""
    try:
        cells = [cell["source"] for cell in json.loads(text)["cells"]]
        return "\n\n".join("".join(cell) for cell in cells) + "\n"
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{source.name}: is not a notebook. Rename it if it is text.") from None


def read_separated(source: Source, reader: Reader, notes: Notes) -> Iterator[Record]:
    """Yield the nonempty documents between separators, without line ends around them."""
    with open_text(source, reader, notes) as file:
        for number, data in enumerate(_split_at(file, reader.separator), 1):
            location = f"{source.name}, document {number}"
            try:
                text = decode_utf8(data, reader, notes, number == 1)
            except UserError as error:
                raise UserError(f"{location}: {error}") from None
            if text := clean_text(text, notes).strip("\n"):
                yield Record(location, {reader.field: text})
    if number == 1:
        notes.add(f"files without the separator {reader.separator!r}")


def _split_at(file: BinaryIO, separator: str) -> Iterator[bytes]:
    """Yield the bytes between separators, in which LF is any line end."""
    line_end = b"(?:\r\n|\r(?!\n)|\n)"
    pattern = re.compile(re.escape(separator.encode()).replace(b"\\\n", line_end))
    buffer = b""
    while block := file.read(max(sources.BLOCK_BYTES, len(buffer))):  # no byte is often searched
        *documents, buffer = pattern.split(buffer + block)
        yield from documents
    yield buffer


def split_text(
    file: BinaryIO, size: int, name: str = "", head: bytes = b""
) -> Iterator[tuple[int, bytes]]:
    """Cut a text of ``size`` bytes of UTF-8, a head and a file, into pieces: (offset, bytes).

    Each has PIECE_BYTES, and more up to the first match of CUT_PATTERN, if it is in the next
    PIECE_BYTES, else up to the end of a character.
    """
    start = 0
    buffer = head or file.read(2 * PIECE_BYTES)
    while buffer:
        num_bytes = _find_cut(buffer) if len(buffer) > PIECE_BYTES else len(buffer)
        yield start, buffer[:num_bytes]
        start += num_bytes
        buffer = buffer[num_bytes:]
        buffer += file.read(max(0, 2 * PIECE_BYTES - len(buffer)))
    if start < size:
        raise UserError(f"{name}: became shorter while it was read. Prepare it again.")


def _find_cut(data: bytes) -> int:
    """Return the number of bytes before the first cut after PIECE_BYTES."""
    text = data[PIECE_BYTES - CUT_MARGIN :].decode(errors="surrogateescape")
    match = CUT_PATTERN.search(text, CUT_MARGIN, len(text) - CUT_MARGIN)
    position = match.start() if match else CUT_MARGIN
    position += text[position - 1 : position + 1] == "\r\n"
    return PIECE_BYTES - CUT_MARGIN + len(text[:position].encode(errors="surrogateescape"))
