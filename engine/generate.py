"""Autoregressive decoding: the cache of keys and values, the choice of the next token, the loop, tokens → text."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.tokenizer import Tokenizer

COLDEST = 1e-4  # a temperature below it could only choose the most likely token, were its quotients finite


class Cache:
    """The keys and values of one block's attention at the positions so far, so that a new token costs only its own."""

    def __init__(self, batch_size: int, num_heads: int, length: int, head_dim: int, like: Tensor):
        """Empty, with room for length positions; ``like`` is a tensor of the dtype and device."""
        self.keys_values = like.new_empty(2, batch_size, num_heads, length, head_dim)  # (2, B, H, length, K)
        self.length = length
        self.filled = 0  # positions it holds

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, K) keys and values of the next T positions; return all so far."""
        start, self.filled = self.filled, self.filled + key.shape[2]
        self.keys_values[0, :, :, start : self.filled] = key
        self.keys_values[1, :, :, start : self.filled] = value
        return self.keys_values[0, :, :, : self.filled], self.keys_values[1, :, :, : self.filled]


def new_caches(model: torch.nn.Module, batch_size: int) -> list[Cache]:
    """An empty cache for each block of the model, with room for its whole context."""
    c, like = model.config, next(model.parameters())
    return [Cache(batch_size, c.num_heads, c.context_length, c.head_dim, like) for _ in range(c.num_layers)]


def window_start(length: int, context_length: int) -> int:
    """The first of ``length`` tokens that the next one is predicted from, whatever the kind of positions.

    The window grows to context_length, then leaves its older half behind: a cache serves for half a window.
    """
    hop = (context_length + 1) // 2
    return -(-max(0, length - context_length) // hop) * hop


def choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float, generator: torch.Generator) -> Tensor:
    """Draw token ids (B,) from logits (B, V), at temperature 0 the most likely.

    top_k keeps the k most likely (None: all); top_p the fewest that together have probability p (Holtzman et al. 2020).
    """
    if not (logits < torch.inf).all():  # nor NaN
        raise ValueError("the model's logits are not finite: it diverged in training; try an earlier checkpoint")
    if temperature < COLDEST:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    values, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))  # in falling order
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0)
    return ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]


@torch.inference_mode()
def generate(
    model: torch.nn.Module,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    never: Sequence[int] = (),
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Continue prompts (B, T), or one (T,), T ≥ 1, token by token: yields (B,) ids, max_new_tokens times.

    The model is one that :func:`engine.kernels.for_decoding` returned, or any, slower; one that is training is asked as
    it predicts, and left as it was. ``never`` are ids not to choose. Without the cache the same tokens come, slower
    still: the definition for tests.
    """
    prompt = prompt.view(-1, prompt.shape[-1])
    generator = torch.Generator(prompt.device).manual_seed(seed)
    banned = torch.tensor(list(never), dtype=torch.long, device=prompt.device)
    caches = new_caches(model, len(prompt)) if use_cache else []
    seen, start, training = prompt, 0, model.training  # the tokens from position start on
    for length in range(prompt.shape[1], prompt.shape[1] + max_new_tokens):
        if (first := window_start(length, model.config.context_length)) != start:
            seen, start = seen[:, first - start :], first
            for cache in caches:
                cache.filled = 0
        if training:
            model.eval()
        logits = model(seen[:, caches[0].filled if caches else 0 :], caches=caches)[:, -1]
        if training:
            model.train()
        if never:
            logits = logits.index_fill(-1, banned, -torch.inf)
        chosen = choose(logits, temperature, top_k, top_p, generator)
        seen = torch.cat((seen, chosen[:, None]), dim=1)
        yield chosen


def opening(tokenizer: Tokenizer, documents: int) -> list[int]:
    """Token ids to begin from nothing: what comes before a document, if training saw several end, else a new line."""
    if tokenizer.end_of_text is not None and documents > 1:
        return [tokenizer.end_of_text]
    try:
        return tokenizer.encode("\n").tolist()
    except ValueError:  # characters without a new line: any will do
        return [0]


def generate_text(
    model: torch.nn.Module, tokenizer: Tokenizer, prompts: Sequence[list[int]], max_new_tokens: int, **choice: Any
) -> Iterator[Tensor]:
    """Continue prompts of one length with ids that stand for text; see :func:`generate`."""
    never = [*tokenizer.unused_ids(), *range(tokenizer.vocab_size, model.config.vocab_size)]
    prompt = torch.tensor(prompts, device=next(model.parameters()).device)
    return generate(model, prompt, max_new_tokens, never=never, **choice)


class TextStream:
    """One sequence's tokens → text as soon as it is sure: no character cut in two, nothing from a stop text on."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        self.tokenizer, self.stops = tokenizer, stops
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # might be the beginning of a stop text
        self.ended = False

    def push(self, token: int) -> str:
        """The text that is sure now that this token came."""
        if self.ended:
            return ""
        if token == self.tokenizer.end_of_text:
            return self.end()
        self.held += self.decoder.decode(self.tokenizer.decode_bytes([token]))
        found = [start for start in (self.held.find(stop) for stop in self.stops) if start >= 0]
        if found:
            self.ended = True
            return self.held[: min(found)]
        begun = [n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n])]
        sure = len(self.held) - max(begun, default=0)
        text, self.held = self.held[:sure], self.held[sure:]
        return text

    def end(self) -> str:
        """The text still held back, at the end."""
        rest = "" if self.ended else self.held + self.decoder.decode(b"", final=True)
        self.ended = True
        return rest


def texts(tokens: Iterator[Tensor], tokenizer: Tokenizer, rows: int, stops: Sequence[str] = ()) -> Iterator[list[str]]:
    """What each of so many sequences' text gains with each of their tokens (rows,), until all have ended."""
    streams = [TextStream(tokenizer, stops) for _ in range(rows)]
    for ids in tokens:
        yield [text.push(token) for text, token in zip(streams, ids.tolist(), strict=True)]
        if all(text.ended for text in streams):
            break
    yield [text.end() for text in streams]
