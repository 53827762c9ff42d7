"""The standard gRPC services: health (grpc.health.v1), answered from what is true at that moment, and
reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from outrider.errors import MAX_FIELD, TooSlow, printable
from outrider.net.places import Places, host_of

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
WATCH_SECONDS = 0.5  # how soon watchers hear of a change
MOST_WATCHERS = 256  # of a process: nobody needs a key to watch
MOST_DESCRIBED = 64  # streams of reflection at a time
ADDRESS_SHARE = 4  # one address has at most one in so many of them
DESCRIBED_SECONDS = 60.0  # of such a stream: its caller asks a few questions and goes


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated code without types
    """Says SERVING while `ready()`, for the server as a whole ("") and each service named."""

    def __init__(self, ready: Callable[[], bool], services: Collection[str]) -> None:
        self._ready = ready
        self._services = {"", *services}
        self._watching = Places(MOST_WATCHERS, ADDRESS_SHARE, "too many watch this: ask Check instead")
        self._looking: asyncio.Task[None] | None = None  # for all watchers
        self._news = asyncio.Event()  # a new one for each change

    def _response(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self._ready() else statuses.NOT_SERVING)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request.service not in self._services:
            told = printable(request.service, MAX_FIELD)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service '{told}' here")
        return self._response()

    async def Watch(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Any, None]:
        """Yields the state now, and again whenever it has changed."""
        with self._watching.taken(host_of(context.peer())):
            try:
                async for response in self._states(request.service):
                    yield response
            finally:
                if self._watching.total == 1 and self._looking is not None:  # it was the last
                    self._looking.cancel()
                    self._looking = None

    async def _states(self, service: str) -> AsyncGenerator[Any, None]:
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        unknown = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        last = None
        while True:
            news = self._news
            response = self._response() if service in self._services else unknown
            if response != last:
                yield response
                last = response
            await news.wait()

    async def _look(self) -> None:
        told = self._ready()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._ready() != told:
                told = not told
                self._news.set()
                self._news = asyncio.Event()


def add_health(server: grpc.aio.Server, ready: Callable[[], bool], service: str) -> None:
    """Lets a server that has this service tell its health (SERVING while `ready()`) and describe itself.

    Call it before the server starts."""
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(ready, [service]), server)
    names = [service, "grpc.health.v1.Health", reflection.SERVICE_NAME]
    _add_reflection(server, names)


class Reflection(reflection.aio.ReflectionServicer):  # type: ignore[name-defined, misc]  # no stubs tell of it
    """The library's, but that its streams, for which nobody needs a key, are few and end."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._streams = Places(MOST_DESCRIBED, ADDRESS_SHARE, "too many ask what is served here")

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Any, None]:
        with self._streams.taken(host_of(context.peer())):
            until = asyncio.get_running_loop().time() + DESCRIBED_SECONDS
            answers = super().ServerReflectionInfo(requests, context)
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        answer = await anext(answers, None)
                except TimeoutError:
                    raise TooSlow(f"this ends after {DESCRIBED_SECONDS:g} s; ask again") from None
                if answer is None:
                    return
                yield answer


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Serves reflection as v1alpha and as v1, which is the same to the bit: the library has v1alpha only."""
    servicer = Reflection(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, handlers),))
