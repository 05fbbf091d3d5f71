"""OpenAI's form of requests and answers: JSON → settings, tokens → JSON.

Source: the API reference of OpenAI, "Completions" and "Chat completions".
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from engine.core.errors import UserError
from engine.core.settings import from_values
from engine.data.chats.chat_template import RENDERED_NAMES
from engine.data.tokenizer import Tokenizer
from engine.generation.text_batch import Token

MAX_CHOICES = 128
MAX_TEXTS = 256  # of a request: the choices of all its prompts
MAX_TOP_LOGPROBS = 20
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 200  # of a text
MAX_MESSAGE_CHARACTERS = 200
# Arguments that do not change the text, and values that mean the default.
IGNORED_ARGUMENTS = {"user", "metadata", "store", "service_tier", "safety_identifier"}
IGNORED_ARGUMENTS |= {"prompt_cache_key", "parallel_tool_calls"}
NEUTRAL_VALUES: dict[str, Any] = {
    "best_of": [1],
    "tool_choice": ["auto", "none"],
    "response_format": [{"type": "text"}],
    "modalities": [["text"]],
    "length_penalty": [1],
    "typical_p": [1],
    "repeat_penalty": [1],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True, False],
    "add_generation_prompt": [True],
    "cache_prompt": [True, False],
}
# Numbers with which other servers spell "off", "random" or "no limit", and what they mean here.
MAX_TOKENS = 2**31
MEANING_OF_NUMBERS: dict[str, dict[int, int | None]] = {
    "seed": {-1: None},
    "top_k": {-1: None, 0: None},
    "max_tokens": {-1: MAX_TOKENS},
    "max_completion_tokens": {-1: MAX_TOKENS},
}


class ApiError(Exception):
    """A request that is refused, with the status of its answer."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str = ""):
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code or None

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class Settings:
    """The arguments common to completions and chats."""

    model: str = ""
    max_tokens: Annotated[int | None, Ge(0)] = None
    temperature: Annotated[float, Ge(0), Le(2)] = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int | None, Ge(1)] = None
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    seed: Annotated[int | None, Ge(-(2**63)), Lt(2**63)] = None
    stop: tuple[str, ...] = ()
    n: Annotated[int, Ge(1), Le(MAX_CHOICES)] = 1
    stream: bool = False


@dataclass(frozen=True)
class CompletionSettings(Settings):
    """The arguments of /v1/completions, except the prompt."""

    max_tokens: Annotated[int, Ge(0)] = 16  # as in OpenAI's API
    echo: bool = False
    parse_special: bool = False  # read the names of special tokens in the prompt as these tokens
    logprobs: Annotated[int | None, Ge(0), Le(MAX_TOP_LOGPROBS)] = None


@dataclass(frozen=True)
class ChatSettings(Settings):
    """The arguments of /v1/chat/completions, except the messages."""

    max_tokens: Annotated[int | None, Ge(1)] = None
    max_completion_tokens: Annotated[int | None, Ge(1)] = None  # the newer name
    continue_final_message: bool = False
    add_generation_prompt: bool = True  # what continue_final_message leaves out
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] = 0


AnySettings = CompletionSettings | ChatSettings
SettingsType = TypeVar("SettingsType", CompletionSettings, ChatSettings)


def shorten(value: Any, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return the start of a text, or of the repr of another value, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= max_characters else f"{text[:max_characters]}…"


def read_settings(
    cls: type[SettingsType], body: dict[str, Any], input_names: set[str]
) -> SettingsType:
    """Return the settings of a request. Raises ApiError, which names the argument.

    An argument that is null counts as left out. Those of input_names are read elsewhere.
    """
    names = {field.name for field in fields(cls)}
    values = {}
    for name, value in body.items():
        if type(value) is int:
            value = MEANING_OF_NUMBERS.get(name, {}).get(value, value)
        if value is None or name in input_names:
            continue
        param = shorten(name)
        neutral = NEUTRAL_VALUES.get(name, [])
        try:
            from_values(cls, {name: value} if name in names else {}, "")
        except UserError as error:
            problem = str(error).partition(f"{name}: ")[2] or str(error)
            raise ApiError(f"{param}: {shorten(problem)}", param=param) from None
        if name in names:
            values[name] = value
        elif (
            (value or neutral == [True]) and name not in IGNORED_ARGUMENTS and value not in neutral
        ):
            raise ApiError(f"{param}: not supported (got {shorten(value)})", param=param)
    settings = from_values(cls, values, "")
    has_fitting_texts = all(0 < len(text) <= MAX_STOP_CHARACTERS for text in settings.stop)
    if len(settings.stop) > MAX_STOP_TEXTS or not has_fitting_texts:
        limit = f"{MAX_STOP_TEXTS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
        raise ApiError(f"stop: must be at most {limit}", param="stop")
    return settings


def includes_usage(body: dict[str, Any]) -> bool:
    """Return whether a stream ends with the number of tokens. Raises ApiError."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        problem = 'must be {"include_usage": true or false}'
        raise ApiError(f"stream_options: {problem}", param="stream_options")
    return options.get("include_usage", False)


def read_chat(body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the messages of a chat, and the variables of its template. Raises ApiError."""
    messages = body.get("messages")
    variables = body.get("chat_template_kwargs") or {}
    problem = ""
    if not isinstance(messages, list) or not messages:
        problem = "messages: must be a nonempty list of messages"
    elif body.get("tools") and body.get("tool_choice") != "none":
        problem = (
            "tools: calls in answers are not parsed. Leave tools out, or send tool_choice none"
        )
    elif not isinstance(variables, dict) or RENDERED_NAMES & variables.keys():
        names = ", ".join(sorted(RENDERED_NAMES))
        problem = f"chat_template_kwargs: must be an object, without {names}"
    elif body.get("add_generation_prompt") is False and not body.get("continue_final_message"):
        problem = "add_generation_prompt: must be true without continue_final_message"
    if problem:
        raise ApiError(problem, param=problem.partition(":")[0])
    return body["messages"], variables


def read_prompts(
    prompt: Any, tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the ids of each prompt: a text, ids, or a list of one of these. Raises ApiError."""
    prompts = prompt if isinstance(prompt, list) and prompt else [prompt]
    if prompts is prompt and all(type(item) is int for item in prompts):
        prompts = [prompts]
    valid_ids = tokenizer.text_ids.union(tokenizer.special_tokens.values())
    encoded = []
    for item in prompts[: MAX_TEXTS + 1]:  # more are refused
        if isinstance(item, str):
            try:
                encoded.append(encode(item))
            except UserError as error:
                raise ApiError(f"prompt: {error}", param="prompt") from None
        elif isinstance(item, list) and item and all(type(token) is int for token in item):
            if unknown := {*item} - valid_ids:
                problem = f"the tokenizer has no id {shorten(min(unknown))}"
                raise ApiError(f"prompt: {problem}", param="prompt")
            encoded.append(item)
        else:
            problem = "must be a string, a list of token ids, or a list of these"
            raise ApiError(f"prompt: {problem}", param="prompt")
    return encoded


@dataclass
class AnswerFormat:
    """Formats tokens as an answer, complete or in chunks."""

    model: str
    tokenizer: Tokenizer
    is_chat: bool
    has_logprobs: bool
    is_stream: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, choices: Sequence[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        """Return an answer, or a chunk of one."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if self.is_chat and self.is_stream else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **usage,
        }

    def choice(
        self, index: int, tokens: Sequence[Token], finish_reason: str | None, is_first: bool = True
    ) -> dict[str, Any]:
        """Return a choice with its tokens, or a chunk of it; the first one names the role."""
        text = "".join(token.text for token in tokens)
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            delta = {**role, "content": text} if tokens or is_first else {}
            message = {**role, "content": text, "refusal": None}
            content = {"delta": delta} if self.is_stream else {"message": message}
        logprobs = None
        if self.has_logprobs and tokens:
            logprobs = self.chat_logprobs(tokens) if self.is_chat else self.text_logprobs(tokens)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the logprobs of tokens of an answer in a chat."""

        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            content = self.tokenizer.decode_bytes([token_id])
            return {"token": self.text_of(token_id), "logprob": logprob, "bytes": list(content)}

        content = []
        for token in tokens:
            alternatives = [entry(*pair) for pair in token.top_logprobs]
            content.append({**entry(token.id, token.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def text_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the logprobs of tokens of a completion; offsets are in characters."""
        tops = []
        for token in tokens:
            # Ascending: of tokens with equal text, the most likely one remains.
            pairs = reversed(token.top_logprobs)
            top = {self.text_of(token_id): logprob for token_id, logprob in pairs}
            tops.append(None if token.logprob is None else top)
        return {
            "tokens": [self.text_of(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in tokens],
        }

    def text_of(self, token_id: int) -> str:
        """Return a token as text; an incomplete character is bytes:\\xe2."""
        content = self.tokenizer.decode_bytes([token_id])
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
