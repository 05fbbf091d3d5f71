"""What a person is told of a dataset."""

import json
import re
from pathlib import Path

import pytest

import prepare as command
from engine.data.summary import format_duration


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch, capsys):
    """Runs prepare.py's main in tmp_path; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def prepare(*arguments: object) -> str:
        capsys.readouterr()
        command.main([*map(str, arguments)])
        return capsys.readouterr().out

    return prepare


def line(printed: str, name: str) -> str:
    """What stands after a name, each run of spaces as one."""
    return " ".join(re.search(rf"^  {re.escape(name)} +(.*)$", printed, re.MULTILINE)[1].split())


def test_a_dataset_is_told_and_told_again(prepare, tmp_path: Path):
    texts = [f"document {i}: " + "word " * i for i in range(100)] + ["document 7: " + "word " * 7] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    printed = prepare("a.jsonl", "--tokenizer", "byte")
    assert line(printed, "documents") == "102 of which 2 exact repeats (see --deduplicate)"
    assert line(printed, "longest") == f"{len(texts[99]) + 1} tokens in one document"
    assert line(printed, "bytes per token") == f"{sum(map(len, texts)) / (sum(map(len, texts)) + 102):.2f}"
    occur = len({*"".join(texts)}) + 1
    assert f"only {occur}" not in printed and line(printed, "that occur") == f"{occur} {occur / 257:.0%}"
    for split in ("train", "val"):
        assert re.search(rf"  From the middle of {split}:\n    .*word word", printed)
    outlook = line(printed, "a default run")
    assert re.fullmatch(r"[0-9.,]+ epochs in 1,200 steps, about [0-9]+ (seconds|minutes) .*", outlook)
    again = prepare("--show", "data/a")
    told = printed[: printed.index("  a default run")]
    assert again.startswith(told) and "  a default run" in again and "python train.py" not in again


def test_a_vocabulary_that_is_too_large_is_worth_a_line(prepare, tiktoken_cache, tmp_path: Path):
    (tmp_path / "a.txt").write_text("a few words, and the same again\n" * 20)
    printed = prepare("a.txt", "--tokenizer", "gpt2")
    assert "  only 10, 0%, of its tokens occur: --tokenizer bpe makes a smaller one, which trains faster\n" in printed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--show", "nowhere"), "^nowhere holds no dataset; make it with: python prepare.py INPUT --out nowhere"),
        (("--show", "a", "--force"), "^--show takes a dataset and nothing else"),
    ],
)
def test_what_can_not_be_shown(arguments: tuple[str, ...], message: str, prepare):
    with pytest.raises(ValueError, match=message):
        prepare(*arguments)


@pytest.mark.parametrize(
    "seconds, text",
    [(0.4, "0 seconds"), (99, "99 seconds"), (150, "2 minutes"), (9000, "2 hours"), (9e5, "10 days")],
)
def test_durations_are_told_as_a_person_does(seconds: float, text: str):
    assert format_duration(seconds) == text
