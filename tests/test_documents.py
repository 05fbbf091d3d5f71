"""Documents: commands parse, links and paths lead somewhere, languages and figures agree."""

import importlib
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
from helpers import ROOT
from torch.distributed.run import get_args_parser

from docs import attention

PAGES = {path: path.read_text("utf-8") for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]}
TUTORIAL = ROOT / "docs" / "attention.md"
PROGRAMS = ("python", "pytest", "torchrun")
OPERATORS = {"|", "&&", ";", ">", "<", ">>", "&"}
CODE_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`")
SOURCE_PATH = re.compile(r"[\w/]+\.py|(?:config|docs|engine|examples|tests)/[\w./-]*")
COMMAND_LINE = re.compile(r"^.*\b(?:python|pytest|torchrun) .*$", re.M)
TREE_LINE = re.compile(r"^( *\w+(?:\.py|/)) .*$", re.M)  # a file, and what it is
RUN_FILE = re.compile(r"out/|\w+\.html")
each_page = pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)


def read_commands(page: Path) -> Iterator[str]:
    """Yield the command lines of a page, continuation lines joined."""
    for language, block in CODE_BLOCK.findall(PAGES[page]):
        if language in ("", "sh", "console"):
            yield from COMMAND_LINE.findall(block.replace("\\\n", " "))
    for code in INLINE_CODE.findall(PAGES[page]):
        line = f"python train.py {code}" if code[:2] == "--" and page == TUTORIAL else code
        if line.startswith(PROGRAMS) and not re.search(r"\bDIR\b|NAME\.toml", line):
            yield line


def check_line(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check each command of a line for a shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    for _, group in itertools.groupby(lexer, OPERATORS.__contains__):
        words = [*itertools.dropwhile(lambda word: word not in PROGRAMS, group)]
        if words[1:]:
            check_command(words[0], words[1:], monkeypatch)


def check_command(program: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command as its program does, without running it."""
    if program == "pytest":
        if "-k" in arguments:
            path, _, name = arguments[-3:]
            assert re.search(rf"def test_\w*{name}", (ROOT / path).read_text("utf-8"))
        return
    if program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        arguments = [parsed.training_script, *parsed.training_script_args]
    elif arguments[0] == "-m":
        arguments = [f"{arguments[1].replace('.', '/')}.py", *arguments[2:]]
    script, *flags = arguments
    assert (ROOT / script).is_file(), script
    if script.startswith("tests/") or flags == ["--help"]:
        return
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    name = "load_config" if hasattr(module, "load_config") else "parse"
    parse = getattr(module, name)

    def parse_and_stop(*arguments, **options):
        raise KeyboardInterrupt(parse(*arguments, **options))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, name, parse_and_stop)
        module.main(flags)


@each_page
def test_every_command_parses(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in read_commands(page):
        check_line(line, monkeypatch)


@pytest.mark.parametrize(
    "line", ["python trian.py", "python train.py --stpes 3", "pytest tests/test_model.py -k tx"]
)
def test_a_command_that_does_not_parse_is_found(line, monkeypatch):
    with pytest.raises((SystemExit, OSError, AssertionError)):
        check_line(line, monkeypatch)


@each_page
def test_every_link_path_and_extra_leads_somewhere(page):
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert "://" in target or linked.exists(), target
        if anchor and linked in PAGES:
            titles = re.findall(r"^#+ (.+)$", PAGES[linked], re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, target
        if ".py: " in label:  # a link to code
            file, name = label.strip("`").split(": ")
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            assert linked == ROOT / file and callable(attrgetter(name)(module))
    for code in filter(SOURCE_PATH.fullmatch, INLINE_CODE.findall(PAGES[page])):
        assert (ROOT / code).exists() or [*ROOT.glob(f"engine/**/{code}")], code
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extras in re.findall(r'pip install -e "\.\[(.*?)\]"', PAGES[page]):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("name", ["README", "docs/attention", "docs/finetune"])
def test_both_languages_have_the_same_commands_code_and_figures(name):
    contents = []
    for text in (PAGES[ROOT / f"{name}.md"], PAGES[ROOT / f"{name}.zh.md"]):
        blocks = [TREE_LINE.sub(r"\1", block) for _, block in CODE_BLOCK.findall(text)]
        codes = sorted(code for code in INLINE_CODE.findall(text) if not RUN_FILE.match(code))
        rows = "".join(re.findall(r"^\|.*\n", text, re.M))
        figures = re.findall(r"[+-]?\d+(?:[.,]\d+)*", rows)
        formulas_and_pictures = re.findall(r"^\$\$.+\$\$$|\]\(\S+\.png\)", text, re.M)
        contents.append((blocks, codes, figures, formulas_and_pictures))
    assert contents[0] == contents[1] and all(contents[0][:3])


def test_the_tutorial_has_the_figures_of_its_script_and_the_code_of_its_formulas(capsys):
    attention.main(["numbers"])
    sections = capsys.readouterr().out.strip().split("\n\n")
    blocks = [block for _, block in CODE_BLOCK.findall(PAGES[TUTORIAL]) if block[:2] != "py"]
    assert blocks == [section.split("\n", 1)[1] + "\n" for section in sections]
    assert all(".py: " in part for part in PAGES[TUTORIAL].split("\n## ") if "$$" in part)
