"""The routes of OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from engine.core.cli import describe_error
from engine.core.errors import UserError
from engine.core.files import parse_json, to_json
from engine.data.chat import encode_chat, own_template
from engine.data.inputs.examples import find_tools, parse_messages
from engine.generation.generate import banned_tokens
from engine.generation.kv_cache import max_cached_rows
from engine.generation.sampling import FilterOptions, row_seeds
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream
from engine.serving import openai_format
from engine.serving.batching import BatchWorker, QueueFullError, RunningBatch, TextRequest, Token
from engine.serving.openai_format import (
    AnySettings,
    ApiError,
    ChatSettings,
    ChoiceWriter,
    CompletionSettings,
)

API_PREFIX = "/v1/"
MAX_ROWS = 32  # texts that are decoded together
MAX_WAITING_TEXTS = 256
READ_TIMEOUT_SECONDS = 30.0  # for receiving a body
WRITE_TIMEOUT_SECONDS = 10.0  # for sending a chunk
END_OF_STREAM = b"data: [DONE]\n\n"
STOPPING_MESSAGE = "the server is stopping"

Arrival = tuple[int, Token | Exception | None]  # index of a choice; None: its text has ended


@dataclass(eq=False)
class Completion:
    """The choices of a request, and their tokens as they arrive from the decoding thread."""

    settings: AnySettings
    includes_usage: bool
    requests: list[TextRequest] = field(default_factory=list)
    arrivals: asyncio.Queue[Arrival] = field(default_factory=asyncio.Queue)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.settings, ChatSettings)

    @property
    def streams(self) -> list[TextStream]:
        return [request.stream for request in self.requests]

    def writers(self) -> list[ChoiceWriter]:
        """Return a writer for each choice."""
        requests = enumerate(self.requests)
        return [ChoiceWriter(request, index, self.is_chat) for index, request in requests]

    async def tokens(self) -> AsyncIterator[tuple[int, Token | None]]:
        """Yield each token of the choices, and None at the end of each. Raises ApiError."""
        num_running = len(self.requests)
        while num_running:
            index, arrival = await self.arrivals.get()
            if isinstance(arrival, Exception):
                raise to_api_error(arrival)
            num_running -= arrival is None
            yield index, arrival


class Api:
    """Answers requests in OpenAI's format; the texts of all clients are decoded in one batch."""

    def __init__(self, generator: TextGenerator, name: str, key: str = ""):
        """Serve a model under a name. With a key, every request must carry it."""
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.name = name
        self.key = key
        self.context_length = generator.model.config.context_length
        self.completions: set[Completion] = set()
        banned = banned_tokens(generator.tokenizer, generator.model, generator.ends)
        num_rows = max_cached_rows(generator.model, MAX_ROWS)
        batch = RunningBatch(generator.decoder, num_rows, banned)
        self.worker = BatchWorker(batch, MAX_WAITING_TEXTS)
        created = int(time.time())
        self.model = {"id": name, "object": "model", "created": created, "owned_by": "user"}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for an application."""
        return [
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{name:.+}", self.show_model),
            web.post("/v1/completions", self.complete),
            web.post("/v1/chat/completions", self.chat),
        ]

    async def stop(self) -> None:
        """End all answers with an error, and stop the decoding thread."""
        self.worker.is_stopping = True
        for completion in self.completions:
            completion.arrivals.put_nowait((0, ApiError(STOPPING_MESSAGE, 503)))
        await asyncio.to_thread(self.worker.stop)

    def is_authorized(self, request: web.Request) -> bool:
        """Return whether a request carries the key; True if no key is set."""
        scheme, _, actual = request.headers.get("Authorization", "").partition(" ")
        is_key = secrets.compare_digest(actual.encode(errors="replace"), self.key.encode())
        return not self.key or (is_key and scheme.lower() == "bearer")

    async def respond(self, request: web.Request, handler: Handler, reason: str) -> Any:
        """Handle a request of the API, unless there is a reason to refuse it."""
        try:
            if reason:
                raise ApiError(reason, 403)
            if not self.is_authorized(request):
                message = "the API key: missing or wrong. Send Authorization: Bearer KEY."
                raise ApiError(message, 401, code="invalid_api_key")
            return await handler(request)
        except web.HTTPException as error:
            api_error = ApiError(error.text or error.reason, error.status)
        except Exception as error:
            log_bug(error)
            api_error = to_api_error(error)
        return web.json_response(api_error.to_json(), status=api_error.status)

    async def list_models(self, request: web.Request) -> web.Response:
        """Answer GET /v1/models."""
        return web.json_response({"object": "list", "data": [self.model]})

    async def show_model(self, request: web.Request) -> web.Response:
        """Answer GET /v1/models/NAME."""
        self.check_model(request.match_info["name"])
        return web.json_response(self.model)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/completions."""
        body = await read_body(request)
        settings = openai_format.read_settings(CompletionSettings, body)
        prompts = await asyncio.to_thread(
            openai_format.read_prompts,
            body.get("prompt"),
            self.tokenizer,
            self.generator.initial_tokens,
        )
        max_tokens = settings.max_tokens
        if max_tokens is None:
            max_tokens = openai_format.DEFAULT_COMPLETION_TOKENS
        return await self.answer(request, body, settings, prompts, max_tokens)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/chat/completions."""
        body = await read_body(request)
        settings = openai_format.read_settings(ChatSettings, body)
        prompts = [await asyncio.to_thread(self.encode_messages, body)]
        max_tokens = settings.max_completion_tokens or settings.max_tokens or self.context_length
        return await self.answer(request, body, settings, prompts, max_tokens)

    def encode_messages(self, body: dict[str, Any]) -> list[int]:
        """Return the ids of the messages of a request. Raises ApiError."""
        if not self.generator.is_chat_model:
            raise ApiError(f"{self.name} was not trained on chats. Use /v1/completions.")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages: must be a nonempty list of messages", param="messages")
        template = own_template(self.tokenizer)
        tools = find_tools(body, template)
        if body.get("tools") and not tools:
            raise ApiError("tools: unsupported by the chat template", param="tools")
        try:
            return encode_chat(self.tokenizer, parse_messages(messages, template, tools))
        except (UserError, UnicodeEncodeError) as error:  # the latter for a lone surrogate
            raise ApiError(f"messages: {error}", param="messages") from None

    def check_model(self, name: str) -> None:
        """Raise ApiError for the name of another model."""
        if name not in ("", self.name):
            message = f"the model {name!r} does not exist. Use {self.name!r}."
            raise ApiError(message, 404, "model", "model_not_found")

    async def answer(
        self,
        request: web.Request,
        body: dict[str, Any],
        settings: AnySettings,
        prompts: list[list[int]],
        max_tokens: int,
    ) -> web.StreamResponse:
        """Decode the choices of all prompts, and answer in a stream or in one response."""
        self.check_model(settings.model)
        completion = Completion(settings, openai_format.includes_usage(body))
        self.add_requests(completion, prompts, max_tokens)
        if self.worker.is_stopping:
            raise ApiError(STOPPING_MESSAGE, 503)
        try:
            self.worker.submit(completion.requests)
        except QueueFullError:
            raise ApiError("too many requests. Try again.", 429, code="queue_full") from None
        self.completions.add(completion)
        try:
            if settings.stream:
                return await self.send_stream(request, completion)
            return await self.send_complete(completion)
        finally:  # also if the client disconnects
            self.completions.discard(completion)
            for text_request in completion.requests:
                text_request.is_cancelled = True

    def add_requests(self, completion: Completion, prompts: list[list[int]], limit: int) -> None:
        """Add a request for each choice of each prompt. Raises ApiError if a prompt is too long."""
        settings = completion.settings
        openai_format.check_num_texts(len(prompts) * settings.n)
        seed = secrets.randbits(32) if settings.seed is None else settings.seed
        is_echo = isinstance(settings, CompletionSettings) and settings.echo
        filters = FilterOptions(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
        )
        loop = asyncio.get_running_loop()

        def receive(index: int, arrival: Token | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, after a second Ctrl-C
                loop.call_soon_threadsafe(completion.arrivals.put_nowait, (index, arrival))

        all_prompts = [prompt for prompt in prompts for _ in range(settings.n)]
        for prompt, row_seed in zip(all_prompts, row_seeds(seed, all_prompts), strict=True):
            room = self.context_length - len(prompt)
            if room < min(1, limit):
                size = f"the context has {self.context_length} tokens (got {len(prompt)})"
                name = "messages" if completion.is_chat else "prompt"
                code = "context_length_exceeded"
                raise ApiError(f"{name}: too long: {size}", param=name, code=code)
            ends = self.generator.ends
            stream = TextStream(self.tokenizer, prompt, min(limit, room), settings.stop, ends)
            text_request = TextRequest(
                stream,
                row_seed,
                filters,
                functools.partial(receive, len(completion.requests)),
                settings.repetition_penalty,
                settings.num_logprobs,
                is_echo,
            )
            completion.requests.append(text_request)

    async def send_complete(self, completion: Completion) -> web.Response:
        """Answer in one response, after all texts have ended."""
        tokens: list[list[Token]] = [[] for _ in completion.requests]
        async for index, token in completion.tokens():
            if token:
                tokens[index].append(token)
        choices = []
        writers = completion.writers()
        for writer, stream in zip(writers, completion.streams, strict=True):
            reason = openai_format.finish_reason(stream)
            choices.append(writer.full_choice(tokens[writer.index], reason))
        answer = openai_format.new_answer(completion.is_chat, self.name)
        usage = openai_format.usage(completion.streams, completion.settings.n)
        return web.json_response({**answer, "choices": choices, "usage": usage}, dumps=to_json)

    async def send_stream(self, request: web.Request, completion: Completion) -> web.StreamResponse:
        """Answer with server-sent events: one for each token with text or logprobs."""
        response = web.StreamResponse(headers={"Cache-Control": "no-store"})
        response.content_type = "text/event-stream"

        async def write(content: bytes) -> None:
            async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
                await response.write(content)

        # The client disconnected, or does not read.
        with contextlib.suppress(ConnectionError, TimeoutError):
            try:
                async for event in self.events(completion):
                    if not response.prepared:
                        await response.prepare(request)
                    await write(encode_event(event))
            except Exception as error:
                if isinstance(error, ConnectionError | TimeoutError) or not response.prepared:
                    raise
                log_bug(error)
                await write(encode_event(to_api_error(error).to_json()))
            await write(END_OF_STREAM)
        return response

    async def events(self, completion: Completion) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of an answer. Raises ApiError."""
        answer = openai_format.new_answer(completion.is_chat, self.name, is_stream=True)
        writers = completion.writers()
        has_logprobs = completion.settings.num_logprobs is not None
        started: set[int] = set()
        async for index, token in completion.tokens():
            choices = []
            if completion.is_chat and index not in started:
                choices.append(writers[index].first_chunk())
                started.add(index)
            if token is None:
                reason = openai_format.finish_reason(completion.streams[index])
                choices.append(writers[index].last_chunk(reason))
            elif token.text or has_logprobs:
                choices.append(writers[index].next_chunk(token))
            for choice in choices:
                yield {**answer, "choices": [choice]}
        if completion.includes_usage:
            usage = openai_format.usage(completion.streams, completion.settings.n)
            yield {**answer, "choices": [], "usage": usage}


def encode_event(event: dict[str, Any]) -> bytes:
    """Return a server-sent event."""
    return f"data: {to_json(event)}\n\n".encode()


def log_bug(error: Exception) -> None:
    """Log the traceback of an exception that is neither a client's mistake nor a user's."""
    if not isinstance(error, ApiError) and describe_error(error) is None:
        logging.getLogger(__name__).error("a request failed", exc_info=error)


def to_api_error(error: Exception) -> ApiError:
    """Convert an exception to the error that a client receives."""
    if isinstance(error, ApiError):
        return error
    return ApiError(describe_error(error) or "internal error. See the server's output.", 500)


async def read_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a request. Raises ApiError."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            body = parse_json(await request.read(), Path("the body"))
    except TimeoutError:
        raise ApiError("the body: not received in time. Send it again.", 408) from None
    except UserError as error:
        raise ApiError(str(error)) from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body
