"""The fields of records that hold texts, and the flags of prepare.py that choose them."""

import shlex
from collections.abc import Sequence
from typing import Any

from engine.data.chats.chat_template import parse_value
from engine.data.inputs.text import to_text

CHAT_FIELDS = ("messages", "conversations")
LABEL_FIELD = "label"  # of KTO's data: whether an answer is one to learn
PAIR_FIELDS = ("prompt", "completion")  # texts, or lists of messages
ANSWER_FIELDS = ("completion", "chosen")  # lists of messages that may follow those of a prompt
MESSAGE_FORMS = ({"role", "content"}, {"from", "value"})
# Usual names, in lower case, of the fields of pairs.
PROMPT_NAMES = ("prompt", "instruction", "question", "query", "input")
COMPLETION_NAMES = ("completion", "answer", "output", "response", "chosen")


def find_field(record: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the object that has a field, whose name may be dotted, and its name there."""
    head, _, rest = name.partition(".")
    if name not in record and rest and isinstance(record.get(head), dict):
        return find_field(record[head], rest)
    return record, name


def flatten_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which dotted names stand for the fields of objects."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        inner = flatten_record(value) if isinstance(value, dict) else {}
        flat |= {f"{name}.{key}": inner[key] for key in inner} or {name: value}
    return flat


def describe_field(
    record: dict[str, Any], field: str, flag: str, kind: str = "text", others: Sequence[str] = ()
) -> str:
    """Return why a field's value is not of a kind, and what to do.

    The ``others`` are for other flags.
    """
    owner, key = find_field(record, field)
    value = owner.get(key)
    got = f"(got {repr(value)[:30]})"
    if isinstance(value, bytes):
        return f"{field!r} is binary {got}. Cast it to a string"
    if value == []:
        return f"{field!r} is an empty list. Remove such records"
    if key in owner and (value is None or value != value):
        return f"{field!r} is empty {got}. --skip-bad-rows leaves such rows out"
    if kind != "text" and isinstance(value, str) and value.lstrip().startswith("["):
        return f"{field!r} is text, but not JSON {got}. Write it with json.dumps"
    problem = f"must be {kind} {got}" if key in owner else "is missing"
    return f"{field!r} {problem}. {suggest_flags(flatten_record(record), field, flag, others)}"


def suggest_flags(record: dict[str, Any], field: str, flag: str, others: Sequence[str] = ()) -> str:
    """Return the flags that fit the fields of a record, where ``flag`` and ``field`` do not."""
    names = {name.rpartition(".")[2].lower(): name for name in reversed(record)}
    if names.get(field.lower(), field) != field:
        return f"Use {flag} {shlex.quote(names[field.lower()])}"
    is_chat = flag == "--chat-field"
    if _is_message(record):
        return "Join the messages of each chat in a list" if is_chat else "Use --chat instead"
    for name in filter(record.__contains__, (*CHAT_FIELDS, *ANSWER_FIELDS, *record)):
        is_wrong = is_chat and name == field
        if not is_wrong and (_has_messages(record[name]) or name in CHAT_FIELDS):
            is_found = name in (*CHAT_FIELDS, ANSWER_FIELDS[0]) and not is_chat
            chat_flags = "--chat" if is_found else f"--chat --chat-field {shlex.quote(name)}"
            return f"Use {chat_flags} instead"
    columns = {name: column for name, column in names.items() if is_chat or column != field}
    names = {name: shlex.quote(column) for name, column in columns.items()}
    prompts = [names[name] for name in PROMPT_NAMES if name in names]
    completions = [names[name] for name in COMPLETION_NAMES if name in names]
    if prompts and completions:
        return f"Use --prompt-field {' '.join(prompts)} --completion-field {completions[0]} instead"
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict) and not is_chat:
            return f"Write the records in {name!r} one a line"
    if is_chat:
        usable = [name for name, value in record.items() if _has_messages(parse_value(value))]
    else:
        usable = [name for name, value in record.items() if isinstance(to_text(value), str)]
    choices = [name for name in usable if name not in (field, *others)]
    if len(choices) == 1:
        return f"Use {flag} {shlex.quote(choices[0])}"
    listing = ", ".join(map(repr, choices))
    return f"Choose one of {listing} with {flag}" if choices else "Convert it"


def _has_messages(value: Any) -> bool:
    return isinstance(value, list) and any(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and any(value.keys() >= keys for keys in MESSAGE_FORMS)
