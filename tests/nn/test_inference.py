"""A copy of a model for decoding: the same logits, and the model itself unchanged."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model
from torch import nn

from engine.generation.generate import generate, new_caches
from engine.nn import inference
from engine.nn.acceleration import checkpoint_activations, compile_modules
from engine.nn.inference import FrozenLinear, Int8Linear, can_use_onednn, for_decoding
from engine.nn.layers import FusedLinear


@pytest.fixture(params=VARIANTS)
def model(request) -> nn.Module:
    return random_model(VARIANTS[request.param])


@pytest.fixture(params=["packed", "too small to pack", "not to be packed"])
def decode(request, monkeypatch):
    """for_decoding where weights are packed, and where they are not."""
    if request.param != "too small to pack":
        monkeypatch.setattr(inference, "MIN_ONEDNN_ELEMENTS", 0)
    return partial(for_decoding, pack=request.param != "not to be packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefers_mkl", [True, False])
@torch.no_grad()
def test_a_frozen_layer_is_the_linear_layer(dtype, bias, prefers_mkl, monkeypatch):
    monkeypatch.setattr(inference, "prefers_mkl", lambda weight: prefers_mkl)
    torch.manual_seed(0)
    layer = nn.Linear(40, 56, bias=bias).to(dtype)
    frozen = FrozenLinear(layer.weight, layer.bias, True)
    assert frozen.weight.is_mkldnn != prefers_mkl  # the plain weight is shared
    rtol = 1e-5 if dtype == torch.float32 else 0.02
    for shape in ((1, 40), (2, 3, 40), (5, 1, 40), (300, 40)):
        x = torch.randn(shape).to(dtype)
        torch.testing.assert_close(frozen(x), layer(x), rtol=rtol, atol=1e-2)


def test_only_large_weights_on_a_cpu_are_left_to_onednn():
    large = torch.empty(512, 512)
    assert can_use_onednn(large)
    assert can_use_onednn(large.bfloat16())
    for weight in (large[:-1], large.half(), torch.empty(512, 512, device="meta")):
        assert not can_use_onednn(weight)


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
    monkeypatch.setattr(inference, "MIN_ONEDNN_ELEMENTS", 0)
    tokens = torch.randint(37, (2, 9))
    expected = model(tokens)
    decoder = for_decoding(copy.deepcopy(model).to(dtype), quantize=quantize)
    atol = tolerance * expected.abs().max().item()
    torch.testing.assert_close(decoder(tokens).float(), expected, rtol=0, atol=atol)
    caches = new_caches(decoder, 2)
    assert caches[0].keys_values.dtype == dtype
    for start, end in ((0, 4), (4, 5), (5, 9)):
        logits = decoder(tokens[:, start:end], caches=caches)
        torch.testing.assert_close(logits[:, 0].float(), expected[:, end - 1], rtol=0, atol=atol)


@torch.no_grad()
def test_a_decoder_gives_the_model_s_logits(model, decode):
    tokens = torch.randint(37, (2, 9))
    expected = model(tokens)
    decoder = decode(model)
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-4, atol=1e-5)
    caches = new_caches(decoder, 2)
    for end in (4, 5, 9):
        logits = decoder(tokens[:, caches[0].filled : end], caches=caches)
        torch.testing.assert_close(logits[:, 0], expected[:, end - 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_decoder_s_heads_still_compute_their_attention(model, decode):
    x = torch.randn(1, 5, model.config.d_model)
    attentions = []
    for copied in (model, decode(model)):
        heads = copied.blocks[0].attention.heads
        attentions.append([head.attention(x, model.rotation(torch.arange(5))) for head in heads])
    torch.testing.assert_close(*attentions, rtol=1e-4, atol=1e-5)


def test_a_decoder_leaves_the_model_unchanged_and_trainable(model, decode):
    model.train()
    parameters = list(model.parameters())
    expected = copy.deepcopy(model)
    decoder = decode(model)
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


def test_a_decoder_shares_all_tensors_that_it_does_not_pack(model, decode):
    decoder = decode(model)
    shared = {id(parameter) for parameter in model.parameters()}
    kept = {id(parameter) for parameter in decoder.parameters()}
    is_packed = any(getattr(module, "use_onednn", False) for module in decoder.modules())
    assert kept < shared if is_packed else kept == shared
    assert id(model.token_embedding.weight) in kept


def test_a_decoder_packs_each_weight_once(model, monkeypatch):
    monkeypatch.setattr(inference, "MIN_ONEDNN_ELEMENTS", 0)
    modules = for_decoding(model).modules()
    packed = [module.weight.numel() for module in modules if isinstance(module, FrozenLinear)]
    params = dict(model.named_parameters())
    matrices = [name for name in params if model.specs[name].group == "matrix"]
    expected = model.head_weight().numel() + sum(params[name].numel() for name in matrices)
    assert sum(packed) == expected


def test_a_decoder_concatenates_the_heads_once_and_keeps_these_weights(decode):
    model = random_model(SMALL)
    decoder = decode(model)
    assert not any(isinstance(module, FusedLinear) for module in decoder.modules())
    project = decoder.blocks[0].attention.fused_qkv
    x = torch.randn(1, 5, 24)
    before = project(x)
    with torch.no_grad():
        for head in model.blocks[0].attention.heads:
            head.query.weight.zero_()
    assert torch.equal(project(x), before)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_speeds_up_training_is_not_copied(decode, is_compiled):
    model = random_model(SMALL)
    expected = list(generate(model, torch.tensor([[1, 2]]), 8, temperature=0))
    checkpoint_activations(model)
    if is_compiled:
        compile_modules([model], lambda: None)  # which would compile at the first call
    decoder = decode(model)
    assert not any("forward" in vars(module) for module in decoder.modules())
    assert list(generate(decoder, torch.tensor([[1, 2]]), 8, temperature=0)) == expected


def test_decoding_compiles_into_one_graph_whatever_the_length():
    shape = dataclasses.replace(SMALL, num_layers=1, num_heads=1, d_model=8, windows=(5,))
    model = for_decoding(random_model(shape), pack=False)
    prompt = torch.tensor([[1, 2, 3]] * 2)
    options = {"max_new_tokens": 16, "temperature": 0}  # past the context
    expected = torch.stack(list(generate(model, prompt, **options)))
    model.compile(dynamic=True, fullgraph=True, backend="eager")
    compiled = torch.stack(list(generate(model, prompt, **options)))
    torch.compiler.reset()
    assert torch.equal(compiled, expected)
