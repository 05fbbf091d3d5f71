"""The picture of attention maps, as a PNG file."""

import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_PICTURE_INCHES = 40
MIN_MAP_INCHES = 2.2
INCHES_PER_TOKEN = 0.17
MIN_INCHES_PER_LABEL = 0.14
# Fonts for the scripts of tokens, by preference.
FONT_FAMILIES = (
    *("DejaVu Sans", "Noto Sans", "Noto Sans CJK JP", "Noto Emoji", "WenQuanYi Zen Hei"),
    *("Arial Unicode MS", "Microsoft YaHei", "Segoe UI Symbol", "Unifont"),
)


def draw_attention(
    maps: np.ndarray, labels: Sequence[str], path: Path, layer: int | None = None
) -> None:
    """Draw attention maps (L, H, T, T) as a PNG: the heads of one layer, or all in a grid.

    A row of a map is a query's token, and a column a key's; the weights of a row sum to 1.
    """
    from matplotlib.figure import Figure  # here, because it takes half a second

    num_layers, num_heads, length, _ = maps.shape
    layers = range(num_layers) if layer is None else [layer]
    panels = [(i, j) for i in layers for j in range(num_heads)]
    num_columns = num_heads if layer is None else math.ceil(math.sqrt(num_heads))
    num_rows = math.ceil(len(panels) / num_columns)
    side = max(MIN_MAP_INCHES, INCHES_PER_TOKEN * length + 0.8)
    side = min(side, MAX_PICTURE_INCHES / max(num_rows, num_columns))
    ticks = range(0, length, math.ceil(length * MIN_INCHES_PER_LABEL / side))
    tick_labels = [labels[i] for i in ticks]
    figure = Figure(figsize=(side * num_columns, side * num_rows), layout="constrained")
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in all_axes.flat[len(panels) :]:
        axes.axis("off")
    for axes, (i, j) in zip(all_axes.flat, panels, strict=False):
        weights = np.where(np.tri(length, dtype=bool), maps[i, j], np.nan)
        image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {i + 1}, head {j + 1}", fontsize=8)
        # parse_math=False: a token may be "$".
        axes.set_xticks(ticks, tick_labels, rotation=90, fontsize=6, parse_math=False)
        axes.set_yticks(ticks, tick_labels, fontsize=6, parse_math=False)
    label = "attention weight\n(row looks at column)"
    figure.colorbar(image, ax=all_axes, shrink=0.6, label=label)
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG, atomically, with those of FONT_FAMILIES that are installed."""
    from matplotlib.font_manager import fontManager
    from matplotlib.text import Text

    installed = fontManager.get_font_names()
    families = [name for name in FONT_FAMILIES if name in installed]
    for text in figure.findobj(Text):
        if isinstance(text, Text):
            text.set_fontfamily(families)
    png = io.BytesIO()
    with warnings.catch_warnings():  # a character of no installed font is a box
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(png, format="png", dpi=120)
    atomic_write(path, png.getvalue())  # a viewer may be reading the file
