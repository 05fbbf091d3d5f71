"""The kinds of sources, each with its reader; plain text; which files of a folder are read."""

import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path, PurePath
from typing import BinaryIO

from engine.core.errors import UserError
from engine.data.records.tables import read_csv, read_json, read_table
from engine.data.records.text import Reader, Record, clean_text, decode_utf8, open_text
from engine.data.sources import source as sources
from engine.data.sources.notes import LEFT_OUT_NOTE, Notes
from engine.data.sources.source import Source

SNIFFED_BYTES = 2**14  # of a file in a folder, to see whether it is text
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: not at the start of a character
LARGE_TEXT_BYTES = 2**18  # a larger text is read in pieces
PIECE_BYTES = 2**16
# Cuts that change the ids of no BPE: before a line without indentation (but o200k joins "\n" and
# "/"), between words, and before Chinese or Japanese punctuation.
CUT_PATTERN = re.compile(
    r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])"
    r"|(?<=[\u3041-\u3096\u4e00-\u9fff])(?=[。、，！？])"
)
CUT_MARGIN = 8  # characters, at least as many as CUT_PATTERN looks at, and bytes of a character


def read_records(
    source: Source, reader: Reader, notes: Notes, index: int = 0, count: int = 1
) -> Iterator[Record]:
    """Yield the records of a source, or of part ``index`` of ``count``: see tables.count_parts.

    Raises UserError naming the file and the unusable byte, line or row.
    """
    if source.kind in (".parquet", "rows"):
        return read_table(source, reader, notes, index, count)
    if source.kind in (".csv", ".tsv"):
        return read_csv(source, reader, notes)
    if source.kind == "text":
        return (read_separated if reader.separator else read_plain)(source, reader, notes)
    return read_json(source, reader, notes)


class NotTextError(UserError):
    """A file that was read is not text. Unlike a failure to read it, it may be left out."""


def is_one_document(source: Source, reader: Reader) -> bool:
    """Return whether all of a source is one document: plain text without a separator."""
    return source.kind == "text" and not reader.separator


def read_plain(source: Source, reader: Reader, notes: Notes) -> Iterator[Record]:
    """Yield the text of a file, or the pieces of a large one.

    A file in a folder that is not text is left out. A large one is read twice there, and where the
    size of its text is unknown.
    """
    with open_text(source, reader, notes) as file:
        is_notebook = source.suffixes[0] == ".ipynb"
        head = file.read(-1 if is_notebook else LARGE_TEXT_BYTES + 1)
        is_small = is_notebook or len(head) <= LARGE_TEXT_BYTES
    try:
        text = _decode(head, source, reader, notes) if is_small else ""
        size = 0 if is_small else _measure_text(source, reader)
    except NotTextError:
        if not source.folder:
            raise
        notes.add(LEFT_OUT_NOTE, 1, source.title)
        return
    if is_small:
        yield Record(source.name, text)
        return
    with open_text(source, reader, Notes()) as file:
        for offset, data in split_text(file, size, source.name):
            text = _decode(data, source, reader, notes, offset)
            yield Record(source.name, text, offset, size, len(data))


def _decode(data: bytes, source: Source, reader: Reader, notes: Notes, offset: int = 0) -> str:
    """Return the text of a file, or of a piece of it, as it is learned."""
    try:
        text = decode_utf8(data, reader, notes, offset == 0, offset)
    except UserError as error:
        raise NotTextError(f"{source.name}: {error}") from None
    return _join_cells(text, source) if source.suffixes[0] == ".ipynb" else clean_text(text, notes)


def _join_cells(text: str, source: Source) -> str:
    """Return the texts of a notebook's cells. Raises UserError for a file that is no notebook."""
    try:
        cells = [cell["source"] for cell in json.loads(text)["cells"]]
        return "\n\n".join("".join(cell) for cell in cells) + "\n"
    except (ValueError, TypeError, KeyError, RecursionError):
        raise NotTextError(f"{source.name}: is not a notebook. Rename it if it is text.") from None


def _measure_text(source: Source, reader: Reader) -> int:
    """Return the size in UTF-8 of a large text. Raises UserError if it is none, in a folder."""
    with open_text(source, reader, Notes()) as file:
        is_converted = isinstance(file.raw, io.BytesIO)
        if source.size and not (source.folder or source.compression or is_converted):
            return source.size
        size = 0
        for offset, data in split_text(file):
            if source.folder:
                _decode(data, source, reader, Notes(), offset)
            size = offset + len(data)
    return size


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


def split_text(file: BinaryIO, size: int = 0, name: str = "") -> Iterator[tuple[int, bytes]]:
    """Cut a text of UTF-8, of at least ``size`` bytes, into pieces: (offset, bytes).

    Each has PIECE_BYTES, and more up to the first match of CUT_PATTERN, if it is in the next
    PIECE_BYTES, else up to the end of a character.
    """
    start = 0
    buffer = file.read(2 * PIECE_BYTES)
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


def choose_sources(
    sources: Sequence[Source], reader: Reader, notes: Notes, has_globs: bool = False
) -> list[Source]:
    """Leave out of each folder what is not text, and of records and plain text what is less.

    With globs, both are taken. Raises UserError if nothing remains.
    """
    chosen: list[Source] = []
    for folder, group in itertools.groupby(sources, key=attrgetter("folder")):
        files = [*group]
        if folder:
            problems = [_find_problem(source, reader) for source in files]
            if all(problems):
                raise next(filter(None, problems))
            left_out = [*itertools.compress(files, problems)]
            notes.add(LEFT_OUT_NOTE, len(left_out), *(source.title for source in left_out[:9]))
            files = [source for source, problem in zip(files, problems, strict=True) if not problem]
            files = files if has_globs else _choose_kind(files, reader, notes)
            endings = Counter(source.suffixes[0] or "without ending" for source in files)
            listing = ", ".join(f"{count:,} {name}" for name, count in endings.most_common())
            notes.add(f"files read in {PurePath(folder).name}: {listing}", len(files))
        chosen += files
    return chosen


def _find_problem(source: Source, reader: Reader) -> UserError | None:
    """Return why a local file does not start with text in the reader's encoding, if so."""
    if source.kind == ".parquet" or not isinstance(source.path, Path):
        return None
    try:
        with open_text(source, reader, Notes()) as file:
            head = file.read(SNIFFED_BYTES)
        if len(head) == SNIFFED_BYTES:  # it may end inside a character
            head = head.rstrip(CONTINUATION_BYTES)[:-1]
        decode_utf8(head, reader, Notes(), is_head=True)
    except UserError as error:
        if "git lfs" in str(error):  # the texts themselves may be missing
            raise
        return UserError(f"{source.name}: {str(error).removeprefix(f'{source.name}: ')}")
    return None


def _choose_kind(files: list[Source], reader: Reader, notes: Notes) -> list[Source]:
    """Return plain text or records: what the reader's flags need, else what has more bytes."""
    text = [source for source in files if source.kind == "text"]
    records = [source for source in files if source.kind != "text"]
    if not text or not records:
        return files
    has_flags = reader.examples is not None or reader.field != "text"
    num_bytes = [sum(source.size for source in group) for group in (text, records)]
    takes_text = bool(reader.separator) or (num_bytes[0] >= num_bytes[1] and not has_flags)
    chosen, left_out = (text, records) if takes_text else (records, text)
    globs = " ".join(
        f"--glob '*{suffix}'" for suffix in sorted({each.suffixes[0] for each in left_out})
    )
    kind = "records beside plain text" if takes_text else "plain text beside records"
    note = f"files left out, {kind} ({globs} takes them)"
    notes.add(note, len(left_out), *(source.title for source in left_out))
    return chosen
