"""Callbacks of the training loop: metrics.jsonl, the terminal, Weights & Biases; and the summary of a finished run."""

import itertools
import math
import os
import secrets
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.core.cli import say, warn
from engine.core.files import atomic_write, to_json
from engine.core.settings import flatten
from engine.core.sharding import load_parameters
from engine.data.chat import prompt_ids, stop_ids
from engine.data.dataset import Examples
from engine.generation.generate import generate_text, initial_tokens
from engine.generation.pictures import draw_loss
from engine.generation.text_stream import stream_texts
from engine.nn.inference import for_decoding
from engine.training.optimizer import learning_rate_at
from engine.training.run_dir import find_checkpoint, read_records
from engine.training.trainer import Callback, Trainer
from model import GPT

NUM_RECENT_LOSSES = 40
SPIKE_Z_SCORE = 6
FINAL_SAMPLE_TOKENS = 200
MIN_FINAL_SAMPLE_TOKENS = 40  # written even when the minutes of the run are over
SHUTDOWN_RESERVE_SECONDS = 0.7
LOGGED_SAMPLE_TOKENS = 100
TORCHRUN_SHUTDOWN_SECONDS = 30.0  # unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set
LEARNING_RATE_TOLERANCE = 0.01  # progress in minutes never repeats exactly


def truncate_records(path: Path, last_step: int) -> list[dict[str, Any]]:
    """Remove the records after a step from a .jsonl file, and move corrupted lines to another file.

    Returns the records that stay.
    """
    records, corrupted_lines = read_records(path)
    records = [record for record in records if record["step"] <= last_step]
    if corrupted_lines:
        aside = path.with_suffix(".damaged")
        earlier = aside.read_bytes() if aside.exists() else b""
        atomic_write(aside, earlier + b"".join(corrupted_lines))
        warn(f"{path}: {len(corrupted_lines)} lines are not records; moved to {aside}")
    content = "".join(f"{to_json(record)}\n" for record in records).encode()
    if content != (path.read_bytes() if path.exists() else b""):
        atomic_write(path, content)
    return records


class MetricsFile(Callback):
    """Appends every record to metrics.jsonl, reports loss spikes, and draws loss.png after each evaluation."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Drop the records after the step that is resumed from: these steps come again."""
        self.path = trainer.config.out / "metrics.jsonl"
        self.records = truncate_records(self.path, trainer.step)

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Append the record; one of training gets a ``loss_z_score``."""
        if "train_loss" in record:
            z_score = round(self.loss_z_score(record["train_loss"]), 2)
            record["loss_z_score"] = z_score
            if z_score > SPIKE_Z_SCORE:
                spike = f"loss spike {record['train_loss']:.4f}, {z_score:.0f} deviations above the recent mean"
                say(f"step {trainer.step:>6,}  {spike}")
        self.records.append(record)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{to_json(record)}\n")
        if "val_loss" in record:
            draw_loss(self.records, trainer.config.out / "loss.png")

    def loss_z_score(self, loss: float) -> float:
        """How many standard deviations a training loss lies above the recent mean; 0 before there are enough."""
        losses = (record["train_loss"] for record in reversed(self.records) if "train_loss" in record)
        recent = [
            recent_loss
            for recent_loss in itertools.islice(losses, NUM_RECENT_LOSSES)
            if recent_loss is not None and math.isfinite(recent_loss)
        ]
        if len(recent) < NUM_RECENT_LOSSES // 2 or not math.isfinite(loss):
            return 0.0
        return (loss - statistics.fmean(recent)) / max(statistics.stdev(recent), 1e-9)


class Terminal(Callback):
    """Prints the data, model and run at the start, a progress bar, and a line for each evaluation."""

    bar: tqdm | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        """Print what is about to be trained, and start the progress bar."""
        config = trainer.config
        say_long_examples(trainer)
        say(describe_run(trainer))
        seconds = trainer.save_seconds
        limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_SHUTDOWN_SECONDS))
        if "TORCHELASTIC_RUN_ID" in os.environ and seconds > limit:
            say(
                f"a save may take {seconds:.0f} s, but torchrun kills {limit:.0f} s after SIGTERM; "
                f"set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * seconds:.0f} so that none is lost"
            )
        self.num_skipped = int(trainer.optimizer.guard["skipped"])
        self.bar = tqdm(
            total=1.0,
            initial=trainer.budget.progress,
            bar_format="step {desc}|{bar}| {elapsed}<{remaining}{postfix}",  # fits 60 columns
            dynamic_ncols=True,
            disable=None,
        )
        self.num_steps = f"/{config.steps}" if config.steps else ""

    def on_step(self, trainer: Trainer) -> None:
        """Advance the progress bar."""
        if self.bar is not None:
            self.bar.set_description_str(f"{trainer.step}{self.num_steps} ", refresh=False)
            self.bar.update(trainer.budget.progress - self.bar.n)

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Show the training loss beside the bar; print the validation loss."""
        if "val_loss" in record:
            losses = describe_losses(record)
            say(f"step {trainer.step:>6,}  {losses}  ({trainer.clock.elapsed:,.0f} s)")
            return
        if self.bar is not None:
            speed = f"{record['tokens_per_second']:,.0f} tokens/s"
            self.bar.set_postfix_str(f"loss {record['train_loss']:.3f}, {speed}")
        num_skipped = record["skipped_steps"] - self.num_skipped
        if num_skipped:
            self.num_skipped += num_skipped
            say(f"step {trainer.step:>6,}  skipped {num_skipped} steps: their gradients were not finite")

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the progress bar."""
        if self.bar is not None:
            self.bar.close()


class WeightsAndBiases(Callback):
    """Logs every record to Weights & Biases, against tokens and steps, and samples in a table."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Start or resume the run on Weights & Biases; its id is kept in the run directory."""
        import wandb

        out = trainer.config.out
        id_file = out / "wandb.id"
        if not id_file.exists():
            atomic_write(id_file, secrets.token_hex(8).encode())
        self.log = wandb.init(
            project="gpt-trainer",
            dir=out,
            config=flatten(trainer.config),
            resume="allow",
            name=out.resolve().name,
            id=id_file.read_text(encoding="utf-8").strip(),
        )
        self.log.define_metric("tokens")
        self.log.define_metric("*", step_metric="tokens")
        self.make_table = partial(wandb.Table, ["step", "tokens", "sample"])
        self.samples: list[list[Any]] = []

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Log the record, and after an evaluation a sample."""
        record = {"tokens": trainer.step * trainer.tokens_per_step, **record}
        if "val_loss" in record and not trainer.dist.sharded:  # every rank would have to take part
            text = "".join(stream_sample(trainer, LOGGED_SAMPLE_TOKENS))
            self.samples.append([trainer.step, record["tokens"], text])
            record["samples"] = self.make_table(data=self.samples)
        self.log.log(record, step=record["step"])

    def on_train_end(self, trainer: Trainer) -> None:
        """Finish the run on Weights & Biases."""
        if hasattr(self, "log"):
            self.log.finish()


def say_long_examples(trainer: Trainer) -> None:
    """Print how many examples are longer than the context."""
    config = trainer.config
    splits = [split for dataset in trainer.data.datasets for split in (dataset.train, dataset.val)]
    num_long = sum(split.too_long for split in splits if isinstance(split, Examples))
    if num_long:
        action = "cut" if config.long_examples == "cut" else "left out"
        say(f"{num_long:,} examples are longer than the context of {config.model.context_length} tokens: {action}")


def describe_run(trainer: Trainer) -> str:
    """Three lines: data, model, run."""
    config = trainer.config
    model = config.model
    data = trainer.data
    sequence = trainer.tokens_per_step // trainer.batch_size
    batch = f"{trainer.batch_size} × {sequence} tokens a step"
    if config.steps:
        tokens = trainer.tokens_per_step * config.steps
        epochs = ", ".join(f"{tokens / epoch:.1f}" for epoch in data.epochs)
        length = f"{config.steps:,} steps, {batch} = {tokens:,} tokens ({epochs} epochs)"
        if config.minutes:
            length += f", within {config.minutes:g} minutes"
    else:
        length = f"{config.minutes:g} minutes, {batch}"
    return (
        f"data   {data.describe()}; vocabulary {data.tokenizer.vocab_size:,} ({data.tokenizer.kind})\n"
        f"model  {trainer.model.num_parameters:,} parameters: {model.num_layers} layers, {model.num_heads} heads, "
        f"d_model {model.d_model}, context {model.context_length}\n"
        f"run    {length}, {config.optimizer.optimizer}, {trainer.dist.size} × {trainer.dist.device} "
        f"in {config.dtype} → {config.out}"
    )


def describe_losses(record: dict[str, Any]) -> str:
    """The validation loss; of a mix that on each dataset too, whose names are cut to fit the terminal."""
    prefix = "val_loss/"
    losses = {key.removeprefix(prefix): loss for key, loss in record.items() if key.startswith(prefix)}
    if not losses:
        return f"validation loss {record['val_loss']:.4f}, {record['val_bits_per_byte']:.4f} bits per byte"
    width = max(4, (shutil.get_terminal_size().columns - 36) // len(losses) - 8)
    names = [name if len(name) <= width else f"{name[: width - 1]}…" for name in losses]
    each = ", ".join(f"{name} {loss:.3f}" for name, loss in zip(names, losses.values(), strict=True))
    return f"loss {record['val_loss']:.4f}: {each}"


def describe_changes(changed: Mapping[str, Sequence], trainer: Trainer, state: dict[str, Any]) -> str:
    """The settings that a resume changes, {name: (before, now)}, and the learning rate if that jumps."""
    if not changed:
        return ""
    config = trainer.config.optimizer
    before = {name: values[0] for name, values in changed.items() if hasattr(config, name)}
    old_config = replace(config, **before)
    old_total = trainer.step / state["share"]
    old_rate = learning_rate_at(trainer.step, old_total, old_config)
    new_rate = learning_rate_at(trainer.step, trainer.budget.total_steps, config)
    text = "".join(f", {name} {values[0]} → {values[1]}" for name, values in changed.items())
    if math.isclose(new_rate, old_rate, rel_tol=LEARNING_RATE_TOLERANCE):
        return text
    return f"{text}; learning rate is now {new_rate:.3g} (would have been {old_rate:.3g})"


def print_summary(trainer: Trainer) -> None:
    """Print the result, a sample, and the next command. Every rank takes part, as a sharded model needs."""
    assert trainer.val_loss is not None
    bits = trainer.val_loss / math.log(2) / trainer.data.bytes_per_token("val")
    num_skipped = int(trainer.optimizer.guard["skipped"])
    skipped = f" ({num_skipped:,} skipped: gradients not finite)" if num_skipped else ""
    trainer.say(
        f"\n{trainer.step:,} steps{skipped} in {trainer.clock.elapsed:,.1f} s. Validation loss "
        f"{trainer.val_loss:.4f} nats per token, perplexity {math.exp(min(trainer.val_loss, 700)):.2f}, "
        f"{bits:.4f} bits per byte."
    )
    if trainer.best_val_loss < trainer.val_loss:
        best_step = load_best_weights(trainer)
        trainer.say(
            f"Best validation loss {trainer.best_val_loss:.4f} at step {best_step:,} of {trainer.step:,} "
            "(overfitting since). sample.py and export use that checkpoint."
        )
    trainer.say("\nA sample:\n")
    for count, text in enumerate(stream_sample(trainer, FINAL_SAMPLE_TOKENS)):
        trainer.say(text, end="")
        is_late = trainer.budget.seconds_left(trainer.clock) < SHUTDOWN_RESERVE_SECONDS
        if trainer.dist.any(count >= MIN_FINAL_SAMPLE_TOKENS and is_late):
            break
    trainer.say(f"\n\nReport: {trainer.config.out / 'report.html'}")
    trainer.say(f"More samples: python sample.py {trainer.config.out}")


def load_best_weights(trainer: Trainer) -> int:
    """Set the weights to those of the checkpoint with the lowest validation loss. Returns its step."""
    best = trainer.dist.run_on_main(find_checkpoint, trainer.config.out)
    load_parameters(trainer.model, trainer.dist.broadcast_tensors(best.model() if best else ()))
    return trainer.dist.broadcast(best.step if best else 0)


def stream_sample(trainer: Trainer, max_new_tokens: int) -> Iterator[str]:
    """Stream text that the model generates; of a dataset of examples, after the first prompt to validate on."""
    data = trainer.data
    tokenizer = data.tokenizer
    val = data.datasets[0].val
    prompt = initial_tokens(tokenizer, data.manifest["splits"]["train"]["documents"])
    ends: list[int] = []
    if isinstance(val, Examples):
        prompt = prompt_ids(val.example(0).tolist()) or prompt
        ends = stop_ids(tokenizer)
        yield f"{tokenizer.decode(prompt)} → "
    model: GPT = trainer.model.eval() if trainer.dist.sharded else for_decoding(trainer.model)
    tokens = generate_text(
        model,
        tokenizer,
        [prompt],
        max_new_tokens,
        ends,
        temperature=0.8,
        top_p=0.95,
        seed=trainer.config.seed,
        use_cache=not trainer.dist.sharded,
    )
    try:
        for (text,) in stream_texts(tokens, tokenizer, [prompt], ends=ends):
            yield text
    except ValueError as error:  # logits that are not finite
        yield f"none: {error}"
