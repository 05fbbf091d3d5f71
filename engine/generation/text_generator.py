"""A model with its tokenizer: text in, text out."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack, cast

import torch

from engine.core.cli import warn
from engine.core.errors import UserError
from engine.data.chat import Turn, common_length, encode_chat, keys_of, stop_ids
from engine.data.tokenizer import Tokenizer
from engine.generation.generate import complete
from engine.generation.sampling import DEFAULT_OPTIONS, SamplingOptions, TextOptions
from engine.generation.text_stream import TextStream
from engine.nn.inference import for_decoding
from model import GPT

DEFAULT_NEW_TOKENS = 500
MAX_QUOTED_CHARACTERS = 40  # of a turn in a warning


@dataclass
class TextGenerator:
    """A model and its tokenizer, which generate text."""

    model: GPT
    tokenizer: Tokenizer
    initial_tokens: list[int]  # replace an empty prompt
    is_chat_model: bool = False
    should_compile: bool = False
    has_system_turns: bool = True  # whether the model was trained on some, as far as it is recorded

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def decoder(self) -> GPT:
        """The model, prepared for faster decoding."""
        decoder = cast(GPT, for_decoding(self.model, pack=not self.should_compile))
        if self.should_compile:
            decoder.compile(dynamic=True)
        return decoder

    def encode_prompt(self, prompt: str) -> list[int]:
        """Encode a prompt; an empty prompt becomes initial_tokens."""
        return self.tokenizer.encode(prompt).tolist() or self.initial_tokens

    def generate(self, prompt: str = "", **options: Unpack[TextOptions]) -> str:
        """Return the text after a prompt.

        Options are max_new_tokens, temperature, top_k, top_p, seed and stop, by default those of
        the command line. The text ends before any text of ``stop``.
        """
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: str = "", **options: Unpack[TextOptions]) -> Iterator[str]:
        """Yield the text of :meth:`generate` piece by piece."""
        return (text for _, text in self._complete(self.encode_prompt(prompt), **options))

    def generate_samples(
        self, num_samples: int, prompt: str = "", **options: Unpack[TextOptions]
    ) -> list[str]:
        """Return several texts after one prompt, drawn in one batch."""
        texts = [""] * num_samples
        for index, text in self._complete(self.encode_prompt(prompt), (), num_samples, **options):
            texts[index] += text
        return texts

    def stream_answer(self, turns: Sequence[Turn], **options: Unpack[TextOptions]) -> Iterator[str]:
        """Yield the assistant's answer to a chat, (role, text) turns, piece by piece."""
        context_length = self.model.config.context_length
        max_new_tokens = options.get("max_new_tokens", DEFAULT_NEW_TOKENS)
        ids, limit = fit_chat(self.tokenizer, turns, context_length, max_new_tokens)
        options = {**options, "max_new_tokens": limit}
        return (text for _, text in self._complete(ids, stop_ids(self.tokenizer), **options))

    def _complete(
        self,
        prompt: list[int],
        ends: Sequence[int] = (),
        num_samples: int = 1,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        stop: Sequence[str] = (),
        **options: Unpack[SamplingOptions],
    ) -> Iterator[tuple[int, str]]:
        """Yield (index of the sample, text) for each new token, from one batch."""
        streams = [
            TextStream(self.tokenizer, prompt, max_new_tokens, stop, ends)
            for _ in range(num_samples)
        ]
        options = {**DEFAULT_OPTIONS, **options}
        return complete(self.decoder, streams, num_samples, drop_ended=False, **options)


def fit_chat(
    tokenizer: Tokenizer, turns: Sequence[Turn], context_length: int, max_new_tokens: int
) -> tuple[list[int], int]:
    """Return the ids of a chat that fit the context, and the maximum length of the answer.

    Half of the context, or max_new_tokens if less, is reserved for the answer. The oldest turns are
    dropped to fit, except a system turn at the start; an answer is dropped with its question. A
    last turn that is too long by itself loses its beginning. Raises UserError if nothing remains.
    """
    max_length = context_length - min(max_new_tokens, context_length // 2)
    last = len(turns) - 1
    system = [*turns[: turns[0][0] == "system" and last > 0]]
    starts = [i for i in range(len(system), last) if turns[i][0] == "user"]

    def encode_from(start: int) -> list[int]:
        return encode_chat(tokenizer, [*system, *turns[start:]])

    first = bisect.bisect_left(
        starts, True, key=lambda start: len(encode_from(start)) <= max_length
    )
    ids = encode_from([*starts, last][first])
    excess = len(ids) - max_length
    if excess > 0:
        text = turns[last][1]
        empty_turn = (turns[last][0], "", keys_of(turns[last]))
        without_text = encode_chat(tokenizer, [*system, empty_turn])
        if excess >= len(tokenizer.encode(text)):
            size = f"{len(without_text)} of the model's {context_length} tokens of context"
            raise UserError(f"the system turn: too long (got {size}). Shorten it.")
        num_before = common_length(ids, without_text)
        del ids[num_before : num_before + excess]
        quoted = text if len(text) < MAX_QUOTED_CHARACTERS else f"{text[:MAX_QUOTED_CHARACTERS]}…"
        warn(f"the turn {quoted!r} is too long; its first {excess:,} tokens are cut off")
    return ids, min(max_new_tokens, context_length - len(ids))
