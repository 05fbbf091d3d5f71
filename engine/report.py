"""What a run reports: metrics.jsonl, Weights & Biases, and pictures of loss and attention."""

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

WIDEST_PICTURE = 40  # inches
RECENT = 40  # records that a loss is compared with


class Recorder:
    """Appends a run's records to metrics.jsonl, and to Weights & Biases if asked."""

    def __init__(self, run: Path, first_step: int, settings: dict[str, Any], wandb: bool):
        """Records after first_step, written by a run that was then interrupted, are dropped: they come again."""
        self.path = run / "metrics.jsonl"
        self.records = []
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]
            self.records = [record for record in whole if record["step"] <= first_step]
        self.path.write_text("".join(json.dumps(record) + "\n" for record in self.records), encoding="utf-8")
        self.file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self.wandb = None
        if wandb:
            import wandb as weights_and_biases

            name = run.resolve().name
            self.wandb = weights_and_biases.init(
                project="gpt-trainer", name=name, id=name, dir=run, config=settings, resume="allow"
            )

    def add(self, record: dict[str, Any]) -> None:
        """Write one record; it must have a step."""
        self.records.append(record)
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(record, step=record["step"])

    def last(self, key: str) -> dict[str, Any] | None:
        """The newest record that has the key."""
        return next((record for record in reversed(self.records) if key in record), None)

    def z_score(self, loss: float) -> float:
        """How many standard deviations a training loss lies above the mean of the last few; 0 before there are any."""
        recent = [record["train_loss"] for record in self.records[-RECENT:] if "train_loss" in record]
        recent = [one for one in recent if math.isfinite(one)]
        if len(recent) < RECENT // 2 or not math.isfinite(loss):
            return 0.0
        return (loss - statistics.fmean(recent)) / max(statistics.stdev(recent), 1e-9)

    def draw_loss(self) -> None:
        """Draw every loss so far into loss.png."""
        draw_loss(self.records, self.path.with_name("loss.png"))

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.finish()


class Progress:
    """The live line on a terminal, and the clock: how long a run has trained, and how fast it does."""

    def __init__(self, step: int, steps: int, tokens_per_step: int, elapsed: float, shown: bool):
        """step of steps are done, which took elapsed seconds; shown is whether this process may speak at all."""
        self.tokens_per_step = tokens_per_step
        silent = None if shown else True  # None: silent unless a terminal is there
        line = "step {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # fits 60 columns
        self.bar = tqdm(total=steps, initial=step, bar_format=line, dynamic_ncols=True, disable=silent)
        self.begun = time.monotonic() - elapsed
        self.since, self.since_step = time.monotonic(), step

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.bar.close()

    @property
    def elapsed(self) -> float:
        """Seconds since the run's first step, not counting those between an interruption and the resumption."""
        return time.monotonic() - self.begun

    def advance(self) -> None:
        """One more step is done."""
        self.bar.update()

    def measure(self, step: int, loss: float) -> float:
        """Show the loss and speed; return tokens per second since the last measurement, pauses not counted."""
        now = time.monotonic()
        speed = (step - self.since_step) * self.tokens_per_step / max(now - self.since, 1e-9)
        self.since, self.since_step = now, step
        self.bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
        return speed

    def pause(self, work: Callable, *arguments: Any) -> None:
        """Do something else than training, which is no part of its speed."""
        paused = time.monotonic()
        work(*arguments)
        self.since += time.monotonic() - paused


def draw_loss(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Training and validation loss against optimizer steps, as a PNG."""
    from matplotlib.figure import Figure  # half a second: paid by those who draw

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer steps", ylabel="loss (nats per token)")
    for key, label, style in (("train_loss", "training", "-"), ("val_loss", "validation", "o-")):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    losses = [record[key] for record in records for key in ("train_loss", "val_loss") if key in record]
    later = losses[len(losses) // 20 :]  # the first steps fall from ln V; show what comes after
    if later and max(later) > min(later):
        axes.set_ylim(min(later) - 0.05 * (max(later) - min(later)), max(later))
    if losses:
        axes.legend()
    last = next((record for record in reversed(records) if "val_loss" in record), None)
    if last:
        axes.set_title(f"validation loss {last['val_loss']:.4f} at step {last['step']:,}")
    axes.grid(alpha=0.3)
    save(figure, path)


def draw_attention(maps: np.ndarray, tokens: Sequence[str], path: Path, layer: int | None = None) -> None:
    """Who attends to whom, (L, H, T, T), as a PNG: each head of one layer, or with layer None a grid of all layers.

    Each row of a picture is a token that looks, each column one that is looked at; a row's weights sum to 1.
    """
    from matplotlib.figure import Figure

    heads, length = maps.shape[1], maps.shape[-1]
    if layer is None:
        grid = [[(f"layer {i + 1}, head {j + 1}", maps[i, j]) for j in range(heads)] for i in range(len(maps))]
    else:
        columns = int(np.ceil(np.sqrt(heads)))
        flat = [(f"layer {layer + 1}, head {j + 1}", maps[layer, j]) for j in range(heads)]
        grid = [flat[i : i + columns] for i in range(0, heads, columns)]
    side = min(max(2.2, 0.17 * length + 0.8), WIDEST_PICTURE / max(len(grid), len(grid[0])))
    named = range(0, length, math.ceil(length / max(1, side / 0.14)))  # as many names as there is room for
    figure = Figure(figsize=(side * len(grid[0]), side * len(grid)), layout="constrained")
    all_axes = figure.subplots(len(grid), len(grid[0]), squeeze=False)
    labels = [token.replace("\n", "⏎").replace(" ", "·") for token in tokens]
    for row, row_axes in enumerate(all_axes):
        for column, axes in enumerate(row_axes):
            if column >= len(grid[row]):
                axes.axis("off")
                continue
            title, weights = grid[row][column]
            image = axes.imshow(np.where(np.tri(length, dtype=bool), weights, np.nan), cmap="viridis", vmin=0, vmax=1)
            axes.set_title(title, fontsize=8)
            names = [labels[i] for i in named]  # a token may be a lone $, which is no mathematics
            axes.set_xticks(named, names, rotation=90, fontsize=6, parse_math=False)
            axes.set_yticks(named, names, fontsize=6, parse_math=False)
    figure.colorbar(image, ax=all_axes, shrink=0.6, label="attention weight (row looks at column)")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the picture whole or not at all, whatever its viewer is doing."""
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=120)
    partial.rename(path)
