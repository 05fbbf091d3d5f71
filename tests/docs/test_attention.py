"""The script of the attention tutorial: habits of heads, and the history since 2017."""

import re

import pytest
from helpers import train_tiny

from docs import attention


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
