from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from router.api.http import create_app
from router.api.intake import Intake
from router.api.reading import AS_THE_TEMPLATE_SAYS
from router.api.threads import Threads
from router.metrics import Metrics
from router.requests import SessionRunner
from tests.router.api import scripted

DRAWN = 4711  # the seed that these tests draw


@pytest.fixture(scope="session")
def tokenizer() -> scripted.Tokenizer:
    return scripted.byte_level()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def client_of(metrics: Metrics) -> AsyncIterator[Callable[..., httpx.AsyncClient]]:
    """An HTTP client of the application over a runner, without a socket."""
    clients = []

    def make(runner: SessionRunner, **settings: Any) -> httpx.AsyncClient:
        settings = {"clock": lambda: 1234.5, **settings}
        intake = Intake(runner, lambda limit: DRAWN, settings.pop("threads", Threads()))
        intake = replace(intake, formats=settings.pop("formats", AS_THE_TEMPLATE_SAYS))
        app = create_app(intake, metrics, **settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://router"))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture
async def serve(metrics: Metrics) -> AsyncIterator[Callable[[SessionRunner], Awaitable[str]]]:
    """A real server on a free port; gives its URL."""
    servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(runner: SessionRunner, **settings: Any) -> str:
        app: FastAPI = create_app(Intake(runner, lambda limit: DRAWN), metrics, **settings)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        servers.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
        await scripted.until(lambda: server.started)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, task in servers:
        server.should_exit = True
        await task
