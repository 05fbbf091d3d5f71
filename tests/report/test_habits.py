"""Habits of heads: where they look, and the names of heads that have them."""

import pytest
import torch

from engine.report.habits import HABIT_TITLES, habit_masks, name_heads

TOKENS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5])
TEXTS = ["def", " f", ":\n", "    ", "a", " b", "\n", "a", " b"]
# Pairs of a position and another one, in "def f:⏎····a b⏎a b".
HABIT_POSITIONS = {
    "self": [[i, i] for i in range(9)],
    "previous": [[i, i - 1] for i in range(1, 9)],
    "first": [[i, 0] for i in range(1, 9)],
    "repeat": [[7, 4], [8, 5]],
    "same": [[7, 5], [8, 6]],
    "line": [[i, j] for i in range(9) for j in (0, 3, 4, 7) if j < i],
}


def test_a_head_is_named_by_its_habit_with_its_mean_weight():
    masks = habit_masks(TOKENS, TEXTS)
    assert {name: mask.nonzero().tolist() for name, mask in masks.items()} == HABIT_POSITIONS
    heads = torch.stack(
        [mask / mask.sum(dim=1, keepdim=True).clamp(min=1) for mask in masks.values()]
    )
    uniform = torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None]
    half = (heads[1] + uniform) / 2
    *named, mixed, none = name_heads(torch.stack([*heads, half, uniform]), TOKENS, TEXTS)
    assert named == [(title, 1.0) for title in HABIT_TITLES.values()] and none is None
    expected = 0.5 + sum(1 / row for row in range(2, 10)) / 16
    assert mixed == ("previous token", pytest.approx(expected, abs=1e-3))


def test_habits_without_a_place_to_look_and_broken_weights_have_no_name():
    tokens = torch.tensor([3])
    assert name_heads(torch.ones(1, 1, 1), tokens, ["a"]) == [None]
    assert name_heads(torch.full((1, 9, 9), torch.nan), TOKENS, TEXTS) == [None]
