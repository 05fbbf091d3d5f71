"""The picture of the losses."""

import math

import matplotlib.image
import numpy as np
import pytest

from engine.generation.pictures import draw_loss


def curves(path) -> tuple[np.ndarray, np.ndarray]:
    """Where a picture is blue, the first curve's color, and where orange, the second's."""
    picture = matplotlib.image.imread(path)[..., :3]
    colored = np.ptp(picture, axis=-1) > 0.2
    is_blue = picture[..., 2] > picture[..., 0]
    return colored & is_blue, colored & ~is_blue


def test_a_falling_loss_is_a_line_from_the_upper_left_to_the_lower_right(tmp_path):
    records = [{"step": step, "train_loss": 4 - step / 50} for step in range(1, 101)]
    draw_loss(records, tmp_path / "loss.png")
    training, validation = curves(tmp_path / "loss.png")
    height, width = training.shape
    assert width == pytest.approx(960, abs=2) and height == pytest.approx(540, abs=2)
    rows, columns = np.nonzero(training[: height * 9 // 10, : width * 3 // 4])  # without the legend
    assert columns.max() - columns.min() > width / 2
    assert np.corrcoef(rows, columns)[0, 1] > 0.99
    assert not validation.any()


def test_validation_and_each_dataset_of_a_mixture_have_curves_of_their_own(tmp_path):
    records = [{"step": step, "train_loss": 3.0, "val_loss": 4.0} for step in (1, 20, 40)]
    draw_loss(records, tmp_path / "two.png")
    training, validation = curves(tmp_path / "two.png")
    rows = [np.nonzero(curve[:, :700])[0] for curve in (training, validation)]  # no legend
    assert rows[0].min() > rows[1].max()  # lower on the picture
    for record in records:
        record |= {"val_loss/a": 5.0, "val_loss/$\\b$": 2.0 - record["step"] / 40}
    draw_loss(records, tmp_path / "four.png")
    colored = [np.sum(curves(tmp_path / name)) for name in ("two.png", "four.png")]
    assert colored[1] > colored[0] + 300


def test_losses_that_are_missing_or_not_finite_are_omitted(tmp_path):
    records = [{"step": step, "train_loss": 9 / step} for step in range(1, 90)]
    records[::3] = [{"step": record["step"], "train_loss": None} for record in records[::3]]
    records += [{"step": 90, "val_loss": None}, {"step": 90}, {"step": 91, "train_loss": math.nan}]
    draw_loss(records, tmp_path / "loss.png")
    assert curves(tmp_path / "loss.png")[0].sum() > 300
    for records in ([], [{"step": 1}], [{"step": 1, "train_loss": None, "val_loss": None}]):
        draw_loss(records, tmp_path / "loss.png")
        assert not any(curve.any() for curve in curves(tmp_path / "loss.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_the_first_losses_do_not_set_the_scale(tmp_path):
    losses = [1000.0 if step < 3 else 2 - step / 100 for step in range(1, 101)]
    draw_loss([{"step": i, "train_loss": loss} for i, loss in enumerate(losses)], tmp_path / "a.png")
    training, _ = curves(tmp_path / "a.png")
    rows, _ = np.nonzero(training[:, : training.shape[1] * 3 // 4])
    assert np.ptp(rows) > training.shape[0] / 2
