"""Texts that are decoded together: requests join and leave a batch at any step.

In float32 a text depends on its prompt, its seed and its settings only, whatever else is in the
batch.
"""

import math
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import Tensor

from engine.core.errors import UserError
from engine.data.tokenizer import Tokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import (
    NOT_FINITE,
    TextOptions,
    draw_ids,
    noise_states,
    not_finite_error,
    penalize_frequency,
    penalize_repetition,
    row_seeds,
)
from engine.generation.text_stream import TextStream
from model import GPT


@dataclass
class Token:
    """A token, and the new text that later tokens cannot change."""

    id: int
    text: str
    offset: int  # of its characters in the text; with an echo, from the start of the prompt
    logprob: float | None = None  # in nats, of the model itself: temperature 1, all tokens
    # (id, logprob) of the most likely ids, descending; then of this id, if it is not among them.
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class TextRequest:
    """A prompt to continue, the settings of its text, and the function that receives its tokens.

    With ``reports_prompt`` the tokens of the prompt come first, with their logprobs. At the end of
    the text comes None, or instead an error.
    """

    stream: TextStream
    seed: int  # of engine.generation.sampling.row_seeds
    options: TextOptions  # of sampling
    receive: Callable[[Token | Exception | None], None]
    num_logprobs: int | None = None  # None: without logprobs; 0: only those of the tokens
    reports_prompt: bool = False
    is_cancelled: bool = False

    @cached_property
    def prompt_key(self) -> Any:
        """The key that groups the requests whose prompt is read in one call."""
        return (self.stream.prompt, self.reports_prompt, self.num_logprobs)

    @cached_property
    def sampling_key(self) -> Any:
        """The key that groups the requests which are sampled in one call."""
        return (self.num_logprobs, *sorted(self.options.items()))


class TextBatch:
    """Requests that are decoded together, each in a row of an engine, in the same order."""

    def __init__(
        self,
        engine: DecodingEngine,
        max_rows: int,
        banned: Sequence[int] = (),
        max_length: int = sys.maxsize,
    ):
        """Decode up to max_rows texts, of max_length tokens with their prompts, as memory allows.

        Banned ids are not drawn.
        """
        self.engine = engine
        self.max_rows = self.engine.max_rows(max_rows, max_length)
        self.banned = torch.tensor(list(banned), dtype=torch.long, device=self.engine.device)
        self.requests: list[TextRequest] = []
        self.unread: list[TextRequest] = []  # of the prompt in the row after those of the requests

    def add(self, waiting: deque[TextRequest]) -> None:
        """Take the first requests of a queue, if a row is free and no prompt is unread.

        They have one prompt_key, and :meth:`read` computes their prompt once. Those that need only
        the tokens of the prompt need no row of their own.
        """
        num_free_rows = self.max_rows - len(self.requests)
        if self.unread or not num_free_rows:
            return
        while waiting and (not self.unread or waiting[0].prompt_key == self.unread[0].prompt_key):
            if not waiting[0].stream.is_finished:
                num_free_rows -= 1
            if num_free_rows < 0:
                break
            self.unread.append(waiting.popleft())

    def read(self, max_tokens: int | None = None) -> None:
        """Compute the unread prompt, or max_tokens of it; at its end, draw the first tokens."""
        num_rows = len(self.requests)
        requests = [request for request in self.unread if not request.is_cancelled]
        if requests:
            stream = requests[0].stream
            if len(self.engine.rows) == num_rows:
                num_new_tokens = max(request.stream.max_tokens for request in requests)
                self.engine.add(stream.prompt, num_new_tokens)
            row = self.engine.rows[num_rows]
            start = row.num_cached
            scores_prompt = requests[0].reports_prompt and requests[0].num_logprobs is not None
            logits = self.engine.read(num_rows, max_tokens, scores_prompt)
            if requests[0].reports_prompt:
                self._report_prompt(requests, start, row.num_cached, logits)
            if row.num_unread:
                return
        self.unread = []
        for request in requests:
            if request.stream.is_finished:  # without tokens
                request.receive(None)
        requests = [request for request in requests if not request.stream.is_finished]
        self.requests += requests
        self.engine.keep([*range(num_rows), *[num_rows] * len(requests)])
        if requests:
            states = self._noise_states(requests)
            self._draw(logits[-1:].expand(len(requests), -1), states, requests)

    def step(self) -> None:
        """Draw a token for each request whose prompt is read."""
        self._drop_ended()
        if self.requests:
            states = self._noise_states(self.requests)  # after the step, a copy would wait for it
            logits = self.engine.step([request.stream.new_ids[-1] for request in self.requests])
            self._draw(logits, states, self.requests)

    def _noise_states(self, requests: Sequence[TextRequest]) -> Tensor:
        """Return the states of the noise of the next tokens."""
        draws = [(request.seed, len(request.stream.new_ids)) for request in requests]
        return noise_states(draws, self.engine.device)

    @torch.inference_mode()
    def _draw(self, logits: Tensor, states: Tensor, requests: Sequence[TextRequest]) -> None:
        """Draw a token for each of the last requests; then drop those that have ended.

        Logits are (N, V), and states of the noise (N,).
        """
        groups: dict[Any, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.sampling_key, []).append(index)
        first_row = len(self.requests) - len(requests)
        for indices in groups.values():
            group = [requests[index] for index in indices]
            selected: Any = slice(None)  # a list would copy the logits
            if len(groups) > 1:
                selected = torch.tensor(indices, device=logits.device)
            group_logits = logits[selected]
            rows = [self.engine.rows[first_row + index].ids for index in indices]
            ids = self._sample(group_logits, states[selected], group, rows)
            tokens: dict[int, Token] = {}  # by row of the logits
            for index, token_id in enumerate(ids):
                if token_id != NOT_FINITE:
                    stream = group[index].stream
                    offset = stream.num_characters
                    tokens[index] = Token(token_id, stream.push(token_id), offset)
            if tokens and group[0].num_logprobs is not None:
                self._score([*tokens.values()], group_logits[[*tokens]], group[0].num_logprobs)
            for index, request in enumerate(group):
                if index not in tokens:  # the other texts continue
                    request.is_cancelled = True
                    request.receive(not_finite_error())
                    continue
                request.receive(tokens[index])
                if request.stream.is_finished:
                    request.receive(None)
        self._drop_ended()

    def _sample(
        self,
        logits: Tensor,
        states: Tensor,
        requests: Sequence[TextRequest],
        rows: Sequence[tuple[int, ...]],
    ) -> list[int]:
        """Draw an id for each request from logits (N, V), with the settings of the first one."""
        if len(self.banned):
            logits = logits.index_fill(-1, self.banned, -torch.inf)
        options = requests[0].options
        penalty = options.get("repetition_penalty", 1.0)
        if penalty != 1:
            # A shorter row repeats its first id: a penalty counts each id once.
            longest = max(map(len, rows))
            tokens = [row + row[:1] * (longest - len(row)) for row in rows]
            ids = torch.tensor(tokens, device=logits.device)
            special_ids = [*requests[0].stream.tokenizer.special_tokens.values()]
            logits = penalize_repetition(logits, ids, penalty, special_ids)
        penalties = (options.get("frequency_penalty", 0.0), options.get("presence_penalty", 0.0))
        if any(penalties):
            texts = [request.stream.new_ids for request in requests]
            logits = penalize_frequency(logits, texts, *penalties)
        return draw_ids(logits, states, **options)

    def _score(self, tokens: Sequence[Token], logits: Tensor, num_alternatives: int) -> None:
        """Set the logprobs of tokens from logits (N, V); banned ids are not alternatives."""
        logprobs = logits.float().log_softmax(dim=-1)
        ids = torch.tensor([[token.id] for token in tokens], device=logits.device)
        allowed = logprobs.index_fill(-1, self.banned, -torch.inf)
        likely = allowed.topk(min(num_alternatives, allowed.shape[-1]))
        columns = (logprobs.gather(1, ids)[:, 0], likely.indices, likely.values)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for token, (logprob, row_ids, row_values) in zip(tokens, rows, strict=True):
            pairs = [*zip(row_ids, row_values, strict=True)]
            token.logprob = logprob
            token.top_logprobs = [pair for pair in pairs if pair[1] > -math.inf]
            if token.id not in row_ids:
                token.top_logprobs.append((token.id, logprob))

    @torch.inference_mode()
    def _report_prompt(
        self, requests: Sequence[TextRequest], start: int, end: int, logits: Tensor
    ) -> None:
        """Send the tokens after positions from ``start`` to ``end``, whose logits are (T, V).

        The first token of a prompt, which has no logprobs, comes with the second.
        """
        if start == 0:
            self.prompt_reader = TextStream(requests[0].stream.tokenizer)
        tokens = []
        for token_id in requests[0].stream.prompt[start + 1 if start else 0 : end + 1]:
            offset = self.prompt_reader.num_characters
            tokens.append(Token(token_id, self.prompt_reader.decode(token_id), offset))
        scored = tokens if start else tokens[1:]
        if scored and requests[0].num_logprobs is not None:
            self._score(scored, logits[: len(scored)], requests[0].num_logprobs)
        for request in requests:
            request.stream.num_characters = self.prompt_reader.num_characters
            for token in tokens:
                request.receive(token)

    def _drop_ended(self) -> None:
        """Drop ended and canceled requests, and move the last ones into their rows."""
        num_rows = len(self.requests)
        order = [*range(num_rows)]
        for row in reversed(range(num_rows)):
            if self.requests[row].stream.is_finished or self.requests[row].is_cancelled:
                order[row] = order[-1]
                order.pop()
        if len(order) < num_rows:
            self.requests = [self.requests[row] for row in order]
            self.engine.keep([*order, *range(num_rows, len(self.engine.rows))])


def banned_tokens(tokenizer: Tokenizer, model: GPT, stop_token_ids: Container[int]) -> list[int]:
    """List the ids of the model that neither occur in text nor end it."""
    padding = range(tokenizer.vocab_size, model.config.vocab_size)
    return [token for token in [*tokenizer.unused_ids(), *padding] if token not in stop_token_ids]


def initial_tokens(tokenizer: Tokenizer, num_documents: int) -> list[int]:
    """Return the ids that replace an empty prompt.

    They are the tokenizer's start of a text, or else the end of text if the model was trained on
    several documents. Otherwise they are a newline, or the first id if the tokenizer has none.
    """
    if tokenizer.text_start:
        return tokenizer.text_start
    if tokenizer.end_of_text_id is not None and num_documents > 1:
        return [tokenizer.end_of_text_id]
    try:
        return tokenizer.encode("\n").tolist()
    except UserError:
        return [0]


def complete_streams(
    engine: DecodingEngine, streams: Sequence[TextStream], **options: Unpack[TextOptions]
) -> Iterator[tuple[int, str]]:
    """Continue the prompts of streams until all have ended, up to batch_size at once.

    Yields (index of the stream, text) for each new token. A stream that has ended makes room for
    the next. The streams have one tokenizer and the same ``stop_token_ids``. Options are those of
    sampling and batch_size, by default 1.
    """
    if not streams:
        return
    batch_size = options.pop("batch_size", 1)
    seeds = row_seeds(options.pop("seed", 0), [stream.prompt for stream in streams])
    arrivals: deque[tuple[int, Token | Exception | None]] = deque()

    def receive(index: int, arrival: Token | Exception | None) -> None:
        arrivals.append((index, arrival))

    waiting = deque(
        TextRequest(stream, seeds[index], options, partial(receive, index))
        for index, stream in enumerate(streams)
        if not stream.is_finished
    )
    banned = banned_tokens(streams[0].tokenizer, engine.model, streams[0].stop_token_ids)
    max_length = max(len(stream.prompt) + stream.max_tokens for stream in streams)
    batch = TextBatch(engine, batch_size, banned, max_length)
    while waiting or batch.requests:
        batch.add(waiting)
        if batch.unread:
            batch.read()
        else:
            batch.step()
        while arrivals:
            index, arrival = arrivals.popleft()
            if isinstance(arrival, Exception):
                raise arrival
            if arrival:
                yield index, arrival.text
