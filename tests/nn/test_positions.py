"""Rotations of queries and keys, and their gradients."""

import pytest
import torch
from reference import assert_same_gradients

from engine.nn.positions import rotate, rotations


@pytest.mark.parametrize("positions", [torch.arange(5), torch.tensor([[3, 4, 5, 6, 7], [0] * 5])])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 0.05)]
)
def test_a_rotation_multiplies_complex_numbers(positions, dtype, tolerance):
    torch.manual_seed(0)
    rotation = rotations(positions, 8, None, None)
    x = torch.randn(2, 5, 3, 8).to(dtype).transpose(1, 2).requires_grad_()
    first, second = x.double().chunk(2, dim=-1)
    angles = positions.double()[..., None] * 10_000.0 ** (-torch.arange(4) / 4)
    angles = angles if positions.ndim == 1 else angles[:, None]  # the same for all heads
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), -angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    rotated = rotate(x, rotation)
    assert rotated.dtype == dtype
    assert_same_gradients(rotated, expected, [x], tolerance)
    without_gradient = rotate(x.detach(), rotation)
    torch.testing.assert_close(without_gradient, rotated.detach(), rtol=tolerance, atol=tolerance)
