"""Records → examples: the turns of a chat, or a prompt and its completion."""

import operator
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from engine.core.errors import UserError
from engine.data.chats.chat import Turn, is_learned, keys_of, to_messages
from engine.data.chats.chat_template import (
    PLACEHOLDER_TEXT,
    TOOLS_ROLE,
    ChatTemplate,
    find_answer,
    map_texts,
    parse_value,
    reads_name,
)
from engine.data.documents.document import describe_field, find_field
from engine.data.records.text import ExampleParser, to_text

CHAT_FIELDS = ("messages", "conversations")
LABEL_FIELD = "label"  # of KTO's data: whether an answer is one to learn
PROMPT_FIELD = "prompt"
COMPLETION_FIELD = "completion"
PAIR_FIELDS = (PROMPT_FIELD, COMPLETION_FIELD)  # texts, or lists of messages
ANSWER_FIELDS = (COMPLETION_FIELD, "chosen")  # lists of messages that may follow those of a prompt
PROMPT_SEPARATOR = "\n\n"  # between the texts of several prompt fields
TOOLS_FIELD = "tools"  # the list that apply_chat_template of transformers takes
SYSTEM_FIELDS = ("system", "system_prompt", "systemInstruction")  # texts beside the messages
# Keys of a message, in the formats of OpenAI, axolotl and ms-swift: 0 or false is not learned.
WEIGHT_KEYS = ("weight", "train", "training", "loss")
TEXT_KEYS = ("content", "value", "parts")  # in the formats of OpenAI, ShareGPT and Gemini
MESSAGE_KEYS = {"role", "from", "tool_calls", "function_call", *TEXT_KEYS, *WEIGHT_KEYS}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of an answer
TOOL_KEYS = ("name", "tool_call_id")  # also of a message with the result of a tool
CLOSING_TAG = re.compile(r"</\w+>")  # such as </think>, at which templates cut answers
TEXT_TYPES = ("text", "input_text", "output_text")  # of the parts of a message's content
# Role in a record → role in a chat template.
TEMPLATE_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
MESSAGE_FORM = (
    '{"role": ROLE, "content": TEXT or [{"text": TEXT}]} with a weight of 0 or 1, and tool_calls of'
    ' the assistant like {"function": {"name": NAME, "arguments": {…}}}; roles: '
) + ", ".join(TEMPLATE_ROLES)
Record = dict[str, Any]


def chat_parser(field: str | None, template: ChatTemplate | None) -> ExampleParser:
    """Return the parser of chats, in a field or in one of those that are usual."""
    names = [field] if field else CHAT_FIELDS
    fields = (*names, *PAIR_FIELDS, TOOLS_FIELD, *SYSTEM_FIELDS, LABEL_FIELD)
    return ExampleParser(partial(parse_chat, field=field, template=template), fields, names[0])


def pair_parser(
    prompt_field: str | Sequence[str], completion_field: str, prompt_suffix: str = ""
) -> ExampleParser:
    """Return the parser of prompts, from one field or several, with their completions."""
    fields = list_fields(prompt_field)
    parse = partial(parse_pair, prompt_fields=fields, completion_field=completion_field)
    read_fields = (*fields, completion_field, LABEL_FIELD)
    return ExampleParser(partial(parse, prompt_suffix=prompt_suffix), read_fields)


def list_fields(fields: str | Sequence[str]) -> list[str]:
    """Return one field or several as a list."""
    return [fields] if isinstance(fields, str) else [*fields]


def parse_chat(
    record: Record,
    field: str | None = None,
    template: ChatTemplate | None = None,
    has_targets: bool = True,
) -> tuple[list[Turn], list[str]]:
    """Return the turns of a chat, ``{"messages": [{"role": …, "content": …}, …]}`` or similar.

    Messages of a prompt, beside those of its completion, get a weight of 0. A system text beside
    the messages comes first. Also returns notes on texts and keys that are not used. ``template``
    is that of an imported model. Raises UserError for a chat that is malformed, has turns that
    cannot be encoded, or has no target although ``has_targets``.
    """
    if field:
        record, field = find_field(record, field)
    present = (key for key in (*CHAT_FIELDS, COMPLETION_FIELD) if record.get(key) is not None)
    name = field or next(present, CHAT_FIELDS[0])
    messages = parse_value(record.get(name))
    if not messages or not isinstance(messages, list):
        raise UserError(describe_field(record, name, "--chat-field", "a list of messages"))
    fields = [name]
    prompt = parse_value(record.get(PROMPT_FIELD))
    # Messages that start with an answer continue the prompt; others contain it.
    if prompt and name not in CHAT_FIELDS and role_of(messages[0]) == "assistant":
        context = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        context = [{**turn, "weight": 0} if isinstance(turn, dict) else turn for turn in context]
        messages = [*context, *messages]
        fields.append(PROMPT_FIELD)
    system = next((name for name in SYSTEM_FIELDS if record.get(name)), "")
    if system and not any(role_of(message) == "system" for message in messages):
        value = record[system]
        message = value if isinstance(value, dict) else {"content": value}
        messages = [{**message, "role": "system"}, *messages]
        fields.append(system)
    tools = parse_value(record.get(TOOLS_FIELD))
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if is_list and tools and template and reads_name(template.source, TOOLS_FIELD):
        fields.append(TOOLS_FIELD)
    else:
        tools = []
    turns = parse_messages(messages, template, tools)
    answers = [turn for turn in turns if turn[0] == "assistant"]
    notes = unused_field_notes(record, fields)
    for message, turn in zip(messages, turns[-len(messages) :], strict=True):  # without the tools
        notes += unused_field_notes(message, {*MESSAGE_KEYS, *keys_of(turn)})
    if has_targets and not any(map(is_learned, answers)):
        raise UserError("a chat must have a message of the assistant with text to learn")
    if not all(turn[1] or "tool_calls" in keys_of(turn) for turn in answers):
        notes.append("chats with an empty answer, which is not learned")
    return turns, [*dict.fromkeys(notes)]


def parse_messages(
    messages: Sequence[Any], template: ChatTemplate | None = None, tools: Sequence[Record] = ()
) -> list[Turn]:
    """Return the turns of messages, their tools first. Raises UserError for an unusable one."""
    turns: list[Turn] = [(TOOLS_ROLE, "", {"tools": [*tools]})] if tools else []
    for number, message in enumerate(messages, 1):
        try:
            turns.append(_parse_message(message, template))
        except UserError as error:
            raise UserError(f"message {number} {error}") from None
    if template:
        check_rendered(template, turns)
    return turns


def check_rendered(template: ChatTemplate, turns: Sequence[Turn]) -> None:
    """Raise UserError if a template refuses a chat, or leaves out a text that is no reasoning.

    Reasoning has a key of its own, or precedes markup as ``</think>``.
    """
    messages = to_messages(turns)
    texts: dict[str, str] = {}  # by placeholder

    def placeholder(text: str) -> str:
        name = f"{PLACEHOLDER_TEXT}{len(texts)}{PLACEHOLDER_TEXT}" if text.strip() else text
        texts[name] = text
        return name

    for message in messages:
        content = message["content"]
        matches = [*CLOSING_TAG.finditer(content)] if message["role"] == "assistant" else []
        start = matches[-1].end() if matches else 0
        message["content"] = content[:start] + placeholder(content[start:])
        if calls := message.get("tool_calls"):
            functions = [{"function": map_texts(call["function"], placeholder)} for call in calls]
            message["tool_calls"] = [*map(operator.or_, calls, functions)]
    rendered = template.render(messages)
    if messages[0]["role"] == TOOLS_ROLE and rendered == template.render(messages[1:]):
        raise UserError("the model's chat template leaves out the tools. Remove them.")
    if any(name.strip() not in rendered for name in texts):  # it may be written until turns follow
        answers = [index for index, turn in enumerate(turns) if is_learned(turn)]
        rendered += "".join("".join(find_answer(template, messages, index)) for index in answers)
    for name, text in texts.items():
        if name.strip() not in rendered:
            fix = "Remove it, or choose another tokenizer."
            raise UserError(f"the model's chat template leaves out {text[:60]!r}. {fix}")


def role_of(message: Any) -> str | None:
    """Return the role of a message in a chat template; None if it is unknown."""
    role = isinstance(message, dict) and (message.get("role") or message.get("from"))
    return TEMPLATE_ROLES.get(role.strip().lower()) if isinstance(role, str) else None


def _form_error(value: Any) -> UserError:
    """Return the error for a message, or for a value in it, whose text follows its number."""
    return UserError(f"must be {MESSAGE_FORM} (got {str(value)[:100]})")


def _parse_message(message: Any, template: ChatTemplate | None = None) -> Turn:
    """Return the turn of a message. Raises UserError, whose text follows the message's number."""
    keys: Record = message if isinstance(message, dict) else {}
    role = role_of(keys)
    calls = keys.get("tool_calls") or []
    weights = [keys[name] for name in WEIGHT_KEYS if keys.get(name) is not None]
    has_content = bool(calls or keys.keys() & {*TEXT_KEYS}) and not keys.get("function_call")
    can_call = not calls or (role == "assistant" and isinstance(calls, list))
    if not (role and has_content and can_call and all(weight in (0, 1) for weight in weights)):
        raise _form_error(message)
    if template is None and (calls or role == "tool"):
        fix = "Remove it, or choose a --tokenizer with a chat template of its own."
        raise UserError(f"calls a tool or is the result of one. {fix}")
    extra: Record = {"tool_calls": [_parse_call(call) for call in calls]} if calls else {}
    contents = (keys[name] for name in TEXT_KEYS if keys.get(name) is not None)
    text = _join_parts(next(contents, ""))
    if role == "assistant" and (0 in weights or not (calls or text)):
        extra["weight"] = 0
    names = [*TOOL_KEYS] if role == "tool" else []
    if role == "assistant" and template:
        names += [name for name in REASONING_KEYS if reads_name(template.source, name)]
    extra |= {name: keys[name] for name in names if isinstance(keys.get(name), str)}
    return (role, text, extra) if extra else (role, text)


def _join_parts(content: Any) -> str:
    """Return the text of a message's content: text, or a list of its parts."""
    content = to_text(content)
    texts = []
    for part in content if isinstance(content, list) else [content]:
        fields = part if isinstance(part, dict) else {"text": part}
        text = fields.get("text")
        if not isinstance(text, str) or (fields.get("type") or "text") not in TEXT_TYPES:
            raise _form_error(part)
        texts.append(text)
    return "".join(texts)


def _parse_call(call: Any) -> Record:
    """Return a tool call in the form of chat templates, with an object of arguments."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _form_error(call)
    arguments = parse_value(function.get("arguments"))
    call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**call_id, "type": "function", "function": {**function, "arguments": arguments}}


def parse_pair(
    record: Record, prompt_fields: Sequence[str], completion_field: str, prompt_suffix: str = ""
) -> tuple[list[Turn], list[str]]:
    """Return a prompt, joined from its fields and with a suffix, and its completion.

    Also returns notes on texts that touch, and on fields that are not used. Raises UserError for a
    field without text. Of several prompt fields, some may be empty.
    """
    texts = []
    fields = (*prompt_fields, completion_field)
    for number, field in enumerate(fields, 1):
        flag = "--completion-field" if number == len(fields) else "--prompt-field"
        owner, key = find_field(record, field)
        can_be_null = key in owner and number < len(fields) > 2
        text = "" if can_be_null and owner[key] is None else to_text(owner.get(key))
        if not isinstance(text, str):
            raise UserError(describe_field(record, field, flag))
        texts.append(text)
    completion = texts.pop()
    if not completion:
        raise UserError(f"{completion_field!r} must not be empty: its text is learned")
    prompt = PROMPT_SEPARATOR.join(filter(None, texts))
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
    if is_kto and str(record[LABEL_FIELD]).lower() in ("true", "false"):
        reason = f"{LABEL_FIELD!r} marks answers that are not to be learned, as in KTO's data"
        raise UserError(f"{reason}. Keep the rows that are true, without this field")
    return [f"examples with {name!r}, which is not used" for name in sorted(unused)]
