"""Chats → token ids, and which of them are targets.

A chat is rendered by the model's own chat template, or by one of chat_template.py.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from engine.core.errors import UserError, wrap_library_errors
from engine.data.chats.chat_template import (
    CHATML_TEMPLATE,
    PLACEHOLDER_TEXT,
    PLAIN_TEMPLATE,
    RENDERED_NAMES,
    SHORT_CHAT,
    ChatTemplate,
    Message,
    TurnEnds,
    common_length,
    find_ends,
    map_texts,
    parse_value,
    reads_name,
    split_answers,
)
from engine.data.records.text import unify_line_ends
from engine.data.tokenizer import Tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")  # the tokens of many imported models' chats
# A Unicode noncharacter, which breaks up the name of a special token that is ordinary text.
ESCAPE_CHARACTER = "\ufdd0"
NO_NAMES = re.compile("(?!)")

# (speaker, text) or (speaker, text, keys). Speaker: a role, "prompt" or "completion". Keys of the
# message: weight (0: not a target), tool_calls, name, tool_call_id; of "tools", the list of them.
Turn = tuple[str, str] | tuple[str, str, dict[str, Any]]


def own_template(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template of an imported model; None if it has none.

    Raises UserError if it fails.
    """
    owner = tokenizer.folder or tokenizer.kind
    if tokenizer.chat_template is None:
        return None
    names = (tokenizer.bos_token, tokenizer.end_of_text_name)
    template = ChatTemplate(tokenizer.chat_template, *names)
    fix = ". Correct the model's template, and import or prepare again. Plain text works."
    with wrap_library_errors(f"{owner}: chats fail", UserError, advice=fix):
        template.render(SHORT_CHAT)
    return template


def with_variables(tokenizer: Tokenizer, assignments: Sequence[str]) -> Tokenizer:
    """Set variables of the chat template, each NAME=VALUE, to values that a caller may override.

    A value is JSON, or else text. Raises UserError for a name that the template does not use.
    """
    source = tokenizer.chat_template or ""
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or name in RENDERED_NAMES or not reads_name(source, name):
            problem = f"must be NAME=VALUE with a name in the chat template (got {assignment})"
            raise UserError(f"--template-variable: {problem}.")
        # The line end keeps the source at the start of a line, and is not rendered.
        assign = f"{{%- set {name} = {parse_value(text, str)!r} %}}"
        source = f"{{%- if {name} is not defined %}}{assign}{{%- endif %}}\n{source}"
    return tokenizer.with_chat_template(source) if assignments else tokenizer


@functools.lru_cache(16)
def chat_format(tokenizer: Tokenizer) -> tuple[ChatTemplate, TurnEnds]:
    """Return the template of a tokenizer's chats, and what ends an answer in it."""
    has_chatml = tokenizer.special_tokens.keys() >= {*CHATML_TOKENS}
    start = "{{ bos_token }}" if tokenizer.text_start else ""
    default = start + (CHATML_TEMPLATE if has_chatml else PLAIN_TEMPLATE)
    template = own_template(tokenizer) or ChatTemplate(default, tokenizer.bos_token)
    return template, find_ends(template, names_pattern(tokenizer), tokenizer.special_tokens)


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
def names_pattern(tokenizer: Tokenizer, template: str | None = None) -> re.Pattern[str]:
    """Return a pattern of the names of special tokens; of markup, those in a template, or all."""
    unused = [name for name in tokenizer.markup if template is not None and name not in template]
    names = tokenizer.special_tokens.keys() - unused
    return re.compile(_alternatives(sorted(names, reverse=True))) if names else NO_NAMES


def _alternatives(names: Sequence[str]) -> str:
    """Return a pattern of names, longest first; it tries thousands of them letter by letter."""
    if len(names) == 1:
        return re.escape(names[0])
    length = common_length(names[0], names[-1]) + 1
    groups = itertools.groupby(names, key=lambda name: name[:length])
    rests = {start: [name[length:] for name in group] for start, group in groups}
    return "|".join(f"{re.escape(start)}(?:{_alternatives(rests[start])})" for start in rests)


def keys_of(turn: Turn) -> dict[str, Any]:
    """Return the keys of a turn's message, besides role and content."""
    return turn[2] if len(turn) == 3 else {}


def is_learned(turn: Turn) -> bool:
    """Return whether a turn is an answer whose tokens are targets."""
    return turn[0] == "assistant" and keys_of(turn).get("weight") != 0


def to_messages(turns: Iterable[Turn], tokenizer: Tokenizer | None = None) -> list[Message]:
    """Return the messages of turns, for a chat template.

    With a tokenizer, the names of its special tokens in the texts are escaped. Markup becomes the
    token of that name in answers, as ``<think>`` may, and where the template does not use it.
    """
    messages = []
    for turn in turns:
        message = {"role": turn[0], "content": turn[1], **keys_of(turn)}
        message.pop("weight", None)
        if tokenizer:
            markup = "" if turn[0] == "assistant" else chat_format(tokenizer)[0].source
            escape = functools.partial(escape_names, names_pattern(tokenizer, markup))
            message = {key: map_texts(value, escape, True) for key, value in message.items()}
        messages.append(message)
    return messages


def escape_names(pattern: re.Pattern[str], text: str) -> str:
    """Insert ESCAPE_CHARACTER into the matches of a pattern, so that they no longer match."""
    if ESCAPE_CHARACTER not in text and not pattern.search(text):
        return text
    start = f"(?={ESCAPE_CHARACTER}|{pattern.pattern})(.)"
    return re.sub(start, rf"\1{ESCAPE_CHARACTER}", text, flags=re.DOTALL)


def encode_rendered(
    tokenizer: Tokenizer, text: str, positions: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Encode a rendered chat; the names of special tokens become their ids unless escaped.

    Also returns how many ids are complete before each position in the text, in ascending order.
    """
    ids: list[int] = []
    counts: list[int] = []
    start = 0
    for match in (*names_pattern(tokenizer).finditer(text), None):
        stop = match.start() if match else len(text)
        segment = _encode_segment(tokenizer, text, start, stop)
        while len(counts) < len(positions) and positions[len(counts)] <= stop:
            # A token across the position is not complete there: those before it are counted.
            before = _encode_segment(tokenizer, text, start, positions[len(counts)])
            counts.append(len(ids) + common_length(before, segment))
        ids += segment
        if match:
            ids.append(tokenizer.special_tokens[match[0]])
            start = match.end()
    return ids, counts


def _encode_segment(tokenizer: Tokenizer, text: str, start: int, stop: int) -> list[int]:
    """Encode a segment of a rendered chat, which has no special token."""
    segment = text[start:stop]
    if text.endswith(tokenizer.right_strippers, 0, start):
        segment = segment.lstrip()
    if text.startswith(tokenizer.left_strippers, stop):
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
    escape = functools.partial(escape_names, names_pattern(tokenizer))
    escaped = map_texts({**(variables or {})}, escape, has_keys=True)
    if continue_final_message:
        if turns[-1][0] != "assistant" or "tool_calls" in keys_of(turns[-1]):
            raise UserError("the last one must be a text of the assistant to be continued")
        messages[-1]["content"] += f"{PLACEHOLDER_TEXT} "  # a template that trims drops the space
    text = template.render(messages, not continue_final_message, datetime.now(), escaped)
    if continue_final_message:
        text, placeholder, rest = text.rpartition(PLACEHOLDER_TEXT)
        if not placeholder:
            raise UserError("the model's chat template leaves out the last message")
        text = text if rest.startswith(" ") else text.rstrip()
    return encode_rendered(tokenizer, text)[0]


def encode_answers(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[np.ndarray]:
    """Encode a chat as examples, int32 (N,): an id where it is a target, ~id elsewhere.

    It is one example, unless its template writes an answer in another way as soon as turns follow:
    then there are several, in which each answer is what a model should generate.
    """
    template, ends = chat_format(tokenizer)
    learned = [index for index, turn in enumerate(turns) if is_learned(turn)]
    examples = []
    for text, spans in split_answers(template, ends, to_messages(turns, tokenizer), learned):
        ids, counts = encode_rendered(tokenizer, text, sorted(itertools.chain(*spans)))
        is_open = max(spans)[1] == len(text) and ids[-1] not in tokenizer.special_tokens.values()
        example = ~np.array(ids, np.int32)
        for start, stop in zip(counts[::2], counts[1::2], strict=True):
            example[start:stop] = ids[start:stop]
        if is_open and tokenizer.end_of_text_id is not None:  # the template does not end it
            example = np.append(example, np.int32(tokenizer.end_of_text_id))
        examples.append(example)
    return examples
