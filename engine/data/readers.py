"""What is in a source: one reader for each kind of file → texts, document after document, from any byte on."""

import codecs
import csv
import functools
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from engine.data.sources import SHARD, Source, Unreadable, explained, needed, opened

BLOCK = 2**18  # bytes read at a time
LARGE = 2**18  # bytes; a document that has more comes in pieces
PIECE = 2**16  # bytes from where one piece may begin to where the next may
BATCH, ROWS = 2**20, 2**10  # bytes of rows, and rows, read at a time; repeated texts have few bytes
NOT_UTF8 = "{} is not UTF-8 at byte {}; convert it, or use --errors replace"
# Where text can be cut so that every BPE here encodes the two sides to the ids of the whole: between a line's end and a
# next line that starts without space (o200k joins "\n" with "/"), between two words, before a Chinese or Japanese mark.
CUT = re.compile(r"(?<=\S\n)(?=[^\s/])|(?<=[A-Za-z])(?= [A-Za-z])|(?<=[\u3041-\u3096\u4e00-\u9fff])(?=[。、，！？])")
BEFORE = 8  # bytes that hold what CUT looks back to, or ahead to


class Text(NamedTuple):
    """A document, or a piece of one that is large; of an example, its turns as JSON."""

    text: str
    offset: int = 0  # of its first byte in the document
    size: int | None = None  # UTF-8 bytes of the document; None: all are in the text
    ends: bool = True  # whether the document ends with it
    length: int | None = None  # bytes of the document that it is; None: as many as the text has


class Reader(NamedTuple):
    """How a kind of source is read.

    read gives what begins in bytes [start, end) of the source, so that readings end to end are all of it; count is how
    many documents it has, as far as that is known without reading them; snap is where that begins which holds a byte.
    """

    read: Callable[[Source, float, float], Iterator[Text]]
    count: Callable[[Source], int | None] = lambda source: None
    snap: Callable[[Source, int], int] = lambda source, offset: offset


def kind_of(source: Source) -> str:
    """Which reader a source needs: an ending of its name, "" for plain text; a compression's, or a date, may follow."""
    if source.rows is not None:
        return "rows"
    dated = (one for one in source.endings if one != source.compression and not one[1:].replace("-", "").isdigit())
    kind = next(dated, "")
    if kind == ".json" and source.compression:  # as large collections call their lines
        return ".jsonl"
    return kind if kind in READERS else ""


def read(source: Source, start: float = 0, end: float = float("inf")) -> Iterator[Text]:
    """What begins in bytes [start, end) of a source; one that can't be read from the middle begins at 0 as a whole.

    Raises Unreadable, or OSError, naming the file and the byte, line or row of what is not text.
    """
    whole = not can_be_cut(source)
    if not whole or start <= 0 < end:
        yield from READERS[kind_of(source)].read(source, *((0, float("inf")) if whole else (start, end)))


def can_be_cut(source: Source) -> bool:
    """Whether parts of a source can be read without the rest."""
    kind = kind_of(source)
    return kind in ("rows", ".parquet") or (kind != ".csv" and source.seekable)


def whole(text: str, source: Source) -> Iterator[Text]:
    """A document, in pieces if it is large; an example never is."""
    if len(text) <= LARGE // 4 or source.turns_of or len(data := text.encode()) <= LARGE:
        yield Text(text)
    else:
        yield from cut_up(io.BytesIO(data), len(data))


def cut_up(
    file: BinaryIO, size: int, start: float = 0, end: float = float("inf"), name: str = "", errors: str = "strict"
) -> Iterator[Text]:
    """The pieces that begin in bytes [start, end) of a document of UTF-8.

    Each begins at the first cut at or after a multiple of PIECE, or where there is none before the next multiple, at
    the first character: so the pieces are the same wherever reading starts. Memory is two pieces, whatever the size.
    """
    number = -(-int(max(0, start)) // PIECE)
    at = max(0, number * PIECE - BEFORE)  # data is what is known from here on
    data = b""
    if at:
        file.seek(at)

    def known_to(offset: int) -> bytes:
        nonlocal data
        while at + len(data) < offset and (block := file.read(min(PIECE, offset - at - len(data)))):
            data += block
        return data

    def beginning(nominal: int) -> int:
        if nominal == 0 or nominal >= size:
            return min(nominal, size)
        first = nominal - BEFORE - at
        for length in (2**10, PIECE):
            window = known_to(min(size, nominal + length + BEFORE))[first : first + length + 2 * BEFORE]
            text = window.decode(errors="surrogateescape")
            for match in CUT.finditer(text):
                offset = len(text[: match.start()].encode(errors="surrogateescape"))
                if BEFORE <= offset < BEFORE + length:
                    return nominal - BEFORE + offset
        rest = known_to(min(size, nominal + 4))[nominal - at : nominal - at + 3]
        return nominal + len(rest) - len(rest.lstrip(bytes(range(0x80, 0xC0))))  # not amid a character

    begin = beginning(number * PIECE)
    while begin < size and number * PIECE < end:
        number += 1
        after = beginning(number * PIECE)
        piece = known_to(after)[begin - at : after - at]
        if len(piece) < after - begin:
            raise Unreadable(f"{name} has become shorter while it was read; prepare again")
        try:
            text = piece.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise Unreadable(NOT_UTF8.format(name, begin + error.start)) from None
        yield Text(text, begin, size, after == size, after - begin)
        data, at, begin = data[max(0, after - BEFORE - at) :], max(at, after - BEFORE), after


def _plain(source: Source, start: float, end: float) -> Iterator[Text]:
    with opened(source) as file:
        if source.seekable and source.size > LARGE:
            yield from cut_up(file, source.size, start, end, source.name, source.errors)
            return
        if not start <= 0 < end:
            return
        data = file.read(LARGE + 1)
        if len(data) <= LARGE:
            try:
                yield Text(data.decode(errors=source.errors))
            except UnicodeDecodeError as error:
                raise Unreadable(NOT_UTF8.format(source.name, error.start)) from None
            return
        size = len(data) + sum(map(len, iter(lambda: file.read(BLOCK), b"")))
    with opened(source) as file:
        yield from cut_up(file, size, name=source.name, errors=source.errors)


def _json_lines(source: Source, start: float, end: float) -> Iterator[Text]:
    """Each line that is not blank: the text in the field of its JSON object, or as JSON the turns of an example."""
    at = 0

    def where() -> str:  # counted only if asked
        with opened(source) as file:
            number = 1 + sum(file.read(min(BLOCK, at - done)).count(b"\n") for done in range(0, at, BLOCK))
        return f"{source.name}, line {number}"

    with opened(source) as file:
        if start > 0:
            file.seek(int(start) - 1)
            at = int(start) - 1 + len(file.readline())
        for line in file:
            if at >= end:
                return
            if line.strip():
                try:
                    record = json.loads(line.decode("utf-8-sig", source.errors), parse_int=float)  # of any length
                except UnicodeDecodeError as error:
                    raise Unreadable(NOT_UTF8.format(where(), error.start)) from None
                except (ValueError, RecursionError) as error:
                    raise Unreadable(f"{where()} is not JSON ({error})") from None
                if not isinstance(record, dict):
                    raise Unreadable(f"{where()} is not an object with fields and values")
                yield from whole(text_of(record, source, where), source)
            at += len(line)


def _csv(source: Source, start: float, end: float) -> Iterator[Text]:
    """Each row below the first, which names the columns."""
    csv.field_size_limit(2**27)

    def lines() -> Iterator[str]:
        decoder, rest, offset = codecs.getincrementaldecoder("utf-8-sig")(source.errors), "", 0
        with opened(source) as file:
            while True:
                block = file.read(BLOCK)
                try:
                    *whole_lines, rest = (rest + decoder.decode(block, final=not block)).split("\n")
                except UnicodeDecodeError as error:
                    at = offset - (len(error.object) - len(block)) + error.start
                    raise Unreadable(NOT_UTF8.format(source.name, at)) from None
                offset += len(block)
                yield from (f"{line}\n" for line in whole_lines)
                if not block:
                    break
        if rest:
            yield rest

    rows = csv.reader(lines(), strict=True)

    def where() -> str:
        return f"{source.name}, line {rows.line_num}"

    try:
        names = next(rows, [])
        for row in rows:
            if row and len(row) != len(names):
                raise Unreadable(f"{where()} has {len(row)} values, but there are {len(names)} columns")
            if row:
                yield from whole(text_of(dict(zip(names, row, strict=True)), source, where), source)
    except csv.Error as error:
        raise Unreadable(f"{where()} is not CSV ({error}); fields with quotes or new lines stand in quotes") from None


def _footer(source: Source) -> Any:
    """What a Parquet file says of its groups of rows; it may be long, so it is read once for each state of the file."""
    return _footer_then(source, source.info)


@functools.lru_cache(16)
def _footer_then(source: Source, info: tuple[int, str]) -> Any:
    parquet = needed("pyarrow.parquet", source.name)
    if source.compression:
        raise Unreadable(f"{source.name} is compressed as a whole; Parquet has its own compression, so unpack it")
    with explained(source.name, "get it again, or where a server can't give parts of it, download it (--sha256)"):
        return parquet.read_metadata(source.path, filesystem=source.fs)


def _parquet_file(source: Source) -> Any:
    """The opened file, read batch by batch. Raises Unreadable for what is no Parquet."""
    parquet, footer = needed("pyarrow.parquet", source.name), _footer(source)
    with explained(source.name, "get it again"):
        here = source.fs is None  # where few large reads are no quicker than many small ones
        return parquet.ParquetFile(
            source.path, buffer_size=BATCH * here, pre_buffer=not here, filesystem=source.fs, metadata=footer
        )


def _row_groups(source: Source) -> list[tuple[int, int]]:
    """Where each group of rows begins, as a share of the file's bytes by its rows, and how many rows it has."""
    footer, found, before = _footer(source), [], 0
    for number in range(footer.num_row_groups):
        rows = footer.row_group(number).num_rows
        found.append((source.size * before // max(1, footer.num_rows), rows))
        before += rows
    return found


def _parquet(source: Source, start: float, end: float) -> Iterator[Text]:
    with _parquet_file(source) as file:
        first, groups, names = 0, _row_groups(source), file.schema_arrow.names
        columns = None if source.turns_of else [source.field]
        if columns and source.field not in names:
            text_of(dict.fromkeys(names), source, lambda: source.name)
        for number, (offset, rows) in enumerate(groups):
            if start <= offset < end and rows:
                at_once = max(1, min(ROWS, BATCH * rows // max(1, file.metadata.row_group(number).total_byte_size)))
                for records in _batches(source, file, number, at_once, columns):
                    yield from _records(records, first, source)
                    first += len(records)
            else:
                first += rows


def _batches(source: Source, file: Any, number: int, at_once: int, columns: list[str] | None) -> Iterator[list[dict]]:
    with explained(source.name, "get it again"):
        yield from (
            batch.to_pylist()
            for batch in file.iter_batches(at_once, [number], columns, use_threads=False)
            if len(batch)
        )


def _saved_rows(source: Source, start: float, end: float) -> Iterator[Text]:
    """The rows of a dataset of Hugging Face's library; of one that is streamed, those of whole files."""
    rows, names = source.rows, source.rows.column_names
    if names and not source.turns_of:
        if source.field not in names:
            text_of(dict.fromkeys(names), source, lambda: source.name)
        rows = rows.select_columns([source.field])
    if not source.is_streamed:  # on the disk: any row can be found
        count, size = len(rows), max(1, source.size)
        first, last = (min(count, -(-int(min(max(0, x), size)) * count // size)) for x in (start, end))
        stretches = [("", first, rows.select(range(first, last)))] if first < last else []
    else:
        numbers = (i for i in range(rows.num_shards) if start <= i * source.size // rows.num_shards < end)
        stretches = ((f", file {number + 1}", 0, rows.shard(rows.num_shards, number)) for number in numbers)
    for file, first, stretch in stretches:
        for records in _batches_of(source, stretch):
            yield from _records(records, first, source, file)
            first += len(records)


def _batches_of(source: Source, rows: Any) -> Iterator[list[dict]]:
    with explained(source.name, "check the connection, or get it again"):
        for batch in rows.iter(64):
            yield [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def _records(records: list[dict[str, Any]], first: int, source: Source, file: str = "") -> Iterator[Text]:
    for number, record in enumerate(records, first + 1):
        yield from whole(text_of(record, source, lambda number=number: f"{source.name}{file}, row {number}"), source)


def text_of(record: dict[str, Any], source: Source, where: Callable[[], str]) -> str:
    """The text in a record's field, or as JSON the turns of an example. Raises Unreadable where there is none."""
    if source.turns_of:
        try:
            text = json.dumps(source.turns_of(record), ensure_ascii=False)
        except ValueError as error:
            raise Unreadable(f"{where()} {error}") from None
    elif source.field not in record:
        found = f"{where()} has only {', '.join(map(repr, record))}"
        raise Unreadable(f"{found}; it should have the field {source.field!r} (see --field)")
    elif not isinstance(text := record[source.field], str):
        found = "null; leave out such rows" if text is None else f"not text but {str(text)[:30]!r} (see --field)"
        raise Unreadable(f"{where()}: the field {source.field!r} is {found}")
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # JSON can spell half a character


def _rows_of(source: Source) -> int | None:
    return None if source.is_streamed else len(source.rows)


def _parquet_rows(source: Source) -> int:
    return _footer(source).num_rows


def _group_of(source: Source, offset: int) -> int:
    return max((begin for begin, _ in _row_groups(source) if begin <= offset), default=0)


def _file_of(source: Source, offset: int) -> int:
    return offset // SHARD * SHARD if source.is_streamed else offset


READERS = {
    "": Reader(_plain, lambda source: 1),
    ".jsonl": Reader(_json_lines),
    ".ndjson": Reader(_json_lines),
    ".csv": Reader(_csv),
    ".parquet": Reader(_parquet, _parquet_rows, _group_of),
    "rows": Reader(_saved_rows, _rows_of, _file_of),
}
FIELDS = "JSON lines, CSV, Parquet or a dataset of Hugging Face's"  # what has fields
