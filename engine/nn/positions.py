"""Encodings of positions: sinusoids, and rotations of queries and keys (RoPE)."""

import torch
from torch import Tensor

FREQUENCY_BASE = 10_000.0  # frequencies fall from 1 to about 1 / this


def angles(start: int, end: int, width: int, base: float, device: torch.device) -> Tensor:
    """Position times frequency at positions start…end, (T, width / 2)."""
    pairs = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    positions = torch.arange(start, end, dtype=torch.float32, device=device)
    return torch.outer(positions, base ** (-pairs / width))


def sinusoids(start: int, end: int, width: int, device: torch.device) -> Tensor:
    """Position embeddings of Vaswani et al. 2017, section 3.5: (T, width)."""
    turns = angles(start, end, width, FREQUENCY_BASE, device)
    return torch.stack((turns.sin(), turns.cos()), dim=-1).flatten(1)


def rotations(start: int, end: int, width: int, base: float, device: torch.device) -> Tensor:
    """RoPE's cosines and sines at positions start…end, (2, T, width / 2)."""
    turns = angles(start, end, width, base, device)
    return torch.stack((turns.cos(), turns.sin()))


def rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Rotate each pair (i, i + K / 2) of x (…, T, K) by its position's angle: Su et al. 2021.

    rotation is (2, T, K / 2). Compared with eq. 34 it turns clockwise, and pairs halves in place of
    neighbors; the scores are the same.
    """
    if rotation is None:
        return x
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
