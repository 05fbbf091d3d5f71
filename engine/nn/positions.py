"""Position encodings: sinusoids, and rotations of queries and keys (RoPE)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from engine.nn.attention import Contexts

Scaling = tuple[float, ...] | None  # see scale_frequencies
FREQUENCY_BASE = 10_000.0  # frequencies range from 1 to about 1 / FREQUENCY_BASE


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


def token_positions(tokens: Tensor, contexts: Contexts, max_length: int) -> Tensor:
    """Return the positions of tokens (B, T), which follow the cached ones: (T,) or (B, T).

    Without contexts, raises ValueError if they are more than max_length.
    """
    if contexts:
        return contexts[0].next_positions()
    count = tokens.shape[1]
    if count > max_length:
        raise ValueError(f"tokens must have at most {max_length} positions (got {count})")
    return torch.arange(count, device=tokens.device)


def angles(positions: Tensor, width: int, base: float, scaling: Scaling = None) -> Tensor:
    """Return the angle, position × frequency, of each pair: (…) → (…, width / 2)."""
    exponents = -torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width
    return positions[..., None].float() * scale_frequencies(base**exponents, scaling)


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Return the embeddings of Vaswani et al. 2017, section 3.5: (…) → (…, width)."""
    theta = angles(positions, width, FREQUENCY_BASE)
    return torch.stack((theta.sin(), theta.cos()), dim=-1).flatten(-2)


def rotations(positions: Tensor, width: int, base: float | None, scaling: Scaling) -> Tensor:
    """Return the cosines and sines of RoPE's angles, for :func:`rotate`.

    Each cosine stands twice, and each sine with both signs. For positions (T,) they are
    (2, T, width); for (B, T), (2, B, 1, T, width).
    """
    theta = angles(positions, width, FREQUENCY_BASE if base is None else base, scaling)
    if positions.ndim == 2:
        theta = theta[:, None]  # the same for all heads
    cos = theta.cos()
    sin = theta.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((sin, -sin), dim=-1)))


def rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Rotate each pair of dimensions (i, i + K / 2) of x (…, T, K): RoPE, Su et al. 2021, eq. 34.

    rotation is that of :func:`rotations`; None leaves x unchanged. Unlike eq. 34, pairs are not
    neighbors, and the rotation is clockwise. The scores are the paper's once the dimensions of
    queries and keys are permuted: i and i + K / 2 become neighbors, in swapped order.
    """
    if rotation is None:
        return x
    cos, sin = rotation.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class RotationTable:
    """The rotations of a model for decoding, computed once for each position."""

    def __init__(self, compute_rotations: Callable[[Tensor], Tensor]):
        """Take the rotations of a model, as a function of positions (T,)."""
        self.compute_rotations = compute_rotations
        self.table = torch.empty(2, 0, 0)  # (2, length, K)

    def __call__(self, positions: Tensor) -> Tensor:
        """Return the rotations of positions (T,) or (B, T)."""
        length = int(positions.max()) + 1
        table = self.table  # threads may share a decoder, and replace it
        if length > table.shape[1]:
            table = self.compute_rotations(torch.arange(2 ** math.ceil(math.log2(length))))
            self.table = table
        if positions.ndim == 1:
            return table.index_select(1, positions)
        return table[:, positions][:, :, None]  # the same for all heads
