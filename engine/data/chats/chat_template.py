"""Chat templates: Jinja texts that turn the messages of a chat into text with special tokens.

The prompt of an answer is what a template renders before it with a generation prompt; the answer is
the rest of what it renders up to it.
"""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine.core.errors import UserError

# Templates of models that are trained here, and of imported models with the tokens of ChatML.
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# {% generation %}…{% endgeneration %}, with which some templates mark the answers.
GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
TOOLS_ROLE = "tools"  # of a message before the first, whose key "tools" lists what may be called
# Prepared ids must not change daily. This date is the one that Llama 3's template falls back to.
DATE_OF_PREPARED_CHATS = datetime(2024, 7, 26)
# Names that a template gets besides the variables of its model.
RENDERED_NAMES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
RENDERED_NAMES |= {"strftime_now", "raise_exception"}
PLACEHOLDER_TEXT = "\ufdd1"  # a Unicode noncharacter, which takes the place of a text
ANSWER_MARKS = (PLACEHOLDER_TEXT, "\ufdd2")  # an answer starts with one of them at most
SHORT_QUESTION = {"role": "user", "content": "Hi"}
SHORT_CHAT = [SHORT_QUESTION, {"role": "assistant", "content": PLACEHOLDER_TEXT}]
EARLIER_CHAT = [SHORT_QUESTION, {"role": "assistant", "content": "Hello"}]

Message = dict[str, Any]  # as a template gets it


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template that turns messages into text with special tokens."""

    source: str
    bos_token: str = ""
    eos_token: str = ""

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        date: datetime = DATE_OF_PREPARED_CHATS,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages as transformers does. Raises UserError if the template refuses them.

        The variables must not have the RENDERED_NAMES.
        """
        tools = [message["tools"] for message in messages if message["role"] == TOOLS_ROLE]
        try:
            return _compile_template(self.source).render(
                {"documents": None, **(variables or {})},
                messages=messages[len(tools) :],
                tools=tools[0] if tools else None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                strftime_now=date.strftime,
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(f"{error}".split()) or type(error).__name__
            raise UserError(f"the model's chat template refuses the chat ({reason})") from None


@functools.lru_cache(16)
def _compile_template(source: str) -> Any:
    """Compile a template as transformers does."""
    from jinja2 import TemplateError  # takes 40 ms, which only chats need
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    unmarked = GENERATION_TAG.sub(lambda tag: tag[1] + ("endif" if tag[2] else "if true"), source)
    return environment.from_string(unmarked)


def reads_name(source: str, name: str) -> bool:
    """Return whether the source of a template has a name, such as that of a variable."""
    return name.isidentifier() and re.search(rf"\b{name}\b", source) is not None


@dataclass(frozen=True)
class TurnEnds:
    """What follows an answer and ends it: a special token, or a text of the chat template."""

    token_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()  # without white space at the end
    after_chat: str = ""  # is rendered after the last answer of a chat
    learned: tuple[str, ...] = ("",)  # of that, and of what is rendered between turns

    @property
    def num_bytes(self) -> int:
        """Bytes of the longest text, at least its number of tokens."""
        return max((len(text.encode()) for text in self.texts), default=0)


def find_ends(
    template: ChatTemplate, special: re.Pattern[str], special_ids: Mapping[str, int]
) -> TurnEnds:
    """Return what a template writes after an answer: the last one, or before another turn.

    ``special`` is a pattern of the names of special tokens.
    """
    names = []
    texts = []
    learned = []
    after_chat = ""
    for role in ("", "user", "tool"):
        next_turns = [{"role": role, "content": PLACEHOLDER_TEXT}] if role else []
        afters = []
        for earlier in ([], EARLIER_CHAT):  # some templates number the turns
            with contextlib.suppress(UserError):  # of a template without tools
                text = template.render([*earlier, *SHORT_CHAT, *next_turns])
                afters.append([*text.split(PLACEHOLDER_TEXT), ""][1])
        after = afters[0][: common_length(*afters)] if afters else ""
        after_chat = after_chat if role else after
        match = special.search(after)
        words = after[: match.start() if match else None].rstrip()
        names += [match[0]] if match else []
        texts += [words] if words else []
        learned.append(after[: match.end()] if match else words if role else after)
    token_ids = map(special_ids.__getitem__, dict.fromkeys(names))
    return TurnEnds((*token_ids,), (*dict.fromkeys(texts),), after_chat, (*learned,))


def split_answers(
    template: ChatTemplate, ends: TurnEnds, messages: Sequence[Message], learned: Sequence[int]
) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return rendered texts, and in each the first and last index + 1 of answers to learn.

    One text has all answers, unless the template writes an answer, or what precedes it, in another
    way when turns follow. Then each answer follows its own prompt, which is what inference sees.
    """
    texts: list[tuple[str, list[tuple[int, int]]]] = [(template.render(messages), [])]
    for index in reversed(learned):
        prompt, answer = find_answer(template, messages, index)
        end = ends.learned[0] if answer.endswith(ends.after_chat) else ""
        content = prompt + (answer.removesuffix(ends.after_chat) if end else answer)
        if not texts[-1][0].startswith(content + end):
            texts.append((prompt + answer, []))
        text, spans = texts[-1]
        matches = [len(end) for end in ends.learned if text.startswith(end, len(content))]
        spans.append((len(prompt), len(content) + max([len(end), *matches])))
    return [text for text in reversed(texts) if text[1]]


def find_answer(template: ChatTemplate, messages: Sequence[Message], index: int) -> tuple[str, str]:
    """Return the rendered prompt of an answer, and the rest of what is rendered up to the answer.

    If the second does not start with the first, or if there is no question, the rest starts with
    the text of the answer.
    """
    before = messages[:index]
    text = template.render(messages[: index + 1])
    has_question = any(message["role"] not in (TOOLS_ROLE, "system") for message in before)
    prompt = template.render(before, add_generation_prompt=True) if has_question else ""
    if prompt and text.startswith(prompt):
        return prompt, text[len(prompt) :]
    chats = [[*before, {"role": "assistant", "content": mark}] for mark in ANSWER_MARKS]
    start = common_length(text, *map(template.render, chats))
    return prompt or text[:start], text[start:]


def common_length(*sequences: Sequence[Any]) -> int:
    """Return the number of equal items at the start of sequences."""
    items = zip(*sequences, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda values: len({*values}) == 1, items))


def parse_value(value: Any, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a text of JSON, with NaN by ``parse_constant``; else the value itself."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value, parse_constant=parse_constant)
    return value


def map_texts(value: Any, function: Callable[[str], str], has_keys: bool = False) -> Any:
    """Return a JSON value in which a function is applied to every text, and to keys if asked."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [map_texts(item, function, has_keys) for item in value]
    if isinstance(value, dict):
        items = {key: map_texts(item, function, has_keys) for key, item in value.items()}
        return {function(key): item for key, item in items.items()} if has_keys else items
    return value
