"""The fields of records that hold texts."""

from typing import Any

CHAT_FIELDS = ("messages", "conversations")
LABEL_FIELD = "label"  # of KTO's data: whether an answer is one to learn
PAIR_FIELDS = ("prompt", "completion")  # texts, or lists of messages
ANSWER_FIELDS = ("completion", "chosen")  # lists of messages that may follow those of a prompt


def find_field(record: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the object that has a field, whose name may be dotted, and its name there."""
    head, _, rest = name.partition(".")
    if name not in record and rest and isinstance(record.get(head), dict):
        return find_field(record[head], rest)
    return record, name


def list_names(record: dict[str, Any]) -> list[str]:
    """Return the names of the fields of a record, and the dotted ones of objects in it."""
    names = []
    for name, value in record.items():
        inner = list_names(value) if isinstance(value, dict) else []
        names += [f"{name}.{key}" for key in inner] or [name]
    return names


def describe_field(record: dict[str, Any], field: str, flag: str, kind: str = "text") -> str:
    """Return why a field's value is not of a kind, and which fields there are."""
    owner, key = find_field(record, field)
    problem = f"must be {kind} (got {repr(owner[key])[:30]})" if key in owner else "is missing"
    skip = ", or leave such rows out with --skip-bad-rows" if key in owner else ""
    return f"{field!r} {problem}. Choose one with {flag} from the fields {list_names(record)}{skip}"
