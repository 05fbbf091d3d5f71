"""Autoregressive decoding: the cache of keys and values, the loops, tokens → text."""

import codecs
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.data.tokenizer import Tokenizer
from engine.generation.sampling import check_finite, choose

LENGTH_PENALTY = 0.6  # α of Wu et al. 2016, eq. 14


class Cache:
    """The keys and values of one block's attention at the positions so far, so that a new token costs only its own."""

    def __init__(self, batch_size: int, num_heads: int, length: int, head_dim: int, like: Tensor, window: int = 0):
        """Empty, for up to length positions, each to see ``window`` or (0) all; ``like`` has the dtype and device."""
        self.length, self.window = length, window or length
        room = min(length, 2 * self.window)  # half would do; so what is held seldom moves
        self.keys_values = like.new_empty(2, batch_size, num_heads, room, head_dim)  # (2, B, G, room, K)
        self.filled = self.held = 0  # positions so far, and how many of the last of them are held

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, G, T, K) keys and values of the next T positions; return all so far that one of these may see."""
        new, start, end = torch.stack((key, value)), self.held, self.held + key.shape[2]
        self.filled += key.shape[2]
        if end > self.keys_values.shape[3]:  # what the next position sees beside its own moves to the front
            seen = torch.cat((self.keys_values[:, :, :, max(0, start + 1 - self.window) : start], new), dim=3)
            self.held = min(self.window - 1, seen.shape[3])
            self.keys_values[:, :, :, : self.held] = seen[:, :, :, seen.shape[3] - self.held :]
            return seen.unbind()
        self.keys_values[:, :, :, start:end], self.held = new, end
        return self.keys_values[:, :, :, :end].unbind()

    def select(self, rows: Tensor) -> None:
        """Hold these rows only, (N,) integers, in this order; one may come several times."""
        chosen = self.keys_values[:, rows, :, : self.held]
        self.keys_values = chosen.new_empty(*chosen.shape[:3], *self.keys_values.shape[3:])
        self.keys_values[:, :, :, : self.held] = chosen


def new_caches(model: torch.nn.Module, batch_size: int, longest: float = math.inf) -> list[Cache]:
    """An empty cache for each block of the model, with room for what it sees of so many tokens, a context at most."""
    c, like = model.config, next(model.parameters())
    length = min(c.context_length, longest)
    return [Cache(batch_size, c.num_groups, length, c.head_width, like, window) for window in c.layer_windows]


def window_start(length: int, context_length: int) -> int:
    """The first of ``length`` tokens that the next one is predicted from, whatever the kind of positions.

    The window grows to context_length, then leaves its older half behind: a cache serves for half a window.
    """
    hop = (context_length + 1) // 2
    return -(-max(0, length - context_length) // hop) * hop


class Sequences:
    """Token sequences of one length that grow side by side, and a model's logits of what comes next."""

    def __init__(
        self,
        model: torch.nn.Module,
        tokens: Tensor,
        longest: int,
        never: Sequence[int] = (),
        use_cache: bool = True,
    ):
        """They begin with tokens (B, T), T ≥ 0, and grow to ``longest``; ``never`` are ids that must not come next.

        The model is any GPT; :func:`engine.nn.inference.for_decoding` makes one that is faster here.
        """
        self.model, self.tokens, self.start = model, tokens, 0  # the tokens from position start on
        self.never = torch.tensor(list(never), dtype=torch.long, device=tokens.device)
        self.caches = new_caches(model, len(tokens), longest) if use_cache else []

    length = property(lambda self: self.start + self.tokens.shape[1])

    def append(self, tokens: Tensor) -> None:
        """Go on with tokens (B, T)."""
        self.tokens = torch.cat((self.tokens, tokens), dim=1)

    def select(self, rows: Tensor) -> None:
        """Go on with these sequences only, (N,) integers, in this order; one may come several times."""
        self.tokens = self.tokens[rows]
        for cache in self.caches:
            cache.select(rows)

    def logits(self) -> Tensor:
        """The next token's logits (B, V), predicted from the window that ends here. To be asked once a length."""
        if (first := window_start(self.length, self.model.config.context_length)) != self.start:
            self.tokens, self.start = self.tokens[:, first - self.start :], first
            for cache in self.caches:
                cache.filled = cache.held = 0
        training = self.model.training
        if training:
            self.model.eval()
        new = self.tokens[:, self.caches[0].filled if self.caches else 0 :]
        logits = self.model(new, caches=self.caches)[:, -1]
        if training:
            self.model.train()
        return logits.index_fill(-1, self.never, -torch.inf) if len(self.never) else logits


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

    ``never`` are ids not to choose; for the model, see :class:`Sequences`. Without the cache the same tokens come,
    slower still: the definition for tests.
    """
    generator = torch.Generator(prompt.device).manual_seed(seed)
    longest = prompt.shape[-1] + max_new_tokens
    sequences = Sequences(model, prompt.view(-1, prompt.shape[-1]), longest, never, use_cache)
    for _ in range(max_new_tokens):
        chosen = choose(sequences.logits(), temperature, top_k, top_p, generator)
        sequences.append(chosen[:, None])
        yield chosen


@torch.inference_mode()
def beam_search(
    model: torch.nn.Module,
    prompt: Tensor,
    beams: int,
    max_new_tokens: int,
    ends: Sequence[int] = (),
    never: Sequence[int] = (),
    stopped: Callable[[list[int]], bool] = lambda ids: False,
) -> tuple[list[int], float]:
    """The best continuation of a prompt (T,) that a search with so many beams finds, and its score.

    The score is log P / ((5 + length) / 6)^α: Wu et al. 2016, eq. 14. A continuation is done with one of the ids in
    ``ends``, which it keeps, when ``stopped`` says so, or after max_new_tokens; ``never`` are ids not to choose. The
    most likely continuations go on, as many as there are beams; the search is over when none can beat the best done.
    """
    sequences, beam_ids = Sequences(model, prompt.view(1, -1), len(prompt) + max_new_tokens, never), [[]]
    log_p = torch.zeros(1, device=prompt.device)  # of each beam
    best, best_score = [], -math.inf
    for length in range(1, max_new_tokens + 1):
        check_finite(logits := sequences.logits())
        longer = log_p[:, None] + logits.float().log_softmax(dim=-1)  # (beams, V)
        values, places = longer.flatten().topk(min(beams, longer.numel()))  # in falling order
        values, places = values[values > -math.inf], places[values > -math.inf]
        parents, ids = places // longer.shape[1], places % longer.shape[1]
        candidates = [[*beam_ids[parent], last] for parent, last in zip(parents.tolist(), ids.tolist(), strict=True)]
        live = []
        for at, (value, candidate) in enumerate(zip(values.tolist(), candidates, strict=True)):
            if length < max_new_tokens and candidate[-1] not in ends and not stopped(candidate):
                live.append(at)
            elif (score := value / length_penalty(length)) > best_score:
                best, best_score = candidate, score
        if not live or best_score >= values[live[0]].item() / length_penalty(max_new_tokens):
            break
        log_p, beam_ids = values[live], [candidates[at] for at in live]
        sequences.select(parents[live])
        sequences.append(ids[live][:, None])
    return best, best_score


def length_penalty(length: int) -> float:
    """What log P is divided by, so that longer continuations have their chance; it grows with the length."""
    return ((5 + length) / 6) ** LENGTH_PENALTY


def opening(tokenizer: Tokenizer, documents: int) -> list[int]:
    """Token ids to begin from nothing: what comes before a document, if training saw several end, else a new line."""
    if tokenizer.end_of_text is not None and documents > 1:
        return [tokenizer.end_of_text]
    try:
        return tokenizer.encode("\n").tolist()
    except ValueError:  # characters without a new line: any will do
        return [0]


def not_text(tokenizer: Tokenizer, model: torch.nn.Module, ends: Sequence[int] = ()) -> list[int]:
    """The ids of a model that stand for no text and do not end one: what must never be chosen."""
    unused = [*tokenizer.unused_ids(), *range(tokenizer.vocab_size, model.config.vocab_size)]
    return [token for token in unused if token not in ends]


def generate_text(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    ends: Sequence[int] = (),
    **choice: Any,
) -> Iterator[Tensor]:
    """Continue prompts of one length with ids that stand for text, or end it; see :func:`generate`."""
    prompt = torch.tensor(prompts, device=next(model.parameters()).device)
    return generate(model, prompt, max_new_tokens, never=not_text(tokenizer, model, ends), **choice)


class TextStream:
    """One sequence's tokens → text as soon as it is sure: no character cut in two, nothing from a stop text on."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), ends: Sequence[int] = ()):
        """``ends`` are ids that end it, beside the tokenizer's end of text."""
        self.tokenizer, self.stops, self.ends = tokenizer, stops, {tokenizer.end_of_text, *ends}
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # might be the beginning of a stop text
        self.ended = False

    def push(self, token: int) -> str:
        """The text that is sure now that this token came."""
        if self.ended:
            return ""
        if token in self.ends:
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


def texts(
    tokens: Iterator[Tensor], tokenizer: Tokenizer, rows: int, stops: Sequence[str] = (), ends: Sequence[int] = ()
) -> Iterator[list[str]]:
    """What each of so many sequences' text gains with each of their tokens (rows,), until all have ended."""
    streams = [TextStream(tokenizer, stops, ends) for _ in range(rows)]
    for ids in tokens:
        yield [text.push(token) for text, token in zip(streams, ids.tolist(), strict=True)]
        if all(text.ended for text in streams):
            break
    yield [text.end() for text in streams]


class Row:
    """A prompt of a batch, its index says which, and the text that comes after it, of ``limit`` tokens at most."""

    def __init__(self, index: int, prompt: list[int], limit: int, stream: TextStream):
        self.index, self.prompt, self.limit, self.stream = index, prompt, limit, stream
        self.text, self.count = "", 0  # what has come, and its tokens

    def take(self, position: int, drawn: int) -> int:
        """The token at a position: the prompt's, or after that the one drawn, of which the text gains."""
        if position < len(self.prompt):
            return self.prompt[position]
        if not self.stream.ended:
            self.text, self.count = self.text + self.stream.push(drawn), self.count + 1
            self.text += self.stream.end() if self.count == self.limit else ""
        return drawn


@torch.inference_mode()
def complete(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[list[int], int]],
    batch_size: int,
    stops: Sequence[str] = (),
    ends: Sequence[int] = (),
    seed: int = 0,
    **choice: Any,
) -> Iterator[tuple[int, str, int]]:
    """Continue prompts, each ≥ 1 ids and the most that may come: yields (i, prompt i's text, tokens) as each ends.

    Prompts of about one length share a batch. At temperature 0 a text is what :func:`generate_text` writes for its
    prompt alone. ``choice`` is temperature, top_k and top_p: see :func:`choose`.
    """
    rows, device = [], next(model.parameters()).device
    for index, (prompt, limit) in enumerate(prompts):
        start = window_start(len(prompt), model.config.context_length)  # nothing before it counts, now or later
        rows.append(Row(index, prompt[start:], limit, TextStream(tokenizer, stops, ends)))
    rows.sort(key=lambda row: len(row.prompt))
    draw = partial(choose, generator=torch.Generator(device).manual_seed(seed), **choice)
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        nothing = torch.empty(len(batch), 0, dtype=torch.long, device=device)
        longest = max(len(row.prompt) + row.limit for row in batch)
        sequences = Sequences(model, nothing, longest, not_text(tokenizer, model, ends))
        for row in _complete_batch(sequences, batch, draw):
            yield row.index, row.text, row.count


def _complete_batch(sequences: Sequences, rows: list[Row], draw: Callable[[Tensor], Tensor]) -> Iterator[Row]:
    """Yields each row when its text has ended. All begin at position 0: they share a window, and need no masks.

    Where a row's prompt goes on, its tokens come instead of those drawn, as in the code of Touvron et al. 2023.
    """
    while live := [row for row in rows if not row.stream.ended]:
        known = min(len(row.prompt) for row in live)
        if 2 * len(live) <= len(rows) or known > sequences.length:
            kept = [at for at, row in enumerate(rows) if not row.stream.ended]
            sequences.select(sequences.tokens.new_tensor(kept))
            rows = live
        if known > sequences.length:
            sequences.append(sequences.tokens.new_tensor([row.prompt[sequences.length : known] for row in rows]))
        drawn, length = draw(sequences.logits()).tolist(), sequences.length
        tokens = [row.take(length, token) for row, token in zip(rows, drawn, strict=True)]
        yield from [row for row in live if row.stream.ended]
        sequences.append(sequences.tokens.new_tensor(tokens)[:, None])


def search_text(
    model: torch.nn.Module,
    tokenizer: Tokenizer,
    prompt: list[int],
    max_new_tokens: int,
    beams: int,
    stops: Sequence[str] = (),
    ends: Sequence[int] = (),
) -> tuple[str, int]:
    """The best text that a search finds after a prompt's token ids, and its tokens; see :func:`beam_search`."""
    every_end = [*ends, *([] if tokenizer.end_of_text is None else [tokenizer.end_of_text])]
    start = torch.tensor(prompt, device=next(model.parameters()).device)
    choice = {"ends": every_end, "never": not_text(tokenizer, model, ends)}
    choice |= {"stopped": lambda ids: any(stop in tokenizer.decode(ids) for stop in stops)}
    ids, _ = beam_search(model, start, beams, max_new_tokens, **choice)
    stream = TextStream(tokenizer, stops, ends)
    return "".join(map(stream.push, ids)) + stream.end(), len(ids)
