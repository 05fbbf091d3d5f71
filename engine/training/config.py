"""Every setting of a training run: typed, where None means automatic, and complete."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt, Le, Lt

from engine.core.cli import shell_command
from engine.core.device import choose_dtype
from engine.core.distributed import DistributedContext
from engine.core.errors import UserError
from engine.core.settings import build, check_flags, load_settings, read_toml, spell_booleans
from engine.core.values import AUTO, Auto, field_values
from engine.data.batches import dataset_paths
from engine.data.dataset import dataset_name
from engine.nn.acceleration import can_capture_graphs
from engine.nn.bounds import DEFAULT_SIZES
from engine.runs.run_files import find_newest_run, list_checkpoints
from engine.training.optimizer import OptimizerConfig, default_rates
from model import ModelConfig

BUILT_IN_DATA = Path("data/pydocs")
DEFAULT_MINUTES = 2  # if neither a length nor a size is set
DEFAULT_STEPS = 1200
MAX_STEPS = 10**9
DEFAULT_INTERVAL_STEPS = 500  # between evaluations, and between saves
EVAL_TOKENS_PER_MINUTE = 2**13  # of a run in minutes, in each evaluation before its last
MAX_CHARACTER_VOCAB_SIZE = 512  # larger vocabularies are of pieces of words
LORA_LEARNING_RATE = 1e-3
WINDOW_WARMUP_FRACTION = 0.2  # of the run, where tokens are pieces of words


@dataclass(frozen=True)
class TrainConfig:
    """Train a GPT on a dataset: python train.py [FILE.toml or TEXT] [flags]; flags win."""

    # One or more datasets that prepare.py wrote; --mix sets the fraction of each.
    data: tuple[Path, ...] = (BUILT_IN_DATA,)
    # Minutes from start to exit. None: 2, without --steps, a size of the model and --init-from.
    minutes: Annotated[float | None, Gt(0), Le(10**7)] = None
    # Tokens of each validation split to evaluate on; 0: all. Before its end, a run in minutes
    # evaluates on at most 8,192 for each minute.
    eval_tokens: Annotated[int, Ge(0)] = 2**17
    # Number of newest checkpoints to keep, besides the best one.
    keep_checkpoints: Annotated[int, Ge(1)] = 2
    log_every: Annotated[int, Ge(1)] = 10  # Steps between training records in metrics.jsonl.
    device: str = "auto"  # cpu, cuda, mps, or auto: the best available one.
    checkpoint_activations: bool = False  # Recompute blocks in the backward pass, to save memory.
    # On one GPU: replay steps as CUDA graphs, in which Python code runs once.
    capture: bool = True
    # Under torchrun: each rank holds the full model, or a shard of it.
    parallel: Literal["ddp", "fsdp"] = "ddp"
    # End the run after this many seconds without an answer from another rank.
    timeout: Annotated[int, Ge(1), Le(10**8)] = 600
    deterministic: bool = False  # On CUDA: use reproducible kernels, which are slower.
    verify_data: bool = False  # Check the dataset's SHA-256 hashes even if its files are unchanged.
    wandb: bool = False  # Log to Weights & Biases too (on this machine: WANDB_MODE=offline).
    init_from: Path | None = None  # Start from the weights and tokenizer of this run or import.
    # Freeze the weights of --init-from, and train an update of this rank for each linear layer of
    # the blocks (LoRA); 0: train all weights.
    lora_rank: Annotated[int, Ge(0), Le(10**5)] = 0
    base: Path | None = None  # The base model of a LoRA run to resume, if it was moved.
    # Seed of the initial weights, the order of the data, and dropout.
    seed: Annotated[int, Ge(0), Lt(9 * 10**18)] = 1
    # Fraction of sequences from each dataset. None: in proportion to their tokens.
    mix: tuple[Annotated[float, Gt(0), Le(1e15)], ...] | None = None
    # Of text: let attention not cross documents. It pays for documents shorter than the context.
    document_mask: bool = False
    # Measure right answers at each evaluation: of exactly equal text, or the most likely choice.
    score: Literal["exact_match", "choice"] | None = None
    # A file of questions to score: docs/training.md. None: prompts of the validation examples.
    score_file: Path | None = None
    score_examples: Annotated[int, Ge(1)] = 200  # Most questions to score.
    best_by: Literal["loss", "score"] = "loss"  # Which checkpoint is the best.
    # A file or folder of text instead of --data, to prepare first: python prepare.py TEXT.
    text: str = ""
    # With a folder as TEXT: as in prepare.py; the flag may be repeated.
    glob: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    # The run directory, for checkpoints, metrics and pictures. None: out/NAME for --data data/NAME.
    out: Auto[Path] = AUTO
    # Number of layers and of heads, and width / 64. None: chosen from --minutes or --steps.
    depth: Auto[Annotated[int, Ge(1), Le(24)]] = AUTO
    # Optimizer steps in total. None: 1,200. In a run in minutes an upper limit; None: no limit.
    steps: Auto[Annotated[int, Ge(1), Le(MAX_STEPS)]] = AUTO
    # Sequences in one optimizer step, over all ranks. None: 16, or chosen with the size.
    batch_size: Auto[Annotated[int, Ge(1), Le(10**6)]] = AUTO
    # Sequences in one forward pass; fewer save memory. 0: all. None: all, if they fit in memory.
    micro_batch_size: Auto[Annotated[int, Ge(0)]] = AUTO
    # Steps between evaluations. None: 500; with --minutes, every 10% of the run or ten minutes.
    eval_every: Auto[Annotated[int, Ge(1)]] = AUTO
    # Steps between checkpoints, besides new best ones. None: 500; with --minutes as for eval_every.
    save_every: Auto[Annotated[int, Ge(1)]] = AUTO
    # Precision of matrix products. auto: bfloat16 where that is fast, else float32.
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: Auto[bool] = AUTO  # Compile the model. None: on CUDA.
    # With LoRA: dtype of frozen embeddings. None: that of the base, or float32 without bfloat16.
    frozen_dtype: Auto[Literal["float32", "bfloat16"]] = AUTO
    # With LoRA: train token embeddings and head too. None: if the data has tokens new to the base.
    train_tokens: Auto[bool] = AUTO
    resume: bool = False  # Continue --out or, without --out and --data, the newest run in out/.
    auto_resume: bool = False  # The same if there is one, else start: one command for both.
    plan: bool = False  # Print memory, operations and time; do not train.
    # Positions of the model of a run, if its rows are shorter.
    model_context: tyro.conf.Suppress[Annotated[int, Ge(0), Le(10**7)]] = 0

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        """Raise UserError for settings that contradict each other."""
        text_data = [Path("data", dataset_name(self.text))] if self.text else []
        object.__setattr__(self, "data", dataset_paths(text_data or self.data, self.mix))
        for path in self.data:
            is_dataset = self.out or (path / "manifest.json").exists()
            if is_dataset and self.out_path.resolve().is_relative_to(path.resolve()):
                problem = f"must not be inside the dataset {path} (got {self.out_path})"
                raise UserError(f"--out: {problem}. Use another directory.")
        warmup_steps = self.optimizer.warmup_steps
        is_default = warmup_steps == OptimizerConfig.warmup_steps
        has_steps = self.steps and not self.minutes
        if has_steps and self.steps <= warmup_steps and not is_default:
            problem = f"must exceed --warmup-steps {warmup_steps} (got {self.steps})"
            raise UserError(f"--steps: {problem}. Use fewer warmup steps.")

    @property
    def may_resume(self) -> bool:
        """Whether a run in the directory is continued."""
        return self.resume or self.auto_resume

    @property
    def out_path(self) -> Path:
        """The run directory; by default it is named after the datasets."""
        return self.out or Path("out", "+".join(path.resolve().name for path in self.data))

    @property
    def context_length(self) -> int:
        """The most tokens of a row."""
        return self.model.context_length

    @property
    def model_config(self) -> ModelConfig:
        """The model: its context may be longer than the rows, as that of a base model."""
        return replace(self.model, context_length=max(self.model_context, self.context_length))

    def captures_steps(self, dist_ctx: DistributedContext) -> bool:
        """Return whether training steps are replayed as CUDA graphs."""
        # Recomputed dropout restores the state of a generator, which a capture may forbid.
        restores_generator = self.checkpoint_activations and self.model.dropout > 0
        can_capture = can_capture_graphs(dist_ctx.device) and not restores_generator
        return self.capture and can_capture and dist_ctx.is_alone

    def evaluation_tokens(self, split_tokens: int, is_last: bool) -> int:
        """Return the tokens of a validation split for the last evaluation, or an earlier one."""
        minutes = self.minutes if self.minutes and not is_last else math.inf
        limits = (split_tokens, self.eval_tokens or math.inf, EVAL_TOKENS_PER_MINUTE * minutes)
        return math.ceil(min(limits))

    def micro_batch_rows(self, dist_ctx: DistributedContext) -> int:
        """Return the sequences of a rank in one forward pass."""
        return self.micro_batch_size or self.batch_size // dist_ctx.size


RUN_DEFAULTS: dict[str, Any] = {"batch_size": 16, "frozen_dtype": "float32", "train_tokens": False}
# What a command asks for once: a run has none of it.
COMMAND_DEFAULTS: dict[str, Any] = {"text": "", "glob": (), "depth": None, "plan": False}
COMMAND_DEFAULTS |= {"resume": False, "auto_resume": False}
MAX_SETTINGS_BYTES = 2**14  # of a file of settings of another trainer
SETTINGS_SUFFIXES = {".py", ".json", ".yaml", ".yml"}
# What a folder of a run, a checkpoint or a dataset has, and the flag for it.
FOLDER_FLAGS = {"checkpoints": "--init-from", "state.json": "--init-from"}
FOLDER_FLAGS |= {"train-00000.npy": "--data"}
# A resumed run may change no others: paths, hardware, length, reports and optimization.
CHANGEABLE_SETTINGS = {"data", "out", "init_from", "base", "verify_data", "keep_checkpoints"}
CHANGEABLE_SETTINGS |= {"device", "parallel", "timeout", "dtype", "compile", "capture", "wandb"}
CHANGEABLE_SETTINGS |= {"deterministic", "micro_batch_size", "checkpoint_activations", "minutes"}
CHANGEABLE_SETTINGS |= {"steps", "eval_every", "save_every", "log_every", "eval_tokens", "score"}
CHANGEABLE_SETTINGS |= {"score_file", "score_examples", "best_by", "learning_rate", "decay"}
CHANGEABLE_SETTINGS |= {"final_learning_rate", "embedding_rate", "warmup_steps", "window_warmup"}
CHANGEABLE_SETTINGS |= {"weight_decay", "clip_norm", "beta1", "beta2", "momentum"}


def load_config(arguments: Sequence[str]) -> TrainConfig:
    """Return the settings of a command line; those of the run to resume, where it sets none."""
    arguments = spell_booleans(TrainConfig, arguments)
    name = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    for file, flag in FOLDER_FLAGS.items():
        if name and Path(name, file).exists():
            raise UserError(f"{name}: is not a text. Use {shell_command(flag, name)} instead.")
    flags = {argument.partition("=")[0] for argument in arguments}
    path = Path(name)
    is_settings_file = path.suffix.lower() in SETTINGS_SUFFIXES and path.is_file()
    if is_settings_file and path.stat().st_size <= MAX_SETTINGS_BYTES:
        advice = f"To train on this file as text: {shell_command('python', 'prepare.py', name)}"
        raise UserError(f"{name}: must be TOML, as in config/, to hold settings. {advice}.")
    if name and not name.lower().endswith(".toml"):
        arguments = ["--text", *arguments]
    elif "--resume" in flags and not (name or flags & {"--data", "--out"}):
        arguments = [*arguments, "--out", str(find_newest_run("step-*[1-9]*"))]  # no import
    config = load_settings(TrainConfig, arguments)
    path = config.out_path / "config.toml"
    if config.may_resume and path.exists() and list_checkpoints(config.out_path):
        recorded = {**read_toml(path), "out": str(config.out_path)}
        config = load_settings(TrainConfig, arguments, recorded)
    check_config(config, flags)
    return config


def check_config(config: TrainConfig, flags: set[str]) -> None:
    """Raise UserError for a flag that has no effect with the other settings.

    A file may have such settings: a flag may make them useless.
    """
    model = config.model
    optimizer = config.optimizer
    has_lora = config.lora_rank > 0
    has_muon = optimizer.optimizer == "muon"
    rules = [
        ("--data", not config.text, "no text as the first word"),
        ("--glob", config.text, "a folder of text as the first word"),
        ("--frozen-dtype --train-tokens --no-train-tokens --base", has_lora, "--lora-rank"),
        ("--optimizer --momentum", not has_lora, "no --lora-rank, which AdamW trains"),
        ("--base", config.may_resume, "--resume"),
        ("--score-examples", config.score, "--score"),
        ("--momentum", has_muon, "--optimizer muon"),
        ("--final-learning-rate", optimizer.decay != "inverse_sqrt", "another --decay"),
        ("--embedding-rate", not model.tie_embeddings, "no --tie-embeddings"),
        ("--rope-base --rope-scaling", model.position == "rope", "--position rope"),
        ("--num-layers --num-heads --d-model", "--depth" not in flags, "no --depth"),
    ]
    check_flags(
        (flag, flag in flags, is_met, need)
        for names, is_met, need in rules
        for flag in names.split()
    )


def set_values(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that are not chosen automatically, by name."""
    return {name: value for name, value in field_values(config).items() if value is not None}


def make_run_config(
    config: TrainConfig, sizes: dict[str, Any], dist_ctx: DistributedContext
) -> TrainConfig:
    """Return the config of a run, with a value for each None; what is typed wins over sizes.

    The length of a run may be steps or minutes alone, and its intervals None in minutes. The memory
    chooses its micro-batches: see fit_micro_batches().
    """
    values = {**DEFAULT_SIZES, **RUN_DEFAULTS, **sizes, **set_values(config), **COMMAND_DEFAULTS}
    is_window_fixed = bool(config.init_from) or values["vocab_size"] <= MAX_CHARACTER_VOCAB_SIZE
    step_tokens = values["batch_size"] * values["context_length"]
    kind = config.optimizer.optimizer
    defaults = default_rates(kind, values["d_model"], step_tokens, bool(config.init_from))
    defaults["compile"] = dist_ctx.device.type == "cuda"
    if not is_window_fixed:
        defaults["window_warmup"] = WINDOW_WARMUP_FRACTION
    if config.lora_rank:
        defaults["learning_rate"] = LORA_LEARNING_RATE
    if not values.get("minutes"):
        defaults["steps"] = DEFAULT_STEPS
        defaults["eval_every"] = DEFAULT_INTERVAL_STEPS
        defaults["save_every"] = DEFAULT_INTERVAL_STEPS
    dtype = str(choose_dtype(config.dtype, dist_ctx.device, values["d_model"])).split(".")[-1]
    if dtype != "bfloat16" and values["frozen_dtype"] == "bfloat16":
        problem = f"needs --dtype bfloat16 (got {dtype})"
        raise UserError(f"--frozen-dtype: {problem}. Add it, or leave this out.")
    return build(TrainConfig, {**defaults, **values, "out": config.out_path, "dtype": dtype})
