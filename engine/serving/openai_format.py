"""OpenAI's form of requests and answers: JSON → settings, tokens → JSON.

Source: the API reference of OpenAI, "Completions" and "Chat completions".
"""

import functools
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Le, Len, Lt
from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from engine.core.cli import warn
from engine.core.errors import UserError
from engine.data.chats.chat_template import RENDERED_NAMES
from engine.data.tokenizer import Tokenizer
from engine.generation.sampling import TextOptions
from engine.generation.text_batch import Token
from engine.generation.text_stream import TextStream

MAX_TEXTS = 256  # of a request: the choices of all its prompts
MAX_TOP_LOGPROBS = 20
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 200  # of a text
MAX_MESSAGE_CHARACTERS = 200
SAMPLING_ARGUMENTS = "temperature top_p min_p repetition_penalty frequency_penalty presence_penalty"
# Arguments that no answer depends on, which one warning says.
IGNORED_ARGUMENTS = {"user", "metadata", "store", "service_tier", "safety_identifier"}
IGNORED_ARGUMENTS |= {"prompt_cache_key", "parallel_tool_calls"}
IGNORED_ARGUMENTS |= {"reasoning_effort", "verbosity", "prediction"}
# Unsupported arguments, and the value that changes nothing, as does an empty one unless it is true.
NEUTRAL_VALUES: dict[str, Any] = {
    "best_of": 1,
    "skip_special_tokens": True,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "function_call": "none",
}
Ids = Annotated[list[int], Len(1)]
Penalty = Annotated[float, Ge(-2), Le(2)]
StopText = Annotated[str, Len(1, MAX_STOP_CHARACTERS)]
StopTexts = Annotated[
    tuple[StopText, ...],
    Len(0, MAX_STOP_TEXTS),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else (value,)),
]


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

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

    model: str = ""  # of any name, since many clients have a fixed one: the answer has ours
    max_tokens: Annotated[int, Ge(-1)] = -1  # -1: as many as fit the context
    temperature: Annotated[float, Ge(0), Le(2)] = 1.0
    top_p: Annotated[float, Ge(0), Le(1)] = 1.0
    top_k: Annotated[int, Ge(-1)] = 0  # 0 and -1: all
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    repetition_penalty: Annotated[float, Ge(0.01), Le(100)] = 1.0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    seed: Annotated[int, Ge(-(2**63)), Lt(2**63)] = -1  # -1: a random one
    stop: StopTexts = ()
    n: Annotated[int, Ge(1), Le(MAX_TEXTS)] = 1
    stream: bool = False
    stream_options: dict = field(default_factory=dict)

    @property
    def sampling(self) -> TextOptions:
        """The options of sampling, without the seed."""
        options = {name: getattr(self, name) for name in SAMPLING_ARGUMENTS.split()}
        return cast(TextOptions, {**options, "top_k": max(0, self.top_k)})


@dataclass(frozen=True)
class CompletionSettings(Settings):
    """The arguments of /v1/completions."""

    prompt: str | Ids | Annotated[list[str | Ids], Len(1)] = field(default_factory=list)
    max_tokens: Annotated[int, Ge(-1)] = 16  # as in OpenAI's API
    echo: bool = False
    parse_special: bool = False  # read the names of special tokens in the prompt as these tokens
    logprobs: Annotated[int | None, Ge(0), Le(MAX_TOP_LOGPROBS)] = None
    prompt_name = "prompt"

    def __post_init__(self) -> None:
        if not self.prompt and self.prompt != "":
            raise UserError("prompt: must be a text, a list of ids, or a list of these")
        num_texts = len(self.prompts) * self.n
        if num_texts > MAX_TEXTS:
            name = "n" if self.n > 1 else "prompt"
            raise UserError(f"{name}: at most {MAX_TEXTS} texts in a request (got {num_texts:,})")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, of which a single one need not be in a list."""
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_single else self.prompt  # type: ignore

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


@dataclass(frozen=True)
class ChatSettings(Settings):
    """The arguments of /v1/chat/completions."""

    messages: tuple[dict, ...] = ()
    continue_final_message: bool | None = None  # None: if the last one is of the assistant
    add_generation_prompt: bool = True  # what continue_final_message leaves out
    chat_template_kwargs: dict = field(default_factory=dict)
    tools: tuple[dict, ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] = 0
    prompt_name = "messages"
    echo = False

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    def __post_init__(self) -> None:
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


def shorten(value: Any) -> str:
    """Return the start of a text, or of the repr of another value, for a message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else f"{text[:MAX_MESSAGE_CHARACTERS]}…"


find_validator: Any = functools.cache(TypeAdapter)  # building one takes milliseconds


@functools.cache
def warn_of_ignored(name: str) -> None:
    """Warn once that requests have an argument on which no answer depends."""
    warn(f"{name} in requests: ignored, as no answer depends on it")


def read_settings(cls: type[AnySettings], body: dict[str, Any], defaults: TextOptions) -> Any:
    """Return the settings of a request. Raises ApiError, which names the argument.

    An argument that is null counts as left out.
    """
    values = {name: value for name, value in body.items() if value is not None}
    if "max_completion_tokens" in values:  # the newer name
        values["max_tokens"] = values.pop("max_completion_tokens")
    for name in values.keys() - {argument.name for argument in fields(cls)}:
        value = values.pop(name)
        neutral = NEUTRAL_VALUES.get(name)
        if name in IGNORED_ARGUMENTS:
            warn_of_ignored(name)
        elif value != neutral and (value or neutral is True):
            param = shorten(name)
            raise ApiError(f"{param}: not supported (got {shorten(value)})", param=param)
    try:
        return find_validator(cls).validate_json(to_json({**defaults, **values}))
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
        param = str(mistake["loc"][0])
        problem = mistake["msg"].replace("Input should", "must")
        value = shorten(mistake["input"])
        raise ApiError(f"{param}: {problem} (got {value})", param=param) from None
    except UserError as error:  # of a __post_init__
        raise ApiError(str(error), param=str(error).partition(":")[0]) from None


@dataclass
class AnswerFormat:
    """Formats tokens as an answer, complete or in chunks."""

    model: str
    tokenizer: Tokenizer
    settings: AnySettings
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.settings, ChatSettings)

    @property
    def has_logprobs(self) -> bool:
        return self.settings.num_logprobs is not None

    def answer(self, choices: Sequence[dict[str, Any]], **usage: Any) -> dict[str, Any]:
        """Return an answer, or a chunk of one."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if self.is_chat and self.settings.stream else kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **usage,
        }

    def count_tokens(self, streams: Sequence[TextStream]) -> dict[str, int]:
        """Return the usage of an answer; a prompt counts once for all of its choices."""
        prompt = sum(len(stream.prompt) for stream in streams[:: self.settings.n])
        completion = sum(len(stream.new_ids) for stream in streams)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        return {**counts, "total_tokens": prompt + completion}

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
            content = {"delta": delta} if self.settings.stream else {"message": message}
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
