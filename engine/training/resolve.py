"""The settings of a run: a value for every None, and the changes that a resume allows."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.cli import count_noun, shell_command
from engine.core.device import choose_dtype, dtype_name
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import fill_unset, flatten, from_values
from engine.data import batches
from engine.data.mixture import Mixture
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN
from engine.training.checkpoint import Checkpoint
from engine.training.config import (
    DEFAULT_INTERVAL_STEPS,
    DEFAULT_STEPS,
    SIZE_FIELDS,
    ChangeableConfig,
    TrainConfig,
)
from engine.training.optimizer import OptimizerConfig
from engine.training.sizing import MAX_CHARACTER_VOCAB_SIZE, resolve_sizes
from model import ModelConfig

# Changing these settings changes no result.
SETTINGS_IGNORED_ON_RESUME = {"data", "out", "resume", "wandb", "verify_data", "keep_checkpoints"}
CHANGEABLE_SETTINGS = {
    setting.name
    for cls in (ChangeableConfig, OptimizerConfig)
    for setting in dataclasses.fields(cls)
    if setting.name != "optimizer"
}
WINDOW_WARMUP_FRACTION = 0.2  # of the run, where tokens are more than characters


def resolve_config(
    config: TrainConfig,
    data: Mixture,
    dist: DistributedContext,
    started_at: float,
    checkpoint: Checkpoint | None,
    measure: Callable[[TrainConfig], float],
) -> TrainConfig:
    """Return the config with a value for every None, equal on all ranks.

    The checkpoint is the one to resume, or the base model of a new run: its sizes are taken.
    ``measure`` returns the seconds of a step. Raises UserError for settings that conflict with
    each other, the data, or the checkpoint.
    """
    settings = {**flatten(config), "the text in data": data.sha256}
    dist.assert_equal_across_ranks(settings, ignore=SETTINGS_IGNORED_ON_RESUME | {"device"})
    state = dist.broadcast(checkpoint.state if checkpoint else None)
    if state and config.resume:
        recorded = recorded_settings(state)
        config = fill_unset(config, {name: recorded.get(name) for name in SIZE_FIELDS})
        if recorded.get("minutes") and config.minutes:
            config = fill_unset(config, {"steps": recorded.get("steps")})
    if state and config.init_from:
        model = merge_base_model_config(state["model"], config.model, config.init_from)
        config = replace(config, model=model)
    config = resolve_sizes(config, data, dist, started_at, measure)
    config = fill_defaults(config, data, dist)
    dist.assert_equal_across_ranks({"dtype": config.dtype})  # "auto" is chosen by each machine
    return config


def fill_defaults(config: TrainConfig, data: Mixture, dist: DistributedContext) -> TrainConfig:
    """Return the config with a value for the settings that do not depend on the model's size.

    Raises UserError for settings that do not fit the data or the ranks.
    """
    vocab_size = config.model.vocab_size or data.tokenizer.vocab_size
    if config.init_from:
        vocab_size = max(vocab_size, data.tokenizer.vocab_size)  # new rows are added
    if vocab_size < data.tokenizer.vocab_size:
        raise UserError(
            f"--vocab-size: must be at least {data.tokenizer.vocab_size} for {data.path} "
            f"(got {vocab_size}). Leave it out."
        )
    assert config.batch_size is not None
    batches.check_sizes(config.batch_size, dist.size, config.micro_batch_size)
    data.check_length(config.model.context_length)
    is_window_fixed = bool(config.init_from) or vocab_size <= MAX_CHARACTER_VOCAB_SIZE
    dtype = choose_dtype(config.dtype, dist.device, config.model.d_model)
    model = replace(config.model, vocab_size=vocab_size)
    config = replace(config, model=model, dtype=dtype_name(dtype))
    defaults = {"window_warmup": 0.0 if is_window_fixed else WINDOW_WARMUP_FRACTION}
    if not config.minutes:
        defaults["steps"] = DEFAULT_STEPS
        defaults["eval_every"] = DEFAULT_INTERVAL_STEPS
        defaults["save_every"] = DEFAULT_INTERVAL_STEPS
    return fill_unset(config, defaults)


def recorded_settings(state: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in a checkpoint's state, and defaults for those of later versions.

    Raises UserError for values that do not fit.
    """
    names = flatten(TrainConfig())
    values = {name: value for name, value in state["settings"].items() if name in names}
    return flatten(from_values(TrainConfig, values, f"checkpoint of step {state['step']:,}"))


def changed_settings(
    state: dict[str, Any], settings: dict[str, Any], data_sha256: str
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those of a checkpoint's state: {name: (old, new)}.

    Raises UserError for a change of fixed settings or data, and for steps or minutes below those
    of the checkpoint.
    """
    recorded = recorded_settings(state)
    changed = {
        name: (recorded[name], value) for name, value in settings.items() if recorded[name] != value
    }
    refused = [
        f"{name} {old!r} → {new!r}"
        for name, (old, new) in changed.items()
        if name not in CHANGEABLE_SETTINGS
    ]
    if state["data_sha256"] != data_sha256:
        refused.append("the text in --data (docs/data.md: My text has grown)")
    if refused:
        raise UserError(
            f"--resume: can't change {', '.join(refused)}. Set it back, or choose another --out."
        )
    if (settings["steps"] or math.inf) < state["step"]:
        raise UserError(
            f"--steps: must be at least the {count_noun(state['step'], 'step')} of the checkpoint "
            f"(got {settings['steps']})."
        )
    minutes_done = state["elapsed_seconds"] / 60
    if "minutes" in changed and (settings["minutes"] or math.inf) < minutes_done:
        raise UserError(
            f"--minutes: must be at least the {minutes_done:.3g} of the checkpoint "
            f"(got {settings['minutes']:g})."
        )
    return {name: pair for name, pair in changed.items() if name not in SETTINGS_IGNORED_ON_RESUME}


def check_tokenizer(base: Path, tokenizer: Tokenizer, data: Path) -> None:
    """Raise UserError if a dataset's tokenizer does not extend that of the checkpoint at base."""
    if not tokenizer.is_extension_of(load_tokenizer(base / "tokenizer.json")):
        options = ("--out", data, "--force", "--tokenizer", base)
        command = shell_command("python", "prepare.py", "INPUT", *options)
        raise UserError(f"{data}: its tokenizer is not that of {base}. Prepare it with: {command}")


def merge_base_model_config(base: dict[str, Any], config: ModelConfig, source: Path) -> ModelConfig:
    """Return the model settings of a base checkpoint, with the dropout of config.

    Raises UserError, naming the source, for a setting of config that is neither its default nor
    the value of the base.
    """
    merged = from_values(ModelConfig, base, str(source))
    for name, base_value in dataclasses.asdict(merged).items():
        value = getattr(config, name)
        if name != "dropout" and value not in (getattr(type(config), name), base_value):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag}: must be that of {source}, {base_value} (got {value}). Leave it out."
            )
    return replace(merged, dropout=config.dropout or 0.0)


def split_token_ids(
    base: Checkpoint, tokenizer: Tokenizer, learns_chats: bool
) -> tuple[list[int], list[int]]:
    """Return the ids that a base model has trained, and those of a tokenizer that are new to it.

    The rows of other ids, of padding and of chat tokens that no text has had, are untrained.
    """
    base_tokenizer = load_tokenizer(base.path / "tokenizer.json")
    base_ids = base_tokenizer.text_ids | {*base_tokenizer.special_tokens.values()}
    ids = tokenizer.text_ids | {*tokenizer.special_tokens.values()}
    special = tokenizer.special_tokens
    chat_ids = {special[name] for name in (*CHAT_ROLES.values(), END_OF_TURN) if name in special}
    untrained_ids = set() if base.is_chat_model else chat_ids
    new_ids = (ids - base_ids) | (untrained_ids if learns_chats else set())
    return sorted(base_ids - untrained_ids), sorted(new_ids)


def init_token_rows(
    tensors: Iterable[tuple[str, Tensor]], num_rows: int, trained: list[int], new: list[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield named tensors, with num_rows of tokens; the new rows are the mean of the trained ones.

    New tokens are then as likely as old ones: Hewitt 2021, "Initializing new word embeddings".
    """
    for name, tensor in tensors:
        tensor = tensor.float()  # of a model that was imported in bfloat16
        if name in ("token_embedding.weight", "head.weight") and new:
            mean = tensor[trained].mean(0, keepdim=True)
            tensor = torch.cat((tensor, mean.expand(num_rows - len(tensor), -1)))
            tensor[new] = mean
        yield name, tensor
