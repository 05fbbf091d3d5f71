"""The bytes of a file → text as it is learned: encodings, line ends, and what is not text."""

import codecs
import contextlib
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.core.errors import UserError
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source, open_source

DEFAULT_ENCODING = "utf-8"
CONTROL_BYTES = bytes({*range(0x20)} - {*b"\b\t\n\f\r\x1b"})  # rare in text
MAX_CONTROL_FRACTION = 0.05  # of the bytes of damaged text; a file with more is binary
REPLACED_NOTE = "characters replaced by U+FFFD"
LINE_ENDS_NOTE = "lines ended by CR LF or CR, which are LF now"
# Byte order mark → encoding. One of UTF-32 starts with one of UTF-16.
BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: DEFAULT_ENCODING,
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Record(NamedTuple):
    """The fields of a row, or the text of a file: all of it, or a piece of a large one."""

    location: str  # such as "a.csv, line 3"
    value: dict[str, Any] | str | UserError  # or the reason why it cannot be read
    offset: int = 0  # of the piece's first byte in the text of the file
    text_bytes: int | None = None  # in UTF-8; None if the text is complete
    piece_bytes: int | None = None  # in the file; None if the text is complete


@dataclass(frozen=True)
class ExampleParser:
    """How records become examples: see engine.data.chats.examples."""

    # Returns turns, each of which starts with its role, and remarks for the user.
    parse: Callable[[dict[str, Any]], tuple[Sequence[Any], list[str]]]
    fields: tuple[str, ...]  # that are read
    list_field: str = ""  # the field of a record that is a list of messages; "": none


@dataclass(frozen=True)
class Reader:
    """How files become records, and these documents."""

    field: str = "text"  # the field with the text of a record; "": all fields are read
    encoding: str = DEFAULT_ENCODING  # the name of a codec, or "auto"
    errors: str = "strict"  # or "replace": bytes that are not text become U+FFFD
    separator: str = ""  # between the documents of plain text; "": a file is one document
    skip_bad_rows: bool = False  # leave out and count records that cannot be used
    examples: ExampleParser | None = None  # None: a record has a text


DEFAULT_READER = Reader()


def find_mark(head: bytes) -> str | None:
    """Return the encoding that a byte order mark at the start of a text says; None if none does."""
    for mark, encoding in BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return encoding
    return None


def unify_line_ends(text: str) -> str:
    """Return a text whose lines end with LF, not with CR LF or CR."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def to_text(value: Any) -> Any:
    """Return a number or boolean as JSON, other values unchanged."""
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return json.dumps(value) if is_number else value


def clean_text(text: str, notes: Notes) -> str:
    """Return a text as it is learned, whatever file it is from."""
    if "\r" in text:
        notes.add(LINE_ENDS_NOTE, text.count("\r"))
        text = unify_line_ends(text)
    return text.removeprefix("\ufeff")


def clean_record(value: Any, reader: Reader, notes: Notes) -> dict[str, Any] | UserError:
    """Return an object with clean texts, or why it cannot be used."""
    try:
        value = _clean_value(value, reader, notes)
    except UserError as error:
        return error
    except RecursionError:
        return UserError("is nested too deeply.")
    is_usable = isinstance(value, dict | UserError)
    return value if is_usable else UserError("must be a JSON object with fields and values.")


def _clean_value(value: Any, reader: Reader, notes: Notes) -> Any:
    """Return a value of JSON with clean texts.

    Halves of surrogate pairs, which JSON can spell, are replaced and counted, or raise UserError.
    """
    if isinstance(value, list):
        return [_clean_value(item, reader, notes) for item in value]
    if isinstance(value, dict):
        return {key: _clean_value(item, reader, notes) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    text = clean_text(value, notes)
    if text.isascii():
        return text
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return text
    if reader.errors == "strict":
        reason = "has half of a surrogate pair, as in \\ud83d"
        raise UserError(f"{reason}. Repair it, or use --errors replace.")
    text, count = re.subn("[\ud800-\udfff]", "\ufffd", text)
    notes.add(REPLACED_NOTE, count)
    return text


@contextlib.contextmanager
def open_text(source: Source, reader: Reader, notes: Notes) -> Iterator[io.BufferedReader]:
    """Open a file to read its text as UTF-8, which may start with a byte order mark.

    A file in another encoding is read and converted at once.
    """
    with open_source(source) as file:
        head = file.peek()
        if head.startswith(b"%PDF-"):  # it may be ASCII
            raise UserError(f"{source.name}: is not text but a PDF. Convert it to text.")
        encoding = find_mark(head) or reader.encoding
        if encoding == "auto":
            encoding = detect_encoding(head)
        if encoding != reader.encoding:
            notes.add(f"files read as {encoding}")
        if encoding == DEFAULT_ENCODING:
            yield file
            return
        try:
            text = file.read().decode(encoding, reader.errors)
        except (UnicodeError, LookupError) as error:
            reason = f"is not {encoding} ({getattr(error, 'reason', error)})"
            advice = "Give another --encoding, or use --errors replace"
            raise UserError(f"{source.name}: {reason}. {advice}.") from None
    if reader.errors == "replace":
        notes.add(REPLACED_NOTE, text.count("\ufffd"))
    yield io.BufferedReader(io.BytesIO(text.encode(errors="surrogatepass")))


def decode_utf8(data: bytes, reader: Reader, notes: Notes, is_head: bool, offset: int = 0) -> str:
    """Decode UTF-8 at an offset of a file.

    Bytes that are not text are replaced and counted, or raise UserError without the location.
    """
    try:
        text = data.decode()
        if "\0" not in text:
            return text
        reason = f"has a NUL at byte {offset + data.index(0)}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {offset + error.start}"
    auto = "--encoding auto or " if reader.encoding == DEFAULT_ENCODING else ""
    num_controls = len(data) - len(data.translate(None, CONTROL_BYTES))
    if is_head and num_controls > MAX_CONTROL_FRACTION * len(data):
        advice = f"Use {auto}another file, convert it, or correct its ending (as .gz, .parquet)"
        raise UserError(f"is not text but binary. {advice}.")
    if reader.errors == "strict":
        raise UserError(f"{reason}. Use {auto}--errors replace.")
    text = data.decode(errors="replace").replace("\0", "\ufffd")
    notes.add(REPLACED_NOTE, text.count("\ufffd") - data.count("\ufffd".encode()))
    return text


def detect_encoding(head: bytes) -> str:
    """Return the encoding of a file by its beginning: UTF-8, or else the answer of a library."""
    from charset_normalizer import from_bytes

    with contextlib.suppress(UnicodeDecodeError):
        codecs.getincrementaldecoder(DEFAULT_ENCODING)().decode(head)
        if 0 not in head:
            return DEFAULT_ENCODING
    if 0 not in head:  # it may end inside a character
        head = head[: head.rfind(b"\n") + 1] or head
    match = from_bytes(head).best()
    return match.encoding.replace("_", "-") if match else DEFAULT_ENCODING
