"""The heads of a model: their weights over a sequence, and labels of its tokens."""

import base64
import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from engine.data.dataset import Dataset
from engine.data.split import token_ids
from engine.data.tokenizer import Tokenizer
from engine.generation.samples import read_lines
from model import GPT, Block

SPACE_SYMBOLS = {" ": "·", "\n": "⏎", "\t": "⇥"}
ATTENTION_TOKENS = 64
NUM_ATTENTION_TEXTS = 32  # of which one is chosen
MAX_ATTENTION_BYTES = 1_000_000  # before base64
MAX_CHARACTER_TOKENS = 4  # each is a byte or more of UTF-8


@torch.no_grad()
def attention_maps(model: GPT, tokens: Tensor) -> Tensor:
    """Compute the weights of every head of every layer: (T,) ids → (L, H, T, T)."""
    positions = torch.arange(len(tokens), device=tokens.device)
    x = model.embed(tokens[None], positions)
    rotation = model.rotation(positions)
    maps = []
    for block in cast(Iterable[Block], model.blocks):
        attention_input = x if block.post_norm else block.attention_norm(x)
        heads = block.attention.heads_with_shared()
        weights = [head.attention(attention_input, rotation, *shared)[0] for head, *shared in heads]
        maps.append(torch.stack(weights))
        x = block(x, rotation)
    return torch.stack(maps)


def encode_triangles(maps: Tensor) -> str:
    """Encode the lower triangles of maps (…, T, T), row by row, as base64.

    A byte b is the weight (b / 255)², so that small weights keep their differences.
    """
    rows, columns = torch.tril_indices(*maps.shape[-2:])
    levels = maps[..., rows, columns].float().nan_to_num().clamp(0, 1).sqrt() * 255
    return base64.b64encode(levels.round().byte().cpu().numpy().tobytes()).decode()


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
    """If the last tokens are the bytes of one character, return how many and the character."""
    for count in range(1, min(len(ids), MAX_CHARACTER_TOKENS) + 1):
        with contextlib.suppress(KeyError, IndexError, ValueError):  # not UTF-8, or unused
            is_character = len(tokenizer.decode_bytes(ids[-count:]).decode()) == 1
            is_shared = is_character and count > 1
            return (count, token_label(tokenizer, *ids[-count:])) if is_shared else None
    return None


def choose_attention_text(data: Dataset, num_tokens: int) -> list[int]:
    """Return ids of validation text that shows what heads do: varied tokens that come again."""
    examples = itertools.islice(data.val.examples(), NUM_ATTENTION_TEXTS)
    texts = [token_ids(example).tolist() for example in examples]
    texts = texts or read_lines(data, NUM_ATTENTION_TEXTS, num_tokens)
    texts = [ids[:num_tokens] for ids in texts]
    return max(texts, key=lambda ids: (len(ids) - len(set(ids))) * len(set(ids)))


def compute_attention(
    model: GPT, data: Dataset, max_bytes: int = MAX_ATTENTION_BYTES
) -> dict[str, Any]:
    """Compute attention maps of validation text for the page.

    The more heads there are, the shorter is the text: maps have at most max_bytes. Fewer bytes cut
    the text, and do not choose another.
    """
    config = model.config

    def count_tokens(num_bytes: int) -> int:
        num_tokens = math.isqrt(2 * num_bytes // (config.num_layers * config.num_heads)) - 1
        return max(2, min(num_tokens, ATTENTION_TOKENS, config.context_length))

    ids = choose_attention_text(data, count_tokens(MAX_ATTENTION_BYTES))[: count_tokens(max_bytes)]
    device = next(model.parameters()).device
    maps = attention_maps(model, torch.tensor(ids, device=device)).float().cpu()
    return {
        "ids": ids,
        "texts": [data.tokenizer.decode([token]) for token in ids],
        "labels": [token_label(data.tokenizer, token) for token in ids],
        "shared": [shared_character(data.tokenizer, ids[: end + 1]) for end in range(len(ids))],
        "layers": config.num_layers,
        "heads": config.num_heads,
        "weights": encode_triangles(maps),
    }
