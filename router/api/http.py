"""The OpenAI-compatible HTTP API: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outrider import __version__
from outrider.errors import InvalidRequest, OutriderError
from outrider.wire.session import SessionId
from router.api import answers, position, schema, tokens
from router.api.access import owner
from router.api.asked import asks_for
from router.api.body import Bodies, decoded
from router.api.connection import KEEP_ALIVE_SECONDS, ClientLeft, EventStream, LongJson, while_connected
from router.api.deadline import time_limits
from router.api.fields import Fields
from router.api.generate import generate_all
from router.api.intake import Intake
from router.api.json_text import long_json, to_json, to_long_json
from router.api.logprobs import HeldScores
from router.api.messages_request import CountRequest, MessagesRequest, turns
from router.api.openapi import (
    MODEL,
    MODELS,
    PROBE,
    RESUMPTION,
    After,
    AnswerId,
    Application,
    ModelName,
    OptionalName,
    generation,
    token_route,
)
from router.api.output import Details, Result
from router.api.record import Record, recalled
from router.api.refusals import MESSAGES, refusal
from router.api.request_id import CLIENT_CLOSED_REQUEST, identify
from router.api.responses import Json
from router.api.responses_request import ResponsesRequest
from router.api.stream import Items, internal_error, last_words
from router.api.telling import telling
from router.api.threads import SMALL_BYTES, TINY_BYTES, beside
from router.api.validation import Generation, called
from router.metrics import Metrics
from router.requests import Events, GenerationRequest, Resumption, ServedModel, SessionBegun

READ = ["GET", "HEAD"]
MANY_SCORES = 2**14  # log-probabilities of a whole answer, which is not held as JSON if it has more
REFUSED = answers.AnthropicError  # at Anthropic's routes

Made = TypeVar("Made")
Kind = TypeVar("Kind", bound=Fields)
Generating = TypeVar(
    "Generating", schema.CompletionRequest, schema.ChatRequest, MessagesRequest, ResponsesRequest
)


def create_app(
    intake: Intake,
    metrics: Metrics,
    *,
    bodies: Bodies | None = None,
    clock: Callable[[], float] = time.time,
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
) -> FastAPI:
    """The application. `clock` gives unix seconds."""
    runner, reading, incoming = intake.runner, intake.threads, bodies or Bodies()
    exposing = asyncio.Lock()  # whose text is long: one is made at a time, beside the event loop
    app = Application(
        title="Outrider",
        version=__version__,
        description="The OpenAI-compatible HTTP API. A null is an absent field.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # to where, the client would say; and behind a proxy it would be in the clear
    )
    _add_error_handlers(app, metrics)

    @app.post("/v1/completions", **generation(schema.CompletionRequest, answers.Completion))
    async def completions(request: Request) -> Response:
        """Continue a prompt."""
        return await answer(request, schema.CompletionRequest, "completion")

    @app.post("/v1/chat/completions", **generation(schema.ChatRequest, answers.Chat))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        return await answer(request, schema.ChatRequest, "chat")

    @app.post(MESSAGES, **generation(MessagesRequest, answers.AnthropicMessage, REFUSED))
    async def messages(request: Request) -> Response:
        """The next turn of a conversation, as Anthropic's clients ask for it."""
        return await answer(request, MessagesRequest, "message")

    @app.post(f"{MESSAGES}/count_tokens", **token_route(CountRequest, answers.Counted, REFUSED))
    async def count_tokens(request: Request) -> Response:
        """How many tokens a conversation has."""
        body, size = await parsed(request, CountRequest)
        model = runner.model(body.model)
        return await written(size, lambda: tokens.counted(turns(body), body.tools, model, body.rendering))

    @app.post("/v1/responses", **generation(ResponsesRequest, answers.Response))
    async def responses(request: Request) -> Response:
        """The next turn of a conversation, as OpenAI's newer clients ask for it; nothing is stored."""
        return await answer(request, ResponsesRequest, "response")

    @app.get("/v1/sessions/{id}/events", **RESUMPTION)
    async def session_events(request: Request, id: AnswerId, after: After = None) -> Response:
        """Go on with a stream that broke off."""
        session_id = position.parse_id(id)
        # What EventSource sends when it reconnects by itself:
        if last := request.headers.get("last-event-id"):
            named_id, place = position.parse_event_id(last)
            if named_id != session_id:
                raise InvalidRequest(
                    "Last-Event-ID must be of the session in the path", field="Last-Event-ID"
                )
            return await resumed(session_id, place)
        return await resumed(session_id, None if after is None else position.parse_position(after))

    async def made_of(request: Request, make: Callable[[bytes | bytearray], Made]) -> tuple[Made, int]:
        """Returns what is made of the body, not on the loop if that is large, and its bytes."""
        raw = await incoming.read(request, owner())
        if len(raw) <= SMALL_BYTES:  # larger ones have few places where they are read
            await intake.line.turn(owner())
            if await request.is_disconnected():
                raise ClientDisconnect
        if len(raw) <= TINY_BYTES:
            return make(raw), len(raw)
        return await reading.run(len(raw), owner(), None, lambda: make(raw)), len(raw)

    async def parsed(request: Request, kind: type[Kind]) -> tuple[Kind, int]:
        """Returns the request that the body is, and its bytes."""
        return await made_of(request, lambda raw: schema.parse(kind, decoded(raw)))

    async def written(size: int, answered: Callable[[], Json]) -> Response:
        """Returns an answer that grows with what the client sent, so that it is not written on the loop."""
        content = await reading.run(size, owner(), None, lambda: to_long_json(answered()))
        return Response(content, media_type=JSONResponse.media_type)

    async def answer(request: Request, kind: type[Generating], shape: str) -> Response:
        asked_at = asyncio.get_running_loop().time()
        asks_for(shape)
        (asked, body), size = await made_of(request, lambda raw: _asked(kind, raw))
        limits = time_limits(request.headers, body.stream, asked_at)
        if last := request.headers.get("last-event-id"):
            if not body.stream:
                raise InvalidRequest("Last-Event-ID is only for stream = true", field="Last-Event-ID")
            return await resumed(*position.parse_event_id(last), shape)
        with called(asked.names):
            generation = await intake.take(body, size, limits)
        record = Record(
            shape,
            int(clock()),
            len(generation.sessions),
            generation.stop.strings,
            include_usage=body.stream_options.include_usage or not body.stream,
            continuous_usage_stats=body.stream_options.continuous_usage_stats,
            n=generation.n,
            calls=generation.calls,
            wording=generation.wording,
            repeated=asked.repeated() if isinstance(asked, ResponsesRequest) else {},
        )
        kept = record.to_bytes()

        def start(session: GenerationRequest) -> Events:
            return runner.run(session, kept if session is generation.sessions[0] else b"")

        items = generate_all(start, runner.together, generation, metrics)
        if body.stream:
            return streamed(items, record, generation)
        answered = await while_connected(request.receive, _whole(items, len(generation.told)))
        texts, results, details = answered
        told = partial(telling(record, generation).whole, texts, results, details)
        scores = 1 + (generation.sessions[0].params.logprobs or 0)
        of_prompts = sum(each.prompt.numbers for each in details if each.prompt is not None)
        if scores * sum(len(each.scored) for each in details) + of_prompts > MANY_SCORES:
            return LongJson(lambda: long_json(told))
        long = sum(map(len, texts)) > SMALL_BYTES or any(details)
        content = await beside(lambda: to_long_json(told())) if long else to_json(told())
        return Response(content, media_type=JSONResponse.media_type)

    async def resumed(
        session_id: SessionId, after: position.Position | None, shape: str | None = None
    ) -> Response:
        with reading.retelling(owner()) as place:
            record, generation = await recalled(runner, session_id, place)
            tokens = place.tokens
        if shape not in (None, record.shape):
            raise InvalidRequest(
                f"Last-Event-ID is of a {record.shape}: ask where it was asked for", field="Last-Event-ID"
            )
        if after is not None:
            position.check(after, generation.told)
        from_start = telling(record, generation).from_start
        resumption = Resumption(session_id)

        def start(session: GenerationRequest) -> Events:
            assert session.session_id is not None
            events = runner.resume(session.session_id, resumption)
            return position.cut(events, after) if from_start and after is not None else events

        async def told_again() -> Items:
            with reading.retelling(generation.sessions[0].owner) as place:
                place.hold(tokens)
                has = [0] * len(generation.told) if from_start or after is None else after
                async with aclosing(
                    generate_all(start, runner.together, generation, metrics, has, place)
                ) as items:
                    async for item in items:
                        yield item

        return streamed(told_again(), record, generation, after)

    def streamed(
        items: Items, record: Record, generation: Generation, after: position.Position | None = None
    ) -> Response:
        told = telling(record, generation)
        return EventStream(
            told.events(items, after),
            lambda error: last_words(error, metrics, told.refused),
            keep_alive_seconds,
        )

    @app.post("/tokenize", **token_route(schema.TokenizeRequest, answers.Tokenized))
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt or a conversation, as vLLM gives them."""
        body, size = await parsed(request, schema.TokenizeRequest)
        model = runner.model(body.model)
        return await written(size, lambda: tokens.tokenized(body, model))

    @app.post("/detokenize", **token_route(schema.DetokenizeRequest, answers.Detokenized))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body, size = await parsed(request, schema.DetokenizeRequest)
        model = runner.model(body.model)
        return await written(size, lambda: tokens.detokenized(body, model))

    @app.api_route("/tokenizer_info", methods=READ, **MODEL)
    async def tokenizer_info(model: OptionalName = "") -> dict[str, Any]:
        """The chat template and the special tokens of a model; without a name of the first one."""
        return tokens.described(runner.model(model))

    @app.api_route("/version", methods=READ)
    async def version() -> answers.Version:
        """Returns the version of this server."""
        return {"version": __version__}

    @app.api_route("/v1/models", methods=READ, **MODELS)
    async def models() -> answers.Models:
        """The models that are served."""
        named = [(model, name) for model in runner.models() for name in (model.name, *model.aliases)]
        return {"object": "list", "data": [_described(model, name) for model, name in named]}

    @app.api_route("/v1/models/{name:path}", methods=READ, **MODEL)
    async def model(name: ModelName) -> answers.Model:
        """One of them."""
        if not name:
            raise HTTPException(404)  # /v1/models/
        return _described(runner.model(name), name)

    @app.api_route("/health", methods=READ, **PROBE)
    async def health() -> Response:
        """Whether requests can be served."""
        if runner.ready():
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready: no verifier is connected\n", status_code=503)

    @app.api_route("/ready", methods=READ, **PROBE)
    async def ready() -> Response:
        """As /health; and says what is away that requests can do without."""
        response = await health()
        degraded = runner.degraded()
        if degraded and response.status_code == 200:
            return PlainTextResponse(f"ready, degraded: {degraded}\n")
        return response

    @app.api_route("/metrics", methods=READ, response_class=PlainTextResponse)
    async def exposition() -> Response:
        """For Prometheus."""
        async with exposing:
            text = []
            for piece in metrics.pieces():  # a thread would take the interpreter away for longer than they do
                text.append(piece)
                await asyncio.sleep(0)
        return Response(b"".join(text), media_type=CONTENT_TYPE_LATEST)

    return app


def _asked(
    kind: type[Generating], raw: bytes | bytearray
) -> tuple[Generating, schema.CompletionRequest | schema.ChatRequest]:
    """Returns the request that a body is, and as one of the API's own."""
    asked = schema.parse(kind, decoded(raw))
    return asked, asked.as_chat() if isinstance(asked, MessagesRequest | ResponsesRequest) else asked


def _described(model: ServedModel, name: str) -> answers.Model:
    """Returns what is told of it under one of its names."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "root": model.name,
        "parent": None,
        "permission": [_permission(model)],
        "max_model_len": model.max_context,
        "numerics": list(model.numerics),
    }


def _permission(model: ServedModel) -> answers.Permission:
    return {
        "id": f"modelperm-{model.fingerprint[:32]}",
        "object": "model_permission",
        "created": model.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


async def _whole(items: Items, answers: int) -> tuple[list[str], list[Result], list[Details]]:
    """Returns the text of each answer, its result, and what is told of its tokens."""
    pieces: list[list[str]] = [[] for _ in range(answers)]
    results: dict[int, Result] = {}
    details = [Details(HeldScores()) for _ in range(answers)]
    async with aclosing(items):
        async for index, item in items:
            if isinstance(item, SessionBegun):
                continue
            pieces[index].append(item.text)
            if isinstance(item, Result):
                results[index] = item
                details[index].reasoning += item.reasoning
            else:
                details[index].add(item)
    return ["".join(each) for each in pieces], [results[index] for index in range(answers)], details


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(OutriderError)
    async def expected(request: Request, error: OutriderError) -> Response:
        metrics.request_refused(error.kind)
        return refusal(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        route = f"{request.method} {request.url.path}"
        allowed = (error.headers or {}).get("Allow")
        message = f"{route} is not served" + (f"; allowed here: {allowed}" if allowed else "")
        return refusal(InvalidRequest(message), request.url.path, error.status_code, error.headers)

    @app.exception_handler(ClientLeft)
    @app.exception_handler(ClientDisconnect)
    async def nobody_there(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        metrics.request_refused(OutriderError.kind)  # the server logs the error itself
        answer = refusal(internal_error(), request.url.path)
        identify(answer.headers, request.scope)  # it is sent by what stands before everything else
        return answer
