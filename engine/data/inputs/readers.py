"""Sources → documents: one reader for each kind of file."""

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, NamedTuple

from engine.core.errors import UserError, wrap_library_errors
from engine.data.chats.chat_template import map_texts
from engine.data.inputs.columns import Records, read_parquet, read_rows
from engine.data.inputs.fields import describe_field, find_field
from engine.data.inputs.records import read_csv, read_json_records, read_separated
from engine.data.inputs.sources import DEFAULT_READER, Reader, Source
from engine.data.inputs.text import (
    REPLACED_NOTE,
    Notes,
    Transcoder,
    clean_text,
    decode_utf8,
    open_text,
    to_text,
)

FIELD_FLAGS = "--field (pairs: --prompt-field, chats: --chat)"
LARGE_DOCUMENT_BYTES = 2**18  # a larger document is read in pieces
PIECE_BYTES = 2**16
ANSWER_ROLES = ("assistant", "completion")  # of the turns of examples
# Cuts that change the ids of no BPE: before a line without indentation (but o200k joins "\n" and
# "/"), between words, and before Chinese or Japanese punctuation.
CUT_PATTERN = re.compile(
    r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])"
    r"|(?<=[\u3041-\u3096\u4e00-\u9fff])(?=[。、，！？])"
)
CUT_MARGIN_BYTES = 8  # on both sides of a cut, at least as many as CUT_PATTERN looks at
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: not at the start of a character


class Text(NamedTuple):
    """A document, a piece of a large document, or the turns of an example as JSON."""

    text: str
    offset: int = 0  # of the piece's first byte in the document
    document_bytes: int | None = None  # in UTF-8; None if this is the complete document
    ends_document: bool = True  # whether the document ends with this piece
    piece_bytes: int | None = None  # in the file; None: the UTF-8 bytes of text
    prompt: str = ""  # of an example: its turns before the first answer, without white space
    source: str = ""  # the title of its source


def read(
    source: Source,
    index: int = 0,
    count: int = 1,
    notes: Notes | None = None,
    reader: Reader = DEFAULT_READER,
) -> Iterator[Text]:
    """Yield the texts of a source, or of part ``index`` of ``count`` (see count_parts).

    ``notes`` counts remarks on the source for the user. Raises UserError naming the file and the
    unusable byte, line or row.
    """
    notes = Counter() if notes is None else notes
    if is_one_document(source, reader):
        yield from _read_plain(source, reader, notes)
        return
    records = read_records(source, reader, index, count, notes)
    for number, (location, record) in enumerate(records):
        try:
            text = _make_text(record, reader, notes)
        except UserError as error:
            if reader.skip_bad_rows:
                reason = re.sub(r" \(.*|\. .*|\.$", "", str(error))  # without details of this row
                reason = re.sub(r"(?<![\w-])[0-9]+", "N", reason)
                notes[f"rows left out: {reason}"] += 1
                continue
            # If the fields of the first record do not fit, those of the others will not either.
            is_bad_row = number > 0 or isinstance(record, UserError)
            message = f"{location}: {str(error).removesuffix('.')}."
            if source.kind in (".csv", ".tsv"):
                message = message.replace(" Choose", " If line 1 is not a header, add one. Choose")
            if is_bad_row and "--" not in message:
                message += " --skip-bad-rows leaves such rows out."
            raise UserError(message) from None
        data = text.text.encode()
        if reader.examples or len(data) <= LARGE_DOCUMENT_BYTES:
            yield text
        else:
            yield from split_document(io.BytesIO(data), len(data))


def read_records(source: Source, reader: Reader, index: int, count: int, notes: Notes) -> Records:
    """Read a part of a source with the function for its kind."""
    if source.kind == ".parquet":
        return read_parquet(source, reader, index, count)
    if source.kind == "rows":
        return read_rows(source, reader, index, count)
    if source.kind in (".csv", ".tsv"):
        return read_csv(source, reader, notes)
    if source.kind == "text" and reader.separator:
        return read_separated(source, reader, notes)
    return read_json_records(source, reader, notes)


def is_one_document(source: Source, reader: Reader) -> bool:
    """Return whether all of a source is one document: plain text without a separator."""
    return source.kind == "text" and not reader.separator


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


def _distance_to_cut(buffer: bytes, nominal: int) -> int:
    """Return the number of bytes from ``nominal`` to the start of the next piece."""
    window = buffer[nominal - CUT_MARGIN_BYTES : nominal + PIECE_BYTES + CUT_MARGIN_BYTES]
    text = window.decode(errors="surrogateescape")
    for match in CUT_PATTERN.finditer(text):
        num_before = len(text[: match.start()].encode(errors="surrogateescape"))
        if CUT_MARGIN_BYTES <= num_before < CUT_MARGIN_BYTES + PIECE_BYTES:
            return num_before - CUT_MARGIN_BYTES
    if buffer[nominal - 1 : nominal + 1] == b"\r\n":
        return 1
    character = buffer[nominal : nominal + 3]
    return len(character) - len(character.lstrip(CONTINUATION_BYTES))


def _read_plain(source: Source, reader: Reader, notes: Notes) -> Iterator[Text]:
    """Yield a document, or the pieces of a large one."""
    head_notes: Notes = Counter()
    with open_text(source, reader, head_notes) as file:
        head = file.read(LARGE_DOCUMENT_BYTES + 1)
        is_converted = isinstance(getattr(file, "raw", None), Transcoder)

    def decode_piece(data: bytes, offset: int) -> str:
        """Decode a piece at an offset of the document."""
        try:
            text = decode_utf8(data, reader, notes, offset == 0, offset)
            return clean_text(text, reader, notes)
        except UserError as error:
            raise UserError(f"{source.name}: {error}") from None

    if len(head) <= LARGE_DOCUMENT_BYTES:
        notes.update(head_notes)
        yield Text(decode_piece(head, 0))
        return
    size = source.size
    if is_converted or source.compression or not size:
        with open_text(source, reader, Counter()) as file:
            size = sum(map(len, iter(partial(file.read, PIECE_BYTES), b"")))
    with open_text(source, reader, notes) as file:
        yield from split_document(file, size, source.name, decode_piece)


def _make_text(record: dict[str, Any] | UserError, reader: Reader, notes: Notes) -> Text:
    """Return the text in a record's field, or an example's turns as JSON."""
    if isinstance(record, UserError):
        raise record
    if reader.examples:
        with wrap_library_errors("is nested too deeply", RecursionError):
            parsed_turns, remarks = reader.examples.parse(record)
            notes.update(remarks)
            turns = []
            for role, *rest in parsed_turns:  # markup stays plain in questions
                has_markup = role in ("prompt", *ANSWER_ROLES)
                clean = partial(clean_text, reader=reader, notes=notes, has_markup=has_markup)
                turns.append([role, *map_texts(rest, clean)])
        answers = (index for index, turn in enumerate(turns) if turn[0] in ANSWER_ROLES)
        before = turns[: next(answers, 0)] or turns
        prompt = json.dumps(map_texts(before, lambda text: "".join(text.split())))
        content = json.dumps(turns, ensure_ascii=False)
        return Text(_replace_surrogates(content, reader, notes), prompt=prompt)
    owner, name = find_field(record, reader.field)
    text = to_text(owner.get(name))
    if isinstance(text, str):
        if not text.strip():
            notes["documents without text"] += 1
        return Text(_replace_surrogates(clean_text(text, reader, notes), reader, notes))
    raise UserError(f"field {describe_field(record, reader.field, FIELD_FLAGS)}")


def _replace_surrogates(text: str, reader: Reader, notes: Notes) -> str:
    """Replace or refuse halves of surrogate pairs, which JSON can spell."""
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return text
    if reader.errors == "strict":
        reason = "has half of a surrogate pair, as in \\ud83d"
        raise UserError(f"{reason}. Repair it, or use --errors replace.")
    replaced, count = re.subn("[\ud800-\udfff]", "\ufffd", text)
    notes[REPLACED_NOTE] += count
    return replaced
