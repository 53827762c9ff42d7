"""The model of a worker: loaded, checked and described."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from outrider.engine.checkpoint_config import check_asked
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, tokenizer_of
from outrider.engine.ranks import Ranks
from outrider.errors import PeerLost, StartupError
from outrider.options.engine import EngineOptions
from outrider.options.model_id import checkpoint_name
from outrider.telemetry.logs import in_force
from outrider.vocabulary import Reading
from outrider.wire.description import TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.worker.followers import FollowerProcesses, FollowerSpec, StartFollowers, device_of


async def load(
    role: Role,
    model: str,
    name: str,
    options: EngineOptions,
    start_followers: StartFollowers = FollowerProcesses,
    resting_threads: int | None = None,
    read_by: Callable[[TokenizerFiles], Reading | None] = lambda _: None,
    lender: tuple[str, TokenizerFiles] | None = None,
    max_model_len: int | None = None,
) -> tuple[Engine, TokenizerFiles, WorkerInfo]:
    """Returns the model with its description, loaded on a thread with progress lines.

    Divided among several processes, `start_followers` starts the others. `resting_threads`: as load_engine
    has it. `read_by` is asked, for the model's tokenizer, how it is to read another's tokens, if it is.
    `lender`: the target of a draft, whose embeddings and tokenizer it has where its checkpoint has none.
    `max_model_len`: what it is to be able to read; None = whatever it can. Raises StartupError."""
    label = f"outrider {role.name.lower()}"

    def progress(stage: str, share: float) -> None:
        print(f"{label}: {stage} {share:.0%}", flush=True)

    if options.tensor_parallel_size > 1 or max_model_len is not None:
        await asyncio.to_thread(check_asked, model, options.tensor_parallel_size, max_model_len)
    ranks, device = None, options.device
    if options.tensor_parallel_size > 1:
        ranks, device = Ranks.host(options.tensor_parallel_size), device_of(options.device, 0)
        specs = [
            FollowerSpec(
                replace(ranks.group, rank=rank),
                model,
                replace(options, device=device_of(device, rank)),
                logging=in_force(),
            )
            for rank in range(1, options.tensor_parallel_size)
        ]
        ranks.followers = start_followers(specs)
    loading = ThreadPoolExecutor(1, thread_name_prefix="loading")  # not one that lasts: see Engine.run
    try:
        # before the weights, which take long
        tokenizer = await asyncio.to_thread(tokenizer_of, model, lender[1] if lender else None)
        reading = await asyncio.to_thread(read_by, tokenizer)
        engine = await asyncio.get_running_loop().run_in_executor(
            loading,
            partial(
                load_engine,
                model,
                name=name,
                device=device,
                dtype=options.number_format,
                kv_memory_bytes=options.memory_for_kv,
                threads=options.threads,
                progress=progress,
                ranks=ranks,
                quantization=options.quantization,
                lora=options.lora,
                drafts=role is Role.DRAFTER,
                resting_threads=resting_threads,
                reading=reading,
                lender=lender[0] if lender else None,
            ),
        )
    except BaseException as error:
        if ranks is None:
            raise
        account = ranks.explain(error) if isinstance(error, PeerLost) else error
        ranks.close()
        if isinstance(account, PeerLost):
            raise StartupError(account.message) from error
        raise account from None
    finally:
        loading.shutdown(wait=False)
    # A name that tells people where to look; the incarnation makes it unique in time.
    incarnation = secrets.randbits(64)
    worker_id = f"{role.name.lower()}-{socket.gethostname()}-{checkpoint_name(model)}-{incarnation:016x}"
    identity = Identity(role, worker_id, incarnation, engine.info.fingerprint, tokenizer.hash)
    return (
        engine,
        tokenizer,
        WorkerInfo(identity, engine.info, engine.pool.num_blocks, engine.pool.block_size),
    )
