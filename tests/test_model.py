"""The model: causality, the list of heads and its definitions, the cache, the loss, initialisation."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model as model_module
from model import GPT, FeedForward, Head, ModelConfig, MultiHeadAttention, rotation_table

SMALL = ModelConfig(vocab_size=37, context_length=16, num_layers=2, num_heads=3, d_model=24)
VARIANTS = {
    "default": SMALL,
    "gpt2": dataclasses.replace(
        SMALL, position="learned", norm="layernorm", activation="gelu", qk_norm=False, tie_embeddings=True, bias=True
    ),
    "2017": dataclasses.replace(
        SMALL,
        position="sinusoidal",
        norm="layernorm",
        norm_placement="post",
        activation="relu",
        qk_norm=False,
        tie_embeddings=True,
        scale_embeddings=True,
        bias=True,
    ),
    "swiglu": dataclasses.replace(SMALL, activation="swiglu", d_ff=40, logit_softcap=15.0),
}


def randomised(config: ModelConfig, seed: int = 0) -> GPT:
    """A model whose every parameter matters: zero-initialised matrices would hide mistakes."""
    torch.manual_seed(seed)
    model = GPT(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.fixture(params=VARIANTS, name="config")
def fixture_config(request) -> ModelConfig:
    return VARIANTS[request.param]


def test_no_position_depends_on_a_later_one(config):
    model = randomised(config)
    tokens = torch.randint(config.vocab_size, (1, 12))
    states = model.embed(tokens).detach().requires_grad_()
    for position in range(12):
        x, rotation = states, None if model.rotation is None else model.rotation[:, :12]
        for block in model.blocks:
            x = block(x, rotation)
        (gradient,) = torch.autograd.grad(model.logits(model.final_norm(x))[0, position].sum(), states)
        reached = gradient[0].abs().sum(dim=-1) > 0
        assert reached[: position + 1].all() and not reached[position + 1 :].any()


def test_joined_heads_equal_the_loop_over_them(config):
    model = randomised(config)
    attention = model.blocks[0].attention
    rotation = None if model.rotation is None else model.rotation[:, :10]
    x = torch.randn(2, 10, config.d_model, requires_grad=True)
    weight = torch.randn(2, 10, config.d_model)
    results = []
    for compute in (attention, attention.loop):
        out = compute(x, rotation)
        results.append([out, *torch.autograd.grad((out * weight).sum(), [x, *attention.parameters()])])
    for joined, looped in zip(*results, strict=True):
        torch.testing.assert_close(joined, looped, rtol=1e-5, atol=1e-5)


def test_attention_equals_torch_multihead_attention():
    config = dataclasses.replace(SMALL, position="learned", qk_norm=False, bias=True)
    torch.manual_seed(0)
    ours, theirs = MultiHeadAttention(config), nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True)
    with torch.no_grad():
        weight, bias = ours.join_heads()
        theirs.in_proj_weight.copy_(weight)
        theirs.in_proj_bias.copy_(bias)
        theirs.out_proj.load_state_dict(ours.projection.state_dict())
    x = torch.randn(2, 10, config.d_model)
    one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
    mask = nn.Transformer.generate_square_subsequent_mask(10)
    mine, other = ours(one, None), theirs(two, two, two, attn_mask=mask, need_weights=False, is_causal=True)[0]
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    torch.manual_seed(1)
    weight = torch.randn_like(mine)
    (mine * weight).sum().backward()
    (other * weight).sum().backward()
    torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-5)
    heads = [getattr(head, part).weight.grad for part in ("query", "key", "value") for head in ours.heads]
    torch.testing.assert_close(torch.cat(heads), theirs.in_proj_weight.grad, rtol=1e-5, atol=1e-5)


def test_a_cache_changes_nothing_however_the_tokens_come(config):
    model = randomised(config)
    tokens = torch.randint(config.vocab_size, (2, 16))
    whole = model(tokens)
    for pieces in ([1] * 16, [7, 1, 1, 5, 2], [16]):
        cache, end = model.new_cache(2), 0
        for size in pieces:
            logits = model(tokens[:, end : end + size], cache=cache)
            end += size
            torch.testing.assert_close(logits[:, -1], whole[:, end - 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_packing_for_decoding_changes_no_value(config, monkeypatch):
    monkeypatch.setattr(model_module, "WORTH_PACKING", 0)
    model = randomised(config)
    tokens = torch.randint(config.vocab_size, (2, 9))
    before = model(tokens)
    model.pack_for_decoding()
    assert isinstance(model.blocks[-1].feed_forward.contract, model_module.PackedLinear)
    torch.testing.assert_close(model(tokens), before, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(tokens, cache=model.new_cache(2))[:, -1], before[:, -1], rtol=1e-4, atol=1e-5)


def test_decoding_joins_the_heads_once(monkeypatch):
    calls = []
    join = MultiHeadAttention.join_heads
    monkeypatch.setattr(MultiHeadAttention, "join_heads", lambda self: calls.append(1) or join(self))
    model = randomised(SMALL)
    cache = model.new_cache(1)
    for token in range(5):
        model(torch.tensor([[token]]), cache=cache)
    assert len(calls) == SMALL.num_layers


def test_plain_attention_equals_the_fused_one():
    inputs = torch.randn(3, 2, 4, 20, 8).requires_grad_()
    fused, plain = F.scaled_dot_product_attention(*inputs, is_causal=True), model_module.plain_attention(*inputs, 0.0)
    torch.testing.assert_close(plain, fused, rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(fused)
    gradients = [torch.autograd.grad((out * weight).sum(), inputs)[0] for out in (fused, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_bfloat16_on_a_cpu_is_close_to_float32(config):
    model = randomised(config)
    tokens, targets = torch.randint(config.vocab_size, (2, 3, 16)).unbind(0)
    exact = model(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens, targets).item() == pytest.approx(exact.item(), rel=0.02)


def test_too_many_tokens_are_refused():
    model = randomised(SMALL)
    with pytest.raises(ValueError, match="17 tokens are more than the 16 that fit"):
        model(torch.zeros(1, 17, dtype=torch.long))
    cache = model.new_cache(1)
    model(torch.zeros(1, 16, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="17 tokens"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)


def test_rope_scores_depend_on_distance_alone():
    rotation = rotation_table(20, 8)
    query, key = torch.randn(2, 1, 8).unbind(0)
    turned_query = model_module.rotate(query.expand(20, 8), rotation)
    turned_key = model_module.rotate(key.expand(20, 8), rotation)
    scores = turned_query @ turned_key.T
    for distance in range(-10, 10):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "relu", "relu2", "swiglu"])
def test_feed_forward_is_what_its_name_says(name):
    layer = FeedForward(dataclasses.replace(SMALL, activation=name))
    nn.init.normal_(layer.contract.weight)
    x = torch.randn(2, 5, 24)
    hidden = layer.expand(x)
    expected = {
        "gelu": lambda: F.gelu(hidden, approximate="tanh"),
        "relu": lambda: hidden.clamp(min=0),
        "relu2": lambda: hidden.clamp(min=0) ** 2,
        "swiglu": lambda: layer.gate(x) * torch.sigmoid(layer.gate(x)) * hidden,
    }[name]()
    torch.testing.assert_close(layer(x), layer.contract(expected))


def test_loss_is_the_mean_cross_entropy_of_the_scored_targets(config):
    model = randomised(config)
    tokens, targets = torch.randint(config.vocab_size, (2, 3, 16)).unbind(0)
    targets[0, :5] = -1
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(model(tokens, targets), expected)


def test_a_large_vocabulary_in_pieces_gives_the_same_loss_and_gradients(config, monkeypatch):
    model = randomised(config)
    tokens, targets = torch.randint(config.vocab_size, (2, 3, 16)).unbind(0)
    results = []
    for limit in (model_module.LOGITS_AT_ONCE, 5 * config.vocab_size):  # pieces of 5 rows, the last of 3
        monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", limit)
        loss = model(tokens, targets)
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for whole, pieced in zip(*results, strict=True):
        torch.testing.assert_close(whole, pieced)


def test_softcap_bounds_logits():
    model = randomised(VARIANTS["swiglu"])
    model.head.weight.data.mul_(100)
    logits = model(torch.randint(37, (1, 16)))
    assert logits.abs().max() <= 15 and logits.abs().max() > 14


def test_first_loss_is_that_of_a_guess(config):
    torch.manual_seed(0)
    model = GPT(config)
    tokens = torch.randint(config.vocab_size, (32, 17))
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_a_parameter_without_a_rule_stops_construction(monkeypatch):
    class Odd(Head):
        def __init__(self, config):
            super().__init__(config)
            self.extra = nn.Linear(2, 2)

    monkeypatch.setattr(model_module, "Head", Odd)
    with pytest.raises(ValueError, match=r"no rule to initialise the parameter blocks\.0\.attention\.heads\.0\.extra"):
        GPT(SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_model 24 does not divide into 5 heads"),
        ({"d_model": 9}, "RoPE turns pairs"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"position": "sinusoidal", "d_model": 21}, "sinusoidal positions come in pairs"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_attention_maps_are_what_the_model_computes(config):
    model = randomised(config)
    tokens = torch.randint(config.vocab_size, (10,))
    maps = model.attention_maps(tokens)
    assert maps.shape == (2, 3, 10, 10)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(2, 3, 10))
    assert maps.triu(1).abs().max() == 0
    # The second layer's output, from its maps and values, is the layer's.
    rotation = None if model.rotation is None else model.rotation[:, :10]
    x = model.blocks[0](model.embed(tokens[None]), rotation)
    block = model.blocks[1]
    seen = x if block.post_norm else block.attention_norm(x)
    mixed = torch.cat([maps[1, i] @ head.value(seen) for i, head in enumerate(block.attention.heads)], dim=-1)
    torch.testing.assert_close(block.attention.projection(mixed), block.attention(seen, rotation), rtol=1e-4, atol=1e-5)


def test_dropout_is_off_in_evaluation_and_on_in_training():
    model = randomised(dataclasses.replace(SMALL, dropout=0.5))
    tokens = torch.randint(37, (2, 16))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
