"""The settings of a run, from those that are typed; and the changes that a resume allows."""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.core.cli import count_noun, shell_command
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import build, flatten, from_values
from engine.data import batches
from engine.data.batches import Mixture
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN
from engine.training.checkpoint import Checkpoint
from engine.training.config import (
    FIXED_SETTINGS,
    SHAPE_FIELDS,
    RunConfig,
    TrainConfig,
    make_run_config,
    set_values,
    should_choose_sizes,
)
from engine.training.sizing import SizeSearch
from model import ModelConfig

# Changing these settings changes no result.
SETTINGS_IGNORED_ON_RESUME = {"data", "out", "resume", "wandb", "verify_data", "keep_checkpoints"}
# A resumed run has the recorded values of these, unless others are typed.
SIZE_FIELDS = (
    *(*SHAPE_FIELDS, "context_length", "dropout"),
    *("batch_size", "micro_batch_size", "learning_rate", "weight_decay"),
)
MAX_CHOSEN_EXAMPLE_LENGTH = 1024  # tokens; longer examples need --context-length


def resolve(
    config: TrainConfig,
    data: Mixture,
    dist_ctx: DistributedContext,
    started_at: float,
    checkpoint: Checkpoint | None,
    measure: Callable[[RunConfig, Mixture], float],
) -> tuple[RunConfig, Mixture]:
    """Return the settings of a run, equal on all ranks, and its data.

    What is typed wins; else what the resumed run recorded or the base model has, then a size that
    is chosen, then defaults. The checkpoint is the one to resume, or the base model. ``measure``
    returns the seconds of a step. The data is without examples that are too long. Raises UserError
    for settings that conflict with each other, the data, or the checkpoint.
    """
    settings = {**flatten(config), "the text in data": data.sha256}
    dist_ctx.assert_equal_across_ranks(settings, ignore=SETTINGS_IGNORED_ON_RESUME | {"device"})
    state = dist_ctx.broadcast(checkpoint.state if checkpoint else None)
    values = set_values(config)
    if state and config.resume:
        recorded = recorded_settings(state)
        limits = ("steps",) if recorded["minutes"] and config.minutes else ()
        sizes = {name: recorded[name] for name in (*SIZE_FIELDS, *limits)}
        values = {**{name: x for name, x in sizes.items() if x is not None}, **values}
    if state and config.init_from:
        values |= base_model_values(state["model"], values, config.init_from)
    min_size = data.tokenizer.vocab_size
    vocab_size = values.get("vocab_size", min_size)
    if vocab_size < min_size and not config.init_from:  # a base model gets new rows
        problem = f"must be at least {min_size} for {data.path} (got {vocab_size})"
        raise UserError(f"--vocab-size: {problem}. Leave it out.")
    values["vocab_size"] = max(vocab_size, min_size)
    config = build(TrainConfig, values)

    chooses_sizes = should_choose_sizes(config)
    context_length = config.model.context_length or ModelConfig.context_length
    if data.longest_example and chooses_sizes and not config.model.context_length:
        context_length = min(MAX_CHOSEN_EXAMPLE_LENGTH, data.longest_example - 1)
        config = build(TrainConfig, {**values, "context_length": context_length})
    data = data.drop_long_examples(context_length, config.long_examples == "cut")
    sizes = {}
    if chooses_sizes:
        sizes = SizeSearch(config, data, dist_ctx).choose(started_at, measure)
    run_config = make_run_config(config, sizes, dist_ctx)
    if config.depth not in (None, run_config.model.num_layers):
        raise UserError(f"--depth: other sizes are set (got {config.depth}). Leave it out.")
    batches.check_sizes(run_config.batch_size, dist_ctx.size, run_config.micro_batch_size)
    data.check_length(run_config.model.context_length)
    dist_ctx.assert_equal_across_ranks({"dtype": run_config.dtype})  # each machine chooses it
    return run_config, data


def recorded_settings(state: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in a checkpoint's state. Raises UserError for values that do not fit."""
    source = f"checkpoint of step {state['step']:,}"
    return flatten(from_values(RunConfig, state["settings"], source))


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
        if name in FIXED_SETTINGS
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


def base_model_values(base: dict[str, Any], values: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the model settings of a base checkpoint, with the dropout of ``values``.

    Raises UserError, naming the source, for one of ``values`` that is neither its default nor that
    of the base.
    """
    merged = vars(from_values(ModelConfig, base, str(source)))
    for name, base_value in merged.items():
        default = getattr(ModelConfig, name, None)
        value = values.get(name, base_value)
        if name != "dropout" and value not in (default, base_value):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag}: must be that of {source}, {base_value} (got {value}). Leave it out."
            )
    return {**merged, "dropout": values.get("dropout", 0.0)}


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
