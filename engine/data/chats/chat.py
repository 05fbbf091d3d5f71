"""Text, prompts with completions, and chats → token ids, and which of them are targets.

A chat is rendered by the model's own chat template, or by one of chat_template.py.
"""

import contextlib
import functools
import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from engine.core.cli import warn
from engine.core.errors import UserError
from engine.data.chats.answers import common_length, find_answers
from engine.data.chats.chat_template import (
    CHATML_TEMPLATE,
    PLACEHOLDER_TEXT,
    PLAIN_TEMPLATE,
    ChatTemplate,
    Message,
    map_texts,
    set_variables,
)
from engine.data.inputs.text import unify_line_ends
from engine.data.tokenizer import Tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")  # the tokens of many imported models' chats
# A Unicode noncharacter, which breaks up the name of a special token that is ordinary text.
ESCAPE_CHARACTER = "\ufdd0"
EARLIER_CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHORT_CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PLACEHOLDER_TEXT}]

# (speaker, text) or (speaker, text, keys). Speaker: a role, "prompt" or "completion". Keys of the
# message: weight (0: not a target), tool_calls, name, tool_call_id; of "tools", the list of them.
Turn = tuple[str, str] | tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class TurnEnds:
    """What follows an answer and ends it: a special token, or a text of the chat template."""

    token_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()  # without white space at the end
    pattern: str = "(?!)"  # of both in a rendered chat

    @property
    def num_bytes(self) -> int:
        """Bytes of the longest text, at least its number of tokens."""
        return max((len(text.encode()) for text in self.texts), default=0)


def own_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template of an imported model, if it writes the answers of a chat.

    Raises UserError if it fails, and if there are several of which none is the default.
    """
    if tokenizer.chat_template is None and tokenizer.other_templates:
        names = ", ".join(tokenizer.other_templates)
        fix = "Choose one with --chat-template NAME of prepare.py and sample.py"
        raise UserError(f"{tokenizer.folder}: no chat template is the default, of {names}. {fix}.")
    if tokenizer.chat_template is None:
        return None
    template = make_template(tokenizer, tokenizer.chat_template)
    try:
        return template if PLACEHOLDER_TEXT in template.render(SHORT_CHAT) else None
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


def make_template(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    """Return a chat template with the special tokens of a tokenizer."""
    return ChatTemplate(source, tokenizer.bos_token, tokenizer.end_of_text_name)


@functools.lru_cache(16)
def chat_format(tokenizer: Tokenizer) -> tuple[ChatTemplate, TurnEnds]:
    """Return the template of a tokenizer's chats, and what ends an answer in it."""
    has_chatml = tokenizer.special_tokens.keys() >= {*CHATML_TOKENS}
    start = "{{ bos_token }}" if tokenizer.text_start else ""
    default = start + (CHATML_TEMPLATE if has_chatml else PLAIN_TEMPLATE)
    template = own_template(tokenizer)
    if tokenizer.chat_template and not template:
        problem = "its chat template leaves out answers"
        warn(f"{tokenizer.folder or tokenizer.kind}: {problem}. Chats are written as {default!r}")
    template = template or make_template(tokenizer, default)
    return template, _find_ends(tokenizer, template)


def _find_ends(tokenizer: Tokenizer, template: ChatTemplate) -> TurnEnds:
    """Return what a template writes after an answer: the last one, or before another turn."""
    special = names_pattern(tokenizer)
    token_ids = []
    texts = []
    written = []
    for role in ("", "user", "tool"):
        next_turns = [{"role": role, "content": PLACEHOLDER_TEXT}] if role else []
        afters = []
        for earlier in ([], EARLIER_CHAT):  # some templates number the turns
            with contextlib.suppress(UserError):  # of a template without tools
                text = template.render([*earlier, *SHORT_CHAT, *next_turns])
                afters.append([*text.split(PLACEHOLDER_TEXT), ""][1])
        afters = afters or [""]
        after = afters[0][: common_length(afters[0], afters[-1])]
        match = special.search(after)
        words = after[: match.start() if match else None].rstrip()
        if match:
            token_ids.append(tokenizer.special_tokens[match[0]])
        if words:
            texts.append(words)
        written.append(after[: match.end()] if match else words)
    longest_first = sorted(filter(None, written), key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
    return TurnEnds(tuple(dict.fromkeys(token_ids)), tuple(dict.fromkeys(texts)), pattern)


def special_token_names(tokenizer: Tokenizer, chat: bool) -> list[str]:
    """Return the names of the special tokens that a tokenizer needs to encode examples."""
    if not chat:
        return [tokenizer.end_of_text_name]
    template, ends = chat_format(tokenizer)
    if template.source.endswith(PLAIN_TEMPLATE):
        return [*CHAT_ROLES.values(), END_OF_TURN]
    return [tokenizer.end_of_text_name] if ends.texts or not ends.token_ids else []


def turn_ends(tokenizer: Tokenizer, is_chat_model: bool) -> TurnEnds:
    """Return what ends a model's text, besides the ids of its tokenizer: the assistant's turn."""
    if is_chat_model:
        with contextlib.suppress(UserError):  # of a template that fails, raised for each chat
            return chat_format(tokenizer)[1]
    return TurnEnds()


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


def encode_text(
    tokenizer: Tokenizer,
    text: str,
    parse_special: bool = False,
    starts: bool = False,
    ends: bool = False,
    separator: str = "",
) -> np.ndarray:
    """Return the ids of a text, in which the names of markup are tokens, uint32 (N,).

    With ``parse_special`` the names of all special tokens are. If a document ``starts`` or ``ends``
    with the text, the tokens that begin or end one are added, unless the text spells them itself.
    The separator ends it if the tokenizer has no such token.
    """
    if parse_special or tokenizer.markup:
        pattern = names_pattern(tokenizer, has_markup=False)
        rendered = text if parse_special else _escape(pattern, text)
        ids = np.array(encode_rendered(tokenizer, rendered)[0], np.uint32)
    else:
        ids = tokenizer.encode(text)
    start = np.array(tokenizer.text_start if starts else [], np.uint32)
    if not np.array_equal(ids[: len(start)], start):
        ids = np.concatenate((start, ids))
    end_id = tokenizer.end_of_text_id
    if not ends or ids[-1:].tolist() == [end_id]:
        return ids
    end = tokenizer.encode(separator) if end_id is None else np.array([end_id], np.uint32)
    return np.concatenate((ids, end))


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
    encode = tokenizer.without_space.encode if continues else tokenizer.encode
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
    messages = map_texts(to_messages(turns, tokenizer), unify_line_ends)
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


def encode_example(
    tokenizer: Tokenizer, turns: Sequence[Turn], parse_special: bool = False
) -> np.ndarray:
    """Encode an example, int32 (N,): an id where it counts as a target, ~id elsewhere."""
    if turns[0][0] == "prompt":
        prompt = encode_text(tokenizer, turns[0][1], parse_special, starts=True)
        continuing = tokenizer.without_space if turns[0][1] else tokenizer
        targets = encode_text(continuing, turns[1][1], parse_special, ends=True)
        return np.concatenate((~prompt.astype(np.int32), targets.astype(np.int32)))
    template, ends = chat_format(tokenizer)
    messages = to_messages(turns, tokenizer)
    text = template.render(messages)
    ids, segments = encode_rendered(tokenizer, text)
    example = [~token for token in ids]

    def index_of_id(position: int) -> int:
        """Return the number of ids that are complete before a character."""
        segment_start, first = segments[bisect_right(segments, (position, len(ids))) - 1]
        before = _encode_segment(tokenizer, text, segment_start, position)
        return first + common_length(before, ids[first : first + len(before)])

    end_pattern = re.compile(ends.pattern)
    end_or_special = re.compile(f"{ends.pattern}|{names_pattern(tokenizer).pattern}")
    special_ids = {*tokenizer.special_tokens.values()}
    for index, (answer_start, answer_end) in find_answers(template, messages, text).items():
        if keys_of(turns[index]).get("weight") == 0:
            continue
        has_calls = "tool_calls" in messages[index]  # between the text and its end
        find_end = end_pattern.search if has_calls else end_or_special.match
        match = find_end(text, answer_end)
        start = index_of_id(answer_start)
        stop = index_of_id(match.end() if match else answer_end)
        example[start:stop] = ids[start:stop]
        end_id = tokenizer.end_of_text_id
        if index == len(messages) - 1 and ids[stop - 1] not in special_ids and end_id is not None:
            example[stop:] = [*ids[stop:], end_id]  # of the document, not of the template
    return np.array(example, np.int32)


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
