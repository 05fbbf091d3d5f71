"""A model with its tokenizer: text in, text out."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Unpack

import torch

from engine.core.cli import count_noun, warn
from engine.core.errors import UserError
from engine.core.settings import propose_name
from engine.data.chats import chat
from engine.data.chats.chat import Turn, TurnEnds
from engine.data.chats.chat_template import TOOLS_ROLE
from engine.data.ids import encode_prompt
from engine.data.tokenizer import Tokenizer
from engine.generation.beam_search import search_text
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import DEFAULT_OPTIONS, TextOptions
from engine.generation.text_batch import complete_streams
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from model import GPT

DEFAULT_NEW_TOKENS = 500
DECODING_BATCH_SIZE = 32
KEPT_ROLES = (TOOLS_ROLE, "system")  # at the start of a chat, however long it becomes


@dataclass
class TextGenerator:
    """A model and its tokenizer, which generate text."""

    model: GPT
    tokenizer: Tokenizer
    initial_tokens: list[int]  # replace an empty prompt
    is_chat_model: bool = False
    should_quantize: bool = False
    parses_special: bool = False  # whether names of special tokens in prompts become these tokens
    sampling: TextOptions = field(default_factory=TextOptions)  # the model's own defaults
    idle_engines: list[DecodingEngine] = field(default_factory=list, init=False)
    warn_once: Callable[[str], None] = field(default_factory=lambda: cache(warn), init=False)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def ends(self) -> TurnEnds:
        """What ends a text, besides the ids of the tokenizer."""
        return chat.turn_ends(self.tokenizer, self.is_chat_model)

    @cached_property
    def decoder(self) -> GPT:
        """The model, prepared for faster decoding."""
        return build_decoder(self.model, self.should_quantize)

    def end_prompt(self, prompt: str) -> str:
        """Return a prompt with the suffix of those that the model was trained on."""
        suffix = self.tokenizer.prompt_suffix
        return prompt and prompt.removesuffix(suffix) + suffix

    def encode_prompt(
        self, prompt: str, parse_special: bool = False, add_suffix: bool = True
    ) -> list[int]:
        """Encode a prompt with the suffix of the training prompts; initial_tokens if it is empty.

        Names of special tokens are text, and a warning says so once, unless they are parsed.
        """
        prompt = self.end_prompt(prompt) if add_suffix else prompt
        parse_special = parse_special or self.parses_special
        names = chat.names_pattern(self.tokenizer, "").findall(prompt)
        if names and not parse_special:
            self.warn_once(
                f"the prompt spells special tokens ({count_noun(len(names), 'name')}), which are "
                "plain text there: --parse-special, or parse_special in a request, reads them"
            )
        ids = encode_prompt(self.tokenizer, prompt, parse_special).tolist()
        return ids or self.initial_tokens

    def generate(self, prompt: str = "", **options: Unpack[TextOptions]) -> str:
        """Return the text after a prompt.

        Options are max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed,
        num_beams and stop, by default those of the command line. The text ends before any text of
        ``stop``. A seed determines the text of a prompt, whatever else is generated with it.
        """
        return "".join(self.stream(prompt, **options))

    def stream(self, prompt: str = "", **options: Unpack[TextOptions]) -> Iterator[str]:
        """Yield the text of :meth:`generate` piece by piece."""
        return (text for _, text in self._complete([self.encode_prompt(prompt)], **options))

    def generate_samples(
        self, num_samples: int, prompt: str = "", **options: Unpack[TextOptions]
    ) -> list[str]:
        """Return ``num_samples`` texts after one prompt; the first is that of :meth:`generate`."""
        prompts = [self.encode_prompt(prompt)] * num_samples
        texts = [""] * num_samples
        for index, text in self._complete(prompts, **options):
            texts[index] += text
        return texts

    def stream_answer(self, turns: Sequence[Turn], **options: Unpack[TextOptions]) -> Iterator[str]:
        """Yield the assistant's answer to a chat, (role, text) turns, piece by piece."""
        ids, limit = self.encode_turns(turns, options.get("max_new_tokens", DEFAULT_NEW_TOKENS))
        options = {**options, "max_new_tokens": limit}
        return (text for _, text in self._complete([ids], **options))

    def encode_turns(self, turns: Sequence[Turn], max_new_tokens: int) -> tuple[list[int], int]:
        """Return the result of fit_chat. Warns once if turns are left out."""
        context_length = self.model.config.context_length
        ids, limit = fit_chat(self.tokenizer, turns, context_length, max_new_tokens)
        has_old_turns = any(turn[0] not in KEPT_ROLES for turn in turns[:-1])
        if has_old_turns and ids != chat.encode_chat(self.tokenizer, turns):
            context = f"the context of {count_noun(context_length, 'token')}"
            self.warn_once(f"a chat is longer than {context}: its oldest turns are left out")
        return ids, limit

    def _complete(
        self, prompts: Iterable[list[int]], **options: Unpack[TextOptions]
    ) -> Iterator[tuple[int, str]]:
        """Yield (index of the prompt, text) piece by piece. Raises UserError for other options."""
        for name in options.keys() - TextOptions.__optional_keys__:
            meant = propose_name(name, TextOptions.__optional_keys__)
            raise UserError(f"{name}: unknown option of text generation. {meant}")
        max_new_tokens = options.pop("max_new_tokens", DEFAULT_NEW_TOKENS)
        stop = options.pop("stop", ())
        streams = [
            TextStream(self.tokenizer, prompt, max_new_tokens, stop, self.ends)
            for prompt in prompts
        ]
        return self.complete(streams, **options)

    def complete(
        self, streams: Sequence[TextStream], **options: Unpack[TextOptions]
    ) -> Iterator[tuple[int, str]]:
        """Yield (index of the stream, text) until all have ended: sampled, or by beam search."""
        defaults: TextOptions = {**DEFAULT_OPTIONS, "batch_size": DECODING_BATCH_SIZE}
        options = {**defaults, **self.sampling, **options}
        if num_beams := options.pop("num_beams", None):
            for index, stream in enumerate(streams):
                if not stream.is_finished:
                    yield index, search_text(self.decoder, stream, num_beams)
            return
        engine = self.idle_engines.pop() if self.idle_engines else DecodingEngine(self.decoder)
        try:
            yield from complete_streams(engine, streams, **options)
        finally:
            engine.keep([])
            if engine.captures:  # the next text need not capture tokens again
                self.idle_engines.append(engine)


def fit_chat(
    tokenizer: Tokenizer, turns: Sequence[Turn], context_length: int, max_new_tokens: int
) -> tuple[list[int], int]:
    """Return the ids of a chat that fit the context, and the maximum length of the answer.

    Half of the context, or max_new_tokens if less, is reserved for the answer. The oldest turns are
    dropped to fit, except tools and system turns at the start; an answer is dropped with its
    question. Raises UserError if the last turn leaves no room for an answer.
    """
    max_length = context_length - min(max_new_tokens, context_length // 2)
    last = len(turns) - 1
    kept = [*itertools.takewhile(lambda turn: turn[0] in KEPT_ROLES, turns[:last])]
    starts = [i for i in range(len(kept), last) if i == len(kept) or turns[i][0] == "user"]

    def encode_from(start: int) -> list[int]:
        return chat.encode_chat(tokenizer, [*kept, *turns[start:]])

    first = bisect_left(starts, True, key=lambda start: len(encode_from(start)) <= max_length)
    ids = encode_from([*starts, last][first])
    if len(ids) >= context_length:
        size = f"{len(ids)} tokens, the context has {context_length}"
        raise UserError(f"the last turn with the system turn: too long (got {size}). Shorten it.")
    return ids, min(max_new_tokens, context_length - len(ids))
