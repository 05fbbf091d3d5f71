"""The routes of OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

import asyncio
import contextlib
import logging
import queue
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from engine.core.cli import describe_error
from engine.core.errors import UserError
from engine.core.files import parse_json, to_json
from engine.data.chats.chat import encode_chat, own_template
from engine.data.chats.examples import parse_messages
from engine.generation.sampling import FilterOptions, row_seeds
from engine.generation.text_batch import TextBatch, Token, banned_tokens
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream
from engine.serving.openai_format import (
    MAX_TEXTS,
    AnswerFormat,
    AnySettings,
    ApiError,
    ChatSettings,
    CompletionSettings,
    read_prompts,
    read_settings,
)
from engine.serving.worker import BatchWorker, ClientRequest

API_PREFIX = "/v1/"
CORS_HEADERS = {  # https://fetch.spec.whatwg.org/#http-cors-protocol
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, *",
    "Access-Control-Max-Age": "86400",
}
MAX_ROWS = 32  # texts that are decoded together
MAX_WAITING_TEXTS = 256
READ_TIMEOUT_SECONDS = 30.0  # for receiving a body
WRITE_TIMEOUT_SECONDS = 10.0  # for sending a chunk
STOPPING_ERROR = ApiError("the server is stopping", 503)

# (index of a choice, its next token, or an error); None: its text has ended.
Arrivals = asyncio.Queue[tuple[int, Token | Exception | None]]


class Api:
    """Answers requests in OpenAI's format; the texts of all clients are decoded in one batch."""

    def __init__(self, generator: TextGenerator, name: str, key: str = ""):
        """Serve a model under a name. With a key, every request must carry it."""
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.name = name
        self.key = key
        self.context_length = generator.model.config.context_length
        self.arrivals: set[Arrivals] = set()  # of the requests in progress
        banned = banned_tokens(generator.tokenizer, generator.model, generator.stop_token_ids)
        batch = TextBatch(generator.decoder, MAX_ROWS, banned)
        batch.engine.min_positions = self.context_length
        self.worker = BatchWorker(batch, MAX_WAITING_TEXTS)
        created = int(time.time())
        self.model = {"id": name, "object": "model", "created": created, "owned_by": "user"}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for an application."""
        return [
            web.get("/health", self.report_health),
            web.get("/v1/models", self.list_models),
            web.post("/v1/completions", self.complete),
            web.post("/v1/chat/completions", self.chat),
        ]

    async def stop(self) -> None:
        """End all answers with an error, and stop the decoding thread."""
        self.worker.is_stopping = True
        for arrivals in self.arrivals:
            arrivals.put_nowait((0, STOPPING_ERROR))
        await asyncio.to_thread(self.worker.stop)

    async def respond(self, request: web.Request, handler: Handler, reason: str) -> Any:
        """Handle a request of the API, unless there is a reason to refuse it."""
        try:
            if reason:
                raise ApiError(reason, 403)
            if self.key and request.method == "OPTIONS":
                return web.Response(status=204)
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            is_key = secrets.compare_digest(key.encode(errors="replace"), self.key.encode())
            is_authorized = is_key and scheme.lower() == "bearer"
            if self.key and request.path.startswith(API_PREFIX) and not is_authorized:
                message = "the API key: missing or wrong. Send Authorization: Bearer KEY."
                raise ApiError(message, 401, code="invalid_api_key")
            return await handler(request)
        except web.HTTPException as error:
            paths = ", ".join(route.path for route in self.routes())
            api_error = ApiError(f"{error.text}. The API has the paths {paths}.", error.status)
        except Exception as error:
            api_error = to_api_error(error)
        return web.json_response(api_error.to_json(), status=api_error.status)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let pages of any origin ask and read the answer, if they need a key for it."""
        if self.key and request.path.startswith(API_PREFIX):
            response.headers.update(CORS_HEADERS)

    async def report_health(self, request: web.Request) -> web.Response:
        """Answer GET /health, which needs no key."""
        return web.json_response({"status": "ok"})

    async def list_models(self, request: web.Request) -> web.Response:
        """Answer GET /v1/models."""
        return web.json_response({"object": "list", "data": [self.model]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/completions."""
        body = await read_body(request)
        prompt = body.pop("prompt", None)
        settings = read_settings(CompletionSettings, body)
        encode = partial(self.generator.encode_prompt, parse_special=settings.parse_special)
        prompts = await asyncio.to_thread(read_prompts, prompt, self.tokenizer, encode)
        return await self.answer(request, settings, prompts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/chat/completions."""
        settings = read_settings(ChatSettings, await read_body(request))
        prompt = await asyncio.to_thread(self.encode_messages, settings)
        return await self.answer(request, settings, [prompt])

    def encode_messages(self, settings: ChatSettings) -> list[int]:
        """Return the ids of the messages of a request. Raises ApiError."""
        if not self.generator.is_chat_model:
            raise ApiError(f"{self.name} was not trained on chats. Use /v1/completions.")
        variables = settings.chat_template_kwargs
        if settings.enable_thinking is not None:
            variables = {"enable_thinking": settings.enable_thinking, **variables}
        try:
            turns = parse_messages(settings.messages, own_template(self.tokenizer))
            continues = settings.continue_final_message
            return encode_chat(self.tokenizer, turns, variables, continues)
        except (UserError, UnicodeEncodeError) as error:  # the latter for a lone surrogate
            raise ApiError(f"messages: {error}", param="messages") from None

    async def answer(
        self, request: web.Request, settings: AnySettings, prompts: list[list[int]]
    ) -> web.StreamResponse:
        """Decode the choices of all prompts, and answer in a stream or in one response."""
        if settings.model not in ("", self.name):
            message = f"the model {settings.model!r} does not exist. Use {self.name!r}."
            raise ApiError(message, 404, "model", "model_not_found")
        arrivals: Arrivals = asyncio.Queue()
        requests = self.make_requests(settings, prompts, arrivals)
        if self.worker.is_stopping:
            raise STOPPING_ERROR
        try:
            self.worker.submit(requests)
        except queue.Full:
            raise ApiError("too many requests. Try again.", 429, code="queue_full") from None
        self.arrivals.add(arrivals)
        is_chat = isinstance(settings, ChatSettings)
        has_logprobs = requests[0].num_logprobs is not None
        form = AnswerFormat(self.name, self.tokenizer, is_chat, has_logprobs, settings.stream)
        try:
            if settings.stream:
                chunks = stream_chunks(form, requests, arrivals, settings)
                return await send_stream(request, chunks)
            tokens: list[list[Token]] = [[] for _ in requests]
            async for index, token in receive_tokens(arrivals, len(requests)):
                tokens[index] += [token] if token else []
            choices = [
                form.choice(index, tokens[index], choice.stream)
                for index, choice in enumerate(requests)
            ]
            answer = form.answer(choices, usage=count_tokens(requests, settings.n))
            return web.json_response(answer, dumps=to_json)
        finally:  # also if the client disconnects
            self.arrivals.discard(arrivals)
            for choice in requests:
                choice.is_cancelled = True

    def make_requests(
        self, settings: AnySettings, prompts: list[list[int]], arrivals: Arrivals
    ) -> list[ClientRequest]:
        """Return a request for each choice of each prompt. Raises ApiError if one is too long."""
        if len(prompts) * settings.n > MAX_TEXTS:
            problem = f"at most {MAX_TEXTS} texts in a request (got {len(prompts) * settings.n:,})"
            raise ApiError(f"n: {problem}", param="n")
        if isinstance(settings, ChatSettings):
            newer = settings.max_completion_tokens
            max_tokens = settings.max_tokens if newer is None else newer
            num_logprobs = settings.top_logprobs if settings.logprobs else None
        else:
            max_tokens = settings.max_tokens
            num_logprobs = settings.logprobs
        max_tokens = self.context_length if max_tokens == -1 else max_tokens
        seed = secrets.randbits(32) if settings.seed == -1 else settings.seed
        filters = FilterOptions(
            temperature=settings.temperature,
            top_k=max(0, settings.top_k) or None,
            top_p=settings.top_p,
            min_p=settings.min_p,
        )
        loop = asyncio.get_running_loop()

        def receive(index: int, arrival: Token | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, after a second Ctrl-C
                loop.call_soon_threadsafe(arrivals.put_nowait, (index, arrival))

        stop_token_ids = self.generator.stop_token_ids
        all_prompts = [prompt for prompt in prompts for _ in range(settings.n)]
        requests: list[ClientRequest] = []
        for prompt, row_seed in zip(all_prompts, row_seeds(seed, all_prompts), strict=True):
            room = self.context_length - len(prompt)
            if room < min(1, max_tokens):
                name = "messages" if isinstance(settings, ChatSettings) else "prompt"
                size = f"the context has {self.context_length} tokens (got {len(prompt)})"
                code = "context_length_exceeded"
                raise ApiError(f"{name}: too long: {size}", param=name, code=code)
            limit = min(max_tokens, room)
            request = ClientRequest(
                TextStream(self.tokenizer, prompt, limit, settings.stop, stop_token_ids),
                row_seed,
                filters,
                settings.repetition_penalty,
                num_logprobs,
                reports_prompt=isinstance(settings, CompletionSettings) and settings.echo,
                receive=partial(receive, len(requests)),
            )
            requests.append(request)
        return requests


async def receive_tokens(
    arrivals: Arrivals, num_texts: int
) -> AsyncIterator[tuple[int, Token | None]]:
    """Yield each token of the choices, and None at the end of each. Raises ApiError."""
    while num_texts:
        index, arrival = await arrivals.get()
        if isinstance(arrival, Exception):
            raise to_api_error(arrival)
        num_texts -= arrival is None
        yield index, arrival


async def stream_chunks(
    form: AnswerFormat, requests: list[ClientRequest], arrivals: Arrivals, settings: AnySettings
) -> AsyncIterator[dict[str, Any]]:
    """Yield the chunks of an answer, then the usage if it is requested. Raises ApiError."""
    started: set[int] = set()
    async for index, token in receive_tokens(arrivals, len(requests)):
        is_first = index not in started
        started.add(index)
        if token is None:
            yield form.answer([form.choice(index, [], requests[index].stream, is_first)])
        elif token.text or form.has_logprobs or is_first:
            yield form.answer([form.choice(index, [token], None, is_first)])
    if settings.stream_options.get("include_usage"):
        yield form.answer([], usage=count_tokens(requests, settings.n))


async def send_stream(
    request: web.Request, chunks: AsyncIterator[dict[str, Any]]
) -> web.StreamResponse:
    """Answer with server-sent events. An error after the first is an event too."""
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = "text/event-stream"

    async def write(event: str) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
            await response.write(f"data: {event}\n\n".encode())

    # The client disconnected, or does not read.
    with contextlib.suppress(ConnectionError, TimeoutError):
        try:
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                await write(to_json(chunk))
        except ApiError as error:
            if not response.prepared:
                raise
            await write(to_json(error.to_json()))
        await write("[DONE]")
    return response


def count_tokens(requests: list[ClientRequest], num_choices: int) -> dict[str, int]:
    """Return the usage of an answer; a prompt counts once for all of its choices."""
    prompt = sum(len(request.stream.prompt) for request in requests[::num_choices])
    completion = sum(len(request.stream.new_ids) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def to_api_error(error: Exception) -> ApiError:
    """Return the error that a client receives; log the traceback of a bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return ApiError("the body: nested too deeply")
    description = describe_error(error)
    if description is None:
        logging.getLogger(__name__).error("a request failed", exc_info=error)
    return ApiError(description or "internal error. See the server's output.", 500)


async def read_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a request. Raises ApiError."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            body = parse_json(await request.read(), Path("the body"))
    except TimeoutError:
        raise ApiError("the body: not received in time. Send it again.", 408) from None
    except web.RequestPayloadError:
        raise ApiError("the body: differs from its Content-Encoding. Send it again.") from None
    except UserError as error:
        raise ApiError(str(error)) from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body
