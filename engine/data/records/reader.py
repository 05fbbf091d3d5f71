"""The kinds of sources, each with its reader; and which files of a folder are read."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from engine.core.errors import UserError
from engine.data.records.plain import read_plain, read_separated
from engine.data.records.tables import read_csv, read_json, read_table
from engine.data.records.text import Reader, Record, decode_utf8, open_text
from engine.data.sources.notes import LEFT_OUT_NOTE, Notes
from engine.data.sources.source import Source

SNIFFED_BYTES = 2**14  # of a file in a folder, to see whether it is text
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of UTF-8: not at the start of a character


def read_records(
    source: Source, reader: Reader, notes: Notes, index: int = 0, count: int = 1
) -> Iterator[Record]:
    """Yield the records of a source, or of part ``index`` of ``count``: see tables.count_parts.

    Raises UserError naming the file and the unusable byte, line or row.
    """
    if source.kind in (".parquet", "rows"):
        return read_table(source, reader, notes, index, count)
    if source.kind in (".csv", ".tsv"):
        return read_csv(source, reader, notes)
    if source.kind == "text":
        return (read_separated if reader.separator else read_plain)(source, reader, notes)
    return read_json(source, reader, notes)


def choose_sources(
    sources: Sequence[Source], reader: Reader, notes: Notes, has_globs: bool = False
) -> list[Source]:
    """Leave out of each folder what is not text, and of records and plain text what is less.

    With globs, both are taken. Raises UserError if nothing remains.
    """
    chosen: list[Source] = []
    for folder, group in itertools.groupby(sources, key=lambda source: source.folder):
        files = [*group]
        if folder:
            problems = {source: _find_problem(source, reader) for source in files}
            names = [source.title for source in files if problems[source]]
            files = [source for source in files if not problems[source]]
            if not files:
                raise next(filter(None, problems.values()))
            notes.add(LEFT_OUT_NOTE, len(names), *names)
            files = files if has_globs else _choose_kind(files, reader, notes)
            endings = Counter(source.suffix or "without ending" for source in files)
            listing = ", ".join(f"{count:,} {name}" for name, count in endings.most_common())
            notes.add(f"files read in {PurePath(folder).name}: {listing}", len(files))
        chosen += files
    return chosen


def _find_problem(source: Source, reader: Reader) -> UserError | None:
    """Return why a local file does not start with text in the reader's encoding, if so."""
    if source.kind == ".parquet" or not isinstance(source.path, Path):
        return None
    try:
        with open_text(source, reader, Notes()) as file:
            head = file.read(SNIFFED_BYTES).rstrip(CONTINUATION_BYTES)[:-1]
    except UserError as error:
        if "git lfs" in str(error):  # the texts themselves may be missing
            raise
        return error
    try:
        decode_utf8(head, reader, Notes(), is_head=True)
    except UserError as error:
        return UserError(f"{source.name}: {error}")
    return None


def _choose_kind(files: list[Source], reader: Reader, notes: Notes) -> list[Source]:
    """Return plain text or records: what the reader's flags need, else what has more bytes."""
    text = [source for source in files if source.kind == "text"]
    records = [source for source in files if source.kind != "text"]
    if not text or not records:
        return files
    has_flags = reader.examples is not None or reader.field != "text"
    num_bytes = [sum(source.size for source in group) for group in (text, records)]
    takes_text = bool(reader.separator) or (num_bytes[0] >= num_bytes[1] and not has_flags)
    chosen, left_out = (text, records) if takes_text else (records, text)
    globs = " ".join(f"--glob '*{suffix}'" for suffix in sorted({each.suffix for each in left_out}))
    kind = "records beside plain text" if takes_text else "plain text beside records"
    note = f"files left out, {kind} ({globs} takes them)"
    notes.add(note, len(left_out), *(source.title for source in left_out))
    return chosen
