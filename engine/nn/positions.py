"""Position encodings: sinusoids, and rotations of queries and keys (RoPE)."""

import math

import torch
from torch import Tensor

Scaling = tuple[float, ...] | None  # see scale_frequencies
FREQUENCY_BASE = 10_000.0  # frequencies range from 1 to about 1 / FREQUENCY_BASE


def check_scaling(scaling: Scaling) -> None:
    """Raise ValueError for numbers that :func:`scale_frequencies` cannot use."""
    if scaling is None or (len(scaling) == 1 and scaling[0] > 0):
        return
    if len(scaling) != 4 or min(scaling) <= 0 or scaling[1] >= scaling[2]:
        form = "FACTOR, or FACTOR LOW HIGH LENGTH with LOW below HIGH, all positive"
        raise ValueError(f"rope_scaling must be {form} (got {scaling})")


def scale_frequencies(frequencies: Tensor, scaling: Scaling) -> Tensor:
    """Divide RoPE's frequencies by a factor, for contexts longer than in earlier training.

    scaling is (factor,), or (factor, low, high, length). The latter divides only frequencies of
    less than ``low`` periods in ``length`` positions, and blends up to ``high`` periods. Sources:
    Chen et al. 2023, "Extending context window"; Llama 3.1, Grattafiori et al. 2024.
    """
    if scaling is None:
        return frequencies
    factor, *bounds = scaling
    if not bounds:
        return frequencies / factor
    low, high, length = bounds
    periods = frequencies * length / (2 * math.pi)
    unscaled = ((periods - low) / (high - low)).clamp(0, 1)
    return frequencies * (unscaled + (1 - unscaled) / factor)


def angles(
    start: int, end: int, width: int, base: float, device: torch.device, scaling: Scaling = None
) -> Tensor:
    """Return the angle, position × frequency, of each position and pair: (T, width / 2)."""
    exponents = -torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    positions = torch.arange(start, end, dtype=torch.float32, device=device)
    return torch.outer(positions, scale_frequencies(base**exponents, scaling))


def sinusoids(start: int, end: int, width: int, device: torch.device) -> Tensor:
    """Return the position embeddings of Vaswani et al. 2017, section 3.5: (T, width)."""
    theta = angles(start, end, width, FREQUENCY_BASE, device)
    return torch.stack((theta.sin(), theta.cos()), dim=-1).flatten(1)


def rotations(
    start: int, end: int, width: int, base: float, scaling: Scaling, device: torch.device
) -> Tensor:
    """Return the cosines and sines of RoPE's angles: (2, T, width / 2)."""
    theta = angles(start, end, width, base, device, scaling)
    return torch.stack((theta.cos(), theta.sin()))


def rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Rotate each pair of dimensions (i, i + K / 2) of x (…, T, K): RoPE, Su et al. 2021, eq. 34.

    rotation is (2, T, K / 2); None leaves x unchanged. Unlike eq. 34, pairs are not neighbors, and
    the rotation is clockwise. The scores are the paper's once the dimensions of queries and keys
    are permuted: i and i + K / 2 become neighbors, in swapped order.
    """
    if rotation is None:
        return x
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
