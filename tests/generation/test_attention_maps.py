"""Attention maps: the model's own weights, visible tokens, and the picture."""

import re

import matplotlib.image
import numpy as np
import pytest
import torch
from helpers import VARIANTS, randomised

from engine.data.tokenizer import CharTokenizer, named_tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.generation.attention_maps import attention_maps, draw_attention, token_label

BRIGHT = np.array([0.993, 0.906, 0.144])  # viridis of 1
DARK = np.array([0.267, 0.005, 0.329])  # and of 0


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_maps_are_the_weights_that_the_model_uses(name):
    model = randomised(VARIANTS[name])
    tokens = torch.randint(37, (10,))
    maps = attention_maps(model, tokens)
    assert maps.shape == (2, model.config.num_heads, 10, 10)
    torch.testing.assert_close(maps.sum(dim=-1), torch.ones(maps.shape[:3]))
    assert maps.triu(1).abs().max() == 0
    rotation = model.rotation(0, 10)
    x = model.embed(tokens[None])
    for index, block in enumerate(model.blocks):  # a layer's output from its maps
        attention_input = x if block.post_norm else block.attention_norm(x)
        attention = block.attention
        for head, module in enumerate(attention.heads):
            output = module(attention_input, rotation)[0]
            # Alone, a position attends to itself: the output is its value.
            single = model.rotation(0, 1)
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


# The picture.


def pixels(path) -> np.ndarray:
    """Red, green and blue of a picture, each 0 to 1: (height, width, 3)."""
    return matplotlib.image.imread(path)[..., :3]


def has_color(picture: np.ndarray, color: np.ndarray) -> np.ndarray:
    """Where a picture has a color, (height, width)."""
    return np.abs(picture - color).max(axis=-1) < 0.02


def runs(flags: np.ndarray) -> list[slice]:
    """The ranges in which flags are set, without gaps of more than 3."""
    indices = np.nonzero(flags)[0]
    pieces = np.split(indices, np.flatnonzero(np.diff(indices) > 3) + 1)
    return [slice(piece[0], piece[-1] + 1) for piece in pieces if len(piece) > 40]


def cells_of_maps(path, length: int) -> list[np.ndarray]:
    """The colors in the middle of each cell of each map, (T, T, 3), in reading order."""
    picture = pixels(path)
    is_map = has_color(picture, DARK) | has_color(picture, BRIGHT)
    cells = []
    for rows in runs(is_map.sum(axis=1) > 15):
        for columns in runs(is_map[rows].any(axis=0)):
            sides = [np.linspace(s.start, s.stop - 1, 2 * length + 1) for s in (rows, columns)]
            middles = [side.round().astype(int)[1::2] for side in sides]
            cells.append(picture[np.ix_(*middles)])
    return cells


def identity_maps(length: int, layers: int = 1, heads: int = 1) -> np.ndarray:
    """Each position attends to itself alone: (L, H, T, T)."""
    return np.broadcast_to(np.eye(length, dtype=np.float32), (layers, heads, length, length)).copy()


def test_a_map_is_bright_where_the_weights_are_and_blank_above_the_diagonal(tmp_path):
    draw_attention(identity_maps(6), list("abcdef"), tmp_path / "a.png")
    (cells,) = cells_of_maps(tmp_path / "a.png", 6)
    assert (has_color(cells, BRIGHT) == np.eye(6, dtype=bool)).all()
    assert (has_color(cells, DARK) == np.tri(6, k=-1, dtype=bool)).all()
    assert (cells[np.triu_indices(6, 1)] == 1).all()


@pytest.mark.parametrize(("layer", "num_maps"), [(None, 6), (0, 3), (1, 3)])
def test_all_layers_are_a_grid_and_one_layer_is_its_heads(tmp_path, layer, num_maps):
    maps = identity_maps(6, layers=2, heads=3)
    maps[1, 2] = 0
    maps[1, 2, :, 0] = 1  # the last head of the last layer looks at the first token
    draw_attention(maps, list("abcdef"), tmp_path / "a.png", layer)
    looks_at_first = [bool(has_color(cells, BRIGHT)[:, 0].all()) for cells in cells_of_maps(tmp_path / "a.png", 6)]
    assert looks_at_first == [False] * (num_maps - 1) + [layer != 0]


def test_any_token_can_be_a_label_of_a_map_of_any_size(tmp_path):
    labels = ["$", "$x_", "\\frac", "\n", "漢", "🚀", "", "�", "<|endoftext|>", "^{"]
    for length in (1, 10):
        draw_attention(identity_maps(length), labels[:length], tmp_path / "a.png")
        assert has_color(pixels(tmp_path / "a.png"), BRIGHT).sum() > 500
    draw_attention(identity_maps(100, layers=18), ["$x_"] * 100, tmp_path / "a.png")
    width, height = np.frombuffer((tmp_path / "a.png").read_bytes()[16:24], ">u4")  # PNG's header
    assert 200 < width < 500 and 4000 < height < 5000
