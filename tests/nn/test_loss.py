"""The output loss, whole or in chunks, equals the definition, in values and gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import VARIANTS, random_model
from reference import OperationRecorder, assert_same_gradients, loss_definition

import model as model_module
from engine.nn import loss as loss_module
from engine.nn.loss import (
    IGNORE_INDEX,
    chunked_loss,
    cross_entropy,
    soft_cap,
    training_loss,
    validation_loss,
)


def random_output(num_rows: int = 48, width: int = 3) -> tuple[torch.Tensor, ...]:
    """Inputs and weight of an output layer of 37 tokens, and targets."""
    torch.manual_seed(0)
    x = torch.randn(num_rows, width).requires_grad_()
    weight = torch.randn(37, width).requires_grad_()
    return x, weight, torch.randint(37, (num_rows,))


@pytest.mark.parametrize("loss", [training_loss, validation_loss])
@pytest.mark.parametrize("rows", [100, 48, 5, 1])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("num_ignored", [0, 13, 48])
def test_a_loss_is_the_definition_whole_or_in_chunks(monkeypatch, loss, rows, cap, num_ignored):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", rows * 37 + 36)
    x, weight, targets = random_output()
    targets[torch.randperm(48)[:num_ignored]] = IGNORE_INDEX
    with OperationRecorder() as recorder:
        value = loss(x, weight, targets, cap)
    assert recorder.largest <= max(min(rows, 48) * 37, 48 * 3)
    assert value.dtype == torch.float32
    assert value.shape == ()
    expected = loss_definition(x, weight, targets, cap)
    assert_same_gradients(value, expected, [x, weight], 1e-4)


@pytest.mark.parametrize(
    ("name", "rows", "cap"),
    [("plain", 5, 3.0), ("fused", 5, 0.0), ("fused", 100, 3.0), ("z-loss", 5, 0.0)],
)
def test_compiled_and_eager_training_have_one_loss(monkeypatch, name, rows, cap):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", rows * 37)
    if name == "fused":
        monkeypatch.setattr(loss_module, "MAX_FUSED_ROWS", rows)
        is_compiling = torch.compiler.is_compiling
        monkeypatch.setattr(loss_module, "is_compiled_on_gpu", lambda weight: is_compiling())
        plain = loss_module.cross_entropy_grad_and_value

        def refuse_compilation(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            assert not is_compiling()
            return plain(*inputs)

        monkeypatch.setattr(loss_module, "cross_entropy_grad_and_value", refuse_compilation)
    x, weight, targets = random_output()
    targets[::5] = IGNORE_INDEX
    loss = training_loss
    if name == "z-loss":  # which needs no gradient of its own
        loss = partial(chunked_loss, torch.func.grad_and_value(z_loss))
        expected = z_loss(soft_cap(F.linear(x, weight), cap), targets)
        assert_same_gradients(loss(x, weight, targets, cap), expected, [x, weight], 1e-5)
        assert expected > 1.1 * validation_loss(x, weight, targets, cap)
    compiled = torch.compile(loss, backend="aot_eager")
    actual = compiled(x, weight, targets, cap)
    assert_same_gradients(actual, loss(x, weight, targets, cap), [x, weight], 1e-5)
    torch.compiler.reset()


def test_a_second_derivative_is_refused_and_not_wrong():
    x, weight, targets = random_output()
    loss = training_loss(x, weight, targets)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_the_fused_loss_reads_logits_of_16_bits():
    torch.manual_seed(0)
    logits = 5 * torch.randn(48, 37).bfloat16()
    targets = torch.randint(-1, 37, (48,))
    actual = loss_module.fused_grad_and_value(logits, targets)
    expected = loss_module.cross_entropy_grad_and_value(logits.float(), targets)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def z_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy and a penalty of the normalizer: Chowdhery et al. 2022, section 5."""
    z = logits.logsumexp(dim=-1) * (targets != IGNORE_INDEX)
    return cross_entropy(logits, targets) + 0.1 * z.square().sum()


def test_another_training_loss_leaves_the_validation_loss_as_it_is(monkeypatch):
    monkeypatch.setattr(model_module, "training_loss", lambda x, *others: x.square().sum())
    model = random_model(VARIANTS["default"])
    tokens, targets = torch.randint(37, (2, 3, 16)).unbind(0)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.eval()(tokens, targets), expected)
    assert not torch.isclose(model.train()(tokens, targets), expected)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_gradients_of_bfloat16_are_summed_over_chunks_in_float32(monkeypatch, cap):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", 37 * 4)
    *float32, targets = random_output(512, 24)
    bfloat16 = [tensor.detach().bfloat16().requires_grad_() for tensor in float32]
    exact = [tensor.detach().float().requires_grad_() for tensor in bfloat16]
    losses = [training_loss(*inputs, targets, cap) for inputs in (bfloat16, exact)]
    assert losses[0].dtype == torch.float32
    grads = torch.autograd.grad(losses[0], bfloat16)
    for grad, expected in zip(grads, torch.autograd.grad(losses[1], exact), strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.float() - expected).norm() < 0.005 * expected.norm()
