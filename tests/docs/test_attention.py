"""The script of the attention tutorial: habits of heads, and the history since 2017."""

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
