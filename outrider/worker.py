"""What a worker process does around its service: load, listen, register, serve until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc.aio

from outrider.registration import register
from outrider.rpc import STOP_GRACE_SECONDS, Identity
from outrider.wire.description import WorkerInfo


def say(line: str) -> None:
    """A line for the person (or supervisor) who started the process."""
    print(line, flush=True)


async def serve_until_stopped(
    server: grpc.aio.Server,
    info: WorkerInfo,
    address: str,
    router: str,
    background: Sequence[Coroutine[Any, Any, None]],
) -> None:
    """Serves, registered at the router, until SIGINT or SIGTERM.

    Prints the ready line once the router has taken the worker in. Raises what a background task raises, and
    PeerRefused with the router's sentence where the worker does not fit.
    """
    await server.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    announced = False
    role = info.identity.role.name.lower()

    def on_state(taken_in_by: Identity | None, reason: str) -> None:
        nonlocal announced
        if taken_in_by is None:
            say(f"outrider {role}: not registered at {router} ({reason}); trying again")
        elif not announced:
            announced = True
            say(_ready_line(info, address))

    say(f"outrider {role}: listening on {address}, registering at {router}")
    tasks = [asyncio.ensure_future(coroutine) for coroutine in background]
    tasks.append(asyncio.ensure_future(register(router, info, address, on_state=on_state)))
    stopped = asyncio.ensure_future(stop.wait())
    try:
        done, _ = await asyncio.wait([*tasks, stopped], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what ended it
    finally:
        for task in [*tasks, stopped]:
            task.cancel()
        await asyncio.gather(*tasks, stopped, return_exceptions=True)
        await server.stop(STOP_GRACE_SECONDS)


def _ready_line(info: WorkerInfo, address: str) -> str:
    model = info.model
    exact = "bit-exact" if model.bit_exact else "not bit-exact"
    size = f"{model.parameters / 1e6:.1f} M parameters"
    return (
        f"outrider {info.identity.role.name.lower()} ready: {address} "
        f"(model {model.name}, {size}, {model.device} {model.dtype}, {exact})"
    )
