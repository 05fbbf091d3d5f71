"""The guides: their figures are those that the code gives, their functions exist, and two languages say the same."""

import ast
import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import matplotlib.image
import pytest
import torch
from helpers import ROOT, numbers_text, train_tiny

import prepare
import sample
from engine.core.settings import load_settings, parse
from train import TrainConfig

GUIDES = [ROOT / "docs" / "attention.md", ROOT / "docs" / "attention.zh.md"]
PAIRS = [
    (path.with_name(path.name.replace(".zh.md", ".md")), path)
    for path in sorted([*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md")])
]
NAMED = re.compile(r"`([\w/]+\.py): ([\w.]+)`")  # `model.py: Head.attention`
COMMAND = re.compile(r"^(?:python|torchrun|pip) ", re.MULTILINE)
FIGURE = r"(?<![A-Za-z0-9.])\d+(?:[.,]\d+)*"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """docs/attention.py, which is in no package."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(ROOT / "docs")
        import attention

        yield attention
    del sys.modules["attention"]


@pytest.fixture(scope="module")
def printed(script) -> dict[str, str]:
    """What its quick part prints, by section."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        script.main(["numbers"])
    return dict(section.split("\n", 1) for section in out.getvalue().strip().split("\n\n"))


def code_blocks(text: str) -> list[str]:
    """What stands between fences, in order."""
    return re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def sections(text: str) -> list[str]:
    """The text cut before each heading; a code block's comments are no headings."""
    fenced = re.sub(
        r"^```.*?^```$", lambda block: block[0].replace("\n#", "\n\0"), text, flags=re.MULTILINE | re.DOTALL
    )
    return [section.replace("\0", "#") for section in re.split(r"^(?=#+ )", fenced, flags=re.MULTILINE)]


def contents(section: str) -> dict[str, list[str]]:
    """What a section has that must not depend on its language, by kind."""
    prose = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)
    found = {
        "level": re.findall(r"^#+(?= )", prose, re.MULTILINE),
        "code": code_blocks(section),
        "pictures": re.findall(r"!\[[^\]]*\]\(([^)]+)\)", prose),
        "links": sorted(re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", prose)),
    }
    prose = re.sub(r"\]\([^)]+\)", "]", prose)
    for kind, form in (("inline code", "`[^`]+`"), ("formulas", r"\$\$.+?\$\$|\$[^$]+\$"), ("figures", FIGURE)):
        found[kind] = sorted(re.findall(form, prose, re.DOTALL))
        prose = re.sub(form, "", prose, flags=re.DOTALL)
    return found


@pytest.mark.parametrize(
    ("page", "translation"),
    [pair for pair in PAIRS if pair[0].name != "README.md"],
    ids=lambda path: path.name,
)
def test_two_languages_have_the_same_sections_commands_figures_and_pictures(page, translation):
    english = sections(page.read_text(encoding="utf-8"))
    chinese = sections(translation.read_text(encoding="utf-8"))
    assert len(english) == len(chinese), "headings"
    for section, translated in zip(english, chinese, strict=True):
        expected = contents(section)
        actual = contents(translated)
        # Each links to its translation once, at its top.
        expected["links"] = [link for link in expected["links"] if link != translation.name]
        actual["links"] = [link for link in actual["links"] if link != page.name]
        for kind, values in expected.items():
            assert actual[kind] == values, f"{translation.name}, {translated[:40]!r}: {kind}"


def test_both_readmes_have_the_same_commands():
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md")]
    english, chinese = ([block for block in code_blocks(page) if COMMAND.search(block)] for page in pages)
    assert english == chinese and english


def test_a_difference_between_two_languages_is_seen():
    text = "## A\n\n$x$ is 2.5 of [this](a.py), `b`.\n\n```\npython c.py\n# not a heading\n```\n\n![d](d.png)\n"
    assert len(sections(text)) == 2 and sections(text)[0] == ""
    for old, new in (("##", "###"), ("$x$", "$y$"), ("2.5", "2.6"), ("a.py", "e.py"), ("`b`", "`f`"), ("c.py", "g.py")):
        assert contents(text.replace(old, new)) != contents(text)
    assert contents(text.replace("d.png", "h.png")) != contents(text)
    assert contents(text.replace("is", "wird").replace("![d]", "![Bild]")) == contents(text)


def defined(path: Path) -> set[str]:
    """The functions, classes and methods of a module."""
    tree, kinds = ast.parse(path.read_text(encoding="utf-8")), (ast.ClassDef, ast.FunctionDef)
    outer = [node for node in tree.body if isinstance(node, kinds)]
    inner = [(one, two) for one in outer if isinstance(one, ast.ClassDef) for two in one.body if isinstance(two, kinds)]
    return {one.name for one in outer} | {f"{one.name}.{two.name}" for one, two in inner}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_every_formula_has_a_function_that_computes_it(guide):
    text = guide.read_text(encoding="utf-8")
    for section in sections(text):
        assert NAMED.search(section) or "$$" not in section, section.splitlines()[0]
    for label, target in re.findall(r"\[(`[^`]+\.py: [^`]+`)\]\(([^)]+)\)", text):
        assert NAMED.fullmatch(label) and (guide.parent / target).resolve() == ROOT / NAMED.fullmatch(label)[1], label
    for path, name in NAMED.findall(text):
        assert name in defined(ROOT / path), f"{guide.name} names {path}: {name}, which is not there"
    assert len(NAMED.findall(text)) > 20 and text.count("](../") == len(NAMED.findall(text))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_the_quick_figures_are_those_that_the_script_prints(guide, printed):
    text = guide.read_text(encoding="utf-8")
    for name, lines in printed.items():
        assert f"{lines}\n" in code_blocks(text), f"{name} is now\n{lines}"
    commands = [block for block in code_blocks(text) if block.startswith(("python ", "pytest "))]
    assert len(code_blocks(text)) == len(printed) + len(commands)
    # what the prose quotes is in a block or a table of its section, but for what no code measures
    for section in sections(text):
        measured = "\n".join([*code_blocks(section), *re.findall(r"^\|.*$", section, re.MULTILINE)])
        for figure in contents(re.sub(r"^\|.*$", "", section, flags=re.MULTILINE))["figures"]:
            assert figure in re.findall(FIGURE, measured) or "." not in figure or figure == "0.01", figure


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_every_command_of_a_guide_is_one(guide, script):
    readers: dict[str, Callable] = {
        "train.py": lambda given: load_settings(TrainConfig, given),
        "prepare.py": lambda given: parse(prepare.PrepareConfig, given),
        "sample.py": lambda given: parse(sample.SampleConfig, given),
        "docs/attention.py": lambda given: parse(script.AttentionConfig, given),
    }
    text = "".join(code_blocks(guide.read_text(encoding="utf-8")))
    lines = [shlex.split(line) for line in text.splitlines() if re.match(r"python [\w/]+\.py", line)]
    assert {line[1] for line in lines} >= readers.keys()
    for _, name, *given in lines:
        assert (ROOT / name).is_file()
        if name in readers:
            readers[name]([str(ROOT / one) if one.startswith("config/") else one for one in given])


# Habits.


def test_habits_are_where_they_are_said_to_be(script):
    texts = ["def", " f", ":\n", "    ", "a", " b", "\n"]
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5])  # def f:⏎····a b⏎a b
    found = {name: where.nonzero().tolist() for name, where in script.habits(tokens, texts).items()}
    assert found["previous"] == [[i, i - 1] for i in range(1, 9)]
    assert found["same"] == [[7, 5], [8, 6]]
    assert found["line"] == [[i, j] for i in range(9) for j in (0, 3, 4, 7) if j < i]
    assert found["first"] == [[i, 0] for i in range(1, 9)]


@pytest.mark.parametrize("habit", ["previous", "same", "first"])
def test_a_head_with_a_habit_scores_1_and_one_that_looks_at_all_alike_what_is_said(script, monkeypatch, habit):
    class Shape:
        context_length, num_layers = 12, 2

    class Model:
        config = Shape()

    tokens = torch.arange(24).remainder(5).numpy()
    texts, even = ["a", "b", "c", "d", "\n"], torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None]

    def maps_of(model, ids):  # layer 2's head 1 has the habit
        return torch.stack((even, even, script.habits(ids, texts)[habit].float(), even)).view(2, 2, 12, 12)

    monkeypatch.setattr(script, "attention_maps", maps_of)
    scores, alike = script.score_heads(Model(), tokens, texts, 3)
    index = list(script.HABITS).index(habit)
    assert scores.shape == (4, 2, 2) and scores[index].argmax() == 2 and scores[index, 1, 0] == pytest.approx(1)
    torch.testing.assert_close(scores[:, 0, 0], alike)
    assert alike[0] == pytest.approx(sum(1 / i for i in range(2, 13)) / 11)


def test_heads_of_any_run_are_scored_and_drawn(script, tmp_path, capsys):
    (tmp_path / "numbers.txt").write_text(numbers_text(300), encoding="utf-8")
    prepare.prepare(
        prepare.PrepareConfig(inputs=(str(tmp_path / "numbers.txt"),), tokenizer="byte", out=tmp_path / "data")
    )
    train_tiny(tmp_path / "data", tmp_path / "run", "--steps", 60, "--context-length", 48)
    capsys.readouterr()
    script.main(["heads", "--run", str(tmp_path / "run"), "--out", str(tmp_path), "--habits", "previous", "same"])
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == list(script.HABITS.values()) and lines[-1][0] == "all alike" and len(lines) == 2 + 2 * 2 + 1
    for *cells, alike in zip(*(line[1:] for line in lines[2:]), strict=True):
        (best,) = (cell for cell in cells if cell.startswith("**"))
        assert float(best.strip("*")) == max(float(cell.strip("*")) for cell in cells) and 0 < float(alike) < 1
    assert {path.name for path in tmp_path.glob("*.png")} == {"attention-previous.png", "attention-same.png"}


def test_the_pictures_are_drawn(script, tmp_path):
    weights = torch.eye(30)
    script.draw(weights, weights.bool(), ["$x_"] * 30, "a title", tmp_path / "a.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "a.png").shape
    assert 700 <= width < 1000 and 600 < height < 1000 and (tmp_path / "a.png").stat().st_size < 150_000
    for guide in GUIDES:
        for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", guide.read_text(encoding="utf-8")):
            assert (guide.parent / picture).stat().st_size < 150_000


# The history.


def test_the_history_ends_in_the_default_recipe_and_goes_by_one_change_at_a_time(script, numbers, capsys, monkeypatch):
    monkeypatch.setattr(script, "HISTORY", [script.HISTORY[0], script.HISTORY[-1]])
    script.main(["history", "--data", str(numbers), "--steps", "11", "--width", "16", "--seeds", "2"])
    rows = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()]
    first, last = (float(row[2]) for row in rows[2:])
    assert len(rows) == 4 and float(rows[3][3]) == pytest.approx(last - first, abs=0.0011)


def test_all_changes_together_are_the_defaults(script):
    changed = dict(script.DECODER_2017)
    for _, change in script.HISTORY:
        assert not change or any(changed.get(name) != value for name, value in change.items())
        changed |= change
    default = TrainConfig()
    del changed["learning_rate"]  # which goes with the batch
    for name, value in changed.items():
        assert value == getattr(default.model, name, getattr(default.optimizer, name, None)), name


def test_the_history_in_the_guides_is_as_the_script_would_print_it(script):
    for guide in GUIDES:
        text = guide.read_text(encoding="utf-8")
        for said, change in script.HISTORY:
            (row,) = re.findall(rf"^\| {re.escape(said)} \| (.*) \| \d\.\d\d\d \| .*\|$", text, re.MULTILINE)
            assert all(name.replace("_", "-") in row for name in change)
