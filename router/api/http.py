"""The OpenAI-compatible HTTP API: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from outrider.errors import InvalidRequest, OutriderError
from router.api import schema
from router.api.body import MAX_BODY_BYTES, read_json
from router.api.connection import ClientLeft, EventStream, while_connected
from router.api.generate import Chunk, Result, generate_all
from router.api.responses import ChatShape, CompletionShape, Envelope, Json, Shape, error_body
from router.api.stream import Items, events, internal_error
from router.api.validation import DrawBelow, Generation, prepare
from router.metrics import Metrics
from router.requests import ServedModel, SessionRunner

RETRY_SECONDS = 1  # after which one who was refused for now may ask again
CLIENT_CLOSED_REQUEST = 499  # nginx's code; nobody is there to read it

Kind = TypeVar("Kind", schema.CompletionRequest, schema.ChatRequest)


def create_app(
    runner: SessionRunner,
    metrics: Metrics,
    *,
    draw_below: DrawBelow,
    max_body_bytes: int = MAX_BODY_BYTES,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The application. `draw_below` draws seeds (`secrets.randbelow`); `clock` gives unix seconds."""
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app, metrics)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, schema.CompletionRequest, CompletionShape())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(request, schema.ChatRequest, ChatShape())

    async def answer(request: Request, kind: type[Kind], shape: Shape) -> Response:
        body = schema.parse(kind, await read_json(request, max_body_bytes))
        model = runner.model(body.model)
        # In a thread: a megabyte of text takes long to tokenize, and other answers are streaming.
        generation = await asyncio.to_thread(prepare, body, model, draw_below)
        envelope = Envelope(shape, uuid.uuid4().hex, int(clock()), model.name, generation.seed)
        items = generate_all(runner, generation, metrics)
        if not body.stream:
            return JSONResponse(await while_connected(request.receive, _whole(items, generation, envelope)))
        # The status is sent only when the first token is there: until then an error can still be an error.
        first = await while_connected(request.receive, _first(items))
        prompt_tokens = [len(session.prompt) for session in generation.sessions]
        return EventStream(events(first, items, envelope, body.stream_options, prompt_tokens, metrics))

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_described(model) for model in runner.models()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        return _described(runner.model(name))

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        if runner.ready():
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready: no verifier is connected\n", status_code=503)

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return app


def _described(model: ServedModel) -> Json:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "max_model_len": model.max_context,
    }


async def _first(items: Items) -> tuple[int, Chunk | Result]:
    return await anext(items)


async def _whole(items: Items, generation: Generation, envelope: Envelope) -> Json:
    texts = [""] * len(generation.sessions)
    results: dict[int, Result] = {}
    async with aclosing(items):
        async for index, item in items:
            if isinstance(item, Result):
                results[index] = item
            else:
                texts[index] += item.text
    return envelope.whole(texts, [results[index] for index in range(len(texts))])


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(OutriderError)
    async def expected(request: Request, error: OutriderError) -> Response:
        metrics.request_refused(error.kind)
        again = {"Retry-After": str(RETRY_SECONDS)} if error.http_status in (429, 503) else None
        return JSONResponse(error_body(error), status_code=error.http_status, headers=again)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        route = f"{request.method} {request.url.path}"
        allowed = (error.headers or {}).get("Allow")
        message = f"{route} is not served" + (f"; allowed here: {allowed}" if allowed else "")
        body = error_body(InvalidRequest(message))
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientLeft)
    @app.exception_handler(ClientDisconnect)
    async def nobody_there(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        metrics.request_refused(OutriderError.kind)  # the server logs the error itself
        return JSONResponse(error_body(internal_error()), status_code=500)
