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


def flatten_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record in which dotted names stand for the fields of objects."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        inner = flatten_record(value) if isinstance(value, dict) else {}
        flat |= {f"{name}.{key}": inner[key] for key in inner} or {name: value}
    return flat


def describe_field(record: dict[str, Any], field: str, flag: str, kind: str = "text") -> str:
    """Return why a field's value is not of a kind, and what to do."""
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
    advice = f"Choose {kind} with {flag} from the fields {[*flatten_record(record)]}"
    return f"{field!r} {problem}. {advice}"
