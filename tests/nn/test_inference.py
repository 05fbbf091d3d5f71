"""A copy of a model for decoding: the same logits, and the model itself unchanged."""

import copy
import dataclasses
from functools import partial

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model
from torch import nn

from engine.generation.generate import generate, new_caches
from engine.generation.kv_cache import RowLengths, new_row_caches
from engine.nn import inference
from engine.nn.acceleration import checkpoint_activations, compile_modules
from engine.nn.inference import FrozenLinear, FrozenRMSNorm, Int8Linear, build_decoder
from engine.nn.layers import FusedLinear, RMSNorm
from engine.nn.positions import RotationTable, rotate
from model import Block, FeedForward, MultiHeadAttention


@pytest.fixture(params=VARIANTS)
def model(request) -> nn.Module:
    return random_model(VARIANTS[request.param])


@pytest.fixture(params=["packed", "too small to pack", "not to be packed"])
def decode(request, monkeypatch):
    """build_decoder where weights are packed, and where they are not."""
    if request.param == "packed":
        monkeypatch.setattr(inference, "max_mkl_rows", lambda *_: 0)
    return partial(build_decoder, pack=request.param != "not to be packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("max_mkl_rows", [2, 0])
@torch.no_grad()
def test_a_frozen_layer_is_the_linear_layer(dtype, bias, max_mkl_rows, monkeypatch):
    monkeypatch.setattr(inference, "max_mkl_rows", lambda *_: max_mkl_rows)
    torch.manual_seed(0)
    layer = nn.Linear(40, 56, bias=bias).to(dtype)
    frozen = FrozenLinear(layer.weight, layer.bias, True)
    is_shared = frozen.weight.data_ptr() == layer.weight.data_ptr() if max_mkl_rows else False
    assert frozen.weight.is_mkldnn != is_shared
    rtol = 1e-5 if dtype == torch.float32 else 0.02
    for shape in ((1, 40), (2, 3, 40), (5, 1, 40), (300, 40)):
        x = torch.randn(shape).to(dtype)
        torch.testing.assert_close(frozen(x), layer(x), rtol=rtol, atol=1e-2)


def test_mkl_multiplies_few_rows_and_small_weights_in_float32(monkeypatch):
    cpu = {"cpu_name": "AMD EPYC"}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu)
    monkeypatch.setattr(inference, "MAX_MKL_MULTIPLICATIONS", 5000)
    weight = torch.empty(20, 50)
    assert [inference.max_mkl_rows(weight, is_cached) for is_cached in (True, False)] == [5, 0]
    assert inference.max_mkl_rows(weight.bfloat16(), True) == 0
    cpu["cpu_name"] = "Intel(R) Xeon(R)"
    assert [inference.max_mkl_rows(weight, is_cached) for is_cached in (True, False)] == [5, 2]
    assert inference.max_mkl_rows(torch.empty(200, 50), True) == 2


def test_only_float32_and_bfloat16_on_a_cpu_have_layers_for_decoding():
    weight = torch.empty(4, 4)
    assert inference.runs_on_cpu(weight) and inference.runs_on_cpu(weight.bfloat16())
    for unsupported in (weight.double(), weight.half(), torch.empty(4, 4, device="meta")):
        assert not inference.runs_on_cpu(unsupported)
    model = random_model(SMALL).double()
    tokens = torch.randint(37, (2, 9))
    torch.testing.assert_close(build_decoder(model)(tokens), model(tokens), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_weighted", [True, False])
@torch.no_grad()
def test_a_frozen_norm_is_the_norm_and_computes_in_float32(is_weighted):
    torch.manual_seed(0)
    norm = RMSNorm(40, 1e-3, is_weighted)
    if is_weighted:
        norm.weight.normal_()
    frozen = FrozenRMSNorm(norm)
    x = 0.02 * torch.randn(2, 3, 40)
    torch.testing.assert_close(frozen(x), norm(x))
    x = x.bfloat16()
    assert torch.equal(frozen(x), frozen(x.float()).bfloat16())


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
    model, dtype, quantize, tolerance
):
    tokens = torch.randint(37, (2, 9))
    expected = model(tokens)
    decoder = build_decoder(copy.deepcopy(model).to(dtype), quantize=quantize)
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


@pytest.mark.parametrize(
    "kind",
    [
        {"qk_norm": False, "qkv_bias": True, "norm": "weighted_rmsnorm", "num_kv_heads": 1},
        {"rope_base": 5e5, "rope_scaling": (4.0, 1.0, 4.0, 8.0)},
        {"norm": "layernorm", "bias": True, "windows": (3,)},
    ],
    ids=["biases of queries, no norm", "scaled frequencies", "layer norms"],
)
@torch.no_grad()
def test_rows_of_different_lengths_rotate_each_by_its_own_positions(kind, decode):
    model = random_model(dataclasses.replace(SMALL, **kind))
    decoder = decode(model)
    prompts = [torch.randint(37, (1, length)) for length in (3, 7)]
    rows = RowLengths(2, 16, torch.device("cpu"))
    row_caches = new_row_caches(decoder, rows)
    for row, prompt in enumerate(prompts):
        caches = new_caches(decoder, 1)
        decoder(prompt, caches=caches)
        for row_cache, cache in zip(row_caches, caches, strict=True):
            row_cache.insert(row, cache)
    rows.replace(torch.tensor([3, 7]))
    next_tokens = torch.tensor([[5], [6]])
    logits = decoder(next_tokens, caches=row_caches)
    for row, prompt in enumerate(prompts):
        expected = model(torch.cat((prompt, next_tokens[row : row + 1]), dim=1))[0, -1]
        torch.testing.assert_close(logits[row, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [MultiHeadAttention, FeedForward, Block])
@torch.no_grad()
def test_a_decoder_computes_what_a_changed_model_defines(layer, decode, monkeypatch):
    defined = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *inputs: 0.5 * defined(*inputs).tanh())
    model = random_model(SMALL)
    tokens = torch.randint(37, (2, 9))
    torch.testing.assert_close(decode(model)(tokens), model(tokens), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_table_of_rotations_grows_and_rotates_as_the_model_does():
    model = random_model(dataclasses.replace(SMALL, rope_scaling=(4.0, 1.0, 4.0, 8.0)))
    table = RotationTable(model.rotation)
    for start, end in ((0, 3), (2, 4), (7, 12)):
        x = torch.randn(2, 3, end - start, 8)
        positions = torch.arange(start, end)
        expected = rotate(x, model.rotation(positions))
        torch.testing.assert_close(rotate(x, table(positions)), expected)
        rows = torch.stack((positions, positions.flip(0)))
        expected = rotate(x, model.rotation(rows))
        torch.testing.assert_close(rotate(x, table(rows)), expected)


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


def test_a_decoder_shares_all_weights_that_it_neither_packs_nor_concatenates(model, decode):
    decoder = decode(model)
    shared = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in decoder.parameters()} <= shared
    assert decoder.token_embedding.weight is model.token_embedding.weight
    block = decoder.blocks[0]
    unpacked = [block.attention.projection.weight, block.feed_forward.contract.weight]
    for weight in (*unpacked, decoder.head_weight()):
        assert weight.is_mkldnn or weight.data_ptr() in shared


def test_a_decoder_replaces_each_weight_once(model):
    modules = build_decoder(model).modules()
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
    model = build_decoder(random_model(shape), pack=False)
    prompt = torch.tensor([[1, 2, 3]] * 2)
    options = {"max_new_tokens": 16, "temperature": 0}  # past the context
    expected = torch.stack(list(generate(model, prompt, **options)))
    model.compile(dynamic=True, fullgraph=True, backend="eager")
    compiled = torch.stack(list(generate(model, prompt, **options)))
    torch.compiler.reset()
    assert torch.equal(compiled, expected)
