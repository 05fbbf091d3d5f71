"""The bounds of the numbers in ModelConfig, and which of them fit each other."""

from typing import Any

# The least and the largest value of each number in ModelConfig; of a tuple, of its items.
MODEL_BOUNDS: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 10**8),
    "context_length": (1, 10**7),
    "num_layers": (1, 10**4),
    "num_heads": (1, 10**4),
    "num_kv_heads": (1, 10**4),
    "head_dim": (1, 10**6),
    "windows": (0, 10**7),
    "d_model": (1, 10**6),
    "d_ff": (1, 10**7),
    "dropout": (0.0, 0.999),
    "rope_base": (1.0, 1e15),
    "rope_scaling": (1e-6, 1e9),
    "norm_epsilon": (1e-20, 1.0),
    "logit_softcap": (0.0, 1e6),
}


def check_bounds(config: Any) -> None:
    """Raise ValueError for a number outside of MODEL_BOUNDS, or of another type."""
    for name, (least, largest) in MODEL_BOUNDS.items():
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else (value,):
            types = int if isinstance(least, int) else (int, float)
            is_number = isinstance(number, types) and not isinstance(number, bool)
            if number is not None and not (is_number and least <= number <= largest):
                bounds = f"from {least:,} to {largest:,}"
                raise ValueError(f"{name} must be {bounds} (got {number})")


def check_model_config(config: Any) -> None:
    """Raise ValueError for numbers of a ModelConfig out of bounds, or that do not fit."""
    check_bounds(config)
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
