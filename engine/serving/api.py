"""The routes of OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

import asyncio
import contextlib
import queue
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from aiohttp import web

from engine.core.errors import UserError
from engine.core.files import to_json
from engine.data.chats.chat import encode_chat, own_template
from engine.data.chats.examples import parse_messages
from engine.generation.decoding_engine import DecodingEngine
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
    shorten,
)
from engine.serving.server import Server, read_body, refuse_foreign, send_stream, to_api_error
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
        banned = banned_tokens(generator.tokenizer, generator.model, generator.ends.token_ids)
        batch = TextBatch(DecodingEngine(generator.decoder), MAX_ROWS, banned)
        self.worker = BatchWorker(batch, MAX_WAITING_TEXTS)
        created = int(time.time())
        self.model = {"id": name, "object": "model", "created": created, "owned_by": "user"}

    def add_to(self, server: Server) -> None:
        """Add the routes of the API to a server."""
        routes = [
            web.get("/health", self.report_health),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{id:.*}", self.list_models),
            web.post("/v1/completions", self.complete),
            web.post("/v1/chat/completions", self.chat),
        ]
        routes += [web.options(route.path, self.answer_preflight) for route in routes[1:]]
        server.app.add_routes(routes)
        server.app.on_response_prepare.append(self.add_headers)
        server.app.on_shutdown.append(self.stop)

    async def stop(self, app: web.Application) -> None:
        """End all answers with an error, and stop the decoding thread."""
        self.worker.is_stopping = True
        for arrivals in self.arrivals:
            arrivals.put_nowait((0, STOPPING_ERROR))
        await asyncio.to_thread(self.worker.stop)

    def authorize(self, request: web.Request) -> None:
        """Raise ApiError for a request without the key; without a key, for one of another page."""
        if not self.key:
            refuse_foreign(request)
            return
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        is_key = secrets.compare_digest(key.encode(errors="replace"), self.key.encode())
        if not is_key or scheme.lower() != "bearer":
            message = "the API key: missing or wrong. Send Authorization: Bearer KEY."
            raise ApiError(message, 401, code="invalid_api_key")

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let pages of any origin ask and read the answer, if they need a key for it."""
        if self.key and request.path.startswith(API_PREFIX):
            response.headers.update(CORS_HEADERS)

    async def answer_preflight(self, request: web.Request) -> web.Response:
        """Answer OPTIONS, which browsers send without the key."""
        if not self.key:
            refuse_foreign(request)
        return web.Response(status=204)

    async def report_health(self, request: web.Request) -> web.Response:
        """Answer GET /health, which needs no key."""
        return web.json_response({"status": "ok"})

    async def list_models(self, request: web.Request) -> web.Response:
        """Answer GET /v1/models, and GET /v1/models/ID with the model of that name."""
        self.authorize(request)
        name = request.match_info.get("id")
        if not name:
            return web.json_response({"object": "list", "data": [self.model]})
        if name != self.name:
            message = f"the model {shorten(name)!r} does not exist. Use {self.name!r}."
            raise ApiError(message, 404, "model", "model_not_found")
        return web.json_response(self.model)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/completions."""
        self.authorize(request)
        body = await read_body(request)
        prompt = body.pop("prompt", None)
        settings = read_settings(CompletionSettings, body)
        encode = partial(
            self.generator.encode_prompt,
            parse_special=settings.parse_special,
            add_suffix=not settings.echo,  # the prompt of a score ends with its answer
        )
        prompts = await asyncio.to_thread(read_prompts, prompt, self.tokenizer, encode)
        return await self.answer(request, settings, prompts)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer POST /v1/chat/completions."""
        self.authorize(request)
        settings = read_settings(ChatSettings, await read_body(request))
        prompt = await asyncio.to_thread(self.encode_messages, settings)
        return await self.answer(request, settings, [prompt])

    def encode_messages(self, settings: ChatSettings) -> list[int]:
        """Return the ids of the messages of a request. Raises ApiError."""
        if not self.generator.is_chat_model:
            raise ApiError(f"{self.name} was not trained on chats. Use /v1/completions.")
        try:
            turns, _ = parse_messages(settings.messages, own_template(self.tokenizer))
            # An answer at the end is a prefill, as for DeepSeek's and Mistral's "prefix": true.
            continues = settings.continue_final_message
            if continues is None:
                continues = turns[-1][0] == "assistant"
            return encode_chat(self.tokenizer, turns, settings.chat_template_kwargs, continues)
        except (UserError, UnicodeEncodeError) as error:  # the latter for a lone surrogate
            raise ApiError(f"messages: {error}", param="messages") from None

    async def answer(
        self, request: web.Request, settings: AnySettings, prompts: list[list[int]]
    ) -> web.StreamResponse:
        """Decode the choices of all prompts, and answer in a stream or in one response."""
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
                events = stream_events(form, requests, arrivals, settings)
                return await send_stream(request, "text/event-stream", events)
            tokens: list[list[Token]] = [[] for _ in requests]
            async for index, token in receive_tokens(arrivals, len(requests)):
                tokens[index] += [token] if token else []  # None: the text has ended

            def format_answer() -> str:
                choices = [
                    form.choice(index, tokens[index], choice.stream)
                    for index, choice in enumerate(requests)
                ]
                return to_json(form.answer(choices, usage=count_tokens(requests, settings.n)))

            # With many logprobs it takes seconds, in which others are answered.
            return web.json_response(text=await asyncio.to_thread(format_answer))
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

        ends = self.generator.ends
        all_prompts = [prompt for prompt in prompts for _ in range(settings.n)]
        requests: list[ClientRequest] = []
        for prompt, row_seed in zip(all_prompts, row_seeds(seed, all_prompts), strict=True):
            room = self.context_length - len(prompt)
            if room < min(1, max_tokens):
                name = "messages" if isinstance(settings, ChatSettings) else "prompt"
                size = f"the context has {self.context_length} tokens (got {len(prompt)})"
                code = "context_length_exceeded"
                raise ApiError(f"{name}: too long: {size}", param=name, code=code)
            request = ClientRequest(
                TextStream(self.tokenizer, prompt, min(max_tokens, room), settings.stop, ends),
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
        if arrival is None:
            num_texts -= 1
        yield index, arrival


async def stream_events(
    form: AnswerFormat, requests: list[ClientRequest], arrivals: Arrivals, settings: AnySettings
) -> AsyncIterator[str]:
    """Yield server-sent events: the chunks of an answer, and the usage if it is requested.

    Raises ApiError; after the first chunk, yields it.
    """
    started: set[int] = set()
    try:
        async for index, token in receive_tokens(arrivals, len(requests)):
            is_first = index not in started
            if token is None:
                choice = form.choice(index, [], requests[index].stream, is_first)
                yield to_event(form.answer([choice]))
            elif token.text or form.has_logprobs or is_first:
                yield to_event(form.answer([form.choice(index, [token], None, is_first)]))
            started.add(index)
        if settings.stream_options.get("include_usage"):
            yield to_event(form.answer([], usage=count_tokens(requests, settings.n)))
    except ApiError as error:
        if not started:
            raise
        yield to_event(error.to_json())
    yield "data: [DONE]\n\n"


def to_event(content: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {to_json(content)}\n\n"


def count_tokens(requests: list[ClientRequest], num_choices: int) -> dict[str, int]:
    """Return the usage of an answer; a prompt counts once for all of its choices."""
    prompt = sum(len(request.stream.prompt) for request in requests[::num_choices])
    completion = sum(len(request.stream.new_ids) for request in requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
