"""Files as people have them are read right, or refused in one line: the tables of wild/*.toml.

Each table is a case: ``file`` or ``files`` in wild/, ``arguments`` of prepare.py, and either
``documents`` (texts; or lists of turns) or ``error``, a regex of the line. ``warnings`` is a regex
of the command's output.
"""

import itertools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import prepare
from engine.core.errors import UserError
from engine.core.settings import parse
from engine.data.inputs.documents import Corpus

FOLDER = Path(__file__).parent / "wild"
CASES = {
    f"{table.stem}: {name}": case
    for table in sorted(FOLDER.glob("*.toml"))
    for name, case in tomllib.loads(table.read_text(encoding="utf-8")).items()
}


def read_documents(arguments: list[str], spool: Path) -> list[Any]:
    """Return the documents that the command would learn, in order."""
    config = parse(prepare.PrepareConfig, arguments)
    sources, _ = prepare.list_sources(config, spool)
    reader = prepare.make_reader(config, None)
    prepare.check_reader(config, reader, sources)
    corpus = Corpus(sources, 0.1, (), reader)
    documents = [""]
    for text in itertools.chain(*(unit.texts() for unit in corpus.units)):
        documents[-1] += text.text
        if text.ends_document:
            documents.append("")
    assert documents.pop() == ""
    return [*map(json.loads, documents)] if corpus.rule.has_examples else documents


@pytest.mark.parametrize("name", CASES)
def test_a_wild_file_is_read_right_or_refused(name: str, tmp_path: Path, monkeypatch, capsys):
    case = CASES[name]
    inputs = [str(FOLDER / file) for file in case.get("files") or [case["file"]]]
    arguments = [*inputs, "--tokenizer", "byte", *case.get("arguments", [])]
    monkeypatch.chdir(tmp_path)
    if "error" in case:
        with pytest.raises(UserError) as error:
            prepare.main(arguments)
        line = str(error.value)
        assert re.search(case["error"], line) and "\n" not in line, line
        assert not [*tmp_path.rglob("*.*")]
        return
    prepare.main(arguments)
    output = "\n".join(capsys.readouterr())
    assert re.search(case.get("warnings", ""), output), output
    assert read_documents(arguments, tmp_path) == case["documents"]
    prepare.main(arguments)
    assert "up to date" in capsys.readouterr().out
