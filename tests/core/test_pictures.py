"""The picture of attention maps."""

import matplotlib.image
import numpy as np
import pytest

from engine.core import pictures
from engine.core.pictures import draw_attention


@pytest.mark.parametrize(("layer", "first"), [(None, 0), (0, 0), (1, 3)])
def test_a_panel_has_the_weights_of_a_head_and_none_above_the_diagonal(monkeypatch, layer, first):
    figures = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.append(figure))
    maps = np.random.default_rng(0).random((2, 3, 6, 6))
    draw_attention(maps, list("abcdef"), None, layer)
    *panels, color_bar = figures[0].axes
    panels = [axes for axes in panels if axes.images]
    assert len(panels) == (6 if layer is None else 3) and "weight" in color_bar.get_ylabel()
    for axes, expected in zip(panels, maps.reshape(6, 6, 6)[first:], strict=False):
        weights = axes.images[0].get_array()
        assert (weights.mask == ~np.tri(6, dtype=bool)).all()
        assert (weights.data[~weights.mask] == expected[~weights.mask]).all()
        assert [label.get_text() for label in axes.get_xticklabels()] == list("abcdef")
        assert axes.images[0].get_clim() == (0, 1)
    assert f"layer {2 if layer != 0 else 1}, head 3" in panels[-1].get_title()


@pytest.mark.parametrize(("num_layers", "length"), [(1, 1), (1, 10), (12, 30)])
def test_any_token_can_be_a_label_of_a_map_of_any_size(tmp_path, num_layers, length):
    labels = ["$", "$x_", "\\frac", "\n", "漢", "🚀", "", "�", "<|endoftext|>", "^{"] * 10
    maps = np.broadcast_to(np.eye(length), (num_layers, 1, length, length))
    draw_attention(maps, labels[:length], tmp_path / "a.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "a.png").shape
    assert width < 500 and 200 < height / num_layers < 500
