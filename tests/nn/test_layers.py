"""Values and gradients of layers equal those of their definitions."""

import pytest
import torch
from reference import assert_same_gradients

from engine.nn.layers import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
def test_the_root_mean_square_norm_matches_its_definition(dtype, tolerance, epsilon):
    torch.manual_seed(0)
    x = (3 * torch.randn(2, 5, 4, 24)).to(dtype).transpose(1, 2).requires_grad_()
    exact = x.double()
    expected = exact / (exact.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
    normalized = RMSNorm(24, epsilon, elementwise_affine=False)(x)
    assert normalized.dtype == dtype
    assert_same_gradients(normalized, expected, [x], tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_without_gradients_or_compiled_gives_the_same_values(dtype):
    norm = RMSNorm(24, 1e-3, elementwise_affine=True).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = (0.02 * torch.randn(3, 5, 24)).to(dtype).requires_grad_()
    expected = norm(x).detach()
    torch.testing.assert_close(norm(x.detach()), expected)
    compiled = torch.compile(norm, backend="eager")
    torch.testing.assert_close(compiled(x).detach(), expected)
    torch.compiler.reset()


def test_a_second_derivative_of_a_norm_is_refused_and_not_wrong():
    x = torch.randn(3, 8).requires_grad_()
    norm = RMSNorm(8, 1e-5, elementwise_affine=False)
    (grad,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
