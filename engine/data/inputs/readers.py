"""Sources → texts: an iterator of documents for every kind of file."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from engine.core.errors import UserError
from engine.data.inputs import sources
from engine.data.inputs.sources import Source, kind_of, open_source, wrap_errors

LARGE_DOCUMENT_BYTES = 2**18  # a document of more is read in pieces
PIECE_BYTES = 2**16
BUFFER_BYTES = 2**20  # of a Parquet file, read at a time
NUM_BATCH_ROWS = 64  # of records, decoded at a time
MAX_CSV_FIELD_BYTES = 2**27
MAX_INT_DIGITS = 4000  # Python's int() refuses more than 4,300
# A cut here does not change the ids of any BPE: at the start of a line without indentation (o200k
# joins "\n" with "/"), between words, before Chinese or Japanese punctuation.
CUT_PATTERN = re.compile(
    r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])"
    r"|(?<=[\u3041-\u3096\u4e00-\u9fff])(?=[。、，！？])"
)
CUT_MARGIN_BYTES = 8  # before and after a cut, at least as many as CUT_PATTERN looks at
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # in UTF-8, all but the first of a character

Records = Iterator[tuple[str, dict[str, Any]]]  # location, such as "a.csv, line 3", and record


class Text(NamedTuple):
    """A document, or a piece of a large one; or an example, its turns as JSON."""

    text: str
    offset: int = 0  # of the piece's first byte in the document
    size: int | None = None  # UTF-8 bytes of the document; None if this is the complete document
    ends: bool = True  # whether the document ends with this piece
    length: int | None = None  # bytes of the piece in the document; None: those of text


def read(
    source: Source, index: int = 0, count: int = 1, notes: Counter[str] | None = None
) -> Iterator[Text]:
    """Yield the texts of a source, or of part ``index`` of ``count`` (see count_parts).

    ``notes`` counts what a user should know of the source. Raises UserError naming the file and
    the unusable byte, line or row.
    """
    if not kind_of(source):
        yield from _read_plain(source)
        return
    for location, record in RECORD_READERS[kind_of(source)](source, index, count):
        text = _text_of(record, source, location)
        if notes is not None and source.notes_of:
            notes.update(source.notes_of(record))
        data = text.encode()
        if source.turns_of or len(data) <= LARGE_DOCUMENT_BYTES:
            yield Text(text)
        else:
            yield from split_document(io.BytesIO(data), len(data))


def count_documents(source: Source) -> int | None:
    """Return the number of documents of a source; None if it must be read to count them."""
    if kind_of(source) == ".parquet":
        with _open_parquet(source) as file:
            return file.metadata.num_rows
    return None if kind_of(source) else 1


def count_parts(source: Source, part_bytes: int) -> int:
    """Return the number of parts, of about ``part_bytes``, that can be read independently."""
    kind = kind_of(source) if source.size > part_bytes else ""
    if kind == ".parquet":
        with _open_parquet(source) as file:
            return max(1, file.num_row_groups)
    if kind == "rows":
        rows = sources.load_rows(source)
        return rows.num_shards if sources.is_streamed(rows) else -(-source.size // part_bytes)
    return 1


def split_document(
    file: BinaryIO, size: int, name: str = "", errors: str = "strict"
) -> Iterator[Text]:
    """Cut a document of ``size`` bytes of UTF-8 into pieces of about PIECE_BYTES.

    Piece k starts at the first match of CUT_PATTERN from byte k * PIECE_BYTES on, or without a
    match before byte (k + 1) * PIECE_BYTES at the first character from there on.
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
        text = _decode(piece, name, errors, start)
        yield Text(text, start, size, end == size, len(piece))
        start = end
        buffer = buffer[max(0, end - CUT_MARGIN_BYTES - buffer_start) :]
        buffer_start = buffer_end - len(buffer)


def _distance_to_cut(buffer: bytes, nominal: int) -> int:
    """Return how many bytes after ``nominal`` a piece starts."""
    window = buffer[nominal - CUT_MARGIN_BYTES : nominal + PIECE_BYTES + CUT_MARGIN_BYTES]
    text = window.decode(errors="surrogateescape")
    for match in CUT_PATTERN.finditer(text):
        num_before = len(text[: match.start()].encode(errors="surrogateescape"))
        if CUT_MARGIN_BYTES <= num_before < CUT_MARGIN_BYTES + PIECE_BYTES:
            return num_before - CUT_MARGIN_BYTES
    character = buffer[nominal : nominal + 3]
    return len(character) - len(character.lstrip(CONTINUATION_BYTES))


def _decode(data: bytes, location: str, errors: str, offset: int = 0) -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {offset + error.start}"
        raise UserError(f"{location}: {reason}. Convert it, or use --errors replace.") from None


def _read_plain(source: Source) -> Iterator[Text]:
    with open_source(source) as file:
        head = file.read(LARGE_DOCUMENT_BYTES + 1)
    if len(head) <= LARGE_DOCUMENT_BYTES:
        yield Text(_decode(head, source.name, source.errors))
        return
    size = source.size
    if source.compression or not size:
        with open_source(source) as file:
            size = sum(len(block) for block in iter(lambda: file.read(PIECE_BYTES), b""))
    with open_source(source) as file:
        yield from split_document(file, size, source.name, source.errors)


def _read_lines(source: Source) -> Iterator[str]:
    """Yield the lines of a file, each with its end, but without a byte order mark."""
    with open_source(source) as file:
        for number, line in enumerate(file, 1):
            text = _decode(line, f"{source.name}, line {number}", source.errors)
            yield text.removeprefix("\ufeff") if number == 1 else text


def parse_int(digits: str) -> int | float:
    """Return the value of an integer in JSON, a float if it has too many digits for an int."""
    return int(digits) if len(digits) <= MAX_INT_DIGITS else float(digits)


def _read_json_lines(source: Source, *_: int) -> Records:
    """Yield the record of each line that is not blank."""
    for number, line in enumerate(_read_lines(source), 1):
        if not line.strip():
            continue
        location = f"{source.name}, line {number}"
        try:
            record = json.loads(line, parse_int=parse_int)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{location}: is not JSON ({error}).") from None
        if not isinstance(record, dict):
            raise UserError(f"{location}: must be a JSON object with fields and values.")
        yield location, record


def _read_csv(source: Source, *_: int) -> Records:
    """Yield a record for each row below the first, which names the columns."""
    csv.field_size_limit(MAX_CSV_FIELD_BYTES)
    rows = csv.reader(_read_lines(source), strict=True)
    try:
        names = next(rows, [])
        for row in filter(None, rows):
            location = f"{source.name}, line {rows.line_num}"
            if len(row) != len(names):
                raise UserError(f"{location}: must have {len(names)} values (got {len(row)}).")
            yield location, dict(zip(names, row, strict=True))
    except csv.Error as error:
        location = f"{source.name}, line {rows.line_num}"
        raise UserError(f"{location}: is not CSV ({error}). Check its quotes.") from None


def _open_parquet(source: Source) -> Any:
    parquet = sources.import_optional("pyarrow.parquet", source.name)
    is_remote = isinstance(source.path, str)
    fs, path = sources.file_system(source.path)
    buffer_size = 0 if is_remote else BUFFER_BYTES
    with wrap_errors(source.name):  # pre_buffer makes few large requests
        return parquet.ParquetFile(
            path, filesystem=fs, buffer_size=buffer_size, pre_buffer=is_remote
        )


def _read_parquet(source: Source, index: int, count: int) -> Records:
    """Yield the records of some row groups."""
    with wrap_errors(source.name), _open_parquet(source) as file:
        first = file.num_row_groups * index // count
        end = file.num_row_groups * (index + 1) // count
        row = sum(file.metadata.row_group(group).num_rows for group in range(first))
        columns = _columns_to_read(source, file.schema_arrow.names)
        groups = [*range(first, end)]
        for batch in file.iter_batches(NUM_BATCH_ROWS, groups, columns, use_threads=False):
            for record in batch.to_pylist():
                row += 1
                yield f"{source.name}, row {row}", record


def _read_rows(source: Source, index: int, count: int) -> Records:
    """Yield the rows of one part of a dataset, which is a file if the dataset is streamed."""
    rows = sources.load_rows(source)
    with wrap_errors(source.name):
        columns = _columns_to_read(source, rows.column_names or [])
        if columns:
            rows = rows.select_columns(columns)
        name = source.name
        row = 0
        if sources.is_streamed(rows):
            rows = rows.shard(count, index)
            if count > 1:
                name += f", file {index + 1}"
        else:
            row = len(rows) * index // count
            rows = rows.select(range(row, len(rows) * (index + 1) // count))
        for batch in rows.iter(NUM_BATCH_ROWS):
            for values in zip(*batch.values(), strict=True):
                row += 1
                yield f"{name}, row {row}", dict(zip(batch, values, strict=True))


def _columns_to_read(source: Source, names: list[str]) -> list[str] | None:
    """Return the column with the text; None for all columns: of examples, or if it is missing."""
    return [source.field] if source.field in names and not source.turns_of else None


RECORD_READERS: dict[str, Callable[[Source, int, int], Records]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    "rows": _read_rows,
}


def _text_of(record: dict[str, Any], source: Source, location: str) -> str:
    """Return the text in a record's field, or an example's turns as JSON."""
    text: Any
    if source.turns_of:
        try:
            text = json.dumps(source.turns_of(record), ensure_ascii=False)
        except UserError as error:
            raise UserError(f"{location}: {error}") from None
    else:
        text = record.get(source.field)
        if not isinstance(text, str):
            reason = f"field {source.field!r} must be text (got {str(text)[:30]!r})"
            names = ", ".join(map(repr, record))
            raise UserError(f"{location}: {reason}. Choose one of {names} with --field.")
    if text.isascii():
        return text
    # JSON may contain half of a surrogate pair.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
