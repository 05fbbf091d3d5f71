"""Text files of records: JSON, CSV, and documents between separators."""

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, BinaryIO

from engine.core.errors import UserError
from engine.data.inputs import sources
from engine.data.inputs.columns import Records
from engine.data.inputs.sources import Reader, Source
from engine.data.inputs.text import Notes, decode_utf8, open_text

MAX_RECORD_BYTES = 2**27  # of a line, a JSON value, a field, or a document before a separator
TOO_LONG_MESSAGE = f"has over {MAX_RECORD_BYTES:,} bytes. Check line ends, quotes or --separator."
# After a mistake in an array, it is unknown where the next record begins.
BROKEN_ARRAY_ADVICE = "Repair it, or get it again: --skip-bad-rows needs one record a line."
JSON_GAP_PATTERN = re.compile(r"[ \t\r\n,\[\]]*")  # before and after an object
# The same, but a list of messages is a value: it starts with an object that starts with such a key.
MESSAGE_START = r'\s*(?:\{\s*)?(?:"(?:role|from|content|value)"|\Z)'
CHAT_GAP_PATTERN = re.compile(rf"(?:[ \t\r\n,\]]|\[(?!{MESSAGE_START}))*")


def make_object(items: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON with these names and values. Raises ValueError for equal names."""
    values = dict(items)
    if len(values) < len(items):
        [(name, _)] = Counter(name for name, _ in items).most_common(1)
        raise ValueError(f"two fields {name!r}")
    return values


JSON_DECODER = json.JSONDecoder(object_pairs_hook=make_object)
Lines = Iterator[str | UserError]  # a line, or the reason why it is unusable


def read_json_records(source: Source, reader: Reader, notes: Notes) -> Records:
    """Yield the objects of JSON lines, of an array, or of a sequence over several lines."""
    with open_text(source, reader, notes) as file:
        lines = _read_lines(file, source, reader, notes)
        head = _read_head(lines)
        first = head[-1].strip() if isinstance(head[-1], str) else ""
        list_field = reader.examples.list_field if reader.examples else ""
        gap_pattern = CHAT_GAP_PATTERN if list_field else JSON_GAP_PATTERN
        is_array = first.startswith("[") or first == "{"
        parse = partial(_parse_values, gap_pattern=gap_pattern) if is_array else _parse_lines
        for location, record in parse(itertools.chain(head, lines), source.name):
            if list_field and isinstance(record, list):
                record = {list_field: record}
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


def _parse_values(
    lines: Lines, name: str, gap_pattern: re.Pattern[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a JSON array, or of a sequence. Raises UserError for invalid JSON."""
    text = ""
    min_characters = 0  # of text, before an incomplete value is parsed again
    is_array_open = False
    number = 1
    for line in itertools.chain(lines, [""]):  # "" marks the end
        if isinstance(line, UserError):
            raise UserError(f"{name}, record {number}: {line}")
        text += line
        if line and len(text) < min_characters:
            continue
        position = 0
        while True:
            gap = gap_pattern.match(text, position)
            assert gap
            if "[" in gap[0]:
                is_array_open = True
            if "]" in gap[0]:
                is_array_open = False
            position = gap.end()
            if position == len(text):
                break
            try:
                value, end = JSON_DECODER.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                if line and len(text) - position <= MAX_RECORD_BYTES:  # it may be incomplete
                    break
                reason = str(error).partition(": line")[0]
                problem = f"is not JSON ({reason}). {BROKEN_ARRAY_ADVICE}"
                raise UserError(f"{name}, record {number}: {problem}") from None
            yield f"{name}, record {number}", value
            number += 1
            position = end
        text = text[position:]
        min_characters = 2 * len(text)
    if is_array_open:
        raise UserError(f"{name}: is not JSON (its array has no end). {BROKEN_ARRAY_ADVICE}")


def _read_lines(file: BinaryIO, source: Source, reader: Reader, notes: Notes) -> Lines:
    """Yield each line of a file, or why it is not text. Raises UserError for one too long."""
    for number in itertools.count(1):
        line = file.readline(MAX_RECORD_BYTES + 1)
        if not line:
            return
        if len(line) > MAX_RECORD_BYTES:
            raise UserError(f"{source.name}, line {number}: {TOO_LONG_MESSAGE}")
        for part in line.splitlines(keepends=True):  # CR ends one, too
            try:
                yield decode_utf8(part, reader, notes, number == 1)
            except UserError as error:
                yield error


def _read_head(lines: Lines) -> list[str | UserError]:
    """Return the lines up to the first that is not blank; for an empty file, an empty line."""
    head: list[str | UserError] = []
    for line in lines:
        head.append(line)
        if isinstance(line, UserError) or line.strip():
            break
    return head or [""]


def read_csv(source: Source, reader: Reader, notes: Notes) -> Records:
    """Yield a record for each row below the first, which names the columns."""
    csv.field_size_limit(MAX_RECORD_BYTES)
    with open_text(source, reader, notes) as file:
        lines = _read_lines(file, source, reader, notes)
        head = _read_head(lines)
        match = re.fullmatch(r'"?sep=(.)"?\s*', str(head[-1]), re.IGNORECASE)
        if match:  # Excel's first line
            head = ["\n", *_read_head(lines)]
        header = head[-1] if isinstance(head[-1], str) else ""
        separator = match[1] if match else _find_csv_separator(header, source, reader)
        if separator != ",":
            notes[f"files with columns separated by {separator!r}"] += 1
        num_tabs = header.count("\t") if source.kind == ".tsv" and separator == "\t" else None
        names: list[str] = []
        for number, row in _read_rows(itertools.chain(head, lines), separator, num_tabs):
            location = f"{source.name}, line {number}"
            if isinstance(row, UserError):
                yield location, row
            elif row and not names:
                names = _check_header(row, location)
            elif row and (len(row) < len(names) or any(row[len(names) :])):  # may end with ","
                yield location, UserError(f"must have {len(names)} values (got {len(row)}).")
            elif row:
                yield location, dict(zip(names, row, strict=False))


def _read_rows(
    lines: Lines, separator: str, num_tabs: int | None
) -> Iterator[tuple[int, list[str] | UserError]]:
    """Yield the number of each row's last line, and its values; a row may have several lines.

    With ``num_tabs``, that of the header, each line is a row.
    """
    problems: list[UserError] = []  # of the lines of a row

    def make_usable(line: str | UserError) -> str:
        if isinstance(line, UserError):
            problems.append(line)
            return "\n"
        return line if num_tabs is None else _quote_lone_quotes(line, num_tabs)

    rows = csv.reader(map(make_usable, lines), delimiter=separator, strict=True)
    while True:
        first_line = rows.line_num + 1
        problems.clear()
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield first_line, UserError(f"is not CSV ({error}). Check its quotes.")
            continue
        if row is None:
            return
        yield rows.line_num, problems[0] if problems else row


def _quote_lone_quotes(line: str, num_tabs: int) -> str:
    """Quote values whose quotes are text, so that each line of a table with tabs is a row."""
    inner = '[^"]' if line.count("\t") > num_tabs else '[^"\t]'  # between quotes may be tabs
    # A quote first, then what is before it: regular expressions find a first character quickly.
    lone = rf'"(?<![^\t]")(?!{inner}*(?:""{inner}*)*"(?:[\t\r\n]|$))[^\t\r\n]*'
    return re.sub(lone, lambda match: '"' + match[0].replace('"', '""') + '"', line)


def _check_header(row: list[str], location: str) -> list[str]:
    """Return the names of columns. Raises UserError for a name that occurs twice."""
    while row[1:] and not row[-1]:  # separators at the end
        row = row[:-1]
    for name in row:
        if row.count(name) > 1:
            raise UserError(f"{location}: has two columns of one name (got {name!r}). Rename one.")
    return row


def _find_csv_separator(header: str, source: Source, reader: Reader) -> str:
    """Return the separator that yields the reader's field, else the default, else most columns."""
    default = "\t" if source.kind == ".tsv" else ","
    names = {
        separator: next(csv.reader(header.splitlines(), delimiter=separator), [])
        for separator in default + ",;\t|"
    }
    for separator in names:
        if reader.field in names[separator] and not reader.examples:
            return separator
    if len(names[default]) > 1:
        return default
    return max(names, key=lambda separator: len(names[separator]))


def read_separated(source: Source, reader: Reader, notes: Notes) -> Records:
    """Yield the nonempty documents between separators, without line ends around them."""
    with open_text(source, reader, notes) as file:
        for number, data in enumerate(_split_at(file, reader.separator), 1):
            location = f"{source.name}, document {number}"
            try:
                if len(data) > MAX_RECORD_BYTES:
                    raise UserError(TOO_LONG_MESSAGE)
                text = decode_utf8(data, reader, notes, number == 1).strip("\r\n")
            except UserError as error:
                raise UserError(f"{location}: {error}") from None
            if text:
                yield location, {reader.field: text}
    if number == 1:
        notes[f"files without the separator {reader.separator!r}"] += 1


def _split_at(file: BinaryIO, separator: str) -> Iterator[bytes]:
    """Yield the bytes between separators, up to the first of more than MAX_RECORD_BYTES.

    LF in the separator is any line end.
    """
    buffer = bytearray()
    separator_bytes = separator.encode()
    pattern = re.compile(re.escape(separator_bytes).replace(b"\\\n", b"(?:\r\n?|\n)"))
    for block in iter(partial(file.read, sources.BLOCK_BYTES), b""):
        search_start = max(0, len(buffer) - 2 * len(separator_bytes))
        buffer += block
        match = pattern.search(buffer, search_start)
        while match:
            yield bytes(buffer[: match.start()])
            del buffer[: match.end()]
            match = pattern.search(buffer)
        if len(buffer) > MAX_RECORD_BYTES:
            break
    yield bytes(buffer)
