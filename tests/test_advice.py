"""The advice in messages works: each row provokes a message, follows it, and succeeds."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from test_command_lines import COMMANDS

from engine.core.errors import UserError

TINY = "--num-layers 1 --num-heads 2 --d-model 32 --context-length 32 --batch-size 4 --device cpu"
TRAIN = f"train --steps 2 --eval-tokens 500 {TINY}"
FILES = {
    "book.txt": "the quick brown fox jumps over the lazy dog\n" * 200,
    "latin.txt": ("caf\xe9 cr\xe8me\n" * 200).encode("cp1252"),
    "mixed/notes.md": "some words of notes\n" * 300,
    "mixed/rows.jsonl": '{"text": "a row"}\n' * 9,
}
# A command that fails, and words that replace those in capitals in its advice.
ROWS = [
    "prepare latin.txt --out data/new",
    "prepare mixed --field text --out data/new",
    "prepare book.txt --val-fraction 0.1 --val mixed/notes.md --out data/new",
    "prepare book.txt --tokenizer byte --out data/book",
    "prepare book.txt --out data/new --vocabsize 300",
    f"{TRAIN} --data data/bok --out out/new",
    f"{TRAIN} --data data/book --out out/book",
    f"train --data data/book --out out/book --steps 1 --eval-tokens 500 --resume {TINY}",
    f"{TRAIN} --data data/book --out out/boook --resume",
    f"train mixed/notes.md --data data/book --out out/new --steps 2 {TINY}",
    f"train mixed/notez.md --out out/new --steps 2 {TINY}",
    "prepare boook.txt --out data/new",
    f"{TRAIN} --data data/book --out out/new --lr 0.001",
    f"{TRAIN} --data data/book --out out/new --long-examples cut",
    f"{TRAIN} --data data/book --out out/new --frozen-dtype bfloat16",
    ("train --steps 2 --eval-tokens 500 --data data/book --out out/new --lora-rank 2", "out/book"),
    f"{TRAIN} --resume --out out/bok",
    f"{TRAIN} --data data/book --resume --out out/new",
    "sample out/bok --max-new-tokens 3",
    "sample out/book --max-new-tokens 3 --beams 2 --temperature 0.5",
    ("sample out/book --max-new-tokens 3 --prompts-file prompts.jsonl", "new.jsonl"),
    "sample out/book --max-tokens 3",
    "huggingface export out/book hf/book",
    "report out/bok",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Texts, a dataset data/book, a run out/book and its export hf/book."""
    folder: Path = tmp_path_factory.mktemp("advice")
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "prompts.jsonl").write_text('{"prompt": "the"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("prepare book.txt --tokenizer bpe --vocab-size 300 --pattern gpt2 --out data/book")
        run(f"{TRAIN} --data data/book --out out/book")
        run("huggingface export out/book hf/book")
    return folder


def run(command: str) -> None:
    """Run a command of the project."""
    name, *words = shlex.split(command)
    COMMANDS[name].main(words)


def follow(words: list[str], message: str) -> list[str]:
    """Return a command with the first advice of a message: another word, or flags."""
    problem, _, advice = message.removeprefix("error: ").strip().partition(": ")
    if match := re.search(r"Did you mean (\S+?)\?", advice):
        return [match[1] if word == problem else word for word in words]
    if "Leave it out" in advice:
        first = words.index(problem)
        is_flag = [word.startswith("--") for word in words[first + 1 :]]
        return words[:first] + words[first + 1 + [*is_flag, True].index(True) :]
    flags = advice[advice.index("--") :]
    return [*words, *shlex.split(re.split(r" instead| or |, | to | \(|\.(?: |$)", flags)[0])]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_advice_works(row: str | tuple[str, str], folder: Path, monkeypatch, capsys):
    command, *values = [row] if isinstance(row, str) else row
    monkeypatch.chdir(shutil.copytree(folder, folder.with_name(f"{folder.name}-copy")))
    try:
        with pytest.raises((UserError, SystemExit)) as error:
            run(command)
        printed = capsys.readouterr().err
        message = str(error.value) if isinstance(error.value, UserError) else printed
        for value in values:
            message = re.sub(r"\b[A-Z]{4,}(\.\w+)?\b", value, message)
        run(shlex.join(follow(shlex.split(command), message)))
    finally:
        shutil.rmtree(Path.cwd())
