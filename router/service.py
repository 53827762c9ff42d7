"""The router as a process: its two servers, and what stands behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import uvicorn
from fastapi import FastAPI

from outrider.errors import StartupError
from outrider.rpc import STOP_GRACE_SECONDS, bind, new_server
from outrider.v1 import registry_pb2_grpc
from router.api.grpc_generation import add_generation_service
from router.config import RouterConfig
from router.registry import Registry
from router.router import Router, store_at


async def serve(config: RouterConfig) -> None:
    """Serves until SIGINT or SIGTERM; prints the ready line once both servers listen.

    Raises StartupError where an address cannot be had, or the store refuses.
    """
    router = Router(
        store_at(config.store),
        num_speculative_tokens=config.num_speculative_tokens,
        max_sessions=config.max_sessions,
        seed=config.seed,
        lock_step=config.lock_step,
    )
    grpc_server = new_server()
    registry_pb2_grpc.add_RegistryServicer_to_server(Registry(router.store), grpc_server)
    add_generation_service(grpc_server, router.sessions, router.metrics, draw_below=router.draw_below)

    listener = _listen(config.host, config.port)
    with listener:
        grpc_address = bind(grpc_server, config.host, config.grpc_port, flag="--grpc-port")
        http_server = _HttpServer(router.app)
        await router.start()
        await grpc_server.start()
        http = asyncio.create_task(http_server.serve(sockets=[listener]))
        failed = asyncio.create_task(router.wait())
        try:
            await _until_stopped(http_server, [http, failed], f"{_address(listener)} (gRPC {grpc_address})")
        finally:
            failed.cancel()
            # It takes no new requests, gives those in progress a moment, then ends them.
            http_server.should_exit = True
            await asyncio.gather(http, grpc_server.stop(STOP_GRACE_SECONDS), router.stop(STOP_GRACE_SECONDS))


async def _until_stopped(http_server: _HttpServer, ends: list[asyncio.Task[None]], addresses: str) -> None:
    """Until a signal, or until one of `ends`; raises what that one raised."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listening, stopped = (asyncio.create_task(event.wait()) for event in (http_server.listening, stop))
    try:
        await asyncio.wait((listening, stopped, *ends), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            print(f"outrider router ready: http://{addresses}", flush=True)
        done, _ = await asyncio.wait((stopped, *ends), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        listening.cancel()
        stopped.cancel()


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
                # The router ends its sessions first, which ends their HTTP answers in an orderly way.
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
