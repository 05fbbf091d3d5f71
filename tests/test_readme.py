"""Every command in the README and in docs/ parses, and the files of the project that it names exist."""

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT
from torch.distributed.run import get_args_parser

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SHELL_LANGUAGES = ("", "sh", "console")
SEPARATORS = {"|", "&&", ";", "do", "done"}
REDIRECTIONS = {">", "<", ">>", "&"}


def shell_lines(page: Path) -> Iterator[str]:
    """The command lines in the code blocks of a page, continuation lines joined."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S):
        if language not in SHELL_LANGUAGES:
            continue
        if language == "console":
            block = "\n".join(re.findall(r"^\$ (.*)$", block, re.M))
        yield from block.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """Each ``python …`` or ``torchrun …`` of a command line, as its words."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word in SEPARATORS or word in REDIRECTIONS or word.endswith(";"):
            words += [word.rstrip(";")] if word not in SEPARATORS | REDIRECTIONS else []
            starts = [index for index, name in enumerate(words) if name in ("python", "torchrun")]
            if starts:
                yield words[starts[0] :]
            words = []
        else:
            words.append(word)


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """The module that a command runs, and the arguments of that module."""
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        return parsed.training_script, parsed.training_script_args
    if words[1] == "-m":
        return words[2].replace(".", "/") + ".py", words[3:]
    return words[1], words[2:]


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command as its program does, without running it."""
    script, arguments = program_of(words)
    assert (ROOT / script).is_file(), script
    if script.startswith(("docs/", "tests/")):
        return
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    parsed = []

    def stop_after_parsing(parse):
        def parse_and_stop(*given, **options):
            parsed.append(parse(*given, **options))
            raise KeyboardInterrupt

        return parse_and_stop

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        name = "load_settings" if hasattr(module, "load_settings") else "parse"
        patch.setattr(module, name, stop_after_parsing(getattr(module, name)))
        module.main(arguments)
    assert parsed


# The commands of architecture.md use flags that its diffs add: test_architecture.py runs them.
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "architecture.md"],
    ids=lambda page: page.name,
)
def test_every_command_parses_and_its_files_exist(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in shell_lines(page):
        for words in commands(line):
            if words[1:2] not in ([], ["-"], ["--help"]):
                check_command(words, monkeypatch)


@pytest.mark.parametrize(
    "line",
    [
        "python prepare.py book.txt --tokeniser byte",
        "python trian.py",
        "python train.py config/gpt3.toml",
        "python -m examples.dates dats",
        "torchrun --nproc-per-nodes 8 train.py",
        "torchrun --nproc-per-node 8 train.py --stpes 3",
        "cat *.log | python prepare.py - --outt data/logs",
    ],
)
def test_a_mistake_in_a_command_is_seen(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((SystemExit, OSError, AssertionError)):
        for words in commands(line):
            check_command(words, monkeypatch)


def test_extras_that_the_documents_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page in PAGES:
        for names in re.findall(r'pip install -e "\.\[(.*?)\]"', page.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= extras.keys()


def test_every_package_of_the_engine_is_in_the_readme():
    rows = re.findall(r"^\| `(\w+)/` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows[1:]) == sorted(path.parent.name for path in ROOT.glob("engine/*/__init__.py"))
