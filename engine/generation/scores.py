"""Scores: the fraction of questions that a model answers right, with a confidence interval."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.data.split import Examples, Split, is_target, token_ids
from engine.data.tokenizer import Tokenizer
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
    examples: Split, tokenizer: Tokenizer, stop_token_ids: Sequence[int], max_questions: int
) -> Iterator[Question]:
    """Yield the questions of a split of examples, evenly spaced: of each, its last answer."""
    assert isinstance(examples, Examples)
    for index in select_evenly(examples.num_examples, max_questions):
        example = examples.example(index)
        targets = np.flatnonzero(is_target(example))
        first = targets[np.flatnonzero(np.diff(targets, prepend=-1) > 1)[-1]]
        prompt = token_ids(example[:first]).tolist()
        answer = example[first : targets[-1] + 1].tolist()
        stream = TextStream(tokenizer, prompt, stop_token_ids=stop_token_ids)
        text = "".join(map(stream.push, answer)) + stream.end()
        yield Question(prompt, len(answer) + EXTRA_TOKENS, text)


def count_right(
    model: GPT,
    tokenizer: Tokenizer,
    stop_token_ids: Sequence[int],
    questions: Sequence[Question],
    cache_dtype: torch.dtype | None = None,
) -> int:
    """Return how many questions a model in evaluation mode answers right, with greedy text."""
    streams = []
    texts = [""] * len(questions)
    for index, question in enumerate(questions):
        answer_bytes = len((question.answer or "").encode())  # at least its number of tokens
        limit = min(question.max_new_tokens, answer_bytes + EXTRA_TOKENS)
        streams.append(TextStream(tokenizer, question.prompt, limit, (), stop_token_ids))
        if question.choices:
            texts[index] = choose(model, question)
            streams[index].end()
    for index, text in complete_streams(
        model, streams, QUESTION_BATCH_SIZE, cache_dtype=cache_dtype, temperature=0.0
    ):
        texts[index] += text
    return sum(grade["is_right"] for grade in map(Question.grade, questions, texts))


@torch.inference_mode()
def choose(model: GPT, question: Question) -> str:
    """Return the choice with the highest log-likelihood per UTF-8 byte of its text."""
    device = next(model.parameters()).device

    def rate(choice: str) -> float:
        """Return the log-likelihood of a choice per byte, in nats."""
        ids = question.choices[choice][-model.config.context_length - 1 :]
        num_targets = max(1, len(question.choices[choice]) - len(question.prompt))
        inputs, targets = torch.tensor([ids[:-1], ids[1:]], device=device)
        logprobs = model(inputs[None])[0, -num_targets:].float().log_softmax(dim=-1)
        total = logprobs.gather(1, targets[-num_targets:, None]).sum().item()
        return total / len(choice.encode())

    return max(question.choices, key=rate)
