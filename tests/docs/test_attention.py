"""The script of the attention tutorial: habits of heads, and the history since 2017."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import train_tiny

from docs import attention

HABIT_POSITIONS = {  # pairs of a position and an earlier one, in "def f:⏎····a b⏎a b"
    "previous": [[i, i - 1] for i in range(1, 9)],
    "same": [[7, 5], [8, 6]],
    "line": [[i, j] for i in range(9) for j in (0, 3, 4, 7) if j < i],
    "first": [[i, 0] for i in range(1, 9)],
}


def test_a_head_that_has_a_habit_scores_1(monkeypatch):
    tokens = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5])
    texts = ["def", " f", ":\n", "    ", "a", " b", "\n"]
    masks = attention.habits(tokens, texts)
    assert {name: mask.nonzero().tolist() for name, mask in masks.items()} == HABIT_POSITIONS
    heads = [mask / mask.sum(dim=1, keepdim=True).clamp(min=1) for mask in masks.values()]
    uniform = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    maps = torch.stack([*heads, uniform])[None]
    monkeypatch.setattr(attention, "attention_maps", lambda *_: maps)
    model = SimpleNamespace(config=SimpleNamespace(context_length=9, num_layers=1))
    scores, uniform_scores = attention.score_heads(model, tokens.numpy(), texts, 1)
    torch.testing.assert_close(scores[:, 0, :4].diagonal(), torch.ones(4))
    torch.testing.assert_close(scores[:, 0, 4], uniform_scores)


def test_heads_of_a_run_are_scored_and_drawn(numbers, tmp_path, capsys):
    train_tiny(numbers, tmp_path / "run", "--steps", 60)
    arguments = ["--run", str(tmp_path / "run"), "--text", "1 is", "--habits", "same"]
    attention.main(["heads", *arguments, "--out", str(tmp_path)])
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()]
    scores = [cells[1:] for cells in rows[-5:]]  # of four heads, and of uniform weights
    for *column, _ in zip(*scores, strict=True):
        assert max(column, key=lambda score: float(score.strip("*"))).startswith("**")
    assert {path.name for path in tmp_path.glob("*.png")} == {"attention-same.png"}


def test_the_history_has_a_row_with_the_difference_for_each_change(numbers, capsys, monkeypatch):
    monkeypatch.setattr(attention, "RECIPE_CHANGES", attention.RECIPE_CHANGES[::9])
    attention.main(["history", "--data", str(numbers), "--steps=11", "--width=16", "--seeds=2"])
    row = r"^\| [^|]+ \| `--.+` \| (\d\.\d{3}) \| ([+-]\d\.\d{3})? *\|$"
    first, last = re.findall(row, capsys.readouterr().out, re.M)
    assert float(last[1]) == pytest.approx(float(last[0]) - float(first[0]), abs=0.0011)
