"""What every store does: one suite for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from outrider.errors import IdInUse
from outrider.store.memory import MemoryStore
from outrider.store.redis import RedisStore
from outrider.store.store import Answer, Store
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from outrider.wire.hello import Role
from outrider.worker.registration import register
from tests.redis_server import RedisServer

TTL_SECONDS = 3.0  # less, and a busy machine lets a record expire that is renewed
WORD_SECONDS = 3.0
Record = Callable[..., WorkerRecord]


@pytest.fixture(params=["memory", "redis"])
async def stores(
    request: pytest.FixtureRequest, redis_of_all: RedisServer, ttl_seconds: float
) -> AsyncIterator[tuple[Store, Store]]:
    """A store as two processes reach it; the one in memory is reached by one alone."""
    if request.param == "memory":
        store = MemoryStore(ttl_seconds, word_seconds=WORD_SECONDS)
        yield store, store
        return
    url = parse_store_url(redis_of_all.url)
    one, other = (RedisStore(url, ttl_seconds, word_seconds=WORD_SECONDS) for _ in range(2))
    await one._redis.flushall()
    yield one, other
    await one.close()
    await other.close()


class Watch:
    """What a store's `workers` says, one by one."""

    def __init__(self, store: Store) -> None:
        self._said = store.workers()

    async def next(self) -> dict[str, Any]:
        return {worker_id: record for (_, worker_id), record in (await anext(self._said)).items()}

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._said.aclose()  # type: ignore[attr-defined]


async def test_a_record_comes_as_it_was_given(stores: tuple[Store, Store], record: Record) -> None:
    store, other = stores
    given = record("v", running=3, waiting=1, kv_usage=0.25, step_seconds=0.125, draining=True)
    async with Watch(other) as watch:
        assert await watch.next() == {}
        await store.beat(given)
        assert await watch.next() == {"v": given}
    async with Watch(store) as late:
        assert await late.next() == {"v": given}


async def test_what_changes_is_said_but_not_a_beat_or_a_load(
    stores: tuple[Store, Store], record: Record
) -> None:
    store, other = stores
    async with Watch(other) as watch:
        await store.beat(record("a", incarnation=1))
        assert await watch.next() == {"a": record("a", incarnation=1)}
        await store.beat(record("a", incarnation=1))
        await store.beat(record("a", incarnation=1, running=9))
        await store.beat(record("b"))
        heard = await watch.next()
        assert (heard["a"].address, heard["b"]) == ("h:1", record("b"))
        await store.beat(record("a", address="h:2"))
        assert await watch.next() == {"a": record("a", address="h:2"), "b": record("b")}
        await store.leave(record("b").info.identity)
        assert await watch.next() == {"a": record("a", address="h:2")}


@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_a_worker_that_stops_beating_is_gone_and_one_that_beats_is_not(
    stores: tuple[Store, Store], record: Record
) -> None:
    store, other = stores

    async def beat() -> None:
        while True:
            await store.beat(record("lively"))
            await asyncio.sleep(TTL_SECONDS / 5)

    beating = asyncio.create_task(beat())
    async with Watch(other) as watch:
        while "lively" not in await watch.next():
            pass
        for _ in range(2):  # a ttl each
            await store.beat(record("silent"))
            assert (await watch.next()).keys() == {"lively", "silent"}
            assert (await watch.next()).keys() == {"lively"}
    beating.cancel()


async def test_a_new_incarnation_takes_the_place_of_the_former_and_of_what_it_was_told(
    stores: tuple[Store, Store], record: Record
) -> None:
    store, other = stores
    first, second = record("v", incarnation=1), record("v", incarnation=2)
    async with Watch(other) as watch:
        await store.beat(first)
        assert await watch.next() == {"v": first}
        await other.answer(first.info.identity, "router", None)
        assert await store.beat(first) == Answer(("router",))
        assert await store.beat(second) == Answer()
        assert await watch.next() == {"v": second}
        await other.answer(first.info.identity, "router", "too late")
        assert await store.beat(second) == Answer()
        await store.leave(first.info.identity)
        async with Watch(other) as late:
            assert await late.next() == {"v": second}
        await store.leave(second.info.identity)
        assert await watch.next() == {}


async def test_two_that_live_with_one_id_do_not_take_it_from_one_another(
    stores: tuple[Store, Store], record: Record
) -> None:
    """As copies of one image may, or of one process."""
    store, other = stores
    greatest = 2**64 - 1  # more than a Lua number holds
    former, one = record("v", incarnation=9), record("v", incarnation=greatest, address="h:1")
    await store.beat(former)
    await store.beat(one)
    for copy in (
        former,
        record("v", incarnation=greatest - 1),
        record("v", incarnation=greatest, address="h:2"),
    ):
        with pytest.raises(IdInUse, match="another process has the id of this verifier, v, and lives"):
            await other.beat(copy)
    assert await anext(other.workers()) == {(Role.VERIFIER, "v"): one}
    await store.leave(one.info.identity)
    await other.beat(former)
    assert await anext(other.workers()) == {(Role.VERIFIER, "v"): former}


async def test_workers_of_two_roles_may_have_one_name(stores: tuple[Store, Store], record: Record) -> None:
    store, other = stores
    verifier, drafter = record("v"), record("v", role=Role.DRAFTER)
    await store.beat(verifier)
    await other.answer(verifier.info.identity, "router", None)
    assert await store.beat(drafter) == Answer()
    both = await anext(other.workers())
    assert both == {(Role.VERIFIER, "v"): verifier, (Role.DRAFTER, "v"): drafter}
    await store.leave(drafter.info.identity)
    assert await anext(other.workers()) == {(Role.VERIFIER, "v"): verifier}
    assert await store.beat(verifier) == Answer(("router",))


async def test_a_live_record_belongs_to_who_made_it(stores: tuple[Store, Store], record: Record) -> None:
    store, other = stores
    mine, renewed, theirs = (record("v", incarnation=n, address=f"h:{n}") for n in (1, 2, 3))
    await store.beat(mine, "me")
    for caller in ("them", ""):
        for same in (mine, theirs):
            with pytest.raises(IdInUse, match="the verifier v is registered with another certificate"):
                await other.beat(same, caller)
            with pytest.raises(IdInUse):
                await other.leave(same.info.identity, caller)
    assert await anext(other.workers()) == {(Role.VERIFIER, "v"): mine}
    await other.beat(renewed, "me")  # started anew, through whichever router
    assert await anext(store.workers()) == {(Role.VERIFIER, "v"): renewed}
    await other.leave(renewed.info.identity, "me")
    await other.beat(theirs, "them")
    assert await anext(store.workers()) == {(Role.VERIFIER, "v"): theirs}


async def test_a_worker_whose_id_is_in_use_goes_on_and_gets_it_later(
    stores: tuple[Store, Store], record: Record
) -> None:
    """By a store as by a router: it had ended, and whoever may register could take the ids of drafters in the
    moment in which a Redis had lost its memory."""
    store, other = stores
    mine, theirs = record("v", incarnation=2), record("v", incarnation=1)
    await store.beat(theirs, "them")
    states = asyncio.Queue[tuple[str | None, str]]()
    registering = asyncio.create_task(
        register(other, lambda: mine, on_state=lambda *state: states.put_nowait(state))
    )
    router, why = await states.get()
    assert router is None and "is registered with another certificate" in why
    async with Watch(store) as watch:
        assert await watch.next() == {"v": theirs}
        await store.leave(theirs.info.identity, "them")
        while await watch.next() != {"v": mine}:
            pass
    registering.cancel()
    await asyncio.gather(registering, return_exceptions=True)


async def test_a_worker_hears_what_each_router_said_last(stores: tuple[Store, Store], record: Record) -> None:
    store, other = stores
    worker = record()
    identity = worker.info.identity
    await other.answer(identity, "r1", "nobody is there")
    assert await store.beat(worker) == Answer()
    await other.answer(identity, "r2", None, "cannot reach it")
    await store.answer(identity, "r1", None)
    assert await store.beat(worker) == Answer(("r1",), None, "cannot reach it")
    await other.answer(identity, "r2", None)
    assert await store.beat(worker) == Answer(("r1", "r2"))
    await store.answer(identity, "r1", "it is “green”\n")
    assert await other.beat(worker) == Answer(("r2",), "it is “green”\n")


async def test_the_word_of_a_router_that_is_gone_is_forgotten(
    stores: tuple[Store, Store], record: Record
) -> None:
    """Routers come and go under new names while a worker stays."""
    store, other = stores
    worker = record()
    await store.beat(worker)
    for router in ("gone", "lively"):
        await other.answer(worker.info.identity, router, None)
    assert (await store.beat(worker)).taken_in_by == ("gone", "lively")
    while (answer := await store.beat(worker)).taken_in_by != ("lively",):
        assert "lively" in answer.taken_in_by
        await other.answer(worker.info.identity, "lively", None)
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("ttl_seconds", [TTL_SECONDS])
async def test_a_record_that_expired_has_forgotten_what_it_was_told(
    stores: tuple[Store, Store], record: Record
) -> None:
    store, other = stores
    async with Watch(other) as watch:
        await store.beat(record())
        assert (await watch.next()).keys() == {"v"}
        await other.answer(record().info.identity, "router", None)
        assert await watch.next() == {}
    await other.answer(record().info.identity, "router", None)
    assert await store.beat(record()) == Answer()


async def test_all_who_watch_hear_it(stores: tuple[Store, Store], record: Record) -> None:
    store, other = stores
    async with Watch(store) as one, Watch(store) as two, Watch(other) as three:
        for watch in (one, two, three):
            assert await watch.next() == {}
        await store.beat(record())
        for watch in (one, two, three):
            assert (await watch.next()).keys() == {"v"}
