"""Generation token by token, for prompts of equal length or, in batches, of any lengths."""

import math
from collections.abc import Container, Iterator, Sequence
from typing import Unpack

import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.data.tokenizer import Tokenizer
from engine.generation.kv_cache import new_caches
from engine.generation.sampling import FilterOptions, row_seeds, sample_token
from engine.generation.text_stream import TextStream
from model import GPT


def window_start(length: int, context_length: int) -> int:
    """Return where the context of the next token starts in ``length`` tokens.

    The context grows to context_length, then drops its older half and grows again, so that a cache
    stays valid meanwhile.
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

        The model must be in evaluation mode; engine.nn.inference.build_decoder makes it faster.
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
        """Keep the sequences of these indices (N,), in this order; an index may be repeated."""
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
        num_cached = self.caches[0].filled if self.caches else 0
        logits = self.model(self.tokens[:, num_cached:], caches=self.caches)[:, -1]
        return logits.index_fill(-1, self.banned, -torch.inf) if len(self.banned) else logits


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Tensor,
    max_new_tokens: int,
    seed: int = 0,
    banned: Sequence[int] = (),
    use_cache: bool = True,
    repetition_penalty: float = 1.0,
    **filters: Unpack[FilterOptions],
) -> Iterator[Tensor]:
    """Continue prompts (B, T) or a prompt (T,), T ≥ 1: yield next ids (B,), max_new_tokens times.

    Banned ids are never chosen. Decoding without a cache is slow, and defines the result.
    """
    max_length = prompt.shape[-1] + max_new_tokens
    tokens = prompt.view(-1, prompt.shape[-1])
    sequences = Sequences(model, tokens, max_length, banned, use_cache)
    seeds = row_seeds(seed, tokens.tolist())
    for step in range(max_new_tokens):
        draws = [(row_seed, step) for row_seed in seeds]
        logits = sequences.logits()
        next_ids = sample_token(logits, sequences.tokens, draws, repetition_penalty, **filters)
        sequences.append(next_ids[:, None])
        yield next_ids


def initial_tokens(tokenizer: Tokenizer, num_documents: int) -> list[int]:
    """Return the ids that replace an empty prompt.

    They are the end of text if the model was trained on several documents. Otherwise they are a
    newline, or the first id if the tokenizer has none.
    """
    if tokenizer.end_of_text is not None and num_documents > 1:
        return [tokenizer.end_of_text]
    try:
        return tokenizer.encode("\n").tolist()
    except UserError:
        return [0]


def banned_tokens(tokenizer: Tokenizer, model: GPT, ends: Container[int] = ()) -> list[int]:
    """List the ids of the model that neither occur in text nor end it."""
    padding = range(tokenizer.vocab_size, model.config.vocab_size or 0)
    return [token for token in [*tokenizer.unused_ids(), *padding] if token not in ends]


@torch.inference_mode()
def complete_streams(
    model: GPT,
    streams: Sequence[TextStream],
    batch_size: int = 1,
    seed: int = 0,
    use_cache: bool = True,
    repetition_penalty: float = 1.0,
    **filters: Unpack[FilterOptions],
) -> Iterator[tuple[int, str]]:
    """Continue the prompts of streams in batches until all have ended.

    Yields (index of the stream, text) for each new token. The streams have the same tokenizer;
    prompts of similar length share a batch. The tokens are those of :func:`generate` for each
    prompt alone, and for equal prompts together.
    """
    device = next(model.parameters()).device
    seeds = row_seeds(seed, [stream.prompt for stream in streams])
    prompts = [
        stream.prompt[window_start(len(stream.prompt), model.config.context_length) :]
        for stream in streams
    ]
    order = sorted(range(len(streams)), key=lambda index: len(prompts[index]))
    banned = banned_tokens(streams[0].tokenizer, model, streams[0].ends) if streams else []
    for first in range(0, len(streams), batch_size):
        rows = order[first : first + batch_size]
        tokens = torch.empty(len(rows), 0, dtype=torch.long, device=device)
        max_length = max(len(prompts[index]) + streams[index].max_tokens for index in rows)
        sequences = Sequences(model, tokens, max_length, banned, use_cache)
        # All rows start at position 0, so that they need no masks. Until a row's prompt ends, its
        # tokens replace the drawn ones, as in the code of Touvron et al. 2023.
        while active := [index for index in rows if not streams[index].ended]:
            shortest = min(len(prompts[index]) for index in active)
            if 2 * len(active) <= len(rows) or shortest > sequences.length:
                sequences.select(tokens.new_tensor([rows.index(index) for index in active]))
                rows = active
            if shortest > sequences.length:
                pieces = [prompts[index][sequences.length : shortest] for index in rows]
                sequences.append(tokens.new_tensor(pieces))
            logits = sequences.logits()
            draws = [(seeds[index], streams[index].num_tokens) for index in rows]
            drawn = sample_token(logits, sequences.tokens, draws, repetition_penalty, **filters)
            next_ids = drawn.tolist()
            for row, index in enumerate(rows):
                if sequences.length < len(prompts[index]):
                    next_ids[row] = prompts[index][sequences.length]
                elif not streams[index].ended:
                    yield index, streams[index].push(next_ids[row])
            sequences.append(tokens.new_tensor(next_ids)[:, None])
