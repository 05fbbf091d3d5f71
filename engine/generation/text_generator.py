"""A model with its tokenizer: text in, text out."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Unpack, cast

from engine.core.cli import warn
from engine.core.errors import UserError
from engine.data.chat import Turn, encode_chat, end_of_turn
from engine.data.chat import turn_delimiters as turn_delimiters
from engine.data.tokenizer import Tokenizer
from engine.generation.generate import generate_text
from engine.generation.sampling import DEFAULT_OPTIONS, SamplingOptions
from engine.generation.text_stream import stream_texts
from engine.nn.inference import for_decoding
from model import GPT

MAX_SHOWN_CHARACTERS = 40  # of a turn in a warning


class TextGenerator:
    """A model and its tokenizer, to generate text with."""

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        initial_tokens: list[int],
        is_chat_model: bool = False,
        should_compile: bool = False,
    ):
        """initial_tokens replace an empty prompt."""
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.initial_tokens = initial_tokens
        self.is_chat_model = is_chat_model and end_of_turn(tokenizer) is not None
        self.should_compile = should_compile
        self.device = next(model.parameters()).device

    @cached_property
    def decoder(self) -> GPT:
        """The model, prepared for faster decoding."""
        decoder = cast(GPT, for_decoding(self.model, pack=not self.should_compile))
        if self.should_compile:
            decoder.compile(dynamic=True)
        return decoder

    def encode_prompt(self, prompt: str) -> list[int]:
        """Encode a prompt; an empty one becomes the ids that begin a document."""
        return self.tokenizer.encode(prompt).tolist() or self.initial_tokens

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 500,
        stop: Sequence[str] = (),
        **options: Unpack[SamplingOptions],
    ) -> str:
        """Return the text after a prompt.

        Options are temperature, top_k, top_p and seed, by default those of the command line. The
        text ends before any text of ``stop``.
        """
        return "".join(self.stream(prompt, max_new_tokens, stop, **options))

    def stream(
        self,
        prompt: str = "",
        max_new_tokens: int = 500,
        stop: Sequence[str] = (),
        **options: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Yield the text of :meth:`generate` piece by piece."""
        pieces = self._stream([self.encode_prompt(prompt)], max_new_tokens, stop, (), options)
        return (text for (text,) in pieces)

    def generate_samples(
        self,
        num_samples: int,
        prompt: str = "",
        max_new_tokens: int = 500,
        stop: Sequence[str] = (),
        **options: Unpack[SamplingOptions],
    ) -> list[str]:
        """Return several texts after one prompt, drawn in one batch."""
        prompts = [self.encode_prompt(prompt)] * num_samples
        pieces = self._stream(prompts, max_new_tokens, stop, (), options)
        return ["".join(text) for text in zip(*pieces, strict=True)]

    def stream_answer(
        self,
        turns: Sequence[Turn],
        max_new_tokens: int = 500,
        stop: Sequence[str] = (),
        **options: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Yield the assistant's answer to a chat, (role, text) turns, piece by piece."""
        context_length = self.model.config.context_length
        ids, limit = fit_chat(self.tokenizer, turns, context_length, max_new_tokens)
        pieces = self._stream([ids], limit, stop, self.answer_ends, options)
        return (text for (text,) in pieces)

    @property
    def answer_ends(self) -> list[int]:
        """The ids that end an answer: one, or none without tokens for chats."""
        end = end_of_turn(self.tokenizer)
        return [] if end is None else [end]

    def _stream(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        stop: Sequence[str],
        ends: Sequence[int],
        options: SamplingOptions,
    ) -> Iterator[list[str]]:
        """Yield what the text of each prompt gains in each step."""
        options = {**DEFAULT_OPTIONS, **options}
        steps = generate_text(self.decoder, self.tokenizer, prompts, max_new_tokens, ends, **options)
        return stream_texts(steps, self.tokenizer, prompts, stop, ends)


def fit_chat(
    tokenizer: Tokenizer, turns: Sequence[Turn], context_length: int, max_new_tokens: int
) -> tuple[list[int], int]:
    """Encode a chat to fit the context: returns its ids, and the most tokens of the answer.

    Half of the context, or max_new_tokens if less, is reserved for the answer. To fit, the oldest
    turns are dropped, except a system turn at the start, and no answer stays without its question.
    A last turn that alone is too long loses its beginning. Raises UserError if nothing of it fits.
    """
    *encoded, answer_start = encode_chat(tokenizer, turns)
    reserved = min(max_new_tokens, context_length // 2)
    budget = context_length - reserved - len(answer_start)
    last = len(turns) - 1
    num_system = int(turns[0][0] == "system" and last > 0)
    system = [token for ids in encoded[:num_system] for token in ids]
    for start in range(num_system, len(turns)):
        if turns[start][0] != "user" and start != last:
            continue
        history = list(itertools.chain(*encoded[start:]))
        excess = len(system) + len(history) - budget
        if excess <= 0:
            break
    else:
        role, text = turns[last]
        if excess >= len(tokenizer.encode(text)):
            raise UserError(
                f"the system's turn: it takes {len(system)} of the model's {context_length} tokens "
                "of context. Shorten it."
            )
        num_before = len(turn_delimiters(tokenizer, role)[0])
        del history[num_before : num_before + excess]
        shown = text if len(text) < MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
        warn(f"the turn {shown!r} is too long; its first {excess:,} tokens are cut off")
    ids = [*system, *history, *answer_start]
    return ids, min(max_new_tokens, context_length - len(ids))
