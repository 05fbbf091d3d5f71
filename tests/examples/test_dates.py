"""examples/dates.py: its examples are right, and one command does all that it promises."""

import datetime
import importlib
import random
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import read_lines

from engine.data.chats.examples import parse_chat
from examples import dates

PARSED_FORMATS = [
    *("%d %B %Y", "%B %d, %Y", "%b %d, %Y", "the %d of %B %Y", "%A, %d %b %Y"),
    *("%d.%m.%Y", "%d/%m/%Y", "%Y, %B %d", "%a %b %d %Y", "%d-%b-%Y"),
]


def test_every_format_is_of_its_date():
    draw = random.Random(0)
    for write, parsed_format in zip(dates.DATE_FORMATS, PARSED_FORMATS, strict=True):
        for day in (draw.randint(dates.FIRST_DAY, dates.LAST_DAY) for _ in range(50)):
            date = datetime.date.fromordinal(day)
            text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", write(date))
            assert datetime.datetime.strptime(text, parsed_format).date() == date
    expected = ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "31st"]
    assert [dates.ordinal(int(re.sub(r"\D", "", text))) for text in expected] == expected


def test_answers_in_chats_are_right():
    draw, answered = random.Random(0), set()
    for _ in range(300):
        (turns, _), name = parse_chat({"messages": dates.generate_chat(draw)}), None
        assert [role for role, _ in turns] == ["user", "assistant"] * (len(turns) // 2)
        for (_, question), (_, answer) in zip(turns[::2], turns[1::2], strict=True):
            if match := re.fullmatch(r"(?:My name is|I am|Call me) (\w+)\.", question):
                name = match[1]
            if match := re.fullmatch(r"What is (\d+) plus (\d+)\?", question):
                assert answer == f"It is {int(match[1]) + int(match[2])}."
            if question == "What is my name?":
                assert answer == (f"Your name is {name}." if name else "I do not know that yet.")
                answered.add(bool(name))
        assert turns[-1][1] == (f"Goodbye, {name}!" if name else "Goodbye!")
    assert answered == {True, False}


@pytest.fixture
def run(tmp_path: Path, monkeypatch, capsys) -> Callable[..., str]:
    """Runs dates.py in tmp_path, its scripts in this process; returns what they print."""

    def call(script: str, *arguments: object) -> None:
        importlib.import_module(script.removesuffix(".py")).main([*map(str, arguments)])

    def run(*arguments: object) -> str:
        dates.main([*map(str, arguments)])
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dates, "run_script", call)
    return run


def test_ctrl_c_lets_the_script_save_and_says_how_to_continue(capfd, monkeypatch):
    process = SimpleNamespace(returncode=130)
    interrupt = partial(signal.raise_signal, signal.SIGINT)  # a terminal sends it to both
    monkeypatch.setattr("subprocess.run", lambda command: interrupt() or process)
    with pytest.raises(SystemExit, match="130"):
        dates.run_script("train.py")
    assert "run the example again" in capfd.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_dates_are_learned_and_measured_by_one_command(run, tmp_path: Path):
    output = run("dates", "--examples", 300, "--test", 30, "--steps", 1)
    pairs = read_lines(tmp_path / "data" / "dates-pairs.jsonl")
    answers = read_lines(tmp_path / "data" / "dates-answers.jsonl")
    assert len(pairs) == 300 and len(answers) == 30
    assert not {pair["completion"] for pair in pairs} & {answer["answer"] for answer in answers}
    num_right = sum(answer["completion"] == answer["answer"] for answer in answers)
    assert f"{num_right} of 30 answers are right\n" in output


def test_a_chat_is_learned_by_one_command(run):
    assert "sample.py out/chat --chat" in run("chat", "--examples", 100, "--steps", 1)
