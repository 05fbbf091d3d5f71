"""Every branch of attention equals the definition, in values and gradients."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from helpers import VARIANTS, random_model
from reference import OperationRecorder, assert_same_gradients, attention_definition, random_heads

from engine.core.errors import UserError
from engine.nn.attention import (
    MAX_UNFUSED_POSITIONS,
    DocumentAttention,
    attend,
    attend_from_last,
    check_attention,
    prepare_groups,
)
from engine.nn.layers import MAX_16_BIT_DROPOUT, MIN_16_BIT_DROPOUT, dropout
from model import Head

LONG_T = MAX_UNFUSED_POSITIONS + 1
CASES = {  # T, S, window
    "the last token": (1, 9, 0),
    "a later chunk": (4, 9, 0),
    "a sequence": (20, 20, 0),
    "a long sequence": (LONG_T, LONG_T, 0),
    "shorter than the window": (20, 20, 21),
    "one longer": (21, 21, 20),
    "blocks that divide it": (40 + 64, 40 + 64, 40),
    "blocks that do not": (237, 237, 70),
    "blocks larger than the window": (100, 100, 3),
    "a window of one": (50, 50, 1),
    "one token and a window": (1, 30, 7),
    "a chunk and a window": (5, 30, 7),
    "a chunk longer than the window": (60, 95, 20),
    "a chunk with little before it": (60, 63, 20),
    "a window for fused attention": (LONG_T + 6, LONG_T + 6, LONG_T),
}
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])


@each_dtype
@pytest.mark.parametrize(("T", "S", "window"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_attention_is_the_definition(T, S, window, dtype, device):
    for num_groups in (3, 1):
        inputs = random_heads(T, S, dtype, device, num_groups)
        with OperationRecorder() as recorder:
            mixed = attend(*inputs, window=window)
        assert mixed.dtype == dtype
        assert mixed.shape == inputs[0].shape
        if not window:
            is_short = T == S <= MAX_UNFUSED_POSITIONS and device == "cpu"
            assert recorder.has_fused_attention != (is_short and dtype == torch.bfloat16)
        exact_tolerance = 1e-5 if device == "cpu" else 1e-3
        tolerance = exact_tolerance if dtype == torch.float32 else 0.07
        assert_same_gradients(mixed, attention_definition(*inputs, window), inputs, tolerance)


@each_dtype
@pytest.mark.parametrize("num_groups", [3, 1])
@pytest.mark.parametrize("min_unfused_bytes", [0, 2**21])
def test_the_last_position_of_each_row_attends_to_those_of_its_mask(
    num_groups, dtype, min_unfused_bytes, monkeypatch
):
    monkeypatch.setattr("engine.nn.attention.MIN_UNFUSED_KEY_BYTES", min_unfused_bytes)
    query, key, value = random_heads(1, 9, dtype, num_groups=num_groups)
    num_visible = torch.arange(1, len(query) + 1)
    mask = (torch.arange(9) < num_visible[:, None])[:, None, None]
    mixed = attend_from_last(query, key, value, mask)
    assert mixed.dtype == dtype
    for row, count in enumerate(num_visible.tolist()):
        inputs = [x[row : row + 1, :, :count] for x in (query, key, value)]
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        expected = attention_definition(*inputs)
        torch.testing.assert_close(mixed[row : row + 1].double(), expected, rtol=0, atol=tolerance)


@each_dtype
def test_the_memory_of_a_window_grows_linearly_with_the_sequence(dtype):
    largest = []
    for T in (1024, 2048):
        with OperationRecorder() as recorder:
            attend(*random_heads(T, T, dtype), window=64).sum().backward()
        largest.append(recorder.largest)
    assert largest[1] <= 2.1 * largest[0] < 2.1 * 6 * 1024 * 128


@each_dtype
@pytest.mark.parametrize(
    ("T", "S", "window"), [(1, 1, 0), (1, 9, 0), (4, 9, 0), (20, 20, 0), (8, 8, 3)]
)
def test_dropout_in_attention_preserves_the_mean(T, S, window, dtype):
    heads = random_heads(T, S, dtype)
    inputs = [head.detach()[:1, :1].expand(20_000, 1, -1, -1) for head in heads]
    dropped = attend(*inputs, dropout_p=0.3, window=window)
    assert not torch.equal(dropped[0], dropped[1])
    expected = attention_definition(*inputs, window)[0]
    torch.testing.assert_close(dropped.double().mean(0), expected, rtol=0, atol=0.06)


@each_dtype
@pytest.mark.parametrize("p", [0.05, 0.5, 0.9999])
def test_dropout_zeroes_elements_with_its_probability_and_scales_the_others(p, dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 333, 1001).to(dtype).requires_grad_()
    dropped = dropout(x, p)
    is_kept = dropped != 0
    assert dropped.dtype == dtype
    fractions = is_kept.float()
    torch.testing.assert_close(fractions.mean().item(), 1 - p, rtol=0, atol=0.001)
    columns = fractions.mean(dim=(0, 1))
    torch.testing.assert_close(columns, torch.full((1001,), 1 - p), rtol=0, atol=0.08)
    torch.testing.assert_close(dropped[is_kept], (x / (1 - p))[is_kept])
    dropped.sum().backward()
    torch.testing.assert_close(x.grad, is_kept.to(dtype) / (1 - p))
    torch.manual_seed(0)
    torch.randn(3, 333, 1001)
    assert torch.equal(dropout(x, p), dropped)
    assert not torch.equal(dropout(x, p), dropped)


def test_16_bits_resolve_the_rates_for_which_they_are_used():
    """The error of the mean is exact here; of a rate near 1, no sample is large enough."""
    rates = (MIN_16_BIT_DROPOUT, MAX_16_BIT_DROPOUT)
    for p in torch.linspace(*rates, 10_001, dtype=torch.float64).tolist():
        fraction_kept = 1 - round(p * 2**16) / 2**16
        assert fraction_kept / (1 - p) == pytest.approx(1, abs=0.001)


@each_dtype
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("T", [40, LONG_T])
def test_attention_inside_documents_is_that_of_each_alone(T, window, dtype):
    tokens = torch.ones(2, T, dtype=torch.long)
    starts = ([0, 7, 8, 20], [5])
    for row, positions in enumerate(starts):
        tokens[row, positions] = 0
    inputs = random_heads(T, T, dtype, num_groups=1)
    mixed = DocumentAttention(tokens, 0, window, 0.0).attend(*inputs)
    rows = []
    for row, positions in enumerate(starts):
        edges = [*{0: None, **dict.fromkeys(positions)}, T]
        parts = [
            attention_definition(*(x[row : row + 1, :, start:end] for x in inputs), window)
            for start, end in itertools.pairwise(edges)
        ]
        rows.append(torch.cat(parts, dim=2))
    tolerance = 1e-5 if dtype == torch.float32 else 0.07
    assert_same_gradients(mixed, torch.cat(rows), inputs, tolerance)


@pytest.mark.parametrize("num_groups", [3, 1])
def test_a_window_is_compiled_as_a_mask_where_its_gradient_would_be_wrong(num_groups, monkeypatch):
    monkeypatch.setattr("engine.nn.attention.has_wrong_gradient", lambda query: True)
    compiled_functions = []

    def collect(graph, inputs):
        compiled_functions.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    inputs = random_heads(50, 50, torch.float32, num_groups=num_groups)
    mixed = torch.compile(attend, backend=collect, fullgraph=True)(*inputs, window=9)
    assert any("pad" in name for name in compiled_functions) == (num_groups == 3)
    assert_same_gradients(mixed, attention_definition(*inputs, 9), inputs, 1e-5)
    torch.compiler.reset()


CHANGES = [{"windows": (3, 500, 0)}, {"num_heads": 4, "num_kv_heads": 2}, {"rope_scaling": (2.0,)}]
CHECKED = [*VARIANTS.values()]
CHECKED += [dataclasses.replace(VARIANTS["default"], **change) for change in CHANGES]


@pytest.mark.parametrize("config", CHECKED, ids=str)
def test_the_check_of_a_run_finds_an_edit_of_the_definition(config, monkeypatch):
    model = random_model(config)
    state = torch.get_rng_state()
    check_attention(model)
    assert torch.equal(torch.get_rng_state(), state)
    attention = Head.attention

    def edit(change) -> None:
        monkeypatch.setattr(Head, "attention", lambda *inputs: change(attention(*inputs)))

    for change in (
        lambda weights: weights.detach(),  # of equal values
        lambda weights: (weights + 1e-9).pow(1.01),
        lambda weights: weights + 0.01 * torch.ones_like(weights).triu(1),
    ):
        edit(change)
        with pytest.raises(UserError, match=r"Head\.attention.*--attention loop"):
            check_attention(model)
    check_attention(random_model(dataclasses.replace(config, attention="loop")))
    model.blocks[0].attention = torch.nn.Identity()  # replaced
    check_attention(model)


@pytest.mark.parametrize(
    ("dtype", "major", "has_mask", "is_shared"),
    [
        (torch.bfloat16, 8, False, True),
        (torch.bfloat16, 9, True, False),
        (torch.float16, 7, False, False),
        (torch.float32, 9, False, False),
    ],
)
def test_heads_share_keys_on_a_gpu_only_in_flash_attention(
    monkeypatch, dtype, major, has_mask, is_shared
):
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    _, key, value = random_heads(4, 4, dtype, num_groups=1)
    query = SimpleNamespace(shape=(2, 3, 4, 8), dtype=dtype, device=torch.device("cuda"))
    keys, values, is_grouped = prepare_groups(
        query, key, value, torch.ones(4, 4) if has_mask else None
    )
    assert is_grouped == is_shared
    for repeated, shared in ((keys, key), (values, value)):
        assert torch.equal(repeated, shared if is_shared else shared.expand(2, 3, 4, 8))
