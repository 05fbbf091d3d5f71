"""The bytes of a file → text: encodings, byte order marks, and files that are not text."""

import codecs
import contextlib
import io
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

from engine.core.errors import UserError
from engine.data.inputs.sources import BLOCK_BYTES, DEFAULT_ENCODING, Reader, Source, open_source

SAMPLE_BYTES = 2**16  # to detect an encoding
CONTROL_BYTES = bytes({*range(0x20)} - {*b"\b\t\n\f\r\x1b"})  # rare in text
MAX_CONTROL_FRACTION = 0.05  # of the bytes of damaged text; a file with more is binary
REPLACED_NOTE = "characters replaced by U+FFFD"
# Encodings to detect: those of the web, where Latin-1 is cp1252. More would be confused.
CANDIDATE_ENCODINGS = ["utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_32_le", "utf_32_be"]
CANDIDATE_ENCODINGS += ["gb18030", "big5", "cp932", "euc_jp", "cp949", "cp1252", "cp1251", "koi8_r"]
BINARY_SIGNATURES = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a ZIP archive, as .docx and .xlsx are",
    **dict.fromkeys((b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"II*\0", b"MM\0*"), "an image"),
    b"\x1f\x8b": "compressed: its name must end in .gz",
    b"BZh91AY&SY": "compressed: its name must end in .bz2",
    b"PAR1\x15": "Parquet: its name must end in .parquet",
    b"ARROW1\0\0": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream",
}

# Remark on a source → how often it applies. It starts with a plural noun: "files read as …".
Notes = Counter[str]


@contextlib.contextmanager
def open_text(source: Source, reader: Reader, notes: Notes) -> Iterator[BinaryIO]:
    """Open a file to read its text as UTF-8, which may start with a byte order mark."""
    encoding = reader.encoding
    if encoding == "auto":
        encoding = detect_encoding(source)
        notes[f"files read as {encoding}"] += 1
    with open_source(source) as file:
        head = file.peek()
        kinds = [kind for start, kind in BINARY_SIGNATURES.items() if head.startswith(start)]
        if kinds:
            advice = f"Convert it to text{source.glob_advice}"
            raise UserError(f"{source.name}: is not text but {kinds[0]}. {advice}.")
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


def decode_utf8(
    data: bytes, source: Source, reader: Reader, notes: Notes, is_head: bool, offset: int = 0
) -> str:
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
    num_controls = len(data) - len(data.translate(None, CONTROL_BYTES))
    if is_head and num_controls > MAX_CONTROL_FRACTION * len(data):
        is_utf8 = reader.encoding == DEFAULT_ENCODING  # otherwise, it was converted
        encoding = guess_encoding(data[:SAMPLE_BYTES]) if is_utf8 else None
        if encoding is None or not encoding.startswith(("utf-16", "utf-32")):
            raise UserError(f"is not text but binary. Convert it to text{source.glob_advice}.")
        raise UserError(f"{reason}, but likely {encoding}. Use --encoding {encoding}.")
    if reader.errors == "strict":
        advice = "Convert it, or use --errors replace"
        if reader.encoding == DEFAULT_ENCODING and not reader.skip_bad_rows:
            encoding = detect_encoding(source)
            likely = f"{encoding}, which is likely" if encoding != DEFAULT_ENCODING else "NAME"
            advice += f" or --encoding {likely}"
        raise UserError(f"{reason}. {advice}.")
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
            try:
                is_text = "\0" not in decoder.decode(block)
            except UnicodeDecodeError:
                is_text = False
            if not is_text:
                return guess_encoding(previous + block) or DEFAULT_ENCODING
            previous = block
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
    if end > SAMPLE_BYTES // 2 and 0 not in sample:  # it may end inside a character
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
