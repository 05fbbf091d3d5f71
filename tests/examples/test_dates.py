"""dates.py: what it makes up is right, and its one command does all that it says."""

import datetime
import importlib
import io
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sample
from engine.data.chat import chat_of
from examples import dates

READ = ["%d %B %Y", "%B %d, %Y", "%b %d, %Y", "the %d of %B %Y", "%A, %d %b %Y", "%d.%m.%Y", "%d/%m/%Y"]
READ += ["%Y, %B %d", "%a %b %d %Y", "%d-%b-%Y"]  # how datetime reads each form


def test_every_form_is_of_its_date():
    draw = random.Random(0)
    for form, how in zip(dates.FORMS, READ, strict=True):
        for date in (datetime.date.fromordinal(draw.randint(*dates.DAYS)) for _ in range(300)):
            text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", form(date))
            assert datetime.datetime.strptime(text, how).date() == date
    assert [dates.ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 31)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "31st"]
    )


def test_answers_in_chats_are_right():
    draw, known = random.Random(0), set()
    for _ in range(300):
        turns, name = chat_of({"messages": dates.chat(draw)}), None
        assert [role for role, _ in turns] == ["user", "assistant"] * (len(turns) // 2)
        for (_, question), (_, answer) in zip(turns[::2], turns[1::2], strict=True):
            if told := re.fullmatch(r"(?:My name is|I am|Call me) (\w+)\.", question):
                name = told[1]
            if sums := re.fullmatch(r"What is (\d+) plus (\d+)\?", question):
                assert answer == f"It is {int(sums[1]) + int(sums[2])}."
            if question == "What is my name?":
                assert answer == (f"Your name is {name}." if name else "You have not told me.")
                known.add(bool(name))
        assert turns[-1][1] == (f"Goodbye, {name}!" if name else "Goodbye!")
    assert known == {True, False}


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys) -> Callable[..., str]:
    """Runs dates.py in tmp_path, and the scripts that it calls in this process; returns what they print."""

    def called(script: str, *given: object) -> None:
        importlib.import_module(script.removesuffix(".py")).main([*map(str, given)])

    def run(*arguments: object) -> str:
        dates.main([*map(str, arguments)])
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dates, "run_script", called)
    return run


def test_a_script_is_run_as_it_is_shown(capfd):
    dates.run_script("prepare.py", "--help")
    assert capfd.readouterr().out.startswith("$ python prepare.py --help\n")
    with pytest.raises(SystemExit, match="1"):
        dates.run_script("prepare.py", "bok.txt")


def test_dates_are_learned_and_measured_by_one_command(run, tmp_path: Path):
    said = run("dates", "--examples", 300, "--test", 30, "--steps", 2)
    assert re.search(r"^\d+ of 30 unseen dates are right to the last character: \d+\.\d\d%$", said, re.MULTILINE)
    pairs, answers = (
        [json.loads(line) for line in (tmp_path / "data" / f"dates-{name}.jsonl").read_text().splitlines()]
        for name in ("pairs", "answers")
    )
    assert len(pairs) == 300 and len(answers) == 30
    assert not {pair["completion"] for pair in pairs} & {answer["expected"] for answer in answers}
    right = sum(answer["completion"] == answer["expected"] for answer in answers)
    assert f"{right} of 30" in said


def test_a_chat_is_learned_by_one_command(run, monkeypatch, capsys):
    said = run("chat", "--examples", 200, "--steps", 1)
    assert "Talk to it: python sample.py out/chat --chat --max-new-tokens 30" in said
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello!\n"), "utf-8"))
    sample.main(["out/chat", "--chat", "--max-new-tokens", "5"])
    assert capsys.readouterr().out
