"""JSON, CSV, Parquet files and datasets of Hugging Face → records."""

import csv
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from engine.core.errors import UserError, import_optional
from engine.data.records.text import (
    Reader,
    Record,
    clean_record,
    clean_text,
    decode_utf8,
    open_text,
)
from engine.data.sources import source as sources
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source, wrap_errors

# After a mistake in an array or in quotes, it is unknown where the next record begins.
BROKEN_ADVICE = "Repair it, or get it again: --skip-bad-rows needs one record a line."
JSON_START_PATTERN = re.compile(rb"(\xef\xbb\xbf)?\s*(\[|\{\s*[\r\n])")  # of no JSON lines
JSON_GAP_PATTERN = re.compile(r"[\s,\ufeff]*")  # between values
TURN_KEYS = {"role", "from", "content", "value"}  # of an object in a list of messages
MAX_CSV_VALUE_CHARACTERS = 2**27
BUFFER_BYTES = 2**20  # of a Parquet file, read at a time
BATCH_ROWS = 16  # decoded at a time: a small file may repeat a large cell
UNREAD_VALUE = "…"  # stands for the value of a column that is not read


def _read_lines(file: BinaryIO, reader: Reader, notes: Notes) -> Iterator[str | UserError]:
    """Yield each line of a file without byte order marks, or why it cannot be used."""
    for number, line in enumerate(file):
        for part in line.splitlines(keepends=True) if b"\r" in line else [line]:  # CR ends one, too
            try:
                yield decode_utf8(part, reader, notes, number == 0).removeprefix("\ufeff")
            except UserError as error:
                yield error


def _check_lines(lines: Iterator[str | UserError], name: str) -> Iterator[str]:
    """Yield the lines of a file. Raises UserError for one that cannot be used."""
    for number, line in enumerate(lines, 1):
        if isinstance(line, UserError):
            raise UserError(f"{name}, line {number}: {line}")
        yield line


def make_object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON with these names and values. Raises ValueError for equal names."""
    values = dict(items)
    if len(values) < len(items):
        raise ValueError(f"two fields of one name in {[name for name, _ in items]}")
    return values


JSON_DECODER = json.JSONDecoder(object_pairs_hook=make_object)


def read_json(source: Source, reader: Reader, notes: Notes) -> Iterator[Record]:
    """Yield the objects of JSON lines, of an array, or of a sequence over several lines."""
    list_field = reader.examples.list_field if reader.examples else ""
    with open_text(source, reader, notes) as file:
        lines = _read_lines(file, reader, notes)
        values: Iterator[tuple[str, Any]] = _parse_lines(lines)
        if JSON_START_PATTERN.match(file.peek()):
            values = _parse_values("".join(_check_lines(lines, source.name)), source, list_field)
        for location, parsed in values:
            value = {list_field: parsed} if list_field and isinstance(parsed, list) else parsed
            yield Record(f"{source.name}, {location}", clean_record(value, reader, notes))


def _parse_lines(lines: Iterator[str | UserError]) -> Iterator[tuple[str, Any]]:
    """Yield the location of each line that is not blank, and its value or why there is none."""
    for number, line in enumerate(lines, 1):
        value: Any = line
        if isinstance(line, str):
            if not line.strip():
                continue
            try:
                value = JSON_DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                reason = str(error).replace("line 1 column", "column")
                value = UserError(f"is not JSON ({reason}).")
        yield f"line {number}", value


def _parse_values(text: str, source: Source, list_field: str) -> Iterator[tuple[str, Any]]:
    """Yield the location and each record of JSON values, which may be arrays of records.

    A list of messages is a record. Raises UserError for invalid JSON.
    """
    position = JSON_GAP_PATTERN.match(text).end()  # type: ignore
    number = 0
    while position < len(text):
        try:
            value, position = JSON_DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source.name}: is not JSON ({error}). {BROKEN_ADVICE}") from None
        first = value[0] if value and isinstance(value, list) else None
        is_chat = list_field and isinstance(first, dict) and not TURN_KEYS.isdisjoint(first)
        for record in value if isinstance(value, list) and not is_chat else [value]:
            number += 1
            yield f"record {number}", record
        position = JSON_GAP_PATTERN.match(text, position).end()  # type: ignore


def read_csv(source: Source, reader: Reader, notes: Notes) -> Iterator[Record]:
    """Yield a record for each row below the first, which names the columns.

    Raises UserError after a mistake in quotes: nothing is known of what follows.
    """
    csv.field_size_limit(MAX_CSV_VALUE_CHARACTERS)
    with open_text(source, reader, notes) as file:
        header = b"".join(file.peek().lstrip(b"\r\n").splitlines()[:1])
        separators = b"\t,;|" if source.kind == ".tsv" else b",;\t|"
        separator = chr(max(separators, key=header.count))
        lines = _check_lines(_read_lines(file, reader, notes), source.name)
        table = csv.reader(lines, delimiter=separator, strict=True)
        names: list[str] = []
        last_line = 0  # of the previous row
        try:
            for row in filter(None, table):
                location = f"{source.name}, line {table.line_num}"
                if not names:
                    names = _read_header(row, location)
                elif row[: len(names)] == names:
                    notes.add("headers between the rows of a table, left out")
                elif separator == "\t" and any("\t" in each and "\n" in each for each in row):
                    raise csv.Error("a value with tabs and line ends")  # a quote may be text
                elif len(row) < len(names) or any(row[len(names) :]):
                    problem = UserError(f"must have {len(names)} values (got {len(row)}).")
                    yield Record(location, problem)
                else:
                    values = [clean_text(value, notes) for value in row]
                    yield Record(location, dict(zip(names, values, strict=False)))
                last_line = table.line_num
        except csv.Error as error:
            reason = f"is not CSV ({error}). Check its quotes. {BROKEN_ADVICE}"
            raise UserError(f"{source.name}, line {last_line + 1}: {reason}") from None


def _read_header(row: list[str], location: str) -> list[str]:
    """Return the names of columns. Raises UserError for a name that occurs twice."""
    while row[1:] and not row[-1]:  # separators at the end
        row = row[:-1]
    _check_unique(row, location)
    return row


def _check_unique(names: list[str], location: str) -> None:
    """Raise UserError if two columns of a table have one name."""
    if len({*names}) < len(names):
        raise UserError(f"{location}: has two columns of one name in {names}. Rename one.")


def count_parts(source: Source, part_bytes: int) -> int:
    """Return the number of parts, of about ``part_bytes``, that can be read independently."""
    if source.size <= part_bytes or source.kind not in (".parquet", "rows"):
        return 1
    with wrap_errors(source.name):
        table = _open_table(source)
    return max(1, table.num_row_groups) if source.kind == ".parquet" else table.num_shards


def read_table(
    source: Source, reader: Reader, notes: Notes, index: int, count: int
) -> Iterator[Record]:
    """Yield the rows of part ``index`` of ``count`` of a Parquet file or a dataset."""
    is_parquet = source.kind == ".parquet"
    name = source.name
    with wrap_errors(name):
        table = _open_table(source)
        names = table.schema_arrow.names if is_parquet else [*(table.features or ())]
        columns = _select_columns(source, reader, names)
        unread = dict.fromkeys(names, UNREAD_VALUE)  # notes and messages name them
        if is_parquet:
            first, batches = _list_batches(table, columns, index, count)
        else:
            first = 0
            table = table.select_columns(columns) if columns else table
            batches = table.shard(count, index).with_format("arrow").iter(BATCH_ROWS)
            name += f", part {index + 1}" if count > 1 else ""
        rows = itertools.chain.from_iterable(map(_to_rows, batches))
        for number, row in enumerate(rows, first + 1):
            value = clean_record(row, reader, notes)
            value = unread | value if isinstance(value, dict) else value
            yield Record(f"{name}, row {number}", value)
        source.check_unchanged()


def _to_rows(batch: Any) -> list[dict[str, Any]]:
    """Return the rows of an Arrow table, with values of JSON decoded."""
    rows = batch.to_pylist()
    has_json = "arrow.json" in str(batch.schema.types)
    return [_decode_json(row, batch.schema) for row in rows] if has_json else rows


def _open_table(source: Source) -> Any:
    """Open a Parquet file, or a dataset of Hugging Face."""
    if source.kind == "rows":
        return sources.load_rows(source)
    parquet = import_optional("pyarrow.parquet", source.name)
    source.check_unchanged()
    if source.size < 2**10:
        with sources.open_source(source):
            pass  # a pointer of Git LFS is refused
    if isinstance(source.path, Path):
        return parquet.ParquetFile(source.path, buffer_size=BUFFER_BYTES, pre_buffer=False)
    fs, path = sources.file_system(source.path)
    return parquet.ParquetFile(path, filesystem=fs, pre_buffer=True)  # few large requests


def _list_batches(file: Any, columns: list[str], index: int, count: int) -> tuple[int, Any]:
    """Return the rows before one part of a Parquet file, a range of row groups, and its batches."""
    first = file.num_row_groups * index // count
    groups = [*range(first, file.num_row_groups * (index + 1) // count)]
    row = sum(file.metadata.row_group(group).num_rows for group in range(first))
    return row, file.iter_batches(BATCH_ROWS, groups, columns, use_threads=False)


def _select_columns(source: Source, reader: Reader, names: list[str]) -> list[str]:
    """Return the columns to read, those of the fields that the reader needs."""
    fields = reader.examples.fields if reader.examples else (reader.field,)
    needed = {*fields, *(field.partition(".")[0] for field in fields)}
    columns = [name for name in names if name in needed or fields == ("",)]
    _check_unique(columns, source.name)
    return columns


def _decode_json(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type or schema, with the JSON in it decoded at any depth."""
    if getattr(kind, "extension_name", "") == "arrow.json":
        return value and json.loads(value)
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_decode_json(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {field.name: _decode_json(value[field.name], field.type) for field in kind}
    return value
