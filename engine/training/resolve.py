"""The settings of a run: every None gets its value, and a resume or base model sets limits to what may differ."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.device import choose_dtype, dtype_name
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import fill_unset, flatten, from_values
from engine.data import batches
from engine.data.mixture import Mixture
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.training.budget import DEFAULT_INTERVAL_STEPS, DEFAULT_STEPS
from engine.training.checkpoint import Checkpoint
from engine.training.config import SIZE_FIELDS, TrainConfig
from engine.training.sizing import MAX_CHARACTER_VOCAB_SIZE, resolve_sizes
from model import ModelConfig

SETTINGS_IGNORED_ON_RESUME = {
    "data",
    "out",
    "resume",
    "wandb",
    "verify_data",
    "keep_checkpoints",
}  # changing them changes no result
WINDOW_WARMUP_FRACTION = 0.2  # of the run, where tokens are more than characters

StepTimer = Callable[[TrainConfig, Mixture, DistributedContext], float]


def resolve_config(
    config: TrainConfig,
    data: Mixture,
    dist: DistributedContext,
    started_at: float,
    checkpoint: Checkpoint | None,
    measure_step_seconds: StepTimer,
) -> TrainConfig:
    """Give every setting that is None its value; the result is equal on all ranks.

    The checkpoint is the one to resume, or the base model of a new run: its sizes are taken. Raises UserError for
    settings that do not fit each other, the data, or the checkpoint.
    """
    settings = {**flatten(config), "the text in data": data.sha256}
    dist.assert_equal_across_ranks(settings, ignore=SETTINGS_IGNORED_ON_RESUME | {"device"})
    state = dist.broadcast(checkpoint.state if checkpoint else None)
    if state and config.resume:
        recorded = state["settings"]
        config = fill_unset(config, {name: recorded.get(name) for name in SIZE_FIELDS})
        if recorded.get("minutes") and config.minutes:
            config = fill_unset(config, {"steps": recorded.get("steps")})
    if state and config.init_from:
        config = replace(config, model=merge_base_model_config(state["model"], config.model, config.init_from))
    config = resolve_sizes(config, data, dist, started_at, make_measure(data, dist, measure_step_seconds))
    config = fill_defaults(config, data, dist)
    dist.assert_equal_across_ranks({"dtype": config.dtype})  # "auto" is chosen by each machine
    return config


def make_measure(
    data: Mixture, dist: DistributedContext, measure_step_seconds: StepTimer
) -> Callable[[TrainConfig], float]:
    """A function that times one step of a config whose sizes are set."""
    return lambda config: measure_step_seconds(fill_defaults(config, data, dist), data, dist)


def fill_defaults(config: TrainConfig, data: Mixture, dist: DistributedContext) -> TrainConfig:
    """Give the settings that do not depend on the size of the model their values."""
    min_vocab_size = data.tokenizer.vocab_size
    vocab_size = config.model.vocab_size or min_vocab_size
    if config.init_from:
        vocab_size = max(vocab_size, min_vocab_size)  # new rows are added
    if vocab_size < min_vocab_size:
        raise UserError(
            f"--vocab-size: must be at least {min_vocab_size} for {data.path} (got {vocab_size}). Leave it out."
        )
    assert config.batch_size is not None
    batches.check_sizes(config.batch_size, dist.size, config.micro_batch_size)
    batches.check_length(data, config.model.context_length)
    optimizer = config.optimizer
    if optimizer.window_warmup is None:
        is_off = bool(config.init_from) or vocab_size <= MAX_CHARACTER_VOCAB_SIZE
        optimizer = replace(optimizer, window_warmup=0.0 if is_off else WINDOW_WARMUP_FRACTION)
    dtype = choose_dtype(config.dtype, dist.device, config.model.d_model)
    config = replace(
        config,
        model=replace(config.model, vocab_size=vocab_size),
        optimizer=optimizer,
        dtype=dtype_name(dtype),
    )
    if config.minutes:
        return config
    defaults = {"steps": DEFAULT_STEPS, "eval_every": DEFAULT_INTERVAL_STEPS, "save_every": DEFAULT_INTERVAL_STEPS}
    return fill_unset(config, defaults)


def changed_settings(
    state: dict[str, Any],
    settings: dict[str, Any],
    may_change: set[str],
    data_sha256: str,
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those of a checkpoint's state: {name: (old, new)}.

    Raises UserError for settings or data that must not change, and for fewer steps or minutes
    than are done.
    """
    old_settings = state["settings"]
    changed = {
        name: (old_settings.get(name), value)
        for name, value in settings.items()
        if not _is_equal(old_settings.get(name), value)
    }
    refused = [f"{name} {old!r} → {new!r}" for name, (old, new) in changed.items() if name not in may_change]
    if state["data_sha256"] != data_sha256:
        refused.append("the text in --data")
    if refused:
        raise UserError(f"--resume: can't change {', '.join(refused)}. Set it back, or choose another --out.")
    if (settings["steps"] or math.inf) < state["step"]:
        raise UserError(f"--steps: must be at least {state['step']}, which are done (got {settings['steps']}).")
    minutes_done = state["elapsed_seconds"] / 60
    if "minutes" in changed and (settings["minutes"] or math.inf) < minutes_done:
        raise UserError(
            f"--minutes: must be at least {minutes_done:.3g}, which are done (got {settings['minutes']:g})."
        )
    return {name: pair for name, pair in changed.items() if name not in SETTINGS_IGNORED_ON_RESUME}


def _is_equal(old: Any, new: Any) -> bool:
    """Return whether two values of a setting are equal, which False and 0 are not."""
    return old == new and isinstance(old, bool) == isinstance(new, bool)


def check_same_tokenizer(path: Path, sha256: str, manifest: dict[str, Any]) -> None:
    """Raise UserError if the tokenizer of a run's checkpoint is not the one of its dataset."""
    if sha256 != manifest["tokenizer"]["sha256"]:
        raise UserError(f"{path}: corrupted, its tokenizer.json is not the one of --data.")


def check_tokenizer(base: Path, tokenizer: Tokenizer, data: Path) -> None:
    """Raise UserError if a dataset's tokenizer does not extend that of the checkpoint at base."""
    if not tokenizer.is_extension_of(load_tokenizer(base / "tokenizer.json")):
        command = f"python prepare.py INPUT --out {data} --force --tokenizer {base}"
        raise UserError(f"{data}: its tokenizer is not that of {base}. Prepare it with: {command}")


def merge_base_model_config(
    base: dict[str, Any],
    config: ModelConfig,
    source: Path,
) -> ModelConfig:
    """Return the model settings of a base checkpoint, with the dropout of config.

    Raises UserError, naming the source, for a setting of config that is neither its default nor
    the value of the base.
    """
    merged = from_values(ModelConfig, base, str(source))
    for name, base_value in dataclasses.asdict(merged).items():
        value = getattr(config, name)
        if name != "dropout" and value not in (getattr(type(config), name), base_value):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: must be that of {source}, {base_value} (got {value}). Leave it out.")
    return dataclasses.replace(merged, dropout=config.dropout or 0.0)


def expand_vocab_rows(
    tensors: Iterable[tuple[str, Tensor]],
    num_rows: dict[str, int],
) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors, extended to a number of rows by the mean of their rows.

    New tokens are then as likely as old ones: Hewitt 2021, "Initializing new word embeddings".
    """
    for name, tensor in tensors:
        num_new_rows = num_rows.get(name, 0) - len(tensor)
        if num_new_rows > 0:
            mean = tensor.mean(0, keepdim=True)
            tensor = torch.cat((tensor, mean.expand(num_new_rows, -1)))
        yield name, tensor
