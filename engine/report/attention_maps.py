"""Attention maps: the weights of every head over a sequence, and labels of its tokens."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from engine.data.tokenizer import Tokenizer
from model import GPT, Block

SPACE_SYMBOLS = {" ": "·", "\n": "⏎", "\t": "⇥"}
MAX_CHARACTER_TOKENS = 8  # of the characters that share tokens


@torch.no_grad()
def attention_by_layer(model: GPT, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the weights of each layer's heads over one sequence: (T,) ids → L times (H, T, T)."""
    positions = torch.arange(len(tokens), device=tokens.device)
    x = model.embed(tokens[None], positions)
    rotation = model.rotation(positions)
    for block in cast(Iterable[Block], model.blocks):
        attention_input = x if block.post_norm else block.attention_norm(x)
        heads = block.attention.heads_with_shared()
        maps = [head.attention(attention_input, rotation, *shared)[0] for head, *shared in heads]
        yield torch.stack(maps)
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
    """If the last tokens are bytes of one character, return how many and the character.

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
