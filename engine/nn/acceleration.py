"""Changes to a model for training: activation checkpointing and compilation.

Both replace ``forward`` on the instance. That keeps the names in a state_dict, can be undone, and
composes with FSDP, which replaces a block's class.
"""

from collections.abc import Callable, Sequence
from types import MethodType

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module) -> None:
    """Store only the input of each block, and recompute its activations: Chen et al. 2016."""
    for block in model.get_submodule("blocks").children():
        block.forward = MethodType(forward_with_checkpoint, block)


def forward_with_checkpoint(block: nn.Module, *inputs: object) -> Tensor:
    """Run the forward pass of the block's class, and again in the backward pass."""
    return checkpoint(type(block).forward, block, *inputs, use_reentrant=False)


def compile_modules(modules: Sequence[nn.Module], warmup: Callable[[], object]) -> str:
    """Compile modules in place, and call ``warmup``, which must run them.

    Returns "". After an error, undoes the compilation and returns a line with the reason.
    """
    originals = [module.forward for module in modules]
    for module in modules:
        module.forward = torch.compile(module.forward)
    try:
        warmup()
        return ""
    except Exception as error:  # compilers and the programs that they call raise any class
        for module, forward in zip(modules, originals, strict=True):
            module.forward = forward
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]
