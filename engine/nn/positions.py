"""Position encodings: sinusoids, and rotations of queries and keys (RoPE)."""

import torch
from torch import Tensor

FREQUENCY_BASE = 10_000.0  # frequencies range from 1 to about 1 / FREQUENCY_BASE


def angles(start: int, end: int, width: int, base: float, device: torch.device) -> Tensor:
    """Return the angle, position × frequency, of each position and pair: (T, width / 2)."""
    exponents = -torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    positions = torch.arange(start, end, dtype=torch.float32, device=device)
    return torch.outer(positions, base**exponents)


def sinusoids(start: int, end: int, width: int, device: torch.device) -> Tensor:
    """Return the position embeddings of Vaswani et al. 2017, section 3.5: (T, width)."""
    theta = angles(start, end, width, FREQUENCY_BASE, device)
    return torch.stack((theta.sin(), theta.cos()), dim=-1).flatten(1)


def rotations(start: int, end: int, width: int, base: float, device: torch.device) -> Tensor:
    """Return the cosines and sines of RoPE's angles: (2, T, width / 2)."""
    theta = angles(start, end, width, base, device)
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
