"""Callbacks: metrics.jsonl, the terminal, Weights & Biases; the summary of a run."""

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.cli import count_noun, progress_bar, say, shell_command, warn
from engine.core.files import atomic_write, to_json
from engine.core.settings import flatten
from engine.generation.samples import choose_prompts, stream_samples
from engine.generation.scores import describe_score
from engine.runs.run_files import compare_by, rank_checkpoints, read_records
from engine.training.estimate import describe_length
from engine.training.optimizer import UNUSABLE_GRADIENTS
from engine.training.trainer import Callback, Trainer

FINAL_SAMPLE_TOKENS = 200
MIN_SAMPLE_TOKENS = 40  # written even when the minutes of the run are over
SHUTDOWN_RESERVE_SECONDS = 0.7
TORCHRUN_SHUTDOWN_SECONDS = 30.0  # unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT is set


def truncate_records(path: Path, last_step: int) -> None:
    """Remove the records after a step, and corrupted lines, from a .jsonl file."""
    if not path.exists():
        return
    content = path.read_bytes()
    records = read_records(path)
    num_lines = sum(bool(line.strip()) for line in content.split(b"\n")[:-1])
    if num_lines > len(records):
        warn(f"{path}: {count_noun(num_lines - len(records), 'corrupted line')} removed.")
    kept = [record for record in records if record["step"] <= last_step]
    new_content = "".join(f"{to_json(record)}\n" for record in kept).encode()
    if new_content != content:
        atomic_write(path, new_content)


class MetricsFile(Callback):
    """Writes every record to metrics.jsonl."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Drop the records of steps that are repeated after a resume."""
        self.path = trainer.config.out / "metrics.jsonl"
        self.unwritten = b""  # lines for which the disk had no space
        truncate_records(self.path, trainer.step)

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Append the record."""
        self.unwritten += f"{to_json(record)}\n".encode()
        num_bytes = self.path.stat().st_size if self.path.exists() else 0
        try:
            with open(self.path, "ab") as file:
                file.write(self.unwritten)
        except OSError:
            os.truncate(self.path, num_bytes)  # all lines are appended, or none
            raise
        self.unwritten = b""


class Terminal(Callback):
    """Prints data, model and run at the start, the progress, and a line for each evaluation."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Print what is about to be trained, and start the progress bar."""
        config = trainer.config
        say(describe_training(trainer))
        seconds = trainer.budget.save_cost_seconds
        limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_SHUTDOWN_SECONDS))
        if "TORCHELASTIC_RUN_ID" in os.environ and seconds > limit:
            problem = f"a save may take {seconds:.0f} s, but torchrun kills after {limit:.0f} s"
            say(f"{problem}. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * seconds:.0f}")
        self.num_skipped = int(trainer.optimizer.loss_scaler["skipped"])
        self.num_steps = f"/{config.steps}" if config.steps and not config.minutes else ""
        self.bar = progress_bar(
            total=1.0,
            initial=trainer.budget.progress,
            bar_format="step {desc}|{bar}| {elapsed}<{remaining}{postfix}",  # fits 60 columns
            leave=True,
        )

    def on_step(self, trainer: Trainer) -> None:
        """Advance the progress bar."""
        self.bar.set_description_str(f"{trainer.step}{self.num_steps} ", refresh=False)
        self.bar.update(trainer.budget.progress - self.bar.n)

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Show the training loss beside the bar; print the validation loss."""
        step = f"step {trainer.step:>6,}"
        if "val_loss" in record:
            losses = f"{record['val_loss']:.4f}, {record['val_bits_per_byte']:.4f} bits per byte"
            for key, loss in record.items():
                if key.startswith("val_loss/"):  # of one dataset of a mix
                    losses += f", {key.removeprefix('val_loss/')} {loss:.4f}"
            losses += f", {describe_score(record)}" if "val_score" in record else ""
            say(f"{step}  validation loss {losses}  ({trainer.budget.elapsed:,.0f} s)")
            best = trainer.best_evaluation or record  # before this one
            if len({compare_by(each, trainer.config.best_by)[0] for each in (best, record)}) > 1:
                say("It counts other tokens or questions, and is not compared with those before.")
            return
        text = f"loss {record['train_loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(text, refresh=sys.stderr.isatty())
        num_skipped = record["skipped_steps"] - self.num_skipped
        if num_skipped:
            self.num_skipped += num_skipped
            steps = count_noun(num_skipped, "step")
            say(f"{step}  skipped {steps} with gradients {UNUSABLE_GRADIENTS}")

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the progress bar."""
        if hasattr(self, "bar"):
            self.bar.close()


class WeightsAndBiases(Callback):
    """Logs every record to Weights & Biases."""

    def __init__(self) -> None:
        """Import the package, which takes a second, for a run that uses it."""
        import wandb

        self.wandb: Any = wandb

    def on_train_start(self, trainer: Trainer) -> None:
        """Start or resume the run on Weights & Biases; its id is kept in the run directory."""
        out = trainer.config.out
        defaults = {"project": "gpt-trainer", "name": out.resolve().name, "dir": out}
        unset = [name for name in defaults if not os.environ.get(f"WANDB_{name.upper()}")]
        self.run = self.wandb.init(
            id=os.environ.get("WANDB_RUN_ID") or read_wandb_id(out),
            config=flatten(trainer.config),
            resume="allow",
            **{name: defaults[name] for name in unset},
        )
        # Its own count of steps never goes back, as a run does that resumes after a kill.
        self.run.define_metric("*", step_metric="step")

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Log the record."""
        self.run.log(record)

    def on_train_end(self, trainer: Trainer) -> None:
        """Finish the run on Weights & Biases, as failed after an error."""
        if hasattr(self, "run"):
            self.run.finish(exit_code=int(trainer.failed))


def read_wandb_id(out: Path) -> str:
    """Return the id that a run's folder keeps, with its path; a copy of a folder gets a new one."""
    file = out.resolve() / "wandb.id"
    run_id, _, path = (os.fsdecode(file.read_bytes()) if file.exists() else "").partition("\n")
    original = Path(path)  # it is missing, or of another run, if the folder was moved
    is_other = original.is_file() and not original.samefile(file)
    if not run_id or (is_other and original.read_bytes() == file.read_bytes()):
        run_id = secrets.token_hex(8)
    atomic_write(file, os.fsencode(f"{run_id}\n{file}"))
    return run_id


def describe_training(trainer: Trainer) -> str:
    """Return lines about data, model and run, and about examples longer than the context."""
    config = trainer.config
    model = config.model_config
    data = trainer.data
    length = describe_length(config, trainer.tokens_per_step, data.epoch_tokens)
    is_longer = model.context_length > config.context_length
    rows = f", rows of at most {count_noun(config.context_length, 'token')}" if is_longer else ""
    lines = [
        f"data   {data.describe()}; "
        f"vocabulary {data.tokenizer.vocab_size:,} ({data.tokenizer.kind})",
        f"model  {trainer.model.num_parameters:,} parameters: "
        f"{count_noun(model.num_layers, 'layer')}, {count_noun(model.num_heads, 'head')}, "
        f"d_model {model.d_model}, context {model.context_length:,}{rows}",
        f"run    {length}, "
        f"{config.optimizer.optimizer} at learning rate {config.optimizer.learning_rate:g}, "
        f"{trainer.dist_ctx.size} × {trainer.dist_ctx.device} in {config.dtype} → {config.out}",
    ]
    return "\n".join(lines)


def print_summary(trainer: Trainer) -> None:
    """Print the result, a sample, paths and the next command. All ranks call it together.

    Result and sample are those of the best checkpoint, whose weights the model gets.
    """
    assert trainer.evaluation and trainer.best_evaluation
    steps = count_noun(trainer.step, "step")
    best = trainer.best_evaluation
    loss = best["val_loss"]
    num_skipped = int(trainer.optimizer.loss_scaler["skipped"])
    skipped = f" ({num_skipped:,} skipped: gradients {UNUSABLE_GRADIENTS})" if num_skipped else ""
    trainer.say(
        f"\n{steps}{skipped} in {trainer.budget.elapsed:,.1f} s. Validation loss "
        f"{loss:.4f} nats per token, perplexity {best['val_perplexity']:.2f}, "
        f"{best['val_bits_per_byte']:.4f} bits per byte."
    )
    if "val_score" in best:
        trainer.say(f"Score: {describe_score(best)}.")
    if not trainer.is_best:
        name = f"the checkpoint of step {trainer.load_best():,}, which sample.py and export use"
        last_loss = trainer.evaluation.get("val_loss_partial", trainer.evaluation["val_loss"])
        overfits = " (overfitting)" if loss < last_loss else ""
        last = f"At the last step the loss was {last_loss:.4f}{overfits}"
        trainer.say(f"That is {name}. {last}.")
    trainer.say("\nA sample:\n")
    for count, text in enumerate(stream_final_sample(trainer)):
        trainer.say(text, end="")
        is_late = trainer.budget.seconds - trainer.budget.elapsed < SHUTDOWN_RESERVE_SECONDS
        if trainer.dist_ctx.any(count >= MIN_SAMPLE_TOKENS and is_late):
            break
    trainer.dist_ctx.run_on_main(print_paths, trainer)


def print_paths(trainer: Trainer) -> None:
    """Print where the report and the best checkpoint are, and how to use the model."""
    out = trainer.config.out
    paths = {"Report": out / "report.html", "Best checkpoint": rank_checkpoints(out)[0]}
    say("\n")
    for title, path in paths.items():
        if path.exists():
            say(f"{title}: {shell_command(path)}")
    words: list[object] = ["python", "sample.py", out]
    if trainer.data.learns_chats:
        words.append("--chat")
    elif trainer.data.val.num_examples:
        prompt = trainer.data.tokenizer.decode(choose_prompts(trainer.data)[0])
        words.append(f"--prompt={prompt}")
    say(f"More samples: {shell_command(*words)}")


def stream_final_sample(trainer: Trainer) -> Iterator[str]:
    """Stream the first prompt of the run's samples, and the text that the model writes after it."""
    prompt, *_ = choose_prompts(trainer.data)
    is_example = trainer.data.val.num_examples > 0
    yield trainer.data.tokenizer.decode(prompt) + (" → " if is_example else "")
    seed = trainer.config.seed
    with trainer.passes.decoder() as (model, dtype):
        pieces = stream_samples(model, trainer.data, [prompt], FINAL_SAMPLE_TOKENS, seed, dtype)
        yield from (text for _, text in pieces)
