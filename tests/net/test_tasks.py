"""Tasks end when they are told to, whatever the libraries make of it that they call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn

import pytest

from drafter.link import VerifierLink
from outrider.errors import Unavailable
from outrider.net.tasks import propagate_cancel
from outrider.store.memory import MemoryStore
from outrider.wire.hello import Identity, Role
from outrider.worker.registration import register
from router import worker_discovery as discovery_module
from router.fleet import Fleet
from router.metrics import Metrics
from router.worker_discovery import WorkerDiscovery
from tests.drafter.test_link import draft_session
from tests.router.conftest import ROUTER, rig, ttl_seconds

__all__ = ["rig", "ttl_seconds"]


class Deaf:
    """A call that fails in the moment in which it is cancelled, and tells of the failure: gRPC's may."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def __call__(self, *_: object) -> NoReturn:
        self.called.set()
        try:
            await asyncio.Event().wait()
            raise AssertionError("nobody sets it")
        except asyncio.CancelledError:
            raise Unavailable("it has failed just now") from None

    async def ends(self, running: Coroutine[Any, Any, object]) -> bool:
        """Returns True if the running call ends as cancelled. Never returns if the call goes on."""
        task = asyncio.create_task(running)
        await self.called.wait()
        task.cancel()
        await asyncio.wait((task,))
        return task.cancelled()


async def result() -> int:
    return 5


async def failure() -> int:
    raise Unavailable("as always")


async def timeout() -> int:
    async with asyncio.timeout(0):
        await asyncio.Event().wait()
    raise AssertionError("it is over")


async def test_without_a_cancellation_it_is_what_it_waits_for() -> None:
    assert await propagate_cancel(result()) == 5
    with pytest.raises(Unavailable):
        await propagate_cancel(failure())
    with pytest.raises(TimeoutError):
        await propagate_cancel(timeout())


async def test_a_timeout_around_it_is_one() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await propagate_cancel(Deaf()())


@pytest.mark.parametrize("late", [result, failure])
async def test_a_cancellation_that_is_lost_inside_is_heeded(late: Callable[[], Awaitable[int]]) -> None:
    begun = asyncio.Event()

    async def deaf() -> int:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await late()

    task = asyncio.create_task(propagate_cancel(deaf()))
    await begun.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


async def test_a_router_lets_go_of_a_worker(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf, store = Deaf(), MemoryStore()
    monkeypatch.setattr(discovery_module, "fetch_tokenizer", deaf)
    await store.beat((await rig.worker(Role.VERIFIER, "v")).record())
    fleet = Fleet(Metrics(), clock=lambda: 0.0)
    assert await deaf.ends(WorkerDiscovery(store, fleet, ROUTER).run())


async def test_a_worker_leaves(rig: Any) -> None:
    deaf = Deaf()

    class Registrar:
        beat = deaf
        left = False

        async def leave(self, identity: Identity) -> None:
            self.left = True

    registrar = Registrar()
    assert await deaf.ends(register(registrar, (await rig.worker(Role.VERIFIER, "v")).record))  # type: ignore[arg-type]
    assert registrar.left


async def test_a_drafter_lets_go_of_a_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = Deaf()
    monkeypatch.setattr(VerifierLink, "_speculate", lambda _: deaf())
    link = VerifierLink("127.0.0.1:1", Identity(Role.DRAFTER, "d", 1), print, print, print, time.monotonic)
    link.add(draft_session())
    await deaf.called.wait()
    await link.close()
