"""OpenAI's form of requests and answers: JSON → settings, tokens → JSON.

Source: the API reference of OpenAI, "Completions" and "Chat completions".
"""

import codecs
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, Lt

from engine.core.errors import UserError
from engine.core.settings import from_values
from engine.data.tokenizer import Tokenizer
from engine.generation.text_stream import TextStream
from engine.serving.batching import TextRequest, Token

DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's API; an answer to a chat may fill the context
MAX_CHOICES = 128
MAX_TEXTS = 256  # of a request: the choices of all its prompts
MAX_TOP_LOGPROBS = 20
MAX_STOP_TEXTS = 16
MAX_STOP_CHARACTERS = 200  # of a text
MAX_QUOTED_VALUE_CHARACTERS = 100  # of a value, in a message
# Arguments that do not change the text.
IGNORED_ARGUMENTS = {"user", "metadata", "store", "service_tier", "safety_identifier"}
IGNORED_ARGUMENTS |= {"prompt_cache_key", "parallel_tool_calls"}
# Arguments of which only these values, without effect, are supported.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
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
    repetition_penalty: Annotated[float, Gt(0)] = 1.0
    seed: Annotated[int | None, Ge(-(2**63)), Lt(2**63)] = None
    stop: tuple[str, ...] = ()
    n: Annotated[int, Ge(1), Le(MAX_CHOICES)] = 1
    stream: bool = False


@dataclass(frozen=True)
class CompletionSettings(Settings):
    """The arguments of /v1/completions, except the prompt."""

    echo: bool = False
    logprobs: Annotated[int | None, Ge(0), Le(MAX_TOP_LOGPROBS)] = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives to report for each token; None: no logprobs."""
        return self.logprobs


@dataclass(frozen=True)
class ChatSettings(Settings):
    """The arguments of /v1/chat/completions, except the messages."""

    max_tokens: Annotated[int | None, Ge(1)] = None
    max_completion_tokens: Annotated[int | None, Ge(1)] = None  # the newer name
    logprobs: bool = False
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] = 0

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives to report for each token; None: no logprobs."""
        return self.top_logprobs if self.logprobs else None


AnySettings = CompletionSettings | ChatSettings
SettingsType = TypeVar("SettingsType", CompletionSettings, ChatSettings)
# Arguments that other functions read.
INPUT_ARGUMENTS = {
    CompletionSettings: {"prompt", "stream_options"},
    ChatSettings: {"messages", "tools", "stream_options"},
}


def read_settings(cls: type[SettingsType], body: dict[str, Any]) -> SettingsType:
    """Return the settings of a request. Raises ApiError, which names the argument."""
    names = {field.name for field in fields(cls)}
    values = {}
    for name, value in body.items():
        if value is None or name in IGNORED_ARGUMENTS | INPUT_ARGUMENTS[cls]:
            continue
        if name in NEUTRAL_VALUES:
            if value not in NEUTRAL_VALUES[name]:
                raise ApiError(f"{name}: not supported (got {quote(value)})", param=name)
            continue
        if name not in names:
            raise ApiError(
                f"{quote(name)}: unknown argument", param=name[:MAX_QUOTED_VALUE_CHARACTERS]
            )
        try:
            from_values(cls, {name: value}, "")
        except UserError as error:
            # It has the form ": NAME: PROBLEM", and may quote the value.
            problem = str(error).removeprefix(": ").partition(": ")[2]
            raise ApiError(f"{name}: {shorten(problem)}", param=name) from None
        values[name] = value
    settings = from_values(cls, values, "")
    has_fitting_texts = all(0 < len(text) <= MAX_STOP_CHARACTERS for text in settings.stop)
    if len(settings.stop) > MAX_STOP_TEXTS or not has_fitting_texts:
        limit = f"{MAX_STOP_TEXTS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
        raise ApiError(f"stop: must be at most {limit}", param="stop")
    return settings


def shorten(text: str) -> str:
    """Return the start of a text, for a message."""
    is_long = len(text) > MAX_QUOTED_VALUE_CHARACTERS
    return f"{text[:MAX_QUOTED_VALUE_CHARACTERS]}…" if is_long else text


def quote(value: Any) -> str:
    """Return the start of the repr of a value, for a message."""
    return shorten(repr(value))


def includes_usage(body: dict[str, Any]) -> bool:
    """Return whether a stream ends with the number of tokens. Raises ApiError."""
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise ApiError(
            'stream_options: must be {"include_usage": true or false}', param="stream_options"
        )
    return options.get("include_usage", False)


def read_prompts(prompt: Any, tokenizer: Tokenizer, initial_tokens: list[int]) -> list[list[int]]:
    """Return the ids of each prompt: a text, ids, or a list of one of these. Raises ApiError."""
    prompts = prompt if isinstance(prompt, list) and prompt else [prompt]
    if prompts is prompt and all(type(item) is int for item in prompts):
        prompts = [prompts]
    check_num_texts(len(prompts))
    valid_ids = tokenizer.text_ids.union(tokenizer.special_tokens.values())
    encoded = []
    for item in prompts:
        if isinstance(item, str):
            try:
                encoded.append(tokenizer.encode(item).tolist() or initial_tokens)
            except UserError as error:
                raise ApiError(f"prompt: {error}", param="prompt") from None
        elif isinstance(item, list) and item and all(type(token) is int for token in item):
            if unknown := {*item} - valid_ids:
                problem = f"the tokenizer has no id {quote(min(unknown))}"
                raise ApiError(f"prompt: {problem}", param="prompt")
            encoded.append(item)
        else:
            raise ApiError(
                "prompt: must be a string, a list of token ids, or a list of these", param="prompt"
            )
    return encoded


def check_num_texts(count: int) -> None:
    """Raise ApiError for more texts than a request may ask for."""
    if count > MAX_TEXTS:
        raise ApiError(f"n: at most {MAX_TEXTS} texts in a request (got {count:,})", param="n")


def token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """Return a token as text and its bytes. An incomplete character is bytes:\\xe2."""
    data = tokenizer.decode_bytes([token_id])
    try:
        return data.decode(), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


@dataclass
class ChoiceWriter:
    """Formats a text as a choice of an answer: complete, or in chunks."""

    request: TextRequest
    index: int
    is_chat: bool

    def __post_init__(self) -> None:
        stream = self.request.stream
        self.tokenizer = stream.tokenizer
        num_reported = len(stream.prompt) if self.request.reports_prompt else 0
        # The indices of the tokens that start a text: of the prompt, and of its continuation.
        self.text_starts = {0} if num_reported else set()
        if stream.starts_text:
            self.text_starts.add(num_reported)
        self.drops_space = False
        self.num_tokens = 0
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_characters = 0  # of the tokens so far

    def full_choice(self, tokens: Sequence[Token], finish_reason: str) -> dict[str, Any]:
        """Return a choice with all of its tokens."""
        text = join_texts(tokens)
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"message": message} if self.is_chat else {"text": text}
        return self.choice(content, tokens, finish_reason)

    def first_chunk(self) -> dict[str, Any]:
        """Return the first chunk of an answer in a chat, which has its role."""
        return self.choice({"delta": {"role": "assistant", "content": ""}}, [])

    def next_chunk(self, token: Token) -> dict[str, Any]:
        """Return the chunk of a token."""
        content = {"delta": {"content": token.text}} if self.is_chat else {"text": token.text}
        return self.choice(content, [token])

    def last_chunk(self, finish_reason: str) -> dict[str, Any]:
        """Return the last chunk, which has the finish reason."""
        return self.choice({"delta": {}} if self.is_chat else {"text": ""}, [], finish_reason)

    def choice(
        self, content: dict[str, Any], tokens: Sequence[Token], finish_reason: str | None = None
    ) -> dict[str, Any]:
        """Return a choice with its content, and the logprobs of its tokens if requested."""
        scores = None
        if self.request.num_logprobs is not None and tokens:
            scores = self.chat_logprobs(tokens) if self.is_chat else self.text_logprobs(tokens)
        return {"index": self.index, **content, "logprobs": scores, "finish_reason": finish_reason}

    def chat_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the logprobs of tokens of an answer in a chat."""

        def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
            text, data = token_text(self.tokenizer, token_id)
            return {"token": text, "logprob": logprob, "bytes": list(data)}

        content = []
        for token in tokens:
            alternatives = [entry(*pair) for pair in token.top_logprobs]
            content.append({**entry(token.id, token.logprob), "top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def text_logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return the logprobs of tokens of a completion; offsets are in characters."""
        offsets = []
        tops = []
        for token in tokens:
            offsets.append(self.num_characters)
            if self.num_tokens in self.text_starts:
                self.drops_space = self.tokenizer.adds_leading_space
            self.num_tokens += 1
            text = self.decoder.decode(token_text(self.tokenizer, token.id)[1])
            if self.drops_space and text:  # as in the text of the choice
                text = text.removeprefix(" ")
                self.drops_space = False
            self.num_characters += len(text)
            # Ascending: of tokens with equal text, the most likely one remains.
            pairs = [*reversed(token.top_logprobs)]
            top = {token_text(self.tokenizer, token_id)[0]: value for token_id, value in pairs}
            tops.append(None if token.logprob is None else top)
        return {
            "tokens": [token_text(self.tokenizer, token.id)[0] for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def join_texts(tokens: Sequence[Token]) -> str:
    """Return the text of tokens."""
    return "".join(token.text for token in tokens)


def finish_reason(stream: TextStream) -> str:
    """Return why a text has ended."""
    return "length" if stream.is_cut else "stop"


def usage(streams: Sequence[TextStream], num_choices: int) -> dict[str, int]:
    """Count the tokens of an answer; a prompt counts once for all of its choices."""
    prompt = sum(len(stream.prompt) for stream in streams[::num_choices])
    completion = sum(stream.num_tokens for stream in streams)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def new_answer(is_chat: bool, model: str, is_stream: bool = False) -> dict[str, Any]:
    """Return the fields common to an answer and all of its chunks."""
    kind = "chat.completion" if is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
        "object": f"{kind}.chunk" if is_chat and is_stream else kind,
        "created": int(time.time()),
        "model": model,
    }
