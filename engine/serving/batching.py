"""Continuous batching: many requests are decoded together, and join and leave at any step.

In float32 each text equals that of :func:`engine.generation.generate.complete_streams` for its
prompt and seed, whatever else is in the batch.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.core.cli import describe_error
from engine.core.errors import UserError
from engine.generation.kv_cache import KVCache, RowLengths, new_caches, new_row_caches
from engine.generation.sampling import FilterOptions, sample_token
from engine.generation.text_stream import TextStream
from model import GPT

MAX_PREFILL_TOKENS = 256  # of a prompt between two steps; with fewer a prompt takes longer


@dataclass
class Token:
    """A token, and the new text that later tokens cannot change."""

    id: int
    text: str
    logprob: float | None = None  # in nats, of the model itself: temperature 1, all tokens
    # (id, logprob) of the most likely ids, descending; then of this id, if it is not among them.
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


Receiver = Callable[[Token | Exception | None], None]


@dataclass(eq=False)
class TextRequest:
    """A prompt to continue, and a function that receives the tokens and then None, or an error.

    With ``reports_prompt`` the tokens of the prompt come first, with their logprobs.
    """

    stream: TextStream
    row_seed: int  # of engine.generation.sampling.row_seeds
    filters: FilterOptions
    receive: Receiver
    repetition_penalty: float = 1.0
    num_logprobs: int | None = None  # None: without logprobs; 0: only those of the tokens
    reports_prompt: bool = False
    is_cancelled: bool = False

    def __post_init__(self) -> None:
        self.ids = list(self.stream.prompt)  # of the prompt and the text

    @property
    def sampling_key(self) -> Any:
        """The key that groups the requests which are sampled in one call."""
        has_penalty = self.repetition_penalty != 1  # its ids differ in number from those of others
        return (*sorted(self.filters.items()), id(self) if has_penalty else None)


@dataclass
class Prefill:
    """A request whose prompt is being computed, and the caches of its tokens so far."""

    request: TextRequest
    caches: list[KVCache]


class RunningBatch:
    """The sequences that are decoded together. Each needs room for its text in the context."""

    def __init__(self, model: GPT, max_rows: int, banned: Sequence[int] = ()):
        """Decode up to max_rows sequences in evaluation mode, without drawing banned ids."""
        self.model = model
        self.max_rows = max_rows
        self.device = next(model.parameters()).device
        self.banned = torch.tensor(list(banned), dtype=torch.long, device=self.device)
        self.requests: list[TextRequest] = []  # in the order of the rows
        self.rows = RowLengths(max_rows, model.config.context_length, self.device)
        self.caches = new_row_caches(model, self.rows)
        self.unfinished_prefill: Prefill | None = None

    def add(self, request: TextRequest) -> None:
        """Prefill the first tokens of a request; continue_prefill computes further ones."""
        if request.reports_prompt:
            self.report_prompt(request)
        if request.stream.max_tokens == 0:
            request.stream.is_cut = True
            request.receive(None)
            return
        caches = new_caches(self.model, 1, len(request.ids))
        self.unfinished_prefill = Prefill(request, caches)
        self.continue_prefill()

    @torch.inference_mode()
    def continue_prefill(self) -> None:
        """Compute more of the unfinished prompt; at its end, draw a token and assign it a row."""
        prefill = self.unfinished_prefill
        self.unfinished_prefill = None
        if prefill is None or prefill.request.is_cancelled:
            return
        request = prefill.request
        num_tokens = len(request.ids)
        start = prefill.caches[0].filled
        end = min(start + MAX_PREFILL_TOKENS, num_tokens)
        tokens = torch.tensor([request.ids[start:end]], device=self.device)
        logits = self.model(tokens, caches=prefill.caches)[:, -1]
        if end < num_tokens:
            self.unfinished_prefill = prefill
            return
        self.draw(logits, [request])
        if request.stream.ended:
            return
        for rows, cache in zip(self.caches, prefill.caches, strict=True):
            rows.insert(len(self.requests), cache)
        lengths = self.rows.lengths
        self.rows.replace(torch.cat((lengths, lengths.new_tensor([num_tokens]))))
        self.requests.append(request)

    @torch.inference_mode()
    def report_prompt(self, request: TextRequest) -> None:
        """Send the tokens of a prompt; the first one carries the text of the prompt."""
        tokens = [Token(token_id, "") for token_id in request.ids]
        tokens[0].text = request.stream.tokenizer.decode(request.ids)
        if request.num_logprobs is not None:
            logits = self.model(torch.tensor([request.ids], device=self.device))[0]
            for token, row in zip(tokens[1:], logits, strict=False):
                self.score(token, row, request.num_logprobs)
        for token in tokens:
            request.receive(token)

    @torch.inference_mode()
    def step(self) -> None:
        """Draw a token for each sequence; drop those that have ended or are canceled."""
        self.drop_ended()
        if not self.requests:
            return
        last = torch.tensor([[request.ids[-1]] for request in self.requests], device=self.device)
        logits = self.model(last, caches=self.caches)[:, -1]
        self.rows.replace(self.rows.lengths + 1)
        groups: dict[Any, list[int]] = {}
        for row, request in enumerate(self.requests):
            groups.setdefault(request.sampling_key, []).append(row)
        for rows in groups.values():
            group = [self.requests[row] for row in rows]
            try:
                self.draw(logits[rows], group)
            except UserError as error:  # of the options of this group; the others continue
                for request in group:
                    request.receive(error)
                    request.is_cancelled = True
        self.drop_ended()

    def draw(self, logits: Tensor, requests: Sequence[TextRequest]) -> None:
        """Draw a token for each request from logits (N, V), and send it."""
        allowed = logits.index_fill(-1, self.banned, -torch.inf)
        draws = [(request.row_seed, request.stream.num_tokens) for request in requests]
        penalty = requests[0].repetition_penalty
        # A request with a penalty has a group of its own; without one, the ids are not used.
        tokens = torch.tensor([requests[0].ids if penalty != 1 else []], device=self.device)
        ids = sample_token(allowed, tokens, draws, penalty, **requests[0].filters).tolist()
        for row, request in enumerate(requests):
            request.ids.append(ids[row])
            token = Token(ids[row], "")
            if request.num_logprobs is not None:
                self.score(token, logits[row], request.num_logprobs)
            token.text = request.stream.push(ids[row])  # last: after an error, it has not ended
            request.receive(token)
            if request.stream.ended:
                request.receive(None)

    def score(self, token: Token, logits: Tensor, num_alternatives: int) -> None:
        """Set the logprobs of a token from logits (V,); banned ids are not alternatives."""
        logprobs = logits.float().log_softmax(dim=-1)
        allowed = logprobs.index_fill(-1, self.banned, -torch.inf)
        count = min(num_alternatives, int(allowed.isfinite().sum()))
        values, ids = allowed.topk(count)
        token.logprob = logprobs[token.id].item()
        token.top_logprobs = [*zip(ids.tolist(), values.tolist(), strict=True)]
        if token.id not in ids.tolist():
            token.top_logprobs.append((token.id, token.logprob))

    def clear(self) -> None:
        """Free all rows, and their memory."""
        self.requests.clear()
        self.rows.replace(self.rows.lengths[:0])
        for cache in self.caches:
            cache.clear()

    def drop_ended(self) -> None:
        """Free the rows of ended and canceled requests, and move the last rows into them."""
        lengths = self.rows.lengths.tolist()
        for row in reversed(range(len(self.requests))):
            request = self.requests[row]
            if not (request.stream.ended or request.is_cancelled):
                continue
            last = len(self.requests) - 1
            if row != last:
                for cache in self.caches:
                    cache.move(last, row, lengths[last])
                self.requests[row] = self.requests[last]
                lengths[row] = lengths[last]
            self.requests.pop()
            lengths.pop()
        if len(lengths) < len(self.rows.lengths):
            self.rows.replace(self.rows.lengths.new_tensor(lengths))
            if not lengths:
                self.clear()


class QueueFullError(Exception):
    """Too many requests are waiting for a row."""


class BatchWorker:
    """A thread that decodes the requests of other threads in one running batch.

    A waiting request gets a free row between two steps, one request at a time. Between two steps at
    most MAX_PREFILL_TOKENS of a prompt are computed, so that a long one does not stop the others.
    Only a prompt whose own logprobs are requested is also computed at once.
    """

    def __init__(self, batch: RunningBatch, max_waiting: int):
        """Prepare the worker. Its thread starts at the first request."""
        self.batch = batch
        self.max_waiting = max_waiting
        self.waiting: deque[TextRequest] = deque()
        self.condition = threading.Condition()  # notified of new requests, and of the stop
        self.is_stopping = False
        self.thread: threading.Thread | None = None

    def submit(self, requests: Sequence[TextRequest]) -> None:
        """Enqueue requests, all or none. Raises QueueFullError if there is no room for them."""
        with self.condition:
            self.waiting = deque(request for request in self.waiting if not request.is_cancelled)
            if len(self.waiting) + len(requests) > self.max_waiting:
                raise QueueFullError
            self.waiting.extend(requests)
            self.condition.notify()
            if self.thread is None and not self.is_stopping:
                self.thread = threading.Thread(target=self._run, name="decoding")
                self.thread.start()

    def stop(self) -> None:
        """Stop the thread after its current step; unfinished texts receive nothing more."""
        with self.condition:
            self.is_stopping = True
            self.condition.notify()
        if self.thread:
            self.thread.join()

    def _run(self) -> None:
        while True:
            with self.condition:
                prefill = self.batch.unfinished_prefill
                while not (self.waiting or self.batch.requests or prefill or self.is_stopping):
                    self.condition.wait()
                if self.is_stopping:
                    return
                request = None if prefill else self._next_request()
            if prefill:
                self._attempt(self.batch.continue_prefill, [prefill.request])
            elif request:
                self._attempt(self.batch.add, [request], request)
            if not self._attempt(self.batch.step, self.batch.requests):
                self.batch.clear()

    def _next_request(self) -> TextRequest | None:
        """Return the first waiting request that is not canceled; None without a free row."""
        while self.waiting and len(self.batch.requests) < self.batch.max_rows:
            request = self.waiting.popleft()
            if not request.is_cancelled:
                return request
        return None

    def _attempt(
        self, action: Callable[..., None], requests: Sequence[TextRequest], *arguments: TextRequest
    ) -> bool:
        """Return whether an action raised nothing. An error goes to the unfinished requests."""
        try:
            action(*arguments)
            return True
        except Exception as error:  # the server continues
            if describe_error(error) is None:
                logging.getLogger(__name__).exception("decoding failed")
            for request in requests:
                if not request.stream.ended:
                    request.receive(error)
            return False
