"""Parameter specs: the initial distribution and the optimizer group of each parameter."""

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class ParameterSpec(NamedTuple):
    """Initial distribution and optimizer group of a parameter."""

    group: Literal["matrix", "embedding", "head", "vector", "adapter"]
    std: float = 0.0  # of the initial values, which are normally distributed
    mean: float = 0.0
    stack: str = ""  # Muon stacks parameters of the same name here into one matrix
    lr_scale: float = 1.0  # factor of the learning rate


Specs = Mapping[str, ParameterSpec]


def match_specs(specs: Specs, names: Iterable[str]) -> dict[str, ParameterSpec]:
    """Return the spec of each parameter, whose name must match exactly one key of ``specs``.

    In a key, * stands for any text; that at its start is prefixed to a stack: each layer has its
    own. A parameter without a stack gets its own name as stack. Raises ValueError for other names.
    """
    matched = {}
    for name in names:
        keys = [key for key in specs if fnmatchcase(name, key)]
        if len(keys) != 1:
            raise ValueError(f"{name} must match one key of parameter_specs() (got {keys})")
        spec = specs[keys[0]]
        stack = name.removesuffix(keys[0].lstrip("*")) + spec.stack if spec.stack else name
        matched[name] = spec._replace(stack=stack)
    return matched


def draw_initial_values(
    parameters: Iterable[tuple[str, Tensor]], specs: Specs, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the initial value of each parameter, drawn in this order, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters:
        spec = specs[name]
        value = torch.full(parameter.shape, spec.mean, device="cpu")
        if spec.std > 0:
            value.normal_(spec.mean, spec.std, generator=generator)
        yield name, value
