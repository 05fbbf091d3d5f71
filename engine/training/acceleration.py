"""Changes to a model that trains: activation checkpointing and compilation, applied from outside."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_activations(model: nn.Module) -> None:
    """Have each block keep its input alone, and recompute the rest in the backward pass: Chen et al. 2016."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_parts(parts: Sequence[nn.Module], try_out: Callable[[], object]) -> str:
    """Have modules compile when try_out() runs them; returns why that failed, and they stay as they were, or ''."""
    for part in parts:
        part.compile()
    try:
        try_out()
        return ""
    except Exception as error:  # whatever the compiler, or a program that it calls, may raise
        for part in parts:
            part._compiled_call_impl = None
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]
