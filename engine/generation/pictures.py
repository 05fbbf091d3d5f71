"""Pictures of a run, as PNG files: the loss curves."""

import contextlib
import functools
import io
import math
import unicodedata
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.cli import warn
from engine.core.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATASET_PREFIX = "val_loss/"  # of the metrics of each dataset of a mixture
WARMUP_FRACTION = 0.05  # of the losses, which are ignored in the scale of the axis
MAX_WARNED_CHARACTERS = 20  # in a message


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
    """Write a figure as a PNG, atomically, with installed fonts for the scripts of its texts."""
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.text import Text

    texts = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    characters = {char for text in texts for char in text.get_text()}
    needed = {ord(char) for char in characters if unicodedata.category(char) not in ("Cc", "Cf")}
    default_font = get_font(findfont(FontProperties()))
    fonts = fallback_fonts(frozenset(needed - default_font.get_charmap().keys()))
    for text in texts:
        text.set_fontfamily([*text.get_fontfamily(), *fonts])
    png = io.BytesIO()
    with warnings.catch_warnings():  # fallback_fonts warns, once
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure.savefig(png, format="png", dpi=120)
    atomic_write(path, png.getvalue())  # a viewer may be reading the file


@functools.cache
def fallback_fonts(code_points: frozenset[int]) -> list[str]:
    """Find installed fonts that together have the characters. Warns if some are in none."""
    from matplotlib.font_manager import fontManager, get_font

    fonts = []
    missing = set(code_points)
    for font in sorted(fontManager.ttflist, key=lambda font: font.name) if missing else ():
        # The last-resort font has an empty box for every character.
        if font.style != "normal" or font.weight != 400 or "Last Resort" in font.name:
            continue
        with contextlib.suppress(OSError, RuntimeError):  # removed or corrupted
            new = missing & get_font(font.fname).get_charmap().keys()
            fonts += [font.name] if new else []
            missing -= new
    if missing:
        listed = " ".join(map(chr, sorted(missing)[:MAX_WARNED_CHARACTERS]))
        problem = f"no installed font has all characters of the picture (got {listed})"
        warn(f"fonts: {problem}. Install fonts for their scripts, such as Noto.")
    return fonts
