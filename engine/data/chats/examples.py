"""Records → examples: the turns of a chat, or a prompt and its completion."""

import contextlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

from engine.core.cli import warn
from engine.core.errors import UserError, wrap_library_errors
from engine.data.chats.chat import Turn, keys_of, to_messages
from engine.data.chats.chat_template import (
    DATE_OF_PREPARED_CHATS,
    PLACEHOLDER_TEXT,
    PLAIN_TEMPLATE,
    TOOLS_ROLE,
    ChatTemplate,
    map_texts,
    parse_value,
)
from engine.data.inputs.fields import (
    ANSWER_FIELDS,
    CHAT_FIELDS,
    LABEL_FIELD,
    PAIR_FIELDS,
    describe_field,
    find_field,
)
from engine.data.inputs.sources import ExampleParser
from engine.data.inputs.text import to_text

PROMPT_SEPARATOR = "\n\n"  # between the texts of several prompt fields
DROPPED_TEXT_NOTE = "chats with a part of an answer that the chat template leaves out"
TOOLS_FIELD = "tools"  # the list that apply_chat_template of transformers takes
SYSTEM_FIELDS = ("system", "system_prompt")  # texts beside the messages
# Keys of a message, in the formats of OpenAI, axolotl and ms-swift: 0 or false is not learned.
WEIGHT_KEYS = ("weight", "train", "training", "loss")
MESSAGE_KEYS = {"role", "content", "from", "value", "tool_calls", "function_call", *WEIGHT_KEYS}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of an answer
TOOL_KEYS = ("name", "tool_call_id")  # also of a message with the result of a tool
MARKUP_PATTERN = r"(</?\w+>)"  # such as </think>, at which templates cut answers
TEXT_TYPES = ("text", "input_text", "output_text")  # of the parts of a message's content
# Role in a record → role in a chat template.
TEMPLATE_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
Record = dict[str, Any]


def chat_parser(field: str | None, template: ChatTemplate | None) -> ExampleParser:
    """Return the parser of chats, in a field or in one of those that are usual."""
    fields: tuple[str, ...] = (field, PAIR_FIELDS[0]) if field else (*CHAT_FIELDS, *PAIR_FIELDS)
    fields += (TOOLS_FIELD,) if renders(template, TOOLS_ROLE) else ()
    fields += SYSTEM_FIELDS if renders(template, "system") else ()
    if template and "strftime_now" in template.source:
        date = f"{DATE_OF_PREPARED_CHATS:%d %b %Y}"
        warn(f"the chat template writes the date: {date} in prepared chats, the day's in answers")
    parse = partial(parse_chat, field=field, template=template)
    return ExampleParser(parse, fields, list_field=field or CHAT_FIELDS[0])


def pair_parser(
    prompt_field: str | Sequence[str], completion_field: str, prompt_suffix: str = ""
) -> ExampleParser:
    """Return the parser of prompts, from one field or several, with their completions."""
    fields = list_fields(prompt_field)
    parse = partial(parse_pair, prompt_fields=fields, completion_field=completion_field)
    return ExampleParser(partial(parse, prompt_suffix=prompt_suffix), (*fields, completion_field))


def list_fields(fields: str | Sequence[str]) -> list[str]:
    """Return one field or several as a list."""
    return [fields] if isinstance(fields, str) else [*fields]


def parse_chat(
    record: Record, field: str | None = None, template: ChatTemplate | None = None
) -> tuple[list[Turn], list[str]]:
    """Return the turns of a chat, ``{"messages": [{"role": …, "content": …}, …]}`` or similar.

    Also returns notes on missing system turns, and on texts and keys that are not used.
    ``template`` is that of an imported model. Raises UserError for a chat that is malformed, has no
    target, or has turns that cannot be encoded.
    """
    if field:
        record, field = find_field(record, field)
    messages, tools, fields = read_record(record, field, template)
    turns, has_dropped_texts = parse_messages(messages, template, tools)
    answers = [turn for turn in turns if turn[0] == "assistant"]
    if not any(keys_of(turn).get("weight") != 0 for turn in answers):
        raise UserError("a chat must have a message of the assistant with text to learn")
    own_turns = turns[-len(messages) :]  # without the tools
    notes = unused_field_notes(record, fields)
    for message, turn in zip(messages, own_turns, strict=True):
        notes += unused_field_notes(message, {*MESSAGE_KEYS, *keys_of(turn)})
    if not all(turn[1] or "tool_calls" in keys_of(turn) for turn in answers):
        notes.append("chats with an empty answer, which is not learned")
    if has_dropped_texts:
        notes.append(DROPPED_TEXT_NOTE)
    return turns, [*dict.fromkeys(notes)]


def read_record(
    record: Record, field: str | None = None, template: ChatTemplate | None = None
) -> tuple[list[Any], list[Record], list[str]]:
    """Return the messages and tools of a chat that the template writes, and their fields.

    Messages of a prompt, beside those of its completion, get a weight of 0. A system text beside
    the messages comes first. Raises UserError if there are no messages.
    """
    fields = [field] if field else [name for name in CHAT_FIELDS if record.get(name) is not None]
    is_pair = not fields and record.keys() >= {*PAIR_FIELDS}
    pair_fields = [PAIR_FIELDS[0], field or PAIR_FIELDS[1]]
    prompt, answer = (parse_value(record.get(name)) for name in pair_fields)
    if isinstance(answer, list) and isinstance([*answer, 0][0], dict):
        follows = role_of(answer[0]) == "assistant" and PAIR_FIELDS[0] not in fields
        is_pair = is_pair or (follows and isinstance(prompt, list | str))
        if is_pair and isinstance(prompt, str):
            record = {**record, PAIR_FIELDS[0]: [{"role": "user", "content": prompt}]}
    fields = pair_fields if is_pair else (fields or [*CHAT_FIELDS])[:1]
    messages: list[Any] = []
    for name in fields:
        value = parse_value(record.get(name))
        if not value or not isinstance(value, list):
            raise UserError(describe_field(record, name, "--chat-field", "a list of messages"))
        changes = {"weight": 0} if is_pair and name == PAIR_FIELDS[0] else {}
        messages += [{**m, **changes} if isinstance(m, dict) else m for m in value]
    has_system = any(isinstance(m, dict) and role_of(m) == "system" for m in messages)
    names = [name for name in SYSTEM_FIELDS if record.get(name) and isinstance(record[name], str)]
    if names and not has_system and renders(template, "system"):
        messages.insert(0, {"role": "system", "content": record[names[0]]})
        fields.append(names[0])
    tools = parse_value(record.get(TOOLS_FIELD))
    has_objects = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if not tools or not has_objects or not renders(template, TOOLS_ROLE):
        return messages, [], fields
    check_json(tools, repr(TOOLS_FIELD))
    return messages, tools, [*fields, TOOLS_FIELD]


def parse_messages(
    messages: Sequence[Any], template: ChatTemplate | None = None, tools: Sequence[Record] = ()
) -> tuple[list[Turn], bool]:
    """Return the turns of messages, their tools first, and whether reasoning is left out.

    Raises UserError for an unusable message.
    """
    turns: list[Turn] = []
    for number, message in enumerate(messages, 1):
        try:
            turns.append(_parse_message(message, template))
        except UserError as error:
            raise UserError(f"message {number} {error}") from None
    if template is None:
        return turns, False
    dropped = dropped_texts(template, turns)
    for number, is_reasoning in dropped:
        if not is_reasoning:
            reason = f"the model's chat template leaves out text or tool calls of message {number}"
            raise UserError(f"{reason}. Remove them, or choose another tokenizer.")
    if tools:
        turns.insert(0, (TOOLS_ROLE, "", {"tools": [*tools]}))
        template.render(to_messages(turns))  # it may refuse the tools
    return turns, bool(dropped)


@lru_cache(16)
def renders(template: ChatTemplate | None, role: str) -> bool:
    """Return whether a template writes a system turn, or the tools that a chat offers."""
    function = {"name": PLACEHOLDER_TEXT, "description": "", "parameters": {"properties": {}}}
    keys = {"tools": [{"type": "function", "function": function}]}
    messages = to_messages([(role, PLACEHOLDER_TEXT, keys), ("user", "Hi")])
    with contextlib.suppress(UserError):
        return PLACEHOLDER_TEXT in (template or ChatTemplate(PLAIN_TEMPLATE)).render(messages)
    return False


def dropped_texts(template: ChatTemplate, turns: Sequence[Turn]) -> list[tuple[int, bool]]:
    """List the texts that a template leaves out: number of the message, and whether it may be.

    Reasoning may be, in a key or beside markup such as ``</think>``. Raises UserError if the
    template refuses the chat.
    """
    numbered: list[Turn] = []
    owners: dict[str, tuple[int, bool]] = {}  # of each placeholder

    def placeholder(text: str, is_reasoning: bool = False) -> str:
        if is_reasoning and not text.strip():
            return text
        name = f"{PLACEHOLDER_TEXT}{len(owners)}{PLACEHOLDER_TEXT}"
        owners[name] = (len(numbered) + 1, is_reasoning)
        return name

    for turn in turns:
        keys = {**keys_of(turn)}
        if "tool_calls" in keys:
            keys["tool_calls"] = [
                {**call, "function": map_texts(call["function"], placeholder)}
                for call in keys["tool_calls"]
            ]
        for name in filter(keys.get, REASONING_KEYS):
            keys[name] = placeholder(keys[name], is_reasoning=True)
        has_markup = turn[0] == "assistant" and "</" in turn[1]
        content = ""
        for piece in re.split(MARKUP_PATTERN, turn[1]) if has_markup else [turn[1]]:
            is_markup = has_markup and re.fullmatch(MARKUP_PATTERN, piece)
            content += piece if is_markup or not piece else placeholder(piece, has_markup)
        numbered.append((turn[0], content, keys))
    text = template.render(to_messages(numbered))
    return [owner for name, owner in owners.items() if name not in text]


def role_of(message: Record) -> str | None:
    """Return the role of a message in a chat template; None if it is unknown."""
    role = message.get("role") or message.get("from")
    return TEMPLATE_ROLES.get(role.strip().lower()) if isinstance(role, str) else None


def _parse_message(message: Any, template: ChatTemplate | None = None) -> Turn:
    """Return the turn of a message. Raises UserError, whose text follows the message's number."""
    keys: Record = message if isinstance(message, dict) else {}
    role = role_of(keys)
    call = keys.get("function_call")
    calls = keys.get("tool_calls") or ([call] if call else [])
    if role is None or not (calls or keys.keys() & {"content", "value"}):
        form = '{"role": ROLE, "content": TEXT}, with one of the roles ' + ", ".join(TEMPLATE_ROLES)
        got = keys.get("role") or keys.get("from")
        raise UserError(f"must be {form} (got {got!r} and the keys {[*keys]})")
    weights = [keys[name] for name in WEIGHT_KEYS if keys.get(name) is not None]
    if not all(weight in (0, 1) for weight in weights):
        raise UserError(f"must have a weight of 0 or 1 (got {weights})")
    extra: dict[str, Any] = {}
    if calls:
        if role != "assistant" or not isinstance(calls, list):
            raise UserError("must be of the assistant to have a list of tool_calls")
        extra["tool_calls"] = [_parse_call(call) for call in calls]
    if template is None and (calls or role == "tool"):
        fix = "Remove it, or choose a --tokenizer with a chat template of its own."
        raise UserError(f"calls a tool or is the result of one. {fix}")
    text = _text_of_message(keys)
    if role == "assistant" and (0 in weights or not (calls or text)):
        extra["weight"] = 0
    if role == "assistant" and template:
        names = [name for name in REASONING_KEYS if isinstance(keys.get(name), str)]
        extra |= {name: keys[name] for name in names if re.search(rf"\b{name}\b", template.source)}
    if role == "tool":
        extra |= {name: keys[name] for name in TOOL_KEYS if isinstance(keys.get(name), str)}
    return (role, text, extra) if extra else (role, text)


def _text_of_message(message: Record) -> str:
    """Return the text of a message's content: text, parts of text, or null."""
    content = message.get("value") if message.get("content") is None else message["content"]
    content = to_text(content)
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
    parsed = parse_value(function.get("arguments"))
    arguments = parsed if isinstance(parsed, dict) else function.get("arguments")
    check_json(arguments, "the arguments of a tool call")
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**call_id, "type": "function", "function": {**function, "arguments": arguments}}


def check_json(value: Any, name: str) -> None:
    """Raise UserError for a value that JSON does not have, such as bytes or a date in Parquet."""
    with wrap_library_errors(f"{name} must be JSON", TypeError):
        json.dumps(value)


def parse_pair(
    record: Record, prompt_fields: Sequence[str], completion_field: str, prompt_suffix: str = ""
) -> tuple[list[Turn], list[str]]:
    """Return a prompt, joined from its fields and with a suffix, and its completion.

    Also returns notes on texts that touch, and on fields that are not used. Raises UserError for a
    field without text. Of several prompt fields, some may be empty.
    """
    texts = {}
    fields = (*prompt_fields, completion_field)
    for field in fields:
        flag = "--completion-field" if field == completion_field else "--prompt-field"
        owner, key = find_field(record, field)
        can_be_null = key in owner and flag == "--prompt-field" and len(prompt_fields) > 1
        texts[field] = to_text(owner.get(key))
        if not isinstance(texts[field], str) and not (can_be_null and texts[field] is None):
            raise UserError(describe_field(record, field, flag))
    completion = texts[completion_field]
    if not completion:
        raise UserError(f"{completion_field!r} must not be empty: its text is learned")
    prompt = PROMPT_SEPARATOR.join(filter(None, map(texts.get, prompt_fields)))
    prompt = prompt and prompt.removesuffix(prompt_suffix) + prompt_suffix
    notes = unused_field_notes(record, fields)
    if prompt and not prompt[-1].isspace() and not completion[0].isspace():
        notes.append("examples without a newline or space after the prompt: see --prompt-suffix")
    return [("prompt", prompt), ("completion", completion)], notes


def unused_field_notes(record: Record, fields: Iterable[str]) -> list[str]:
    """Return a note on each nonempty field not in ``fields``. Raises UserError for a bad answer."""
    unused = {name for name, value in record.items() if value not in (None, "", [], {})} - {*fields}
    unused -= {name.partition(".")[0] for name in fields}
    is_kto = LABEL_FIELD in unused and not {*ANSWER_FIELDS, *CHAT_FIELDS}.isdisjoint(record)
    if is_kto and to_text(record[LABEL_FIELD]) in ("false", "False"):
        reason = f"{LABEL_FIELD!r} is false: its answer is not one to learn"
        raise UserError(f"{reason}. --skip-bad-rows leaves such rows out")
    return [f"examples with {name!r}, which is not used" for name in sorted(unused)]
