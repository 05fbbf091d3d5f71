"""Scores: the fraction of questions that a model answers right, with a confidence interval."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.core.errors import UserError
from engine.core.files import to_json
from engine.data.chats.chat import TurnEnds, encode_chat
from engine.data.chats.chat_template import parse_value
from engine.data.chats.examples import Record
from engine.data.split import Examples, Split, is_target, token_ids
from engine.data.tokenizer import Tokenizer
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.prompt_file import encode_line, locate_errors, read_prompt, read_turns
from engine.generation.text_batch import complete_streams
from engine.generation.text_generator import DEFAULT_NEW_TOKENS, TextGenerator
from engine.generation.text_stream import TextStream
from model import GPT

NORMAL_QUANTILE = 1.959964  # for an interval of 95%
EXTRA_TOKENS = 8  # of an answer with the text of the right one, but other tokens
QUESTION_BATCH_SIZE = 32


@dataclass(frozen=True)
class Question:
    """A prompt, its right answer if that is known, and the choices if there are any."""

    prompt: list[int]
    max_new_tokens: int
    answer: str | None = None
    choices: dict[str, list[int]] = field(default_factory=dict)  # text → ids, with the prompt


def encode_questions(lines: Iterable[tuple[str, Any]], model: TextGenerator) -> Iterator[Question]:
    """Yield the question of each line of a file. Raises UserError for an unsuitable one."""
    for location, line in lines:
        with locate_errors(location):
            yield encode_question(line, model)


def encode_question(line: Record, model: TextGenerator) -> Question:
    """Return the question of a line, with the answer in its field, or in the chat's last message.

    Choices follow a prompt after a space, unless there is white space already.
    """
    choices, answer = parse_answer(line)
    tokenizer = model.tokenizer
    ids, limit = encode_line(line, model, model.is_chat_model, DEFAULT_NEW_TOKENS)
    rows = {}
    if model.is_chat_model:
        turns, last = read_turns(line, model)
        answer = answer if last is None else last
        for text in choices:
            ids = encode_chat(tokenizer, turns)
            rows[text] = encode_chat(tokenizer, [*turns, ("assistant", text)], None, True)
    elif choices:
        prompt = model.end_prompt(read_prompt(line))
        encode = partial(model.encode_prompt, add_suffix=False)
        ids = encode(prompt.rstrip())  # spaces before a choice may be encoded with it
        for text in choices:
            touches = prompt and not prompt[-1].isspace() and not text[0].isspace()
            choice = f"{prompt} {text}" if touches else prompt + text
            rows[text] = encode(choice)
            if not prompt.strip():
                rows[text] = ids + tokenizer.without_space.encode(choice).tolist()
    longest = max(map(len, rows.values()), default=0) - len(ids)
    if longest >= model.model.config.context_length:
        raise UserError(f"'choices' must fit in the context (got {longest} tokens).")
    return Question(ids, limit, answer, rows)


def parse_answer(line: Record) -> tuple[list[str], str | None]:
    """Return the choices of a line, and its answer: of choices the text, or the index from 0.

    Raises UserError for choices that are not texts, and for an answer that is none of them.
    """
    answer = line.get("answer")
    choices = parse_value(line.get("choices"))
    if not choices:
        return [], str(answer) if isinstance(answer, str | int) else None
    if not isinstance(choices, list) or not all(isinstance(text, str) and text for text in choices):
        raise UserError(f"'choices' must be a list of texts (got {to_json(choices)[:40]}).")
    if type(answer) is int and 0 <= answer < len(choices):
        answer = choices[answer]
    if answer is not None and answer not in choices:
        raise UserError(f"'answer' must be a choice, or its index from 0 (got {answer!r}).")
    return choices, answer


def score_record(num_right: float, num_questions: int) -> dict[str, float]:
    """Return a score, and its interval of 95%: Wilson 1927, "Probable Inference"."""
    z = NORMAL_QUANTILE
    center = (num_right + z**2 / 2) / (num_questions + z**2)
    variance = num_right * (num_questions - num_right) / num_questions + z**2 / 4
    margin = z * math.sqrt(variance) / (num_questions + z**2)
    return {
        "val_score": num_right / num_questions,
        "val_score_low": max(0.0, center - margin),
        "val_score_high": min(1.0, center + margin),
    }


def describe_score(record: dict[str, float]) -> str:
    """Return the score in a record as text."""
    score, low, high = (100 * record[f"val_score{suffix}"] for suffix in ("", "_low", "_high"))
    return f"{score:.1f}% right ({low:.1f} to {high:.1f}%)"


def select_evenly(num_items: int, max_items: int) -> list[int]:
    """Return up to max_items indices of items, evenly spaced."""
    return np.linspace(0, num_items - 1, min(num_items, max_items)).astype(np.int64).tolist()


def example_questions(
    examples: Split, tokenizer: Tokenizer, ends: TurnEnds, max_questions: int
) -> Iterator[Question]:
    """Yield the questions of a split of examples, evenly spaced: of each, its last answer."""
    assert isinstance(examples, Examples)
    for index in select_evenly(examples.num_examples, max_questions):
        example = examples.example(index)
        is_counted = is_target(example)
        end = np.flatnonzero(is_counted)[-1] + 1  # of the last consecutive targets
        first = np.append(-1, np.flatnonzero(~is_counted[:end]))[-1] + 1
        prompt = token_ids(example[:first]).tolist()
        answer = example[first:end].tolist()
        stream = TextStream(tokenizer, prompt, ends=ends)
        for token in answer:
            stream.push(token)
        stream.end()
        yield Question(prompt, len(answer) + EXTRA_TOKENS + ends.num_bytes, stream.text)


def count_right(
    model: GPT,
    tokenizer: Tokenizer,
    ends: TurnEnds,
    questions: Sequence[Question],
    cache_dtype: torch.dtype | None = None,
) -> int:
    """Return how many questions a model in evaluation mode answers right, with greedy text."""
    streams = []
    for question in questions:
        answer_bytes = len((question.answer or "").encode())  # at least its number of tokens
        limit = min(question.max_new_tokens, answer_bytes + EXTRA_TOKENS + ends.num_bytes)
        limit = 0 if question.choices else limit
        streams.append(TextStream(tokenizer, question.prompt, limit, (), ends))
    engine = DecodingEngine(model, cache_dtype)
    for _ in complete_streams(engine, streams, batch_size=QUESTION_BATCH_SIZE, temperature=0.0):
        pass
    num_right = 0
    for stream, question in zip(streams, questions, strict=True):
        text = choose(model, question) if question.choices else stream.text
        num_right += text.strip() == (question.answer or "").strip()
    return num_right


def choose(model: GPT, question: Question) -> str:
    """Return the choice with the highest log-likelihood per UTF-8 byte of its text."""
    engine = DecodingEngine(model)

    def rate(choice: str) -> float:
        """Return the log-likelihood of a choice per byte, in nats."""
        ids = question.choices[choice][-model.config.context_length :]
        targets = torch.tensor(ids[1:], dtype=torch.long, device=engine.device)
        engine.add(ids)
        row = engine.rows[-1]
        logprobs = []
        while row.num_unread:
            chunk = targets[row.num_cached :, None]
            logits = engine.read(0, has_all_logits=True)[: len(chunk)]
            all_logprobs = logits.float().log_softmax(dim=-1)
            logprobs += all_logprobs.gather(1, chunk[: len(logits)])[:, 0].tolist()
        engine.keep([])
        num_targets = max(1, len(question.choices[choice]) - len(question.prompt))
        return math.fsum(logprobs[-num_targets:]) / len(choice.encode())

    return max(question.choices, key=rate)
