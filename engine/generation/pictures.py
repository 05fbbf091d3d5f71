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
WARMUP_FRACTION = 0.05  # of the losses, which are ignored in the scale of the axis


def draw_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the finite losses in records of metrics.jsonl against the step."""
    from matplotlib.figure import Figure  # here, because it takes half a second

    styles = {"train_loss": ("training", "-"), "val_loss": ("validation", "o-")}
    keys = dict.fromkeys(key for record in records for key in record)
    for key in keys:
        if key.startswith(DATASET_PREFIX):
            styles[key] = (key.removeprefix(DATASET_PREFIX), ".:")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer steps", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    all_points = []
    for key, (label, style) in styles.items():
        points = [
            (record["step"], record[key])
            for record in records
            if record.get(key) is not None and math.isfinite(record[key])
        ]
        if not points:
            continue
        all_points += points
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
        if not key.startswith(DATASET_PREFIX):
            step, loss = points[-1]
            axes.set_title(f"{label} loss {loss:.4f} at step {step:,}")
        for text in axes.legend().get_texts():
            text.set_parse_math(False)  # a dataset's name may contain "$"
    losses = [loss for _, loss in sorted(all_points)][int(len(all_points) * WARMUP_FRACTION) :]
    if losses and max(losses) > min(losses):
        axes.set_ylim(min(losses) - 0.05 * (max(losses) - min(losses)), max(losses))
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as a PNG, atomically: a viewer may be reading the file."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120)
    atomic_write(path, png.getvalue())
