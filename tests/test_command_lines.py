"""Command lines, likely and absurd: what each makes, or its exit code and the word of its line."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import TINY_FLAGS, exit_code_of, numbers_text, read_files, train_tiny

import huggingface
import prepare
import report
import sample
import train

COMMANDS = {command.__name__: command for command in (huggingface, prepare, report, sample, train)}
TRAIN = f"train --data data/numbers {TINY_FLAGS}"
LONG_NAME = "a" * 300
MANY = "10" * 20
RESULTS = {  # command line: a file that it writes, or a text that it prints
    "prepare text.txt --out data/text": "data/text/manifest.json",
    "prepare folder lines.jsonl --glob '*' --tokenizer byte --out data/b": "data/b/manifest.json",
    "prepare text.txt --separator '\n' --tokenizer char --out data/rows": "data/rows/manifest.json",
    f"{TRAIN} --steps 2 --out out/new": "out/new/report.html",
    f"{TRAIN} --minutes 1e-30 --out out/brief": "out/brief/metrics.jsonl",
    f"{TRAIN} --steps 1 --eval-tokens 0 --dtype float16 --parallel fsdp --out out/fsdp": "out/fsdp",
    "sample out/run '1 is'": "1 is",
    "sample out/run/checkpoints/step-00000004 '2 is' --temperature 1e6 --top-p 1e-30": "2 is",
    f"sample out/run --num-samples 2 --batch-size {MANY} --top-k {MANY}": "--- sample 2 ---",
    "sample out/run '3 is' --beams 8 --repetition-penalty 1": "3 is",
    "sample out/run --max-new-tokens 3 --prompts-file prompts.jsonl --out a.jsonl": "a.jsonl",
    "huggingface export out/run hf/run --dtype bfloat16": "hf/run/config.json",
    "huggingface import hf/base out/imported": "out/imported/checkpoints",
    "report out/run --out page.html": "page.html",
    "report out/run out/run": "out/compare.html",
}
MISTAKES = [  # command line, exit code, and what the line names
    ("prepare text.txt --out text.txt/inside", 1, "text.txt"),
    ("prepare text.txt --out ''", 1, "--out"),
    ("prepare text.txt --vocab-size ½", 2, "--vocab-size"),
    ("prepare text.txt --val-fraction nan", 2, "--val-fraction"),
    ("prepare text.txt --encoding %s", 1, "--encoding"),
    ("prepare text.txt --tokenizer '\udcff'", 1, "--tokenizer"),
    ("prepare lines.jsonl --field '\n'", 1, "--field"),
    (f"prepare {LONG_NAME}", 1, "too long"),
    (f"{TRAIN} --out out/run", 1, "--resume"),
    (f"{TRAIN} --out '\udcff'", 1, "UTF-8"),
    (f"{TRAIN} --out text.txt/run", 1, "text.txt/run"),
    (f"{TRAIN} --data ''", 1, "is not a dataset"),
    (f"{TRAIN} --learning-rate inf", 2, "--learning-rate"),
    (f"{TRAIN} --seed {MANY}", 2, "--seed"),
    (f"{TRAIN} --windows -1", 2, "windows"),
    (f"{TRAIN} --init-from text.txt", 1, "text.txt"),
    ("train text.txt", 1, "TOML"),
    ("train data/numbers", 1, "--data data/numbers?"),
    ("train out/run", 1, "--init-from out/run?"),
    ("train nothing.toml", 1, "nothing.toml"),
    ("train --data text.txt --out out/x", 1, "is not a dataset"),
    ("train --data nothing --out out/x", 1, "prepare.py INPUT --out nothing"),
    ("prepare folder --glob text.txt lines.jsonl", 2, "--glob '*.jsonl'"),
    ("prepare --glob text.txt lines.jsonl folder", 1, "--glob '*.txt'"),
    ("sample", 2, "PATH: missing. Give a run"),
    ("sample out/run Once upon a time", 2, "upon: "),
    ("sample out/numbers", 1, "train.py --data data/numbers --out out/numbers"),
    ("huggingface exprot out/run hf/x", 2, "exprot: unknown command. Give one of export, import"),
    ("huggingface import hf/base out/x --family llama", 2, "--family"),
    ("huggingface export data/numbers hf/x", 1, "train.py --data data/numbers"),
    ("sample ''", 1, "checkpoint"),
    ("sample out/run --prompt '\udcff'", 1, "udcff"),
    ("sample out/run --prompt-file folder", 1, "folder"),
    ("sample out/run 1 --attention folder.png", 1, "folder.png"),
    ("sample out/run --serve --host 0.0.0.0", 2, "--api-key"),
    ("sample out/run --serve --port 99999", 2, "--port"),
    ("huggingface", 2, "export"),
    ("huggingface export out/run hf/base", 1, "hf/base"),
    ("huggingface import out/run out/none", 1, "needs no import"),
    ("huggingface import '\udcff' out/none", 1, "download"),
    ("report out/run ''", 1, "not a run"),
]


PLAN = f"train --plan {TINY_FLAGS} --data"
WRONG_PATHS = {  # command: paths in place of which it names one that works
    "sample --max-new-tokens 1": ("run", "out/rum", "out", "out/run/checkpoints/step-00000001"),
    "report --out hint.html": ("run", "out", "out/run/checkpoints"),
    PLAN: ("numbers", "data", "data/number", "out/numbers", "data/numbers/manifest.json"),
}


@pytest.fixture(scope="module")
def place(numbers, tmp_path_factory) -> Iterator[Path]:
    """A folder to be in, with texts, a dataset, a run and its export."""
    folder = tmp_path_factory.mktemp("lines")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        for name in ("folder", "folder.png", "data", "out", "hf"):
            Path(name).mkdir()
        for path, record in (("lines", {"text": "one line"}), ("prompts", {"prompt": "1 is"})):
            Path(f"{path}.jsonl").write_text(f"{json.dumps(record)}\n" * 20)
        for path in ("text.txt", "folder/part.txt"):
            Path(path).write_text(numbers_text(60))
        Path("data/numbers").symlink_to(numbers)
        train_tiny(Path("data/numbers"), Path("out/run"), "--steps", 4)
        huggingface.main(["export", "out/run", "hf/base"])
        yield folder


def run(line: str) -> int:
    """Run a command line in this process, and return its exit code."""
    command, *arguments = shlex.split(line)
    return exit_code_of(lambda: COMMANDS[command].main(arguments))


@pytest.mark.parametrize("line", RESULTS)
def test_a_command_line_makes_what_it_names(line, place, capsys):
    assert not Path(RESULTS[line]).exists()
    assert run(line) == 0
    output, errors = capsys.readouterr()
    assert Path(RESULTS[line]).exists() or RESULTS[line] in output
    assert errors.count("\n") <= 1


@pytest.mark.parametrize(("line", "code", "word"), MISTAKES)
def test_a_mistake_is_one_line_and_changes_nothing(line, code, word, place, capsys):
    before = read_files(place)
    assert run(line) == code
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1 and word in errors
    assert read_files(place) == before


@pytest.mark.parametrize(
    ("command", "path"),
    [(command, path) for command in WRONG_PATHS for path in WRONG_PATHS[command]],
)
def test_a_wrong_path_names_one_that_works(command, path, place, capsys):
    assert run(f"{command} {path}") == 1
    (right_path,) = re.findall(r"(?:Did you mean|such as) (\S+)[?.]$", capsys.readouterr().err)
    assert run(f"{command} {right_path}") == 0
