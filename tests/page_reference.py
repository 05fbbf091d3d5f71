"""What the page of a model computes, by its definition: passes over whole windows, in Python."""

import base64
import copy
import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from helpers import decode
from reference import filter_logits
from torch import Tensor
from torch.nn.functional import adaptive_max_pool2d

from engine.data.chats.chat import Turn, encode_chat
from engine.generation.decoding_engine import window_start
from engine.generation.text_batch import banned_tokens
from engine.generation.text_generator import TextGenerator
from engine.report.attention_maps import (
    attention_maps,
    encode_triangles,
    shared_character,
    token_label,
)
from engine.report.model_page import dequantize, quantize
from model import GPT

NUM_LIKELY_TOKENS = 10
MAX_THUMBNAIL_TOKENS = 32
NO_FILTERS = {"temperature": 1.0, "top_k": None, "top_p": 1.0}


class Reference:
    """The answers of the page of a model, which has the model's weights in 8 bits."""

    def __init__(self, generator: TextGenerator):
        self.model = dequantize(generator.model, quantize(generator.model))
        self.generator = replace(generator, model=self.model)
        self.tokenizer = generator.tokenizer
        self.banned = banned_tokens(self.tokenizer, self.model, generator.ends.token_ids)

    def without(self, off: Sequence[Sequence[int]]) -> GPT:
        """Return the model without heads, (layer, head) from 1, which the projection ignores."""
        model = copy.deepcopy(self.model)
        width = model.config.head_width
        for layer, head in off:
            weight = model.blocks[layer - 1].attention.projection.weight.data
            weight[:, (head - 1) * width : head * width] = 0
        return model

    def window(self, ids: Sequence[int], at: int) -> tuple[int, Tensor]:
        """Return the start and the ids of the window in which a position attends."""
        start = window_start(at + 1, self.model.config.context_length)
        return start, torch.tensor(ids[start : start + self.model.config.context_length])

    def describe(self, before: Sequence[int], models: Sequence[GPT], filters: Any) -> Any:
        """Return what the page's table shows of the token after ids, and each bits of surprise."""
        start = window_start(len(before), self.model.config.context_length)
        logits = [model(torch.tensor([before[start:]]))[:, -1].float() for model in models]
        full, without = (each[0].log_softmax(0) for each in (logits[0], logits[-1]))
        allowed = logits[-1].index_fill(-1, torch.tensor(self.banned, dtype=torch.long), -torch.inf)
        weights, kept = filter_logits(allowed, **filters)
        drawn = torch.zeros(len(full)).scatter(0, kept[0], weights[0] / weights.sum())
        p = torch.stack((full.exp(), without.exp(), drawn), dim=1).tolist()
        likely = torch.maximum(full, without).topk(min(NUM_LIKELY_TOKENS, len(full))).indices
        rows = [[token, token_label(self.tokenizer, token), *p[token]] for token in likely.tolist()]
        return rows, p, (torch.stack((full, without), dim=1) / -math.log(2)).tolist()

    @torch.inference_mode()
    def read(self, ids: Sequence[int], off: Any = (), **filters: Any) -> dict[str, Any]:
        """Describe each token of a text, and the next one."""
        models = [self.model, *([self.without(off)] if off else [])]
        tokens: list[Any] = [{}]
        for at in range(1, len(ids) + 1):
            rows, p, bits = self.describe(ids[:at], models, NO_FILTERS | filters)
            target = {"p": p[ids[at]], "bits": bits[ids[at]]} if at < len(ids) else {}
            tokens.append({"likely": rows, **target})
        for at, token in enumerate(ids):
            text = token_label(self.tokenizer, token)
            shared = shared_character(self.tokenizer, ids[: at + 1])
            tokens[at] |= {"id": token, "text": text, "shared": shared and [*shared]}
        return {"tokens": tokens[:-1], "next": tokens[-1], "text": self.tokenizer.decode([*ids])}

    def write(self, ids: Sequence[int], count: int, off: Any = (), **options: Any) -> list[int]:
        """Return the ids that follow."""
        return decode(self.without(off), [ids], count, banned=self.banned, **options)[0]

    def chat(self, texts: Sequence[str], **options: Any) -> dict[str, Any]:
        """Return the answer to a chat, its beginning as ids, and whether turns were left out."""
        roles = itertools.cycle(("user", "assistant"))
        turns: list[Turn] = [*zip(roles, texts, strict=False)]
        ids, _ = self.generator.encode_turns(turns, options["max_new_tokens"])
        text = "".join(self.generator.stream_answer(turns, **options))
        is_shortened = ids != encode_chat(self.tokenizer, turns)
        return {"text": text, "ids": ids, "isShortened": is_shortened}

    @torch.inference_mode()
    def heads(self, ids: Sequence[int], at: int, off: Any = ()) -> dict[str, Any]:
        """Return the thumbnails of all heads in the window of a position, and their names."""
        _, window = self.window(ids, at)
        maps = attention_maps(self.without(off), window).flatten(0, 1)
        pieces = [self.tokenizer.decode_bytes([token]) for token in window.tolist()]
        texts = [piece.decode(errors="replace") for piece in pieces]
        size = min(len(window), MAX_THUMBNAIL_TOKENS)
        weights = read_levels(adaptive_max_pool2d(maps, size))
        habits = name_heads(maps, window.tolist(), texts)
        return {"size": size, "weights": weights, "habits": habits}

    @torch.inference_mode()
    def attention(self, ids: Sequence[int], at: int, layer: int, head: int) -> dict[str, Any]:
        """Return the weights of a head in the window of a position."""
        start, window = self.window(ids, at)
        weights = read_levels(attention_maps(self.model, window)[layer - 1, head - 1])
        return {"start": start, "size": len(window), "weights": weights}

    def measure(self, ids: Sequence[int]) -> list[float]:
        """Return the mean bits per token with all heads, and what they add without each."""
        config = self.model.config
        pairs = itertools.product(range(config.num_layers), range(config.num_heads))
        offs = [[], *([[layer + 1, head + 1]] for layer, head in pairs)]
        means = []
        for off in offs:
            tokens = self.read(ids, off)["tokens"][1:]
            means.append(statistics.fmean(token["bits"][1] for token in tokens))
        return [means[0], *(mean - means[0] for mean in means[1:])]


def read_levels(maps: Tensor) -> list[int]:
    """Return the bytes of lower triangles of maps (…, T, T)."""
    return [*base64.b64decode(encode_triangles(maps))]


def list_habits(ids: Sequence[int], texts: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Return each habit with the positions i and j where it looks, in the order of the page."""
    positions = range(len(ids))
    earlier = [(i, j) for i in positions for j in range(i)]
    starts = [j for j in positions if re.search(r"(^|\n)\s*$", "".join(texts[:j]))]
    last_same = [max((j for j in range(i) if ids[j] == ids[i]), default=-9) for i in positions]
    return {
        "itself": [(i, i) for i in positions],
        "previous token": [(i, j) for i, j in earlier if j == i - 1],
        "first token": [(i, j) for i, j in earlier if j == 0],
        "same token before": [(i, j) for i, j in earlier if ids[j] == ids[i]],
        "after the same token": [(i, j) for i, j in earlier if j == last_same[i] + 1],
        "line start": [(i, j) for i, j in earlier if j in starts],
    }


def name_heads(maps: Tensor, ids: Sequence[int], texts: Sequence[str]) -> list[Any]:
    """Name heads (H, T, T) by the habit with the largest excess over equal weights, above 0.2."""
    names = []
    for weights in maps.tolist():
        scores = []
        for title, pairs in list_habits(ids, texts).items():
            count = max(1, len({i for i, _ in pairs}))
            score = sum(weights[i][j] for i, j in pairs) / count
            equal = sum(1 / (i + 1) for i, _ in pairs) / count
            scores.append(((score - equal) / max(1 - equal, 1e-6), title, score))
        excess, title, score = max(scores, key=lambda entry: entry[0])
        names.append([title, score] if excess > 0.2 else None)
    return names
