from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
from fastapi import FastAPI

from router.api.http import create_app
from router.api.intake import Intake
from router.metrics import Metrics
from router.requests import SessionRunner
from tests.client.cutting import CuttingProxy
from tests.router.api.scripted import until

ServeApp = Callable[[FastAPI], Awaitable[str]]
Serve = Callable[[SessionRunner], Awaitable[str]]
Between = Callable[..., Awaitable[tuple[CuttingProxy, str]]]


@pytest.fixture
async def serve_app() -> AsyncIterator[ServeApp]:
    """An HTTP application on a free port; gives its URL."""
    servers: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []

    async def start(app: FastAPI) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        servers.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
        await until(lambda: server.started)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, task in servers:
        server.should_exit = True
        await task


@pytest.fixture
def serve(serve_app: ServeApp) -> Serve:
    """A router's HTTP application over a runner."""
    return lambda runner: serve_app(create_app(Intake(runner, lambda limit: 4711), Metrics()))


@pytest.fixture
async def between() -> AsyncIterator[Between]:
    """A proxy before a URL, and its own."""
    proxies: list[CuttingProxy] = []

    async def start(
        upstream: str, allowance: Callable[[], int | None] = lambda: None
    ) -> tuple[CuttingProxy, str]:
        proxies.append(CuttingProxy(upstream, allowance))
        return proxies[-1], await proxies[-1].start()

    yield start
    for proxy in proxies:
        await proxy.stop()
