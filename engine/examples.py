"""Prompts with completions, and chats → token ids, and which of them count as targets."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.tokenizer import END_OF_TURN, ROLES, Tokenizer

PROMPT, COMPLETION = "prompt", "completion"
LEARNED = (COMPLETION, "assistant")  # whose texts count
CHATML = ("<|im_start|>", "<|im_end|>")  # the tokens of many imported models' chats

Turn = tuple[str, str]  # who speaks, or prompt or completion; and the text


def chat_of(record: dict[str, Any]) -> list[Turn]:
    """The turns of ``{"messages": [{"role": …, "content": …}, …]}``. Raises ValueError for what is no chat to learn."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"should have 'messages', a list of roles and contents, but has {', '.join(map(repr, record))}"
        )
    turns = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not message.keys() >= {"role", "content"}:
            raise ValueError(f"has a message {number} that is not of the form {{'role': …, 'content': …}}")
        if message["role"] not in ROLES:
            raise ValueError(f"has a message of the role {message['role']!r}; the known ones are {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise ValueError(f"has a message {number} whose content is not text")
        turns.append((message["role"], message["content"]))
    if not any(role == "assistant" and text for role, text in turns):
        raise ValueError("has no message of the assistant with text: there would be nothing to learn")
    return turns


def pair_of(record: dict[str, Any], prompt_field: str, completion_field: str) -> list[Turn]:
    """A prompt and its completion. Raises ValueError for a field that is missing, no text, or an empty completion."""
    for field, flag in ((prompt_field, "--prompt-field"), (completion_field, "--completion-field")):
        if field not in record:
            raise ValueError(f"has only {', '.join(map(repr, record))}; it should have {field!r} (see {flag})")
        if not isinstance(record[field], str):
            raise ValueError(f"has no text in {field!r} (see {flag})")
    if not record[completion_field]:
        raise ValueError(f"has an empty {completion_field!r}: there would be nothing to learn")
    return [(PROMPT, record[prompt_field]), (COMPLETION, record[completion_field])]


def special_names(tokenizer: Tokenizer, chat: bool) -> list[str]:
    """The special tokens that a tokenizer needs to encode examples: see :meth:`Tokenizer.with_special`."""
    if not chat:
        return [tokenizer.end_name]
    return [] if tokenizer.special_tokens.keys() >= {*CHATML} else [*ROLES.values(), END_OF_TURN]


def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """The id that ends what somebody says in a chat; None if the tokenizer has no tokens for chats."""
    found = [tokenizer.special_tokens[name] for name in (CHATML[1], END_OF_TURN) if name in tokenizer.special_tokens]
    return found[0] if found else None


def encode_turn(tokenizer: Tokenizer, who: str, text: str | None) -> tuple[list[int], list[int]]:
    """What stands before a turn's text, and the text and its end, as token ids; nothing but the former for None."""
    special = tokenizer.special_tokens
    if who in (PROMPT, COMPLETION):
        opening, ending = [], [special[tokenizer.end_name]] if who == COMPLETION else []
    elif CHATML[0] in special:
        opening, ending = [special[CHATML[0]], *tokenizer.encode(f"{who}\n").tolist()], [special[CHATML[1]]]
    else:
        opening, ending = [special[ROLES[who]]], [special[END_OF_TURN]]
    return opening, [] if text is None else [*tokenizer.encode(text).tolist(), *ending]


def encode_example(tokenizer: Tokenizer, turns: Sequence[Turn]) -> np.ndarray:
    """An example's token ids, int32 (N,): as they are where they count as targets, and ~id where they do not."""
    ids: list[int] = []
    for who, text in turns:
        opening, said = encode_turn(tokenizer, who, text)
        ids += [~i for i in opening] + (said if who in LEARNED else [~i for i in said])
        if who in ROLES and CHATML[0] in tokenizer.special_tokens:
            ids += [~i for i in tokenizer.encode("\n").tolist()]
    return np.array(ids, np.int32)


def encode_chat(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[list[int]]:
    """Each turn's token ids, and last those after which the assistant's next text begins."""
    newline = tokenizer.encode("\n").tolist() if CHATML[0] in tokenizer.special_tokens else []
    turns = [[*opening, *said, *newline] for opening, said in (encode_turn(tokenizer, *turn) for turn in turns)]
    return [*turns, encode_turn(tokenizer, "assistant", None)[0]]
