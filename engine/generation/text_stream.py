"""Streaming: token ids → text, without incomplete characters and stop texts."""

import codecs
import sys
from collections.abc import Sequence

from engine.data.chats.chat import TurnEnds
from engine.data.tokenizer import Tokenizer

NO_ENDS = TurnEnds()


class TextStream:
    """Turns the tokens after a prompt into text, as soon as later tokens cannot change it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        max_tokens: int = sys.maxsize,
        stop: Sequence[str] = (),
        ends: TurnEnds = NO_ENDS,
    ):
        """End the text before any text of ``stop``, and at the ends of a turn and of a text.

        A space that the tokenizer adds at the start is dropped, unless the text continues a prompt.
        A last character whose bytes are incomplete is left out.
        """
        self.tokenizer = tokenizer
        self.prompt = list(prompt)
        self.max_tokens = max_tokens
        self.stop = (*stop, *ends.texts)
        self.stop_prefixes = [text[:length] for text in self.stop for length in range(1, len(text))]
        self.stop_token_ids = {*ends.token_ids, *tokenizer.stop_token_ids}
        self.has_ending = bool(ends.texts)  # of which only white space may precede an end of text
        self.drops_space = tokenizer.adds_space_after(prompt[-1] if prompt else None)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text = ""  # that later tokens cannot change
        self.pending = ""  # after it; may start a stop text
        self.new_ids: list[int] = []
        self.num_characters = 0  # of the tokens so far
        self.hit_token_limit = max_tokens == 0  # ended by max_tokens
        self.is_finished = self.hit_token_limit

    def push(self, token: int) -> str:
        """Add a token, and return the new text that later tokens cannot change."""
        if self.is_finished:
            return ""
        self.new_ids.append(token)
        if token in self.stop_token_ids:
            self.pending = self.pending.rstrip() if self.has_ending else self.pending
            return self.end()
        self.pending += self.decode(token)
        stop_starts = [self.pending.find(text) for text in self.stop if text in self.pending]
        if stop_starts:
            self.is_finished = True
            return self._take(min(stop_starts))
        if len(self.new_ids) == self.max_tokens:
            self.hit_token_limit = True
            return self.end()
        lengths = [len(prefix) for prefix in self.stop_prefixes if self.pending.endswith(prefix)]
        return self._take(len(self.pending) - max(lengths, default=0))

    def decode(self, token: int) -> str:
        """Return the characters that a token completes, without a space that is dropped."""
        if not self.prompt and not self.num_characters and token in self.tokenizer.text_start:
            return ""
        content = self.decoder.decode(self.tokenizer.decode_bytes([token]))
        if self.drops_space and content:
            content = content.removeprefix(" ")
            self.drops_space = False
        self.num_characters += len(content)
        return content

    def end(self) -> str:
        """End the text, and return its pending characters."""
        length = 0 if self.is_finished else len(self.pending)
        self.is_finished = True
        return self._take(length)

    def _take(self, length: int) -> str:
        """Move the first characters of the pending text to the text, and return them."""
        text = self.pending[:length]
        self.pending = self.pending[length:]
        self.text += text
        return text
