"""What watches training: the loop says what happened, and knows nothing of them."""

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from engine.pictures import draw_loss
from engine.run_folder import Metrics
from engine.settings import flatten

SPIKE = 6  # standard deviations above the recent mean: a loss to point out


def say(text: str) -> None:
    """Print a line above the progress bar."""
    tqdm.write(text, file=sys.stdout)


def warn(text: str) -> None:
    """Print a line on stderr, above the progress bar."""
    tqdm.write(f"warning: {text}", file=sys.stderr)


class Clock:
    """How long a run has trained, those parts before a resume too, and how fast it does."""

    def __init__(self, elapsed: float, step: int):
        self.begun = time.monotonic() - elapsed
        self.since, self.since_step = time.monotonic(), step

    @property
    def elapsed(self) -> float:
        """Seconds since the run's first step, not counting those between an interruption and the resumption."""
        return time.monotonic() - self.begun

    def steps_per_second(self, step: int) -> float:
        """The speed since the last call, pauses not counted."""
        now = time.monotonic()
        speed = (step - self.since_step) / max(now - self.since, 1e-9)
        self.since, self.since_step = now, step
        return speed

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around something else than training, which is no part of its speed."""
        paused = time.monotonic()
        yield
        self.since += time.monotonic() - paused


class Observer:
    """Something that watches a run; its methods are called as they are named, and do nothing unless overridden."""

    def started(self, run: Any) -> None:
        """The run is about to take its first step, perhaps after a resume."""

    def stepped(self, run: Any) -> None:
        """One more optimizer step is done."""

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        """A training record (with ``train_loss``) or an evaluation (with ``val_loss``) was made."""

    def closed(self) -> None:
        """The run has ended, however it did."""


def notify(observers: Sequence[Observer], what: str, *arguments: Any) -> None:
    """Call that method of each of the observers."""
    for observer in observers:
        getattr(observer, what)(*arguments)


class MetricsFile(Observer):
    """Writes every record to metrics.jsonl, points out losses that jump, and draws the loss after each evaluation."""

    def started(self, run: Any) -> None:
        self.metrics = Metrics(run.config.out, run.step)

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        if "train_loss" in record:
            record["loss_z_score"] = score = round(self.metrics.z_score(record["train_loss"]), 2)
            if score > SPIKE:
                jump = f"the loss jumped to {record['train_loss']:.4f}, {score:.0f} deviations above the recent mean"
                say(f"step {run.step:>6,}  {jump}")
        self.metrics.add(record)
        if "val_loss" in record:
            draw_loss(self.metrics.records, run.config.out / "loss.png")


class Terminal(Observer):
    """What is about to happen, the live line on a terminal, and a line for each evaluation."""

    def started(self, run: Any) -> None:
        config, model, data, size = run.config, run.config.model, run.dataset, len(run.dataset.train)
        tokens = config.steps * run.tokens_per_step
        say(
            f"data   {data.path}: {size:,} tokens to train on, {len(data.val):,} to validate; "
            f"vocabulary {data.tokenizer.vocab_size:,} ({data.tokenizer.kind})\n"
            f"model  {run.model.num_parameters():,} parameters: {model.num_layers} layers, {model.num_heads} heads, "
            f"d_model {model.d_model}, context {model.context_length}\n"
            f"run    {config.steps:,} steps of {config.batch_size} × {model.context_length} tokens = {tokens:,} "
            f"({tokens / size:.1f} epochs), {config.optimizer.optimizer}, on {run.world.size} × "
            f"{run.world.device} in {config.dtype} → {config.out}"
        )
        line = "step {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # fits 60 columns
        total = run.config.steps
        self.bar = tqdm(total=total, initial=run.step, bar_format=line, dynamic_ncols=True, disable=None)

    def stepped(self, run: Any) -> None:
        self.bar.update()

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        if "train_loss" in record:
            self.bar.set_postfix_str(f"loss {record['train_loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s")
        else:
            loss = f"validation loss {record['val_loss']:.4f}, {record['val_bits_per_byte']:.4f} bits per byte"
            say(f"step {run.step:>6,}  {loss}  ({run.clock.elapsed:,.0f} s)")

    def closed(self) -> None:
        if hasattr(self, "bar"):
            self.bar.close()


class WeightsAndBiases(Observer):
    """Logs every record to Weights & Biases."""

    def started(self, run: Any) -> None:
        import wandb

        out, settings = run.config.out, flatten(run.config)
        name = {"name": out.resolve().name, "id": out.resolve().name}
        self.log = wandb.init(project="gpt-trainer", dir=out, config=settings, resume="allow", **name)

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        self.log.log(record, step=record["step"])

    def closed(self) -> None:
        if hasattr(self, "log"):
            self.log.finish()
