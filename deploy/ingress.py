"""The Router deployment: our HTTP application and our gRPC services, both from one replica."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from deploy import replica_http
from deploy.args import NetworkArgs
from deploy.grpc_context import call, stream
from deploy.registry import StoreSource, open_store
from outrider.errors import Unhealthy
from outrider.net.grpc_health import HealthServicer
from outrider.net.tls import opened
from outrider.options.sessions import SessionOptions
from outrider.telemetry.logs import log_to_stderr
from outrider.worker.garbage import spare_what_is_there
from router.api.access import guarded
from router.api.generation_wire import SERVICE
from router.api.grpc_generation import GenerationServicer
from router.api.keys import keys_of
from router.api.reading import Formats
from router.api.request_id import GrpcRequestIds
from router.router import Router

SERVICER_FUNCTIONS = [
    "outrider.v1.generation_pb2_grpc.add_GenerationServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
]
# Ours decides how much is too much, with an answer that says so: Serve's limit must never come before it.
NO_LIMIT = 1_000_000
API_KEYS = "OUTRIDER_API_KEYS"  # of the environment of the routers: the lines, if there is no file


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """What a router is told."""

    sessions: SessionOptions
    network: NetworkArgs
    api_keys: str | None  # file on this node


@serve.ingress()
class Ingress:
    """The deployment. Its methods are named for the gRPC methods that they answer."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, options: RouterOptions, source: StoreSource, *workers: DeploymentHandle[Any]
    ) -> None:
        """`workers` are named only so that Serve deploys them: they are found in the store."""
        log_to_stderr(options.network.logging)
        replica_http.bound()
        file, sessions = options.api_keys, options.sessions
        keys = keys_of(None, os.environ.get(API_KEYS)) if file is None else keys_of(Path(file), None)
        self._router = Router(
            open_store(source),
            num_speculative_tokens=sessions.num_speculative_tokens,
            max_sessions=sessions.max_sessions,
            session_ttl=sessions.session_ttl,
            seed=sessions.seed,
            share_prefixes=sessions.share_prefixes,
            cors_origins=sessions.cors_origins,
            page=sessions.page,
            formats=Formats(sessions.tool_call_parser, sessions.reasoning_parser),
            same_numerics=sessions.same_numerics,
            drafters_per_session=sessions.drafters_per_session,
            keys=keys,
            tls=opened(options.network.protection.tls),
            export=options.network.export,
        )
        await self._router.start()
        spare_what_is_there()
        self._end = asyncio.create_task(self._router.wait())
        generation = GenerationServicer(self._router.intake, self._router.metrics)
        self._generation: Any = GrpcRequestIds(guarded(generation, self._router.access), self._router.tracer)
        self._health = HealthServicer(self._router.sessions.ready, [SERVICE])

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._router.app

    async def Generate(self, request: Any, grpc_context: RayServegRPCContext) -> AsyncGenerator[Any, None]:
        async for response in stream(self._generation.Generate, request, grpc_context):
            yield response

    async def Resume(self, request: Any, grpc_context: RayServegRPCContext) -> AsyncGenerator[Any, None]:
        async for response in stream(self._generation.Resume, request, grpc_context):
            yield response

    async def Cancel(self, request: Any, grpc_context: RayServegRPCContext) -> Any:
        return await call(self._generation.Cancel, request, grpc_context)

    async def Check(self, request: Any, grpc_context: RayServegRPCContext) -> Any:
        return await call(self._health.Check, request, grpc_context)

    async def Watch(self, request: Any, grpc_context: RayServegRPCContext) -> AsyncGenerator[Any, None]:
        async for response in stream(self._health.Watch, request, grpc_context):
            yield response

    async def check_health(self) -> None:
        """Raises if the router does not look for workers any more."""
        if self._end.done():
            self._end.result()
            raise Unhealthy("the router has ended")

    async def __del__(self) -> None:
        self._end.cancel()
        await self._router.stop()
