"""Records → examples: the turns of a chat, or a prompt and its completion."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from engine.core.cli import warn
from engine.core.errors import UserError
from engine.data.chats.chat import Turn, keys_of, to_messages
from engine.data.chats.chat_template import DATE_OF_PREPARED_CHATS, TOOLS_ROLE, ChatTemplate
from engine.data.chats.template_checks import REASONING_KEYS, check_template, drops_text, renders
from engine.data.inputs.readers import CHAT_FIELDS, PAIR_FIELDS, describe_field
from engine.data.inputs.sources import ExampleParser

PROMPT_SEPARATOR = "\n\n"  # between the texts of several prompt fields
NO_SYSTEM_NOTE = "chats without a system turn"
EMPTY_ANSWER_NOTE = "chats with an empty answer, which is not learned"
DROPPED_TEXT_NOTE = "chats with a part of an answer that the chat template leaves out"
TOOLS_FIELD = "tools"  # the list that apply_chat_template of transformers takes
SYSTEM_FIELDS = ("system", "system_prompt")  # texts beside the messages
MESSAGE_KEYS = {"role", "content", "from", "value", "weight", "tool_calls", "function_call"}
TOOL_KEYS = ("name", "tool_call_id")  # also of a message with the result of a tool
TEXT_TYPES = ("text", "input_text", "output_text")  # of the parts of a message's content
# Role in a record → role in a chat template.
TEMPLATE_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})
Record = dict[str, Any]


def chat_parser(field: str | None, template: ChatTemplate | None) -> ExampleParser:
    """Return the parser of chats, in a field or in one of those that are usual."""
    fields = (field,) if field else (*CHAT_FIELDS, *PAIR_FIELDS)
    if template and "strftime_now" in template.source:
        date = f"{DATE_OF_PREPARED_CHATS:%d %b %Y}"
        warn(f"the chat template writes the date: {date} in prepared chats, the day's in answers")
    if renders(template, TOOLS_ROLE):
        fields = (*fields, TOOLS_FIELD)
    if renders(template, "system"):
        fields = (*fields, *SYSTEM_FIELDS)
    return ExampleParser(
        partial(parse_chat, field=field, template=template),
        partial(chat_notes, field=field, template=template),
        fields,
        list_field=field or CHAT_FIELDS[0],
    )


def pair_parser(prompt_field: str | Sequence[str], completion_field: str) -> ExampleParser:
    """Return the parser of prompts, from one field or several, with their completions."""
    prompt_fields = list_fields(prompt_field)
    fields = (*prompt_fields, completion_field)
    return ExampleParser(
        partial(parse_pair, prompt_fields=prompt_fields, completion_field=completion_field),
        partial(unused_field_notes, fields=fields),
        fields,
    )


def list_fields(fields: str | Sequence[str]) -> list[str]:
    """Return one field or several as a list."""
    return [fields] if isinstance(fields, str) else [*fields]


def parse_chat(
    record: Record, field: str | None = None, template: ChatTemplate | None = None
) -> list[Turn]:
    """Return the turns of a chat, ``{"messages": [{"role": …, "content": …}, …]}`` or similar.

    ``template`` is that of an imported model. Raises UserError for a chat that is malformed, has no
    target, or has turns that cannot be encoded.
    """
    messages = find_messages(record, field, template)
    turns = parse_messages(messages, template, find_tools(record, template))
    for turn in turns:
        keys = keys_of(turn)
        has_text = turn[1] or "tool_calls" in keys
        if turn[0] == "assistant" and has_text and keys.get("weight") != 0:
            return turns
    raise UserError("a chat must have a message of the assistant with text to learn")


def chat_fields(record: Record, field: str | None = None) -> tuple[str, ...]:
    """Return the fields of a chat: one with its messages, or its prompt and its completion."""
    if field:
        return (field,)
    names = [name for name in CHAT_FIELDS if record.get(name) is not None]
    is_pair = not names and record.keys() >= {*PAIR_FIELDS}
    return PAIR_FIELDS if is_pair else tuple(names[:1]) or CHAT_FIELDS[:1]


def find_messages(
    record: Record, field: str | None = None, template: ChatTemplate | None = None
) -> list[Any]:
    """Return the messages in the record of a chat. Raises UserError if there are none.

    If they are in a prompt and a completion, those of the prompt get a weight of 0. A system text
    beside them comes first, if the template writes it.
    """
    names = chat_fields(record, field)
    values = [_parse_json(record.get(name)) for name in names]
    for name, value in zip(names, values, strict=True):
        if not value or not isinstance(value, list):
            raise UserError(describe_field(record, name, "--chat-field", "a list of messages"))
    if len(values) == 2:
        values[0] = [{**m, "weight": 0} if isinstance(m, dict) else m for m in values[0]]
    messages = [*itertools.chain(*values)]
    system = system_field(record, template)
    has_system = any(isinstance(m, dict) and role_of(m) == "system" for m in messages)
    first = [{"role": "system", "content": record[system]}] if system and not has_system else []
    return first + messages


def system_field(record: Record, template: ChatTemplate | None) -> str | None:
    """Return the field beside the messages with a system text that the template writes."""
    names = [name for name in SYSTEM_FIELDS if record.get(name) and isinstance(record[name], str)]
    return names[0] if names and renders(template, "system") else None


def find_tools(record: Record, template: ChatTemplate | None) -> list[Record]:
    """Return the tools that a chat's record offers; none if the template does not write them."""
    tools = _parse_json(record.get(TOOLS_FIELD))
    has_objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    return tools if tools and has_objects and renders(template, TOOLS_ROLE) else []


def _parse_json(value: Any) -> Any:
    """Return the value of a text of JSON; of anything else, itself."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def parse_messages(
    messages: Sequence[Any], template: ChatTemplate | None = None, tools: Sequence[Record] = ()
) -> list[Turn]:
    """Return the turns of messages, after one with their tools if there are any.

    Raises UserError for a message that cannot be encoded.
    """
    turns: list[Turn] = []
    for number, message in enumerate(messages, 1):
        try:
            turns.append(_parse_message(message, template))
        except UserError as error:
            raise UserError(f"message {number} {error}") from None
        has_tool = turns[-1][0] == "tool" or "tool_calls" in keys_of(turns[-1])
        if has_tool and template is None:
            fix = "Remove it, or choose a --tokenizer with a chat template of its own."
            raise UserError(f"message {number} calls a tool or is the result of one. {fix}")
    if template:
        check_template(template, turns)
    if template and tools:
        turns.insert(0, (TOOLS_ROLE, "", {"tools": [*tools]}))
        template.render(to_messages(turns))  # it may refuse the tools
    return turns


def role_of(message: Record) -> str | None:
    """Return the role of a message in a chat template; None if it is unknown."""
    role = message.get("role") or message.get("from")
    return TEMPLATE_ROLES.get(role.strip().lower()) if isinstance(role, str) else None


def _parse_message(message: Any, template: ChatTemplate | None = None) -> Turn:
    """Return the turn of a message. Raises UserError, whose text follows the message's number."""
    keys: Record = message if isinstance(message, dict) else {}
    role = role_of(keys)
    calls = keys.get("tool_calls")
    if not calls and keys.get("function_call"):
        calls = [keys["function_call"]]
    if role is None or not (calls or keys.keys() & {"content", "value"}):
        form = '{"role": ROLE, "content": TEXT}'
        got = f"got {keys.get('role') or keys.get('from')!r} and the keys {[*keys]}"
        raise UserError(
            f"must be {form}, with one of the roles {', '.join(TEMPLATE_ROLES)} ({got})"
        )
    if keys.get("weight") not in (None, 0, 1):
        raise UserError(f"must have a weight of 0 or 1 (got {keys['weight']!r})")
    extra: dict[str, Any] = {}
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise UserError("must be of the assistant to have a list of tool_calls")
        extra["tool_calls"] = [_parse_call(call) for call in calls]
    if role == "assistant" and (keys.get("weight") == 0 or _is_empty(keys)):
        extra["weight"] = 0
    if role == "assistant" and template:
        names = [name for name in REASONING_KEYS if isinstance(keys.get(name), str)]
        is_named = {name: re.search(rf"\b{name}\b", template.source) for name in names}
        extra |= {name: keys[name] for name in names if is_named[name]}
    if role == "tool":
        extra |= {name: keys[name] for name in TOOL_KEYS if isinstance(keys.get(name), str)}
    text = text_of_message(keys)
    return (role, text, extra) if extra else (role, text)


def _is_empty(message: Record) -> bool:
    return not (
        message.get("tool_calls") or message.get("function_call") or text_of_message(message)
    )


def text_of_message(message: Record) -> str:
    """Return the text of a message's content: text, parts of text, or null."""
    content = message.get("value") if message.get("content") is None else message["content"]
    texts = []
    for part in content if isinstance(content, list) else ["" if content is None else content]:
        part_type = (part.get("type") or "text") if isinstance(part, dict) else "text"
        if part_type not in TEXT_TYPES:
            raise UserError(f"must have only text (got a part of type {part_type!r}). Remove it.")
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise UserError(f"must have a text as its content (got {str(content)[:30]!r})")
        texts.append(text)
    return "".join(texts)


def _parse_call(call: Any) -> Record:
    """Return a tool call in the form of chat templates, with an object of arguments."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError('must have tool_calls like {"function": {"name": NAME, "arguments": {…}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            arguments = parsed if isinstance(parsed, dict) else arguments
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**call_id, "type": "function", "function": {**function, "arguments": arguments}}


def parse_pair(record: Record, prompt_fields: Sequence[str], completion_field: str) -> list[Turn]:
    """Return a prompt, joined from its fields, and its completion.

    Raises UserError for a field without text. Of several prompt fields, some may be empty.
    """
    flags = dict.fromkeys(prompt_fields, "--prompt-field")
    for field, flag in {**flags, completion_field: "--completion-field"}.items():
        can_be_null = field in record and flag == "--prompt-field" and len(prompt_fields) > 1
        value = record.get(field)
        if not isinstance(value, str) and not (can_be_null and value is None):
            raise UserError(describe_field(record, field, flag))
    if not record[completion_field]:
        raise UserError(f"{completion_field!r} must not be empty: its text is learned")
    prompt = PROMPT_SEPARATOR.join(filter(None, map(record.get, prompt_fields)))
    return [("prompt", prompt), ("completion", record[completion_field])]


def unused_field_notes(record: Record, fields: Iterable[str]) -> list[str]:
    """Return a note on each nonempty field of a record that is not in ``fields``."""
    unused = {name for name, value in record.items() if value not in EMPTY_VALUES} - {*fields}
    return [f"examples with {name!r}, which is not used" for name in sorted(unused)]


def chat_notes(
    record: Record, field: str | None = None, template: ChatTemplate | None = None
) -> list[str]:
    """Return notes on missing system turns, and on texts and keys that are not used."""
    messages = find_messages(record, field, template)
    keys: dict[str, Any] = {}
    turns = [_parse_message(message, template) for message in messages]
    for message, turn in zip(messages, turns, strict=True):
        used = {*MESSAGE_KEYS, *keys_of(turn)}
        unused = {key: value for key, value in message.items() if key not in used}
        keys |= {key: value for key, value in unused.items() if value not in EMPTY_VALUES}
    used_fields = [*chat_fields(record, field)]
    used_fields += [TOOLS_FIELD] if find_tools(record, template) else []
    system = system_field(record, template)
    if system and messages[0].get("content") == record[system]:
        used_fields.append(system)
    notes = unused_field_notes(record, used_fields)
    notes += unused_field_notes(keys, ())
    if any(role_of(message) == "assistant" and _is_empty(message) for message in messages):
        notes.append(EMPTY_ANSWER_NOTE)
    if template and drops_text(template, turns):
        notes.append(DROPPED_TEXT_NOTE)
    return notes if "system" in map(role_of, messages) else [*notes, NO_SYSTEM_NOTE]
