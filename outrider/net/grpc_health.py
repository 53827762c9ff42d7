"""The standard gRPC services: health (grpc.health.v1), answered from what is true at that moment, and
reflection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from outrider.net.rpc import host_of

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
WATCH_SECONDS = 0.5  # how soon watchers hear of a change
MOST_WATCHERS = 256  # of a process: nobody needs a key to watch
ADDRESS_SHARE = 4  # one address has at most one in so many of them


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated code without types
    """Says SERVING while `ready()`, for the server as a whole ("") and each service named."""

    def __init__(self, ready: Callable[[], bool], services: Collection[str]) -> None:
        self._ready = ready
        self._services = {"", *services}
        self._watching: Counter[str] = Counter()  # by address
        self._looking: asyncio.Task[None] | None = None  # for all watchers
        self._news = asyncio.Event()  # a new one for each change

    def _response(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self._ready() else statuses.NOT_SERVING)

    async def Check(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return self._response()

    async def Watch(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Any, None]:
        """Yields the state now, and again whenever it has changed."""
        address = host_of(context.peer())
        if (
            self._watching.total() >= MOST_WATCHERS
            or self._watching[address] >= MOST_WATCHERS // ADDRESS_SHARE
        ):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch this: ask Check instead")
        self._watching[address] += 1
        try:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            unknown = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            last = None
            while True:
                news = self._news
                response = self._response() if request.service in self._services else unknown
                if response != last:
                    yield response
                    last = response
                await news.wait()
        finally:
            self._watching -= Counter([address])
            if not self._watching and self._looking is not None:
                self._looking.cancel()
                self._looking = None

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


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """By its old name and its new one: v1 is v1alpha to the bit, and the library serves v1alpha only."""
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # no stubs tell of it
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, handlers),))
