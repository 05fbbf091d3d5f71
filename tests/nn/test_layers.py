"""Values and gradients of layers equal those of their definitions."""

import pytest
import torch
from reference import assert_same_gradients

from engine.nn.layers import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize(("epsilon", "is_weighted"), [(1e-6, False), (0.5, True)])
def test_the_root_mean_square_norm_matches_its_definition(dtype, tolerance, epsilon, is_weighted):
    torch.manual_seed(0)
    x = (3 * torch.randn(2, 5, 4, 24)).to(dtype).transpose(1, 2).requires_grad_()
    exact = x.double()
    expected = exact / (exact.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
    norm = RMSNorm(24, epsilon, elementwise_affine=is_weighted)
    inputs = [x, *norm.parameters()]
    for weight in norm.parameters():  # in float32, whatever the dtype of x
        torch.nn.init.normal_(weight)
        expected = expected * weight
    normalized = norm(x)
    assert normalized.dtype == dtype
    assert_same_gradients(normalized, expected, inputs, tolerance)
    with torch.no_grad():
        torch.testing.assert_close(norm(x), normalized.detach())
