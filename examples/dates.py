"""Two tasks that a small model learns here in minutes, from examples that this file makes up.

python -m examples.dates dates   a date in any of many forms → its ISO form: makes examples, trains, measures
python -m examples.dates chat    a chat about you and small sums: makes chats, trains, and prints how to talk
"""

import datetime
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from engine.core.cli import run_command
from engine.core.files import write_whole
from engine.core.settings import parse

HERE = Path(__file__).resolve().parents[1]
DAYS = (datetime.date(1900, 1, 1).toordinal(), datetime.date(2099, 12, 31).toordinal())
SHAPE = "--num-layers 3 --num-heads 4 --d-model 128 --context-length 64 --batch-size 128 --learning-rate 0.01"
SHAPE += " --eval-tokens 0"
CHAT_SHAPE = "--num-layers 4 --num-heads 4 --d-model 192 --context-length 256 --batch-size 32 --learning-rate 0.01"
NAMES = "Ada Alan Grace Linus Margaret Dennis Barbara Ken Edsger Donald Frances Tim Radia John Katherine"
TOWNS = "Paris Lima Oslo Cairo Kyoto Delhi Quito Accra Rome Hanoi Perth Turin Leeds Izmir Busan Osaka Basel"
ANIMALS = "cat dog horse owl fox whale tiger rabbit falcon otter turtle wolf goat crow bear"


@dataclass(frozen=True)
class DemoConfig:
    """Make examples of a task, train a model on them, and show what it learned."""

    task: tyro.conf.Positional[Literal["dates", "chat"]]  # What to learn.
    out: Path = Path("out")  # The folder for the run; the examples go to data/.
    data: Path = Path("data")  # The folder for examples and dataset.
    examples: Annotated[int, "at least 100"] = 40_000  # How many to train on.
    steps: Annotated[int | None, "at least 1"] = None  # Optimizer steps; None: 600 for dates, 400 for a chat.
    test: Annotated[int, "at least 1, at most 70000"] = 2000  # How many unseen dates to measure on.
    seed: Annotated[int, "at least 0"] = 1  # Of the examples.


def main(arguments: list[str] | None = None) -> None:
    """Learn the task that the command line names."""
    config = parse(DemoConfig, arguments)
    since = time.monotonic()
    (learn_dates if config.task == "dates" else learn_chat)(config)
    print(f"All of it took {time.monotonic() - since:,.0f} s.")


def learn_dates(config: DemoConfig) -> None:
    """Train on dates, and measure how many unseen ones come out right to the last character."""
    draw, data, run = random.Random(config.seed), config.data / "dates", config.out / "dates"
    days = draw.sample(range(*DAYS), DAYS[1] - DAYS[0])
    unseen, seen = days[: config.test], days[config.test :]  # in no form are the former trained on
    pairs = (pair(draw, draw.choice(seen)) for _ in range(config.examples))
    files = {name: config.data / f"dates-{name}.jsonl" for name in ("pairs", "questions", "answers")}
    write_lines(files["pairs"], ({"prompt": text, "completion": iso} for text, iso in pairs))
    write_lines(
        files["questions"], ({"prompt": text, "expected": iso} for text, iso in (pair(draw, d) for d in unseen))
    )
    fields = ["--prompt-field", "prompt", "--completion-field", "completion"]
    run_script("prepare.py", files["pairs"], "--out", data, "--tokenizer", "char", *fields, "--force")
    run_script("train.py", "--data", data, "--out", run, "--steps", config.steps or 600, *SHAPE.split())
    files["answers"].unlink(missing_ok=True)
    asked = ["--prompts-file", files["questions"], "--out", files["answers"]]
    run_script("sample.py", run, *asked, "--temperature", 0, "--max-new-tokens", 16)
    answers = [json.loads(line) for line in files["answers"].read_text(encoding="utf-8").splitlines()]
    wrong = [answer for answer in answers if answer["completion"] != answer["expected"]]
    for answer in wrong[:5]:
        print(f"wrong: {answer['prompt'].strip()} → {answer['completion']}, not {answer['expected']}")
    right = len(answers) - len(wrong)
    print(f"{right:,} of {len(answers):,} unseen dates are right to the last character: {right / len(answers):.2%}")


def learn_chat(config: DemoConfig) -> None:
    """Train on chats, from nothing."""
    draw, data, run = random.Random(config.seed), config.data / "chat", config.out / "chat"
    write_lines(config.data / "chats.jsonl", ({"messages": chat(draw)} for _ in range(config.examples)))
    chats = [config.data / "chats.jsonl", "--chat"]
    run_script("prepare.py", *chats, "--out", data, "--tokenizer", "bpe", "--vocab-size", 1024, "--force")
    run_script("train.py", "--data", data, "--out", run, "--steps", config.steps or 400, *CHAT_SHAPE.split())
    print(f"Talk to it: python sample.py {run} --chat --max-new-tokens 30")


def run_script(script: str, *arguments: object) -> None:
    """Run one of the project's commands, shown as it would be typed; its failure ends this one too."""
    given = [str(argument) for argument in arguments]
    print(f"$ python {script} {shlex.join(given)}", flush=True)
    done = subprocess.run([sys.executable, HERE / script, *given])
    if done.returncode:
        sys.exit(done.returncode)


def write_lines(path: Path, records: Iterator[dict]) -> None:
    """Write records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode())


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, …"""
    ending = "th" if 10 <= number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


FORMS: list[Callable[[datetime.date], str]] = [
    lambda d: f"{d.day} {d:%B} {d.year}",
    lambda d: f"{d:%B} {d.day}, {d.year}",
    lambda d: f"{d:%b} {ordinal(d.day)}, {d.year}",
    lambda d: f"the {ordinal(d.day)} of {d:%B} {d.year}",
    lambda d: f"{d:%A}, {d.day} {d:%b} {d.year}",
    lambda d: f"{d.day}.{d.month}.{d.year}",
    lambda d: f"{d:%d/%m/%Y}",
    lambda d: f"{d.year}, {d:%B} {d.day}",
    lambda d: f"{d:%a} {d:%b} {d:%d} {d.year}",
    lambda d: f"{d:%d}-{d:%b}-{d.year}".upper(),
]


def pair(draw: random.Random, day: int) -> tuple[str, str]:
    """A date in one of many forms, and its ISO form.

    A new line ends the prompt: without, "1973, July 3" and the "1" that is to follow could be the 31st of July.
    """
    date = datetime.date.fromordinal(day)
    return f"{draw.choice(FORMS)(date)}\n", date.isoformat()


def chat(draw: random.Random) -> list[dict[str, str]]:
    """A chat of some turns, in which what was said before matters."""
    name, town, animal = (draw.choice(words.split()) for words in (NAMES, TOWNS, ANIMALS))
    told = [
        (f"{draw.choice(('My name is', 'I am', 'Call me'))} {name}.", f"Nice to meet you, {name}!"),
        (f"I live in {town}.", f"{town} is a fine place to live."),
        (f"My favourite animal is the {animal}.", f"I like the {animal} too."),
    ]
    asked = [("What is my name?", f"Your name is {name}."), ("Where do I live?", f"You live in {town}.")]
    asked += [("Which animal do I like?", f"You like the {animal}.")]
    turns = [("Hello!", "Hello! What shall we talk about?")] if draw.random() < 0.5 else []
    for _ in range(draw.randint(2, 9)):
        fact, a, b = draw.randrange(3), draw.randint(0, 20), draw.randint(0, 20)
        question, answer = asked[fact]
        known = told[fact] in turns
        asking = [
            (question, answer if known else "You have not told me."),
            (f"What is {a} plus {b}?", f"It is {a + b}."),
        ]
        turns.append(draw.choice(asking if known else [*asking, told[fact], told[fact]]))
    turns.append(("Goodbye!", f"Goodbye, {name}!" if told[0] in turns else "Goodbye!"))
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]


if __name__ == "__main__":
    run_command(main)
