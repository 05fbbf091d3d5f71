"""What initialization and optimizer need to know of each parameter."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class ParameterSpec(NamedTuple):
    """Initialization and optimizer group of a parameter."""

    group: Literal["matrix", "embedding", "head", "vector"]
    std: float = 0.0  # of the normal distribution of initial values
    mean: float = 0.0
    stack: str = ""  # matrix that Muon updates; its rows are those of all parameters that name it


Specs = Mapping[str, ParameterSpec]


def match_specs(specs: Specs, names: Iterable[str]) -> dict[str, ParameterSpec]:
    """Find the spec of each parameter: the one whose key is the end of the parameter's name.

    A stack is named relative to the rest of the name; without one, the parameter is a stack of its
    own. Raises ValueError for a parameter without exactly one spec.
    """
    matched = {}
    for name in names:
        endings = [ending for ending in specs if name.endswith(ending)]
        if len(endings) != 1:
            raise ValueError(f"{name} must match one key of parameter_specs() (got {endings})")
        spec = specs[endings[0]]
        stack = name.removesuffix(endings[0]) + spec.stack if spec.stack else name
        matched[name] = spec._replace(stack=stack)
    return matched


def draw_initial_values(
    parameters: Iterable[tuple[str, Tensor]],
    specs: Specs,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter's name and initial value, on the CPU, one at a time and in order."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters:
        spec = specs[name]
        value = torch.full(parameter.shape, spec.mean, device="cpu")
        if spec.std > 0:
            value.normal_(spec.mean, spec.std, generator=generator)
        yield name, value
