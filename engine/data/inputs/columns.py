"""Parquet files and datasets of Hugging Face → records."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from engine.core.errors import UserError, import_optional
from engine.data.inputs import sources
from engine.data.inputs.fields import LABEL_FIELD
from engine.data.inputs.sources import Reader, Source, wrap_errors

BUFFER_BYTES = 2**20  # of a Parquet file, read at a time
BATCH_ROWS = 16  # decoded at a time: a small file may repeat a large cell
LARGE_BATCH_BYTES = 2**22  # the rows of a larger batch become Python objects one by one
UNREAD_VALUE = "…"  # stands for the value of a column that is not read

# Location, such as "a.csv, line 3", and the record, or the reason why it cannot be read.
Records = Iterator[tuple[str, dict[str, Any] | UserError]]


def count_parts(source: Source, part_bytes: int) -> int:
    """Return the number of parts, of about ``part_bytes``, that can be read independently."""
    kind = source.kind if source.size > part_bytes else ""
    if kind == ".parquet":
        with wrap_errors(source.name), _open_parquet(source) as file:
            return max(1, file.num_row_groups)
    if kind == "rows":
        rows = sources.load_rows(source)
        return rows.num_shards if sources.is_streamed(rows) else -(-source.size // part_bytes)
    return 1


def read_parquet(source: Source, reader: Reader, index: int, count: int) -> Records:
    """Yield the records of one part of a file, which is a range of row groups."""
    with wrap_errors(source.name), _open_parquet(source) as file:
        first = file.num_row_groups * index // count
        end = file.num_row_groups * (index + 1) // count
        row = sum(file.metadata.row_group(group).num_rows for group in range(first))
        columns, placeholders = _select_columns(source, reader, file.schema_arrow)
        groups = [*range(first, end)]
        batches = file.iter_batches(BATCH_ROWS, groups, columns, use_threads=False)
        yield from _read_batches(batches, placeholders, source.name, row)
    source.check_unchanged()


def read_rows(source: Source, reader: Reader, index: int, count: int) -> Records:
    """Yield the rows of one part of a dataset, which is a file if the rows are streamed."""
    rows = sources.load_rows(source)
    with wrap_errors(source.name):
        schema = rows.features.arrow_schema if rows.features else ()
        columns, placeholders = _select_columns(source, reader, schema)
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
        batches = rows.with_format("arrow").iter(BATCH_ROWS)
        yield from _read_batches(batches, placeholders, name, row)


def _open_parquet(source: Source) -> Any:
    parquet = import_optional("pyarrow.parquet", source.name)
    source.check_unchanged()
    if source.size < 2**10:
        with sources.open_source(source):
            pass  # a pointer of Git LFS is refused
    is_remote = isinstance(source.path, str)
    fs, path = sources.file_system(source.path)
    buffer_size = 0 if is_remote else BUFFER_BYTES  # pre_buffer makes few large requests
    return parquet.ParquetFile(path, filesystem=fs, buffer_size=buffer_size, pre_buffer=is_remote)


def _select_columns(
    source: Source, reader: Reader, schema: Iterable[Any]
) -> tuple[list[str], dict[str, Any]]:
    """Return the columns to read, and a placeholder for each: notes and messages need it."""
    fields = reader.examples.fields if reader.examples else (reader.field,)
    needed = {LABEL_FIELD, *fields, *(name.partition(".")[0] for name in fields)}
    columns = [column.name for column in schema if column.name in needed or fields == ("",)]
    for name in columns:
        if columns.count(name) > 1:
            raise UserError(f"{source.name}: has two columns {name!r}. Rename or remove one.")
    return columns, {column.name: _make_placeholder(column.type) for column in schema}


def _make_placeholder(kind: Any) -> Any:
    """Return a value of an Arrow type, of UNREAD_VALUE and the fields that it has."""
    if not kind.num_fields:
        return UNREAD_VALUE
    if hasattr(kind, "value_type"):
        return [_make_placeholder(kind.value_type)]
    fields = [kind.field(index) for index in range(kind.num_fields)]
    return {field.name: _make_placeholder(field.type) for field in fields}


def _read_batches(
    batches: Iterable[Any], placeholders: dict[str, Any], name: str, row: int
) -> Records:
    """Yield the record of each row after ``row``, or the reason why Python cannot hold it."""
    for batch in batches:
        records = None
        if batch.nbytes <= LARGE_BATCH_BYTES:
            with contextlib.suppress(ValueError, OverflowError):
                records = batch.to_pylist()
        for index in range(len(batch)):
            row += 1
            record: dict[str, Any] | UserError
            try:
                values = records[index] if records else batch.slice(index, 1).to_pylist()[0]
                record = placeholders | values
            except UnicodeDecodeError as error:
                record = UserError(f"is not UTF-8 ({error}). Repair the text.")
            except (ValueError, OverflowError) as error:
                reason = f"has a value that Python cannot hold ({error})"
                record = UserError(f"{reason}. Convert it to text.")
            yield f"{name}, row {row}", record
