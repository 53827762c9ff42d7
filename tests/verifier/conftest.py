"""A verifier with a model, serving on loopback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.net.rpc import bind, channel, new_server
from outrider.options.engine import StepLimits
from outrider.v1 import verifier_pb2_grpc
from outrider.wire.description import TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from tests.tiny_models import build
from tests.verifier.talk import Running
from verifier.service import VerifierService
from verifier.stepper import Stepper

Loaded = tuple[Engine, TokenizerFiles]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = str(build("llama", tmp_path_factory.mktemp("target")))
    return load_engine(folder, threads=1, kv_memory_bytes=2**24), load_tokenizer(folder)


@pytest.fixture
async def verifier(loaded: Loaded) -> AsyncIterator[Running]:
    engine, tokenizer = loaded
    engine.pool = BlockPool(engine.pool.num_blocks, engine.pool.block_size)  # with nothing of others in it
    identity = Identity(Role.VERIFIER, "v", 1, engine.info.fingerprint, tokenizer.hash)
    service = VerifierService(WorkerInfo(identity, engine.info, engine.pool.num_blocks, 16), tokenizer)
    stepper = Stepper(engine, StepLimits(), service.on_step, time.monotonic)
    service.use(stepper)
    server = new_server()
    service.add_to(server)
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    steps = asyncio.create_task(stepper.run())
    async with channel(address) as connection:
        yield Running(service, stepper, verifier_pb2_grpc.VerifierStub(connection), identity, connection)
    if steps.done():
        steps.result()  # raises what ended them
    steps.cancel()
    await server.stop(0)
