"""A record → a document: the text of a field or of a file, or the turns of an example."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from engine.core.errors import UserError, wrap_library_errors
from engine.data.chats.chat_template import map_texts
from engine.data.records import reader as records
from engine.data.records.reader import read_records
from engine.data.records.text import DEFAULT_READER, Reader, to_text
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source

FIELD_FLAGS = "--field (pairs: --prompt-field, chats: --chat)"
ANSWER_ROLES = ("assistant", "completion")  # of the turns of examples


class Document(NamedTuple):
    """A document, a piece of a large one, or the turns of an example as JSON."""

    text: str
    offset: int = 0  # of the piece's first byte in the document
    document_bytes: int | None = None  # in UTF-8; None if this is the complete document
    piece_bytes: int | None = None  # in the file; None for a complete document
    prompt: str = ""  # of an example: its turns before the first answer, without white space
    source: str = ""  # the title of its source

    @property
    def ends_document(self) -> bool:
        """Whether the document ends with this piece."""
        return self.document_bytes in (None, self.offset + (self.piece_bytes or 0))


def read_documents(
    source: Source,
    index: int = 0,
    count: int = 1,
    notes: Notes | None = None,
    reader: Reader = DEFAULT_READER,
) -> Iterator[Document]:
    """Yield the documents of a source, or of part ``index`` of ``count`` (see count_parts).

    ``notes`` counts remarks on the source for the user. Raises UserError naming the file and the
    unusable byte, line or row.
    """
    notes = Notes() if notes is None else notes
    title = source.title
    make_document = _make_example if reader.examples else _make_text
    for number, record in enumerate(read_records(source, reader, notes, index, count)):
        location, value, offset, text_bytes, piece_bytes = record
        try:
            if isinstance(value, UserError):
                raise value
            if isinstance(value, str):
                yield Document(value, offset, text_bytes, piece_bytes, source=title)
            else:
                yield from make_document(value, reader, notes, title)
        except UserError as error:
            if reader.skip_bad_rows:
                reason = re.sub(r" \(.*|\. .*|\.$", "", str(error))  # no details of this row
                reason = re.sub(r"(?<![\w-])[0-9]+", "N", reason)
                notes.add(f"rows left out: {reason}")
                continue
            message = f"{location}: {str(error).removesuffix('.')}."
            # If the fields of the first record do not fit, those of the others will not either.
            if "--" not in message and (number > 0 or isinstance(value, UserError)):
                message += " --skip-bad-rows leaves such rows out."
            raise UserError(message) from None


def _make_text(
    record: dict[str, Any], reader: Reader, notes: Notes, title: str
) -> Iterator[Document]:
    """Yield the text in a record's field, or the pieces of a large one."""
    owner, name = find_field(record, reader.field)
    text = to_text(owner.get(name))
    if not isinstance(text, str):
        raise UserError(f"field {describe_field(record, reader.field, FIELD_FLAGS)}")
    if not text or text.isspace():
        notes.add("documents without text")
    data = text.encode()
    if len(data) <= records.LARGE_TEXT_BYTES:
        yield Document(text, source=title)
        return
    for offset, piece in records.split_text(io.BytesIO(data), len(data)):
        yield Document(piece.decode(), offset, len(data), len(piece), source=title)


def _make_example(
    record: dict[str, Any], reader: Reader, notes: Notes, title: str
) -> Iterator[Document]:
    """Yield the turns of an example as JSON."""
    assert reader.examples
    with wrap_library_errors("is nested too deeply", RecursionError):
        parsed_turns, remarks = reader.examples.parse(record)
        turns = [[*turn] for turn in parsed_turns]
    with wrap_library_errors("tools and their calls must be JSON", RecursionError, TypeError):
        content = json.dumps(turns, ensure_ascii=False)
    for remark in remarks:
        notes.add(remark)
    answers = (index for index, turn in enumerate(turns) if turn[0] in ANSWER_ROLES)
    before = turns[: next(answers, 0)] or turns
    prompt = json.dumps(map_texts(before, lambda text: "".join(text.split())))
    yield Document(content, prompt=prompt, source=title)


def find_field(record: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the object that has a field, whose name may be dotted, and its name there."""
    head, _, rest = name.partition(".")
    if name not in record and rest and isinstance(record.get(head), dict):
        return find_field(record[head], rest)
    return record, name


def list_names(record: dict[str, Any]) -> list[str]:
    """Return the names of the fields of a record, and the dotted ones of objects in it."""
    names = []
    for name, value in record.items():
        inner = list_names(value) if isinstance(value, dict) else []
        names += [f"{name}.{key}" for key in inner] or [name]
    return names


def describe_field(record: dict[str, Any], field: str, flag: str, kind: str = "text") -> str:
    """Return why a field's value is not of a kind, and which fields there are."""
    owner, key = find_field(record, field)
    problem = f"must be {kind} (got {repr(owner[key])[:30]})" if key in owner else "is missing"
    skip = ", or leave such rows out with --skip-bad-rows" if key in owner else ""
    return f"{field!r} {problem}. Choose one with {flag} from the fields {list_names(record)}{skip}"
