"""The fields of records that hold texts, and the flags of prepare.py that choose them."""

import shlex
from typing import Any

CHAT_FIELDS = ("messages", "conversations")
PAIR_FIELDS = ("prompt", "completion")  # texts, or lists of messages
MESSAGE_FORMS = ({"role", "content"}, {"from", "value"})
# Usual names, in lower case, of the fields of pairs.
PROMPT_NAMES = ("prompt", "instruction", "question", "query", "input")
COMPLETION_NAMES = ("completion", "answer", "output", "response")


def describe_field(record: dict[str, Any], field: str, flag: str, kind: str = "text") -> str:
    """Return why a field's value is not of a kind, and what to do."""
    value = record.get(field)
    got = f"(got {repr(value)[:30]})"
    if isinstance(value, bytes):
        return f"{field!r} is binary {got}. Cast it to a string"
    if value == []:
        return f"{field!r} is an empty list. Remove such records"
    if kind != "text" and isinstance(value, str) and value.lstrip().startswith("["):
        return f"{field!r} is text, but not JSON {got}. Write it with json.dumps"
    problem = f"must be {kind} {got}" if field in record else "is missing"
    return f"{field!r} {problem}. {suggest_flags(record, field, flag)}"


def suggest_flags(record: dict[str, Any], field: str, flag: str) -> str:
    """Return the flags that fit the fields of a record, where ``flag`` and ``field`` do not."""
    names = {name.lower(): name for name in record}
    if names.get(field.lower(), field) != field:
        return f"Use {flag} {shlex.quote(names[field.lower()])}"
    if _is_message(record):
        is_chat = flag == "--chat-field"
        return "Join the messages of each chat in a list" if is_chat else "Use --chat instead"
    for name, value in record.items():
        has_messages = isinstance(value, list) and any(map(_is_message, value))
        if name != field and (has_messages or name in CHAT_FIELDS):
            is_usual = name in (*CHAT_FIELDS, *PAIR_FIELDS)
            chat_flags = "--chat" if is_usual else f"--chat --chat-field {shlex.quote(name)}"
            return f"Use {chat_flags} instead"
    prompts = [shlex.quote(names[name]) for name in PROMPT_NAMES if name in names]
    completions = [shlex.quote(names[name]) for name in COMPLETION_NAMES if name in names]
    if prompts and completions:
        return f"Use --prompt-field {' '.join(prompts)} --completion-field {completions[0]} instead"
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f"Write the records in {name!r} one a line"
    choices = ", ".join(repr(name) for name in record if name != field)
    return f"Choose one of {choices} with {flag}" if choices else "Convert it"


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and any(value.keys() >= keys for keys in MESSAGE_FORMS)
