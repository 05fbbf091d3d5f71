"""Optimizers: groups, schedule, update rules, gradients that are not finite, saved state."""

import math

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model
from torch import nn

from engine.core.errors import UserError
from engine.nn.update_rules import NEWTON_SCHULZ_COEFFICIENTS, AdamW, Muon, orthogonalize
from engine.training.optimizer import (
    INITIAL_LOSS_SCALE,
    NUM_STEPS_TO_DOUBLE_SCALE,
    OPTIMIZER_KINDS,
    Optimizer,
    OptimizerConfig,
    OptimizerKind,
    default_beta2,
    default_rates,
    learning_rate_at,
)
from model import GPT, ModelConfig

SIZES = {"vocab_size": 11, "context_length": 8, "num_layers": 2, "num_heads": 2, "d_model": 8}
CONFIG = ModelConfig(**SIZES, bias=True, norm="layernorm")


def make_config(**settings: object) -> OptimizerConfig:
    rates = default_rates(settings.get("optimizer", "muon"), 384, 1000)
    return OptimizerConfig(**{**rates, **settings})


def make_optimizer(
    config: OptimizerConfig, dtype: torch.dtype = torch.float32
) -> tuple[GPT, Optimizer]:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    return model, Optimizer(model, config, dtype=dtype)


def train(model: GPT, optimizer: Optimizer, num_steps: int, start: int = 0) -> list[torch.Tensor]:
    """Take steps on tokens that depend on the step alone; returns the parameters."""
    for step in range(start, start + num_steps):
        tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step))
        (optimizer.loss_scale * model(tokens[:, :-1], tokens[:, 1:]) / 32).backward()
        optimizer.step(step, 10)
    return [parameter.detach().clone() for parameter in model.parameters()]


def fill_gradients(model: GPT, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


# Settings and groups.


@pytest.mark.parametrize("name", ["default", "gpt2"])
@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(kind, name):
    model = GPT(VARIANTS[name])
    optimizer = Optimizer(model, make_config(optimizer=kind))
    groups = [group for part in optimizer.optimizers for group in part.param_groups]
    members = [parameter for group in groups for parameter in group["params"]]
    assert len(members) == len(set(members))
    assert set(members) == set(model.parameters())
    decayed = {param for group in groups for param in group["params"] if group["weight_decay"]}
    assert decayed == {parameter for parameter in model.parameters() if parameter.ndim == 2}


# The schedule.


def test_schedules():
    def factors(steps: list[int], num_steps: int, **settings: object) -> list[float]:
        config = OptimizerConfig(learning_rate=1.0, **settings)
        return [learning_rate_at(step, num_steps, config) for step in steps]

    linear = {"warmup_steps": 10, "decay": "linear"}
    assert factors([0, 4, 9, 10, 60], 110, **linear) == pytest.approx([0.1, 0.5, 1, 1, 0.5])
    assert factors([109], 110, **linear) == pytest.approx([0.01])
    cosine = {"warmup_steps": 10, "decay": "cosine", "final_learning_rate": 0.1}
    assert factors([60, 110], 110, **cosine) == pytest.approx([0.55, 0.1])
    inverse = {"warmup_steps": 10, "decay": "inverse_sqrt"}
    assert factors([39], 110, **inverse) == pytest.approx([0.5])  # four times the warmup
    assert factors([0, 8, 9, 10], 100) == pytest.approx([0.1, 0.9, 1, 1])
    assert factors([0, 1, 2, 3], 4) == pytest.approx([1 / 3, 2 / 3, 1, 1])
    for decay in ("linear", "cosine", "inverse_sqrt"):
        assert factors([0], 1, warmup_steps=0, decay=decay) == [1]
        values = factors(list(range(50)), 50, warmup_steps=5, decay=decay)
        assert values[:5] == sorted(values[:5])
        assert values[5:] == sorted(values[5:], reverse=True)
        assert max(values) <= 1


def test_small_batches_and_fine_tuning_have_rates_of_their_own():
    assert [default_beta2(tokens) for tokens in (1, 2**14, 2**19)] == [0.99, 0.99, 0.95]
    for kind, embedding_rate in (("muon", 3), ("adamw", 1)):
        rates = default_rates(kind, 384, 1000, is_fine_tuning=True)
        assert (rates["beta2"], rates["embedding_rate"]) == (0.95, embedding_rate)


def test_a_step_uses_the_scheduled_rate_and_the_embedding_a_higher_one_with_muon():
    config = make_config(learning_rate=0.5, warmup_steps=4, weight_decay=0.0, clip_norm=0.0)
    model, _ = make_optimizer(config)
    for name in ("head.weight", "blocks.0.attention.projection.weight"):
        model.specs[name] = model.specs[name]._replace(lr_scale=2.0)
    optimizer = Optimizer(model, config)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    rate, _ = optimizer.step(1, 10)
    assert rate == 0.25 == learning_rate_at(1, 10, config)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).square().mean().sqrt().item() / rate
        role = model.specs[name].group
        expected = {"embedding": 2.1, "head": 1, "vector": 1, "matrix": 0.2}[role]
        expected *= model.specs[name].lr_scale
        assert moved == pytest.approx(expected, rel=0.25 if role == "matrix" else 1e-3), name


# Update rules.


def test_adamw_is_pytorch_s_bit_for_bit_with_the_same_state_dict():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((5, 3), (7,))]
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in params]
    optimizers = []
    for pair, cls, options in ((params, AdamW, {}), (copies, torch.optim.AdamW, {"fused": True})):
        groups = [{"params": pair[:1], "lr": 0.04}, {"params": pair[1:], "weight_decay": 0.0}]
        optimizers.append(cls(groups, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, **options))
    for _ in range(5):
        for parameter, copied in zip(params, copies, strict=True):
            parameter.grad = torch.randn_like(parameter)
            copied.grad = parameter.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = (optimizer.state_dict() for optimizer in optimizers)
    assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert all(torch.equal(ours["state"][index][key], value) for key, value in state.items())
    for group, expected in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert all(group[key] == expected[key] for key in group)


def orthogonalize_definition(x: torch.Tensor) -> torch.Tensor:
    """Newton–Schulz as the papers have it."""
    x = x / (x @ x.mT).norm(dim=(-2, -1), keepdim=True).sqrt()
    for a, b, c in NEWTON_SCHULZ_COEFFICIENTS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.25)])
# Orders of magnitude of the singular values. If all are equal, one rounding error moves them all.
@pytest.mark.parametrize(("orders", "times"), [(0, 5), (3, 2), (6, 2)])
@pytest.mark.parametrize("shape", [(64, 64), (64, 80), (256, 64)])
def test_orthogonalization_is_as_exact_as_the_definition(shape, orders, times, dtype, tolerance):
    def error(result: torch.Tensor) -> float:
        return ((result - exact).norm() / exact.norm()).item()

    torch.manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(3, side, 64, dtype=torch.double))[0] for side in shape)
    matrices = (U * torch.logspace(0, -orders, 64) @ V.mT).to(dtype)
    exact = orthogonalize_definition(matrices.double())
    if orders < 1 and dtype == torch.float32:  # the same vectors, with singular values near 1
        aligned = U.mT @ exact @ V
        diagonal = aligned.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(aligned, diagonal.diag_embed(), rtol=0, atol=1e-4)
        assert diagonal.min() > 0.5 and diagonal.max() < 1.4
    result = orthogonalize(matrices)
    assert result.dtype == dtype
    assert error(result) < min(times * error(orthogonalize_definition(matrices)), tolerance)
    assert orthogonalize(torch.zeros(shape)).abs().max() == 0
    separate = torch.cat([orthogonalize(matrix[None]) for matrix in matrices])
    assert (separate - result).norm() / exact.norm() < tolerance / 10


@pytest.mark.parametrize(("shape", "stack_size"), [((16, 64), 1), ((64, 16), 1), ((24, 32), 2)])
def test_muon_is_its_definition_and_pytorch_s(shape, stack_size):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for _ in range(4)]
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in params]
    starts = range(0, 4, stack_size)
    expected = [torch.cat(params[i : i + stack_size]).detach().double() for i in starts]
    momenta = [torch.zeros_like(matrix) for matrix in expected]
    rows, columns = expected[0].shape
    squares = [torch.full((rows, 1), 1 / rows, dtype=torch.double) for _ in expected]
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    reference = torch.optim.Muon(copies, adjust_lr_fn="match_rms_adamw", **options)
    muon = Muon([{"params": params, "stack_size": stack_size}], **options)
    for step in range(4):
        for parameter, copied in zip(params, copies, strict=True):
            copied.grad = torch.randn(shape)
            transposed = copied.grad.mT.contiguous().mT  # in another layout
            parameter.grad = copied.grad.clone() if step % 2 else transposed
        for index, start in enumerate(starts):
            grad = torch.cat([copied.grad for copied in copies[start : start + stack_size]])
            momenta[index] = 0.9 * momenta[index] + 0.1 * grad
            x = orthogonalize_definition(0.1 * grad + 0.9 * momenta[index])
            if rows > columns:
                mean_squares = x.square().mean(dim=1, keepdim=True)
                squares[index] = 0.95 * squares[index] + 0.05 * mean_squares
                x = x / (rows * squares[index]).sqrt()
            decayed = expected[index] * (1 - 0.02 * 0.1)
            expected[index] = decayed - 0.02 * 0.2 * math.sqrt(max(rows, columns)) * x
        muon.step()
        reference.step()
    torch.testing.assert_close(torch.cat(params).double(), torch.cat(expected), rtol=0, atol=1e-5)
    if rows < columns:
        torch.testing.assert_close(params, copies, rtol=0, atol=0.01)  # its rounds are less exact


# Clipping, and gradients that are not finite.


def test_clipping_bounds_the_norm():
    for clip, expected in ((0.5, 0.5), (1e9, None), (0.0, None)):
        model, optimizer = make_optimizer(make_config(clip_norm=clip))
        fill_gradients(model, 1.0)
        norm = math.sqrt(model.num_parameters)
        assert optimizer.gradient_norm().item() == pytest.approx(norm)
        factor = optimizer.clip_factor(optimizer.gradient_norm())
        assert factor.item() * norm == pytest.approx(expected or norm, rel=1e-4)


@pytest.mark.parametrize("value", [1e6, 1e16, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("kind", OPTIMIZER_KINDS)
def test_a_step_moves_every_matrix_or_changes_nothing_and_is_counted(kind, clip, value):
    model, optimizer = make_optimizer(make_config(optimizer=kind, clip_norm=clip, warmup_steps=0))
    before = train(model, optimizer, 2)
    state = {key: value.clone() for key, value in optimizer.state().items()}
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * (value if math.isfinite(value) else 1.0)
    if not math.isfinite(value):
        model.blocks[1].feed_forward.expand.weight.grad[0, 0] = value
    _, norm = optimizer.step(2, 10)
    assert norm.isfinite() or not math.isfinite(value)
    is_skipped = not math.isfinite(value) or (value > 1e6 and clip != 1.0)
    assert optimizer.count_skipped(saved_step=0) == is_skipped
    has_moved = {not torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)}
    assert has_moved == {not is_skipped}
    for key, old in state.items():
        if is_skipped and "loss_scaler" not in key:
            assert torch.equal(optimizer.state()[key], old)
    after = train(model, optimizer, 1, start=3)
    assert all(parameter.isfinite().all() for parameter in after)
    assert optimizer.loss_scaler["skipped_in_a_row"] == 0
    assert optimizer.count_skipped(saved_step=0) == is_skipped


def test_a_norm_that_is_not_finite_on_another_rank_skips_the_step_on_this_one(monkeypatch):
    model, optimizer = make_optimizer(make_config())
    before = train(model, optimizer, 1)
    fill_gradients(model, 1.0)
    monkeypatch.setattr(optimizer.dist_ctx.__class__, "norm", lambda *_: torch.tensor(math.nan))
    optimizer.step(1, 10)
    assert optimizer.count_skipped(saved_step=0) == 1
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def test_the_loss_scale_of_float16_halves_after_a_bad_step_and_doubles_after_many_good_ones():
    _, optimizer = make_optimizer(make_config(), torch.bfloat16)
    assert optimizer.loss_scale == 1
    model, optimizer = make_optimizer(make_config(learning_rate=0.0), torch.float16)
    assert optimizer.loss_scale == INITIAL_LOSS_SCALE
    fill_gradients(model, math.inf)
    optimizer.step(0, 10)
    assert optimizer.loss_scaler["loss_scale"] == INITIAL_LOSS_SCALE / 2
    optimizer.loss_scaler["good_steps"] = NUM_STEPS_TO_DOUBLE_SCALE - 2
    for expected in (INITIAL_LOSS_SCALE / 2, INITIAL_LOSS_SCALE, INITIAL_LOSS_SCALE):
        fill_gradients(model, 1.0)
        optimizer.step(0, 10)
        assert optimizer.loss_scaler["loss_scale"] == expected
    assert optimizer.loss_scaler["good_steps"] == 1


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_loss_scale_does_not_change_a_step(clip):
    results = []
    for dtype in (torch.float32, torch.float16):
        model, optimizer = make_optimizer(make_config(clip_norm=clip, warmup_steps=0), dtype)
        optimizer.optimizers[0].dtype = torch.float32
        tokens = torch.randint(11, (2, 4, 8), generator=torch.Generator().manual_seed(0))
        (optimizer.loss_scale * model(*tokens)).backward()
        _, norm = optimizer.step(0, 10)
        results.append([norm, *(parameter.detach() for parameter in model.parameters())])
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=1e-6)


# Saved state.

OTHER_KINDS = {
    "sgd": OptimizerKind(lambda params, *_: torch.optim.SGD(params, momentum=0.9), 0.01),
    "fused": OptimizerKind(lambda params, *_: torch.optim.AdamW(params, fused=True), 0.01),
    "torch_muon": OptimizerKind(lambda params, *_: torch.optim.Muon(params), 0.01, 1.0, True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [*OPTIMIZER_KINDS, *OTHER_KINDS])
def test_an_optimizer_of_ours_or_of_pytorch_resumes_bit_for_bit(name, dtype, monkeypatch):
    for other_name, kind in OTHER_KINDS.items():
        monkeypatch.setitem(OPTIMIZER_KINDS, other_name, kind)
    config = make_config(optimizer=name, warmup_steps=2)
    model, optimizer = make_optimizer(config, dtype)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim == 2}
    train(model, optimizer, 4)
    after = dict(model.named_parameters())
    assert not any(torch.equal(value, after[name]) for name, value in before.items())
    fill_gradients(model, math.nan)
    optimizer.step(4, 10)
    copied = GPT(CONFIG)
    copied.load_state_dict(model.state_dict())
    resumed = Optimizer(copied, config, dtype=dtype)
    resumed.load_state([(key, tensor.clone()) for key, tensor in optimizer.state().items()])
    expected = train(model, optimizer, 3, start=5)
    for a, b in zip(train(copied, resumed, 3, start=5), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match=r"blocks\.9\.x"):
        resumed.load_state([("blocks.9.x.momentum", torch.zeros(1))])
    state = resumed.state()
    assert state.keys() == optimizer.state().keys()
    assert all(torch.equal(value, state[key]) for key, value in optimizer.state().items())


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_frozen_parameters_and_those_without_a_gradient_do_not_change(kind):
    model = random_model(SMALL).train()
    model.blocks[0].requires_grad_(False)
    optimizer = Optimizer(model, make_config(optimizer=kind))
    model.blocks[1].attention.requires_grad_(False)  # after it was built
    model.blocks[1].feed_forward.gate.requires_grad_(False)  # its stack has other gradients
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    is_trained = {name: param.requires_grad for name, param in model.named_parameters()}
    assert not any(name.startswith("blocks.0.") for name in optimizer.state())
    for step in range(2):
        model(*torch.randint(37, (2, 3, 16))).backward()
        optimizer.step(step, 10)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) != is_trained[name], name
