"""Who attends to whom: each head's weights over a sequence."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.data.tokenizer import Tokenizer

STAND_INS = {" ": "·", "\n": "⏎", "\t": "⇥"}


@torch.no_grad()
def attention_by_layer(model: Any, tokens: Tensor) -> Iterator[Tensor]:
    """Every head's attention over one sequence, computed by the heads themselves: (T,) ids → (H, T, T), L times."""
    x, rotation = model.embed(tokens[None]), model.rotation(0, len(tokens))
    for block in model.blocks:
        seen = x if block.post_norm else block.attention_norm(x)
        yield torch.stack([head.attention(seen, rotation)[0] for head in block.attention.heads])
        x = block(x, rotation)


def attention_maps(model: Any, tokens: Tensor) -> Tensor:
    """That of all layers: (T,) ids → (L, H, T, T)."""
    return torch.stack([*attention_by_layer(model, tokens)])


def visible(tokenizer: Tokenizer, token: int) -> str:
    """A token for the eye: · is a space, ⏎ a line's end, ⇥ a tab, ⟨e2 82⟩ bytes that are part of a character."""
    try:
        content = tokenizer.decode_bytes([token])
    except (KeyError, IndexError, ValueError):  # of a model with more tokens than its tokenizer
        return f"⟨unused {token}⟩"
    try:
        return "".join(STAND_INS.get(c) or (c if c.isprintable() else repr(c)[1:-1]) for c in content.decode())
    except UnicodeDecodeError:
        return f"⟨{content.hex(' ')}⟩"
