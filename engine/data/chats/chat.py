"""Text, prompts with completions, and chats → token ids, and which of them are targets.

A chat is rendered by the model's own chat template, or by one of chat_template.py.
"""

import contextlib
import functools
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.data.chats.chat_template import (
    CHATML_TEMPLATE,
    PLAIN_TEMPLATE,
    TOOLS_ROLE,
    ChatTemplate,
    map_texts,
    set_variables,
)
from engine.data.tokenizer import Tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")  # the tokens of many imported models' chats
# Unicode noncharacters: the first breaks up the name of a special token that is ordinary text, the
# second takes the place of a text.
ESCAPE_CHARACTER = "\ufdd0"
PLACEHOLDER_TEXT = "\ufdd1"

# (speaker, text) or (speaker, text, keys). Speaker: a role, "prompt" or "completion". Keys of the
# message: weight (0: not a target), tool_calls, name, tool_call_id; of "tools", the list of them.
Turn = tuple[str, str] | tuple[str, str, dict[str, Any]]
Message = dict[str, Any]  # of a chat template

# (text, whether its document starts and ends there) → token ids, number of UTF-8 bytes, number of
# targets. The bytes of an example are those of its targets.
Encoder = Callable[[str, bool, bool], tuple[np.ndarray, int, int]]


def own_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template of an imported model, if a special token ends its answers.

    Raises UserError if it fails, and if there are several of which none is the default.
    """
    if tokenizer.chat_template is None and tokenizer.other_templates:
        names = ", ".join(tokenizer.other_templates)
        fix = "Choose one with --chat-template NAME of prepare.py and sample.py"
        raise UserError(f"{tokenizer.folder}: no chat template is the default, of {names}. {fix}.")
    if tokenizer.chat_template is None:
        return None
    try:
        template, end = _find_end(tokenizer, tokenizer.chat_template)
        return None if end is None else template
    except UserError as error:
        problem = f"{tokenizer.folder or tokenizer.kind}: {error}"
        fix = "Correct the model's template, and import or prepare again. Plain text works."
        raise UserError(f"{problem}. {fix}") from None


def with_template(tokenizer: Tokenizer, name: str | None, assignments: Sequence[str]) -> Tokenizer:
    """Choose a chat template by name, and set its variables. Raises UserError for unknown ones."""
    templates = {**tokenizer.other_templates, "default": tokenizer.chat_template}
    source = templates.get(name or "default")
    if not name and not assignments:
        return tokenizer
    if source is None:
        names = ", ".join(key for key, text in templates.items() if text) or "none"
        fix = "Leave it and --template-variable out, or choose another tokenizer."
        raise UserError(f"--chat-template: the model has {names} (got {name or 'default'}). {fix}")
    return tokenizer.with_chat_template(set_variables(source, assignments))


@functools.lru_cache(16)
def chat_format(tokenizer: Tokenizer) -> tuple[ChatTemplate, int | None]:
    """Return the template of a tokenizer's chats, and the id that ends an answer, if any does."""
    has_chatml = tokenizer.special_tokens.keys() >= {*CHATML_TOKENS}
    start = "{{ bos_token }}" if tokenizer.text_start else ""
    default = start + (CHATML_TEMPLATE if has_chatml else PLAIN_TEMPLATE)
    template = own_template(tokenizer)
    return _find_end(tokenizer, template.source if template else default)


def _find_end(tokenizer: Tokenizer, source: str) -> tuple[ChatTemplate, int | None]:
    """Return a template, and the id of the first special token after an answer, or None."""
    template = ChatTemplate(source, tokenizer.bos_token, tokenizer.end_of_text_name)
    text = template.render(to_messages([("user", "Hi"), ("assistant", PLACEHOLDER_TEXT)]))
    _, answer, after = text.partition(PLACEHOLDER_TEXT)
    match = names_pattern(tokenizer).search(after) if answer else None
    return template, tokenizer.special_tokens[match[0]] if match else None


def special_token_names(tokenizer: Tokenizer, chat: bool) -> list[str]:
    """Return the names of the special tokens that a tokenizer needs to encode examples."""
    if not chat:
        return [tokenizer.end_of_text_name]
    is_plain = chat_format(tokenizer)[0].source.endswith(PLAIN_TEMPLATE)
    return [*CHAT_ROLES.values(), END_OF_TURN] if is_plain else []


def stop_token_ids(tokenizer: Tokenizer, is_chat_model: bool) -> list[int]:
    """Return the ids that end a model's text, besides those of its tokenizer.

    A model that has learned chats ends the assistant's turn, with at most one id.
    """
    if not is_chat_model:
        return []
    with contextlib.suppress(UserError):  # of a template that fails, raised where chats are encoded
        end = chat_format(tokenizer)[1]
        return [] if end is None else [end]
    return []


@functools.lru_cache(32)
def names_pattern(tokenizer: Tokenizer, has_markup: bool = True) -> re.Pattern[str]:
    """Return a pattern of the names of special tokens, with or without those of markup."""
    names = tokenizer.special_tokens.keys() - (() if has_markup else tokenizer.markup)
    return re.compile("|".join(sorted(map(re.escape, names), key=len, reverse=True)) or "(?!)")


def keys_of(turn: Turn) -> dict[str, Any]:
    """Return the keys of a turn's message, besides role and content."""
    return turn[2] if len(turn) == 3 else {}


def to_messages(turns: Iterable[Turn], tokenizer: Tokenizer | None = None) -> list[Message]:
    """Return the messages of turns, for a chat template.

    With a tokenizer, the names of its special tokens in the texts are escaped. In answers, markup
    such as ``<think>`` is not, and becomes the token of that name.
    """
    messages = []
    for turn in turns:
        message = {"role": turn[0], "content": turn[1], **keys_of(turn)}
        message.pop("weight", None)
        if tokenizer:
            pattern = names_pattern(tokenizer, has_markup=turn[0] != "assistant")
            message = map_texts(message, functools.partial(_escape, pattern))
        messages.append(message)
    return messages


def _escape(pattern: re.Pattern[str], text: str) -> str:
    """Insert ESCAPE_CHARACTER into the matches of a pattern, so that they no longer match."""
    if ESCAPE_CHARACTER not in text and not pattern.search(text):
        return text
    start = f"(?={ESCAPE_CHARACTER}|{pattern.pattern})(.)"
    return re.sub(start, rf"\1{ESCAPE_CHARACTER}", text, flags=re.DOTALL)


def encode_rendered(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Encode a rendered chat; the names of special tokens become their ids unless escaped.

    Returns the ids, and for each segment between special tokens the indices of its first character
    and of its first id.
    """
    ids: list[int] = []
    starts = [(0, 0)]
    for match in names_pattern(tokenizer).finditer(text):
        ids += _encode_segment(tokenizer, text, starts[-1][0], match.start())
        ids.append(tokenizer.special_tokens[match[0]])
        starts.append((match.end(), len(ids)))
    return ids + _encode_segment(tokenizer, text, starts[-1][0], None), starts


def _encode_segment(tokenizer: Tokenizer, text: str, start: int, stop: int | None) -> list[int]:
    """Encode a segment of a rendered chat, which has no special token."""
    segment = text[start:stop]
    if text.endswith(tokenizer.right_strippers, 0, start):
        segment = segment.lstrip()
    if stop is not None and text.startswith(tokenizer.left_strippers, stop):
        segment = segment.rstrip()
    unescaped = re.sub(f"{ESCAPE_CHARACTER}({ESCAPE_CHARACTER}?)", r"\1", segment)
    continues = start > 0 and tokenizer.is_space_first_only
    encode = tokenizer.encode_continuation if continues else tokenizer.encode
    return encode(unescaped).tolist() if unescaped else []


def encode_chat(
    tokenizer: Tokenizer,
    turns: Sequence[Turn],
    variables: Mapping[str, Any] | None = None,
    continue_final_message: bool = False,
) -> list[int]:
    """Return the ids of a chat, up to the start of the assistant's next answer.

    With ``continue_final_message`` they end with the text of the last turn, which is to be
    continued. The variables of the template take precedence over those that are set in it.
    """
    template, _ = chat_format(tokenizer)
    messages = to_messages(turns, tokenizer)
    escaped = map_texts(dict(variables or {}), functools.partial(_escape, names_pattern(tokenizer)))
    if continue_final_message:
        if turns[-1][0] != "assistant":
            raise UserError("the last one must be of the assistant to be continued")
        if "tool_calls" in keys_of(turns[-1]):
            raise UserError("the last one calls a tool. Add a message with the result")
        messages[-1]["content"] += PLACEHOLDER_TEXT
    text = template.render(messages, not continue_final_message, datetime.now(), escaped)
    if continue_final_message:
        text, placeholder, _ = text.rpartition(PLACEHOLDER_TEXT)
        if not placeholder:
            raise UserError("the model's chat template leaves out the last message")
    return encode_rendered(tokenizer, text)[0]


def encode_example(tokenizer: Tokenizer, turns: Sequence[Turn]) -> np.ndarray:
    """Encode an example, int32 (N,): an id where it counts as a target, ~id elsewhere."""
    if turns[0][0] == "prompt":
        prompt = turns[0][1]
        encode_answer = tokenizer.encode_continuation if prompt else tokenizer.encode
        targets = np.array([*encode_answer(turns[1][1]), tokenizer.end_of_text_id], np.int32)
        return np.concatenate((~tokenizer.encode_from_start(prompt).astype(np.int32), targets))
    template, end = chat_format(tokenizer)
    messages = to_messages(turns, tokenizer)
    text = template.render(messages)
    ids, segments = encode_rendered(tokenizer, text)
    example = [~token for token in ids]
    for index, answer_start in _answer_starts(template, messages, text).items():
        if keys_of(turns[index]).get("weight") == 0:
            continue
        segment_start, start = segments[bisect_right(segments, (answer_start, len(ids))) - 1]
        before = _encode_segment(tokenizer, text, segment_start, answer_start)
        start += common_length(before, ids[start : start + len(before)])
        try:
            stop = ids.index(-1 if end is None else end, start) + 1
        except ValueError:
            number = index if turns[0][0] == TOOLS_ROLE else index + 1
            raise UserError(f"the model's chat template does not end message {number}") from None
        example[start:stop] = ids[start:stop]
    return np.array(example, np.int32)


def _answer_starts(template: ChatTemplate, messages: list[Message], text: str) -> dict[int, int]:
    """Return the index of the first character of each answer in a rendered chat, by message.

    Most templates put one prompt before every answer: then one more rendering finds all of them.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    first = _answer_start(template, messages, answers[0], text)
    prompt = _generation_prompt(template)
    starts = [match.end() for match in re.finditer(re.escape(prompt), text)] if prompt else []
    if len(starts) != len(answers) or starts[0] != first:
        starts = [_answer_start(template, messages, index, text) for index in answers]
    return dict(zip(answers, starts, strict=True))


@functools.lru_cache(16)
def _generation_prompt(template: ChatTemplate) -> str:
    """Return what a template adds after a question, before the answer; "" if it refuses that."""
    question = to_messages([("user", "Hi")])
    with contextlib.suppress(UserError):
        prompt = template.render(question, add_generation_prompt=True)
        return prompt.removeprefix(template.render(question))
    return ""


def _answer_start(template: ChatTemplate, messages: list[Message], index: int, text: str) -> int:
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


def count_targets(tokenizer: Tokenizer, example: np.ndarray) -> tuple[int, int]:
    """Count the targets of an example, and the UTF-8 bytes of their text."""
    special = {*tokenizer.special_tokens.values()}
    ids = example.tolist()
    targets = [(before, token) for before, token in itertools.pairwise(ids) if token >= 0]
    texts = [(before, token) for before, token in targets if token not in special]
    num_bytes = len(tokenizer.decode_bytes([token for _, token in texts]))
    if tokenizer.adds_leading_space:
        first_ids = [i for before, i in texts if tokenizer.adds_space_after(max(before, ~before))]
        num_bytes -= sum(tokenizer.decode_bytes([i]).startswith(b" ") for i in first_ids)
    return len(targets), num_bytes


def make_encoder(tokenizer: Tokenizer, separator: str, examples: bool) -> Encoder:
    """Return an encoder of text, or with ``examples`` of examples as JSON of their turns.

    A document begins with the tokenizer's start of a text. It ends with the end of text, or with
    the separator if there is no such token.
    """
    end = tokenizer.end_of_text_id
    ending = tokenizer.encode(separator) if end is None else np.array([end], np.uint32)

    def encode_text(text: str, starts: bool, ends: bool) -> tuple[np.ndarray, int, int]:
        ids = tokenizer.encode_from_start(text) if starts else tokenizer.encode(text)
        num_bytes = len(text.encode())
        if ends:
            return np.concatenate((ids, ending)), num_bytes + len(separator), 0
        return ids, num_bytes, 0

    def encode_turns(text: str, starts: bool, ends: bool) -> tuple[np.ndarray, int, int]:
        ids = encode_example(tokenizer, json.loads(text))
        num_targets, num_bytes = count_targets(tokenizer, ids)
        return ids, num_bytes, num_targets

    return encode_turns if examples else encode_text
