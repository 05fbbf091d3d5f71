"""Text files of records: JSON, CSV, and documents between separators."""

import codecs
import contextlib
import csv
import io
import itertools
import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from engine.core.errors import UserError
from engine.data.inputs import sources
from engine.data.inputs.columns import Records
from engine.data.inputs.sources import Source, kind_of
from engine.data.inputs.text import Notes, decode, open_text

MAX_RECORD_BYTES = 2**27  # of a line, a JSON value, a row, or a document before a separator
TOO_LONG = f"must have at most {MAX_RECORD_BYTES:,} bytes. Check the ends of lines, and quotes."
HEAD_BYTES = 2**16  # read to find the form of a file
NON_ASCII_BYTES = bytes(range(0x80, 0x100))
CSV_SEPARATORS = ",;\t|"
JSON_DECODER = json.JSONDecoder(parse_int=float)  # an int may have too many digits
JSON_GAP_PATTERN = re.compile(r"[ \t\r\n,\[\]]*")  # around the objects of an array or a sequence
MAX_JSON_TOKEN_CHARACTERS = 16  # outside of strings; an error so close to the end is a cut


def read_json(source: Source, notes: Notes) -> Records:
    """Yield the objects of JSON lines, of an array, or of a sequence over several lines."""
    with open_text(source, notes) as file:
        head = file.read(HEAD_BYTES)
        first_line = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0]
        records: Iterator[tuple[str, Any]]
        if first_line.startswith(b"[") or first_line.strip() == b"{":
            records = _parse_values(_read_blocks(file, source, notes, head), source.name)
        else:
            records = _parse_lines(file, source, notes, head)
        for location, record in records:
            if not isinstance(record, dict | UserError):
                record = UserError("must be a JSON object with fields and values.")
            yield location, record


def _parse_lines(
    file: BinaryIO, source: Source, notes: Notes, head: bytes
) -> Iterator[tuple[str, Any]]:
    """Yield the value of each line that is not blank."""
    for number, (line, problem) in enumerate(_read_lines(file, source, notes, head), 1):
        value: Any = problem
        if problem is None:
            if not line.strip():
                continue
            try:
                value = JSON_DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                value = UserError(f"is not JSON ({error}).")
        yield f"{source.name}, line {number}", value


def _parse_values(blocks: Iterator[str], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a JSON array, or of a sequence.

    An incomplete last value is a UserError. Raises UserError for any other mistake, after which
    no value can be found.
    """
    text = ""
    position = 0
    min_characters = 0  # to parse again after a cut
    numbers = itertools.count(1)
    is_open = False
    for block in itertools.chain(blocks, [""]):  # the last marks the end
        text = text[position:] + block
        position = 0
        if block and len(text) < min_characters:
            continue
        while True:
            gap = JSON_GAP_PATTERN.match(text, position)
            assert gap
            is_open = (is_open or "[" in gap[0]) and "]" not in gap[0]
            position = gap.end()
            if position == len(text):
                break
            try:
                value, end = JSON_DECODER.raw_decode(text, position)
            except (json.JSONDecodeError, RecursionError) as error:
                value, end = UserError(f"is not JSON ({error})."), len(text)
                is_string = getattr(error, "msg", "").startswith("Unterminated string")
                error_position = getattr(error, "pos", 0)
                if not is_string and error_position < len(text) - MAX_JSON_TOKEN_CHARACTERS:
                    raise UserError(f"{name}, record {next(numbers)}: {value}") from None
                if block:
                    break
            yield f"{name}, record {next(numbers)}", value
            position = end
        min_characters = 2 * (len(text) - position)
        if min_characters > 2 * MAX_RECORD_BYTES:
            raise UserError(f"{name}, record {next(numbers)}: {TOO_LONG}")
    if is_open:
        yield f"{name}, end", UserError("is not JSON (the array is not closed).")


def _read_blocks(file: BinaryIO, source: Source, notes: Notes, head: bytes) -> Iterator[str]:
    """Yield the text of a file in blocks."""
    offset = 0
    pending = b""
    for block in itertools.chain([head], iter(partial(file.read, sources.BLOCK_BYTES), b""), [b""]):
        data = pending + block
        complete = data.rstrip(NON_ASCII_BYTES) if block else data  # not inside a character
        pending = data[len(complete) :]
        try:
            yield decode(complete, source, notes, offset == 0, offset)
        except UserError as error:
            raise UserError(f"{source.name}: {error}") from None
        offset += len(complete)


def _read_lines(
    file: BinaryIO, source: Source, notes: Notes, head: bytes
) -> Iterator[tuple[str, UserError | None]]:
    """Yield the lines of a file, of which ``head`` was read before, and why one is unusable."""
    head_lines = io.BytesIO(head)
    for number in itertools.count(1):
        line = head_lines.readline()
        if not line.endswith(b"\n"):
            line += file.readline(MAX_RECORD_BYTES + 1 - len(line))
        if not line:
            return
        try:
            if len(line) > MAX_RECORD_BYTES:
                raise UserError(TOO_LONG)
            yield decode(line, source, notes, number == 1), None
        except UserError as error:
            yield "\n", error
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_RECORD_BYTES)


def read_csv(source: Source, notes: Notes) -> Records:
    """Yield a record for each row below the first, which names the columns."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    with open_text(source, notes) as file:
        head = file.read(HEAD_BYTES)
        separator = _find_csv_separator(head, source)
        if separator != ",":
            notes[f"files with columns separated by {separator!r}"] += 1
        names: list[str] = []
        lines = _read_lines(file, source, notes, head)
        rows = _parse_rows(lines, separator, source.name)
        for line, row in rows:
            location = f"{source.name}, line {line}"
            if isinstance(row, UserError):
                yield location, row
            elif not names:
                names = _check_header(row, location)
            elif len(names) > len(row) or any(row[len(names) :]):
                yield location, UserError(f"must have {len(names)} values (got {len(row)}).")
            else:
                yield location, dict(zip(names, row, strict=False))  # row may end in separators


def _parse_rows(
    lines: Iterator[tuple[str, UserError | None]], separator: str, name: str
) -> Iterator[tuple[int, list[str] | UserError]]:
    """Yield the number of its last line, and the values, of each row that is not empty."""
    problems: list[UserError] = []  # of the lines of a row
    num_characters = 0

    def check_lines() -> Iterator[str]:
        nonlocal num_characters
        for line, problem in lines:
            num_characters += len(line)
            if num_characters > MAX_RECORD_BYTES:
                raise UserError(f"{name}, line {rows.line_num}: {TOO_LONG}")
            if problem:
                problems.append(problem)
            yield line

    rows = csv.reader(check_lines(), delimiter=separator, strict=True)
    while True:
        first_line = rows.line_num + 1
        num_characters = 0
        problems.clear()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            problems.append(UserError(f"is not CSV ({error}). Check its quotes."))
        if problems:
            for _ in range(first_line, rows.line_num + 1):  # an open quote may join many rows
                yield rows.line_num, problems[0]
        elif row:
            yield rows.line_num, row


def _check_header(row: list[str], location: str) -> list[str]:
    """Return the names of columns. Raises UserError for a name that occurs twice."""
    while row[1:] and not row[-1]:  # separators at the end
        row = row[:-1]
    for name in row:
        if row.count(name) > 1:
            raise UserError(f"{location}: has two columns of one name (got {name!r}). Rename one.")
    return row


def _find_csv_separator(head: bytes, source: Source) -> str:
    """Return the separator of columns that fits the header.

    A separator that gives the source's field fits best, then the default if it gives several
    columns. csv.Sniffer would also look at the text, where any character may be frequent.
    """
    text = head.decode(errors="replace").removeprefix("\ufeff").lstrip("\r\n")
    default = "\t" if kind_of(source) == ".tsv" else ","

    def rate(separator: str) -> tuple[bool, bool, int]:
        names: list[str] = []
        with contextlib.suppress(csv.Error, StopIteration):
            names = next(csv.reader(io.StringIO(text), delimiter=separator))
        has_field = not source.turns_of and source.field in names
        return has_field, separator == default and len(names) > 1, len(names)

    return max(default + CSV_SEPARATORS, key=rate)


def read_separated(source: Source, notes: Notes) -> Records:
    """Yield the documents between separators, without line ends around them, unless empty."""
    separator = source.separator.encode()
    offset = 0
    number = 1
    with open_text(source, notes) as file:
        for data in _split_at(file, separator, source.name):
            record: dict[str, Any] | UserError
            try:
                text = decode(data, source, notes, offset == 0, offset).strip("\r\n")
                record = {source.field: text}
            except UserError as error:
                text, record = "", error
            offset += len(data) + len(separator)
            if text or isinstance(record, UserError):
                yield f"{source.name}, document {number}", record
                number += 1


def _split_at(file: BinaryIO, separator: bytes, name: str) -> Iterator[bytes]:
    buffer = bytearray()
    for block in iter(partial(file.read, sources.BLOCK_BYTES), b""):
        search_start = max(0, len(buffer) - len(separator) + 1)
        buffer += block
        end = buffer.find(separator, search_start)
        while end >= 0:
            yield bytes(buffer[:end])
            del buffer[: end + len(separator)]
            end = buffer.find(separator)
        if len(buffer) > MAX_RECORD_BYTES:
            reason = f"a document must have at most {MAX_RECORD_BYTES:,} bytes"
            raise UserError(f"{name}: {reason}. Check --separator.")
    yield bytes(buffer)
