"""Scores: the fraction of questions that a model answers right, with a confidence interval."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.data.chats.chat import TurnEnds
from engine.data.split import Examples, Split, is_target, token_ids
from engine.data.tokenizer import Tokenizer
from engine.generation.decoding_engine import DecodingEngine, window_start
from engine.generation.text_batch import complete_streams
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

    def grade(self, text: str) -> dict[str, bool]:
        """Return whether a text is the answer, apart from white space around it, if that is known.

        The key is "is_right".
        """
        return {} if self.answer is None else {"is_right": text.strip() == self.answer.strip()}


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
        text = "".join(map(stream.push, answer)) + stream.end()
        yield Question(prompt, len(answer) + EXTRA_TOKENS + ends.num_bytes, text)


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
        streams.append(TextStream(tokenizer, question.prompt, limit, (), ends))
    engine = DecodingEngine(model, cache_dtype)
    pieces = complete_streams(engine, streams, QUESTION_BATCH_SIZE, temperature=0.0)
    answers = answer_questions(model, questions, streams, pieces)
    return sum(questions[index].grade(text)["is_right"] for index, text in answers)


def answer_questions(
    model: GPT,
    questions: Sequence[Question],
    streams: Sequence[TextStream],
    pieces: Iterable[tuple[int, str]],
) -> Iterator[tuple[int, str]]:
    """Yield (index, choice or text) of each question; the pieces continue the streams."""
    for index, question in enumerate(questions):
        if question.choices:
            streams[index].end()
            yield index, choose(model, question)
    texts = [""] * len(questions)
    for index, text in pieces:
        texts[index] += text
        if streams[index].is_finished:
            yield index, texts[index]


def choose(model: GPT, question: Question) -> str:
    """Return the choice with the highest log-likelihood per UTF-8 byte of its text."""

    def rate(choice: str) -> float:
        """Return the log-likelihood of a choice per byte, in nats."""
        ids = question.choices[choice]
        num_targets = max(1, len(ids) - len(question.prompt))
        scores = score_tokens(model, ids[-model.config.context_length - 1 :], num_targets)
        return scores.sum().item() / len(choice.encode())

    return max(question.choices, key=rate)


def score_tokens(model: GPT, ids: Sequence[int], num_targets: int) -> Tensor:
    """Return the logprob of each of the last num_targets ids as in generation, in nats."""
    start = len(ids) - num_targets
    scores = [torch.empty(0)]
    for logits in logits_after(model, ids[:-1], start - 1):
        targets = torch.tensor(ids[start : start + len(logits)], device=logits.device)
        logprobs = logits.float().log_softmax(dim=-1)
        scores.append(logprobs.gather(1, targets[:, None])[:, 0].cpu())
        start += len(logits)
    return torch.cat(scores)


@torch.inference_mode()
def logits_after(model: GPT, ids: Sequence[int], start: int = 0) -> Iterator[Tensor]:
    """Yield the logits after each id from a start on as in generation, (N, V) for the next N."""
    while start < len(ids):
        first = window_start(start + 1, model.config.context_length)
        engine = DecodingEngine(model)
        engine.add(ids[first : first + model.config.context_length])
        if start > first:
            engine.read(0, start - first)
        while engine.rows[0].num_unread:
            logits = engine.read(0, has_all_logits=True)
            start += len(logits)
            yield logits
