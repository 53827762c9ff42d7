"""The router as a process: its two servers, and what stands behind them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from functools import partial
from typing import Any

import grpc.aio
import uvicorn
from fastapi import FastAPI

from outrider.errors import StartupError
from outrider.net.crowding import limit_connections
from outrider.net.rpc import STOP_GRACE_SECONDS, bind, most_connections, new_server
from outrider.net.tls import Tls, opened
from outrider.worker.garbage import spare_what_is_there
from outrider.worker.stepwatch import loop_watched
from router.api.grpc_generation import add_generation_service
from router.api.keys import keys_of, tokens_of
from router.api.reading import Formats
from router.config import LOOPBACK, TLS_WORKER_PORT, RouterConfig
from router.connections import GRPC_SHARE, HTTP_SHARE, WORKER_SHARE, Connections, LimitedProtocol
from router.handshakes import Handshake
from router.joins import Joins
from router.registry import Registry
from router.router import Router, store_at

BACKLOG = 2048  # connections that wait to be taken
GROUP = 32  # that are taken together


async def serve(config: RouterConfig) -> None:
    """Serves until SIGINT or SIGTERM; prints the ready line once both servers listen.

    Raises StartupError if an address cannot be had, or the store refuses.
    """
    tls = opened(config.protection.tls)
    router = Router(
        store_at(config.store),
        num_speculative_tokens=config.sessions.num_speculative_tokens,
        max_sessions=config.sessions.max_sessions,
        session_ttl=config.sessions.session_ttl,
        seed=config.sessions.seed,
        lock_step=config.sessions.lock_step,
        drafters_per_session=config.sessions.drafters_per_session,
        same_numerics=config.sessions.same_numerics,
        share_prefixes=config.sessions.share_prefixes,
        cors_origins=config.sessions.cors_origins,
        page=config.sessions.page,
        formats=Formats(config.sessions.tool_call_parser, config.sessions.reasoning_parser),
        keys=keys_of(config.api_keys, config.api_key_lines),
        tls=tls if tls is not None and tls.mutual else None,
        export=config.export,
        record=config.record,
    )
    clients = new_server(GRPC_SHARE)
    add_generation_service(
        clients,
        router.intake,
        router.metrics,
        router.access,
        router.tracer,
    )
    workers = new_server(WORKER_SHARE) if config.workers_apart else clients
    Registry(router.store, router.metrics).add_to(workers)
    if config.drafter_tokens is not None:
        Joins(tokens_of(config.drafter_tokens), router.discovery, router.fleet).add_to(clients)

    listener = listen(config.host, config.port)
    with listener, loop_watched("router"):
        bound = bind(clients, config.host, config.grpc_port, flag="--grpc-port", tls=tls, mutual=False)
        addresses, ports = f"gRPC {bound}", {_port(bound): most_connections(GRPC_SHARE)}
        if workers is not clients:
            apart = _bind_workers(workers, config, tls)
            addresses += f", workers {apart}"
            ports[_port(apart)] = most_connections(WORKER_SHARE)
        http_server = _HttpServer(router.app, tls, Connections(most_connections(HTTP_SHARE)))
        spare_what_is_there()  # before workers are taken in, who would wait meanwhile
        await router.start()
        for server in {clients, workers}:
            await server.start()
        http = asyncio.create_task(http_server.serve(sockets=[listener]))
        failed = asyncio.create_task(router.wait())
        crowding = asyncio.create_task(limit_connections(ports))
        try:
            url = f"{'http' if tls is None else 'https'}://{_address(listener)}"
            await _until_stopped(http_server, [http, failed, crowding], f"{url} ({addresses})")
        finally:
            failed.cancel()
            crowding.cancel()
            # It takes no new requests, gives those in progress a moment, then ends them.
            http_server.should_exit = True
            stops = [server.stop(STOP_GRACE_SECONDS) for server in {clients, workers}]
            await asyncio.gather(http, *stops, router.stop(STOP_GRACE_SECONDS))


def _bind_workers(server: grpc.aio.Server, config: RouterConfig, tls: Tls | None) -> str:
    """Opens a port for workers alone, because they show certificates and clients need none. Without an
    authority that signs these, only workers of this machine may come."""
    port = TLS_WORKER_PORT if config.worker_port is None else config.worker_port
    if tls is not None and not tls.mutual:
        return bind(server, LOOPBACK, port, flag="--worker-port")
    return bind(server, config.host, port, flag="--worker-port", tls=tls)


async def _until_stopped(http_server: _HttpServer, ends: list[asyncio.Task[None]], addresses: str) -> None:
    """Waits for a signal, or until one of `ends` is done, and raises what that one raised."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    listening, stopped = (asyncio.create_task(event.wait()) for event in (http_server.listening, stop))
    try:
        await asyncio.wait((listening, stopped, *ends), return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            print(f"outrider router ready: {addresses}", flush=True)
        done, _ = await asyncio.wait((stopped, *ends), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        listening.cancel()
        stopped.cancel()


class _HttpServer(uvicorn.Server):
    """uvicorn in a loop that is not its own: signals are ours, and it says when it listens."""

    def __init__(self, app: FastAPI, tls: Tls | None, connections: Connections) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(LimitedProtocol, connections),  # type: ignore[arg-type]
                ws="none",  # it would take the connection away from its limits
                log_config=None,
                log_level="error",  # a warning is what any client can cause, as often as it likes
                access_log=False,
                lifespan="off",
                ssl_context_factory=None if tls is None else lambda *_: tls.http_context(),
                # The router ends its sessions first, which ends their HTTP answers in an orderly way.
                timeout_graceful_shutdown=round(STOP_GRACE_SECONDS) + 1,
            )
        )
        self._connections = connections
        self.listening = asyncio.Event()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, but that connections count while their TLS handshake goes on, and that they
        are taken in small groups: asyncio takes as many as there are places in the queue before it looks at
        the first, and runs out of descriptors."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol: Any = config.http_protocol_class
        make = partial(
            protocol,
            config=config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        if config.ssl:
            make = partial(Handshake, self._connections, make, config.ssl)
        self.servers = [
            await loop.create_server(make, sock=listener, backlog=GROUP) for listener in sockets or ()
        ]
        for listener in sockets or ():
            listener.listen(BACKLOG)  # what waits in the system
        self.started = True
        self.listening.set()


def listen(host: str, port: int) -> socket.socket:
    """Returns the HTTP server's socket; its connections send what is written at once. Raises StartupError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno).lower() if error.errno else "the address cannot be had"
        raise StartupError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port or --host"
        ) from None
    # They inherit it. asyncio does not set it where, as here, the listener was made without naming TCP; then
    # an answer's body, the second of two writes, waits until the client has acknowledged the head: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
