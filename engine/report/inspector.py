"""What a model makes of a text: what it holds likely, what surprises it, who attends to whom; also with heads off."""

import itertools
import math
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.data.tokenizer import Tokenizer
from engine.generation.attention_maps import attention_by_layer, visible
from engine.generation.generate import Sequences, TextStream, generate_text, not_text, window_start
from engine.generation.sampling import candidates
from engine.nn.inference import for_decoding

LIKELIEST = 10
MOST_TOKENS = 2048  # of a text that is looked at
MOST_CHARACTERS = 50_000  # of a prompt: tokenizing ever more of one kind can take minutes
MOST_TURNS, NEAR = 2**52, 1000  # a page begins at any turn; another's is not so near
ROWS = 64  # positions whose probabilities, (ROWS, V), exist at one time


def switch_off(model: nn.Module, heads: Iterable[tuple[int, int]]) -> None:
    """Have these heads, (layer, head) from 1, say nothing: the projection sees zeros in their columns."""
    for layer, head in heads:
        attention = model.blocks[layer - 1].attention
        columns = slice((head - 1) * attention.head_width, head * attention.head_width)
        attention.projection.register_forward_pre_hook(partial(_silence, columns))


def _silence(columns: slice, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    mixed = inputs[0].clone()
    mixed[..., columns] = 0
    return mixed


def window_of(at: int, length: int, context_length: int) -> tuple[int, int]:
    """Which of ``length`` tokens are in the window of the one at a position, as it is when text is generated."""
    start = window_start(at + 1, context_length)
    return start, min(length, start + context_length)


def logits_after(model: nn.Module, ids: Sequence[int]) -> Iterator[Tensor]:
    """The logits of what follows each id, as generation has them: (N, V) for the next N ≤ ROWS of them."""
    at, device = 0, next(model.parameters()).device
    while at < len(ids):
        start, end = window_of(at, len(ids), model.config.context_length)
        yield from model(torch.tensor([ids[start:end]], device=device))[0, at - start :].split(ROWS)
        at = end


class Watched(nn.Module):
    """A model, and the logits that it gave last: what a token was chosen by."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.config = model, model.config
        self.eval()

    def forward(self, tokens: Tensor, caches: Sequence | None = None) -> Tensor:
        self.logits = self.model(tokens, caches=caches)
        return self.logits


@dataclass(frozen=True)
class Question:
    """What is asked about a text, or (ids) a text's tokens."""

    text: str = ""
    ids: tuple[int, ...] = ()
    off: tuple[tuple[int, int], ...] = ()  # heads that are switched off: (layer, head), from 1
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 1
    max_new_tokens: int = 1
    layer: int = 1
    head: int = 1
    at: int = 0  # which token looks at those before it
    turn: int | None = None  # of the texts of one page, in the order in which they were asked for

    choice = property(lambda self: {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")})


def number(name: str, value: Any, low: float, high: float) -> Any:
    """The value. Raises UserError unless it is a number from low to high, a whole one if low is."""
    kinds, kind = ((int,), "whole number") if isinstance(low, int) else ((int, float), "number")
    if type(value) not in kinds or not low <= value <= high:
        raise UserError(f"{name} is {str(value)[:40]!r}; it must be a {kind} from {low:,} to {high:,}")
    return value


def numbers(name: str, values: Any, most: int, *limits: int) -> tuple[int, ...]:
    """A list of at most so many whole numbers, as a tuple. Raises UserError if it is none."""
    if not isinstance(values, list) or len(values) > most:
        raise UserError(f"{name} must be a list of at most {most:,}; send that")
    return tuple(number(name, value, *limits) for value in values)


class Inside:
    """Answers questions about one model: each method takes a JSON object and yields JSON objects.

    One computation goes on at a time, and one text is written at a time. They raise ValueError for what can't be asked.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, start: list[int], settings: dict[str, Any]):
        """``start`` are the ids that an empty text begins with, ``settings`` what the page begins with."""
        self.model, self.tokenizer, self.start, self.settings = for_decoding(model), tokenizer, start, settings
        self.device = next(model.parameters()).device
        self.without = lru_cache(1)(partial(self._without, model))  # (heads) → the model with these heads off
        self.maps = lru_cache(1)(self._maps)
        self.never = torch.tensor(not_text(tokenizer, model), dtype=torch.long, device=self.device)
        self.longest = min(model.config.context_length, MOST_TOKENS // 2)  # of a prompt
        self.most_new = MOST_TOKENS - self.longest
        self.computing, self.beginning, self.writing = threading.Lock(), threading.Lock(), 0
        self.answers = {name: getattr(self, name) for name in ("about", "read", "write", "attention")}

    def close(self) -> None:
        """Let what is computed end, and nothing more begin: a thread that computes while Python ends crashes it."""
        self.computing.acquire()

    def _without(self, model: nn.Module, heads: tuple[tuple[int, int], ...]) -> nn.Module:
        switch_off(decoder := for_decoding(model), heads)
        return decoder

    def _maps(self, ids: tuple[int, ...], layer: int, off: tuple[tuple[int, int], ...]) -> Tensor:
        maps = attention_by_layer(self._model(off), torch.tensor(ids, device=self.device))
        return next(itertools.islice(maps, layer - 1, None)).float().cpu()

    def question(self, asked: Any) -> Question:
        """What was asked, checked. Raises UserError naming what is not as it should be."""
        c, given = self.model.config, dict(asked) if isinstance(asked, dict) else {"the question": asked}
        if unknown := given.keys() - Question.__dataclass_fields__.keys():
            raise UserError(f"{min(unknown)[:40]!r} is not to be asked; ask for {', '.join(vars(Question()))}")
        if not isinstance(text := given.get("text", ""), str) or len(text) > MOST_CHARACTERS:
            raise UserError(f"the text must be at most {MOST_CHARACTERS:,} characters; shorten it")
        if "ids" in given:
            given["ids"] = numbers("ids", given["ids"], MOST_TOKENS, 0, c.vocab_size - 1)
        else:
            given["ids"] = tuple(self.tokenizer.encode(text).tolist() or self.start)
            if len(given["ids"]) > self.longest:
                found = f"the text has {len(given['ids']):,} tokens, more than the {self.longest:,} that fit"
                raise UserError(f"{found}; shorten it")
        if not given["ids"]:
            raise UserError("there are no ids; give at least one")
        pairs = given.get("off", [])
        if not isinstance(pairs, list) or not all(isinstance(one, list) and len(one) == 2 for one in pairs):
            raise UserError("off must be a list of [layer, head]; send that")
        limits = {"layer": (1, c.num_layers), "head": (1, c.num_heads), "at": (0, len(given["ids"]) - 1)}
        heads = {(number("layer", i, *limits["layer"]), number("head", j, *limits["head"])) for i, j in pairs}
        given["off"] = tuple(sorted(heads))
        limits |= {"temperature": (0.0, 100), "top_k": (1, 2**24), "top_p": (0.001, 1), "seed": (0, 2**53 - 1)}
        limits |= {"max_new_tokens": (1, self.most_new), "turn": (0, MOST_TURNS)}
        for name in [name for name in limits if name in given and not (name == "top_k" and given[name] is None)]:
            number(name.replace("_", " "), given[name], *limits[name])
        return Question(**given)

    def about(self, asked: Any) -> Iterator[dict]:
        """Yields what the page must know of the model, and begins with."""
        c = self.model.config
        shape = {"layers": c.num_layers, "heads": c.num_heads, "context_length": c.context_length}
        limits = {"longest": self.longest, "most_new": self.most_new, "most_characters": MOST_CHARACTERS}
        settings = self.settings | {"max_new_tokens": min(self.settings["max_new_tokens"], self.most_new)}
        yield shape | limits | {"most_bits": math.log2(self.tokenizer.vocab_size), "settings": settings}

    def read(self, asked: Any) -> Iterator[dict]:
        """Yields {tokens: as :meth:`_described` has them, next: what is likely after the last}."""
        question = self.question(asked)
        with self.computing:
            found = self._read(question)
        yield found

    def write(self, asked: Any) -> Iterator[dict]:
        """Yields what :meth:`read` does, for each new token {token, text: what is sure now}, at last {text, end: why}.

        Another text to write ends this one, before its next token; unless it is an earlier one that arrives late.
        """
        question, end = self.question(asked), "it is as long as was asked"
        mine = secrets.randbelow(MOST_TURNS) if question.turn is None else question.turn
        with self.beginning:
            if not 0 < self.writing - mine < NEAR:
                self.writing = mine
        prompt, most = [*question.ids], question.max_new_tokens
        with self.computing:
            model = Watched(self._model(question.off))
            ids = generate_text(model, self.tokenizer, [prompt], most, seed=question.seed, **question.choice)
            begun = torch.tensor([prompt], device=self.device)
            every = Sequences(self.model, begun, len(prompt) + most) if question.off else None
        stream = TextStream(self.tokenizer)
        for count in range(most + 1):
            with self.computing, torch.inference_mode():
                if self.writing != mine:
                    end = "another was begun"
                    break
                if not count:
                    found = self._read(question)
                else:
                    chosen = next(ids)
                    now = model.logits[:, -1]
                    (token,) = self._described(chosen.tolist(), every.logits() if every else now, now, question)
                    if every:
                        every.append(chosen[:, None])
                    found = {"token": token, "text": stream.push(token["id"])}
            yield found
            if stream.ended:
                end = "the model ended it"
                break
        yield {"text": stream.end(), "end": end}

    def attention(self, asked: Any) -> Iterator[dict]:
        """Yields {start, weights}: how a head looks from the token ``at``, at those from position start up to it."""
        question = self.question(asked)
        start, end = window_of(question.at, len(question.ids), self.model.config.context_length)
        with self.computing:
            maps = self.maps(question.ids[start:end], question.layer, question.off)  # (H, T, T)
        weights = maps[question.head - 1, question.at - start, : question.at - start + 1]
        yield {"start": start, "weights": rounded(weights)}

    def _model(self, off: tuple[tuple[int, int], ...]) -> nn.Module:
        return self.without(off) if off else self.model

    def _read(self, question: Question) -> dict:
        tokens, ids = [{"id": question.ids[0], "text": visible(self.tokenizer, question.ids[0])}], question.ids
        pieces = logits_after(self.model, ids), logits_after(self._model(question.off), ids)
        with torch.inference_mode():
            for every, now in zip(*pieces, strict=True) if question.off else ((one, one) for one in pieces[0]):
                tokens += self._described(ids[len(tokens) : len(tokens) + len(now)], every, now, question)
        return {"tokens": tokens[: len(ids)], "next": tokens[-1]}

    def _described(self, ids: Sequence[int], every: Tensor, now: Tensor, question: Question) -> list[dict]:
        """For each row of logits (N, V), of all heads and of those not off: {likely: [[token, p, p, p], …]}.

        The probabilities are: with all heads, without those that are off, and after temperature, top-k and top-p too.
        Where ids say what came, there are also its {id, text, p: [p, p, p], bits: [of all heads, of those not off]}.
        """
        log_p = torch.stack((every, now)).float().log_softmax(dim=-1)
        weights, kept = candidates(now.index_fill(-1, self.never, -torch.inf), **question.choice)
        drawn = torch.zeros_like(log_p[0]).scatter(-1, kept, weights / weights.sum(dim=-1, keepdim=True))
        p = torch.stack((*log_p.exp(), drawn), dim=-1)  # (N, V, 3)
        likely = p[..., :2].amax(dim=-1).topk(min(LIKELIEST, p.shape[1])).indices  # (N, 10)
        tables = p.gather(1, likely[..., None].expand(-1, -1, 3))
        names = [[visible(self.tokenizer, token) for token in row] for row in likely.tolist()]
        rows = [
            {"likely": [[name, *rounded(row)] for name, row in zip(*pair, strict=True)]}
            for pair in zip(names, tables, strict=True)
        ]
        for at, (token, row) in enumerate(zip(ids, rows, strict=False)):
            row |= {"id": token, "text": visible(self.tokenizer, token), "p": rounded(p[at, token])}
            row |= {"bits": rounded(log_p[:, at, token] / -math.log(2))}
        return rows


def rounded(values: Tensor) -> list[float]:
    """To five digits, which are all that a page shows."""
    return [float(f"{value:.5g}") for value in values.tolist()]
