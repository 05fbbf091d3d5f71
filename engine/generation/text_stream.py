"""Streaming: token ids → text, without cutting a character or writing a stop text."""

import codecs
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from engine.data.tokenizer import Tokenizer


class TextStream:
    """Turns one sequence's tokens into text, each piece as soon as it is certain."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        ends: Sequence[int] = (),
        prompt: Sequence[int] = (),
    ):
        """The text ends before any text of ``stops``, and at any id of ``ends`` or the end of text.

        It loses the space that the tokenizer adds at its start, unless it continues a prompt's text.
        """
        self.tokenizer = tokenizer
        self.stops = stops
        self.prefixes = [stop[:length] for stop in stops for length in range(1, len(stop))]
        self.ends = {*ends}
        if tokenizer.end_of_text is not None:
            self.ends.add(tokenizer.end_of_text)
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # may be the beginning of a stop text
        starts_text = not prompt or prompt[-1] in tokenizer.special_tokens.values()
        self.drops_space = tokenizer.adds_leading_space and starts_text
        self.ended = False

    def push(self, token: int) -> str:
        """Return the text that this token makes certain."""
        if self.ended:
            return ""
        if token in self.ends:
            return self.end()
        content = self.decoder.decode(self.tokenizer.decode_bytes([token]))
        if self.drops_space and content:
            content = content.removeprefix(" ")
            self.drops_space = False
        self.pending += content
        starts = [self.pending.find(stop) for stop in self.stops if stop in self.pending]
        if starts:
            self.ended = True
            return self.pending[: min(starts)]
        lengths = [len(prefix) for prefix in self.prefixes if self.pending.endswith(prefix)]
        num_certain = len(self.pending) - max(lengths, default=0)
        text = self.pending[:num_certain]
        self.pending = self.pending[num_certain:]
        return text

    def end(self) -> str:
        """End the text, and return its pending rest."""
        text = "" if self.ended else self.pending + self.decoder.decode(b"", final=True)
        self.ended = True
        return text


def stream_texts(
    steps: Iterable[Tensor],
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    stops: Sequence[str] = (),
    ends: Sequence[int] = (),
) -> Iterator[list[str]]:
    """Yield what each text gains by each step's ids (num_prompts,), until all texts have ended."""
    streams = [TextStream(tokenizer, stops, ends, prompt) for prompt in prompts]
    for ids in steps:
        yield [stream.push(token) for stream, token in zip(streams, ids.tolist(), strict=True)]
        if all(stream.ended for stream in streams):
            break
    yield [stream.end() for stream in streams]
