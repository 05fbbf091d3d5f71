"""Pictures: what is on them."""

import math

import matplotlib.image
import numpy as np
import pytest

from engine.generation.pictures import draw_attention, draw_loss

BRIGHT, DARK = np.array([0.993, 0.906, 0.144]), np.array([0.267, 0.005, 0.329])  # viridis of 1 and of 0


def pixels(path) -> np.ndarray:
    """Red, green and blue of a picture, each 0 to 1: (height, width, 3)."""
    return matplotlib.image.imread(path)[..., :3]


def of_colour(picture: np.ndarray, colour: np.ndarray, tolerance: float = 0.02) -> np.ndarray:
    """Where the picture has a colour, (height, width)."""
    return np.abs(picture - colour).max(axis=-1) < tolerance


def curves(path) -> tuple[np.ndarray, np.ndarray]:
    """Where there is blue, the first curve's colour, and where orange, the second's: all else is grey."""
    picture = pixels(path)
    coloured = np.ptp(picture, axis=-1) > 0.2
    return coloured & (picture[..., 2] > picture[..., 0]), coloured & (picture[..., 0] > picture[..., 2])


# Loss curves.


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


def test_training_and_validation_have_a_curve_each(tmp_path):
    training = [{"step": step, "train_loss": 3.0} for step in range(1, 41)]
    validation = [{"step": 20, "val_loss": 5.0}, {"step": 40, "val_loss": 4.0}]
    draw_loss(training + validation, tmp_path / "both.png")
    draw_loss(training, tmp_path / "one.png")
    both, one = curves(tmp_path / "both.png"), curves(tmp_path / "one.png")
    assert min(both[0].sum(), both[1].sum(), one[0].sum()) > 500 and not one[1].any()
    (blue_rows, _), (orange_rows, _) = (np.nonzero(curve[:, :700]) for curve in both)  # without the legend
    assert blue_rows.min() > orange_rows.max()  # lower on the picture


def test_each_dataset_of_a_mix_has_a_curve_whatever_its_name(tmp_path):
    records = [{"step": step, "train_loss": 3.0, "val_loss": 3.5} for step in (1, 20, 40)]
    draw_loss(records, tmp_path / "all.png")
    each = [{"val_loss/a": 5.0, "val_loss/$\\b$": 2.0 - record["step"] / 40} for record in records]
    draw_loss([record | losses for record, losses in zip(records, each, strict=True)], tmp_path / "each.png")
    alone, beside = (np.ptp(pixels(tmp_path / name), axis=-1) > 0.2 for name in ("all.png", "each.png"))
    assert beside.sum() > alone.sum() + 300


def test_one_evaluation_is_a_point(tmp_path):
    draw_loss([{"step": 1, "val_loss": 2.0}], tmp_path / "loss.png")
    rows, columns = np.nonzero(np.logical_or(*curves(tmp_path / "loss.png"))[:, 100:700])
    assert 20 < len(rows) < 400 and max(np.ptp(rows), np.ptp(columns)) < 20


def test_losses_that_are_missing_or_not_finite_leave_the_others_on_the_picture(tmp_path):
    whole = [{"step": step, "train_loss": 9 / step} for step in range(1, 90)]
    gaps = [record | ({"train_loss": None} if record["step"] % 3 == 0 else {}) for record in whole]
    gaps += [{"step": 90, "val_loss": None}, {"step": 90}, {"step": 91, "train_loss": math.nan}]
    draw_loss(gaps, tmp_path / "loss.png")
    assert curves(tmp_path / "loss.png")[0].sum() > 300


def test_no_record_at_all_is_an_empty_picture(tmp_path):
    for records in ([], [{"step": 1}], [{"step": 1, "train_loss": None, "val_loss": None}]):
        draw_loss(records, tmp_path / "loss.png")
        assert not any(curve.any() for curve in curves(tmp_path / "loss.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_the_first_losses_do_not_flatten_what_comes_after(tmp_path):
    records = [{"step": step, "train_loss": 1000.0 if step < 3 else 2 - step / 100} for step in range(1, 101)]
    draw_loss(records, tmp_path / "loss.png")
    training, _ = curves(tmp_path / "loss.png")
    rows, _ = np.nonzero(training[:, : training.shape[1] * 3 // 4])
    assert np.ptp(rows) > training.shape[0] / 2


# Attention.


def maps_of(length: int, layers: int = 1, heads: int = 1) -> np.ndarray:
    """Each position attends to itself alone: (L, H, T, T)."""
    return np.broadcast_to(np.eye(length, dtype=np.float32), (layers, heads, length, length)).copy()


def squares(path) -> list[tuple[slice, slice]]:
    """Where the maps are, in reading order, found by the dark of their zeros; the colour bar is too thin to be one."""
    dark = of_colour(pixels(path), DARK) | of_colour(pixels(path), BRIGHT)
    found = []
    for rows in runs(dark.sum(axis=1) > 15):
        for columns in runs(dark[rows].any(axis=0)):
            if min(rows.stop - rows.start, columns.stop - columns.start) > 40:
                found.append((rows, columns))
    return found


def runs(flags: np.ndarray) -> list[slice]:
    """Where flags are up without a gap of more than 3."""
    at, gap = np.nonzero(flags)[0], 3
    starts = [i for i in range(len(at)) if i == 0 or at[i] - at[i - 1] > gap]
    return [slice(at[i], at[j - 1] + 1) for i, j in zip(starts, [*starts[1:], len(at)], strict=True)]


def cells(path, square: tuple[slice, slice], length: int) -> np.ndarray:
    """The colour in the middle of each cell of a map, (T, T, 3)."""
    rows, columns = square
    middles = [
        np.linspace(side.start, side.stop - 1, 2 * length + 1).round().astype(int)[1::2] for side in (rows, columns)
    ]
    return pixels(path)[np.ix_(*middles)]


def test_a_map_is_bright_where_the_weights_are_dark_where_they_are_not_and_blank_above_the_diagonal(tmp_path):
    length = 6
    draw_attention(maps_of(length), list("abcdef"), tmp_path / "a.png")
    (square,) = squares(tmp_path / "a.png")
    map_cells = cells(tmp_path / "a.png", square, length)
    bright, dark = of_colour(map_cells, BRIGHT), of_colour(map_cells, DARK)
    assert (bright == np.eye(length, dtype=bool)).all()
    assert (dark == np.tri(length, k=-1, dtype=bool)).all()
    assert (map_cells[np.triu_indices(length, 1)] == 1).all()


def test_a_map_shows_the_rows_that_look_and_the_columns_that_are_looked_at(tmp_path):
    maps = np.zeros((1, 1, 5, 5), np.float32)
    maps[0, 0, :, 0] = 1  # all look at the first
    draw_attention(maps, list("abcde"), tmp_path / "a.png")
    (square,) = squares(tmp_path / "a.png")
    bright = of_colour(cells(tmp_path / "a.png", square, 5), BRIGHT)
    assert bright[:, 0].all() and not bright[:, 1:].any()


def test_brightness_is_the_weight(tmp_path):
    length = 5
    maps = np.tri(length, dtype=np.float32)[None, None] / np.arange(1, length + 1, dtype=np.float32)[:, None]
    draw_attention(maps, list("abcde"), tmp_path / "a.png")
    picture = pixels(tmp_path / "a.png")
    rows, columns = np.nonzero(of_colour(picture[:, : picture.shape[1] * 3 // 4], BRIGHT))  # the first token's 1
    top, left, cell = rows.min(), columns.min(), np.ptp(rows) + 1
    column = [picture[int(top + (i + 0.5) * cell), int(left + cell / 2)].sum() for i in range(length)]
    assert column == sorted(column, reverse=True) and len(set(column)) == length


@pytest.mark.parametrize(("layer", "shape"), [(None, (2, 3)), (0, (2, 2)), (1, (2, 2))])
def test_all_layers_are_a_grid_and_one_is_its_heads(tmp_path, layer, shape):
    maps = maps_of(6, layers=2, heads=3)
    maps[1, 2] = 0
    maps[1, 2, :, 0] = 1  # the last head of the last layer differs
    draw_attention(maps, list("abcdef"), tmp_path / "a.png", layer)
    found = squares(tmp_path / "a.png")
    tops = sorted({rows.start for rows, _ in found})
    per_row = [sum(rows.start == top for rows, _ in found) for top in tops]
    assert per_row == ([3, 3] if layer is None else [2, 1]) and len(tops) == shape[0]
    bright = [of_colour(cells(tmp_path / "a.png", square, 6), BRIGHT) for square in found]
    differs = [bool(one[:, 0].all()) for one in bright]
    assert differs == [False] * (len(found) - 1) + [layer != 0]


def test_any_token_can_be_a_label(tmp_path):
    labels = ["$", "$x_", "\\frac", "\n", "漢", "🚀", "", "�", "<|endoftext|>", "^{"]
    draw_attention(maps_of(10), labels, tmp_path / "a.png")
    assert len(squares(tmp_path / "a.png")) == 1


def test_a_long_prompt_and_many_layers_still_make_a_picture_that_opens(tmp_path):
    draw_attention(maps_of(100, layers=18), ["$x_"] * 100, tmp_path / "a.png")
    width, height = np.frombuffer((tmp_path / "a.png").read_bytes()[16:24], ">u4")  # in its header: quicker to read
    assert 200 < width < 500 and 4000 < height < 5000


def test_a_single_token_is_a_map_of_one_cell(tmp_path):
    draw_attention(maps_of(1), ["a"], tmp_path / "a.png")
    assert of_colour(pixels(tmp_path / "a.png"), BRIGHT).sum() > 500
