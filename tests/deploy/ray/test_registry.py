"""The store that is a deployment: what the way through Ray adds to tests/store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from deploy.registry import Registry, RegistryStore, present
from outrider.errors import Unavailable
from outrider.store.store import Answer, WorkerRecord
from outrider.wire.description import ModelInfo, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.wire.load import VerifierLoad


class Handle:
    """Calls the registry that is there at the moment, as Ray's handle would."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._registry, self._death = Registry(), asyncio.get_running_loop().create_future()

    def kill(self) -> None:
        self._death.set_exception(RayActorError())

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Awaitable[Any]:
            return self._call(name, *args)

        return SimpleNamespace(remote=remote)

    async def _call(self, name: str, *args: Any) -> Any:
        death, call = self._death, asyncio.ensure_future(getattr(self._registry, name)(*args))
        try:
            done, _ = await asyncio.wait((death, call), return_when=asyncio.FIRST_COMPLETED)
            return (death if death in done else call).result()
        finally:
            call.cancel()


def record(worker_id: str = "v", **load: float) -> WorkerRecord:
    identity = Identity(Role.VERIFIER, worker_id, 7, "weights", "tokens")
    model = ModelInfo("m", "weights", "Arch", 1, 2, 3, (4, 5), "cpu", "float32", True, 2)
    return WorkerRecord(WorkerInfo(identity, model, 6, 7), "h:1", VerifierLoad(**load))


@pytest.fixture
async def handle() -> Handle:
    return Handle()


async def next_of(watch: Any) -> set[str]:
    async with asyncio.timeout(120):
        return {worker_id for _, worker_id in await anext(watch)}


async def test_what_is_registered_is_heard_by_those_who_watch(handle: Handle) -> None:
    store = RegistryStore(handle)  # type: ignore[arg-type]
    watch = store.workers()
    assert await next_of(watch) == set()
    assert await store.beat(record()) == Answer()
    assert await next_of(watch) == {"v"}
    await store.answer(record().info.identity, "router", None)
    assert (await store.beat(record())).taken_in_by == ("router",)
    await store.leave(record().info.identity)
    assert await next_of(watch) == set()


async def test_loads_are_those_of_the_last_beat(handle: Handle) -> None:
    store = RegistryStore(handle)  # type: ignore[arg-type]
    await store.beat(record(draft_starvation=0.25))
    assert [found.load.draft_starvation for found in (await present(store)).values()] == [0.25]
    await store.beat(record(draft_starvation=0.5))
    assert [found.load.draft_starvation for found in (await present(store)).values()] == [0.5]


async def test_a_registry_that_comes_back_empty_takes_no_worker_from_a_router(handle: Handle) -> None:
    store = RegistryStore(handle)  # type: ignore[arg-type]
    await store.beat(record("first"))
    await store.beat(record("second"))
    watch = store.workers()
    assert await next_of(watch) == {"first", "second"}
    asked = asyncio.create_task(next_of(watch))
    handle.kill()
    with pytest.raises(Unavailable):
        await store.beat(record("first"))
    handle.start()
    await store.beat(record("first"))
    await asyncio.sleep(1)  # the watcher has asked again by now; the second worker's beat is yet to come
    await store.beat(record("second"))
    await store.beat(record("first"))
    assert await asked == {"first", "second"}


async def test_a_registry_that_is_gone_for_good_is_not_waited_for(
    handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handle waits until there is one again: a router that ends together with it must not."""
    monkeypatch.setattr(Registry, "leave", lambda *args: asyncio.sleep(3600))
    async with asyncio.timeout(120):
        with pytest.raises(Unavailable, match="the registry does not answer"):
            await RegistryStore(handle).leave(record().info.identity)  # type: ignore[arg-type]
