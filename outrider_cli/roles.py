"""The commands that run one role each. `serve` starts these very commands."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from outrider.defaults import NUM_SPECULATIVE_TOKENS
from outrider_cli import options
from outrider_cli.reporting import reported

ROOMS = ("outrider", "router", "verifier", "drafter")  # whose loggers are ours
API_KEYS = "OUTRIDER_API_KEYS"  # of the environment: the lines of the file that --api-keys would name
STORE = "OUTRIDER_STORE"  # of the environment: what --store would say, where nobody is to see its password


def router(
    host: options.HttpHost = "127.0.0.1",
    port: options.HttpPort = 8000,
    grpc_port: options.GrpcPort = 50051,
    num_speculative_tokens: options.NumSpeculativeTokens = NUM_SPECULATIVE_TOKENS,
    max_sessions: Annotated[
        int, typer.Option("--max-sessions", min=1, help="Most requests at a time; more are refused with 429.")
    ] = 256,
    session_ttl: options.SessionTtl = 600,
    seed: options.ServerSeed = None,
    store: options.RouterStore = None,
    worker_port: options.WorkerRegistryPort = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: options.Insecure = False,
    api_keys: options.ApiKeys = None,
    lock_step: options.LockStep = False,
    log_level: options.LogLevel = options.Level.WARNING,
) -> None:
    """Run a router: it takes requests, gives them to workers, and streams the answers."""
    _log_to_stderr(log_level)
    with reported("router"):
        from outrider.config import tls_files
        from router.config import RouterConfig
        from router.service import serve

        config = RouterConfig(
            host=host,
            port=port,
            grpc_port=grpc_port,
            store=store or os.environ.get(STORE),
            worker_port=worker_port,
            tls=tls_files(tls_cert, tls_key, tls_ca),
            insecure=insecure,
            api_keys=api_keys,
            api_key_lines=os.environ.get(API_KEYS) if api_keys is None else None,
            num_speculative_tokens=num_speculative_tokens,
            max_sessions=max_sessions,
            session_ttl=session_ttl,
            seed=seed,
            lock_step=lock_step,
        )
        asyncio.run(serve(config))


def verifier(
    target: options.Target,
    router: options.RouterAddress = None,
    store: options.WorkerStore = None,
    host: options.WorkerHost = "127.0.0.1",
    port: options.WorkerPort = 0,
    advertise: options.Advertise = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: options.Insecure = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name by which clients ask for it.", show_default="the checkpoint's own"),
    ] = None,
    device: options.Device = "cpu",
    dtype: options.DtypeOption = None,
    kv_memory: options.KvMemory = "1GiB",
    threads: options.Threads = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    max_batch_tokens: options.MaxBatchTokens = 512,
    prefill_chunk: options.PrefillChunk = 256,
    drain_seconds: options.DrainSeconds = options.DRAIN_SECONDS,
    lock_step: options.LockStep = False,
    log_level: options.LogLevel = options.Level.WARNING,
) -> None:
    """Run a verifier: it runs the target model and registers with a router, or in the routers' store."""
    _log_to_stderr(log_level)
    with reported("verifier"):
        from outrider.config import default_dtype, parse_memory, tls_files
        from verifier.config import VerifierConfig

        config = VerifierConfig(
            target=target,
            router=router,
            store=store or (os.environ.get(STORE) if router is None else None),
            host=host,
            port=port,
            advertise=advertise,
            tls=tls_files(tls_cert, tls_key, tls_ca),
            insecure=insecure,
            name=name,
            device=device,
            dtype=dtype.value if dtype else default_dtype(device),
            kv_memory_bytes=parse_memory(kv_memory),
            threads=_claim_threads(threads, tensor_parallel_size),
            tensor_parallel_size=tensor_parallel_size,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk=prefill_chunk,
            drain_seconds=drain_seconds,
            cache=_cache_folder(),
            lock_step=lock_step,
        )
        from verifier.service import serve

        asyncio.run(serve(config))


def drafter(
    draft: options.Draft = None,
    propose: options.Propose = None,
    router: options.RouterAddress = None,
    store: options.WorkerStore = None,
    host: options.WorkerHost = "127.0.0.1",
    port: options.WorkerPort = 0,
    advertise: options.Advertise = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: options.Insecure = False,
    device: options.Device = "cpu",
    dtype: options.DtypeOption = None,
    kv_memory: options.KvMemory = "1GiB",
    threads: options.Threads = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    max_batch_tokens: options.MaxBatchTokens = 512,
    prefill_chunk: options.PrefillChunk = 256,
    draft_quantization: options.DraftQuantization = None,
    branches: options.Branches = True,
    log_level: options.LogLevel = options.Level.WARNING,
) -> None:
    """Run a drafter: it guesses, mostly by a draft model, and registers with a router or in their store."""
    _log_to_stderr(log_level)
    with reported("drafter"):
        from drafter.config import DrafterConfig
        from outrider.config import default_dtype, parse_memory, tls_files

        config = DrafterConfig(
            draft=draft,
            propose=propose.value if propose else None,
            router=router,
            store=store or (os.environ.get(STORE) if router is None else None),
            host=host,
            port=port,
            advertise=advertise,
            tls=tls_files(tls_cert, tls_key, tls_ca),
            insecure=insecure,
            device=device,
            dtype=dtype.value if dtype else default_dtype(device),
            kv_memory_bytes=parse_memory(kv_memory),
            threads=_claim_threads(threads, tensor_parallel_size),
            tensor_parallel_size=tensor_parallel_size,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk=prefill_chunk,
            quantization=draft_quantization.value if draft_quantization else None,
            branches=branches,
        )
        from drafter.service import serve

        asyncio.run(serve(config))


def _log_to_stderr(level: options.Level) -> None:
    """Others' code is heard from warnings on: what it logs below may hold what was asked."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or each stranger's handshake would be a line
    for room in ROOMS:
        logging.getLogger(room).setLevel(level.upper())


def _cache_folder() -> Path | None:
    """Where this user's programs keep what they can find out again; None = the user has no such place."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    except RuntimeError:
        return None


def _claim_threads(threads: int | None, processes: int = 1) -> int:
    """The number of threads of each of so many processes, made known to the libraries that read it when torch
    is imported."""
    count = threads or max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)
    return count
