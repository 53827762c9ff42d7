"""`x-request-id`: a client's own comes back, or one that is made; and the log's line of each request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.telemetry.spans import Tracer
from outrider.wire.trace_context import TRACEPARENT, TRACESTATE, TraceContext
from router.api.access import generates, owner
from router.api.asked import REQUEST_ID, begin
from router.api.refusals import MESSAGES

CLIENT_CLOSED_REQUEST = 499  # nginx's code; nobody is there to read it
GENERATION = "outrider.v1.Generation"
STATUS_NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


class RequestIds:
    """An application whose answers carry the id of their request, and which logs a line for each."""

    def __init__(self, app: ASGIApp, tracer: Tracer | None = None) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = TraceContext.read(headers.get(TRACEPARENT), headers.get(TRACESTATE))
        tracer = self._tracer if generates(scope) else None
        request = begin(f"{scope['method']} {scope['path']}", headers.get(REQUEST_ID, ""), trace, tracer)
        scope[REQUEST_ID] = request.id  # for an answer that does not come by here
        status = CLIENT_CLOSED_REQUEST

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                identify(MutableHeaders(scope=message), scope)
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except Exception:
            status = 500
            raise
        finally:
            request.over(status, owner(), generates(scope))


def identify(headers: MutableHeaders, scope: Scope) -> None:
    """Adds the id of the request to the headers of its answer."""
    if (request_id := scope.get(REQUEST_ID)) is None:
        return
    headers[REQUEST_ID] = request_id
    if scope["path"].startswith(MESSAGES):
        headers["request-id"] = request_id  # as Anthropic's clients know it


class GrpcRequestIds:
    """Generation, whose calls have ids in their initial metadata, and a line each in the log."""

    def __init__(self, generation: Any, tracer: Tracer | None = None) -> None:
        self._generation = generation
        self._tracer = tracer

    async def Generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        generation = self._generation.Generate(request, context)
        async with self._asked("Generate", context), aclosing(generation) as responses:
            async for response in responses:
                yield response

    async def Resume(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        generation = self._generation.Resume(request, context)
        async with self._asked("Resume", context), aclosing(generation) as responses:
            async for response in responses:
                yield response

    async def Cancel(self, request: Any, context: Any) -> Any:
        async with self._asked("Cancel", context):
            return await self._generation.Cancel(request, context)

    @asynccontextmanager
    async def _asked(self, method: str, context: Any) -> AsyncIterator[None]:
        asked = await self._begin(method, context)
        ended = False
        try:
            yield
            ended = True
        finally:
            asked.over(_status(context, ended), owner(), True)

    async def _begin(self, method: str, context: Any) -> Any:
        metadata = dict(context.invocation_metadata() or ())
        trace = TraceContext.read(_text(metadata, TRACEPARENT), _text(metadata, TRACESTATE))
        given = _text(metadata, REQUEST_ID)
        asked = begin(f"{GENERATION}/{method}", given, trace, self._tracer, rpc=True)
        await context.send_initial_metadata(((REQUEST_ID, asked.id),))
        return asked


def _text(metadata: dict[str, Any], name: str) -> str:
    value = metadata.get(name, "")
    return value if isinstance(value, str) else ""


def _status(context: Any, ended: bool) -> str:
    """Returns the name of a call's status. One without any that did not come to its end was left by its
    client."""
    code = context.code()
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code or 0
    return STATUS_NAMES[number] if number or ended else grpc.StatusCode.CANCELLED.name
