"""Attention maps: the model's own weights, visible tokens, and the picture."""

import re

import matplotlib.image
import numpy as np
import pytest
import torch
from helpers import VARIANTS, random_model

import engine.generation.attention_maps as attention_maps_module
from engine.data.tokenizer import CharTokenizer, named_tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.generation.attention_maps import (
    attention_maps,
    draw_attention,
    shared_character,
    token_label,
    token_labels,
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
    rotation = model.rotation(positions)
    x = model.embed(tokens[None], positions)
    for index, block in enumerate(model.blocks):  # a layer's output from its maps
        attention_input = x if block.post_norm else block.attention_norm(x)
        attention = block.attention
        for head, module in enumerate(attention.heads):
            output = module(attention_input, rotation)[0]
            # Alone, a position attends to itself: the output is its value.
            single = model.rotation(torch.arange(1))
            values = [module(attention_input[:, t : t + 1], single)[0] for t in range(10)]
            torch.testing.assert_close(maps[index, head] @ torch.cat(values), output)
        mixed = torch.cat([head(attention_input, rotation) for head in attention.heads], dim=-1)
        expected = attention(attention_input, rotation)
        torch.testing.assert_close(attention.projection(mixed), expected, rtol=1e-4, atol=1e-5)
        x = block(x, rotation)


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
    ("text", "labels", "shared"),
    [
        (b"a\xe6\x98\xa5", ["a", "春 ⟨e6⟩", "春 ⟨98⟩", "春 ⟨a5⟩"], {3: (3, "春")}),
        (b"\xc3\xa9\xc3\xa8", ["é ⟨c3⟩", "é ⟨a9⟩", "è ⟨c3⟩", "è ⟨a8⟩"], {1: (2, "é"), 3: (2, "è")}),
        (b"\xa5\xc3\xa9", ["⟨a5⟩", "é ⟨c3⟩", "é ⟨a9⟩"], {2: (2, "é")}),  # begins inside of one
        (b"\xf0\x9fa\xc3", ["⟨f0⟩", "⟨9f⟩", "a", "⟨c3⟩"], {}),  # never complete
        (b"", [], {}),
    ],
)
def test_tokens_that_share_a_character_have_it_in_their_labels(text, labels, shared):
    tokenizer = named_tokenizer("byte")
    assert token_labels(tokenizer, [*text]) == labels
    prefixes = (text[: end + 1] for end in range(len(text)))
    expected = [shared.get(index) for index in range(len(text))]
    assert [shared_character(tokenizer, [*prefix]) for prefix in prefixes] == expected


def test_characters_are_shared_by_tokens_that_begin_or_end_inside_of_them(tiktoken_cache):
    tokenizer = named_tokenizer("gpt2")
    for text in ("日本語 한국어 🚀👩🏽 مرحبا", "a\n 漢"):
        ids = tokenizer.encode(text).tolist()
        visible = ""
        for end in range(1, len(ids) + 1):
            count, characters = shared_character(tokenizer, ids[:end]) or (0, "")
            label = token_label(tokenizer, ids[end - 1])
            visible += characters if count else label if not label.startswith("⟨") else ""
        assert visible == text.replace(" ", "·").replace("\n", "⏎")
    assert shared_character(tokenizer, [*ids, 10**6]) is None


# The picture.


@pytest.mark.parametrize(("layer", "first"), [(None, 0), (0, 0), (1, 3)])
def test_a_panel_has_the_weights_of_a_head_and_none_above_the_diagonal(monkeypatch, layer, first):
    figures = []
    monkeypatch.setattr(
        attention_maps_module, "save_figure", lambda figure, path: figures.append(figure)
    )
    maps = np.random.default_rng(0).random((2, 3, 6, 6))
    draw_attention(maps, list("abcdef"), None, layer)
    *panels, color_bar = figures[0].axes
    panels = [axes for axes in panels if axes.images]
    assert len(panels) == (6 if layer is None else 3) and "weight" in color_bar.get_ylabel()
    for axes, expected in zip(panels, maps.reshape(6, 6, 6)[first:], strict=False):
        weights = axes.images[0].get_array()
        assert (weights.mask == ~np.tri(6, dtype=bool)).all()
        assert (weights.data[~weights.mask] == expected[~weights.mask]).all()
        assert [label.get_text() for label in axes.get_xticklabels()] == list("abcdef")
        assert axes.images[0].get_clim() == (0, 1)
    assert f"layer {2 if layer != 0 else 1}, head 3" in panels[-1].get_title()


@pytest.mark.parametrize(("num_layers", "length"), [(1, 1), (1, 10), (18, 100)])
def test_any_token_can_be_a_label_of_a_map_of_any_size(tmp_path, num_layers, length):
    labels = ["$", "$x_", "\\frac", "\n", "漢", "🚀", "", "�", "<|endoftext|>", "^{"] * 10
    maps = np.broadcast_to(np.eye(length), (num_layers, 1, length, length))
    draw_attention(maps, labels[:length], tmp_path / "a.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "a.png").shape
    assert width < 500 and 200 < height / num_layers < 500
