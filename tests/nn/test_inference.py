"""A copy of a model for decoding: the same logits, and the model itself unchanged."""

import copy
import dataclasses

import pytest
import torch
from helpers import SMALL, VARIANTS, decode, random_model
from torch import nn

from engine.generation.decoding_engine import DecodingEngine
from engine.nn import inference
from engine.nn.acceleration import checkpoint_activations, compile_methods
from engine.nn.inference import Int8Linear, build_decoder
from model import Block, FeedForward, MultiHeadAttention

KINDS = [{"rope_scaling": (4.0, 1.0, 4.0, 8.0), "rope_base": 5e5, "windows": (3,)}]
KINDS += [{"norm": "layernorm", "bias": True, "windows": (3,)}]
KINDS += [{"qk_norm": False, "qkv_bias": True, "norm": "weighted_rmsnorm", "num_kv_heads": 1}]
CONFIGS = [*VARIANTS.values(), *(dataclasses.replace(SMALL, **kind) for kind in KINDS)]


@pytest.fixture(params=CONFIGS, ids=str)
def model(request) -> nn.Module:
    return random_model(request.param)


@pytest.fixture(params=["packed", "too small to pack"])
def decoder_of(request, monkeypatch):
    """build_decoder where weights are packed, and where they are not."""
    if request.param == "packed":
        monkeypatch.setattr(inference, "MAX_CACHED_PARAMETERS", 0)
    return build_decoder


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_layer_of_8_bits_rounds_weights_and_inputs_by_half_a_step(bias):
    torch.manual_seed(0)
    layer = nn.Linear(40, 56, bias=bias)
    layer.weight[3] = 0
    layer.weight[5] *= 1000  # each output has its own scale
    quantized = Int8Linear(layer.weight, layer.bias)
    weight_steps = layer.weight.abs().amax(dim=1) / 127
    for shape in ((1, 40), (2, 3, 40), (300, 40)):
        x = torch.randn(shape)
        input_step = (x.max() - x.min()) / 255
        error = (quantized(x) - layer(x)).abs()
        bound = x.abs().sum(-1, keepdim=True) * weight_steps / 2
        bound = bound + input_step / 2 * (layer.weight.abs().sum(dim=1) + 40 * weight_steps)
        assert (error <= 1.01 * bound + 1e-5).all() and error.mean() > 0
    assert quantized(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "quantize", "tolerance"),
    [(torch.bfloat16, False, 0.03), (torch.float32, True, 0.06), (torch.bfloat16, True, 0.08)],
    ids=["bfloat16", "int8", "bfloat16 and int8"],
)
@torch.no_grad()
def test_logits_of_fewer_bits_are_close_and_a_cache_does_not_change_them(
    model, dtype, quantize, tolerance, monkeypatch
):
    monkeypatch.setattr(inference, "MAX_CACHED_PARAMETERS", 0)  # all matrices are packed
    tokens = torch.randint(37, (2, 9))
    expected = model(tokens)
    decoder = build_decoder(copy.deepcopy(model).to(dtype), quantize=quantize)
    atol = tolerance * expected.abs().max().item()
    assert_same_logits(decoder, tokens, expected, atol=atol, rtol=0)
    assert DecodingEngine(decoder).caches[0].keys_values.dtype == dtype


def assert_same_logits(decoder, tokens: torch.Tensor, expected: torch.Tensor, **tolerance) -> None:
    """Compare logits of all tokens at once, and of one row that is read in chunks into a cache."""
    torch.testing.assert_close(decoder(tokens).float(), expected, **tolerance)
    engine = DecodingEngine(decoder)
    engine.add(tokens[0].tolist())
    for size in (4, 1, 4):
        logits = engine.read(0, size).float()
        end = engine.rows[0].num_cached
        torch.testing.assert_close(logits[0], expected[0, end - 1], **tolerance)


@torch.no_grad()
def test_a_decoder_gives_the_model_s_logits(model, decoder_of):
    tokens = torch.randint(37, (2, 9))
    assert_same_logits(decoder_of(model), tokens, model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [MultiHeadAttention, FeedForward, Block])
@torch.no_grad()
def test_a_decoder_computes_what_a_changed_model_defines(layer, decoder_of, monkeypatch):
    defined = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *inputs: 0.5 * defined(*inputs).tanh())
    model = random_model(SMALL)
    tokens = torch.randint(37, (2, 9))
    torch.testing.assert_close(decoder_of(model)(tokens), model(tokens), rtol=1e-4, atol=1e-5)


def test_a_decoder_leaves_the_model_unchanged_and_trainable(model, decoder_of):
    model.train()
    parameters = list(model.parameters())
    expected = copy.deepcopy(model)
    decoder = decoder_of(model)
    assert not decoder.training
    for module, expected_module in zip(model.modules(), expected.modules(), strict=True):
        assert module.training and type(module) is type(expected_module)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    tokens = torch.randint(37, (2, 3, 9))
    model(*tokens).backward()
    expected(*tokens).backward()
    for parameter, expected_parameter in zip(parameters, expected.parameters(), strict=True):
        assert torch.equal(parameter, expected_parameter)
        assert torch.equal(parameter.grad, expected_parameter.grad)


def test_a_decoder_shares_all_weights_that_it_neither_packs_nor_concatenates(model, decoder_of):
    decoder = decoder_of(model)
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    for name, parameter in decoder.named_parameters():
        assert parameter.data_ptr() in shared or ".fused_qkv." in name
    assert decoder.token_embedding.weight is model.token_embedding.weight
    block = decoder.blocks[0]
    unpacked = [block.attention.projection.weight, block.feed_forward.contract.weight]
    for weight in (*unpacked, decoder.head_weight()):
        assert weight.is_mkldnn or weight.data_ptr() in shared


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_speeds_up_training_is_not_copied(decoder_of, is_compiled):
    model = random_model(SMALL)
    expected = decode(model, [[1, 2]], 8, temperature=0)
    checkpoint_activations(model)
    if is_compiled:
        compile_methods([(model, "forward")])  # which would compile at the first call
    decoder = decoder_of(model)
    assert not any("forward" in vars(module) for module in decoder.modules())
    assert decode(decoder, [[1, 2]], 8, temperature=0) == expected
