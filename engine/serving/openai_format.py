"""OpenAI's form of requests and answers: JSON → settings, tokens → JSON.

Source: the API reference of OpenAI, "Completions" and "Chat completions".
"""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from engine.core.errors import UserError
from engine.core.settings import from_values
from engine.data.chats.chat_template import RENDERED_NAMES
from engine.data.tokenizer import Tokenizer
from engine.generation.text_batch import Token
from engine.generation.text_stream import TextStream

MAX_TEXTS = 256  # of a request: the choices of all its prompts
MAX_TOP_LOGPROBS = 20
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 200  # of a text
MAX_MESSAGE_CHARACTERS = 200
# Arguments that do not change the text.
IGNORED_ARGUMENTS = {"user", "metadata", "store", "service_tier", "safety_identifier"}
IGNORED_ARGUMENTS |= {"prompt_cache_key", "parallel_tool_calls"}
# Unsupported arguments, and the value that changes nothing, as does an empty one unless it is true.
NEUTRAL_VALUES: dict[str, Any] = {
    "best_of": 1,
    "skip_special_tokens": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "function_call": "none",
}


@dataclass(eq=False)
class ApiError(Exception):
    """A request that is refused, with the status of its answer."""

    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class Settings:
    """The arguments common to completions and chats."""

    model: str = ""  # of any name, since many clients have a fixed one: the answer has ours
    max_tokens: Annotated[int, Ge(-1)] = -1  # -1: as many as fit the context
    temperature: Annotated[float, Ge(0), Le(2)] = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(-1)] = 0  # 0 and -1: all
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] = -1  # -1: a random one
    stop: tuple[str, ...] = ()
    n: Annotated[int, Ge(1), Le(MAX_TEXTS)] = 1
    stream: bool = False
    stream_options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        has_fitting_texts = all(0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop)
        if len(self.stop) > MAX_STOP_TEXTS or not has_fitting_texts:
            limit = f"{MAX_STOP_TEXTS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
            raise UserError(f"stop: must be at most {limit}")


@dataclass(frozen=True)
class CompletionSettings(Settings):
    """The arguments of /v1/completions, except the prompt."""

    max_tokens: Annotated[int, Ge(-1)] = 16  # as in OpenAI's API
    echo: bool = False
    parse_special: bool = False  # read the names of special tokens in the prompt as these tokens
    logprobs: Annotated[int | None, Ge(0), Le(MAX_TOP_LOGPROBS)] = None


@dataclass(frozen=True)
class ChatSettings(Settings):
    """The arguments of /v1/chat/completions."""

    messages: tuple[dict, ...] = ()
    max_completion_tokens: Annotated[int | None, Ge(-1)] = None  # the newer name of max_tokens
    continue_final_message: bool | None = None  # None: if the last one is of the assistant
    add_generation_prompt: bool = True  # what continue_final_message leaves out
    chat_template_kwargs: dict = field(default_factory=dict)
    tools: tuple[dict, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.messages:
            raise UserError("messages: must be a nonempty list of messages")
        for number, message in enumerate(self.messages, 1):
            if message.get("role") != "assistant" and message.get("content", "") is None:
                raise UserError(f"messages: message {number} must have a text (got null)")
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs: needs logprobs true. Send it, or leave this out.")
        if self.tools and self.tool_choice != "none":
            raise UserError("tools: calls in answers are not parsed. Send tool_choice none.")
        if names := sorted(RENDERED_NAMES & self.chat_template_kwargs.keys()):
            raise UserError(f"chat_template_kwargs: must not have {', '.join(names)}")
        if not (self.add_generation_prompt or self.continue_final_message):
            raise UserError("add_generation_prompt: must be true without continue_final_message")


AnySettings = CompletionSettings | ChatSettings
SettingsType = TypeVar("SettingsType", CompletionSettings, ChatSettings)


def shorten(value: Any) -> str:
    """Return the start of a text, or of the repr of another value, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]}…"


def read_settings(cls: type[SettingsType], body: dict[str, Any]) -> SettingsType:
    """Return the settings of a request. Raises ApiError, which names the argument.

    An argument that is null counts as left out.
    """
    names = {field.name for field in fields(cls)}
    for name, value in body.items():
        neutral = NEUTRAL_VALUES.get(name)
        is_neutral = value in (None, neutral) or (not value and neutral is not True)
        if not is_neutral and name not in names | IGNORED_ARGUMENTS:
            param = shorten(name)
            raise ApiError(f"{param}: not supported (got {shorten(value)})", param=param)
    values = {name: value for name, value in body.items() if name in names and value is not None}
    try:
        return from_values(cls, values, "")
    except UserError as error:
        _, name, problem = str(error).split(": ", 2)
        param = name.removeprefix("--").replace("-", "_")
        raise ApiError(f"{param}: {shorten(problem)}", param=param) from None


def read_prompts(
    prompt: Any, tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> list[list[int]]:
    """Return the ids of each prompt: a text, ids, or a list of one of these. Raises ApiError."""
    is_single = not isinstance(prompt, list) or all(type(item) is int for item in prompt)
    prompts = [prompt] if is_single else prompt
    valid_ids = tokenizer.text_ids.union(tokenizer.special_tokens.values())
    encoded = []
    try:
        for item in prompts[: MAX_TEXTS + 1]:  # more are refused
            if isinstance(item, str):
                encoded.append(encode(item))
            elif isinstance(item, list) and item and all(type(token) is int for token in item):
                if unknown := {*item} - valid_ids:
                    raise UserError(f"the tokenizer has no id {shorten(min(unknown))}")
                encoded.append(item)
            else:
                raise UserError("must be a string, a list of token ids, or a list of these")
    except UserError as error:
        raise ApiError(f"prompt: {error}", param="prompt") from None
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
        self, index: int, tokens: Sequence[Token], ended: TextStream | None, is_first: bool = True
    ) -> dict[str, Any]:
        """Return a choice with its tokens, or a chunk of it; the first one names the role."""
        text = "".join(token.text for token in tokens)
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            delta = {**role, "content": text} if tokens or is_first else {}
            message = {**role, "content": text, "refusal": None}
            content = {"delta": delta} if self.is_stream else {"message": message}
        list_logprobs = self.chat_logprobs if self.is_chat else self.text_logprobs
        logprobs = list_logprobs(tokens) if self.has_logprobs and tokens else None
        reason = ended and ("length" if ended.hit_token_limit else "stop")
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

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
