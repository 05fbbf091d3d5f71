"""The routes of OpenAI's API: /v1/models, /v1/completions and /v1/chat/completions."""

import asyncio
import base64
import contextlib
import queue
import secrets
import sys
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from engine.core.errors import UserError
from engine.core.files import to_json
from engine.data.chats.chat import encode_chat, own_template
from engine.data.chats.examples import parse_messages
from engine.generation.decoding_engine import DecodingEngine
from engine.generation.sampling import row_seeds
from engine.generation.text_batch import TextBatch, TextRequest, Token, banned_tokens
from engine.generation.text_generator import TextGenerator
from engine.generation.text_stream import TextStream
from engine.serving.openai_format import (
    MAX_TEXTS,
    AnswerFormat,
    AnySettings,
    ApiError,
    ChatSettings,
    CompletionSettings,
    read_settings,
    shorten,
)
from engine.serving.server import (
    ChunkedResponse,
    answer_error,
    listen,
    make_server,
    read_body,
    refuse_foreign,
    to_api_error,
)
from engine.serving.worker import BatchWorker

MAX_ROWS = 32  # texts that are decoded together
MAX_WAITING_TEXTS = 1024
MAX_TEXT_BYTES = 2**20  # of a body, besides the ids of prompts
MAX_ID_BYTES = 8  # of an id in JSON
SWITCH_SECONDS = 5e-4  # that the thread of the connections waits while the other decodes
NOT_STORED = {"Cache-Control": "no-store"}
PAGE_HEADERS = NOT_STORED | {"X-Frame-Options": "DENY"}

# (index of a choice, its next token, or an error); None: its text has ended.
Arrivals = asyncio.Queue[tuple[int, Token | Exception | None]]


class Api:
    """Answers requests in OpenAI's format; the texts of all clients are decoded in one batch."""

    def __init__(self, generator: TextGenerator, name: str, key: str = "", page: str = ""):
        """Serve a model under a name, and its page. With a key, every request must carry it."""
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.name = name
        self.key = key
        self.page = page
        self.context_length = generator.model.config.context_length
        self.max_body_bytes = MAX_TEXT_BYTES + MAX_TEXTS * self.context_length * MAX_ID_BYTES
        banned = banned_tokens(generator.tokenizer, generator.model, generator.ends.token_ids)
        batch = TextBatch(DecodingEngine(generator.decoder), MAX_ROWS, banned)
        self.worker = BatchWorker(batch, MAX_WAITING_TEXTS)
        created = int(time.time())
        self.model = {"id": name, "object": "model", "created": created, "owned_by": "user"}
        routes = [Route("/", self.send_page)] if page else []
        complete = partial(self.answer, CompletionSettings)
        chat = partial(self.answer, ChatSettings)
        for slash in ("", "/"):
            routes += [
                Route(f"/health{slash}", report_health),
                Route(f"/v1/models{slash}", self.list_models),
                Route(f"/v1/completions{slash}", complete, methods=["POST"]),
                Route(f"/v1/chat/completions{slash}", chat, methods=["POST"]),
            ]
        routes.append(Route("/v1/models/{id:path}", self.list_models))
        # Pages of any origin may ask and read the answer, if they need a key for it.
        names = ("allow_origins", "allow_methods", "allow_headers")
        allowed: Any = {name: ["*"] for name in names}
        cors = Middleware(CORSMiddleware, **allowed)
        self.app = Starlette(
            routes=routes,
            middleware=[cors] if key else [],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), answer_error),
        )

    def authorize(self, request: Request) -> None:
        """Raise ApiError for a request without the key; without a key, for one of another page.

        For the page, a browser sends the key as a password.
        """
        if not self.key:
            refuse_foreign(request)
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "basic" and request.method == "GET":
            with contextlib.suppress(ValueError):
                key = base64.b64decode(key).decode().partition(":")[2]
        elif scheme.lower() != "bearer":
            key = ""
        if not secrets.compare_digest(key.encode(errors="replace"), self.key.encode()):
            message = "the API key: missing or wrong. Send Authorization: Bearer KEY."
            raise ApiError(message, 401, code="invalid_api_key")

    async def send_page(self, request: Request) -> Response:
        """Answer GET / with the page of the model."""
        self.authorize(request)
        return HTMLResponse(self.page, headers=PAGE_HEADERS)

    async def list_models(self, request: Request) -> Response:
        """Answer GET /v1/models, and GET /v1/models/ID with the model of that name."""
        self.authorize(request)
        name = request.path_params.get("id", "").rstrip("/")
        if not name:
            return JSONResponse({"object": "list", "data": [self.model]})
        if name != self.name:
            message = f"the model {shorten(name)!r} does not exist. Use {self.name!r}."
            raise ApiError(message, 404, "model", "model_not_found")
        return JSONResponse(self.model)

    def encode_prompts(self, settings: CompletionSettings) -> list[list[int]]:
        """Return the ids of each prompt of a request. Raises ApiError."""
        valid_ids = self.tokenizer.text_ids.union(self.tokenizer.special_tokens.values())
        encoded = []
        try:
            for prompt in settings.prompts:
                if isinstance(prompt, str):  # with an echo it is scored, and ends with an answer
                    add_suffix = not settings.echo
                    ids = self.generator.encode_prompt(prompt, settings.parse_special, add_suffix)
                elif unknown := {*(ids := prompt)} - valid_ids:
                    raise UserError(f"the tokenizer has no id {shorten(min(unknown))}")
                encoded.append(ids)
        except UserError as error:
            raise ApiError(f"prompt: {error}", param="prompt") from None
        return encoded

    def encode_messages(self, settings: ChatSettings) -> list[list[int]]:
        """Return the ids of the messages of a request, one prompt. Raises ApiError."""
        if not self.generator.is_chat_model:
            raise ApiError(f"{self.name} was not trained on chats. Use /v1/completions.")
        try:
            turns = parse_messages(settings.messages, own_template(self.tokenizer))
            # An answer at the end is a prefill, as for DeepSeek's and Mistral's "prefix": true.
            continues = settings.continue_final_message
            if continues is None:
                continues = turns[-1][0] == "assistant"
            return [encode_chat(self.tokenizer, turns, settings.chat_template_kwargs, continues)]
        except (UserError, UnicodeEncodeError) as error:  # the latter for a lone surrogate
            raise ApiError(f"messages: {error}", param="messages") from None

    async def answer(self, cls: type[AnySettings], request: Request) -> Response:
        """Decode the choices of all prompts, and answer in a stream or in one response."""
        self.authorize(request)
        body = await read_body(request, self.max_body_bytes)
        settings = read_settings(cls, body, self.generator.sampling)
        is_chat = isinstance(settings, ChatSettings)
        encode: Any = self.encode_messages if is_chat else self.encode_prompts
        arrivals: Arrivals = asyncio.Queue()
        prompts = await asyncio.to_thread(encode, settings)
        requests = self.make_requests(settings, prompts, arrivals)
        try:
            self.worker.submit(requests)
        except queue.Full:
            raise ApiError("too many requests. Try again.", 429, code="queue_full") from None
        form = AnswerFormat(self.name, self.tokenizer, settings)
        media_type = "text/event-stream" if settings.stream else "application/json"
        chunks = write_answer(form, requests, arrivals)
        return ChunkedResponse(chunks, headers=NOT_STORED, media_type=media_type)

    def make_requests(
        self, settings: AnySettings, prompts: list[list[int]], arrivals: Arrivals
    ) -> list[TextRequest]:
        """Return a request for each choice of each prompt. Raises ApiError if one is too long."""
        limit = self.context_length if settings.max_tokens == -1 else settings.max_tokens
        seed = secrets.randbits(32) if settings.seed == -1 else settings.seed
        loop = asyncio.get_running_loop()

        def receive(index: int, arrival: Token | Exception | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(arrivals.put_nowait, (index, arrival))

        ends = self.generator.ends
        all_prompts = [prompt for prompt in prompts for _ in range(settings.n)]
        requests: list[TextRequest] = []
        for prompt, row_seed in zip(all_prompts, row_seeds(seed, all_prompts), strict=True):
            room = self.context_length - len(prompt)
            if room < min(1, limit):
                name = settings.prompt_name
                size = f"the context has {self.context_length} tokens (got {len(prompt)})"
                code = "context_length_exceeded"
                raise ApiError(f"{name}: too long: {size}", param=name, code=code)
            request = TextRequest(
                TextStream(self.tokenizer, prompt, min(limit, room), settings.stop, ends),
                row_seed,
                settings.sampling,
                partial(receive, len(requests)),
                settings.num_logprobs,
                settings.echo,
            )
            requests.append(request)
        return requests


async def report_health(request: Request) -> Response:
    """Answer GET /health, which needs no key."""
    return JSONResponse({"status": "ok"})


async def write_answer(
    form: AnswerFormat, requests: list[TextRequest], arrivals: Arrivals
) -> AsyncGenerator[str, None]:
    """Yield an answer as JSON, or the events of a stream, with an error after the first of them.

    Raises ApiError. At the end, also if the client leaves, the choices are canceled.
    """
    streams = [request.stream for request in requests]
    tokens: list[list[Token]] = [[] for _ in requests]
    num_texts = len(requests)
    try:
        while num_texts:
            index, arrival = await arrivals.get()
            if isinstance(arrival, Exception):
                raise to_api_error(arrival)
            is_first = not tokens[index]
            new = [arrival] if arrival else []
            if form.settings.stream and (not new or is_first or form.has_logprobs or new[0].text):
                choice = form.choice(index, new, None if new else streams[index], is_first)
                yield to_event(form.answer([choice]))
            tokens[index] += new
            num_texts -= not new
        if not form.settings.stream:  # with many logprobs it takes seconds

            def format_answer() -> str:
                choices = map(form.choice, range(len(requests)), tokens, streams)
                return to_json(form.answer([*choices], usage=form.count_tokens(streams)))

            yield await asyncio.to_thread(format_answer)
        elif form.settings.stream_options.get("include_usage"):
            yield to_event(form.answer([], usage=form.count_tokens(streams)))
    except ApiError as error:
        if not form.settings.stream or not any(tokens):
            raise
        yield to_event(error.to_json())
    finally:
        for request in requests:
            request.is_cancelled = True
    if form.settings.stream:
        yield "data: [DONE]\n\n"


def to_event(content: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {to_json(content)}\n\n"


def serve(
    generator: TextGenerator, name: str, port: int, host: str, key: str = "", page: str = ""
) -> None:
    """Print the addresses of the API and of the page, and serve them until Ctrl-C."""
    sys.setswitchinterval(SWITCH_SECONDS)
    api = Api(generator, name, key, page)
    socket = listen(port, host)
    address = f"http://{f'[{host}]' if ':' in host else host}:{socket.getsockname()[1]}"
    print(f"OpenAI-compatible API: {address}/v1")
    print(f"Open {address}/ (Ctrl-C stops the server)", flush=True)
    try:
        make_server(api.app).run([socket])
    finally:
        api.worker.stop()
