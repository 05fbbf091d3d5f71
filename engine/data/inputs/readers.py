"""Sources → texts: one iterator of documents, whatever kind of file they come in."""

import codecs
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from engine.core.errors import UserError
from engine.data.inputs import sources
from engine.data.inputs.sources import Source

LARGE_DOCUMENT_BYTES = 2**18  # a document that has more is read in pieces
PIECE_BYTES = 2**16
MAX_BATCH_BYTES = 2**20  # of a Parquet row group, decoded at a time
MAX_BATCH_ROWS = 2**10
MAX_CSV_FIELD_BYTES = 2**27
# Places where text can be cut so that every BPE here encodes both sides to the ids of the whole:
# between a line's end and a next line that starts without space (o200k joins "\n" with "/"),
# between two words, before a Chinese or Japanese punctuation mark.
CUT = re.compile(
    r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])"
    r"|(?<=[\u3041-\u3096\u4e00-\u9fff])(?=[。、，！？])"
)
CUT_MARGIN_BYTES = 8  # at least what CUT looks at before and after a cut
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: never the first of a character
KINDS = (".jsonl", ".ndjson", ".csv", ".parquet")  # of files; any other is one plain text
KINDS_WITH_FIELDS = "JSON lines, CSV, Parquet or a Hugging Face dataset"


class Text(NamedTuple):
    """A document, or a piece of a large one. An example is its turns as JSON."""

    text: str
    offset: int = 0  # of the piece's first byte in the document
    size: int | None = None  # UTF-8 bytes of the document; None if this is all of it
    ends: bool = True  # whether the document ends with this piece
    length: int | None = None  # bytes of the document in this piece; None: as many as in text


def kind_of(source: Source) -> str:
    """Return which reader a source needs: "rows", one of KINDS, or "" for plain text.

    The ending may be followed by that of a compression, or by a date.
    """
    if source.hub_split:
        return "rows"
    for suffix in source.suffixes:
        is_date = suffix[1:].replace("-", "").isdigit()
        if suffix == source.compression or is_date:
            continue
        if suffix == ".json" and source.compression:  # large collections name JSON lines so
            return ".jsonl"
        return suffix if suffix in KINDS else ""
    return ""


def read(source: Source, index: int = 0, count: int = 1) -> Iterator[Text]:
    """Yield the texts of a source, or of part ``index`` of ``count``: see count_parts.

    Raises UserError naming the file and the byte, line or row that cannot be used.
    """
    kind = kind_of(source)
    if kind == "rows":
        return _read_rows(source, index, count)
    if kind == ".parquet":
        return _read_parquet(source, index, count)
    if kind == ".csv":
        return _read_csv(source)
    return _read_json_lines(source) if kind else _read_plain(source)


def count_documents(source: Source) -> int | None:
    """Return how many documents a source has, or None if only reading it can tell."""
    kind = kind_of(source)
    if kind == "":
        return 1
    if kind == ".parquet":
        with _open_parquet(source) as file:
            return file.metadata.num_rows
    if kind == "rows" and not sources.is_streamed(sources.load_rows(source)):
        return len(sources.load_rows(source))
    return None


def count_parts(source: Source, part_bytes: int) -> int:
    """Return how many parts of about ``part_bytes`` can be read without the others."""
    kind = kind_of(source) if source.size > part_bytes else ""
    if kind == ".parquet":
        with _open_parquet(source) as file:
            return max(1, file.num_row_groups)
    if kind == "rows":
        rows = sources.load_rows(source)
        return rows.num_shards if sources.is_streamed(rows) else -(-source.size // part_bytes)
    return 1


def split_document(blocks: Iterable[bytes], size: int, name: str = "", errors: str = "strict") -> Iterator[Text]:
    """Cut a document of ``size`` bytes of UTF-8 into pieces of about PIECE_BYTES.

    Piece k starts at the first CUT at or after byte k * PIECE_BYTES. If there is none before
    byte (k + 1) * PIECE_BYTES, it starts at the first character.
    """
    blocks = iter(blocks)
    buffer = b""
    buffer_start = 0  # offset of the buffer in the document
    start = 0  # of the piece
    for number in itertools.count(1):
        if start >= size:
            return
        nominal = number * PIECE_BYTES
        needed_bytes = min(size, nominal + PIECE_BYTES + CUT_MARGIN_BYTES) - buffer_start
        while len(buffer) < needed_bytes:
            block = next(blocks, b"")
            if not block:
                raise UserError(f"{name}: has become shorter while it was read. Prepare it again.")
            buffer += block
        end = size
        if nominal < size:
            end = nominal + _distance_to_cut(buffer[:needed_bytes], nominal - buffer_start)
        piece = buffer[start - buffer_start : end - buffer_start]
        text = _decode(piece, name, errors, start)
        yield Text(text, start, size, end == size, len(piece))
        start = end
        num_read = max(0, end - CUT_MARGIN_BYTES - buffer_start)
        buffer = buffer[num_read:]
        buffer_start += num_read


def _distance_to_cut(buffer: bytes, nominal: int) -> int:
    """Return how many bytes after ``nominal`` a piece starts."""
    first = nominal - CUT_MARGIN_BYTES
    window = buffer[first : nominal + PIECE_BYTES + CUT_MARGIN_BYTES]
    text = window.decode(errors="surrogateescape")
    for match in CUT.finditer(text):
        before = len(text[: match.start()].encode(errors="surrogateescape"))
        if CUT_MARGIN_BYTES <= before < CUT_MARGIN_BYTES + PIECE_BYTES:
            return before - CUT_MARGIN_BYTES
    character = buffer[nominal : nominal + 3]
    return len(character) - len(character.lstrip(CONTINUATION_BYTES))


def _split_if_large(text: str, source: Source) -> Iterator[Text]:
    is_small = len(text) <= LARGE_DOCUMENT_BYTES // 4 or source.turns_of
    data = b"" if is_small else text.encode()
    if len(data) <= LARGE_DOCUMENT_BYTES:
        yield Text(text)
        return
    blocks = (data[i : i + sources.BLOCK_BYTES] for i in range(0, len(data), sources.BLOCK_BYTES))
    yield from split_document(blocks, len(data))


def _decode(data: bytes, name: str, errors: str, offset: int = 0, encoding: str = "utf-8") -> str:
    try:
        return data.decode(encoding, errors)
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 at byte {offset + error.start}"
        raise UserError(f"{name}: {reason}. Convert it, or use --errors replace.") from None


def _read_plain(source: Source) -> Iterator[Text]:
    blocks = sources.read_blocks(source)
    head = b""
    for block in blocks:
        head += block
        if len(head) > LARGE_DOCUMENT_BYTES:
            break
    else:
        yield Text(_decode(head, source.name, source.errors))
        return
    size = 0 if source.compression else source.size
    blocks = itertools.chain([head], blocks)
    if not size:
        size = sum(map(len, blocks))
        blocks = sources.read_blocks(source)
    yield from split_document(blocks, size, source.name, source.errors)


def _read_lines(source: Source) -> Iterator[bytes]:
    """Yield each line without its end."""
    unfinished: list[bytes] = []  # a line may be longer than a block
    for block in sources.read_blocks(source):
        *lines, last = block.split(b"\n")
        for line in lines:
            if unfinished:
                line = b"".join([*unfinished, line])
                unfinished.clear()
            yield line
        unfinished.append(last)
    last = b"".join(unfinished)
    if last:
        yield last


def _read_json_lines(source: Source) -> Iterator[Text]:
    """Yield a text for each line that is not blank."""
    for number, line in enumerate(_read_lines(source), 1):
        if not line.strip():
            continue
        where = f"{source.name}, line {number}"
        content = _decode(line, where, source.errors, encoding="utf-8-sig")
        try:
            record = json.loads(content, parse_int=float)  # an int may have too many digits
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: is not JSON ({error}).") from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: must be a JSON object with fields and values.")
        yield from _split_if_large(text_of(record, source, where), source)


def _read_csv(source: Source) -> Iterator[Text]:
    """Yield a text for each row below the first, which names the columns."""
    csv.field_size_limit(MAX_CSV_FIELD_BYTES)
    rows = csv.reader(_read_csv_lines(source), strict=True)
    try:
        names = next(rows, [])
        for row in rows:
            if not row:
                continue
            where = f"{source.name}, line {rows.line_num}"
            if len(row) != len(names):
                raise UserError(f"{where}: must have {len(names)} values (got {len(row)}).")
            record = dict(zip(names, row, strict=True))
            yield from _split_if_large(text_of(record, source, where), source)
    except csv.Error as error:
        where = f"{source.name}, line {rows.line_num}"
        raise UserError(f"{where}: is not CSV ({error}). Check its quotes.") from None


def _read_csv_lines(source: Source) -> Iterator[str]:
    offset = 0
    for line in _read_lines(source):
        data = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
        yield _decode(data + b"\n", source.name, source.errors, offset + len(line) - len(data))
        offset += len(line) + 1


def _open_parquet(source: Source) -> Any:
    parquet = sources.import_optional("pyarrow.parquet", source.name)
    if source.compression:
        reason = "Parquet compresses by itself, and this file is compressed as a whole"
        raise UserError(f"{source.name}: {reason}. Unpack it.")
    is_local = not isinstance(source.path, str)
    fs, path = sources.file_system(source.path)
    advice = "Get it again. If the server sends no ranges, use --sha256."
    with sources.wrap_errors(source.name, advice):
        return parquet.ParquetFile(
            path,
            filesystem=None if is_local else fs,
            buffer_size=MAX_BATCH_BYTES if is_local else 0,
            pre_buffer=not is_local,  # few large reads
        )


def _read_parquet(source: Source, index: int, count: int) -> Iterator[Text]:
    with _open_parquet(source) as file:
        columns = _columns(source, file.schema_arrow.names)
        first_group = file.num_row_groups * index // count
        end_group = file.num_row_groups * (index + 1) // count
        row = sum(file.metadata.row_group(group).num_rows for group in range(first_group))
        for group in range(first_group, end_group):
            metadata = file.metadata.row_group(group)
            rows_of_bytes = MAX_BATCH_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)
            batches = file.iter_batches(max(1, min(MAX_BATCH_ROWS, rows_of_bytes)), [group], columns, use_threads=False)
            for batch in _next_batches(batches, source, lambda batch: batch.to_pylist()):
                yield from _read_records(batch, row, source)
                row += len(batch)


def _read_rows(source: Source, index: int, count: int) -> Iterator[Text]:
    """Yield the texts of a dataset's rows; of a streamed one, those of some of its files."""
    rows = sources.load_rows(source)
    if rows.column_names and not source.turns_of:
        rows = rows.select_columns(_columns(source, rows.column_names))
    if sources.is_streamed(rows):
        num_files = rows.num_shards
        files = range(num_files * index // count, num_files * (index + 1) // count)
        slices = [(f", file {file + 1}", 0, rows.shard(num_files, file)) for file in files]
    else:
        first = len(rows) * index // count
        end = len(rows) * (index + 1) // count
        slices = [("", first, rows.select(range(first, end)))]
    for file_name, row, selected in slices:
        for batch in _next_batches(selected.iter(64), source, _transpose):
            yield from _read_records(batch, row, source, file_name)
            row += len(batch)


def _transpose(columns: dict[str, list]) -> list[dict[str, Any]]:
    values = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in values]


def _next_batches(batches: Iterator, source: Source, convert: Callable) -> Iterator[list[dict]]:
    while True:
        with sources.wrap_errors(source.name, "Check the connection, or get it again."):
            batch = next(batches, None)
            records = None if batch is None else convert(batch)
        if records is None:
            return
        yield records


def _columns(source: Source, names: list[str]) -> list[str] | None:
    """Return the columns to read; None for all. Raises UserError if the field is missing."""
    if source.turns_of:
        return None
    if source.field not in names:
        text_of(dict.fromkeys(names), source, source.name)
    return [source.field]


def _read_records(records: list[dict[str, Any]], row: int, source: Source, file_name: str = "") -> Iterator[Text]:
    for number, record in enumerate(records, row + 1):
        where = f"{source.name}{file_name}, row {number}"
        yield from _split_if_large(text_of(record, source, where), source)


def text_of(record: dict[str, Any], source: Source, where: str) -> str:
    """Return the text in a record's field, or an example's turns as JSON.

    Raises UserError that starts with ``where`` if there is none.
    """
    if source.turns_of:
        try:
            text = json.dumps(source.turns_of(record), ensure_ascii=False)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    elif source.field not in record:
        names = ", ".join(map(repr, record))
        raise UserError(f"{where}: has no field {source.field!r} (got {names}). See --field.")
    else:
        text = record[source.field]
        if not isinstance(text, str):
            value = "null" if text is None else repr(str(text)[:30])
            raise UserError(f"{where}: field {source.field!r} must be text (got {value}).")
    if text.isascii():
        return text
    # JSON can spell half of a surrogate pair.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
