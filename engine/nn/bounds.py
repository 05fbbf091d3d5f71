"""The bounds of the numbers of a model, which of them fit each other, and default sizes."""

from dataclasses import replace
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from engine.core.errors import UserError
from engine.core.values import AUTO, check_ranges
from engine.core.values import Auto as Auto

Count = Annotated[int, Ge(1), Le(10**4)]
Width = Annotated[int, Ge(1), Le(10**7)]
Windows = tuple[Annotated[int, Ge(0), Le(10**7)], ...]
Probability = Annotated[float, Ge(0), Le(0.999)]
Base = Annotated[float, Ge(1), Le(1e15)]
Factors = tuple[Annotated[float, Gt(0), Le(1e9)], ...]
Epsilon = Annotated[float, Gt(0), Le(1)]
Cap = Annotated[float, Ge(0), Le(1e6)]

DEFAULT_SIZES: dict[str, Any] = {"context_length": 256, "num_layers": 2, "num_heads": 2}
DEFAULT_SIZES |= {"d_model": 128, "dropout": 0.0}


def set_default_sizes(config: Any) -> Any:
    """Return a ModelConfig with a default for every size that is None, but the vocabulary's."""
    if config.vocab_size is None:
        raise UserError("--vocab-size: must be a number of tokens (got None). Set it.")
    unset = {name: size for name, size in DEFAULT_SIZES.items() if getattr(config, name) is AUTO}
    return replace(config, **unset) if unset else config


def check_model_config(config: Any) -> None:
    """Raise UserError for numbers of a ModelConfig out of bounds, or that do not fit each other."""
    check_ranges(config)
    heads = config.num_heads
    if heads is None or config.d_model is None:
        return  # until they are chosen
    if config.head_dim is None and config.d_model % heads:
        raise UserError(f"--num-heads: must divide --d-model {config.d_model} (got {heads}).")
    if heads % config.num_groups:
        raise UserError(f"--num-kv-heads: must divide {heads} heads (got {config.num_groups}).")
    if config.position == "rope" and config.head_width % 2:
        raise UserError(f"--head-dim: must be even for RoPE (got {config.head_width}).")
    scaling = config.rope_scaling
    is_blend = scaling is not None and len(scaling) == 4 and scaling[1] < scaling[2]
    if not (scaling is None or len(scaling) == 1 or is_blend):
        form = "FACTOR, or FACTOR LOW HIGH LENGTH with LOW below HIGH, all positive"
        raise UserError(f"--rope-scaling: must be {form} (got {scaling}).")
