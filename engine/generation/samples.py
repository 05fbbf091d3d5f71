"""Samples of a run: the prompts, chosen from its data, and what a model writes after them."""

import itertools
from collections.abc import Iterator, Sequence

import torch

from engine.core.errors import UserError
from engine.data.chats.chat import turn_ends
from engine.data.dataset import Dataset
from engine.data.split import prompt_ids
from engine.data.tokenizer import Tokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import DEFAULT_OPTIONS, TextOptions
from engine.generation.text_batch import complete_streams
from engine.generation.text_stream import TextStream
from model import GPT

NUM_PROMPTS = 3
PROMPT_TOKENS = 12  # of text
MAX_LINE_TOKENS = 256  # searched for the start of a line


def choose_prompts(data: Dataset) -> list[list[int]]:
    """Return the ids of the prompts: the start of the text, and beginnings of validation lines.

    Of examples they are the first validation prompts that are not empty, if there are any.
    """
    val = data.val
    if val.num_examples:
        prompts = map(prompt_ids, itertools.islice(val.examples(), NUM_PROMPTS))
        return [*filter(None, prompts)] or [read_start(data)]
    return [read_start(data), *filter(None, read_lines(data, NUM_PROMPTS - 1, PROMPT_TOKENS))]


def read_start(data: Dataset) -> list[int]:
    """Return the first PROMPT_TOKENS ids of the validation text.

    If that is inside a document, the only one, they are those of the training text.
    """
    is_single = data.manifest["splits"]["train"]["documents"] < 2
    split = data.datasets[0].train if is_single else data.val
    ids, _ = split.read(0, PROMPT_TOKENS)
    return trim_incomplete_characters(data.tokenizer, ids.tolist())


def read_lines(data: Dataset, count: int, num_tokens: int) -> list[list[int]]:
    """Return the first ids of evenly spaced lines of validation text, num_tokens of each."""
    tokenizer = data.tokenizer
    val = data.val
    lines = []
    for index in range(1, count + 1):
        start = index * len(val) // (count + 1)
        ids = val.read(start, start + MAX_LINE_TOKENS + num_tokens)[0].tolist()
        pieces = (tokenizer.decode_bytes([token]) for token in ids[:MAX_LINE_TOKENS])
        first = next((end for end, piece in enumerate(pieces, 1) if piece.endswith(b"\n")), 0)
        line = ids[first : first + num_tokens]
        marks = (tokenizer.end_of_text_id, *tokenizer.text_start)
        text_ids = [token for token in line if token not in marks]
        text_ids = trim_incomplete_characters(tokenizer, text_ids)
        lines.append([*tokenizer.text_start, *text_ids] if text_ids else line)
    return lines


def trim_incomplete_characters(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return ids without those at both ends that are only a part of a character."""
    kept = ids
    while kept and tokenizer.decode(kept).startswith("\ufffd"):
        kept = kept[1:]
    while kept and tokenizer.decode(kept).endswith("\ufffd"):
        kept = kept[:-1]
    return kept or ids


def stream_samples(
    model: GPT,
    data: Dataset,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seed: int,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield (index of the prompt, text) piece by piece; an error if the model has diverged."""
    tokenizer = data.tokenizer
    ends = turn_ends(tokenizer, data.learns_chats)
    streams = [TextStream(tokenizer, ids, max_new_tokens, (), ends) for ids in prompts]
    options: TextOptions = {**DEFAULT_OPTIONS, "seed": seed, "batch_size": NUM_PROMPTS}
    try:
        engine = DecodingEngine(model, cache_dtype)
        yield from complete_streams(engine, streams, **options)
    except UserError as error:  # logits that are not finite
        yield from ((index, f"none: {error}") for index in range(len(streams)))
