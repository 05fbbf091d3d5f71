"""Optimizers: who moves what, the schedule, Muon against its definition, gradients that are not finite, saved state."""

import dataclasses
import math

import pytest
import torch
from helpers import SMALL, VARIANTS
from torch import nn

from engine.training.optimizer import (
    FIRST_LOSS_SCALE,
    MOST_SKIPPED,
    NEWTON_SCHULZ,
    STEPS_TO_GROW,
    AdamW,
    Group,
    Muon,
    Optimizer,
    OptimizerConfig,
    learning_rate_factor,
    orthogonalise,
)
from model import GPT, ModelConfig

CONFIG = ModelConfig(vocab_size=11, context_length=8, num_layers=2, num_heads=2, d_model=8, bias=True, norm="layernorm")


def made(config: OptimizerConfig, dtype: torch.dtype = torch.float32) -> tuple[GPT, Optimizer]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    return model, Optimizer(model, config, dtype=dtype)


def learned(model: GPT, optimizer: Optimizer, steps: int, first: int = 0) -> list[torch.Tensor]:
    """The parameters after some steps on random tokens that depend on the step alone."""
    for step in range(first, first + steps):
        tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
        (model(tokens[:, :-1], tokens[:, 1:]) / 32).backward()
        optimizer.step(step, 10)
    return [parameter.detach().clone() for parameter in model.parameters()]


def give_gradients(model: GPT, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


# Groups.


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_every_parameter_is_in_exactly_one_group_and_only_matrices_decay(kind, name):
    model = GPT(VARIANTS[name])
    optimizer = Optimizer(model, OptimizerConfig(optimizer=kind))
    groups = [group for one in optimizer.optimizers for group in one.groups]
    held = [parameter for group in groups for parameter in group.parameters]
    assert len(held) == len(set(held)) and set(held) == set(model.parameters())
    decayed = {parameter for group in groups for parameter in group.parameters if group.weight_decay}
    assert decayed == {p for p in model.parameters() if p.ndim == 2}


def test_muon_gets_the_matrices_of_the_blocks_each_head_on_its_own():
    muon = made(OptimizerConfig())[1].optimizers[0]
    shapes = {tuple(group.parameters[0].shape): len(group.parameters) for group in muon.groups}
    assert shapes == {(4, 8): 2 * 2 * 3, (8, 8): 2, (32, 8): 2 * 2, (8, 32): 2}
    assert len(made(OptimizerConfig(optimizer="adamw"))[1].optimizers) == 1


# The schedule.


def test_schedules():
    linear = OptimizerConfig(warmup_steps=10, decay="linear")
    assert [learning_rate_factor(s, 110, linear) for s in (0, 4, 9, 10, 60)] == pytest.approx([0.1, 0.5, 1, 1, 0.5])
    assert learning_rate_factor(109, 110, linear) == pytest.approx(0.01)
    cosine = dataclasses.replace(linear, decay="cosine", final_learning_rate=0.1)
    assert learning_rate_factor(60, 110, cosine) == pytest.approx(0.55)
    assert learning_rate_factor(110, 110, cosine) == pytest.approx(0.1)
    old = dataclasses.replace(linear, decay="inverse_sqrt")
    assert learning_rate_factor(39, 110, old) == pytest.approx(0.5)  # four times the warm-up: half
    default = OptimizerConfig()
    assert [learning_rate_factor(s, 100, default) for s in (0, 8, 9, 10)] == pytest.approx([0.1, 0.9, 1, 1])
    assert [learning_rate_factor(s, 4, default) for s in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    for decay in ("linear", "cosine", "inverse_sqrt"):
        without = OptimizerConfig(warmup_steps=0, decay=decay)
        assert learning_rate_factor(0, 1, without) == 1
        rates = [learning_rate_factor(step, 50, dataclasses.replace(without, warmup_steps=5)) for step in range(50)]
        assert rates[:5] == sorted(rates[:5]) and rates[5:] == sorted(rates[5:], reverse=True) and max(rates) <= 1


def test_a_step_uses_the_learning_rate_of_the_schedule_and_returns_it():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=4)
    model, optimizer = made(config)
    for step in (0, 3, 7):
        give_gradients(model, 1.0)
        rate, _ = optimizer.step(step, 10)
        assert rate == 0.5 * learning_rate_factor(step, 10, config)


def test_every_optimizer_moves_by_the_rate_of_the_step_and_the_embedding_by_three_times_it_beside_muon():
    config = OptimizerConfig(learning_rate=0.5, warmup_steps=4, weight_decay=0.0, clip_norm=0.0)
    model, optimizer = made(config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    rate, _ = optimizer.step(1, 10)
    assert rate == 0.25
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).square().mean().sqrt().item() / rate
        expected = {"embedding": 3, "head": 1, "vector": 1, "matrix": 0.2}[model.rules[name].group]
        assert moved == pytest.approx(expected, rel=0.25 if expected == 0.2 else 1e-3), name


def test_adamw_is_pytorch_s_bit_for_bit():
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    mine = AdamW([Group([ours[0]], 0.1, 2.0), Group([ours[1]], 0.0)], 0.9, 0.95)
    alike = [{"params": [theirs[0]], "lr": 0.04, "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(alike, lr=0.02, betas=(0.9, 0.95), fused=True)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        mine.step(0.02, torch.zeros(()))
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(mine.state[one][what], value) for what, value in reference.state[other].items())


# Muon.


def rounds_written_out(x):
    """Newton–Schulz as the papers have it: what orthogonalise must come to."""
    x = x / (x @ x.mT).norm(dim=(-2, -1), keepdim=True).sqrt()
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 64, 16), (1, 32, 32)])
def test_orthogonalised_matrices_have_singular_values_near_one_and_the_same_vectors(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = orthogonalise(matrices)
    singular = torch.linalg.svdvals(result)
    assert singular.min() > 0.5 and singular.max() < 1.4
    U, _, V = torch.linalg.svd(matrices, full_matrices=False)
    aligned = U.mT @ result @ V.mT  # diagonal
    torch.testing.assert_close(aligned, aligned.diagonal(dim1=-2, dim2=-1).diag_embed(), rtol=0, atol=1e-4)
    assert orthogonalise(torch.zeros(shape)).abs().max() == 0  # nothing, and not NaN


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
# Orders of magnitude over which singular values spread; if all are equal, one rounding of their bound moves them all.
@pytest.mark.parametrize(("orders", "times"), [(0, 5), (0.3, 2), (3, 2), (6, 2)])
@pytest.mark.parametrize("shape", [(64, 64), (64, 80), (64, 256), (256, 64)])
def test_orthogonalised_matrices_are_as_exact_as_the_rounds_written_out(shape, orders, times, dtype, tolerance):
    def error(result):
        return ((result - exact).norm() / exact.norm()).item()

    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(3, side, 64, dtype=torch.double))[0] for side in shape)
    matrices = (U * torch.logspace(0, -orders, 64) @ V.mT).to(dtype)
    exact, result = rounds_written_out(matrices.double()), orthogonalise(matrices)
    assert result.dtype == dtype and result.is_contiguous()
    assert error(result) < min(times * error(rounds_written_out(matrices)), tolerance)
    one_by_one = torch.cat([orthogonalise(matrix[None]) for matrix in matrices])
    assert (one_by_one - result).norm() / exact.norm() < tolerance / 10


@pytest.mark.parametrize("shape", [(64, 384), (64, 128), (512, 128)])
def test_orthogonalised_matrices_are_bounded_whatever_bfloat16_rounds(shape):
    torch.manual_seed(0)
    n = min(shape)
    U, V = (torch.linalg.qr(torch.randn(20, side, n))[0] for side in shape)
    for values in (1 / torch.arange(1, n + 1), torch.logspace(0, -6, n), (torch.arange(n) == 0).float()):
        result = orthogonalise((U * values @ V.mT).bfloat16())
        assert torch.linalg.matrix_norm(result.float(), 2).max() < 1.22


@pytest.mark.parametrize(("shape", "joined"), [((16, 64), 1), ((64, 16), 1), ((24, 32), 2)])
def test_muon_is_its_definition_and_pytorch_s(shape, joined):
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for _ in range(4)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    written = [torch.cat(ours[i : i + joined]).detach().double() for i in range(0, 4, joined)]
    memory = [torch.zeros_like(p) for p in written]
    rows, columns = written[0].shape
    squares = [torch.full((rows, 1), 1 / rows, dtype=torch.double) for _ in written]
    reference = torch.optim.Muon(theirs, lr=0.02, adjust_lr_fn="match_rms_adamw", momentum=0.9, weight_decay=0.1)
    mine = Muon([Group(ours, 0.1, joined=joined)], momentum=0.9)
    for step in range(4):
        for one, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(shape)
            one.grad = other.grad.clone() if step % 2 else other.grad.mT.contiguous().mT  # in any layout
        for index in range(len(written)):
            gradient = torch.cat([p.grad for p in theirs[index * joined : (index + 1) * joined]])
            memory[index] = 0.9 * memory[index] + 0.1 * gradient
            x = rounds_written_out(0.1 * gradient + 0.9 * memory[index])
            if rows > columns:  # no row is left behind
                squares[index] = 0.95 * squares[index] + 0.05 * x.square().mean(dim=1, keepdim=True)
                x = x / (rows * squares[index]).sqrt()
            written[index] = written[index] * (1 - 0.02 * 0.1) - 0.02 * 0.2 * math.sqrt(max(rows, columns)) * x
        mine.step(0.02, torch.zeros(()))
        reference.step()
    torch.testing.assert_close(torch.cat(ours).double(), torch.cat(written), rtol=0, atol=1e-5)
    if rows < columns:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01)  # whose rounds are less exact


def test_the_gate_and_what_it_gates_are_orthogonalised_as_one():
    model, optimizer = made(OptimizerConfig())
    names = {parameter: name for name, parameter in model.named_parameters()}
    joined = {tuple(map(names.get, group.parameters)) for group in optimizer.optimizers[0].groups if group.joined == 2}
    layers = [f"blocks.{layer}.feed_forward.{which}.weight" for layer in range(2) for which in ("gate", "expand")]
    assert joined == {tuple(layers)}
    rules = GPT(dataclasses.replace(model.config, activation="relu2")).rules
    assert {rule.joined for rule in rules.values()} == {1}


def test_the_first_values_of_a_model_and_one_step_of_muon_are_of_one_size():
    model = GPT(dataclasses.replace(SMALL, d_model=96, num_heads=3))
    optimizer = Optimizer(model, OptimizerConfig(weight_decay=0.0, learning_rate=1.0, warmup_steps=0, clip_norm=0.0))
    weight = model.blocks[0].attention.heads[0].query.weight
    before = weight.detach().clone()
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(0, 1)
    moved = (weight - before).square().mean().sqrt()
    assert moved.item() == pytest.approx(0.2, rel=0.3)  # AdamW's, by the paper


# Clipping, and gradients that are not finite.


@pytest.mark.parametrize(("clip", "expected"), [(0.5, 0.5), (1e9, None), (0.0, None)])
def test_clipping_bounds_the_step_and_reports_the_norm_before(clip, expected):
    model, optimizer = made(OptimizerConfig(optimizer="adamw", clip_norm=clip))
    give_gradients(model, 1.0)
    whole, seen = math.sqrt(model.num_parameters), []

    def step(*_: object) -> None:
        seen.append(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item())

    optimizer.optimizers[-1].step = step
    _, norm = optimizer.step(0, 10)
    assert norm.item() == pytest.approx(whole)
    assert seen == [pytest.approx(expected or whole, rel=1e-4)]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_is_counted(kind, clip, bad):
    model, optimizer = made(OptimizerConfig(optimizer=kind, clip_norm=clip, warmup_steps=0))
    learned(model, optimizer, 2)
    before = [p.detach().clone() for p in model.parameters()]
    state = {name: value.clone() for name, value in optimizer.state().items() if not name.startswith("guard")}
    give_gradients(model, 1.0)
    model.blocks[1].feed_forward.expand.weight.grad[0, 0] = bad  # one number on one process
    _, norm = optimizer.step(2, 10)
    assert not norm.isfinite() and optimizer.count_skipped(saved=0) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(value, optimizer.state()[name]) for name, value in state.items())
    after = learned(model, optimizer, 1, 3)  # and it goes on
    assert all(one.isfinite().all() for one in after) and optimizer.guard["skipped_in_a_row"] == 0
    assert optimizer.count_skipped(saved=0) == 1


def test_a_loss_that_is_not_finite_makes_the_gradient_so_too():
    model, optimizer = made(OptimizerConfig())
    tokens = torch.randint(11, (2, 4, 8))
    loss = model(*tokens)
    for factor in (math.inf, math.nan):
        optimizer.scaled(loss * factor).backward(retain_graph=True)
        assert not model.head.weight.grad.isfinite().any()
        model.zero_grad()
    optimizer.scaled(loss).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_too_many_steps_without_a_finite_gradient_end_the_run():
    model, optimizer = made(OptimizerConfig())
    for step in range(MOST_SKIPPED):
        assert optimizer.count_skipped(saved=7) == step
        give_gradients(model, math.nan)
        optimizer.step(step, 100)
    with pytest.raises(
        ValueError, match=rf"the last {MOST_SKIPPED} steps had no finite gradient.* --resume from step 7"
    ):
        optimizer.count_skipped(saved=7)


def test_a_loss_scale_is_for_float16_and_halves_after_a_bad_step_and_doubles_after_many_good_ones():
    assert made(OptimizerConfig(), torch.bfloat16)[1].scaled(torch.tensor(3.0)) == 3
    model, optimizer = made(OptimizerConfig(learning_rate=0.0), torch.float16)
    assert optimizer.scaled(torch.tensor(3.0)) == 3 * FIRST_LOSS_SCALE
    give_gradients(model, math.inf)
    optimizer.step(0, 10)
    assert optimizer.guard["loss_scale"] == FIRST_LOSS_SCALE / 2
    optimizer.guard["good_steps"].fill_(STEPS_TO_GROW - 2)
    for expected in (FIRST_LOSS_SCALE / 2, FIRST_LOSS_SCALE, FIRST_LOSS_SCALE):
        give_gradients(model, 1.0)
        optimizer.step(0, 10)
        assert optimizer.guard["loss_scale"] == expected
    assert optimizer.guard["good_steps"] == 1


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_loss_scale_changes_no_step(clip):
    config = OptimizerConfig(clip_norm=clip, warmup_steps=0)
    results = []
    for dtype in (torch.float32, torch.float16):
        model, optimizer = made(config, dtype)
        optimizer.optimizers[0].dtype = torch.float32
        tokens = torch.randint(11, (2, 4, 8), generator=torch.Generator().manual_seed(0))
        optimizer.scaled(model(*tokens)).backward()
        _, norm = optimizer.step(0, 10)
        results.append([norm, *(parameter.detach() for parameter in model.parameters())])
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=1e-6)


# Saved state.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_saved_state_goes_on_bit_for_bit(kind, dtype):
    config = OptimizerConfig(optimizer=kind, learning_rate=0.01, warmup_steps=2)
    model, optimizer = made(config, dtype)
    learned(model, optimizer, 4)
    give_gradients(model, math.nan)
    optimizer.step(4, 10)
    other = GPT(CONFIG)
    other.load_state_dict(model.state_dict())
    resumed = Optimizer(other, config, dtype=dtype)
    resumed.load_state([(name, tensor.clone()) for name, tensor in optimizer.state().items()])
    for a, b in zip(learned(model, optimizer, 3, 5), learned(other, resumed, 3, 5), strict=True):
        assert torch.equal(a, b)
    assert optimizer.state().keys() == resumed.state().keys()
    assert all(torch.equal(value, resumed.state()[name]) for name, value in optimizer.state().items())


def test_state_of_another_model_is_refused():
    optimizer = made(OptimizerConfig())[1]
    with pytest.raises(ValueError, match=r"has blocks\.9\.x\.momentum, but the model has no parameter blocks\.9\.x"):
        optimizer.load_state([("blocks.9.x.momentum", torch.zeros(1))])
