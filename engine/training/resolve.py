"""The settings of a run, from those that are typed; and the changes that a resume allows."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from engine.core.cli import count_noun, say, warn
from engine.core.device import choose_dtype
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import build, check_flags, flatten, from_values
from engine.core.values import convert
from engine.data import batches
from engine.data.chats.chat import turn_ends
from engine.data.dataset import Dataset
from engine.data.tokenizer import Tokenizer, load_tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN
from engine.generation.prompt_file import read_lines
from engine.generation.scores import Question, encode_questions, example_questions, select_evenly
from engine.generation.text_batch import initial_tokens
from engine.generation.text_generator import TextGenerator
from engine.runs.checkpoint import Checkpoint, RunState
from engine.training.config import CHANGEABLE_SETTINGS, TrainConfig, make_run_config, set_values
from engine.training.estimate import fit_micro_batches
from engine.training.sizing import SizeSearch
from model import GPT, ModelConfig

# Changing these settings changes no result.
SETTINGS_IGNORED_ON_RESUME = {"data", "out", "wandb", "verify_data", "keep_checkpoints", "base"}
SIZE_SETTINGS = ("num_layers", "num_heads", "d_model", "context_length", "batch_size")
# Tokens of context without --context-length.
MIN_EXAMPLE_CONTEXT = 256
MAX_CHOSEN_CONTEXT = 1024  # longer examples of a base model fit too


def resolve(
    config: TrainConfig,
    data: Dataset,
    dist_ctx: DistributedContext,
    started_at: float,
    checkpoint: Checkpoint | None,
    base: Checkpoint | None,
    measure: Callable[[TrainConfig, Dataset], float],
) -> tuple[TrainConfig, Dataset]:
    """Return the settings of a run, equal on all ranks, and its data without too long examples.

    What is typed wins; else what the resumed run recorded or the base model has, then a size that
    is chosen, then defaults. The checkpoint is on every rank, the base model on the main process.
    ``measure`` returns the seconds of a step. Raises UserError for settings that conflict with
    each other, the data, or a checkpoint.
    """
    # What is typed, then what the resumed run recorded or the base model has.
    if checkpoint:
        recorded = set_values(recorded_config(checkpoint.state))
        typed = set_values(config)
        if config.dtype == "auto":
            del typed["dtype"]
        config = build(TrainConfig, {**recorded, **typed, "out": config.out_path})
    settings = {**flatten(config), "the text in data": data.sha256}
    dist_ctx.assert_equal_across_ranks(settings, ignore=SETTINGS_IGNORED_ON_RESUME | {"device"})
    base_state = dist_ctx.broadcast(asdict(base.state) if base else None)
    base_state = convert(base_state, RunState | None, "state")
    config = fit_model(config, data, base_state)
    check_needs(config, data, is_resumed=bool(checkpoint))
    config = choose_frozen_weights(config, data, dist_ctx, base)
    config, data = fit_context(config, data, dist_ctx, base_state)

    # Then a size that is chosen, and defaults.
    sizes = SizeSearch(config, data, dist_ctx).choose(started_at, measure)
    run_config = make_run_config(config, sizes, dist_ctx)
    if not sizes and not checkpoint:
        dist_ctx.run_on_main(print_default_sizes, config, run_config)
    row_length = data.row_length(run_config.context_length)
    run_config = fit_micro_batches(run_config, dist_ctx, row_length)
    if config.depth not in (None, run_config.model.num_layers):
        raise UserError(f"--depth: other sizes are set (got {config.depth}). Leave it out.")
    batches.check_sizes(run_config.batch_size, dist_ctx.size, run_config.micro_batch_size)
    data.check_length(run_config.context_length)
    dist_ctx.assert_equal_across_ranks({"dtype": run_config.dtype})  # each machine chooses it
    state = checkpoint.state if checkpoint else base_state
    if state:  # rows may be shorter than the context of the model
        context_length = state.model.context_length
        is_longer = context_length > run_config.context_length
        run_config = replace(run_config, model_context=context_length if is_longer else 0)
    return run_config, data


def check_needs(config: TrainConfig, data: Dataset, is_resumed: bool) -> None:
    """Raise UserError for a setting that lacks another one, or the data that it is for."""
    masks = config.document_mask and not is_resumed  # a resume refuses the change by its name
    has_documents = not data.longest_example and data.document_start is not None
    rules = [
        ("--lora-rank", config.lora_rank, config.init_from, "--init-from DIRECTORY"),
        ("--score-file", config.score_file, config.score, "--score"),
        ("--best-by score", config.best_by == "score", config.score, "--score"),
        ("--document-mask", masks, has_documents, "text with a document token"),
        ("--document-mask", masks, config.model.attention != "loop", "--attention fused"),
    ]
    check_flags(rules)


def print_default_sizes(typed: TrainConfig, config: TrainConfig) -> None:
    """Print the sizes that are defaults, not chosen for the data, since another size is typed."""
    typed_values = set_values(typed)
    values = set_values(config)
    sizes = [f"{name} {values[name]}" for name in SIZE_SETTINGS if name not in typed_values]
    if sizes:
        say(f"sizes that are not chosen, as others are set: {', '.join(sizes)}")


def fit_model(config: TrainConfig, data: Dataset, base: RunState | None) -> TrainConfig:
    """Return the config with the model of a base's state, and rows for all tokens of the data.

    Raises UserError for a setting of the model that is neither its default nor that of the base.
    """
    values = set_values(config)
    for name, base_value in vars(base.model).items() if base else ():
        value = values.get(name, base_value)
        if name not in ("context_length", "dropout"):
            if value not in (getattr(ModelConfig, name), base_value):
                problem = f"must be that of {config.init_from}, {base_value} (got {value})"
                raise UserError(f"--{name.replace('_', '-')}: {problem}. Leave it out.")
            values[name] = base_value
    min_size = data.tokenizer.vocab_size
    vocab_size = values.get("vocab_size", min_size)
    if vocab_size < min_size and not config.init_from:  # a base model gets new rows
        problem = f"must be at least {min_size} for {data.path} (got {vocab_size})"
        raise UserError(f"--vocab-size: {problem}. Leave it out.")
    return build(TrainConfig, {**values, "vocab_size": max(vocab_size, min_size)})


def choose_frozen_weights(
    config: TrainConfig, data: Dataset, dist_ctx: DistributedContext, base: Checkpoint | None
) -> TrainConfig:
    """Return the config, with the weights that LoRA freezes and their dtype, by the base model.

    Embeddings and head are trained if the data has tokens that the base has not learned.
    """
    values: dict[str, Any] = {}
    if base and config.lora_rank:
        _, new_ids = split_token_ids(base, data.tokenizer, data.learns_chats)
        dtype = choose_dtype(config.dtype, dist_ctx.device, base.state.model.d_model)
        frozen_dtype = base.dtype if dtype == torch.bfloat16 else "float32"
        values = {"frozen_dtype": frozen_dtype, "train_tokens": bool(new_ids)}
        if new_ids and config.train_tokens is None:
            tokens = count_noun(len(new_ids), "token")
            warn(f"{data.path}: {tokens} new to {base.path}: token embeddings are trained too")
    return build(TrainConfig, {**dist_ctx.broadcast(values), **set_values(config)})


def fit_context(
    config: TrainConfig, data: Dataset, dist_ctx: DistributedContext, base: RunState | None
) -> tuple[TrainConfig, Dataset]:
    """Return the config, with a context length for examples or a base, and the data that fits it.

    Raises UserError for more positions than the base has learned, and if few examples fit.
    """
    max_context = math.inf
    if base and config.model.position == "learned":
        max_context = base.model.context_length
    context_length = config.model.context_length
    if context_length is None and (base or data.longest_example):
        context_length = max(1, int(min(max_context, choose_context_length(data, base))))
        config = build(TrainConfig, {**set_values(config), "context_length": context_length})
    if context_length and context_length > max_context:
        problem = f"{config.init_from} has learned {max_context} positions (got {context_length})"
        raise UserError(f"--context-length: {problem}. Lower it, or choose another base model.")
    if not context_length or not data.longest_example:
        return config, data
    fitting = data.drop_long_examples(context_length)
    longest = data.longest_example - 1
    if fitting.lacks_examples:
        num_examples = sum(split.num_examples for split in data.splits)
        fits_base = longest <= max_context
        advice = f"Use {longest}" if fits_base else "Shorten them, or choose another base model"
        problem = f"{fitting.num_removed:,} of {count_noun(num_examples, 'example')} do not fit"
        raise UserError(f"--context-length: {problem} (got {context_length}). {advice}.")
    if fitting.num_removed and dist_ctx.is_main_process:
        size = f"--context-length is {context_length}, and the longest needs {longest}"
        warn(f"{count_noun(fitting.num_removed, 'example')} left out: {size}.")
    return config, fitting


def choose_context_length(data: Dataset, base: RunState | None) -> int:
    """Return the most tokens of a row, for examples or for a base model's state.

    Rows hold no padding for it, so it leaves room for more turns. Text has the rows of its base.
    """
    longest = data.longest_example - 1
    if data.longest_example:
        wanted = max(MIN_EXAMPLE_CONTEXT, min(2 * longest, MAX_CHOSEN_CONTEXT))
        return max(wanted, longest) if base else wanted
    assert base
    length = base.settings.get("context_length")
    length = length or min(base.model.context_length, MAX_CHOSEN_CONTEXT)
    return min(length, *[len(split) - 1 for split in data.splits])


def recorded_config(state: RunState) -> TrainConfig:
    """Return the settings in a checkpoint's state. Raises UserError for values that do not fit."""
    return from_values(TrainConfig, state.settings, f"checkpoint of step {state.step:,}")


def changed_settings(
    state: RunState, settings: dict[str, Any], data_sha256: str
) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those of a checkpoint's state: {name: (old, new)}.

    Raises UserError for a change of data or a fixed setting, and for an end before the checkpoint.
    """
    recorded = flatten(recorded_config(state))
    pairs = {name: (recorded[name], value) for name, value in settings.items()}
    changed = {name: (old, new) for name, (old, new) in pairs.items() if old != new}
    fixed = [name for name in changed if name not in CHANGEABLE_SETTINGS]
    refused = [f"{name} {recorded[name]!r} → {settings[name]!r}" for name in fixed]
    if state.data_sha256 != data_sha256:
        refused.append("the text in --data (docs/data.md: My text has grown)")
    if refused:
        advice = "Set it back, or choose another --out."
        raise UserError(f"--resume: can't change {', '.join(refused)}. {advice}")
    for name, done in (("steps", state.step), ("minutes", round(state.elapsed_seconds / 60, 4))):
        if name in changed and (settings[name] or math.inf) < done:
            problem = f"must be at least the {done:,} of the checkpoint (got {settings[name]:,})"
            raise UserError(f"--{name}: {problem}. Leave it out, or give more.")
    return {name: pair for name, pair in changed.items() if name not in SETTINGS_IGNORED_ON_RESUME}


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
        if name in ("token_embedding.weight", "head.weight") and new:
            tensor = tensor.float()  # of a model that was imported in bfloat16
            mean = tensor[trained].mean(0, keepdim=True)
            tensor = torch.cat((tensor, mean.expand(num_rows - len(tensor), -1)))
            tensor[new] = mean
        yield name, tensor


def load_questions(
    config: TrainConfig, dist_ctx: DistributedContext, data: Dataset, model: GPT
) -> list[Question]:
    """Return the questions of ``--score``, evenly spaced in their file or validation split.

    Raises UserError for questions without an answer, or of another kind than the score.
    """
    if not config.score:
        return []
    if config.score_file:
        start = initial_tokens(data.tokenizer, data.manifest["splits"]["train"]["documents"])
        generator = TextGenerator(model, data.tokenizer, start, data.learns_chats)
        rows = dist_ctx.broadcast_from_main(read_questions, config, generator)
        return [Question(**row) for row in rows]
    val = data.val
    if config.score == "choice" or not val.num_examples:
        problem = f"{data.path} has no such questions"
        raise UserError(f"--score {config.score}: {problem}. Add --score-file FILE.")
    ends = turn_ends(data.tokenizer, data.learns_chats)
    return [*example_questions(val, data.tokenizer, ends, config.score_examples)]


def read_questions(config: TrainConfig, generator: TextGenerator) -> list[dict[str, Any]]:
    """Return the fields of the questions in ``--score-file``, evenly spaced.

    Raises UserError for a line that cannot be read or encoded, or of another kind than the score.
    """
    assert config.score_file
    lines = read_lines(config.score_file)
    questions = [*encode_questions(lines, generator)]
    for (location, _), question in zip(lines, questions, strict=True):
        if question.answer is None or bool(question.choices) != (config.score == "choice"):
            fields = "'choices' and 'answer'" if config.score == "choice" else "only 'answer'"
            raise UserError(f"--score {config.score}: {location} must have {fields}.")
    indices = select_evenly(len(questions), config.score_examples)
    return [asdict(questions[index]) for index in indices]
