"""The router as a process: its two servers, and what stands behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import signal
import socket
import time

import grpc.aio
import uvicorn
from fastapi import FastAPI

from outrider.errors import StartupError
from outrider.rpc import STOP_GRACE_SECONDS, Identity, Role, bind, new_server
from outrider.v1 import registry_pb2_grpc
from router.api.grpc_generation import add_generation_service
from router.api.http import create_app
from router.api.validation import DrawBelow
from router.config import RouterConfig
from router.fleet import Fleet
from router.metrics import Metrics
from router.registry import Registry
from router.sessions import Sessions
from router.tokenizer import first_difference


async def serve(config: RouterConfig) -> None:
    """Serves until SIGINT or SIGTERM; prints the ready line once both servers listen.

    Raises StartupError where an address cannot be had.
    """
    metrics = Metrics()
    fleet = Fleet(metrics, clock=time.time)
    sessions = Sessions(
        fleet, max_sessions=config.max_sessions, num_speculative_tokens=config.num_speculative_tokens
    )
    draw_below = _draw_below(config.seed)
    grpc_server = new_server()
    registry = Registry(fleet, _identity(), first_difference)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, grpc_server)
    add_generation_service(grpc_server, sessions, metrics, draw_below=draw_below)

    listener = _listen(config.host, config.port)
    with listener:
        grpc_address = bind(grpc_server, config.host, config.grpc_port, flag="--grpc-port")
        http_server = _HttpServer(create_app(sessions, metrics, draw_below=draw_below))
        await grpc_server.start()
        http = asyncio.create_task(http_server.serve(sockets=[listener]))
        try:
            await _until_stopped(http_server, http, f"{_address(listener)} (gRPC {grpc_address})")
        finally:
            await _stop(http_server, http, grpc_server)


async def _until_stopped(http_server: _HttpServer, http: asyncio.Task[None], addresses: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listening, stopped = (asyncio.create_task(event.wait()) for event in (http_server.listening, stop))
    try:
        await asyncio.wait((listening, stopped, http), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            print(f"outrider router ready: http://{addresses}", flush=True)
        await asyncio.wait((stopped, http), return_when=asyncio.FIRST_COMPLETED)
    finally:
        listening.cancel()
        stopped.cancel()


async def _stop(http_server: _HttpServer, http: asyncio.Task[None], grpc_server: grpc.aio.Server) -> None:
    """Takes no new requests, gives those in progress a moment, then ends them."""
    http_server.should_exit = True
    await asyncio.gather(http, grpc_server.stop(STOP_GRACE_SECONDS))


class _HttpServer(uvicorn.Server):
    """uvicorn in a loop that is not its own: signals are ours, and it says when it listens."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                # The gRPC server ends the sessions first, which ends their HTTP answers in an orderly way.
                timeout_graceful_shutdown=round(STOP_GRACE_SECONDS) + 1,
            )
        )
        self.listening = asyncio.Event()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


def _listen(host: str, port: int) -> socket.socket:
    """The HTTP server's socket. Raises StartupError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else "the address cannot be had"
        raise StartupError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port or --host"
        ) from None


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _identity() -> Identity:
    incarnation = secrets.randbits(64)
    return Identity(Role.ROUTER, f"router-{socket.gethostname()}-{incarnation:016x}", incarnation)


def _draw_below(seed: int | None) -> DrawBelow:
    """Draws seeds for requests that bring none."""
    return secrets.randbelow if seed is None else random.Random(seed).randrange
