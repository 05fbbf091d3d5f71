"""Answers of the live page: likely tokens, surprise, attention, chat; what each head is worth."""

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any

import torch
from annotated_types import Ge, Le, Lt
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from engine.core.errors import UserError
from engine.core.settings import from_values
from engine.data.chats.chat import Turn, encode_chat
from engine.generation.decoding_engine import DecodingEngine, window_start
from engine.generation.sampling import FilterOptions, filter_logits, row_seeds, sample_token
from engine.generation.scores import logits_after, score_tokens
from engine.generation.text_batch import banned_tokens, complete_streams
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream
from engine.nn.inference import build_decoder
from engine.report.attention_maps import (
    attention_by_layer,
    encode_triangles,
    shared_character,
    switch_off,
    token_label,
)
from engine.report.habits import name_heads
from model import GPT

NUM_LIKELY_TOKENS = 10  # in a table
MAX_INSPECTED_TOKENS = 4096  # of a text, prompt and continuation
MAX_PROMPT_CHARACTERS = 50_000  # tokenizing more of one kind of character can take minutes
MAX_THUMBNAIL_TOKENS = 32  # of a head in the grid of all heads
LENGTH_LIMIT_REASON = "reached the length limit"

Heads = tuple[tuple[int, int], ...]  # (layer, head) from 1
Lines = Generator[dict[str, Any], None, None]


@dataclass(frozen=True)
class InspectRequest:
    """A question about a text, about token ids and a text that continues them, or of a chat."""

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
    at: Annotated[int, Ge(0)] = 0  # the position whose attention, or whose table, is inspected

    @property
    def filters(self) -> FilterOptions:
        return FilterOptions(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


class ModelInspector:
    """Answers questions about one model: each answer takes a JSON object and yields JSON objects.

    It raises UserError for an unsuitable question, before the first object.
    """

    def __init__(self, model: TextGenerator, settings: dict[str, Any], prompts: Sequence[str] = ()):
        """Settings are those that the page starts with; prompts are to begin with."""
        self.generator = model
        self.tokenizer = model.tokenizer
        self.config = model.model.config
        self.settings = settings
        self.prompts = list(prompts)
        banned = banned_tokens(model.tokenizer, model.model, model.ends.token_ids)
        self.banned = torch.tensor(banned, dtype=torch.long, device=model.device)
        self.make_stream = partial(TextStream, model.tokenizer, ends=model.ends)
        self.ablate = lru_cache(maxsize=1)(self._ablate)
        self.last_logits = lru_cache(maxsize=1)(self._last_logits)
        answers = [self.about, self.read, self.write, self.predict]
        answers += [self.heads, self.attention, self.measure]
        answers += [self.chat] if model.is_chat_model else []
        self.answers = {answer.__name__: answer for answer in answers}

    def about(self, question: Any) -> Lines:
        """Yield what the page must know about the model."""
        yield {
            "is_chat_model": self.generator.is_chat_model,
            "layers": self.config.num_layers,
            "heads": self.config.num_heads,
            "context_length": self.config.context_length,
            "max_bits": math.log2(self.tokenizer.vocab_size),
            "settings": self.settings,
            "prompts": self.prompts,
        }

    @torch.inference_mode()
    def read(self, question: Any) -> Lines:
        """Yield {tokens: see :meth:`describe`, :func:`shared_character`; next: of these; text}."""
        request = self.parse(question)
        ids = request.ids
        tokens = [{"id": ids[0], "text": token_label(self.tokenizer, ids[0])}]
        all_logits = [logits_after(model, ids) for model in self.models(request.off)]
        for logits in zip(*all_logits, strict=True):
            next_ids = ids[len(tokens) : len(tokens) + len(logits[0])]
            tokens += self.describe(next_ids, logits, request)
        for index in range(len(ids)):
            tokens[index]["shared"] = shared_character(self.tokenizer, ids[: index + 1])
        text = self.tokenizer.decode(list(ids))
        yield {"tokens": tokens[: len(ids)], "next": tokens[-1], "text": text}

    @torch.inference_mode()
    def write(self, question: Any) -> Lines:
        """Yield what :meth:`read` does; for each new token {token, text}; {end: reason}."""
        request = self.parse(question)
        if len(request.ids) == MAX_INSPECTED_TOKENS:
            limit = f"the page shows at most {MAX_INSPECTED_TOKENS:,} tokens"
            raise UserError(f"The text: too long to continue, {limit}. Start a new one.")
        yield from self.read(question)
        (row_seed,) = row_seeds(request.seed, [request.ids])
        max_new_tokens = min(request.max_new_tokens, MAX_INSPECTED_TOKENS - len(request.ids))
        stream = self.make_stream(request.ids, max_new_tokens)
        engines = [DecodingEngine(model) for model in self.models(request.off)]
        for engine in engines:
            engine.add(request.ids, max_new_tokens)
        logits = [engine.read(0) for engine in engines]
        all_ids = request.ids
        while True:
            allowed = logits[-1].index_fill(-1, self.banned, -torch.inf)
            ids = sample_token(allowed, [(row_seed, len(stream.new_ids))], **request.filters)
            (token,) = self.describe(ids, logits, request)
            all_ids += (token["id"],)
            token["shared"] = shared_character(self.tokenizer, all_ids)
            yield {"token": token, "text": stream.push(token["id"])}
            if stream.is_finished:
                break
            logits = [engine.step(ids) for engine in engines]
        yield {"end": LENGTH_LIMIT_REASON if stream.hit_token_limit else "the model ended the text"}

    @torch.inference_mode()
    def predict(self, question: Any) -> Lines:
        """Yield what :meth:`read` does of the token ``at`` a position; 0: of the next token.

        Only the settings may differ from the last question: then nothing is computed again.
        """
        request = self.parse(question)
        at = request.at or len(request.ids)
        logits = self.last_logits(request.ids[:at], request.off)
        yield from self.describe(request.ids[at : at + 1], logits, request)

    @torch.inference_mode()
    def chat(self, question: Any) -> Lines:
        """Yield {text} for each new token of an answer; {end: reason, is_shortened, ids}.

        The ids are those of the chat with the answer, the text is that of
        :meth:`TextGenerator.stream_answer`. A chat that does not fit the context is shortened.
        """
        request = self.parse(question)
        if len(request.turns) % 2 == 0:
            raise UserError("The question: turns must alternate, and end with a question.")
        roles = itertools.cycle(("user", "assistant"))
        turns: list[Turn] = [*zip(roles, request.turns, strict=False)]
        ids, limit = self.generator.encode_turns(turns, request.max_new_tokens)
        stream = self.make_stream(ids, limit)
        engine = DecodingEngine(self.models(request.off)[-1])
        for _, text in complete_streams(engine, [stream], seed=request.seed, **request.filters):
            yield {"text": text}
        yield {
            "end": LENGTH_LIMIT_REASON if stream.hit_token_limit else "the model ended its answer",
            "is_shortened": ids != encode_chat(self.tokenizer, turns),
            "ids": [*ids, *stream.new_ids],
        }

    def heads(self, question: Any) -> Lines:
        """Yield {size, weights, habits} of all heads in the window of ``at``.

        Weights are maps (size, size), of the largest weights: see :func:`encode_triangles`.
        """
        request = self.parse(question)
        _, tokens = self.window(request)
        pieces = map(self.tokenizer.decode_bytes, tokens[:, None].tolist())
        texts = [piece.decode(errors="replace") for piece in pieces]
        size = min(len(tokens), MAX_THUMBNAIL_TOKENS)
        thumbnails = []
        habits = []
        for maps in attention_by_layer(self.models(request.off)[-1], tokens):
            layer_maps = maps.float().cpu()
            habits += name_heads(layer_maps, tokens.cpu(), texts)
            thumbnails.append(adaptive_max_pool2d(layer_maps, size))
        yield {"size": size, "weights": encode_triangles(torch.stack(thumbnails)), "habits": habits}

    def attention(self, question: Any) -> Lines:
        """Yield {start, size, weights} of one head, (size, size), in the window of ``at``."""
        request = self.parse(question)
        start, tokens = self.window(request)
        layers = attention_by_layer(self.models(request.off)[-1], tokens)
        maps = next(itertools.islice(layers, request.layer - 1, None))  # (H, T, T)
        weights = encode_triangles(maps[request.head - 1])
        yield {"start": start, "size": len(tokens), "weights": weights}

    def window(self, request: InspectRequest) -> tuple[int, Tensor]:
        """Return the start and the ids, (T,), of the window in which ``at`` attends."""
        start = window_start(request.at + 1, self.config.context_length)
        ids = request.ids[start : start + self.config.context_length]
        return start, torch.tensor(ids, device=self.generator.device)

    @torch.inference_mode()
    def measure(self, question: Any) -> Lines:
        """Yield {bits: mean bits per token}; for each head {layer, head, bits: added without it}.

        The other heads are all on.
        """
        request = self.parse(question)
        model = build_decoder(self.generator.model)
        bits = mean_bits(model, request.ids)
        yield {"bits": bits}
        heads = range(1, self.config.num_heads + 1)
        for layer, head in itertools.product(range(1, self.config.num_layers + 1), heads):
            with switch_off(model, layer, head):
                added_bits = mean_bits(model, request.ids) - bits
            yield {"layer": layer, "head": head, "bits": added_bits}

    def models(self, off: Heads) -> list[GPT]:
        """Return the model to decode with and, if heads are off, that without them."""
        return [self.generator.decoder, *([self.ablate(off)] if off else [])]

    def _ablate(self, heads: Heads) -> GPT:
        """Build a decoder without some heads."""
        model = build_decoder(self.generator.model)
        for layer, head in heads:
            switch_off(model, layer, head)
        return model

    def _last_logits(self, ids: tuple[int, ...], off: Heads) -> list[Tensor]:
        """Compute the logits after ids, (1, V), of each of :meth:`models`."""
        start = window_start(len(ids), self.config.context_length)
        tokens = torch.tensor([ids[start:]], device=self.generator.device)
        return [model(tokens)[0, -1:] for model in self.models(off)]

    def describe(
        self, ids: Sequence[int], logits: Sequence[Tensor], request: InspectRequest
    ) -> list[dict[str, Any]]:
        """Describe each row of the models' logits (N, V): {likely: [[id, text, p, p, p], …]}.

        The probabilities are those of the full model, without the heads that are off, and after
        temperature, top-k and top-p. The first rows, one for each next token in ``ids``, also
        have {id, text, p: [p, p, p], bits: [full, without]}.
        """
        log_p = torch.stack([*logits]).float().log_softmax(dim=-1)  # (1 or 2, N, V)
        allowed = logits[-1].index_fill(-1, self.banned, -torch.inf)
        weights, kept = filter_logits(allowed, **request.filters)
        drawn = torch.zeros_like(log_p[0])
        drawn.scatter_(-1, kept, weights / weights.sum(dim=-1, keepdim=True))
        num_likely = min(NUM_LIKELY_TOKENS, log_p.shape[-1])
        likely = log_p.amax(dim=0).topk(num_likely).indices  # (N, 10)
        next_ids = likely.new_tensor([*ids, 0][: len(likely)])  # 0: not known, and not shown
        shown = torch.cat((likely, next_ids[:, None]), dim=1)
        full, without = (each.gather(1, shown) for each in (log_p[0], log_p[-1]))
        p = torch.stack((full.exp(), without.exp(), drawn.gather(1, shown)), dim=-1)  # (N, 11, 3)
        bits = torch.stack((full, without), dim=-1)[:, -1] / -math.log(2)
        rows: list[dict[str, Any]] = []
        for tokens, values in zip(likely.tolist(), p.tolist(), strict=True):
            labels = (token_label(self.tokenizer, token) for token in tokens)
            columns = zip(tokens, labels, values, strict=False)
            rows.append({"likely": [[token, label, *triple] for token, label, triple in columns]})
        for row, token in enumerate(ids):
            rows[row]["id"] = token
            rows[row]["text"] = token_label(self.tokenizer, token)
            rows[row]["p"] = p[row, -1].tolist()
            rows[row]["bits"] = bits[row].tolist()
        return rows

    def parse(self, question: Any) -> InspectRequest:
        """Check a question. Raises UserError naming a field that does not fit the model."""
        request = from_values(InspectRequest, question, "the question")
        if max(map(len, (request.text, *request.turns))) > MAX_PROMPT_CHARACTERS:
            problem = f"must have at most {MAX_PROMPT_CHARACTERS:,} characters"
            raise UserError(f"The text: {problem}. Shorten it.")
        if not request.ids:
            request = replace(request, ids=tuple(self.generator.encode_prompt(request.text)))
        elif request.text:
            added = self.tokenizer.without_space.encode(request.text).tolist()
            request = replace(request, ids=(*request.ids, *added))
        if any(len(pair) != 2 or min(pair) < 1 for pair in request.off):
            raise UserError("The question: off must be a list of [layer, head], from 1.")
        pairs = [(request.layer, request.head), *request.off]
        limits = {
            "number of tokens": (len(request.ids), MAX_INSPECTED_TOKENS),
            "id": (max(request.ids), self.generator.model.token_embedding.num_embeddings - 1),
            "layer": (max(layer for layer, _ in pairs), self.config.num_layers),
            "head": (max(head for _, head in pairs), self.config.num_heads),
            "at": (request.at, len(request.ids)),
        }
        for name, (value, limit) in limits.items():
            if value > limit:
                raise UserError(f"The question: {name} must be at most {limit:,} (got {value:,}).")
        return request


def mean_bits(model: GPT, ids: Sequence[int]) -> float:
    """Compute the mean surprise of ids after the first, in bits; 0 for one id."""
    num_targets = len(ids) - 1
    nats = -score_tokens(model, ids, num_targets).sum().item()
    return nats / math.log(2) / max(1, num_targets)
