"""Write the files that docs/guide.md names: text, pairs, chats, prompts and questions.

python -m examples.pairs
"""

import random
from dataclasses import dataclass
from pathlib import Path

from engine.core.cli import run_command
from engine.core.files import atomic_write
from engine.core.settings import parse
from examples.dates import PROJECT_DIRECTORY, generate_chat, to_lines

NUM_CHATS = 2000
NUM_QUESTIONS = 20
QUESTION_FORMS = ("What is a {}?", "Tell me: what is a {}?", "Do you know what a {} is?", "A {}?")
ANSWER_LINES = """\
king: A man who wears the crown.
queen: A woman who wears the crown.
baker: Someone who makes bread.
sailor: Someone who works on a ship.
farmer: Someone who grows food.
teacher: Someone who helps others learn.
castle: A strong house of stone.
garden: A place where flowers grow.
clock: A thing that shows the time.
"""


@dataclass(frozen=True)
class PairsConfig:
    """Write the files that docs/guide.md names to the current folder; existing ones are kept."""


def main(arguments: list[str] | None = None) -> None:
    """Write each file that does not exist."""
    parse(PairsConfig, arguments)
    draw = random.Random(1)
    pages = sorted(PROJECT_DIRECTORY.glob("docs/*.md"))
    answers = [line.split(": ") for line in ANSWER_LINES.splitlines()]
    chats = [generate_chat(draw) for _ in range(NUM_CHATS + NUM_QUESTIONS)]
    pairs = []
    for noun, answer in answers:
        pairs += [{"question": form.format(noun), "answer": answer} for form in QUESTION_FORMS]
    contents = {
        "book.txt": "".join(page.read_text(encoding="utf-8") for page in pages),
        "opening.txt": "It was",
        "pairs.jsonl": to_lines(pairs),
        "chats.jsonl": to_lines({"messages": chat} for chat in chats[:NUM_CHATS]),
        "questions.jsonl": to_lines({"messages": chat[:-1]} for chat in chats[NUM_CHATS:]),
        "prompts.jsonl": to_lines({"prompt": f"A {noun} is"} for noun, _ in answers),
    }
    for name, content in contents.items():
        if not Path(name).exists():
            atomic_write(Path(name), content.encode())
            print(name)


if __name__ == "__main__":
    run_command(main)
