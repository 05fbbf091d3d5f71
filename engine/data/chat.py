"""Prompts with completions, and chats → token ids, and which of them count as targets."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from engine.core.errors import UserError
from engine.data.tokenizer import END_OF_TURN, ROLES, Tokenizer

PROMPT, COMPLETION = "prompt", "completion"
MOST_SHOWN, MOST_OF_TURN = 500, 200  # characters of an example that are shown
LEARNED = (COMPLETION, "assistant")  # whose texts count
CHATML = ("<|im_start|>", "<|im_end|>")  # the tokens of many imported models' chats

Turn = tuple[str, str]  # who speaks, or prompt or completion; and the text


def chat_of(record: dict[str, Any]) -> list[Turn]:
    """The turns of ``{"messages": [{"role": …, "content": …}, …]}``. Raises UserError for what is no chat to learn."""
    if "messages" not in record:
        raise UserError(f"has only {', '.join(map(repr, record))}; a chat should have 'messages' (see --chat)")
    messages, form = record["messages"], '{"role": …, "content": …}'
    if not isinstance(messages, list) or not messages:
        raise UserError(f"has 'messages' that should be a list of {form}, and is not")
    turns = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not message.keys() >= {"role", "content"}:
            raise UserError(f"has a message {number} that is not of the form {form}")
        role, text = message["role"], message["content"]
        if not isinstance(role, str) or role not in ROLES:
            raise UserError(f"has a message {number} of the role {role!r}; the known ones are {', '.join(ROLES)}")
        if not isinstance(text, str):
            raise UserError(f"has a message {number} whose content is not text")
        turns.append((role, text))
    if not any(role == "assistant" and text for role, text in turns):
        raise UserError("has no message of the assistant with text: there would be nothing to learn")
    return turns


def pair_of(record: dict[str, Any], prompt_field: str, completion_field: str) -> list[Turn]:
    """A prompt and its completion. Raises UserError for a field that is missing, no text, or an empty completion."""
    for field, flag in ((prompt_field, "--prompt-field"), (completion_field, "--completion-field")):
        if field not in record:
            raise UserError(f"has only {', '.join(map(repr, record))}; it should have {field!r} (see {flag})")
        if not isinstance(record[field], str):
            raise UserError(f"has no text in {field!r} (see {flag})")
    if not record[completion_field]:
        raise UserError(f"has an empty {completion_field!r}: there would be nothing to learn")
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


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """The ids, one at most, after which the other's turn comes."""
    return [end for end in [end_of_turn(tokenizer)] if end is not None]


def prompt_of(example: Iterable[int]) -> list[int]:
    """The token ids of an example before the first that counts."""
    return [~token for token in itertools.takewhile(lambda token: token < 0, example)]


def around(tokenizer: Tokenizer, who: str) -> tuple[list[int], list[int], list[int]]:
    """The token ids that stand before a turn's text, that end it, and that stand after its end."""
    special = tokenizer.special_tokens
    if who in (PROMPT, COMPLETION):
        return [], [special[tokenizer.end_name]] if who == COMPLETION else [], []
    if CHATML[0] in special:
        name, newline = (tokenizer.encode(text).tolist() for text in (f"{who}\n", "\n"))
        return [special[CHATML[0]], *name], [special[CHATML[1]]], newline
    return [special[ROLES[who]]], [special[END_OF_TURN]], []


def encode_example(tokenizer: Tokenizer, turns: Sequence[Turn]) -> np.ndarray:
    """An example's token ids, int32 (N,): as they are where they count as targets, and ~id where they do not."""
    ids: list[int] = []
    for who, text in turns:
        before, end, after = around(tokenizer, who)
        said = [*tokenizer.encode(text).tolist(), *end]
        ids += [~i for i in before] + (said if who in LEARNED else [~i for i in said]) + [~i for i in after]
    return np.array(ids, np.int32)


def learned_bytes(turns: Sequence[Turn]) -> int:
    """UTF-8 bytes of the text that counts."""
    return sum(len(text.encode()) for who, text in turns if who in LEARNED)


def is_target(example: np.ndarray) -> np.ndarray:
    """Which of an example's token ids (N,) are targets that count, bool (N,): never the first, which none precedes."""
    return (example >= 0) & (np.arange(len(example)) > 0)


def marked(tokenizer: Tokenizer, example: np.ndarray) -> str:
    """An encoded example as text, with ⟦ and ⟧ around what counts; some MOST_SHOWN characters, the middles left out."""
    counts, shown = is_target(example), ""
    for run in np.split(np.arange(len(example)), np.flatnonzero(np.diff(counts)) + 1):
        ids = np.where(example[run] < 0, ~example[run], example[run])
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in tokenizer.decode(ids.tolist()))
        if len(text) > MOST_OF_TURN:
            text = f"{text[: MOST_OF_TURN // 2]} … {text[-MOST_OF_TURN // 2 :]}"
        if len(shown) + len(text) > MOST_SHOWN:
            return f"{shown} …"
        shown += f"⟦{text}⟧" if counts[run[0]] else text
    return shown


def encode_chat(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[list[int]]:
    """Each turn's token ids, and last those after which the assistant's next text begins."""
    encoded = []
    for who, text in turns:
        before, end, after = around(tokenizer, who)
        encoded.append([*before, *tokenizer.encode(text).tolist(), *end, *after])
    return [*encoded, around(tokenizer, "assistant")[0]]
