"""What watches training, and what is said of it: the loop says what happened, and knows nothing of its observers."""

import itertools
import math
import os
import secrets
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.core.cli import say, warn
from engine.core.distributed import load
from engine.core.files import to_json, write_whole
from engine.core.settings import flatten
from engine.data.chat import ends_of, prompt_of
from engine.data.dataset import Examples
from engine.generation.generate import generate_text, opening, texts
from engine.generation.pictures import draw_loss
from engine.nn.inference import for_decoding
from engine.training.optimizer import learning_rate_factor
from engine.training.run_dir import find_checkpoint, read_records

RECENT = 40  # records that a loss is compared with
SAMPLE_TOKENS = 200  # of the sample at the end
FEWEST_TOKENS, LEAVING = 40, 0.7  # of it, when less than so many seconds are left of a run's minutes
LOGGED_TOKENS = 100  # of each that is logged
SHUTDOWN = "30"  # seconds that torchrun gives processes to end, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise
SAME_RATE = 0.01  # within which two learning rates are alike: a share of the time is never quite the same
SPIKE = 6  # standard deviations above the recent mean: a loss to point out


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


def records_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The records of a .jsonl file up to a step; others are dropped from it, and what is no record is put aside."""
    records, damaged = read_records(path)
    records = [record for record in records if record["step"] <= step]
    if damaged:
        aside = path.with_suffix(".damaged")
        write_whole(aside, (aside.read_bytes() if aside.exists() else b"") + b"".join(damaged))
        warn(f"{path} has {len(damaged)} lines that are no records; they are in {aside} now")
    kept = "".join(f"{to_json(record)}\n" for record in records).encode()
    if kept != (path.read_bytes() if path.exists() else b""):
        write_whole(path, kept)
    return records


class MetricsFile:
    """Writes every record to metrics.jsonl, points out losses that jump, and draws the loss after each evaluation."""

    def started(self, run: Any) -> None:
        """Records after the step that is resumed from are dropped: they come again. What is no record is put aside."""
        self.path = run.config.out / "metrics.jsonl"
        self.records = records_until(self.path, run.step)

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
        losses = (record["train_loss"] for record in reversed(self.records) if "train_loss" in record)
        recent = [one for one in itertools.islice(losses, RECENT) if one is not None and math.isfinite(one)]
        if len(recent) < RECENT // 2 or not math.isfinite(loss):
            return 0.0
        return (loss - statistics.fmean(recent)) / max(statistics.stdev(recent), 1e-9)


class Terminal:
    """What is about to happen, the live line on a terminal, and a line for each evaluation."""

    def started(self, run: Any) -> None:
        config, model, data = run.config, run.config.model, run.dataset
        splits = [split for one in data.datasets for split in (one.train, one.val)]
        long = [split.too_long for split in splits if isinstance(split, Examples)]
        if any(long):
            done = "cut" if config.long_examples == "cut" else "left out"
            say(f"{sum(long):,} examples are longer than the context, {model.context_length} + 1 tokens: {done}")
        each = f"of {config.batch_size} × {run.tokens_per_step // config.batch_size} tokens"
        tokens = run.tokens_per_step * (config.steps or 0)
        epochs = ", ".join(f"{tokens / epoch:.1f}" for epoch in data.epochs)
        if config.steps:
            length = f"{config.steps:,} steps {each} = {tokens:,} ({epochs} epochs)"
            length += f", within {config.minutes:g} minutes" if config.minutes else ""
        else:
            length = f"{config.minutes:g} minutes of steps {each}"
        say(
            f"data   {data.describe()}; vocabulary {data.tokenizer.vocab_size:,} ({data.tokenizer.kind})\n"
            f"model  {run.model.num_parameters:,} parameters: {model.num_layers} layers, {model.num_heads} heads, "
            f"d_model {model.d_model}, context {model.context_length}\n"
            f"run    {length}, {config.optimizer.optimizer}, on {run.world.size} × {run.world.device} "
            f"in {config.dtype} → {config.out}"
        )
        seconds = run.save_seconds
        given = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN))
        if run.world.launch and seconds > given:
            advice = f"set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * seconds:.0f} before it, or a save at the end may be lost"
            say(f"a save may take {seconds:.0f} s, and torchrun kills {given:.0f} s after SIGTERM: {advice}")
        self.skipped = int(run.optimizer.guard["skipped"])
        line = "step {desc}|{bar}| {elapsed}<{remaining}{postfix}"  # fits 60 columns
        self.bar = tqdm(total=1.0, initial=run.budget.share, bar_format=line, dynamic_ncols=True, disable=None)
        self.of = f"/{config.steps}" if config.steps else ""

    def stepped(self, run: Any) -> None:
        self.bar.set_description_str(f"{run.step}{self.of} ", refresh=False)
        self.bar.update(run.budget.share - self.bar.n)

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


def describe(changed: dict[str, Sequence], run: Any, total: float) -> str:
    """What a resume changes, {name: (then, now)}, and what that makes of the learning rate, to be said.

    ``total`` are the steps that the run was to have.
    """
    config = run.config.optimizer
    own = {name: then for name, (then, _) in changed.items() if hasattr(config, name)}
    schedules = ((replace(config, **own), total), (config, run.budget.total))
    before, now = (one.learning_rate * learning_rate_factor(run.step, total, one) for one, total in schedules)
    listed = "".join(f", {name} {then} → {now}" for name, (then, now) in changed.items())
    return listed + (
        f"; the learning rate goes on at {now:.3g}, not {before:.3g}"
        if changed and not math.isclose(now, before, rel_tol=SAME_RATE)
        else ""
    )


def conclude(run: Any) -> None:
    """The result, a sample, and where to go from here. Every process takes part, as a sharded model needs."""
    bits = run.val_loss / math.log(2) / run.dataset.bytes_per_token("val")
    skipped = int(run.optimizer.guard["skipped"])
    without = f", {skipped:,} of them skipped, as their gradients were not finite" if skipped else ""
    run.say(
        f"\n{run.step:,} steps in {run.clock.elapsed:,.1f} s{without}. Validation loss {run.val_loss:.4f} nats "
        f"per token, perplexity {math.exp(min(run.val_loss, 700)):.2f}, {bits:.4f} bits per byte."
    )
    if run.best_loss < run.val_loss:
        best, less = load_best(run), "less time" if run.config.minutes else "fewer steps"
        run.say(
            f"It was lowest, {run.best_loss:.4f}, at step {best:,} of {run.step:,}: since then the model "
            f"overfits. More text, {less} or more --dropout helps. That checkpoint is sampled from and exported."
        )
    run.say("\nA sample:\n")
    for count, text in enumerate(sample(run, SAMPLE_TOKENS)):
        run.say(text, end="")
        if run.world.any(count >= FEWEST_TOKENS and run.budget.left(run.clock) < LEAVING):
            break
    run.say(f"\n\nMore of it: python sample.py {run.config.out}")


def load_best(run: Any) -> int:
    """The step of the checkpoint with the lowest validation loss, whose weights the model has then."""
    best = run.world.only_first(find_checkpoint, run.config.out)
    load(run.model, run.world.broadcast_tensors(best.model() or ()))
    return run.world.broadcast(best.step if run.world.is_main_process else 0)


def sample(run: Any, max_new_tokens: int) -> Iterator[str]:
    """What the model writes, piece by piece; of a dataset of examples, after the first to validate on has begun."""
    data, val, sharded = run.dataset, run.dataset.datasets[0].val, run.world.sharded
    prompt = opening(data.tokenizer, data.manifest["splits"]["train"]["documents"])
    if isinstance(val, Examples):
        prompt = prompt_of(val.example(0).tolist()) or prompt
        yield f"{data.tokenizer.decode(prompt)} → "
    ends = ends_of(data.tokenizer) if isinstance(val, Examples) else []
    model = run.model.eval() if sharded else for_decoding(run.model)
    choice = {"temperature": 0.8, "top_p": 0.95, "seed": run.config.seed, "use_cache": not sharded}
    tokens = generate_text(model, data.tokenizer, [prompt], max_new_tokens, ends, **choice)
    try:
        for (text,) in texts(tokens, data.tokenizer, 1, ends=ends):
            yield text
    except ValueError as error:  # it diverged
        yield f"none: {error}"
