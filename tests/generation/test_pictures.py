"""The picture of the losses."""

import math
import warnings

import matplotlib.image
import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib import font_manager

import engine.generation.pictures as pictures
from engine.generation.pictures import draw_loss


@pytest.fixture
def axes_of(monkeypatch):
    """The axes of the picture of some records, which is not written."""

    def axes_of(records):
        figures = []
        monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure))
        draw_loss(records, None)
        return figures[0].axes[0]

    return axes_of


def test_training_validation_and_each_dataset_have_curves_of_their_finite_losses(axes_of):
    records = [{"step": step, "train_loss": 9 / step, "val_loss": 4.0} for step in range(1, 6)]
    records += [{"step": 6, "train_loss": None}, {"step": 7}, {"step": 8, "val_loss": math.nan}]
    records += [{"step": 9, "val_loss/$\\b$": 2.0}]
    axes = axes_of(records)
    curves = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert curves == {
        "training": [[step, 9 / step] for step in range(1, 6)],
        "validation": [[step, 4.0] for step in range(1, 6)],
        "$\\b$": [[9, 2.0]],
    }
    assert "4.0000 at step 5" in axes.get_title()
    assert len(axes.get_legend().get_texts()) == 3


def test_the_first_losses_do_not_set_the_scale(axes_of):
    losses = [1000.0 if step < 3 else 2 - step / 100 for step in range(1, 101)]
    axes = axes_of([{"step": step, "train_loss": loss} for step, loss in enumerate(losses, 1)])
    low, high = axes.get_ylim()
    assert 0.9 < low < 1 and 1.9 < high < 2


@pytest.mark.parametrize(
    "records", [[], [{"step": 1}], [{"step": 1, "val_loss": 2.0, "val_loss/$\\b$": 2.0}]]
)
def test_a_picture_of_any_records_is_written(tmp_path, records):
    draw_loss(records, tmp_path / "loss.png")
    picture = matplotlib.image.imread(tmp_path / "loss.png")
    assert picture.shape[:2] == (540, 960)
    assert (np.ptp(picture[..., :3], axis=-1) > 0.2).any() == bool(records and len(records[0]) > 1)
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


@pytest.fixture
def add_font(monkeypatch, tmp_path):
    """Install a font for a test, in which characters are black squares."""
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [*font_manager.fontManager.ttflist])
    pictures.fallback_fonts.cache_clear()

    def add_font(name: str, characters: str) -> None:
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for point in ((0, 900), (900, 900), (900, 0)):
            pen.lineTo(point)
        pen.closePath()
        names = [".notdef", *(f"u{ord(char):04X}" for char in characters)]
        builder = FontBuilder(1000, isTTF=True)
        builder.setupGlyphOrder(names)
        builder.setupCharacterMap(dict(zip(map(ord, characters), names[1:], strict=True)))
        builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
        builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
        builder.setupHorizontalHeader(ascent=900, descent=-100)
        builder.setupNameTable({"familyName": name, "styleName": "Regular"})
        builder.setupOS2(usWeightClass=400)
        builder.setupPost()
        builder.save(tmp_path / f"{name}.ttf")
        font_manager.fontManager.addfont(tmp_path / f"{name}.ttf")

    yield add_font
    pictures.fallback_fonts.cache_clear()


# Two scripts in two fonts; a font for a part of the text; an emoji; no missing character.
@pytest.mark.parametrize(
    ("text", "fonts", "missing"),
    [
        ("漢字 ਕ é", {"Han": "漢字", "Gurmukhi": "ਕ"}, ""),
        ("漢字", {"Han": "漢"}, "字"),
        ("🫨 \u200d\n", {}, "🫨"),
        ("éж א", {}, ""),
    ],
)
def test_texts_are_drawn_with_the_fonts_of_their_scripts(
    tmp_path, add_font, capsys, text, fonts, missing
):
    for name, characters in fonts.items():
        add_font(name, characters)
    records = [{"step": step, "val_loss": 2.0 / step, f"val_loss/{text}": 2.5} for step in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            draw_loss(records, tmp_path / "loss.png")
    output = capsys.readouterr()
    assert output.err.count("\n") == bool(missing) and output.out == ""
    assert (f"(got {missing})" in output.err) == bool(missing)
    black = (matplotlib.image.imread(tmp_path / "loss.png")[..., :3] < 0.1).all(-1)
    num_squares = sum(black[y : y + 8, x : x + 8].all() for y in range(532) for x in range(952))
    assert (num_squares > 0) == bool(fonts)
