"""The standard gRPC services: health (grpc.health.v1), answered from what is true at that moment, and
reflection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

WATCH_SECONDS = 0.5  # how soon a watcher hears of a change


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated code without types
    """Says SERVING while `ready()`, for the server as a whole ("") and each service named."""

    def __init__(self, ready: Callable[[], bool], services: Collection[str]) -> None:
        self._ready = ready
        self._services = {"", *services}

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
        unknown = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        last = None
        while True:
            response = self._response() if request.service in self._services else unknown
            if response != last:
                yield response
                last = response
            await asyncio.sleep(WATCH_SECONDS)


def add_health(server: grpc.aio.Server, ready: Callable[[], bool], service: str) -> None:
    """Lets a server that has this service tell its health (SERVING while `ready()`) and describe itself.

    Call it before the server starts."""
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(ready, [service]), server)
    names = [service, "grpc.health.v1.Health", reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
