"""Command lines, likely and absurd: what each makes, or its exit code and the word of its line."""

import ast
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT, TINY_FLAGS, exit_code_of, numbers_text, read_files, train_tiny

import huggingface
import prepare
import report
import sample
import train

COMMANDS = {command.__name__: command for command in (huggingface, prepare, report, sample, train)}
TRAIN = f"train --data data/numbers {TINY_FLAGS}"
LONG_NAME = "a" * 300
MANY = 10**18
RESULTS = {  # command line: a file that it writes, or a text that it prints
    "prepare text.txt --out data/new": "data/new/manifest.json",
    "prepare folder lines.jsonl --glob '*' --tokenizer byte --out data/b": "data/b/manifest.json",
    "prepare bad.txt --errors replace --tokenizer char --out data/c": "data/c/manifest.json",
    f"{TRAIN} --steps 2 --out out/new": "out/new/report.html",
    f"{TRAIN} --minutes 1e-30 --out out/brief": "out/brief/metrics.jsonl",
    "sample out/run/checkpoints/step-00000004 '2 is' --temperature 1e6 --top-p 1e-30": "2 is",
    f"sample out/run --num-samples 2 --batch-size {MANY} --top-k {MANY}": "--- sample 2 ---",
    "sample out/run '3 is' --beams 8": "3 is",
    "sample out/run --max-new-tokens 3 --prompts-file prompts.jsonl --out a.jsonl": "a.jsonl",
    f"train folder --glob '*.txt' {TINY_FLAGS} --steps 2": "out/folder/report.html",
    "huggingface export out/run hf/base --force": "Step 4 of out/run",
    "huggingface import hf/base out/imported": "out/imported/checkpoints",
    "report out/run --out page.html": "page.html",
    "report out/run out/run": "out/compare.html",
}
MISTAKES = [  # command line, exit code, and a regex of the line
    ("prepare text.txt --out text.txt/inside", 1, "text.txt"),
    (f"prepare {LONG_NAME}", 1, "too long"),
    (f"{TRAIN} --out '\udcff'", 1, "UTF-8"),
    (f"{TRAIN} --resume --out out/rnu", 1, r"out/rnu: .*Did you mean out/run\?"),
    (f"{TRAIN} --resume --out elsewhere", 1, "elsewhere: .*--auto-resume.* --resume"),
    ("train text.txt --data=data/numbers", 1, "--data: .*Leave it out"),
    ("train text.txt --epochs 3", 2, "--steps or --minutes"),
    ("train good.jsonl", 1, r"--chat.*python prepare\.py good\.jsonl"),
    ("train good.jsonl --init-from out/run", 1, "--tokenizer out/run, .*--init-from out/run$"),
    ("train nano.py", 1, "nano.py: must be TOML.*prepare.py nano.py"),
    ("train text.txt --glob '*.md'", 1, "--glob"),
    ("train data/numbers", 1, "Use --data data/numbers"),
    ("train out/run", 1, "Use --init-from out/run"),
    ("train --data text.txt --out out/x", 1, "is not a dataset"),
    ("prepare folder --glob text.txt lines.jsonl", 2, "lines.jsonl"),
    ("prepare --glob text.txt lines.jsonl folder", 1, r"--glob: .*'\*\.txt'"),
    ("sample out/numbers", 1, "train.py --data data/numbers --out out/numbers"),
    ("huggingface exprot out/run hf/x", 2, "exprot.*export, import"),
    ("huggingface import hf/base out/x --family llama", 2, "--family"),
    ("sample out/run --prompt-file folder", 1, "folder"),
    ("sample out/run --serve --host 0.0.0.0", 2, "GPT_API_KEY"),
    ("huggingface export out/run hf/base", 1, "hf/base: .*--force"),
    ("huggingface export out/run 'hf model' --force", 1, "hf model: already exists"),
    (f"{TRAIN} --context-length 100000", 1, "100000"),
    (f"{TRAIN} --score choice", 1, "--score choice: .*--score-file"),
    (f"{TRAIN} --score choice --score-file text.txt", 1, "text.txt"),
    ("train --data nowhere --out nowhere/run", 2, "--out"),  # a run inside its dataset
    ("prepare", 1, "INPUT"),
    ("prepare b.txt", 1, "b.txt: "),
    ("prepare text.txt --out text.txt --force", 1, "--out"),
    ("prepare bad.txt", 1, "at byte 3. Use .*--errors"),
    ("prepare halves.jsonl --tokenizer byte", 1, "val split must have text"),
    ("prepare equal.jsonl", 1, r"80 documents\)\. .* or --val"),
    ("prepare equal.jsonl --deduplicate", 1, r"1 document\)\. Give other"),
    ("prepare text.txt - --ray local", 1, "--ray"),
    ("prepare text.txt http://127.0.0.1:9/b", 1, "9/b: could not be read"),
    ("prepare half.jsonl --prompt-field q --completion-field a", 1, "half.jsonl, line 3: "),
    ("prepare text.txt --val-fraction 0", 1, "--val-fraction: .*--val"),
    ("prepare text.txt --val empty.txt", 1, "the val split "),
    ("prepare text.txt --val folder --glob '*.md'", 1, "folder: .*--glob"),
    ("sample nowhere a --chat", 2, "TEXT.*--chat"),
    ("sample out/run --prompt-file latin-1.txt", 1, "latin-1.txt.*UTF-8 at byte 1"),
    ("sample out/run --prompt-file /dev/zero", 1, "/dev/zero.*4,194,304 bytes"),
    ("sample out/run --prompts-file /dev/urandom --out x", 1, "/dev/urandom: must be a file"),
    ("sample out/run --prompts-file text.txt --out text.txt", 1, "--out.*text.txt"),
    ("sample out/run --chat", 1, "out/run.*not trained on chats"),
    ("sample data/numbers", 1, "data/numbers.*is a dataset.*train.py --data data/numbers"),
    ("sample 'hf model'", 1, "huggingface.py import 'hf model' 'out/hf model'"),
    ("huggingface export out/run hf/x --adapter", 1, "--adapter"),
    ("huggingface import ./nothing out/x", 1, "nothing: download failed"),
]


PLAN = f"train --plan {TINY_FLAGS} --data"
WRONG_PATHS = {  # command: paths in place of which it names one that works
    "sample --max-new-tokens 1": (
        *("run", "out/rum", "out/run/checkpoints/step-00000001", "out/run/config.toml"),
    ),
    "report --out hint.html": ("out/run/checkpoints",),
    PLAN: ("numbers", "data/number", "out/numbers", "data/numbers/manifest.json"),
}
FIXABLE = [  # command lines that work with the first fix of their message
    *(f"{command} {path}" for command, paths in WRONG_PATHS.items() for path in paths),
    "prepare bad.txt --tokenizer char --out data/decoded",
    f"{TRAIN} --steps 2 --resume --out out/resumed",
    "sample out/run --beams 2 --temperature 0.5",
    "sample out/run --max-tokens 3",
    "sample out/run --prompts-file prompts.jsonl",
]
# Of other programs.
OTHER_FLAGS = {"debug", "dirty", "flags", "help", "max-restarts", "nproc-per-node", "out-dir"}


GOOD = b'{"q": "a", "a": "b", "messages": [{"role": "assistant", "content": "c"}]}\n'
FILES = {
    "nano.py": b"# from nanoGPT\nout_dir = 'out'\nbatch_size = 64  # rows\n",
    "bad.txt": b"abc\xffdefghijk",
    "latin-1.txt": b"a\xe4",
    "empty.txt": b"",
    "equal.jsonl": b'{"text": "same"}\n' * 80,
    "good.jsonl": GOOD,
    "half.jsonl": GOOD * 2 + b'{"q": "half", "messages": "a"}',
    "halves.jsonl": '{"text": "abé"}\n{"text": "cdé"}\n'.encode(),  # split inside a character
    "hf model/config.json": b"{}",
}


@pytest.fixture(scope="module")
def place(numbers, tmp_path_factory) -> Iterator[Path]:
    """A folder to be in, with texts, a dataset, a run and its export."""
    folder = tmp_path_factory.mktemp("lines")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        monkeypatch.setattr("engine.core.files.MAX_INPUT_BYTES", 2**22)
        for name in ("folder", "folder.png", "data", "out", "hf", "hf model"):
            Path(name).mkdir()
        for name, content in FILES.items():
            Path(name).write_bytes(content)
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
    assert errors.startswith("error: ") and errors.count("\n") == 1 and re.search(word, errors)
    assert read_files(place) == before


@pytest.mark.parametrize("line", FIXABLE)
def test_the_fix_in_a_message_works(line, place, capsys):
    assert run(line)
    problem, _, fix = capsys.readouterr().err.removeprefix("error: ").partition(": ")
    if match := re.search(r"(?:Did you mean|such as) (\S+?)[?.](?: |$)", fix):
        line = " ".join(match[1] if word == problem else word for word in line.split(" "))
    elif "Leave it out" in fix:
        line = re.sub(rf"{problem} \S+", "", line)
    else:
        line += " " + re.split(r" instead| or |, | to |\.?(?: \(|$)", fix[fix.index("--") :])[0]
    assert run(line) == 0


def test_every_flag_in_a_text_exists(capsys):
    for words in ("prepare", "train", "sample", "report", "huggingface export"):
        assert run(f"{words} --help") == 0
    flags = OTHER_FLAGS | {*re.findall(r"(?m)^..--([\w-]+)", capsys.readouterr().out)}
    for path in [*ROOT.glob("*.py"), *ROOT.glob("engine/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = getattr(node, "value", None)
            if isinstance(text, str) and " " in text:
                names = re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z-]*[a-z])", text)
                assert {*names} <= flags, path
