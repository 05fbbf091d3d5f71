"""Answers of the live page: likely tokens, surprise, attention, chat; also without some heads."""

import copy
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.settings import from_values
from engine.data.chats.chat import Turn, encode_chat
from engine.generation.decoding_engine import DecodingEngine, window_start
from engine.generation.sampling import FilterOptions, filter_logits, row_seeds, sample_token
from engine.generation.text_batch import banned_tokens, complete_streams
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from engine.report.attention_maps import attention_by_layer, shared_character, token_label
from model import GPT, Block

NUM_LIKELY_TOKENS = 10  # in a table
MAX_INSPECTED_TOKENS = 2048  # of a text, prompt and continuation
MAX_PROMPT_CHARACTERS = 50_000  # tokenizing more of one kind of character can take minutes
MAX_LOGIT_ROWS = 64  # positions whose probabilities, (rows, V), exist at one time
LENGTH_LIMIT_REASON = "reached the length limit"

Heads = tuple[tuple[int, int], ...]  # (layer, head) from 1
Lines = Generator[dict[str, Any], None, None]


@dataclass(frozen=True)
class InspectRequest:
    """A question about a text, about a text's token ids, or of a chat."""

    text: str = ""
    ids: Annotated[tuple[int, ...], Ge(0)] = ()
    turns: tuple[str, ...] = ()  # of a chat: question, answer, …, question
    off: Heads = ()  # heads that are switched off
    temperature: Annotated[float, Ge(0), Le(100)] = 1.0
    top_k: Annotated[int | None, Ge(1)] = None
    top_p: Annotated[float, Ge(0.001), Le(1)] = 1.0
    seed: Annotated[int, Ge(0), Lt(2**53)] = 1
    max_new_tokens: Annotated[int, Ge(1)] = 1
    layer: Annotated[int, Ge(1)] = 1
    head: Annotated[int, Ge(1)] = 1
    at: Annotated[int, Ge(0)] = 0  # the position whose attention is inspected

    @property
    def filters(self) -> FilterOptions:
        return FilterOptions(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class ModelInspector:
    """Answers questions about one model: each answer takes a JSON object and yields JSON objects.

    It raises UserError for an unsuitable question, before the first object.
    """

    def __init__(self, model: TextGenerator, settings: dict[str, Any]):
        """Settings are those that the page starts with."""
        self.generator = model
        self.tokenizer = model.tokenizer
        self.config = model.model.config
        self.settings = settings
        banned = banned_tokens(model.tokenizer, model.model, model.stop_token_ids)
        self.banned = torch.tensor(banned, dtype=torch.long, device=model.device)
        self.make_stream = partial(TextStream, model.tokenizer, stop_token_ids=model.stop_token_ids)
        self.max_prompt_tokens = min(self.config.context_length, MAX_INSPECTED_TOKENS // 2)
        self.max_new_tokens = MAX_INSPECTED_TOKENS - self.max_prompt_tokens
        self.ablate = lru_cache(maxsize=1)(self._ablate)
        self.layer_maps = lru_cache(maxsize=1)(self._layer_maps)
        answers = [self.about, self.read, self.write, self.attention]
        answers += [self.chat] if model.is_chat_model else []
        self.answers = {answer.__name__: answer for answer in answers}

    def about(self, question: Any) -> Lines:
        """Yield what the page must know about the model."""
        max_new_tokens = min(self.settings["max_new_tokens"], self.max_new_tokens)
        yield {
            "is_chat_model": self.generator.is_chat_model,
            "layers": self.config.num_layers,
            "heads": self.config.num_heads,
            "context_length": self.config.context_length,
            "max_prompt_tokens": self.max_prompt_tokens,
            "max_new_tokens": self.max_new_tokens,
            "max_characters": MAX_PROMPT_CHARACTERS,
            "max_bits": math.log2(self.tokenizer.vocab_size),
            "settings": {**self.settings, "max_new_tokens": max_new_tokens},
        }

    @torch.inference_mode()
    def read(self, question: Any) -> Lines:
        """Yield {tokens: see :meth:`describe`, :func:`shared_character`; next: likely tokens}."""
        request = self.parse(question)
        ids = request.ids
        tokens = [{"id": ids[0], "text": token_label(self.tokenizer, ids[0])}]
        all_logits = [logits_after(model, ids) for model in self.models(request.off)]
        for logits in zip(*all_logits, strict=True):
            next_ids = ids[len(tokens) : len(tokens) + len(logits[0])]
            tokens += self.describe(next_ids, logits, request)
        for index in range(len(ids)):
            tokens[index]["shared"] = shared_character(self.tokenizer, ids[: index + 1])
        yield {"tokens": tokens[: len(ids)], "next": tokens[-1]}

    @torch.inference_mode()
    def write(self, question: Any) -> Lines:
        """Yield what :meth:`read` does; for each new token {token, text}; {end: reason}."""
        request = self.parse(question)
        yield from self.read(question)
        engines = [DecodingEngine(model) for model in self.models(request.off)]
        for engine in engines:
            engine.add(request.ids)
        logits = [engine.read(0) for engine in engines]
        (row_seed,) = row_seeds(request.seed, [request.ids])
        stream = self.make_stream(request.ids, request.max_new_tokens)
        all_ids = request.ids
        while True:
            allowed = logits[-1].index_fill(-1, self.banned, -torch.inf)
            ids = sample_token(allowed, [(row_seed, stream.num_tokens)], **request.filters).tolist()
            (token,) = self.describe(ids, logits, request)
            all_ids += (token["id"],)
            token["shared"] = shared_character(self.tokenizer, all_ids)
            yield {"token": token, "text": stream.push(token["id"])}
            if stream.is_finished:
                break
            logits = [engine.step(ids) for engine in engines]
        yield {"end": LENGTH_LIMIT_REASON if stream.hit_token_limit else "the model ended the text"}

    @torch.inference_mode()
    def chat(self, question: Any) -> Lines:
        """Yield {text} for each new token of an answer; {end: reason, is_shortened}.

        The text is that of :meth:`TextGenerator.stream_answer`. A chat that does not fit the
        context is shortened.
        """
        request = self.parse(question)
        if len(request.turns) % 2 == 0:
            raise UserError("The question: turns must alternate, and end with a question.")
        roles = itertools.cycle(("user", "assistant"))
        turns: list[Turn] = [*zip(roles, request.turns, strict=False)]
        ids, limit = self.generator.encode_turns(turns, request.max_new_tokens)
        stream = self.make_stream(ids, limit)
        model = self.models(request.off)[-1]
        for _, text in complete_streams(model, [stream], seed=request.seed, **request.filters):
            yield {"text": text}
        yield {
            "end": LENGTH_LIMIT_REASON if stream.hit_token_limit else "the model ended its answer",
            "is_shortened": ids != encode_chat(self.tokenizer, turns),
        }

    def attention(self, question: Any) -> Lines:
        """Yield {start, weights}: the weights of position ``at`` over positions start … at."""
        request = self.parse(question)
        start, end = window_of(request.at, len(request.ids), self.config.context_length)
        maps = self.layer_maps(request.ids[start:end], request.layer, request.off)  # (H, T, T)
        position = request.at - start
        weights = maps[request.head - 1, position, : position + 1]
        yield {"start": start, "weights": round_values(weights)}

    def models(self, off: Heads) -> list[GPT]:
        """Return the model to decode with and, if heads are off, that without them."""
        return [self.generator.decoder, *([self.ablate(off)] if off else [])]

    def _ablate(self, heads: Heads) -> GPT:
        """Copy the model with projections that ignore some heads. Other tensors are shared."""
        original = self.generator.model
        model = copy.deepcopy(original, {id(tensor): tensor for tensor in original.parameters()})
        for layer, head in heads:
            attention = cast(Block, model.blocks[layer - 1]).attention
            weight = attention.projection.weight.detach().clone()
            width = self.config.head_width
            weight[:, (head - 1) * width : head * width] = 0
            attention.projection.weight = nn.Parameter(weight, requires_grad=False)
        return build_decoder(model)

    def _layer_maps(self, ids: tuple[int, ...], layer: int, off: Heads) -> Tensor:
        """Compute the attention maps of one layer, (H, T, T)."""
        tokens = torch.tensor(ids, device=self.generator.device)
        maps = attention_by_layer(self.models(off)[-1], tokens)
        return next(itertools.islice(maps, layer - 1, None)).float().cpu()

    def describe(
        self, ids: Sequence[int], logits: Sequence[Tensor], request: InspectRequest
    ) -> list[dict[str, Any]]:
        """Describe each row of the models' logits (N, V): {likely: [[token, p, p, p], …]}.

        The probabilities are those of the full model, without the heads that are off, and after
        temperature, top-k and top-p. The first rows, one for each next token in ``ids``, also
        have {id, text, p: [p, p, p], bits: [full, without]}.
        """
        log_p = torch.stack((logits[0], logits[-1])).float().log_softmax(dim=-1)
        allowed = logits[-1].index_fill(-1, self.banned, -torch.inf)
        weights, kept = filter_logits(allowed, **request.filters)
        drawn = torch.zeros_like(log_p[0])
        drawn.scatter_(-1, kept, weights / weights.sum(dim=-1, keepdim=True))
        p = torch.stack((*log_p.exp(), drawn), dim=-1)  # (N, V, 3)
        likely = p[..., :2].amax(dim=-1).topk(min(NUM_LIKELY_TOKENS, p.shape[1])).indices  # (N, 10)
        rows: list[dict[str, Any]] = []
        for row, tokens in enumerate(likely.tolist()):
            table = [[token_label(self.tokenizer, i), *round_values(p[row, i])] for i in tokens]
            rows.append({"likely": table})
        for row, token in enumerate(ids):
            rows[row] |= {
                "id": token,
                "text": token_label(self.tokenizer, token),
                "p": round_values(p[row, token]),
                "bits": round_values(log_p[:, row, token] / -math.log(2)),
            }
        return rows

    def parse(self, question: Any) -> InspectRequest:
        """Check a question. Raises UserError naming a field that does not fit the model."""
        request = from_values(InspectRequest, question, "the question")
        num_characters = len(request.text) + sum(map(len, request.turns))
        if num_characters > MAX_PROMPT_CHARACTERS:
            size = f"got {num_characters:,} of at most {MAX_PROMPT_CHARACTERS:,} characters"
            raise UserError(f"The text: too long ({size}). Shorten it.")
        if not request.ids:
            ids = tuple(self.generator.encode_prompt(request.text))
            if len(ids) > self.max_prompt_tokens:
                size = f"got {len(ids):,} of at most {self.max_prompt_tokens:,} tokens"
                raise UserError(f"The text: too long ({size}). Shorten it.")
            request = replace(request, ids=ids)
        if any(len(pair) != 2 or min(pair) < 1 for pair in request.off):
            raise UserError("The question: off must be a list of [layer, head], from 1.")
        layers, heads = zip((request.layer, request.head), *request.off, strict=True)
        limits = {
            "number of ids": (len(request.ids), MAX_INSPECTED_TOKENS),
            "id": (max(request.ids), self.generator.model.token_embedding.num_embeddings - 1),
            "layer": (max(layers), self.config.num_layers),
            "head": (max(heads), self.config.num_heads),
            "at": (request.at, len(request.ids) - 1),
            "max_new_tokens": (request.max_new_tokens, self.max_new_tokens),
        }
        for name, (value, limit) in limits.items():
            if value > limit:
                raise UserError(f"The question: {name} must be at most {limit:,} (got {value:,}).")
        return request


def window_of(position: int, length: int, context_length: int) -> tuple[int, int]:
    """Return the start and end of the window in which generation predicts after a position."""
    start = window_start(position + 1, context_length)
    return start, min(length, start + context_length)


def logits_after(model: GPT, ids: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits after each id as in generation, (N, V) for the next N ≤ MAX_LOGIT_ROWS."""
    device = next(model.parameters()).device
    position = 0
    while position < len(ids):
        start, end = window_of(position, len(ids), model.config.context_length)
        logits = model(torch.tensor([ids[start:end]], device=device))[0, position - start :]
        yield from logits.split(MAX_LOGIT_ROWS)
        position = end


def round_values(values: Tensor) -> list[float]:
    """Round to as many digits as the page shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]
