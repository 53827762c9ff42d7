"""A router as a part of another process: no sockets of its own, one store with others of its kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from outrider.errors import Unavailable
from outrider.sampling.params import SamplingParams
from outrider.store.memory import MemoryStore
from outrider.v1 import verifier_pb2
from outrider.wire.hello import Role
from outrider.wire.session import SessionParams
from router.requests import GenerationRequest, TokensCommitted
from router.router import Router
from tests.router.asking import first_step

REQUEST = GenerationRequest("m", SessionParams((5, 6), SamplingParams(seed=1), 20))


@asynccontextmanager
async def running(store: MemoryStore) -> AsyncIterator[Router]:
    router = Router(store, num_speculative_tokens=4, max_sessions=4)
    await router.start()
    try:
        yield router
    finally:
        await router.stop(0)


async def test_a_worker_is_served_by_every_router_of_its_store(rig: Any) -> None:
    store = MemoryStore(ttl_seconds=1000)
    worker = await rig.worker(Role.VERIFIER, "v")
    async with running(store) as one, running(store) as other:
        await store.beat(worker.record())
        for router in (one, other):
            await rig.until(router.sessions.ready)
            async with aclosing(router.sessions.run(REQUEST)) as session:
                first = asyncio.ensure_future(first_step(session))
                opened = await worker.next_command("open")
                step = verifier_pb2.Committed(session_id=opened.session_id, base=2, tokens=[7])
                # Both streams take what is said here from one box: an empty event lets the other come first.
                while not first.done():
                    worker.say(committed=[step])
                    await asyncio.wait((first,), timeout=0.05)
                assert first.result() == TokensCommitted((7,), 0, 0)
            await worker.next_command("close")
        told = (await store.beat(worker.record())).taken_in_by
        assert set(told) == {one.identity.worker_id, other.identity.worker_id}


async def test_sessions_hear_that_it_stops(rig: Any) -> None:
    store = MemoryStore(ttl_seconds=1000)
    worker = await rig.worker(Role.VERIFIER, "v")
    await store.beat(worker.record())
    async with running(store) as router:
        await rig.until(router.sessions.ready)
        session = router.sessions.run(REQUEST)
        first = asyncio.ensure_future(first_step(session))
        await worker.next_command("open")
    with pytest.raises(Unavailable, match="the service is stopping"):
        await first


async def test_a_verifier_that_drains_makes_it_unready(rig: Any) -> None:
    worker = await rig.verifier()
    assert rig.sessions.ready()
    worker.say(load=verifier_pb2.VerifierLoad(draining=True))
    await rig.until(lambda: not rig.sessions.ready())
