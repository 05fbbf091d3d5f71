"""Changes to a model for training: activation checkpointing and compilation.

Both replace ``forward`` on the instance, the one public way that changes no name in a state_dict,
can be undone, and composes with FSDP, which replaces a block's class.
"""

from collections.abc import Callable, Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MAX_MESSAGE_LENGTH = 200  # characters


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the input of each block, and recompute the rest in the backward pass.

    Chen et al. 2016.
    """
    for block in model.get_submodule("blocks").children():
        block.forward = MethodType(forward_with_checkpoint, block)


def forward_with_checkpoint(block: nn.Module, *inputs: object) -> Tensor:
    """The block's own forward pass, recomputed during backward."""
    return checkpoint(type(block).forward, block, *inputs, use_reentrant=False)


def compile_modules(modules: Sequence[nn.Module], warmup: Callable[[], object]) -> str:
    """Compile modules, and run warmup(). If it fails, undo, and return the reason; "" otherwise."""
    originals = [module.forward for module in modules]
    for module in modules:
        module.forward = torch.compile(module.forward)
    try:
        warmup()
        return ""
    except Exception as error:  # whatever the compiler, or a program that it calls, raises
        for module, forward in zip(modules, originals, strict=True):
            module.forward = forward
        return f"{type(error).__name__}: {error}".split("\n")[0][:MAX_MESSAGE_LENGTH]
