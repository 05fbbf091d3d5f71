"""Pictures of a run: its loss, and who attends to whom."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.core.files import write_whole

WIDEST_PICTURE = 40  # inches


def draw_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Training and validation loss against optimizer steps, as a PNG; what is not finite is left out."""
    from matplotlib.figure import Figure  # half a second: paid by those who draw

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer steps", ylabel="loss (nats per token)")
    keys = {"train_loss": ("training", "-"), "val_loss": ("validation", "o-")}
    each = {key: (key.removeprefix("val_loss/"), ".:") for r in records for key in r if key.startswith("val_loss/")}
    points = [(key, r["step"], r[key]) for r in records for key in keys | each if math.isfinite(r.get(key) or math.nan)]
    for key, (label, style) in (keys | each).items():
        if curve := [(step, loss) for found, step, loss in points if found == key]:
            axes.plot(*zip(*curve, strict=True), style, label=label, linewidth=1, markersize=4)
            if key in keys:
                axes.set_title(f"{label} loss {curve[-1][1]:.4f} at step {curve[-1][0]:,}")
            for text in axes.legend().get_texts():
                text.set_parse_math(False)  # a folder's lone $ is no mathematics
    later = [
        loss for _, _, loss in points[len(points) // 20 :]
    ]  # the first steps fall from ln V; show what comes after
    if later and max(later) > min(later):
        axes.set_ylim(min(later) - 0.05 * (max(later) - min(later)), max(later))
    axes.grid(alpha=0.3)
    save(figure, path)


def draw_attention(maps: np.ndarray, tokens: Sequence[str], path: Path, layer: int | None = None) -> None:
    """Who attends to whom, (L, H, T, T), as a PNG: each head of one layer, or with layer None a grid of all layers.

    Each row of a picture is a token that looks, each column one that is looked at; a row's weights sum to 1.
    """
    from matplotlib.figure import Figure

    heads, length = maps.shape[1], maps.shape[-1]
    shown = [(i, j) for i in (range(len(maps)) if layer is None else [layer]) for j in range(heads)]
    columns = heads if layer is None else math.ceil(math.sqrt(heads))
    rows = math.ceil(len(shown) / columns)
    side = min(max(2.2, 0.17 * length + 0.8), WIDEST_PICTURE / max(rows, columns))
    named = range(0, length, math.ceil(length / max(1, side / 0.14)))  # as many names as there is room for
    names = [tokens[i] for i in named]
    figure = Figure(figsize=(side * columns, side * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False)
    for axes in all_axes.flat[len(shown) :]:
        axes.axis("off")
    for axes, (i, j) in zip(all_axes.flat, shown, strict=False):
        weights = np.where(np.tri(length, dtype=bool), maps[i, j], np.nan)
        image = axes.imshow(weights, cmap="viridis", vmin=0, vmax=1)
        axes.set_title(f"layer {i + 1}, head {j + 1}", fontsize=8)
        axes.set_xticks(named, names, rotation=90, fontsize=6, parse_math=False)  # a lone $ is no mathematics
        axes.set_yticks(named, names, fontsize=6, parse_math=False)
    figure.colorbar(image, ax=all_axes, shrink=0.6, label="attention weight\n(row looks at column)")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the picture whole or not at all, whatever its viewer is doing."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_whole(path, png.getvalue())
