"""The model: causality, the list of heads, the cache, the loss, specs of parameters, devices."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import SMALL, VARIANTS, decode, random_model
from reference import assert_same_gradients, decoding_definition
from torch import nn
from torch.func import functional_call
from torch.nn.utils.parametrize import register_parametrization

import model as model_module
from engine.core.distributed import SINGLE_PROCESS
from engine.core.errors import UserError
from engine.core.sharding import load_parameters, shard_and_allocate
from engine.generation.decoding_engine import DecodingEngine
from engine.nn import loss as loss_module
from engine.nn.acceleration import StaticGradients
from engine.nn.inference import build_decoder
from engine.nn.layers import concatenate_linear
from engine.nn.specs import ParameterSpec, match_specs
from engine.training.optimizer import Optimizer, OptimizerConfig, default_rates
from model import GPT, FeedForward, Head, ModelConfig, parameter_specs

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=VARIANTS, name="config")
def fixture_config(request) -> ModelConfig:
    return VARIANTS[request.param]


def random_batch(config: ModelConfig, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(config.vocab_size, (2, rows, config.context_length)).unbind(0)


# Causality.


def dependencies(model: GPT, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Which embeddings the logits of each position depend on, (T, T), by gradients."""
    embedded = []

    def detach(module, arguments, output):
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    model.token_embedding.register_forward_hook(detach)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(torch.randint(model.config.vocab_size, (1, length)))
    rows = []
    for position in range(length):
        logit = logits[0, position, 0].float()  # the sum of all is almost constant after a norm
        (grad,) = torch.autograd.grad(logit, embedded, retain_graph=True)
        rows.append(grad[0].abs().sum(dim=-1) > 0)
    return torch.stack(rows)


@each_dtype
@pytest.mark.parametrize(
    ("changes", "reach"),
    [
        *((dataclasses.asdict(config), 99) for config in VARIANTS.values()),
        ({"windows": (5,), "num_layers": 1}, 5),
        ({"windows": (1,), "num_kv_heads": 1}, 1),
        ({"windows": (5, 3), "num_kv_heads": 1}, 7),
        ({"windows": (5,), "num_layers": 3}, 13),
        ({"windows": (2, 0)}, 99),
    ],
    ids=str,
)
def test_a_position_depends_on_earlier_ones_in_the_windows_and_on_no_later_one(
    changes, reach, dtype
):
    config = dataclasses.replace(SMALL, **{**changes, "context_length": 40})
    expected = torch.ones(40, 40, dtype=torch.bool).tril().triu(1 - reach)
    assert torch.equal(dependencies(random_model(config), 40, dtype), expected)


@torch.no_grad()
def test_more_tokens_than_the_context_are_refused():
    model = random_model(SMALL)
    with pytest.raises(ValueError, match=r"at most 16 positions .got 17"):
        model(torch.zeros(1, 17, dtype=torch.long))


# The list of heads.


def test_attention_of_all_heads_equals_the_loop_over_them(config):
    model = random_model(config)
    attention = model.blocks[0].attention
    rotation = model.rotation(torch.arange(10))
    x = torch.randn(2, 10, config.d_model, requires_grad=True)
    inputs = [x, *attention.parameters()]
    actual = attention(x, rotation)
    assert_same_gradients(actual, attention.loop(x, rotation), inputs, 1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_equals_torch_multihead_attention(bias):
    config = dataclasses.replace(SMALL, position="learned", qk_norm=False, bias=bias)
    ours = random_model(config).blocks[0].attention
    theirs = nn.MultiheadAttention(config.d_model, config.num_heads, bias=bias, batch_first=True)
    in_weight, in_bias = concatenate_linear(ours.qkv_layers())
    weights = {"in_proj_weight": in_weight, "out_proj.weight": ours.projection.weight}
    if bias:
        weights |= {"in_proj_bias": in_bias, "out_proj.bias": ours.projection.bias}
    x = torch.randn(2, 10, config.d_model, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(10)
    expected, _ = functional_call(theirs, weights, (x, x, x), {"attn_mask": mask})
    assert_same_gradients(ours(x, None), expected, [x, *ours.parameters()], 1e-5)


class Scaled(nn.Module):
    """A layer whose output is multiplied by a learned scale."""

    def __init__(self, layer: nn.Module | None = None):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x if self.layer is None else self.layer(x))


def change_layer(head: Head, name: str, kind: str) -> nn.Module:
    """Replace, parametrize or hook a layer of a head; return what holds the new parameters."""
    layer = getattr(head, name)
    scaled = Scaled(layer if kind == "replace" else None)
    if kind == "replace":
        setattr(head, name, scaled)
    elif kind == "parametrize":
        register_parametrization(layer, "weight", scaled)
    elif kind == "hook":
        layer.register_forward_hook(lambda module, inputs, output: scaled(output))
    else:
        layer.register_forward_pre_hook(lambda module, inputs: (scaled(inputs[0]),))
    return scaled


@pytest.mark.parametrize("kind", ["replace", "parametrize", "hook", "pre-hook"])
@pytest.mark.parametrize("name", ["query", "key", "value", "key_norm"])
def test_a_changed_layer_changes_forward_loop_gradient_and_decoder_alike(name, kind):
    is_norm = name.endswith("_norm")  # which cancels a scale before it
    model = random_model(dataclasses.replace(VARIANTS["qwen3"], qk_norm=is_norm))
    attention = model.blocks[0].attention
    rotation = model.rotation(torch.arange(10))
    x = torch.randn(2, 10, SMALL.d_model)
    before = attention(x, rotation)
    scaled = change_layer(attention.heads[0], name, kind)
    expected = attention.loop(x, rotation)
    actual = attention(x, rotation)
    assert torch.allclose(actual, before, atol=1e-3) == (is_norm and kind == "pre-hook")
    assert_same_gradients(actual, expected, [scaled.scale, *attention.parameters()], 1e-5)
    tokens, _ = random_batch(SMALL)
    for quantize in (False, True):
        decoder = build_decoder(model, quantize=quantize)
        tolerance = 0.1 if quantize else 1e-4
        torch.testing.assert_close(decoder(tokens), model(tokens), rtol=tolerance, atol=tolerance)
    prompts = tokens[:, :5].tolist()
    expected_ids = decoding_definition(model, prompts, 20, temperature=0)
    assert decode(build_decoder(model), prompts, 20, temperature=0) == expected_ids


# Positions.


def test_sinusoidal_positions_are_those_of_2017():
    config = VARIANTS["2017"]
    model = random_model(config)
    tokens = torch.tensor([[5] * 16])
    embedding = model.token_embedding.weight[5] * math.sqrt(config.d_model)
    added = model.embed(tokens, torch.arange(16))[0] - embedding
    positions = torch.arange(16.0)[:, None]
    i = torch.arange(config.d_model // 2)
    turns = positions / 10_000 ** (2 * i / config.d_model)
    torch.testing.assert_close(added[:, 0::2], turns.sin(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(added[:, 1::2], turns.cos(), rtol=1e-4, atol=1e-5)
    rows = torch.tensor([[7, 8], [2, 11]])  # each sequence may have positions of its own
    later = model.embed(tokens[:, :2].expand(2, -1), rows)
    torch.testing.assert_close(later - embedding, added[rows])


# Layers.


@torch.no_grad()
def test_dropout_is_off_in_evaluation_and_on_in_training():
    model = random_model(dataclasses.replace(SMALL, dropout=0.5))
    tokens, _ = random_batch(SMALL)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


# The loss.


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("num_ignored", [0, 5, 48])
def test_the_loss_is_the_summed_cross_entropy_of_counted_targets(config, num_ignored, is_training):
    model = random_model(config).train(is_training)
    tokens, targets = random_batch(config)
    targets.view(-1)[:num_ignored] = -1
    logits = model(tokens).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")
    loss = model(tokens, targets)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert (loss == 0) == (num_ignored == 48)
    assert_same_gradients(loss, expected, list(model.parameters()), 1e-4)


# Initialization and specs.


def test_a_model_made_on_the_meta_device_gets_the_same_initial_values(config):
    torch.manual_seed(5)
    direct = GPT(config).state_dict()
    torch.manual_seed(5)
    with torch.device("meta"):
        model = GPT(config)
    model = shard_and_allocate(model, SINGLE_PROCESS, torch.float32)
    load_parameters(model, model.initial_values())
    torch.manual_seed(6)
    reseeded = GPT(config).state_dict()
    assert direct.keys() == model.state_dict().keys()
    for name, value in direct.items():
        assert torch.equal(value, model.state_dict()[name])
        assert torch.equal(value, reseeded[name]) == (model.specs[name].std == 0)


def test_initial_values_have_the_mean_and_std_of_their_spec(config):
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config, vocab_size=2000, d_model=96, d_ff=None))
    for name, value in model.named_parameters():
        spec = model.specs[name]
        assert value.std().item() == pytest.approx(spec.std, rel=0.1), name
        tolerance = 5 * spec.std / math.sqrt(value.numel())
        assert value.mean().item() == pytest.approx(spec.mean, abs=tolerance), name


def test_the_std_of_matrices_with_tied_embeddings_and_with_an_untied_head():
    tied, untied = (
        {name: spec.std for name, spec in GPT(config).specs.items()}
        for config in (dataclasses.replace(VARIANTS["gpt2"], num_layers=8), SMALL)
    )
    projection, contract = "attention.projection.weight", "feed_forward.contract.weight"
    assert tied[f"blocks.0.{projection}"] == pytest.approx((2 * 8 * 24) ** -0.5)
    assert tied[f"blocks.1.{contract}"] == pytest.approx((2 * 8 * 96) ** -0.5)
    assert tied["blocks.1.feed_forward.expand.weight"] == 24**-0.5
    assert tied["token_embedding.weight"] == tied["position_embedding.weight"] == 0.02
    assert untied["blocks.0.attention.heads.0.query.weight"] == 24**-0.5 / 2
    assert untied[f"blocks.0.{projection}"] == untied["head.weight"] == 0


def test_every_parameter_has_one_spec_whose_group_fits_it(config):
    model = GPT(config)
    names = [name for name, _ in model.named_parameters()]
    assert model.specs.keys() == {*names} and [*model.state_dict()] == names  # each saved once
    for name, parameter in model.named_parameters():
        outer = "head" if name == "head.weight" or config.tie_embeddings else "embedding"
        expected = "matrix" if "blocks" in name else outer
        assert model.specs[name].group == ("vector" if parameter.ndim == 1 else expected), name
    stacks = [spec.stack for spec in model.specs.values()]
    num_pairs = config.num_layers if config.activation == "swiglu" else 0
    assert len(stacks) - len(set(stacks)) == num_pairs


def test_a_parameter_without_exactly_one_spec_stops_construction(monkeypatch):
    vector = ParameterSpec("vector")
    assert match_specs({"*.a.weight": vector}, ["x.a.weight"])["x.a.weight"].stack == "x.a.weight"
    with pytest.raises(ValueError, match=r"x\.a\.weight"):
        match_specs({"*.a.weight": vector, "*.weight": vector}, ["x.a.weight"])
    for name in ("heads.0.subquery.weight", "memory_value.weight", "lm_head.weight", "head.weight"):
        with pytest.raises(ValueError, match=name):
            parameter_specs(SMALL, [f"blocks.0.attention.{name}"])

    class HeadWithGain(Head):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.gain = nn.Parameter(torch.ones(2))

    monkeypatch.setattr(model_module, "Head", HeadWithGain)
    with pytest.raises(ValueError, match=r"blocks\.0\.attention\.heads\.0\.gain"):
        GPT(SMALL)


# Devices.


@pytest.mark.parametrize(
    ("kind", "max_logits", "dropout"), [("muon", 2**25, 0.1), ("adamw", 5 * 37, 0.0)]
)
def test_a_training_step_creates_its_tensors_on_the_device_of_the_model(
    config, kind, max_logits, dropout, monkeypatch
):
    monkeypatch.setattr(loss_module, "MAX_LOGITS", max_logits)
    with torch.device("meta"):
        model = GPT(dataclasses.replace(config, dropout=dropout))
    meta = torch.device("meta")
    tokens = torch.zeros(2, 3, config.context_length, dtype=torch.long, device=meta)
    dist_ctx = dataclasses.replace(SINGLE_PROCESS, device=meta)
    optimizer_config = OptimizerConfig(optimizer=kind, **default_rates(kind, 384, 1000))
    optimizer = Optimizer(model, optimizer_config, dist_ctx)
    gradients = StaticGradients([*model.parameters()])
    for adds in (False, True):
        gradients.compute(model(*tokens), adds)
    factor = optimizer.clip_factor(optimizer.gradient_norm())
    assert factor.device == meta
    optimizer.update(0.01, factor)
    if kind == "muon":  # a rate in a tensor, as in a capture; AdamW's kernel knows none on meta
        optimizer.optimizers[0].param_groups[0]["lr"] = torch.full_like(factor, 0.01)
        optimizer.optimizers[0].step()
    for name, tensor in optimizer.state().items():
        assert tensor.device == meta or name.startswith("loss_scaler."), name
    with torch.no_grad():
        model.eval()
        assert model(*tokens).device == meta
    engine = DecodingEngine(model)
    for length in (5, 5, 7):
        engine.add([0] * length)
        assert engine.read(len(engine.rows) - 1).device == meta
    assert engine.step([0, 0]).device == meta  # of equal lengths
    assert engine.step([0, 0, 0]).device == meta


# Settings.


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_heads": 5}, "num_heads"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
        ({"d_model": 9}, "head_dim"),
        ({"rope_scaling": ()}, "rope_scaling"),
        ({"rope_scaling": (8.0, 4.0, 1.0, 64.0)}, "rope_scaling"),
        ({"windows": (4, -3)}, "windows"),
        ({"num_layers": 2.0}, "num_layers"),
        ({"rope_base": math.nan}, "rope_base"),
    ],
)
def test_impossible_settings_are_refused_by_name(changes, name):
    with pytest.raises(UserError, match=f"^--{name.replace('_', '-')}: "):
        GPT(dataclasses.replace(SMALL, **changes))


@pytest.mark.parametrize("name", ["gelu", "relu", "relu2", "swiglu"])
def test_feed_forward_has_the_activation_of_its_name(name):
    layer = FeedForward(dataclasses.replace(SMALL, activation=name))
    x = torch.randn(2, 5, 24)
    hidden = layer.expand(x)
    expected = {
        "gelu": lambda: F.gelu(hidden, approximate="tanh"),
        "relu": lambda: hidden.clamp(min=0),
        "relu2": lambda: hidden.clamp(min=0) ** 2,
        "swiglu": lambda: layer.gate(x) * torch.sigmoid(layer.gate(x)) * hidden,
    }[name]()
    torch.testing.assert_close(layer(x), layer.contract(expected))


@pytest.mark.parametrize("name", ["gpt2", "2017"])
def test_a_block_normalizes_before_its_layers_or_after_their_sums(name):
    x = torch.randn(2, 5, 24)
    block = random_model(VARIANTS[name]).blocks[0]
    first = block.attention_norm
    second = block.feed_forward_norm
    if name == "gpt2":
        middle = x + block.attention(first(x), None)
        expected = middle + block.feed_forward(second(middle))
    else:
        middle = first(x + block.attention(x, None))
        expected = second(middle + block.feed_forward(middle))
    torch.testing.assert_close(block(x, None), expected)
