"""Killed at any moment, a command that is run again ends as if nothing had happened: a sample of what soak.py does."""

import pytest
from soak import KINDS, events, kills


def sample(kind: str, n: int) -> list[int]:
    """The changes of a file, of n, to be killed at."""
    if KINDS[kind].processes > 1:  # which take longer
        return [n // 2] if KINDS[kind].victim == 0 else [n]
    every = {"train": 90, "resume": 60}.get(kind, 5)
    return sorted({1, *range(every, n + 1, every), n})


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_a_change_of_a_file_a_command_ends_as_if_nothing_had_happened(kind, tmp_path):
    assert "changes" in events(tmp_path, kind, lambda n: sample(kind, n))


def test_killed_at_random_training_ends_in_the_same_weights(tmp_path):
    assert "resumed to the same weights" in kills(tmp_path, 3)
