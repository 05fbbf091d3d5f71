"""Habits of attention: what heads do, with a score for each, by which heads are named."""

from collections.abc import Sequence

import torch
from torch import Tensor

HABIT_TITLES = {
    "self": "itself",
    "previous": "previous token",
    "first": "first token",
    "repeat": "same token before",
    "same": "after the same token",  # what followed it: an induction head
    "line": "line start",
}
MIN_NAMED_EXCESS = 0.2  # over equal weights, as a fraction of the largest possible

Habit = tuple[str, float]  # title and score: the mean weight where the habit looks


def habit_masks(tokens: Tensor, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return the positions where each habit looks, bool (T, T), in (T,) ids with their texts."""
    T = len(tokens)
    position = torch.arange(T)
    earlier = torch.ones(T, T, dtype=torch.bool).tril(-1)
    is_same = (tokens[:, None] == tokens) & earlier
    last_same = torch.where(is_same, position, -2).amax(dim=1, keepdim=True)
    line_starts = [True]  # a line's indentation, and its first word
    for text in texts[:-1]:
        line_starts.append("\n" in text or (line_starts[-1] and text.isspace()))
    masks = {
        "previous": position == position[:, None] - 1,
        "first": (position == 0).expand(T, T),
        "repeat": is_same,
        "same": position == last_same + 1,
        "line": torch.tensor(line_starts).expand(T, T),
    }
    return {"self": torch.eye(T, dtype=torch.bool)} | {
        name: mask & earlier for name, mask in masks.items()
    }


def sum_habits(maps: Tensor, tokens: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Sum the weights of maps (H, T, T) where each habit looks: (habits, H + 1).

    The last column is of equal weights. Also count the rows with somewhere to look: (habits, 1).
    """
    T = len(tokens)
    equal_weights = torch.ones(1, T, T).tril() / torch.arange(1, T + 1)[:, None]
    masks = torch.stack([*habit_masks(tokens, texts).values()])
    sums = torch.einsum("hij,nij->nh", torch.cat((maps, equal_weights)), masks.float())
    return sums, masks.any(dim=-1).sum(dim=-1, keepdim=True)


def name_heads(maps: Tensor, tokens: Tensor, texts: Sequence[str]) -> list[Habit | None]:
    """Name each head of maps (H, T, T) by its strongest habit, if it has one.

    Habits are compared by how far the mean weight where they look exceeds that of equal weights.
    """
    sums, counts = sum_habits(maps, tokens, texts)
    scores = sums / counts.clamp(min=1)
    excess = (scores - scores[:, -1:]) / (1 - scores[:, -1:]).clamp(min=1e-6)
    best, habits = excess[:, :-1].nan_to_num().max(dim=0)
    titles = [*HABIT_TITLES.values()]
    return [
        (titles[habit], round(scores[habit, head].item(), 3)) if value > MIN_NAMED_EXCESS else None
        for head, (value, habit) in enumerate(zip(best.tolist(), habits.tolist(), strict=True))
    ]
