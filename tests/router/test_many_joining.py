"""Many workers that come to a router at once hold its loop for no longer than a few do."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from outrider.net.rpc import channel
from outrider.net.tasks import cancel
from outrider.store.memory import MemoryStore
from outrider.store.store import WorkerRecord
from outrider.wire.hello import Role
from router import worker_discovery as discovery_module
from router.fleet import Fleet
from router.metrics import Metrics
from router.worker_discovery import MOST_JOINING, WorkerDiscovery


async def test_connections_to_workers_that_come_all_at_once_are_made_a_few_at_a_time(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, looks, made = await rig.worker(Role.DRAFTER, "d"), [0], Counter[int]()

    def connect(*about: Any, **how: Any) -> Any:
        made[looks[0]] += 1
        return channel(*about, **how)

    async def look() -> None:
        while True:
            looks[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(discovery_module, "channel", connect)
    store = MemoryStore(ttl_seconds=1000)
    for number in range(10 * MOST_JOINING):
        identity = replace(worker.info.identity, worker_id=f"d{number}")
        await store.beat(WorkerRecord(replace(worker.info, identity=identity), "127.0.0.1:1"))
    discovery = WorkerDiscovery(store, Fleet(Metrics(), clock=lambda: 1.0), rig.identity("another"))
    tasks = [asyncio.create_task(discovery.run()), asyncio.create_task(look())]
    await rig.until(lambda: made.total() >= 10 * MOST_JOINING)
    await cancel(tasks)
    assert max(made.values()) <= MOST_JOINING


async def test_workers_are_spared_by_the_garbage_collector_as_the_fleet_grows_and_not_as_it_changes(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spared: list[int] = []
    monkeypatch.setattr(discovery_module, "SPARED_AT_ONCE", 2)
    monkeypatch.setattr(discovery_module, "TICK_SECONDS", 3600.0)  # it does not come to rest
    monkeypatch.setattr(discovery_module, "spare_newcomers", lambda: spared.append(len(rig.fleet.drafters)))
    await rig.verifier()
    assert spared == []
    drafters = [await rig.drafter(f"d{number}") for number in range(2)]
    assert spared == [1]  # two workers
    drafters[0].registration.cancel()
    await rig.until(lambda: len(rig.fleet.drafters) == 1)
    await rig.drafter("another")
    assert spared == [1]  # as many as there were before
    await rig.drafter("third")
    assert spared == [1, 3]


async def test_once_the_fleet_has_come_to_rest_what_came_last_is_spared_too(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spared: list[int] = []
    monkeypatch.setattr(discovery_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(discovery_module, "spare_newcomers", lambda: spared.append(len(rig.fleet.drafters)))
    await rig.verifier()
    drafter = await rig.drafter()
    await rig.until(lambda: bool(spared) and spared[-1] == 1)
    before = len(spared)
    drafter.registration.cancel()
    await rig.until(lambda: not rig.fleet.drafters)
    await rig.drafter("another")
    await asyncio.sleep(0.2)
    assert len(spared) == before  # as many as there were before
