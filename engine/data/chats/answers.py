"""The answers in a rendered chat: where each starts and ends, whatever the chat template is."""

import contextlib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from engine.core.errors import UserError
from engine.data.chats.chat_template import PLACEHOLDER_TEXT, TOOLS_ROLE, ChatTemplate, Message


def find_answers(
    template: ChatTemplate, messages: list[Message], text: str
) -> dict[int, tuple[int, int]]:
    """Return the indices of the first character of each answer, and after its text, by message."""
    starts = _find_starts(template, messages, text)

    def render_without(indices: Iterable[int]) -> str:
        replaced = [*messages]
        for index in indices:
            replaced[index] = {**messages[index], "content": PLACEHOLDER_TEXT}
        return template.render(replaced)

    # One rendering without the answers finds all ends, unless a template adds to some answers.
    next_starts = [*starts.values(), len(text)][1:]
    _, *pieces = render_without(starts).split(PLACEHOLDER_TEXT)
    if len(pieces) == len(starts):
        pairs = [*zip(next_starts, pieces, strict=True)]
        if all(text.endswith(piece, 0, next_start) for next_start, piece in pairs):
            ends = [next_start - len(piece) for next_start, piece in pairs]
            return dict(zip(starts, zip(starts.values(), ends, strict=True), strict=True))
    backwards = text[::-1]
    answers = {}
    for index, start in starts.items():
        length = common_length(backwards, render_without([index])[::-1])
        answers[index] = (start, max(start, len(text) - length))
    return answers


def _find_starts(template: ChatTemplate, messages: list[Message], text: str) -> dict[int, int]:
    """Return the index of the first character of each answer in a rendered chat, by message.

    Most templates put one prompt before every answer: then one more rendering finds all of them.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    first = _find_start(template, messages, answers[0], text)
    prompt = _generation_prompt(template)
    starts = [match.end() for match in re.finditer(re.escape(prompt), text)] if prompt else []
    if len(starts) != len(answers) or starts[0] != first:
        starts = [_find_start(template, messages, index, text) for index in answers]
    return dict(zip(answers, starts, strict=True))


@functools.lru_cache(16)
def _generation_prompt(template: ChatTemplate) -> str:
    """Return what a template adds after a question, before the answer; "" if it refuses that."""
    question = [{"role": "user", "content": "Hi"}]
    with contextlib.suppress(UserError):
        prompt = template.render(question, add_generation_prompt=True)
        return prompt.removeprefix(template.render(question))
    return ""


def _find_start(template: ChatTemplate, messages: list[Message], index: int, text: str) -> int:
    """Return the index of an answer's first character in a rendered chat, after its prompt.

    If later turns change the prompt, the answer starts with its text. Text that the template adds
    between prompt and answer, such as ``<think>``, belongs to the answer.
    """
    before = messages[:index]
    has_prompt = any(message["role"] != TOOLS_ROLE for message in before)
    prompt = template.render(before, add_generation_prompt=True) if has_prompt else ""
    if prompt and text.startswith(prompt):
        return len(prompt)
    # Two renderings differ from where the text of the answer starts.
    other_answer = {"role": "assistant", "content": PLACEHOLDER_TEXT}
    other_text = template.render([*before, other_answer, *messages[index + 1 :]])
    start = common_length(text, other_text)
    if not has_prompt:
        return start
    up_to_answer = template.render(messages[: index + 1])
    end = common_length(up_to_answer, template.render([*before, other_answer]))
    added = up_to_answer[len(prompt) : end]
    if up_to_answer.startswith(prompt) and text[:start].endswith(added):
        return start - len(added)
    return start


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the number of equal items at the start of two sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
