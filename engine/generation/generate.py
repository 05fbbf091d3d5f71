"""Generation: token by token, for prompts of one length, or of many in batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.data.tokenizer import Tokenizer
from engine.generation.kv_cache import new_caches
from engine.generation.sampling import SamplingOptions, sample_token
from engine.generation.text_stream import TextStream
from model import GPT


def window_start(length: int, context_length: int) -> int:
    """The first of ``length`` tokens that predict the next one.

    The window grows to context_length, then drops its older half: a cache serves for the other.
    """
    stride = (context_length + 1) // 2
    num_excess = max(0, length - context_length)
    return math.ceil(num_excess / stride) * stride


class Sequences:
    """Token sequences of one length that grow together, and the logits of their next tokens."""

    def __init__(
        self,
        model: GPT,
        tokens: Tensor,
        max_length: int,
        banned: Sequence[int] = (),
        use_cache: bool = True,
    ):
        """Start with tokens (B, T), T ≥ 0, to grow up to max_length. Banned ids get logits of -inf.

        The model may be any GPT; the copy of engine.nn.inference.for_decoding is faster.
        """
        self.model = model
        self.tokens = tokens  # those from position ``start`` on
        self.start = 0
        self.banned = torch.tensor(list(banned), dtype=torch.long, device=tokens.device)
        self.caches = new_caches(model, len(tokens), max_length) if use_cache else []

    @property
    def length(self) -> int:
        return self.start + self.tokens.shape[1]

    def append(self, tokens: Tensor) -> None:
        """Extend the sequences by tokens (B, T)."""
        self.tokens = torch.cat((self.tokens, tokens), dim=1)

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, (N,) indices, in this order; an index may be repeated."""
        self.tokens = self.tokens[rows]
        for cache in self.caches:
            cache.select(rows)

    def logits(self) -> Tensor:
        """Compute the logits of the next token, (B, V). Call it once for each length."""
        start = window_start(self.length, self.model.config.context_length)
        if start != self.start:
            self.tokens = self.tokens[:, start - self.start :]
            self.start = start
            for cache in self.caches:
                cache.clear()
        new_tokens = self.tokens[:, self.caches[0].filled if self.caches else 0 :]
        was_training = self.model.training
        if was_training:
            self.model.eval()
        logits = self.model(new_tokens, caches=self.caches)[:, -1]
        if was_training:
            self.model.train()
        return logits.index_fill(-1, self.banned, -torch.inf) if len(self.banned) else logits


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    banned: Sequence[int] = (),
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Continue prompts (B, T), or one (T,), T ≥ 1: yields the next ids (B,), max_new_tokens times.

    Banned ids are never chosen. Decoding without the cache is the slow definition, for tests.
    """
    generator = torch.Generator(prompt.device).manual_seed(seed)
    max_length = prompt.shape[-1] + max_new_tokens
    tokens = prompt.view(-1, prompt.shape[-1])
    sequences = Sequences(model, tokens, max_length, banned, use_cache)
    for _ in range(max_new_tokens):
        next_ids = sample_token(sequences.logits(), generator, temperature, top_k, top_p)
        sequences.append(next_ids[:, None])
        yield next_ids


def initial_tokens(tokenizer: Tokenizer, num_documents: int) -> list[int]:
    """Return ids for an empty prompt: the end of text, if training saw several documents end.

    Otherwise a newline, or the first id if the tokenizer has none.
    """
    if tokenizer.end_of_text is not None and num_documents > 1:
        return [tokenizer.end_of_text]
    try:
        return tokenizer.encode("\n").tolist()
    except UserError:
        return [0]


def banned_tokens(tokenizer: Tokenizer, model: GPT, ends: Sequence[int] = ()) -> list[int]:
    """List the model's ids that are neither text nor an end of it."""
    padding = range(tokenizer.vocab_size, model.config.vocab_size or 0)
    return [token for token in [*tokenizer.unused_ids(), *padding] if token not in ends]


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    ends: Sequence[int] = (),
    use_cache: bool = True,
    **options: Unpack[SamplingOptions],
) -> Iterator[Tensor]:
    """Continue prompts of one length by :func:`generate`, with ids of text or ends of it."""
    prompt = torch.tensor(prompts, device=next(model.parameters()).device)
    banned = banned_tokens(tokenizer, model, ends)
    return generate(model, prompt, max_new_tokens, banned=banned, use_cache=use_cache, **options)


@dataclass
class Completion:
    """A prompt of a batch, and the text after it."""

    index: int
    prompt: list[int]
    max_new_tokens: int
    stream: TextStream
    text: str = ""
    num_tokens: int = 0

    def step(self, position: int, drawn: int) -> int:
        """Return the token at a position: the prompt's, or after it the drawn one, as text."""
        if position < len(self.prompt):
            return self.prompt[position]
        if not self.stream.ended:
            self.text += self.stream.push(drawn)
            self.num_tokens += 1
            if self.num_tokens == self.max_new_tokens:
                self.text += self.stream.end()
        return drawn


@torch.inference_mode()
def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[list[int], int]],
    batch_size: int,
    stops: Sequence[str] = (),
    ends: Sequence[int] = (),
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Iterator[tuple[int, str, int]]:
    """Continue prompts, each its ids (at least one) and its max_new_tokens, in batches.

    Yields (index of the prompt, text, number of tokens) as texts end. Prompts of similar length
    share a batch. At temperature 0 a text equals that of :func:`generate_text` for its prompt alone.
    """
    device = next(model.parameters()).device
    rows = []
    for index, (prompt, max_new_tokens) in enumerate(prompts):
        start = window_start(len(prompt), model.config.context_length)  # earlier tokens are not seen
        stream = TextStream(tokenizer, stops, ends, prompt)
        rows.append(Completion(index, prompt[start:], max_new_tokens, stream))
    rows.sort(key=lambda row: len(row.prompt))
    generator = torch.Generator(device).manual_seed(seed)
    sample = partial(sample_token, generator=generator, temperature=temperature, top_k=top_k, top_p=top_p)
    banned = banned_tokens(tokenizer, model, ends)
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        tokens = torch.empty(len(batch), 0, dtype=torch.long, device=device)
        max_length = max(len(row.prompt) + row.max_new_tokens for row in batch)
        for row in _complete_batch(Sequences(model, tokens, max_length, banned), batch, sample):
            yield row.index, row.text, row.num_tokens


def _complete_batch(
    sequences: Sequences, rows: list[Completion], sample: Callable[[Tensor], Tensor]
) -> Iterator[Completion]:
    """Yield each row when its text has ended.

    All rows start at position 0, so that they need no masks. While a row's prompt continues, its
    tokens replace the drawn ones, as in the code of Touvron et al. 2023.
    """
    while active := [row for row in rows if not row.stream.ended]:
        shortest = min(len(row.prompt) for row in active)
        if 2 * len(active) <= len(rows) or shortest > sequences.length:
            indices = [index for index, row in enumerate(rows) if not row.stream.ended]
            sequences.select(sequences.tokens.new_tensor(indices))
            rows = active
        position = sequences.length
        if shortest > position:
            pieces = [row.prompt[position:shortest] for row in rows]
            sequences.append(sequences.tokens.new_tensor(pieces))
            position = shortest
        drawn = sample(sequences.logits()).tolist()
        tokens = [row.step(position, token) for row, token in zip(rows, drawn, strict=True)]
        yield from [row for row in active if row.stream.ended]
        sequences.append(sequences.tokens.new_tensor(tokens)[:, None])
