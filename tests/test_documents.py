"""Documents: every command parses, every file and link exists, and the limits on words hold."""

import ast
import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from check_language import check_constants, check_duplicates, check_text, check_variables
from helpers import ROOT
from torch.distributed.run import get_args_parser

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ENGLISH_PAGES = [page for page in PAGES if not page.name.endswith(".zh.md")]
MAX_README_WORDS = 1300
MAX_ENGLISH_WORDS = 9000
SHELL_LANGUAGES = ("", "sh", "console")
SEPARATORS = {"|", "&&", ";", "do", "done"}
REDIRECTIONS = {">", "<", ">>", "&"}


def code_blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and content of each code block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


def shell_lines(page: Path) -> Iterator[str]:
    """Yield the command lines in the code blocks of a page, continuation lines joined."""
    for language, block in code_blocks(page):
        if language not in SHELL_LANGUAGES:
            continue
        if language == "console":
            block = "\n".join(re.findall(r"^\$ (.*)$", block, re.M))
        yield from block.replace("\\\n", " ").splitlines()


def split_commands(line: str) -> Iterator[list[str]]:
    """Yield each ``python …`` or ``torchrun …`` of a command line, as its words."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word not in SEPARATORS | REDIRECTIONS and not word.endswith(";"):
            words.append(word)
            continue
        if word not in SEPARATORS | REDIRECTIONS:
            words.append(word.rstrip(";"))
        starts = [index for index, name in enumerate(words) if name in ("python", "torchrun")]
        if starts:
            yield words[starts[0] :]
        words = []


def script_and_arguments(words: list[str]) -> tuple[str, list[str]]:
    """Return the script that a command runs, and its arguments."""
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        return parsed.training_script, parsed.training_script_args
    if words[1] == "-m":
        return words[2].replace(".", "/") + ".py", words[3:]
    return words[1], words[2:]


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command as its program does, without running it."""
    script, arguments = script_and_arguments(words)
    assert (ROOT / script).is_file(), script
    if script.startswith(("docs/", "tests/")):
        return
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    name = "load_settings" if hasattr(module, "load_settings") else "parse"
    parse = getattr(module, name)
    results = []

    def parse_and_stop(*arguments, **options):
        results.append(parse(*arguments, **options))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, parse_and_stop)
        module.main(arguments)
    assert results


# The commands of architecture.md use flags that its diffs add: test_architecture.py runs them.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "architecture.md"], ids=lambda page: page.name
)
def test_every_command_parses(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in shell_lines(page):
        for words in split_commands(line):
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
        for words in split_commands(line):
            check_command(words, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, target


def test_extras_that_documents_install_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for page in PAGES:
        for names in re.findall(r'pip install -e "\.\[(.*?)\]"', page.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("name", ["README", "docs/attention"])
def test_both_languages_have_the_same_commands(name):
    english, chinese = (ROOT / f"{name}.md", ROOT / f"{name}.zh.md")
    assert [*shell_lines(english)] == [*shell_lines(chinese)]
    assert [*shell_lines(english)]


def test_documents_are_short():
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in ENGLISH_PAGES}
    assert words["README.md"] <= MAX_README_WORDS
    assert sum(words.values()) <= MAX_ENGLISH_WORDS


def test_the_language_check_sees_each_kind_of_finding():
    module = ast.parse("PADDING = 64\nfound = 1\nMAX_ROWS = 3\n")
    assert [line for line, _ in check_constants(module)] == [1]
    assert [line for line, _ in check_variables(module)] == [2]
    assert len([*check_text("It ends sooner.\nA colour.\nPlain text.\n")]) == 2
    renamed = ast.parse("MAX_ROWS = 4\n")
    assert len([*check_duplicates({"a.py": module, "b.py": renamed})]) == 1
    assert not [*check_duplicates({"a.py": module, "b.py": module})]
