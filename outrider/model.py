"""The model of a worker: loaded, checked and described."""

from __future__ import annotations

import asyncio
import secrets
import socket
from pathlib import PurePath

from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.rpc import Identity, Role
from outrider.wire.description import TokenizerFiles, WorkerInfo


async def load(
    role: Role, model: str, name: str, device: str, dtype: str, kv_memory_bytes: int, threads: int
) -> tuple[Engine, TokenizerFiles, WorkerInfo]:
    """The model with its description, loaded on a thread with progress lines. Raises StartupError."""
    label = f"outrider {role.name.lower()}"

    def progress(stage: str, share: float) -> None:
        print(f"{label}: {stage} {share:.0%}", flush=True)

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
