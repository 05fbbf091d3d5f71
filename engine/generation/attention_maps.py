"""Attention maps: the weights of every head over a sequence, and their picture."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from engine.data.tokenizer import Tokenizer
from engine.generation.pictures import save_figure
from model import GPT, Block, Head

SPACE_SYMBOLS = {" ": "·", "\n": "⏎", "\t": "⇥"}
MAX_PICTURE_INCHES = 40
MIN_MAP_INCHES = 2.2
INCHES_PER_TOKEN = 0.17
MIN_INCHES_PER_LABEL = 0.14
MAX_CHARACTER_TOKENS = 8  # of the characters that share tokens


@torch.no_grad()
def attention_by_layer(model: GPT, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the weights of each layer's heads over one sequence: (T,) ids → L times (H, T, T)."""
    positions = torch.arange(len(tokens), device=tokens.device)
    x = model.embed(tokens[None], positions)
    rotation = model.rotation(positions)
    for block in cast(Iterable[Block], model.blocks):
        attention_input = x if block.post_norm else block.attention_norm(x)
        heads = cast(Iterable[Head], block.attention.heads)
        yield torch.stack([head.attention(attention_input, rotation)[0] for head in heads])
        x = block(x, rotation)


def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """Compute the weights of every head of every layer: (T,) ids → (L, H, T, T)."""
    return torch.stack([*attention_by_layer(model, tokens)])


def token_label(tokenizer: Tokenizer, *tokens: int) -> str:
    """Return tokens as visible text: space as ``·``, newline as ``⏎``, bytes as ``⟨e2 82⟩``."""
    try:
        text = tokenizer.decode_bytes(tokens).decode()
    except UnicodeDecodeError as error:
        return f"⟨{error.object.hex(' ')}⟩"
    except (KeyError, IndexError, ValueError):  # the model's vocabulary may have more ids
        return f"⟨unused {tokens[0]}⟩"
    return "".join(SPACE_SYMBOLS.get(c) or (c if c.isprintable() else repr(c)[1:-1]) for c in text)


def shared_character(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[int, str] | None:
    """Return the number of last tokens that are text only together, and that text.

    None if the last token is text by itself, or does not complete a character.
    """
    for count in range(1, min(len(ids), MAX_CHARACTER_TOKENS) + 1):
        with contextlib.suppress(KeyError, IndexError, ValueError):  # not UTF-8, or unused
            tokenizer.decode_bytes(ids[-count:]).decode()
            return (count, token_label(tokenizer, *ids[-count:])) if count > 1 else None
    return None


def token_labels(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the tokens of a text as visible text; of a shared character, as ``é ⟨c3⟩``."""
    labels = [token_label(tokenizer, token) for token in ids]
    for end in range(1, len(ids) + 1):
        count, text = shared_character(tokenizer, ids[:end]) or (0, "")
        for index in range(end - count, end):
            labels[index] = f"{text} {labels[index]}"
    return labels


def draw_attention(
    maps: np.ndarray, labels: Sequence[str], path: Path, layer: int | None = None
) -> None:
    """Draw attention maps (L, H, T, T) as a PNG: the heads of one layer, or all in a grid.

    A row of a map is a query's token, and a column a key's; the weights of a row sum to 1.
    """
    from matplotlib.figure import Figure  # here, because it takes half a second

    num_layers, num_heads, length, _ = maps.shape
    layers = range(num_layers) if layer is None else [layer]
    panels = [(i, j) for i in layers for j in range(num_heads)]
    num_columns = num_heads if layer is None else math.ceil(math.sqrt(num_heads))
    num_rows = math.ceil(len(panels) / num_columns)
    side = max(MIN_MAP_INCHES, INCHES_PER_TOKEN * length + 0.8)
    side = min(side, MAX_PICTURE_INCHES / max(num_rows, num_columns))
    ticks = range(0, length, math.ceil(length * MIN_INCHES_PER_LABEL / side))
    tick_labels = [labels[i] for i in ticks]
    figure = Figure(figsize=(side * num_columns, side * num_rows), layout="constrained")
    all_axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for axes in all_axes.flat[len(panels) :]:
        axes.axis("off")
    for axes, (i, j) in zip(all_axes.flat, panels, strict=False):
        weights = np.where(np.tri(length, dtype=bool), maps[i, j], np.nan)
        image = axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {i + 1}, head {j + 1}", fontsize=8)
        # parse_math=False: a token may be "$".
        axes.set_xticks(ticks, tick_labels, rotation=90, fontsize=6, parse_math=False)
        axes.set_yticks(ticks, tick_labels, fontsize=6, parse_math=False)
    label = "attention weight\n(row looks at column)"
    figure.colorbar(image, ax=all_axes, shrink=0.6, label=label)
    save_figure(figure, path)
