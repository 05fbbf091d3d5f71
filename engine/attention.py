"""Who attends to whom: each head's weights over a sequence."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from engine.tokenizer import Tokenizer


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


def token_label(tokenizer: Tokenizer, token: int) -> str:
    """A token's text; the bytes of one that is a part of a character, as ⟨e2 82⟩."""
    content = tokenizer.decode_bytes([token])
    try:
        return content.decode()
    except UnicodeDecodeError:
        return f"⟨{content.hex(' ')}⟩"
