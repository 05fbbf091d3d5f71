"""The bounds of the numbers of a model, and which of them fit each other."""

from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from engine.core.values import check_ranges

Count = Annotated[int, Ge(1), Le(10**4)]
Width = Annotated[int, Ge(1), Le(10**7)]
Windows = tuple[Annotated[int, Ge(0), Le(10**7)], ...]
Probability = Annotated[float, Ge(0), Le(0.999)]
Base = Annotated[float, Ge(1), Le(1e15)]
Factors = tuple[Annotated[float, Gt(0), Le(1e9)], ...]
Epsilon = Annotated[float, Gt(0), Le(1)]
Cap = Annotated[float, Ge(0), Le(1e6)]


def check_model_config(config: Any) -> None:
    """Raise ValueError for numbers of a ModelConfig that do not fit each other.

    Raises UserError for a value of another type, or out of bounds.
    """
    check_ranges(config, prefix="")
    heads = config.num_heads
    if config.head_dim is None and config.d_model % heads:
        raise ValueError(f"num_heads must divide d_model {config.d_model} (got {heads})")
    if heads % config.num_groups:
        raise ValueError(f"num_kv_heads must divide num_heads {heads} (got {config.num_groups})")
    if config.position == "rope" and config.head_width % 2:
        raise ValueError(f"head_dim must be even for RoPE (got {config.head_width})")
    scaling = config.rope_scaling
    is_blend = scaling is not None and len(scaling) == 4 and scaling[1] < scaling[2]
    if not (scaling is None or len(scaling) == 1 or is_blend):
        form = "FACTOR, or FACTOR LOW HIGH LENGTH with LOW below HIGH, all positive"
        raise ValueError(f"rope_scaling must be {form} (got {scaling})")
