"""What watches training, and what is said of it: the loop says what happened, and knows nothing of its observers."""

import contextlib
import itertools
import json
import math
import os
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

from tqdm import tqdm

from engine.dataset import Examples
from engine.examples import end_of_turn
from engine.files import to_json, write_whole
from engine.generate import generate_text, opening, texts
from engine.kernels import for_decoding
from engine.optimizer import learning_rate_factor
from engine.pictures import draw_loss
from engine.settings import flatten

RECENT = 40  # records that a loss is compared with
SAMPLE_TOKENS = 200  # of the sample at the end
LOGGED_TOKENS = 100  # of each that is logged
SAVED_PER_SECOND = 5e8  # bytes of a checkpoint, written and hashed
SHUTDOWN = "30"  # seconds that torchrun gives processes to end, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise
SPIKE = 6  # standard deviations above the recent mean: a loss to point out


def say(text: str, end: str = "\n", file: TextIO | None = None) -> None:
    """Print above the progress bar, on stdout unless told otherwise; a reader that has left costs nothing."""
    file = file or sys.stdout
    try:
        tqdm.write(text, file=file, end=end)
        file.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def warn(text: str) -> None:
    """Print a line on stderr, above the progress bar."""
    say(f"warning: {text}", file=sys.stderr)


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


def notify(observers: list[Any], what: str, *arguments: Any) -> None:
    """Call the method of that name of each observer that has it; one that fails is told of, and never ends the run.

    They are ``started(run)``, ``stepped(run)``, ``recorded(run, record)`` of training (with ``train_loss``) or an
    evaluation (with ``val_loss``), and ``closed()``, however the run ended.
    """
    for observer in tuple(observers):
        try:
            getattr(observer, what, lambda *arguments: None)(*arguments)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            warn(f"{type(observer).__name__} failed ({reason}); training goes on")
            if what == "started":  # nothing good would come of it
                observers.remove(observer)


class MetricsFile:
    """Writes every record to metrics.jsonl, points out losses that jump, and draws the loss after each evaluation."""

    def started(self, run: Any) -> None:
        """Records after the step that is resumed from are dropped: they come again. What is no record is put aside."""
        self.path, self.records, damaged = run.config.out / "metrics.jsonl", [], []
        found = self.path.read_bytes() if self.path.exists() else b""
        for line in filter(bytes.strip, found.split(b"\n")[:-1]):  # a kill may have torn the last
            try:
                if (record := json.loads(line))["step"] <= run.step:
                    self.records.append(record)
            except (ValueError, TypeError, KeyError, RecursionError):
                damaged.append(line + b"\n")
        if damaged:
            aside = self.path.with_suffix(".damaged")
            write_whole(aside, (aside.read_bytes() if aside.exists() else b"") + b"".join(damaged))
            warn(f"{self.path} has {len(damaged)} lines that are no records; they are in {aside} now")
        kept = "".join(f"{to_json(record)}\n" for record in self.records).encode()
        if kept != found:
            write_whole(self.path, kept)

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        """Write the record, with ``loss_z_score`` if it is of training."""
        if "train_loss" in record:
            record["loss_z_score"] = score = round(self.z_score(record["train_loss"]), 2)
            if score > SPIKE:
                jump = f"the loss jumped to {record['train_loss']:.4f}, {score:.0f} deviations above the recent mean"
                say(f"step {run.step:>6,}  {jump}")
        self.records.append(record)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{to_json(record)}\n")
        if "val_loss" in record:
            draw_loss(self.records, run.config.out / "loss.png")

    def z_score(self, loss: float) -> float:
        """How many standard deviations a training loss lies above the mean of the last few; 0 before there are any."""
        losses = [record.get("train_loss") for record in self.records[-RECENT:]]
        recent = [one for one in losses if one is not None and math.isfinite(one)]
        if len(recent) < RECENT // 2 or not math.isfinite(loss):
            return 0.0
        return (loss - statistics.fmean(recent)) / max(statistics.stdev(recent), 1e-9)


class Terminal:
    """What is about to happen, the live line on a terminal, and a line for each evaluation."""

    def started(self, run: Any) -> None:
        config, model, data = run.config, run.config.model, run.dataset
        tokens = config.steps * run.tokens_per_step
        splits = [split for one in data.datasets for split in (one.train, one.val)]
        long = [split.too_long for split in splits if isinstance(split, Examples)]
        if any(long):
            done = "cut" if config.long_examples == "cut" else "left out"
            say(f"{sum(long):,} examples are longer than the context, {model.context_length} + 1 tokens: {done}")
        epochs = ", ".join(f"{tokens / epoch:.1f}" for epoch in data.epochs)
        say(
            f"data   {data.describe()}; vocabulary {data.tokenizer.vocab_size:,} ({data.tokenizer.kind})\n"
            f"model  {run.model.num_parameters:,} parameters: {model.num_layers} layers, {model.num_heads} heads, "
            f"d_model {model.d_model}, context {model.context_length}\n"
            f"run    {config.steps:,} steps of {config.batch_size} × {run.tokens_per_step // config.batch_size} tokens "
            f"= {tokens:,} ({epochs} epochs), {config.optimizer.optimizer}, on {run.world.size} × "
            f"{run.world.device} in {config.dtype} → {config.out}"
        )
        saved = sum(tensor.numel() * tensor.element_size() for tensor in run.optimizer.state().values())
        seconds = (saved + 4 * run.model.num_parameters) / SAVED_PER_SECOND
        given = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN))
        if run.world.launch and seconds > given:
            advice = f"set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * seconds:.0f} before it, or a save at the end may be lost"
            say(f"a save may take {seconds:.0f} s, and torchrun kills {given:.0f} s after SIGTERM: {advice}")
        self.skipped = int(run.optimizer.guard["skipped"])
        line = "step {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"  # fits 60 columns
        total = run.config.steps
        self.bar = tqdm(total=total, initial=run.step, bar_format=line, dynamic_ncols=True, disable=None)

    def stepped(self, run: Any) -> None:
        self.bar.update()

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        if "train_loss" in record:
            self.bar.set_postfix_str(f"loss {record['train_loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s")
            if more := record["skipped_steps"] - self.skipped:
                self.skipped += more
                say(f"step {run.step:>6,}  {more} skipped since the last record: their gradients were not finite")
        else:
            loss = f"validation loss {record['val_loss']:.4f}, {record['val_bits_per_byte']:.4f} bits per byte"
            say(f"step {run.step:>6,}  {loss_of_each(record) or loss}  ({run.clock.elapsed:,.0f} s)")

    def closed(self) -> None:
        if hasattr(self, "bar"):
            self.bar.close()


class WeightsAndBiases:
    """Logs every record to Weights & Biases, against tokens and steps, and samples in a table."""

    def started(self, run: Any) -> None:
        import wandb

        out, settings = run.config.out, flatten(run.config)
        known = out / "wandb.id"  # in the run's folder: another of its name is another run
        if not known.exists():
            write_whole(known, secrets.token_hex(8).encode())
        name = {"name": out.resolve().name, "id": known.read_text(encoding="utf-8").strip()}
        self.log = wandb.init(project="gpt-trainer", dir=out, config=settings, resume="allow", **name)
        self.log.define_metric("tokens")
        self.log.define_metric("*", step_metric="tokens")
        self.table = partial(wandb.Table, ["step", "tokens", "sample"])
        self.samples: list[list[Any]] = []

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        record = {"tokens": run.step * run.tokens_per_step} | record
        if "val_loss" in record and not run.world.sharded:  # every process would have to take part
            self.samples.append([run.step, record["tokens"], "".join(sample(run, LOGGED_TOKENS))])
            record |= {"samples": self.table(data=self.samples)}
        self.log.log(record, step=record["step"])

    def closed(self) -> None:
        if hasattr(self, "log"):
            self.log.finish()


def loss_of_each(record: dict[str, Any]) -> str:
    """The validation loss, and that on each dataset of a mix, whose names are cut to fit a terminal; else nothing."""
    losses = {name: loss for key, loss in record.items() for _, found, name in [key.partition("val_loss/")] if found}
    room = max(4, (shutil.get_terminal_size().columns - 36) // max(1, len(losses)) - 8)
    names = [name if len(name) <= room else f"{name[: room - 1]}…" for name in losses]
    each = ", ".join(f"{name} {loss:.3f}" for name, loss in zip(names, losses.values(), strict=True))
    return each and f"loss {record['val_loss']:.4f}: {each}"


def describe(changed: dict[str, Sequence], run: Any) -> str:
    """What a resume changes, {name: (then, now)}, and what that makes of the learning rate, to be said."""
    config, steps = run.config.optimizer, run.config.steps
    own = {name: then for name, (then, _) in changed.items() if hasattr(config, name)}
    schedules = ((replace(config, **own), changed.get("steps", [steps])[0]), (config, steps))
    before, now = (one.learning_rate * learning_rate_factor(run.step, total, one) for one, total in schedules)
    listed = "".join(f", {name} {then} → {now}" for name, (then, now) in changed.items())
    return listed + (f"; the learning rate goes on at {now:.3g}, not {before:.3g}" if now != before else "")


def conclude(run: Any) -> None:
    """The result, a sample, and where to go from here. Every process takes part, as a sharded model needs."""
    bits = run.val_loss / math.log(2) / run.dataset.bytes_per_token("val")
    skipped = int(run.optimizer.guard["skipped"])
    without = f", {skipped:,} of them skipped, as their gradients were not finite" if skipped else ""
    run.say(
        f"\n{run.config.steps:,} steps in {run.clock.elapsed:,.1f} s{without}. Validation loss {run.val_loss:.4f} nats "
        f"per token, perplexity {math.exp(min(run.val_loss, 700)):.2f}, {bits:.4f} bits per byte.\n\nA sample:\n"
    )
    for text in sample(run, SAMPLE_TOKENS):
        run.say(text, end="")
    run.say(f"\n\nMore of it: python sample.py {run.config.out}")


def sample(run: Any, max_new_tokens: int) -> Iterator[str]:
    """What the model writes, piece by piece; of a dataset of examples, after the first to validate on has begun."""
    data, val, sharded = run.dataset, run.dataset.datasets[0].val, run.world.sharded
    prompt = opening(data.tokenizer, data.manifest["splits"]["train"]["documents"])
    if isinstance(val, Examples):
        ids = val.example(0).tolist()
        prompt = [~token for token in itertools.takewhile(lambda token: token < 0, ids)] or prompt
        yield f"{data.tokenizer.decode(prompt)} → "
    end = end_of_turn(data.tokenizer) if isinstance(val, Examples) else None
    ends = [] if end is None else [end]
    model = run.model.eval() if sharded else for_decoding(run.model)
    choice = {"temperature": 0.8, "top_p": 0.95, "seed": run.config.seed, "use_cache": not sharded}
    tokens = generate_text(model, data.tokenizer, [prompt], max_new_tokens, ends, **choice)
    try:
        for (text,) in texts(tokens, data.tokenizer, 1, ends=ends):
            yield text
    except ValueError as error:  # it diverged
        yield f"none: {error}"
