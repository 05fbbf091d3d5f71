"""A thread that decodes the texts of all clients in one batch."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core.cli import describe_error
from engine.generation.text_batch import TextBatch, TextRequest, Token, next_group

MAX_PREFILL_TOKENS = 256  # of a prompt between two steps; with fewer a prompt takes longer


@dataclass(eq=False, kw_only=True)
class ClientRequest(TextRequest):
    """A request, and a function that receives its tokens and then None, or an error."""

    receive: Callable[[Token | Exception | None], None]


class BatchWorker:
    """A thread that decodes the requests of other threads in one batch.

    Waiting requests get free rows between two steps, those of one prompt at a time. Between two
    steps at most MAX_PREFILL_TOKENS of a prompt are computed, so that a long one does not stop the
    others.
    """

    def __init__(self, batch: TextBatch, max_waiting: int):
        """Prepare the worker. Its thread starts at the first request."""
        self.batch = batch
        self.max_waiting = max_waiting
        self.waiting: deque[Any] = deque()  # of ClientRequest
        self.condition = threading.Condition()  # notified of new requests, and of the stop
        self.is_stopping = False
        self.thread: threading.Thread | None = None

    def submit(self, requests: Sequence[ClientRequest]) -> None:
        """Enqueue requests, all or none. Raises queue.Full if there is no room for them."""
        with self.condition:
            self._drop_cancelled()
            if len(self.waiting) + len(requests) > self.max_waiting:
                raise queue.Full
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
        batch = self.batch
        while True:
            with self.condition:
                while not (self.waiting or batch.requests or batch.unread or self.is_stopping):
                    self.condition.wait()
                if self.is_stopping:
                    return
                self._drop_cancelled()
                has_next = self.waiting and batch.num_free_rows
                group = next_group(self.waiting, batch.num_free_rows) if has_next else []
            if group:
                self._deliver(partial(batch.add, group), group)
            if batch.unread:
                self._deliver(partial(batch.read, MAX_PREFILL_TOKENS), batch.unread)
            self._deliver(batch.step, batch.requests)

    def _drop_cancelled(self) -> None:
        self.waiting = deque(request for request in self.waiting if not request.is_cancelled)

    def _deliver(self, action: Callable[[], Any], requests: Sequence[Any]) -> None:
        """Send the tokens that an action returns, or else its error to all of the requests."""
        try:
            events = action() or ()
        except Exception as error:  # the server continues
            if describe_error(error) is None:
                logging.getLogger(__name__).exception("decoding failed")
            events = [(request, error) for request in requests]
            for request in requests:
                request.is_cancelled = True
        for request, arrival in events:
            request.receive(arrival)
