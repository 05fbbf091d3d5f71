"""Quicker ways to the same numbers: each is held equal to its definition, values and gradients."""

import copy
import dataclasses
import math
from functools import partial

import pytest
import torch
from helpers import SMALL, VARIANTS, numbers_text, randomised
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from engine.generation.generate import generate, new_caches
from engine.nn import attention, inference
from engine.nn import loss as output
from engine.nn.attention import attend, drop
from engine.nn.inference import PackedLinear, for_decoding
from engine.nn.loss import output_loss, soft_cap
from engine.training.acceleration import compile_parts, recompute_activations
from model import MultiHeadAttention
from prepare import PrepareConfig, prepare


class Seen(TorchDispatchMode):
    """What PyTorch does inside of it: the names of its operations, and the elements of the largest result."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        self.names.add(str(function))
        made = [tensor.numel() for tensor in torch.utils._pytree.tree_leaves(result) if isinstance(tensor, Tensor)]
        self.largest = max(self.largest, *made, 0)
        return result

    @property
    def fused(self) -> bool:
        return any("scaled_dot_product" in name and "backward" not in name for name in self.names)


def assert_same_gradients(one: Tensor, other: Tensor, inputs: list[Tensor], tolerance: float) -> None:
    """Two ways to a result give the same, and the same gradients."""
    weight = torch.randn(one.shape, device=one.device)
    pairs = [(one, other)]
    pairs += zip(*(torch.autograd.grad((out.float() * weight).sum(), inputs) for out in (one, other)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


# Attention.


def written_out(query: Tensor, key: Tensor, value: Tensor, window: int = 0) -> Tensor:
    """Causal attention of the last T of S positions, as the papers write it, in double precision."""
    T, S = query.shape[-2], key.shape[-2]
    key, value = (one.double().repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
    scores = query.double() @ key.mT / math.sqrt(query.shape[-1])
    back = torch.arange(S - T, S, device=query.device)[:, None] - torch.arange(S, device=query.device)
    unseen = (back < 0) | (back >= (window or S))
    return scores.masked_fill(unseen, -math.inf).softmax(dim=-1) @ value


BRANCHES = {  # T, S, dtype, whether PyTorch's fused operation does it
    "the first token": (1, 1, torch.float32, True),
    "a single token": (1, 9, torch.float32, True),
    "a later piece": (4, 9, torch.float32, True),
    "a later piece in bfloat16": (4, 9, torch.bfloat16, True),
    "all at once": (20, 20, torch.float32, True),
    "a CPU's bfloat16": (20, 20, torch.bfloat16, False),
    "a CPU's long bfloat16": (attention.LONGEST_PLAIN + 1,) * 2 + (torch.bfloat16, True),
}


@pytest.fixture(params=BRANCHES.values(), ids=BRANCHES.keys(), name="branch")
def fixture_branch(request) -> tuple:
    return request.param


def random_heads(T: int, S: int, dtype: torch.dtype, device: str = "cpu", groups: int = 3) -> list[Tensor]:
    """Queries of three heads, keys and values of groups of them, that need gradients."""
    torch.manual_seed(0)
    sizes = ((3, T), (groups, S), (groups, S))
    return [torch.randn(2, heads, length, 8).to(device, dtype).requires_grad_() for heads, length in sizes]


def test_each_way_to_attend_is_the_definition(branch):
    T, S, dtype, fused = branch
    inputs = random_heads(T, S, dtype)
    with Seen() as seen:
        mixed = attend(*inputs)
    assert mixed.dtype == dtype and mixed.shape == inputs[0].shape and seen.fused == fused
    assert_same_gradients(mixed, written_out(*inputs), inputs, 1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("branch", [one for one in BRANCHES.values() if one[0] <= 20], indirect=True, ids=str)
def test_dropout_in_attention_is_right_in_the_mean(branch):
    T, S, dtype, _ = branch
    inputs = [one.detach()[:1, :1].expand(20_000, 1, -1, -1) for one in random_heads(T, S, dtype)]
    dropped = attend(*inputs, dropout=0.3)
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(dropped.double().mean(0), written_out(*inputs)[0], rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.05, 0.5, 0.9999999])
def test_dropping_zeroes_at_the_probability_and_enlarges_the_rest(probability, dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 333, 1001).to(dtype).requires_grad_()
    dropped = drop(x, probability)
    kept = dropped != 0
    assert dropped.dtype == dtype
    torch.testing.assert_close(kept.float().mean().item(), 1 - probability, rtol=0, atol=0.001)
    torch.testing.assert_close(kept.float().mean(dim=(0, 1)), torch.full((1001,), 1 - probability), rtol=0, atol=0.08)
    torch.testing.assert_close(dropped[kept], (x / (1 - probability))[kept])
    dropped.sum().backward()
    torch.testing.assert_close(x.grad, kept.to(dtype) / (1 - probability))
    torch.manual_seed(0)
    torch.randn(3, 333, 1001)
    assert torch.equal(drop(x, probability), dropped) and not torch.equal(drop(x, probability), dropped)


LOCAL = {  # T, S, window
    "shorter than the window": (20, 20, 21),
    "as long as the window": (20, 20, 20),
    "one longer": (21, 21, 20),
    "blocks that divide it": (40 + 64, 40 + 64, 40),
    "blocks that do not": (237, 237, 70),
    "blocks larger than the window": (100, 100, 3),
    "a window of one": (50, 50, 1),
    "one token": (1, 30, 7),
    "one token that sees itself": (1, 30, 1),
    "a piece": (5, 30, 7),
    "a piece longer than the window": (60, 95, 20),
    "a piece with little before it": (60, 63, 20),
    "a window without plain weights": (
        attention.LONGEST_PLAIN + 7,
        attention.LONGEST_PLAIN + 7,
        attention.LONGEST_PLAIN + 1,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "S", "window"), LOCAL.values(), ids=LOCAL.keys())
def test_attention_with_a_window_is_the_definition(T, S, window, dtype):
    for groups in (3, 1):
        inputs = random_heads(T, S, dtype, groups=groups)
        mixed = attend(*inputs, window=window)
        assert mixed.dtype == dtype and mixed.shape == inputs[0].shape
        exact = written_out(*inputs, window)
        assert_same_gradients(mixed, exact, inputs, 1e-5 if dtype == torch.float32 else 0.07)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_a_window_costs_its_band_not_the_square(dtype):
    largest = []
    for T in (1024, 2048):
        with Seen() as seen:
            attend(*random_heads(T, T, dtype), window=64).sum().backward()
        largest.append(seen.largest)
    assert largest[1] <= 2.1 * largest[0] < 2.1 * 6 * 1024 * 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_in_attention_with_a_window_is_right_in_the_mean(dtype):
    inputs = [one.detach()[:1, :1].expand(10_000, 1, -1, -1) for one in random_heads(8, 8, dtype)]
    dropped = attend(*inputs, dropout=0.3, window=3)
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(dropped.double().mean(0), written_out(*inputs, 3)[0], rtol=0, atol=0.06)


@pytest.mark.parametrize(("backend", "fused"), [(SDPBackend.FLASH_ATTENTION, True), (SDPBackend.MATH, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_who_chooses_pytorch_s_way_to_attend_gets_it(backend, fused, dtype):
    inputs = random_heads(20, 20, dtype)
    with sdpa_kernel(backend), Seen() as seen:
        attend(*inputs)
    flash = any("flash_attention" in name for name in seen.names)
    assert flash == fused and (fused or any("bmm" in name for name in seen.names))


# The output loss.


def loss_written_out(x: Tensor, weight: Tensor, targets: Tensor, cap: float) -> Tensor:
    logits = x @ weight.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    probabilities = logits.exp() / logits.exp().sum(dim=-1, keepdim=True)
    counted = targets >= 0
    return -probabilities[counted, targets[counted]].log().sum()


@pytest.mark.parametrize("rows", [100, 48, 5, 1], ids=["whole", "just whole", "in pieces", "row by row"])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("masked", [0, 13, 48])
def test_the_output_loss_whole_or_in_pieces_is_the_definition(monkeypatch, rows, cap, masked):
    monkeypatch.setattr(output, "LOGITS_AT_ONCE", rows * 37 + 36)
    torch.manual_seed(0)
    x, weight = torch.randn(48, 3).requires_grad_(), torch.randn(37, 3).requires_grad_()
    targets = torch.randint(37, (48,))
    targets[torch.randperm(48)[:masked]] = output.IGNORED
    with Seen() as seen:
        loss = output_loss(x, weight, targets, cap)
    assert seen.largest <= max(min(rows, 48) * 37, 48 * 3)  # never more logits than are allowed
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_same_gradients(loss, loss_written_out(x, weight, targets, cap), [x, weight], 1e-4)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_pieces_in_bfloat16_are_close_to_float32(monkeypatch, cap):
    torch.manual_seed(0)
    x, weight = torch.randn(64, 24).requires_grad_(), torch.randn(37, 24).requires_grad_()
    targets = torch.randint(37, (64,))
    exact = output_loss(x, weight, targets, cap)
    monkeypatch.setattr(output, "LOGITS_AT_ONCE", 37 * 4)
    with torch.autocast("cpu", torch.bfloat16):
        loss = output_loss(x, weight, targets, cap)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)
    pairs = zip(*(torch.autograd.grad(one, [x, weight]) for one in (loss, exact)), strict=True)
    for ours, exactly in pairs:
        assert ours.dtype == torch.float32
        assert (ours - exactly).norm() < 0.02 * exactly.norm()


def test_many_pieces_of_a_bfloat16_weight_s_gradient_add_up(monkeypatch):
    monkeypatch.setattr(output, "LOGITS_AT_ONCE", 37 * 4)  # of 512 rows: in bfloat16 a sum would soon stop growing
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 24).bfloat16().requires_grad_() for n in (512, 37))  # as sharding gathers it
    targets = torch.randint(37, (512,))
    exact = [one.detach().float().requires_grad_() for one in (x, weight)]
    ours = torch.autograd.grad(output_loss(x, weight, targets), [x, weight])
    for mine, exactly in zip(ours, torch.autograd.grad(output_loss(*exact, targets), exact), strict=True):
        assert mine.dtype == torch.bfloat16 and (mine.float() - exactly).norm() < 0.005 * exactly.norm()


def test_a_model_with_a_large_vocabulary_has_the_loss_and_gradients_of_one_piece(monkeypatch):
    for config in VARIANTS.values():
        model = randomised(config)
        tokens, targets = torch.randint(config.vocab_size, (2, 3, 16)).unbind(0)
        results = []
        for limit in (output.LOGITS_AT_ONCE, 5 * config.vocab_size):  # pieces of 5 rows, the last of 3
            with monkeypatch.context() as patch:
                patch.setattr(output, "LOGITS_AT_ONCE", limit)
                loss = model(tokens, targets)
                results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        for whole, pieced in zip(*results, strict=True):
            torch.testing.assert_close(whole, pieced, rtol=1e-4, atol=1e-5)


def test_soft_cap():
    logits = torch.tensor([-1e9, -1.0, 0.0, 1e-3, 1e9])
    assert soft_cap(logits, 0.0) is logits
    torch.testing.assert_close(soft_cap(logits, 15.0), torch.tensor([-15, -0.99852, 0, 1e-3, 15]), rtol=1e-4, atol=0)


# Decoding.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_packed_layer_is_the_linear_layer(dtype, bias):
    torch.manual_seed(0)
    layer = nn.Linear(40, 56, bias=bias).to(dtype)
    packed = PackedLinear(layer.weight, layer.bias)
    for shape in ((1, 40), (2, 3, 40), (5, 1, 40), (300, 40)):
        x = torch.randn(shape).to(dtype)
        torch.testing.assert_close(packed(x), layer(x), rtol=1e-5 if dtype == torch.float32 else 0.02, atol=1e-2)


def test_only_large_weights_on_a_cpu_are_packed():
    large = torch.empty(512, 512)
    assert PackedLinear.fits(large) and PackedLinear.fits(large.bfloat16())
    assert not PackedLinear.fits(large[:-1]) and not PackedLinear.fits(large.half())
    assert not PackedLinear.fits(torch.empty(512, 512, device="meta"))


@pytest.fixture(params=VARIANTS)
def model(request) -> nn.Module:
    return randomised(VARIANTS[request.param])


@pytest.fixture(params=["packed", "too small to pack", "not to be packed"])
def decoding(request, monkeypatch):
    """for_decoding where weights are packed, and where they are not."""
    if request.param != "too small to pack":
        monkeypatch.setattr(inference, "WORTH_PACKING", 0)
    return partial(for_decoding, pack=request.param != "not to be packed")


@torch.no_grad()
def test_a_decoder_gives_the_model_s_logits(model, decoding):
    tokens = torch.randint(37, (2, 9))
    expected, decoder = model(tokens), decoding(model)
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-4, atol=1e-5)
    caches = new_caches(decoder, 2)
    for end in (4, 5, 9):
        logits = decoder(tokens[:, caches[0].filled : end], caches=caches)
        torch.testing.assert_close(logits[:, 0], expected[:, end - 1], rtol=1e-4, atol=1e-5)


def test_making_a_decoder_leaves_the_model_as_it_was_and_able_to_learn(model, decoding):
    model.train()
    before, untouched = list(model.named_parameters()), copy.deepcopy(model)
    modules = [type(module) for module in model.modules()]
    decoder = decoding(model)
    assert not decoder.training and all(module.training for module in model.modules())
    assert [type(module) for module in model.modules()] == modules
    assert all(a is b for (_, a), (_, b) in zip(before, model.named_parameters(), strict=True))
    tokens = torch.randint(37, (2, 3, 9))
    for one in (model, untouched):
        one(*tokens).backward()
    for ours, theirs in zip(model.parameters(), untouched.parameters(), strict=True):
        assert ours.requires_grad and torch.equal(ours, theirs) and torch.equal(ours.grad, theirs.grad)


def test_a_decoder_shares_what_it_does_not_pack(model, decoding):
    decoder, shared = decoding(model), {id(parameter) for parameter in model.parameters()}
    left = {id(parameter) for parameter in decoder.parameters()}
    packed = [module for module in decoder.modules() if isinstance(module, PackedLinear)]
    assert left < shared if packed else left == shared
    assert id(model.token_embedding.weight) in left


def test_a_decoder_packs_each_weight_once(model, monkeypatch):
    monkeypatch.setattr(inference, "WORTH_PACKING", 0)
    packed = [module for module in for_decoding(model).modules() if isinstance(module, PackedLinear)]
    matrices = sum(p.numel() for name, p in model.named_parameters() if model.rules[name].group == "matrix")
    assert sum(module.weight.numel() for module in packed) == matrices + model.head_weight().numel()


def test_a_decoder_keeps_the_weights_it_was_made_from(decoding):
    model = randomised(SMALL)
    attention = decoding(model).blocks[0].attention
    x = torch.randn(1, 5, 24)
    before = attention.joined(x)
    with torch.no_grad():
        for head in model.blocks[0].attention.heads:
            head.query.weight.zero_()
    assert torch.equal(attention.joined(x), before)


def test_decoding_joins_the_heads_once(monkeypatch, decoding):
    calls, join = [], MultiHeadAttention.join_heads
    monkeypatch.setattr(MultiHeadAttention, "join_heads", lambda self: calls.append(self) or join(self))
    decoder = decoding(randomised(SMALL))
    assert len(calls) == SMALL.num_layers
    assert len(list(generate(decoder, torch.tensor([[1, 2]]), 5))) == 5
    assert len(calls) == SMALL.num_layers


def test_recomputed_activations_are_those_that_were_kept(model):
    tokens, results, kept = torch.randint(37, (2, 3, 16)), [], []
    for _ in range(2):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: to.append(x.numel()) or x, lambda x: x):
            loss = model(*tokens)
        kept.append(sum(sizes))
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        recompute_activations(model)
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True)) and kept[1] < kept[0] / 2


def test_a_model_that_recomputes_activations_decodes_too(decoding):
    model = randomised(SMALL)
    expected = list(generate(model, torch.tensor([[1, 2]]), 8, temperature=0))
    recompute_activations(model)
    assert list(generate(decoding(model), torch.tensor([[1, 2]]), 8, temperature=0)) == expected


# Compiling.


@pytest.fixture(autouse=True)
def forget_compiled():
    """No test finds what another compiled."""
    yield
    torch.compiler.reset()


def test_decoding_compiles_into_one_graph_whatever_the_length():
    shape = dataclasses.replace(SMALL, num_layers=1, num_heads=1, d_model=8, windows=(5,))
    model = for_decoding(randomised(shape), pack=False)
    choice = {"max_new_tokens": 16, "temperature": 0}  # past the context
    plain = torch.stack(list(generate(model, torch.tensor([[1, 2, 3]] * 2), **choice)))
    model.compile(dynamic=True, fullgraph=True, backend="eager")
    compiled = torch.stack(list(generate(model, torch.tensor([[1, 2, 3]] * 2), **choice)))
    assert torch.equal(plain, compiled)


class Telling(nn.Module):
    """Zeros as it is written, ones compiled."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[int(torch.compiler.is_compiling())].expand(x.shape[1], 1)


def test_compiling_says_nothing_when_it_works():
    part, x = Telling(), torch.ones(2, 4)
    assert part(x).tolist() == [[0], [0]]
    assert compile_parts([part], lambda: part(x).sum().backward()) == ""
    assert part(x).tolist() == [[4], [4]] and part.weights.grad.tolist() == [0, 8]


def test_compiling_says_in_one_line_why_it_failed_and_leaves_all_as_it_was():
    parts = [Telling(), Telling()]

    def fail():
        raise RuntimeError("no compiler " + "x" * 300 + "\nand a long tale")

    failed = compile_parts(parts, fail)
    assert failed.startswith("RuntimeError: no compiler x") and len(failed) == 200 and "\n" not in failed
    for part in parts:
        assert part(torch.ones(2, 4)).tolist() == [[0], [0]]


def test_training_goes_on_without_a_compiler_and_says_so_once(run, tmp_path, monkeypatch):
    (tmp_path / "numbers.txt").write_text(numbers_text(500), encoding="utf-8")
    prepare(PrepareConfig(inputs=(str(tmp_path / "numbers.txt"),), tokenizer="char", out=tmp_path / "data"))
    (tmp_path / "compile.toml").write_text("compile = true\n")
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    flags = "--data data --out out --steps 2 --num-layers 1 --num-heads 1 --d-model 8 --context-length 8"
    flags += " --batch-size 2 --device cpu --eval-tokens 100"
    done = run("train.py", "compile.toml", *flags.split())
    assert done.returncode == 0 and "2 steps in" in done.stdout
    assert done.stderr.startswith("warning: training goes on without compiling, which failed: ")
    assert "/bin/false" in done.stderr and done.stderr.count("\n") == 1
