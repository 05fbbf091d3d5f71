"""A thread that decodes the texts of all clients in one batch."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from engine.core.cli import describe_error
from engine.generation.text_batch import TextBatch, TextRequest

MAX_PREFILL_TOKENS = 256  # of a prompt between two steps; with fewer a prompt takes longer


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
        self.waiting: deque[TextRequest] = deque()
        self.condition = threading.Condition()  # notified of new requests, and of the stop
        self.is_stopping = False
        self.thread: threading.Thread | None = None

    def submit(self, requests: Sequence[TextRequest]) -> None:
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
                batch.add(self.waiting)
            if batch.unread:
                self._attempt(partial(batch.read, MAX_PREFILL_TOKENS), batch.unread)
            self._attempt(batch.step, batch.requests)

    def _drop_cancelled(self) -> None:
        self.waiting = deque(request for request in self.waiting if not request.is_cancelled)

    def _attempt(self, action: Callable[[], None], requests: Sequence[TextRequest]) -> None:
        """Call an action; if it fails, end its requests with the error, and continue."""
        try:
            action()
        except Exception as error:
            is_bug = describe_error(error) is None
            if is_bug:  # its traceback is only in the log
                logging.getLogger(__name__).exception("decoding failed")
            for request in requests:
                request.is_cancelled = True
                request.receive(error)
