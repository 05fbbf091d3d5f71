"""The attention tutorial: figures, links and commands agree with the code, in both languages."""

import importlib
import re
import shlex
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, train_tiny

from benchmarks.speed import BenchConfig
from engine.core.settings import flatten, load_settings, parse
from examples.dates import ExampleConfig
from prepare import PrepareConfig
from sample import SampleConfig
from train import TrainConfig

PAGE_PATTERNS = {  # of content that must be the same in both languages
    "block": re.compile(r"^```\w*\n(.*?)^```$", re.M | re.S),
    "code link": re.compile(r"\[`([^`]+)\.py: ([^`]+)`\]\(\.\./\1\.py\)"),  # [`a.py: B`](../a.py)
    "command": re.compile(r"(?:^|`)((?:python|pytest|torchrun|pip) [^`\n]+)", re.M),
    "formula": re.compile(r"^\$\$.+\$\$$", re.M),
    "history": re.compile(r"^\| [^|]+ \| `(--.+)` \| (\d\.\d{3}) \| ([+-]\d\.\d{3})? *\|$", re.M),
    "inline code": re.compile(r"(?<!`)`([^`\n]+)`"),
    "picture": re.compile(r"!\[[^\]]+\]\((.+?)\)"),
}


def read_text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def find_all(kind: str, page: str = "docs/attention.md") -> list:
    return PAGE_PATTERNS[kind].findall(read_text(page))


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("attention")


@pytest.mark.parametrize("kind", PAGE_PATTERNS)
def test_both_languages_have_the_same_content(kind):
    assert sorted(find_all(kind)) == sorted(find_all(kind, "docs/attention.zh.md")) != []


def test_both_readmes_have_the_same_commands():
    assert find_all("command", "README.md") == find_all("command", "README.zh.md") != []


def test_links_lead_to_functions_classes_and_pictures():
    for path, name in find_all("code link"):
        assert callable(attrgetter(name)(importlib.import_module(path.replace("/", "."))))
    text = read_text("docs/attention.md")
    assert len(find_all("code link")) == text.count("](../")
    assert all("](../" in section for section in text.split("\n## ") if "$$" in section)
    assert all((ROOT / "docs" / picture).is_file() for picture in find_all("picture"))


def test_figures_are_those_that_the_script_prints(script, capsys):
    script.main(["numbers"])
    sections = capsys.readouterr().out.strip().split("\n\n")
    figures = [section.split("\n", 1)[1] + "\n" for section in sections]
    blocks = [block for block in find_all("block") if not block.startswith(("python", "pytest"))]
    assert blocks == figures


def test_every_command_parses(script, monkeypatch):
    monkeypatch.chdir(ROOT)
    configs = {
        "docs/attention.py": script.AttentionConfig,
        "prepare.py": PrepareConfig,
        "sample.py": SampleConfig,
        "benchmarks.speed": BenchConfig,
        "examples.dates": ExampleConfig,
    }
    flags = [f"train.py {code}" for code in find_all("inline code") if code.startswith("--")]
    for command in find_all("command") + flags:
        program, *arguments = shlex.split(command.removeprefix("python ").removeprefix("-m "))
        if program == "pytest":
            assert re.search(rf"def test_\w*{arguments[-1]}", read_text(arguments[-3]))
        elif program == "train.py":
            load_settings(TrainConfig, arguments)
        else:
            parse(configs[program], arguments)


def test_history_goes_from_2017_to_the_defaults(script):
    settings = dict(script.DECODER_2017)
    for (flags, _, _), (_, change) in zip(find_all("history"), script.RECIPE_CHANGES, strict=True):
        parsed = flatten(load_settings(TrainConfig, shlex.split(flags)))
        assert change.items() <= parsed.items()
        assert change.items() - settings.items()
        settings |= change
    del settings["learning_rate"]  # its default depends on the batch size
    assert settings.items() <= flatten(TrainConfig()).items()


def test_history_prints_a_row_for_each_change(script, numbers, capsys, monkeypatch):
    monkeypatch.setattr(
        script, "RECIPE_CHANGES", [script.RECIPE_CHANGES[0], script.RECIPE_CHANGES[-1]]
    )
    script.main(["history", "--data", str(numbers), "--steps=11", "--width=16", "--seeds=2"])
    first, last = PAGE_PATTERNS["history"].findall(capsys.readouterr().out)
    assert float(last[2]) == pytest.approx(float(last[1]) - float(first[1]), abs=0.0011)


HABIT_POSITIONS = {  # pairs of a position and an earlier one, in "def f:⏎····a b⏎a b"
    "previous": [[i, i - 1] for i in range(1, 9)],
    "same": [[7, 5], [8, 6]],
    "line": [[i, j] for i in range(9) for j in (0, 3, 4, 7) if j < i],
    "first": [[i, 0] for i in range(1, 9)],
}


@pytest.mark.parametrize("habit", HABIT_POSITIONS)
def test_habit_is_a_set_of_positions_and_a_head_that_has_it_scores_1(script, monkeypatch, habit):
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5])
    texts = ["def", " f", ":\n", "    ", "a", " b", "\n"]
    positions = script.habits(tokens, texts)[habit]
    assert positions.nonzero().tolist() == HABIT_POSITIONS[habit]
    uniform = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    head = positions / positions.sum(dim=1, keepdim=True).clamp(min=1)
    monkeypatch.setattr(script, "attention_maps", lambda *_: torch.stack([uniform, head])[None])
    model = SimpleNamespace(config=SimpleNamespace(context_length=9, num_layers=1))
    scores, uniform_scores = script.score_heads(model, tokens.numpy(), texts, 1)
    assert scores[list(HABIT_POSITIONS).index(habit), 0, 1] == pytest.approx(1)
    torch.testing.assert_close(scores[:, 0, 0], uniform_scores)


def test_heads_of_a_run_are_scored_and_drawn(script, numbers, tmp_path, capsys):
    train_tiny(numbers, tmp_path / "run", "--steps", 60)
    arguments = ["--run", str(tmp_path / "run"), "--text", "1 is", "--habits", "same"]
    script.main(["heads", *arguments, "--out", str(tmp_path)])
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()]
    scores = [cells[1:] for cells in rows[-5:]]  # of four heads, and of uniform weights
    for *column, _ in zip(*scores, strict=True):
        assert max(column, key=lambda score: float(score.strip("*"))).startswith("**")
    assert {path.name for path in tmp_path.glob("*.png")} == {"attention-same.png"}
