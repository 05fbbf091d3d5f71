"""Optimizers: who moves what, the schedule, Muon against its reference, saved state."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from engine.optimizer import Muon, Optimizer, OptimizerConfig, learning_rate_factor, orthogonalise, parameter_group
from model import GPT, ModelConfig

CONFIG = ModelConfig(vocab_size=11, context_length=8, num_layers=2, num_heads=2, d_model=8, bias=True, norm="layernorm")


def learned(model: nn.Module, optimizer: Optimizer, steps: int, first: int = 0) -> list[torch.Tensor]:
    """The parameters after some steps on random tokens that depend on the step alone."""
    for step in range(first, first + steps):
        tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step(step, 10)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_every_parameter_is_in_exactly_one_group(kind):
    model = GPT(CONFIG)
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    held = [p for o in optimizer.optimizers for group in o.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    decayed = {p for o in optimizer.optimizers for g in o.param_groups for p in g["params"] if g["weight_decay"]}
    assert decayed == {p for p in model.parameters() if p.ndim == 2}


def test_muon_gets_the_matrices_of_the_blocks_each_head_on_its_own():
    model = GPT(CONFIG)
    muon = Optimizer(model, OptimizerConfig()).optimizers[0]
    shapes = {tuple(group["params"][0].shape): len(group["params"]) for group in muon.param_groups}
    assert shapes == {(4, 8): 2 * 2 * 3, (8, 8): 2, (32, 8): 2, (8, 32): 2}


def test_a_parameter_that_fits_no_group_is_refused():
    with pytest.raises(ValueError, match=r"no optimizer group fits the parameter blocks\.0\.strange"):
        parameter_group("blocks.0.strange", torch.zeros(2, 2, 2))


def test_schedules():
    linear = OptimizerConfig(warmup_steps=10, decay="linear")
    assert [learning_rate_factor(s, 110, linear) for s in (0, 4, 9, 10, 60)] == pytest.approx([0.1, 0.5, 1, 1, 0.5])
    assert learning_rate_factor(109, 110, linear) == pytest.approx(0.01)
    cosine = dataclasses.replace(linear, decay="cosine", final_learning_rate=0.1)
    assert learning_rate_factor(60, 110, cosine) == pytest.approx(0.55)
    assert learning_rate_factor(110, 110, cosine) == pytest.approx(0.1)
    old = dataclasses.replace(linear, decay="inverse_sqrt")
    assert learning_rate_factor(39, 110, old) == pytest.approx(0.5)  # four times the warm-up: half
    assert learning_rate_factor(0, 1, dataclasses.replace(linear, warmup_steps=0)) == 1


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 64, 16), (1, 32, 32)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert singular.min() > 0.5 and singular.max() < 1.4


@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
def test_muon_equals_the_reference(shape):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for _ in range(3)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    mine = Muon(ours, **settings)
    reference = torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(shape)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):  # the reference computes in bfloat16
        torch.testing.assert_close(a, b, rtol=0, atol=0.02 * 4 * 0.2 * math.sqrt(64) * 0.02)


def test_clipping_bounds_the_step_and_reports_the_norm_before():
    model = GPT(CONFIG)
    optimizer = Optimizer(model, OptimizerConfig(optimizer="adamw", clip_norm=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    seen = []
    optimizer.optimizers[-1].register_step_pre_hook(
        lambda *_: seen.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
    )
    _, norm = optimizer.step(0, 10)
    assert norm.item() == pytest.approx(math.sqrt(model.num_parameters()))
    assert seen == [pytest.approx(0.5, rel=1e-4)]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_saved_state_goes_on_bit_for_bit(kind):
    config = OptimizerConfig(optimizer=kind, learning_rate=0.01, warmup_steps=2)
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = Optimizer(model, config)
    learned(model, optimizer, 4)
    other = GPT(CONFIG)
    other.load_state_dict(model.state_dict())
    resumed = Optimizer(other, config)
    resumed.load_state([(name, tensor.clone()) for name, tensor in optimizer.state().items()])
    for a, b in zip(learned(model, optimizer, 3, 4), learned(other, resumed, 3, 4), strict=True):
        assert torch.equal(a, b)


def test_state_of_another_model_is_refused():
    optimizer = Optimizer(GPT(CONFIG), OptimizerConfig())
    with pytest.raises(ValueError, match=r"no parameter blocks\.9\.x"):
        optimizer.load_state([("blocks.9.x.momentum", torch.zeros(1))])
