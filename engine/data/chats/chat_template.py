"""Chat templates: Jinja texts that turn the messages of a chat into text with special tokens."""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine.core.errors import UserError, wrap_library_errors

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
PLACEHOLDER_TEXT = "\ufdd1"  # a Unicode noncharacter, which takes the place of a text
TOOLS_ROLE = "tools"  # of a message before the first, whose key "tools" lists what may be called
# Prepared ids must not change daily. This date is the one that Llama 3's template falls back to.
DATE_OF_PREPARED_CHATS = datetime(2024, 7, 26)
# Names that a template gets besides the variables of its model.
RENDERED_NAMES = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
RENDERED_NAMES |= {"strftime_now", "raise_exception"}

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
    from jinja2 import TemplateError, nodes  # takes 40 ms, which only chats need
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """{% generation %}…{% endgeneration %}, with which some templates mark the answers."""

        tags = {"generation"}  # noqa: RUF012, as Jinja declares it

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def set_variables(source: str, assignments: Sequence[str]) -> str:
    """Return a template in which variables, each NAME=VALUE, have values unless they are passed.

    A value is JSON, or else text. Raises UserError for a name that the template does not use.
    """
    from jinja2.meta import find_undeclared_variables

    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        with wrap_library_errors("--template-variable: the chat template fails", Exception):
            compiled = _compile_template(source)
        names = find_undeclared_variables(compiled.environment.parse(source)) - RENDERED_NAMES
        if not equals or name not in names:
            listing = ", ".join(sorted(names)) or "none"
            form = f"NAME=VALUE with a name that the template uses: {listing}"
            raise UserError(f"--template-variable: must be {form} (got {assignment}).")
        # The line end keeps the source at the start of a line, and is not rendered.
        assign = f"{{%- set {name} = {parse_value(text, str)!r} %}}"
        source = f"{{%- if {name} is not defined %}}{assign}{{%- endif %}}\n{source}"
    return source


def parse_value(value: Any, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a text of JSON, with NaN by ``parse_constant``; else the value itself."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value, parse_constant=parse_constant)
    return value


def map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """Return a JSON value in which a function is applied to every text, except to keys."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [map_texts(item, function) for item in value]
    if isinstance(value, dict):
        return {key: map_texts(item, function) for key, item in value.items()}
    return value
