"""The model: causality, the list of heads and its definitions, the cache, the loss, first values."""

import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import SMALL, VARIANTS, randomised
from torch import nn

import model as model_module
from engine.core.distributed import SINGLE_PROCESS, load, materialise
from engine.generation.generate import new_caches
from model import GPT, Block, FeedForward, Head, ModelConfig, MultiHeadAttention, angles, parameter_rules, rotate


@pytest.fixture(params=VARIANTS, name="config")
def fixture_config(request) -> ModelConfig:
    return VARIANTS[request.param]


def random_batch(config: ModelConfig, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(config.vocab_size, (2, rows, config.context_length)).unbind(0)


# What a position sees.


def reaches(model: GPT, length: int, dtype: torch.dtype) -> torch.Tensor:
    """On which embeddings each position's logits depend, (T, T): by gradients through the forward pass."""
    embedded, rows = [], []

    def cut(module, arguments, output):
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    model.token_embedding.register_forward_hook(cut)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = model(torch.randint(model.config.vocab_size, (1, length)))
    for position in range(length):
        one = logits[0, position, 0].float()  # a sum over all would be almost constant after a norm
        (gradient,) = torch.autograd.grad(one, embedded, retain_graph=True)
        rows.append(gradient[0].abs().sum(dim=-1) > 0)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_position_depends_on_a_later_one_and_each_on_all_before(config, dtype):
    assert torch.equal(reaches(randomised(config), 12, dtype), torch.ones(12, 12, dtype=torch.bool).tril())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("windows", "layers", "sees"), [((5,), 1, 5), ((1,), 2, 1), ((5, 3), 2, 7), ((5,), 3, 13), ((2, 0), 2, 99)], ids=str
)
def test_a_position_sees_the_windows_of_its_layers_and_nothing_before(windows, layers, sees, dtype):
    sizes = {"context_length": 40, "num_kv_heads": 1, "num_layers": layers, "windows": windows}
    reached = reaches(randomised(dataclasses.replace(SMALL, **sizes)), 40, dtype)
    assert torch.equal(reached, torch.ones(40, 40, dtype=torch.bool).tril().triu(1 - sees))


@torch.no_grad()
def test_the_loss_of_a_position_does_not_depend_on_later_tokens(config):
    model = randomised(config)
    tokens, targets = random_batch(config, rows=1)
    targets[:, 6:] = -1
    others = tokens.clone()
    others[:, 6:] = (tokens[:, 6:] + 1) % config.vocab_size
    assert torch.equal(model(tokens, targets), model(others, targets))
    others[:, 5] = (tokens[:, 5] + 1) % config.vocab_size
    assert not torch.equal(model(tokens, targets), model(others, targets))


@pytest.mark.parametrize("pieces", [[1] * 16, [7, 1, 1, 5, 2], [16]], ids=str)
@torch.no_grad()
def test_a_cache_changes_nothing_however_the_tokens_come(config, pieces):
    model = randomised(config)
    tokens, _ = random_batch(config)
    whole, caches, end = model(tokens), new_caches(model, 3), 0
    for size in pieces:
        logits = model(tokens[:, end : end + size], caches=caches)
        end += size
        assert logits.shape == (3, 1, config.vocab_size) and caches[0].filled == end
        torch.testing.assert_close(logits[:, 0], whole[:, end - 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_too_many_tokens_are_refused():
    model = randomised(SMALL)
    with pytest.raises(ValueError, match="17 tokens are more than the 16 that fit; give the last 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    caches = new_caches(model, 1)
    model(torch.zeros(1, 16, dtype=torch.long), caches=caches)
    with pytest.raises(ValueError, match="17 tokens"):
        model(torch.zeros(1, 1, dtype=torch.long), caches=caches)


# The list of heads.


def test_joined_heads_equal_the_loop_over_them(config):
    attention, rotation = randomised(config).blocks[0].attention, randomised(config).rotation(0, 10)
    x = torch.randn(2, 10, config.d_model, requires_grad=True)
    weight = torch.randn(2, 10, config.d_model)
    results = []
    for compute in (attention, attention.loop):
        out = compute(x, rotation)
        results.append([out, *torch.autograd.grad((out * weight).sum(), [x, *attention.parameters()])])
    for joined, looped in zip(*results, strict=True):
        torch.testing.assert_close(joined, looped, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_equals_torch_multihead_attention(bias):
    config = dataclasses.replace(SMALL, position="learned", qk_norm=False, bias=bias)
    torch.manual_seed(0)
    ours = MultiHeadAttention(config)
    theirs = nn.MultiheadAttention(config.d_model, config.num_heads, bias=bias, batch_first=True)
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.2)
    joined_weight, joined_bias = ours.join_heads()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(joined_weight)
        if bias:
            theirs.in_proj_bias.copy_(joined_bias)
        theirs.out_proj.load_state_dict(ours.projection.state_dict())
    x, weight = torch.randn(2, 2, 10, config.d_model).unbind(0)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    mask = nn.Transformer.generate_square_subsequent_mask(10)
    mine, other = ours(one, None), theirs(two, two, two, attn_mask=mask, need_weights=False, is_causal=True)[0]
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    (mine * weight).sum().backward()
    (other * weight).sum().backward()
    pairs = [(one.grad, two.grad), (ours.projection.weight.grad, theirs.out_proj.weight.grad)]
    for kind in ("weight", "bias") if bias else ("weight",):
        parts = [getattr(getattr(head, part), kind) for part in ("query", "key", "value") for head in ours.heads]
        pairs.append((torch.cat([part.grad for part in parts]), getattr(theirs, f"in_proj_{kind}").grad))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_parameters_of_attention_are_those_of_its_heads_and_its_projection():
    names = {name for name, _ in MultiHeadAttention(SMALL).named_parameters()}
    heads = {f"heads.{i}.{part}.weight" for i in range(3) for part in ("query", "key", "value")}
    assert names == heads | {"projection.weight"}


@torch.no_grad()
def test_a_head_s_attention_is_a_distribution_over_the_past(config):
    head, rotation = randomised(config).blocks[0].attention.heads[0], randomised(config).rotation(0, 10)
    weights = head.attention(torch.randn(2, 10, config.d_model), rotation)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 10))
    assert weights.triu(1).abs().max() == 0 and weights.tril().min() >= 0


@torch.no_grad()
def test_normed_queries_and_keys_have_no_scale_of_their_own():
    for qk_norm in (True, False):
        model = randomised(dataclasses.replace(SMALL, qk_norm=qk_norm))
        tokens, _ = random_batch(SMALL)
        before = model(tokens)
        for head in model.blocks[0].attention.heads:
            head.query.weight.mul_(3)
            head.key.weight.mul_(2)
        assert torch.allclose(model(tokens), before, rtol=1e-3, atol=1e-3) == qk_norm


@torch.no_grad()
def test_heads_of_a_group_share_their_key_and_value():
    grouped = randomised(VARIANTS["qwen3"])
    heads = grouped.blocks[0].attention.heads
    assert [head.key is heads[0].key for head in heads] == [True, True, False, False]
    assert all(head.key_norm is heads[0].key_norm for head in heads)
    names = [name for name, _ in grouped.named_parameters() if name.startswith("blocks.0.") and "key" in name]
    assert [name.split(".")[4:] for name in names] == [
        ["0", "key", "weight"],
        ["0", "key_norm", "weight"],
        ["2", "key", "weight"],
    ]
    # each with a key and a value of its own that are equal, the model is the same
    full = GPT(dataclasses.replace(VARIANTS["qwen3"], num_kv_heads=None)).eval()
    weights = dict(grouped.named_parameters())
    for name, parameter in full.named_parameters():
        shared = re.sub(r"heads\.[13]\.(key|value)\.", lambda found: f"heads.{int(found[0][6]) - 1}.{found[1]}.", name)
        parameter.copy_(weights[shared])
    tokens, _ = random_batch(SMALL)
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-4, atol=1e-5)


# Positions.


def test_rope_scores_depend_on_distance_alone():
    turns = angles(0, 20, 8, 10_000.0, torch.device("cpu"))
    rotation = torch.stack((turns.cos(), turns.sin()))
    query, key = torch.randn(2, 1, 8).unbind(0)
    scores = rotate(query.expand(20, 8), rotation) @ rotate(key.expand(20, 8), rotation).T
    for distance in range(-10, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(scores.diagonal(1)[0], scores.diagonal(0)[0], atol=1e-3)


def test_rope_turns_pairs_as_complex_numbers():
    rotation = GPT(SMALL).rotation(3, 8)  # (2, 5, 4)
    x = torch.randn(5, SMALL.head_width)
    positions, frequencies = torch.arange(3.0, 8)[:, None], 10_000.0 ** (-torch.arange(4) / 4)
    expected = torch.view_as_complex(torch.stack(x.chunk(2, dim=-1), dim=-1)) * torch.exp(-1j * positions * frequencies)
    torch.testing.assert_close(rotate(x, rotation), torch.cat((expected.real, expected.imag), dim=-1))
    assert GPT(VARIANTS["gpt2"]).rotation(0, 4) is None


def test_sinusoidal_positions_are_those_of_2017():
    config = VARIANTS["2017"]
    model = randomised(config)
    tokens = torch.tensor([[5] * 16])
    added = model.embed(tokens)[0] - model.token_embedding.weight[5] * math.sqrt(config.d_model)
    position, i = torch.arange(16.0)[:, None], torch.arange(config.d_model // 2)
    turns = position / 10_000 ** (2 * i / config.d_model)
    torch.testing.assert_close(added[:, 0::2], turns.sin(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(added[:, 1::2], turns.cos(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.embed(tokens[:, :2], start=7)[0], model.embed(tokens)[0, 7:9])


# Layers.


@pytest.mark.parametrize("name", ["gelu", "relu", "relu2", "swiglu"])
def test_feed_forward_is_what_its_name_says(name):
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


def test_a_block_normalises_before_its_layers_or_after_their_sums():
    x = torch.randn(2, 5, 24)
    for name in ("gpt2", "2017"):
        block = Block(VARIANTS[name])
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.2)
        first, second = block.attention_norm, block.feed_forward_norm
        if name == "gpt2":
            middle = x + block.attention(first(x), None)
            expected = middle + block.feed_forward(second(middle))
        else:
            middle = first(x + block.attention(x, None))
            expected = second(middle + block.feed_forward(middle))
        torch.testing.assert_close(block(x, None), expected)


@torch.no_grad()
def test_softcap_bounds_logits():
    model = randomised(VARIANTS["relu2"])
    model.head.weight.mul_(100)
    logits = model(torch.randint(37, (1, 16)))
    assert 14 < logits.abs().max() <= 15


@torch.no_grad()
def test_dropout_is_off_in_evaluation_and_on_in_training():
    model = randomised(dataclasses.replace(SMALL, dropout=0.5))
    tokens, _ = random_batch(SMALL)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


# The loss.


@pytest.mark.parametrize("masked", [0, 5, 48], ids=["all count", "some count", "none counts"])
def test_the_loss_is_the_summed_cross_entropy_of_the_targets_that_count(config, masked):
    model = randomised(config)
    tokens, targets = random_batch(config)
    targets.view(-1)[:masked] = -1
    logits = model(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    loss, parameters = model(tokens, targets), list(model.parameters())
    assert loss.shape == () and loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)
    for ours, written in zip(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(ours, written, rtol=1e-4, atol=1e-5)
        assert masked < 48 or not ours.any()
    assert (loss == 0) == (masked == 48)


def test_the_losses_of_parts_add_up_to_that_of_the_whole(config):
    model = randomised(config)
    tokens, targets = random_batch(config)
    targets[0, :9] = -1  # parts in which different numbers count
    whole = model(tokens, targets)
    parts = [model(tokens[i : i + 1], targets[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(whole, sum(parts))


@torch.no_grad()
def test_bfloat16_on_a_cpu_is_close_to_float32(config):
    model = randomised(config)
    tokens, targets = random_batch(config)
    exact = model(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, targets)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), rel=0.02)


@torch.no_grad()
def test_first_loss_is_that_of_a_guess(config):
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(config.vocab_size, (32, 17))
    loss = model(tokens[:, :-1], tokens[:, 1:]).item() / (32 * 16)
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.02 if config.tie_embeddings else 1e-6)


# First values, and rules.


def test_a_model_made_without_memory_and_filled_has_the_first_values_of_one_made_at_once(config):
    torch.manual_seed(5)
    direct = GPT(config)
    torch.manual_seed(5)
    with torch.device("meta"):
        model = GPT(config)
    filled = materialise(model, SINGLE_PROCESS, torch.float32)
    load(filled, filled.initial_values())
    torch.manual_seed(6)
    other = GPT(config)
    assert direct.state_dict().keys() == filled.state_dict().keys()
    for name, value in direct.state_dict().items():
        assert torch.equal(value, filled.state_dict()[name])
        assert not direct.rules[name].std or not torch.equal(value, other.state_dict()[name])


def test_first_values_are_what_the_rules_say():
    for config in VARIANTS.values():
        torch.manual_seed(0)
        model = GPT(dataclasses.replace(config, vocab_size=2000, d_model=96, d_ff=None))
        for name, value in model.named_parameters():
            _, std, mean, _ = model.rules[name]
            assert value.std().item() == pytest.approx(std, rel=0.1), name
            assert value.mean().item() == pytest.approx(mean, abs=5 * std / math.sqrt(value.numel())), name
        last = [p for name, p in model.named_parameters() if name.endswith(("projection.weight", "contract.weight"))]
        assert len(last) == 4 and all(p.any() == config.tie_embeddings for p in last)


def test_a_tied_model_s_sub_layers_add_little_each_so_that_their_sum_does_not_grow():
    for layers in (2, 8):
        rules = GPT(dataclasses.replace(VARIANTS["gpt2"], num_layers=layers)).rules
        assert rules["blocks.0.attention.projection.weight"].std == pytest.approx((2 * layers * 24) ** -0.5)
        assert rules["blocks.1.feed_forward.contract.weight"].std == pytest.approx((2 * layers * 96) ** -0.5)
        assert rules["blocks.1.feed_forward.expand.weight"].std == pytest.approx(24**-0.5)
        assert rules["token_embedding.weight"].std == rules["position_embedding.weight"].std == 0.02


def test_the_first_matrices_of_a_model_with_its_own_head_are_half_as_large():
    own, tied = (GPT(dataclasses.replace(SMALL, tie_embeddings=tied)).rules for tied in (False, True))
    for name in ("attention.heads.0.query", "attention.heads.0.value", "feed_forward.expand"):
        assert 2 * own[f"blocks.0.{name}.weight"].std == tied[f"blocks.0.{name}.weight"].std == SMALL.d_model**-0.5


def test_every_parameter_has_a_rule_and_its_group_fits_its_shape(config):
    model = GPT(config)
    assert model.rules.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        group = model.rules[name].group
        outer = "head" if name == "head.weight" or config.tie_embeddings else "embedding"
        assert group == ("vector" if parameter.ndim == 1 else "matrix" if "blocks" in name else outer), name


def test_a_parameter_without_a_rule_stops_construction(monkeypatch):
    with pytest.raises(ValueError, match=r"no rule fits the parameter odd\.gain; add one to parameter_rules\(\)"):
        parameter_rules(SMALL, ["token_embedding.weight", "odd.gain"])

    class Odd(Head):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.extra = nn.Linear(2, 2)

    monkeypatch.setattr(model_module, "Head", Odd)
    with pytest.raises(ValueError, match=r"no rule fits the parameter blocks\.0\.attention\.heads\.0\.extra\.weight"):
        GPT(SMALL)


# Shapes.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_model 24 does not divide into 5 heads"),
        ({"d_model": 9}, "RoPE rotates pairs, but a head is 3 wide"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"context_length": -1}, "context_length is -1"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"windows": (8, -1)}, "windows is -1; it must be from 0 to 10000000"),
        ({"position": "sinusoidal", "d_model": 21}, "sinusoidal positions come in pairs"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_a_model_needs_a_vocabulary():
    with pytest.raises(ValueError, match="vocab_size is None; a model needs the size of its tokenizer"):
        GPT(dataclasses.replace(SMALL, vocab_size=None))


def test_the_feed_forward_layer_is_four_times_as_wide_or_three_matrices_of_as_many_weights_unless_told():
    assert VARIANTS["gpt2"].feed_forward_width == 96 and VARIANTS["relu2"].feed_forward_width == 40
    assert [dataclasses.replace(SMALL, d_model=width, num_heads=2).feed_forward_width for width in (24, 96, 132)] == [
        64,
        256,
        352,
    ]
    assert GPT(SMALL).blocks[0].feed_forward.gate.weight.shape == (64, 24)


def test_parameters_are_counted_as_by_hand():
    matrices = 2 * (4 * 24 * 24 + 2 * 24 * 96)
    assert GPT(SMALL).num_parameters == 37 * 24 * 2 + matrices
    biases, norms = 2 * (4 * 24 + 96 + 24), 2 * 2 * 2 * 24
    assert GPT(VARIANTS["2017"]).num_parameters == 37 * 24 + matrices + biases + norms  # no final norm
    assert GPT(VARIANTS["gpt2"]).num_parameters == 37 * 24 + 16 * 24 + matrices + biases + norms + 2 * 24
