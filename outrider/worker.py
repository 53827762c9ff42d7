"""What a worker process does around its service: load, listen, register, serve until it is told to stop."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Coroutine, Sequence
from pathlib import PurePath
from typing import Any

import grpc.aio

from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.registration import register
from outrider.rpc import STOP_GRACE_SECONDS, Identity, Role
from outrider.wire.description import TokenizerFiles, WorkerInfo


def say(line: str) -> None:
    """A line for the person (or supervisor) who started the process."""
    print(line, flush=True)


async def load(
    role: Role, model: str, name: str, device: str, dtype: str, kv_memory_bytes: int, threads: int
) -> tuple[Engine, TokenizerFiles, WorkerInfo]:
    """The model with its description, loaded on a thread with progress lines. Raises StartupError."""
    label = f"outrider {role.name.lower()}"

    def progress(stage: str, share: float) -> None:
        say(f"{label}: {stage} {share:.0%}")

    engine = await asyncio.to_thread(
        load_engine,
        model,
        name=name,
        device=device,
        dtype=dtype,
        kv_memory_bytes=kv_memory_bytes,
        threads=threads,
        progress=progress,
    )
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    # A name that tells people where to look; the incarnation makes it unique in time.
    incarnation = secrets.randbits(64)
    worker_id = f"{role.name.lower()}-{socket.gethostname()}-{PurePath(model).name}-{incarnation:016x}"
    identity = Identity(role, worker_id, incarnation, engine.info.fingerprint, tokenizer.hash)
    return (
        engine,
        tokenizer,
        WorkerInfo(identity, engine.info, engine.pool.num_blocks, engine.pool.block_size),
    )


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
