"""Two tasks that a small model learns in minutes, from examples that this file generates.

python -m examples.dates dates   dates in many forms → ISO 8601: trains, and measures accuracy
python -m examples.dates chat    a chat about you and small sums: trains, and prints how to chat
"""

import datetime
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le

from engine.core.cli import run_command, shell_command
from engine.core.files import atomic_write
from engine.core.settings import parse

PROJECT_DIRECTORY = Path(__file__).resolve().parents[1]
FIRST_DAY = datetime.date(1900, 1, 1).toordinal()
LAST_DAY = datetime.date(2099, 12, 31).toordinal()
CHAT_WORDS = (  # names, towns and animals
    "Ada Alan Grace Linus Margaret Dennis Barbara Ken Edsger Donald Frances Tim Radia John "
    "Katherine",
    "Paris Lima Oslo Cairo Kyoto Delhi Quito Accra Rome Hanoi Perth Turin Leeds Izmir Busan Osaka "
    "Basel",
    "cat dog horse owl fox whale tiger rabbit falcon otter turtle wolf goat crow bear",
)


@dataclass(frozen=True)
class ExampleConfig:
    """Generate examples of a task, train a model on them, and show what it learned."""

    task: tyro.conf.Positional[Literal["dates", "chat"]]  # What to learn.
    out: Path = Path("out")  # The folder of the run.
    data: Path = Path("data")  # The folder of the examples and the dataset.
    examples: Annotated[int, Ge(100)] = 40_000  # Training examples.
    steps: Annotated[int | None, Ge(1)] = None  # Optimizer steps; None: 600, 400 for chat.
    test: Annotated[int, Ge(1), Le(70_000)] = 2000  # Unseen dates to measure on.
    seed: Annotated[int, Ge(0)] = 1  # Of the examples.


def main(arguments: list[str] | None = None) -> None:
    """Learn the task that the command line names."""
    config = parse(ExampleConfig, arguments)
    start = time.monotonic()
    if config.task == "dates":
        learn_dates(config)
    else:
        learn_chat(config)
    print(f"Total time: {time.monotonic() - start:,.0f} s")


def learn_dates(config: ExampleConfig) -> None:
    """Train on dates, and measure how many unseen dates are converted exactly."""
    draw = random.Random(config.seed)
    days = draw.sample(range(FIRST_DAY, LAST_DAY), LAST_DAY - FIRST_DAY)
    train_days = days[config.test :]
    run = config.out / "dates"
    data = config.data / "dates"
    pairs = config.data / "dates-pairs.jsonl"
    questions = config.data / "dates-questions.jsonl"
    answers = config.data / "dates-answers.jsonl"
    examples = (date_pair(draw, draw.choice(train_days)) for _ in range(config.examples))
    write_lines(pairs, ({"prompt": text, "completion": iso} for text, iso in examples))
    tests = (date_pair(draw, day) for day in days[: config.test])
    write_lines(questions, ({"prompt": text, "answer": iso} for text, iso in tests))
    answers.unlink(missing_ok=True)

    flags = "--prompt-field prompt --completion-field completion --tokenizer char --force"
    run_script("prepare.py", pairs, "--out", data, *flags.split())
    flags = "--num-layers 3 --num-heads 4 --d-model 128 --context-length 64 --batch-size 128"
    flags += f" --learning-rate 0.01 --eval-tokens 0 --steps {config.steps or 600}"
    flags += " --score exact_match --auto-resume"
    run_script("train.py", "--data", data, "--out", run, *flags.split())
    flags = "--temperature 0 --max-new-tokens 16"
    run_script("sample.py", run, "--prompts-file", questions, "--out", answers, *flags.split())

    records = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    wrong = [record for record in records if record["completion"] != record["answer"]]
    print(f"{len(records) - len(wrong):,} of {len(records):,} answers are right")
    for record in wrong[:5]:
        print(f"wrong: {' '.join(map(repr, record.values()))}")


def learn_chat(config: ExampleConfig) -> None:
    """Train on chats, from random weights."""
    draw = random.Random(config.seed)
    chats = config.data / "chats.jsonl"
    data = config.data / "chat"
    run = config.out / "chat"
    write_lines(chats, ({"messages": generate_chat(draw)} for _ in range(config.examples)))
    flags = "--chat --tokenizer bpe --vocab-size 1024 --force"
    run_script("prepare.py", chats, "--out", data, *flags.split())
    flags = "--num-layers 4 --num-heads 4 --d-model 192 --context-length 256 --batch-size 32"
    flags += " --learning-rate 0.01 --score exact_match --auto-resume"
    flags += f" --steps {config.steps or 400}"
    run_script("train.py", "--data", data, "--out", run, *flags.split())
    command = shell_command("python", "sample.py", run, "--chat", "--max-new-tokens", 30)
    print(f"Chat with it: {command}")


def run_script(script: str, *arguments: object) -> None:
    """Print a command of this project and run it. Exits if it fails.

    Ctrl-C interrupts the command, which may save first; then this one ends.
    """
    texts = [str(argument) for argument in arguments]
    print(f"$ {shell_command('python', script, *arguments)}", flush=True)
    handler = signal.signal(signal.SIGINT, lambda number, frame: None)
    process = subprocess.run([sys.executable, PROJECT_DIRECTORY / script, *texts])
    signal.signal(signal.SIGINT, handler)
    if not 0 <= process.returncode <= 128:  # by a signal
        print("To continue with this and the other steps, run the example again.")
    if process.returncode:
        sys.exit(process.returncode)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, to_lines(records).encode())


def to_lines(records: Iterable[dict[str, Any]]) -> str:
    """Return records as JSON lines."""
    return "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)


def ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th, …"""
    is_teen = 10 <= number % 100 < 20
    return f"{number}{'th' if is_teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


DATE_FORMATS: list[Callable[[datetime.date], str]] = [
    lambda date: f"{date.day} {date:%B} {date.year}",
    lambda date: f"{date:%B} {date.day}, {date.year}",
    lambda date: f"{date:%b} {ordinal(date.day)}, {date.year}",
    lambda date: f"the {ordinal(date.day)} of {date:%B} {date.year}",
    lambda date: f"{date:%A}, {date.day} {date:%b} {date.year}",
    lambda date: f"{date.day}.{date.month}.{date.year}",
    lambda date: f"{date:%d/%m/%Y}",
    lambda date: f"{date.year}, {date:%B} {date.day}",
    lambda date: f"{date:%a} {date:%b} {date:%d} {date.year}",
    lambda date: f"{date:%d}-{date:%b}-{date.year}".upper(),
]


def date_pair(draw: random.Random, day: int) -> tuple[str, str]:
    """Return a date in a random format, and in ISO 8601.

    A newline ends the former: "1973, July 3" could continue as the 31st of July.
    """
    date = datetime.date.fromordinal(day)
    return f"{draw.choice(DATE_FORMATS)(date)}\n", date.isoformat()


def generate_chat(draw: random.Random) -> list[dict[str, str]]:
    """Generate a chat whose answers depend on earlier turns."""
    name, town, animal = (draw.choice(words.split()) for words in CHAT_WORDS)
    introduction = draw.choice(("My name is", "I am", "Call me"))
    statements = [
        (f"{introduction} {name}.", f"Nice to meet you, {name}!"),
        (f"I live in {town}.", f"{town} is a fine place to live."),
        (f"My favorite animal is the {animal}.", f"I like the {animal} too."),
    ]
    questions = [
        ("What is my name?", f"Your name is {name}."),
        ("Where do I live?", f"You live in {town}."),
        ("Which animal do I like?", f"You like the {animal}."),
    ]
    turns = [("Hello!", "Hello! What shall we talk about?")] if draw.random() < 0.5 else []
    for _ in range(draw.randint(2, 9)):
        topic = draw.randrange(3)
        a = draw.randint(0, 20)
        b = draw.randint(0, 20)
        question, answer = questions[topic]
        is_known = statements[topic] in turns
        choices = [
            (question, answer if is_known else "I do not know that yet."),
            (f"What is {a} plus {b}?", f"It is {a + b}."),
        ]
        turns.append(draw.choice(choices if is_known else choices + 2 * [statements[topic]]))
    turns.append(("Goodbye!", f"Goodbye, {name}!" if statements[0] in turns else "Goodbye!"))
    roles = ("user", "assistant")
    return [{"role": role, "content": turn[i]} for turn in turns for i, role in enumerate(roles)]


if __name__ == "__main__":
    run_command(main)
