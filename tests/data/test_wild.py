"""Files as people have them are read right, or refused in one line: the tables of wild/*.toml.

A row has a file, or several, in wild/ with options of prepare.py; the documents (texts, or lists
of turns), or a regex of the error; and perhaps a regex of the output. A file that is not in wild/
is a pair of such a command and its content, whose characters are bytes.
"""

import itertools
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import prepare
from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.documents.corpus import Corpus
from engine.data.sources import source as sources
from engine.data.sources.notes import Notes

FOLDER = Path(__file__).parent / "wild"
FILES = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*")}
TABLES = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.toml"))]
ROWS = [row for table in TABLES for rows in table.values() for row in rows]


def read_documents(arguments: list[str], spool: Path) -> list[Any]:
    """Return the documents that the command would learn, in order."""
    config = parse(prepare.PrepareConfig, arguments)
    reader = prepare.make_reader(config, None)
    inputs, _ = prepare.list_sources(config, reader, spool, Notes())
    prepare.check_reader(config, reader, inputs)
    corpus = Corpus(inputs, 0.1, (), reader)
    documents = [""]
    for document in itertools.chain(*(unit.documents() for unit in corpus.units)):
        documents[-1] += document.text
        if document.ends_document:
            documents.append("")
    assert documents.pop() == ""
    return [*map(json.loads, documents)] if corpus.rule.has_examples else documents


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row[0]))
def test_a_wild_file_is_read_right_or_refused(row: list[Any], tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 100)
    command, expected, *output_pattern = row
    if isinstance(command, list):
        command, content = command
        (tmp_path / command.split()[0]).write_bytes(content.encode("latin-1"))
    words = shlex.split(command)
    arguments = [str(FOLDER / word) if word in FILES else word for word in words]
    arguments += ["--tokenizer", "byte"]
    if isinstance(expected, list):
        if output_pattern:
            prepare.main(arguments)
            output = "\n".join(capsys.readouterr())
            assert re.search(*output_pattern, output), output
        assert read_documents(arguments, tmp_path) == expected
        return
    with pytest.raises(UserError) as error:
        prepare.main(arguments)
    line = str(error.value)
    assert re.search(expected, line) and "\n" not in line, line
    assert not [*(tmp_path / "data").rglob("*.*")]
