"""Pictures of a run, as PNG files: the loss curves."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASET_PREFIX = "val_loss/"  # of the metrics of each dataset of a mixture
WARMUP_FRACTION = 0.05  # of the curve: these losses do not set the scale of the axis


def draw_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the losses in records of metrics.jsonl against the step. Non-finite ones are omitted."""
    from matplotlib.figure import Figure  # takes half a second: imported only to draw

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer steps", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    styles = {"train_loss": ("training", "-"), "val_loss": ("validation", "o-")}
    all_keys = dict.fromkeys(key for record in records for key in record)
    dataset_keys = [key for key in all_keys if key.startswith(DATASET_PREFIX)]
    for key in dataset_keys:
        styles[key] = (key.removeprefix(DATASET_PREFIX), ".:")
    curves: dict[str, list[tuple[int, float]]] = {key: [] for key in styles}
    losses = []  # in the order of steps
    for record in records:
        for key in styles:
            loss = record.get(key)
            if loss is not None and math.isfinite(loss):
                curves[key].append((record["step"], loss))
                losses.append(loss)
    for key, (label, style) in styles.items():
        if not curves[key]:
            continue
        axes.plot(*zip(*curves[key], strict=True), style, label=label, linewidth=1, markersize=4)
        if key not in dataset_keys:
            step, loss = curves[key][-1]
            axes.set_title(f"{label} loss {loss:.4f} at step {step:,}")
        for text in axes.legend().get_texts():
            text.set_parse_math(False)  # a dataset's name may contain "$"
    scale = losses[int(len(losses) * WARMUP_FRACTION) :]
    if scale and max(scale) > min(scale):
        axes.set_ylim(min(scale) - 0.05 * (max(scale) - min(scale)), max(scale))
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG, atomically: a viewer may be reading the file."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    atomic_write(path, png.getvalue())
