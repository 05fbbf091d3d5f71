"""Every setting of a training run. None means that the value is chosen automatically.

engine.training.sizing chooses the sizes.
"""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt, Le, Lt

from engine.core.errors import UserError
from engine.core.settings import flatten, with_values
from engine.data.mixture import as_paths
from engine.training.optimizer import OptimizerConfig, with_default_rates
from model import ModelConfig

BUILT_IN_DATA = Path("data/stdlib")
DEFAULT_BATCH_SIZE = 16
SHAPE_FIELDS = ("num_layers", "num_heads", "d_model")  # with one of them set, no size is chosen
SIZE_FIELDS = (
    *("depth", *SHAPE_FIELDS, "context_length", "dropout"),
    *("batch_size", "micro_batch_size", "learning_rate", "weight_decay"),
)


@dataclass(frozen=True)
class ModelSettings(ModelConfig):
    """The settings of the model as a user writes them: a size that is None is chosen."""

    # Narrower in ModelConfig: a model has sizes. resolve() returns one.
    context_length: Annotated[int | None, Ge(1), Le(10**7)] = None  # type: ignore[assignment]
    """Number of tokens that attention spans. None: 256, or chosen with the size."""
    num_layers: Annotated[int | None, Ge(1), Le(10**4)] = None  # type: ignore[assignment]
    """Transformer blocks. None: 2, or chosen with the size."""
    num_heads: Annotated[int | None, Ge(1), Le(10**4)] = None  # type: ignore[assignment]
    """Attention heads in each block. None: 2, or chosen with the size."""
    d_model: Annotated[int | None, Ge(1), Le(10**6)] = None  # type: ignore[assignment]
    """Width of the residual stream. None: 128, or chosen with the size."""
    dropout: Annotated[float | None, Ge(0), Lt(1)] = None  # type: ignore[assignment]
    """Probability of zeroing an activation during training. None: 0, or chosen with the size."""

    def __post_init__(self) -> None:
        if any(getattr(self, name) is not None for name in SHAPE_FIELDS):
            self.resolve()  # the size is set: report an impossible one now

    def resolve(self, **sizes: Any) -> ModelConfig:
        """Return the model's config: its settings, then ``sizes``, then ModelConfig's defaults."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        values = {name: value for name, value in values.items() if value is not None}
        try:
            return ModelConfig(**{**sizes, **values})
        except ValueError as error:
            raise UserError(str(error)) from None


@dataclass(frozen=True)
class ChangeableConfig:
    """The settings that a resumed run may change: paths, speed, length and reports."""

    data: tuple[Path, ...] = (BUILT_IN_DATA,)
    """The dataset that prepare.py wrote; or several, mixed as --mix says."""
    out: Path = Path("out/stdlib")
    """The run directory, for checkpoints, metrics and pictures."""
    steps: Annotated[int | None, Ge(1), Le(10**9)] = None
    """Optimizer steps in total. None: 1,200. With --minutes a maximum; None: no maximum."""
    minutes: Annotated[float | None, Gt(0), Le(10**7)] = None
    """Time to train, from start to exit."""
    micro_batch_size: Annotated[int | None, Ge(0)] = None
    """Sequences in one forward pass; fewer save memory. None: all, if they fit in memory."""
    eval_every: Annotated[int | None, Ge(1)] = None
    """Steps between evaluations. None: 500; with --minutes about ten in all, in 4% of the time."""
    eval_tokens: Annotated[int, Ge(0)] = 2**17
    """Tokens of each validation split to evaluate on; 0: all."""
    save_every: Annotated[int | None, Ge(1)] = None
    """Steps between checkpoints, besides new best ones. None: 500; with --minutes about ten."""
    keep_checkpoints: Annotated[int | None, Ge(1)] = None
    """Number of newest checkpoints to keep, besides the best one. None: 2."""
    log_every: Annotated[int, Ge(1)] = 10
    """Steps between training records in metrics.jsonl."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: the best available one."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of matrix products; auto: the fast one."""
    compile: tyro.conf.DisallowNone[bool | None] = None
    """Compile the model. None: on CUDA."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass: slower, in far less memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: each rank holds the full model, or a shard of it."""
    timeout: Annotated[int, Ge(1), Le(10**8)] = 600
    """Seconds without an answer from another rank after which the run ends."""
    deterministic: bool = False
    """On CUDA: only kernels that return the same bits each time, which are slower."""
    resume: bool = False
    """Continue from the newest checkpoint in the run directory, if there is one."""
    verify_data: bool = False
    """Check the dataset's SHA-256 hashes even if its files did not change since the last time."""
    plan: bool = False
    """Only print what the run needs: memory, operations, time."""
    wandb: bool = False
    """Log to Weights & Biases too (WANDB_MODE=offline keeps it on this machine)."""
    init_from: Path | None = None
    """Start from the weights, shape and tokenizer of this run or imported model."""


@dataclass(frozen=True)
class TrainConfig(ChangeableConfig):
    """Train a GPT on a prepared dataset: python train.py [FILE.toml] [flags]; flags win."""

    depth: Annotated[int | None, Ge(1), Le(24)] = None
    """Sets every size: layers, heads, and width / 64. None: chosen from --minutes or --steps."""
    batch_size: Annotated[int | None, Ge(1), Le(10**6)] = None
    """Sequences in one optimizer step, over all ranks. None: 16, or chosen with the size."""
    seed: Annotated[int, Ge(0), Lt(9 * 10**18)] = 1
    """Of the initial weights, the order of the data, and dropout."""
    mix: Annotated[tuple[float, ...] | None, Gt(0)] = None
    """Fraction of sequences from each dataset. None: in proportion to their tokens."""
    long_examples: Literal["leave_out", "cut"] = "leave_out"
    """What to do with examples that are longer than the context."""
    # To type checkers the model has its sizes, as it does after resolve_sizes().
    model: Annotated[ModelConfig, tyro.conf.arg(constructor=ModelSettings)] = field(default_factory=ModelSettings)
    """The architecture of the model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", as_paths(self.data, self.mix))
        for path in self.data:
            if self.out.resolve().is_relative_to(path.resolve()):
                raise UserError(
                    f"--out: must not be inside the dataset {path} (got {self.out}). Use another directory."
                )
        warmup_steps = self.optimizer.warmup_steps or 0
        if self.steps and self.steps <= warmup_steps:
            raise UserError(
                f"--steps: must exceed --warmup-steps {warmup_steps} (got {self.steps}). Use fewer warmup steps."
            )


def with_sizes(config: TrainConfig, sizes: dict[str, Any]) -> TrainConfig:
    """Return the config with these sizes, or else defaults, where it has None."""
    current = flatten(config)
    sizes = {"batch_size": DEFAULT_BATCH_SIZE, **sizes}
    unset = {name: value for name, value in sizes.items() if current[name] is None}
    config = with_values(config, unset)
    model = config.model
    if isinstance(model, ModelSettings):
        model = model.resolve()
    optimizer = with_default_rates(config.optimizer, model.d_model)
    return replace(config, model=model, optimizer=optimizer)
