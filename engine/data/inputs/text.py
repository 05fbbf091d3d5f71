"""The bytes of a file → text as it is learned: encodings, line ends, and what is not text."""

import codecs
import contextlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

from engine.core.errors import UserError
from engine.data.inputs.sources import BLOCK_BYTES, DEFAULT_ENCODING, Reader, Source, open_source

SAMPLE_BYTES = 2**16  # to detect an encoding
CONTROL_BYTES = bytes({*range(0x20)} - {*b"\b\t\n\f\r\x1b"})  # rare in text
MAX_CONTROL_FRACTION = 0.05  # of the bytes of damaged text; a file with more is binary
REPLACED_NOTE = "characters replaced by U+FFFD"
LINE_ENDS_NOTE = "lines ended by CR LF or CR, which are LF now"
NAMES_NOTE = "names of special tokens, plain characters here"
NAMES_ADVICE = ": see --parse-special, and --separator for plain text"
# Encoding → byte order marks. One of UTF-32 starts with one of UTF-16.
BYTE_ORDER_MARKS = {DEFAULT_ENCODING: b"\xef\xbb\xbf", "utf-32": rb"\xff\xfe\0\0|\0\0\xfe\xff"}
BYTE_ORDER_MARKS |= {"utf-16": rb"\xff\xfe|\xfe\xff"}
# Encodings to detect: those of the web, where Latin-1 is cp1252. More would be confused.
CANDIDATE_ENCODINGS = ["utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be"]
CANDIDATE_ENCODINGS += ["gb18030", "big5", "cp932", "euc_jp", "cp949", "cp1252", "cp1251", "koi8_r"]
# The starts of files that are left out of folders, and of others that are refused.
FOREIGN_PATTERNS = {
    "a PDF": rb"%PDF-",
    "an image": rb"\x89PNG|\xff\xd8\xff|GIF8|II\*\0|MM\0\*|RIFF....WEBP|....ftyp(hei|mif|avi)",
    "sound or video": rb"RIFF....(WAVE|AVI )|ID3[\2-\4]|OggS|fLaC|....ftyp|\x1aE\xdf\xa3",
    "a ZIP archive, as .docx and .xlsx are": rb"PK\x03\x04",
    "a tar, 7z or RAR archive: unpack it, and give its folder": rb".{257}ustar|7z\xbc\xaf|Rar!\x1a",
}
DATA_PATTERNS = {
    "compressed: its name must end in .gz": rb"\x1f\x8b",
    "compressed: its name must end in .bz2, .xz or .zst": rb"BZh[1-9]1AY|\xfd7zXZ|\x28\xb5\x2f\xfd",
    "Parquet: its name must end in .parquet": rb"PAR1\x15",
    "an Arrow file": rb"ARROW1\0\0|\xff\xff\xff\xff",
}

# Remark on a source → how often it applies. It starts with a plural noun: "files read as …".
Notes = Counter[str]


def find_kind(head: bytes, patterns: Mapping[str, bytes]) -> str | None:
    """Return the name of the pattern that matches a file's first bytes; None if none does."""
    matches = (kind for kind, start in patterns.items() if re.match(start, head, re.DOTALL))
    return next(matches, None)


def unify_line_ends(text: str) -> str:
    """Return a text whose lines end with LF, not with CR LF or CR."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def to_text(value: Any) -> Any:
    """Return a text without its byte order mark, a number or boolean as JSON, others unchanged."""
    if isinstance(value, str):
        return value.removeprefix("\ufeff")
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return json.dumps(value) if is_number else value


def clean_text(text: str, reader: Reader, notes: Notes, has_markup: bool = True) -> str:
    """Return a text as it is learned, whatever file it is from.

    Names of special tokens in it are counted, without those of markup if these become tokens.
    """
    if "\r" in text:
        notes[LINE_ENDS_NOTE] += text.count("\r")
        text = unify_line_ends(text)
    if reader.names and (names := reader.names[has_markup].findall(text)):
        is_chat = reader.examples and reader.examples.list_field
        notes[NAMES_NOTE + ("" if is_chat else NAMES_ADVICE)] += len(names)
    return text


@contextlib.contextmanager
def open_text(source: Source, reader: Reader, notes: Notes) -> Iterator[BinaryIO]:
    """Open a file to read its text as UTF-8, which may start with a byte order mark."""
    with open_source(source) as file:
        head = file.peek()
        if kind := find_kind(head, FOREIGN_PATTERNS | DATA_PATTERNS):
            advice = "" if ":" in kind else " Convert it to text."
            raise UserError(f"{source.name}: is not text but {kind}.{advice}")
        encoding = find_kind(head, BYTE_ORDER_MARKS) or reader.encoding
        if encoding == "auto":
            encoding = detect_encoding(source)
        if encoding != reader.encoding:
            notes[f"files read as {encoding}"] += 1
        if encoding != DEFAULT_ENCODING:
            file = io.BufferedReader(Transcoder(file, encoding, reader.errors, notes), BLOCK_BYTES)
        try:
            yield file
        except UnicodeError as error:
            reason = f"is not {encoding} ({getattr(error, 'reason', error)})"
            advice = "Give another --encoding, or use --errors replace"
            raise UserError(f"{source.name}: {reason}. {advice}.") from None


class Transcoder(io.RawIOBase):
    """A stream of UTF-8 from a file in another encoding."""

    def __init__(self, file: BinaryIO, encoding: str, errors: str, notes: Notes):
        self.text = io.TextIOWrapper(file, encoding, errors, newline="")
        self.counts_replaced = errors == "replace"
        self.notes = notes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, and return the number of bytes."""
        text = self.text.read(len(buffer) // 4)  # a character has up to 4 bytes
        if self.counts_replaced:
            self.notes[REPLACED_NOTE] += text.count("\ufffd")
        data = text.encode("utf-8", "surrogatepass")
        buffer[: len(data)] = data
        return len(data)


def decode_utf8(data: bytes, reader: Reader, notes: Notes, is_head: bool, offset: int = 0) -> str:
    """Decode UTF-8, at the head of a file without its byte order mark.

    Bytes that are not text are replaced and counted, or raise UserError without the location.
    """
    if is_head:
        offset += len(data) - len(data.removeprefix(codecs.BOM_UTF8))
        data = data.removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
        if 0 not in data:
            return text
        reason = f"has a NUL at byte {offset + data.index(0)}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {offset + error.start}"
    auto = "--encoding auto or " if reader.encoding == DEFAULT_ENCODING else ""
    num_controls = len(data) - len(data.translate(None, CONTROL_BYTES))
    if is_head and num_controls > MAX_CONTROL_FRACTION * len(data):
        fix = f"Use {auto}--glob to choose other files, or convert it"
        raise UserError(f"is not text but binary. {fix}.")
    if reader.errors == "strict":
        raise UserError(f"{reason}. Use {auto}--errors replace.")
    text = data.decode(errors="replace").replace("\0", "\ufffd")
    notes[REPLACED_NOTE] += text.count("\ufffd") - data.count("\ufffd".encode())
    return text


def detect_encoding(source: Source) -> str:
    """Return the encoding of a file: UTF-8 if all of it is, else a guess from a sample.

    The sample ends with the first block that is not UTF-8. If nothing fits, it is damaged UTF-8.
    """
    decoder = codecs.getincrementaldecoder(DEFAULT_ENCODING)()
    previous = b""
    with open_source(source) as file:
        for block in iter(partial(file.read, SAMPLE_BYTES), b""):
            with contextlib.suppress(UnicodeDecodeError):
                if "\0" not in decoder.decode(block):
                    previous = block
                    continue
            return guess_encoding(previous + block) or DEFAULT_ENCODING
    return DEFAULT_ENCODING


def guess_encoding(sample: bytes) -> str | None:
    """Return the likely encoding of a sample; None if nothing fits."""
    from charset_normalizer import from_bytes

    text = sample.decode(errors="replace")
    num_not_ascii = len(text) - len(text.encode("ascii", "ignore"))
    if num_not_ascii > 2 * text.count("\ufffd"):
        return DEFAULT_ENCODING  # damaged
    end = sample.rfind(b"\n") + 1
    if 0 in sample:  # a line of UTF-16 may end with half a newline
        sample = sample[: len(sample) // 2 * 2]
    elif end > SAMPLE_BYTES // 2:  # it may end inside a character
        sample = sample[:end]
    best = from_bytes(sample, cp_isolation=CANDIDATE_ENCODINGS).best()
    return best.encoding.replace("_", "-") if best else None


def normalize_encoding(name: str) -> str:
    """Return Python's name of an encoding, or "auto". Raises UserError if it is unknown."""
    try:
        "a".encode(name if name != "auto" else DEFAULT_ENCODING)
        return name if name == "auto" else codecs.lookup(name).name
    except (LookupError, UnicodeError):
        advice = "Give auto, or a name such as gb18030, utf-16 or cp1252"
        raise UserError(f"--encoding: unknown (got {name}). {advice}.") from None


def merge_notes(notes_of_units: Iterable[Notes], num_documents: int) -> dict[str, int]:
    """Add up the notes of units. Raises UserError if all rows were left out."""
    notes: Notes = sum(map(Counter, notes_of_units), Counter())
    reasons = [f"{count:,} {note}" for note, count in notes.items() if note.startswith("rows")]
    if reasons and num_documents == 0:
        reason = f"no document remains ({', '.join(reasons)})"
        raise UserError(f"--skip-bad-rows: {reason}. Check the fields.")
    return dict(sorted(notes.items()))
