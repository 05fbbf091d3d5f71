"""examples/pairs.py: its files are those that the guide names, and existing files stay."""

import re
import shlex
from pathlib import Path

from helpers import ROOT

from engine.core.settings import parse
from engine.data.dataset import open_dataset
from examples import pairs
from prepare import PrepareConfig, prepare


def test_every_input_of_the_guide_is_written_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pairs, "NUM_CHATS", 100)
    Path("book.txt").write_text("mine")
    pairs.main([])
    assert Path("book.txt").read_text() == "mine"
    Path("book.txt").unlink()
    pairs.main([])
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    inputs = set(re.findall(r"(?<!--out )\b(\w+\.(?:txt|jsonl))\b", guide))
    outputs = {"completions.jsonl", "answers.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == inputs - outputs
    assert "pairs.jsonl" in inputs and '"What is a king?"' in Path("pairs.jsonl").read_text()
    (flags,) = re.findall(r"prepare.py (pairs.jsonl .*) \\\n +--tokenizer", guide)
    out, _ = prepare(parse(PrepareConfig, shlex.split(flags)))
    assert open_dataset(out).manifest["statistics"]["notes"] == {}
    assert prepare(PrepareConfig(("chats.jsonl",), chat=True, tokenizer="byte"))[1]
