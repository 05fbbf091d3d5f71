"""Text, prompts with completions, and chats → token ids, and which of them are targets."""

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.data.tokenizer import Tokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN

TARGET_SPEAKERS = ("completion", "assistant")  # whose texts are targets
CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")  # the tokens of many imported models' chats
MAX_RENDERED_CHARACTERS = 500  # of an example
MAX_RENDERED_RUN_CHARACTERS = 200  # of consecutive targets, or of tokens between targets

Turn = tuple[str, str]  # speaker: a role, "prompt" or "completion"; and the text

# Maps a text, and whether its document ends there, to token ids, the UTF-8 bytes that count, and
# the number of targets.
Encoder = Callable[[str, bool], tuple[np.ndarray, int, int]]


def parse_chat(record: dict[str, Any]) -> list[Turn]:
    """Return the turns of ``{"messages": [{"role": …, "content": …}, …]}``.

    Raises UserError for a chat that is malformed or has no target.
    """
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        fields = ", ".join(map(repr, record))
        raise UserError(f"a chat must have a list of 'messages' (got {fields}; see --chat)")
    turns = []
    for number, message in enumerate(messages, 1):
        has_form = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not has_form or message.get("role") not in [*CHAT_ROLES]:
            form = '{"role": ROLE, "content": TEXT}'
            roles = ", ".join(CHAT_ROLES)
            raise UserError(f"message {number} must be {form}, with one of the roles {roles}")
        turns.append((message["role"], message["content"]))
    if not any(role == "assistant" and text for role, text in turns):
        raise UserError("a chat must have a message of the assistant with text to learn")
    return turns


def parse_pair(record: dict[str, Any], prompt_field: str, completion_field: str) -> list[Turn]:
    """Return a prompt and its completion. Raises UserError for a field without text."""
    for field, flag in ((prompt_field, "--prompt-field"), (completion_field, "--completion-field")):
        if not isinstance(record.get(field), str):
            fields = ", ".join(map(repr, record))
            raise UserError(f"{field!r} must be text (got the fields {fields}; see {flag})")
    if not record[completion_field]:
        raise UserError(f"{completion_field!r} must not be empty: its text is learned")
    return [("prompt", record[prompt_field]), ("completion", record[completion_field])]


def special_token_names(tokenizer: Tokenizer, chat: bool) -> list[str]:
    """Return the special tokens that a tokenizer needs to encode examples."""
    if not chat:
        return [tokenizer.end_name]
    has_chatml = tokenizer.special_tokens.keys() >= {*CHATML_TOKENS}
    return [] if has_chatml else [*CHAT_ROLES.values(), END_OF_TURN]


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a turn of a chat; None without tokens for chats."""
    for name in (CHATML_TOKENS[1], END_OF_TURN):
        if name in tokenizer.special_tokens:
            return tokenizer.special_tokens[name]
    return None


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end the assistant's turn: at most one."""
    end = end_of_turn(tokenizer)
    return [] if end is None else [end]


def prompt_ids(example: Iterable[int]) -> list[int]:
    """Return the token ids of an example before its first target."""
    return [~token for token in itertools.takewhile(lambda token: token < 0, example)]


def turn_delimiters(tokenizer: Tokenizer, speaker: str) -> tuple[list[int], list[int], list[int]]:
    """Return the ids before a turn's text, at its end (targets if the text is), and after it."""
    special = tokenizer.special_tokens
    if speaker == "prompt":
        return [], [], []
    if speaker == "completion":
        return [], [special[tokenizer.end_name]], []
    if CHATML_TOKENS[0] in special:
        name = tokenizer.encode(f"{speaker}\n").tolist()
        newline = tokenizer.encode("\n").tolist()
        return [special[CHATML_TOKENS[0]], *name], [special[CHATML_TOKENS[1]]], newline
    return [special[CHAT_ROLES[speaker]]], [special[END_OF_TURN]], []


def encode_example(tokenizer: Tokenizer, turns: Sequence[Turn]) -> np.ndarray:
    """Encode an example, int32 (N,): an id where it counts as a target, ~id elsewhere."""
    ids: list[int] = []
    for speaker, text in turns:
        before, end, after = turn_delimiters(tokenizer, speaker)
        content = [*tokenizer.encode(text).tolist(), *end]
        if speaker not in TARGET_SPEAKERS:
            content = [~token for token in content]
        ids += [~token for token in before] + content + [~token for token in after]
    return np.array(ids, np.int32)


def encode_chat(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[list[int]]:
    """Return the ids of each turn, then those that begin the assistant's next turn."""
    encoded = []
    for speaker, text in turns:
        before, end, after = turn_delimiters(tokenizer, speaker)
        encoded.append([*before, *tokenizer.encode(text).tolist(), *end, *after])
    return [*encoded, turn_delimiters(tokenizer, "assistant")[0]]


def is_target(example: np.ndarray) -> np.ndarray:
    """Return which ids (N,) of an encoded example are targets, bool (N,): never the first."""
    return (example >= 0) & (np.arange(len(example)) > 0)


def escape_unprintable(text: str) -> str:
    """Escape the unprintable characters of a text, except line ends."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def render_with_targets(tokenizer: Tokenizer, example: np.ndarray) -> str:
    """Decode an example, with ⟦ and ⟧ around its targets; long runs are shortened."""
    targets = is_target(example)
    rendered = ""
    for run in np.split(np.arange(len(example)), np.flatnonzero(np.diff(targets)) + 1):
        ids = np.maximum(example[run], ~example[run])
        text = escape_unprintable(tokenizer.decode(ids.tolist()))
        if len(text) > MAX_RENDERED_RUN_CHARACTERS:
            half = MAX_RENDERED_RUN_CHARACTERS // 2
            text = f"{text[:half]} … {text[-half:]}"
        if len(rendered) + len(text) > MAX_RENDERED_CHARACTERS:
            return f"{rendered} …"
        rendered += f"⟦{text}⟧" if targets[run[0]] else text
    return rendered


def make_encoder(tokenizer: Tokenizer, separator: str, examples: bool) -> Encoder:
    """Return an encoder of text, or with ``examples`` of examples as JSON of their turns.

    The end of a document is encoded as the end of text, or as the separator without such a token.
    """
    end = tokenizer.end_of_text
    ending = tokenizer.encode(separator) if end is None else np.array([end], np.uint32)

    def encode_text(text: str, ends: bool) -> tuple[np.ndarray, int, int]:
        ids = tokenizer.encode(text)
        num_bytes = len(text.encode()) + ends * len(separator)
        return np.concatenate((ids, ending)) if ends else ids, num_bytes, 0

    def encode_turns(text: str, ends: bool) -> tuple[np.ndarray, int, int]:
        turns = json.loads(text)
        ids = encode_example(tokenizer, turns)
        targets = [text for speaker, text in turns if speaker in TARGET_SPEAKERS]
        return ids, len("".join(targets).encode()), int(is_target(ids).sum())

    return encode_turns if examples else encode_text
