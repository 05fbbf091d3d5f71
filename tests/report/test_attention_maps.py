"""Attention maps: the model's own weights, and visible tokens."""

import base64
import re

import numpy as np
import pytest
import torch
from helpers import VARIANTS, random_model

from engine.data.tokenizer import CharTokenizer, named_tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.report.attention_maps import (
    attention_maps,
    encode_triangles,
    shared_character,
    token_label,
)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_maps_are_the_weights_that_the_model_uses(name):
    model = random_model(VARIANTS[name])
    tokens = torch.randint(37, (10,))
    maps = attention_maps(model, tokens)
    assert maps.shape == (2, model.config.num_heads, 10, 10)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(maps.shape[:3]))
    assert maps.triu(1).abs().max() == 0
    positions = torch.arange(10)
    rotation, first_rotation = (model.rotation(positions[:count]) for count in (10, 1))
    x = model.embed(tokens[None], positions)
    for layer_maps, block in zip(maps, model.blocks, strict=True):  # a layer's output from its maps
        attention_input = x if block.post_norm else block.attention_norm(x)
        alone = attention_input.transpose(0, 1)  # attends to itself: a head's output is its value
        heads = block.attention.heads_with_shared()
        values = [head(alone, first_rotation, *shared)[:, 0] for head, *shared in heads]
        mixed = torch.cat([*(layer_maps @ torch.stack(values))], dim=-1)
        expected = block.attention(attention_input, rotation)[0]
        torch.testing.assert_close(block.attention.projection(mixed), expected)
        x = block(x, rotation)


def test_triangles_are_bytes_of_the_square_roots_row_by_row():
    maps = torch.rand(2, 3, 5, 5)
    levels = np.frombuffer(base64.b64decode(encode_triangles(maps)), np.uint8)
    rows, columns = np.tril_indices(5)
    np.testing.assert_allclose((levels / 255) ** 2, maps[..., rows, columns].ravel(), atol=0.004)


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_every_token_has_a_visible_label(kind, code):
    text = "é €\n\t\0漢🚀\u200b"
    if kind == "char":
        tokenizer = CharTokenizer("".join(sorted(set(text))))
    else:
        tokenizer = train_bpe_tokenizer([code], 300) if kind == "bpe" else named_tokenizer(kind)
    labels = "".join(token_label(tokenizer, token) for token in tokenizer.encode(text).tolist())
    parts = re.findall("⟨(.*?)⟩", labels)  # of characters
    assert re.sub("⟨(.*?)⟩", "", labels).isprintable() and r"\x00" in labels
    assert all(space in labels for space in "·⏎⇥")
    assert bool(parts) == (kind != "char")
    assert all(re.fullmatch("[0-9a-f]{2}( [0-9a-f]{2})*", part) for part in parts)
    unused = tokenizer.vocab_size + 5
    assert token_label(tokenizer, unused) == f"⟨unused {unused}⟩"


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        (b"a\xe6\x98\xa5", {3: (3, "春")}),
        (b"\xc3\xa9\xc3\xa8", {1: (2, "é"), 3: (2, "è")}),
        (b"\xa5\xc3\xa9", {2: (2, "é")}),  # begins inside of one
        (b"\xf0\x9fa\xc3", {}),  # never complete
        (b"\r\n", {}),
    ],
)
def test_tokens_that_share_a_character_have_it(text, shared):
    tokenizer = named_tokenizer("byte")
    prefixes = (text[: end + 1] for end in range(len(text)))
    expected = [shared.get(index) for index in range(len(text))]
    assert [shared_character(tokenizer, [*prefix]) for prefix in prefixes] == expected
