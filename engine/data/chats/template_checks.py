"""What a chat template writes of a chat: roles, tools, and every text."""

import functools
import json
from collections import Counter
from collections.abc import Sequence

from engine.core.errors import UserError
from engine.data.chats.chat import PLACEHOLDER_TEXT, Turn, keys_of, to_messages
from engine.data.chats.chat_template import ChatTemplate, map_texts

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # of an answer


def check_template(template: ChatTemplate, turns: Sequence[Turn]) -> None:
    """Raise UserError if a template refuses a chat, or leaves out a text or tool call."""
    numbered: list[Turn] = []
    owners: list[int] = []  # for each placeholder, the number of its message

    def placeholder(text: str) -> str:
        owners.append(len(numbered) + 1)
        return f"{PLACEHOLDER_TEXT}{len(owners)}{PLACEHOLDER_TEXT}"

    for turn in turns:
        keys = {key: value for key, value in keys_of(turn).items() if key not in REASONING_KEYS}
        if "tool_calls" in keys:
            functions = [map_texts(call["function"], placeholder) for call in keys["tool_calls"]]
            calls = zip(keys["tool_calls"], functions, strict=True)
            keys["tool_calls"] = [{**call, "function": function} for call, function in calls]
        numbered.append((turn[0], turn[1] and placeholder(turn[1]), keys))
    text = _render_numbered(template, json.dumps(numbered))
    for number, owner in enumerate(owners, 1):
        if f"{PLACEHOLDER_TEXT}{number}{PLACEHOLDER_TEXT}" not in text:
            reason = f"the model's chat template leaves out text or tool calls of message {owner}"
            raise UserError(f"{reason}. Remove them, or choose another --tokenizer.")


@functools.lru_cache(2**10)
def _render_numbered(template: ChatTemplate, turns: str) -> str:
    return template.render(to_messages(json.loads(turns)))


@functools.lru_cache(16)
def renders(template: ChatTemplate | None, role: str) -> bool:
    """Return whether a template writes a system turn, or the tools that a chat offers."""
    if template is None:
        return role == "system"
    function = {"name": PLACEHOLDER_TEXT, "description": "", "parameters": {"properties": {}}}
    tools = {"tools": [{"type": "function", "function": function}]}
    first: Turn = (role, PLACEHOLDER_TEXT) if role == "system" else (role, "", tools)
    try:
        return PLACEHOLDER_TEXT in template.render(to_messages([first, ("user", "Hi")]))
    except UserError:
        return False


def drops_text(template: ChatTemplate, turns: Sequence[Turn]) -> bool:
    """Return whether a template leaves out reasoning, or text with markup such as ``</think>``."""
    parts: Counter[str] = Counter()
    for turn in turns:
        if turn[0] == "assistant":
            reasoning = [keys_of(turn)[name] for name in REASONING_KEYS if name in keys_of(turn)]
            texts = [*reasoning, *([turn[1]] if "</" in turn[1] else [])]
            parts.update("".join(text.split()) for text in texts)
    rendered = "".join(template.render(to_messages(turns)).split()) if parts else ""
    return any(rendered.count(part) < count for part, count in parts.items())
