"""Text files of records: JSON, CSV, and documents between separators."""

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, BinaryIO

from engine.core.errors import UserError
from engine.data.inputs import sources
from engine.data.inputs.columns import Records
from engine.data.inputs.sources import Source, kind_of
from engine.data.inputs.text import Notes, decode, open_text

MAX_RECORD_BYTES = 2**27  # of a line, a JSON value, a field, or a document before a separator
TOO_LONG = f"must have at most {MAX_RECORD_BYTES:,} bytes. Check the ends of lines, and quotes."
CSV_SEPARATORS = ",;\t|"
MAX_INT_DIGITS = 4000  # Python's int() refuses more than 4,300
JSON_GAP_PATTERN = re.compile(r"[ \t\r\n,\[\]]*")  # around the objects of an array or a sequence


def parse_int(digits: str) -> int | float:
    """Return the value of an integer in JSON, a float if it has too many digits for an int."""
    return int(digits) if len(digits) <= MAX_INT_DIGITS else float(digits)


def make_object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON with these names and values. Raises ValueError for equal names."""
    values = dict(items)
    if len(values) < len(items):
        names = [name for name, _ in items]
        raise ValueError(f"two fields {next(n for n in names if names.count(n) > 1)!r}")
    return values


JSON_DECODER = json.JSONDecoder(parse_int=parse_int, object_pairs_hook=make_object)
Lines = Iterable[str | UserError]


def read_json(source: Source, notes: Notes) -> Records:
    """Yield the objects of JSON lines, of an array, or of a sequence over several lines."""
    with open_text(source, notes) as file:
        lines = _read_lines(file, source, notes)
        head = _read_head(lines)
        first = head[-1].strip() if isinstance(head[-1], str) else ""
        parse = _parse_values if first.startswith("[") or first == "{" else _parse_lines
        for location, record in parse(itertools.chain(head, lines), source.name):
            if not isinstance(record, dict | UserError):
                record = UserError("must be a JSON object with fields and values.")
            yield location, record


def _parse_lines(lines: Lines, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the value of each line that is not blank."""
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
        yield f"{name}, line {number}", value


def _parse_values(lines: Lines, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a JSON array, or of a sequence. Raises UserError for a mistake."""
    text = ""
    min_characters = 0  # to parse again after a value was incomplete
    is_open = False
    number = 1
    for line in itertools.chain(lines, [""]):  # the last marks the end
        if isinstance(line, UserError):
            raise UserError(f"{name}, record {number}: {line}")
        text += line
        if line and len(text) < min_characters:
            continue
        position = 0
        while True:
            gap = JSON_GAP_PATTERN.match(text, position)
            assert gap
            is_open = (is_open or "[" in gap[0]) and "]" not in gap[0]
            position = gap.end()
            if position == len(text):
                break
            try:
                value, end = JSON_DECODER.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                if line and len(text) - position <= MAX_RECORD_BYTES:  # it may be incomplete
                    break
                reason = str(error).partition(": line")[0]
                raise UserError(f"{name}, record {number}: is not JSON ({reason}).") from None
            yield f"{name}, record {number}", value
            number += 1
            position = end
        text = text[position:]
        min_characters = 2 * len(text)
    if is_open:
        raise UserError(f"{name}: is not JSON (its array has no end). Get it again.")


def _read_lines(file: BinaryIO, source: Source, notes: Notes) -> Iterator[str | UserError]:
    """Yield the lines of a file, or why one is unusable."""
    for number in itertools.count(1):
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        try:
            if len(line) > MAX_RECORD_BYTES:
                raise UserError(TOO_LONG)
            yield decode(line, source, notes, number == 1)
        except UserError as error:
            yield error
            while line and not line.endswith(b"\n"):
                line = file.readline(MAX_RECORD_BYTES)


def _read_head(lines: Lines) -> list[str | UserError]:
    """Return the lines up to the first that is not blank; at least one."""
    head: list[str | UserError] = []
    for line in lines:
        head.append(line)
        if isinstance(line, UserError) or line.strip():
            break
    return head or [""]


def read_csv(source: Source, notes: Notes) -> Records:
    """Yield a record for each row below the first, which names the columns."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    problems: list[UserError] = []  # of the lines of a row

    def check(line: str | UserError) -> str:
        if isinstance(line, str):
            return line
        problems.append(line)
        return "\n"

    with open_text(source, notes) as file:
        lines = _read_lines(file, source, notes)
        head = _read_head(lines)
        separator = _find_csv_separator(check(head[-1]), source)
        if separator != ",":
            notes[f"files with columns separated by {separator!r}"] += 1
        all_lines = map(check, itertools.chain(head, lines))
        rows = csv.reader(all_lines, delimiter=separator, strict=True)
        names: list[str] = []
        while True:
            first_line = rows.line_num
            problems.clear()
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                problems.append(UserError(f"is not CSV ({error}). Check its quotes."))
            location = f"{source.name}, line {rows.line_num}"
            if problems:
                for _ in range(first_line, rows.line_num):  # an open quote may join many rows
                    yield location, problems[0]
            elif row and not names:
                names = _check_header(row, location)
            elif row:
                yield location, _make_record(names, row)


def _check_header(row: list[str], location: str) -> list[str]:
    """Return the names of columns. Raises UserError for a name that occurs twice."""
    while row[1:] and not row[-1]:  # separators at the end
        row = row[:-1]
    for name in row:
        if row.count(name) > 1:
            raise UserError(f"{location}: has two columns of one name (got {name!r}). Rename one.")
    return row


def _make_record(names: list[str], row: list[str]) -> dict[str, str] | UserError:
    if len(row) < len(names) or any(row[len(names) :]):  # separators may follow the last value
        return UserError(f"must have {len(names)} values (got {len(row)}).")
    return dict(zip(names, row, strict=False))


def _find_csv_separator(header: str, source: Source) -> str:
    """Return the separator that gives the source's field, or the default, or most columns.

    csv.Sniffer would also look at the text, where any character may be frequent.
    """
    default = "\t" if kind_of(source) == ".tsv" else ","

    def rate(separator: str) -> tuple[bool, bool, int]:
        names: list[str] = []
        with contextlib.suppress(csv.Error):
            names = next(csv.reader([header], delimiter=separator))
        has_field = not source.turns_of and source.field in names
        return has_field, separator == default and len(names) > 1, len(names)

    return max(default + CSV_SEPARATORS, key=rate)


def read_separated(source: Source, notes: Notes) -> Records:
    """Yield the documents between separators, without line ends around them, unless empty."""
    number = 1
    with open_text(source, notes) as file:
        for data in _split_at(file, source.separator.encode()):
            location = f"{source.name}, document {number}"
            try:
                if len(data) > MAX_RECORD_BYTES:
                    raise UserError(f"{TOO_LONG[:-1]}, and --separator.")
                text = decode(data, source, notes, number == 1).strip("\r\n")
            except UserError as error:
                raise UserError(f"{location}: {error}") from None
            if text:
                yield location, {source.field: text}
                number += 1


def _split_at(file: BinaryIO, separator: bytes) -> Iterator[bytes]:
    """Yield the bytes between separators; a longer part than a record can have is incomplete."""
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
            break
    yield bytes(buffer)
