"""Sources → documents: one reader for each kind of file."""

import codecs
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from engine.core.errors import UserError
from engine.data.inputs.columns import Records, count_rows, read_parquet, read_rows
from engine.data.inputs.records import read_csv, read_json_records, read_separated
from engine.data.inputs.sources import DEFAULT_ENCODING, Source, kind_of
from engine.data.inputs.text import REPLACED_NOTE, Notes, decode_utf8, open_text

LARGE_DOCUMENT_BYTES = 2**18  # a larger document is read in pieces
PIECE_BYTES = 2**16
MAX_REASONS = 20  # to leave out rows; more reasons are counted together
# Cuts that change the ids of no BPE: before a line without indentation (but o200k joins "\n" and
# "/"), between words, and before Chinese or Japanese punctuation.
CUT_PATTERN = re.compile(
    r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])"
    r"|(?<=[\u3041-\u3096\u4e00-\u9fff])(?=[。、，！？])"
)
CUT_MARGIN_BYTES = 8  # on both sides of a cut, at least as many as CUT_PATTERN looks at
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: not at the start of a character
SPELLED_SEPARATORS = (b"<|endoftext|>", b"<|end_of_text|>", b"</s>")  # of documents in one file


class Text(NamedTuple):
    """A document, a piece of a large document, or the turns of an example as JSON."""

    text: str
    offset: int = 0  # of the piece's first byte in the document
    document_bytes: int | None = None  # in UTF-8; None if this is the complete document
    ends: bool = True  # whether the document ends with this piece
    piece_bytes: int | None = None  # in the file; None: the UTF-8 bytes of text

    @property
    def is_large(self) -> bool:
        """Whether this is a piece of a large document."""
        return (self.document_bytes or 0) > LARGE_DOCUMENT_BYTES


def read(
    source: Source, index: int = 0, count: int = 1, notes: Notes | None = None
) -> Iterator[Text]:
    """Yield the texts of a source, or of part ``index`` of ``count`` (see count_parts).

    ``notes`` counts remarks on the source for the user. Raises UserError naming the file and the
    unusable byte, line or row.
    """
    notes = Counter() if notes is None else notes
    if is_one_document(source):
        yield from _read_plain(source, notes)
        return
    for location, record in _read_records(source, index, count, notes):
        try:
            text = _text_of(record, source, notes)
        except UserError as error:
            if source.skip_bad_rows:
                _count_bad_row(error, notes)
                continue
            reason = f"{location}: {str(error).removesuffix('.')}"
            raise UserError(f"{reason}. --skip-bad-rows leaves such rows out.") from None
        data = text.encode()
        if source.turns_of or len(data) <= LARGE_DOCUMENT_BYTES:
            yield Text(text)
        else:
            yield from split_document(io.BytesIO(data), len(data))


def _read_records(source: Source, index: int, count: int, notes: Notes) -> Records:
    """Read a part of a source with the reader of its kind."""
    kind = kind_of(source)
    if kind == ".parquet":
        return read_parquet(source, index, count)
    if kind == "rows":
        return read_rows(source, index, count)
    if kind in (".csv", ".tsv"):
        return read_csv(source, notes)
    if kind == "":
        return read_separated(source, notes)
    return read_json_records(source, notes)


def _count_bad_row(error: UserError, notes: Notes) -> None:
    """Count the reason for leaving out a row, without the details of this row."""
    reason = re.sub(r" \(.*|\. .*|\.$", "", str(error))
    reason = re.sub(r"(?<![\w-])[0-9]+", "N", reason)
    note = f"rows left out: {reason}"
    if note not in notes and len(notes) >= MAX_REASONS:
        note = "rows left out for more reasons"
    notes[note] += 1


def count_documents(source: Source) -> int | None:
    """Return the number of documents of a source; None if it must be read to count them."""
    if kind_of(source) == ".parquet" and not source.skip_bad_rows:
        return count_rows(source)
    return 1 if is_one_document(source) else None


def is_one_document(source: Source) -> bool:
    """Return whether all of a source is one document: plain text without a separator."""
    return not kind_of(source) and not source.separator


def split_document(
    file: BinaryIO,
    size: int,
    name: str = "",
    decode_piece: Callable[[bytes, int], str] = lambda data, offset: data.decode(),
) -> Iterator[Text]:
    """Cut a document of ``size`` bytes of UTF-8 into pieces of about PIECE_BYTES.

    Piece k starts at the first match of CUT_PATTERN in the PIECE_BYTES bytes from k * PIECE_BYTES
    on. If there is none, it starts at the first character there.
    """
    buffer = b""
    buffer_start = 0  # offset of the buffer in the document
    start = 0  # of the piece
    nominal_end = 0
    while start < size:
        nominal_end += PIECE_BYTES
        buffer_end = min(size, nominal_end + PIECE_BYTES + CUT_MARGIN_BYTES)
        buffer += file.read(buffer_end - buffer_start - len(buffer))
        if buffer_start + len(buffer) < buffer_end:
            raise UserError(f"{name}: became shorter while it was read. Prepare it again.")
        end = size
        if nominal_end < size:
            end = nominal_end + _distance_to_cut(buffer, nominal_end - buffer_start)
        piece = buffer[start - buffer_start : end - buffer_start]
        yield Text(decode_piece(piece, start), start, size, end == size, len(piece))
        start = end
        buffer = buffer[max(0, end - CUT_MARGIN_BYTES - buffer_start) :]
        buffer_start = buffer_end - len(buffer)
    if file.read(1):
        raise UserError(f"{name}: became longer while it was read. Prepare it again.")


def _distance_to_cut(buffer: bytes, nominal: int) -> int:
    """Return the number of bytes from ``nominal`` to the start of the next piece."""
    window = buffer[nominal - CUT_MARGIN_BYTES : nominal + PIECE_BYTES + CUT_MARGIN_BYTES]
    text = window.decode(errors="surrogateescape")
    for match in CUT_PATTERN.finditer(text):
        num_before = len(text[: match.start()].encode(errors="surrogateescape"))
        if CUT_MARGIN_BYTES <= num_before < CUT_MARGIN_BYTES + PIECE_BYTES:
            return num_before - CUT_MARGIN_BYTES
    character = buffer[nominal : nominal + 3]
    return len(character) - len(character.lstrip(CONTINUATION_BYTES))


def _read_plain(source: Source, notes: Notes) -> Iterator[Text]:
    """Yield a document, or the pieces of a large one. Counts SPELLED_SEPARATORS in it."""
    head_notes: Notes = Counter()
    with open_text(source, head_notes) as file:
        head = file.read(LARGE_DOCUMENT_BYTES + len(codecs.BOM_UTF8) + 1)
    bom_bytes = len(head) - len(head.removeprefix(codecs.BOM_UTF8))

    def decode_piece(data: bytes, offset: int) -> str:
        """Decode a piece at an offset of the document."""
        for separator in SPELLED_SEPARATORS:
            if count := data.count(separator):
                notes[f"separators {separator.decode()} in plain text: see --separator"] += count
        try:
            return decode_utf8(data, source, notes, offset == 0, offset + bom_bytes)
        except UserError as error:
            raise UserError(f"{source.name}: {error}") from None

    size = source.size - bom_bytes
    is_size_unknown = source.compression or not source.size or source.encoding != DEFAULT_ENCODING
    if len(head) - bom_bytes <= LARGE_DOCUMENT_BYTES:
        if isinstance(source.path, str) and not is_size_unknown and len(head) != source.size:
            reason = f"must have {source.size:,} bytes (got {len(head):,})"
            raise UserError(f"{source.name}: {reason}. Download it, or prepare it again.")
        notes.update(head_notes)
        yield Text(decode_piece(head[bom_bytes:], 0))
        return
    if is_size_unknown:
        size = _count_bytes(source, bom_bytes, decode_piece)
    with open_text(source, notes) as file:
        file.read(bom_bytes)
        yield from split_document(file, size, source.name, decode_piece)


def _count_bytes(source: Source, start: int, decode_piece: Callable[[bytes, int], str]) -> int:
    """Count the bytes from ``start`` on. Raises UserError at bytes that are not text.

    Otherwise, an endless stream would be counted forever.
    """
    size = 0
    decoder = codecs.getincrementaldecoder(DEFAULT_ENCODING)(source.errors)
    with open_text(source, Counter()) as file:
        file.read(start)
        for block in iter(partial(file.read, PIECE_BYTES), b""):
            rest, _ = decoder.getstate()
            try:
                is_text = "\0" not in decoder.decode(block)
            except UnicodeDecodeError:
                is_text = False
            if not is_text and source.errors == "strict":
                decode_piece(rest + block, size - len(rest))  # raises UserError
            size += len(block)
    return size


def _text_of(record: dict[str, Any] | UserError, source: Source, notes: Notes) -> str:
    """Return the text in a record's field, or an example's turns as JSON.

    Raises UserError, without the location, for an unusable record.
    """
    if isinstance(record, UserError):
        raise record
    text: Any
    if source.turns_of:
        text = json.dumps(source.turns_of(record), ensure_ascii=False)
        if source.notes_of:
            notes.update(source.notes_of(record))
    else:
        text = record.get(source.field)
        if not isinstance(text, str):
            reason = f"field {source.field!r} must be text (got {str(text)[:30]!r})"
            names = ", ".join(map(repr, record))
            raise UserError(f"{reason}. Choose one of {names} with --field.")
    if text.isascii():
        return text
    data = text.encode("utf-16-le", "surrogatepass")  # JSON can spell half of a surrogate pair
    try:
        return data.decode("utf-16-le")
    except UnicodeDecodeError:
        if source.errors == "strict":
            reason = "has half of a surrogate pair, as in \\ud83d"
            raise UserError(f"{reason}. Repair it, or use --errors replace.") from None
    replaced = data.decode("utf-16-le", "replace")
    notes[REPLACED_NOTE] += replaced.count("\ufffd") - text.count("\ufffd")
    return replaced
