"""What is asked of a Redis by many, or again and again: how little of it goes over how few connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.store.redis import MOST_CONNECTIONS, MOST_WORDS, RedisStore
from outrider.store.redis_listing import RECORDS_AT_ONCE, Listing
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from outrider.wire.hello import Role, WorkerKey
from outrider.wire.registry import RECORD
from tests.redis_server import RedisServer

Record = Callable[..., WorkerRecord]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
async def store(redis: RedisServer) -> AsyncIterator[RedisStore]:
    made = RedisStore(parse_store_url(redis.url), ttl_seconds=60)
    await made._redis.flushall()
    yield made
    await made.close()


def ids(records: Mapping[WorkerKey, WorkerRecord]) -> set[str]:
    return {worker_id for _, worker_id in records}


async def test_many_that_ask_at_once_share_a_few_connections(store: RedisStore) -> None:
    async def connections() -> int:
        return int((await store._redis.info("stats"))["total_connections_received"])

    before = await connections()
    await asyncio.gather(*(store.logs.append((), 60) for _ in range(10 * MOST_CONNECTIONS)))
    assert await connections() - before < MOST_CONNECTIONS


async def test_only_what_has_changed_is_read_again(
    store: RedisStore, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def counted(raw: bytes) -> WorkerRecord:
        read.append(raw)
        return RECORD.from_bytes(raw)

    monkeypatch.setattr("outrider.store.redis_listing.RECORD", SimpleNamespace(from_bytes=counted))
    listing = Listing(store._redis, store._asked, 60_000)
    for number in range(2 * RECORDS_AT_ONCE + 1):
        await store.beat(record(f"w{number}", incarnation=1))
    _, first = await listing.ask()
    assert len(first) == len(read) == 2 * RECORDS_AT_ONCE + 1
    await store.beat(record("w3", incarnation=1, running=5))
    _, same = await listing.ask()
    assert same is first and len(read) == len(first)
    await store.beat(record("w3", address="h:2"))
    await store.beat(record("new"))
    await store.leave(record("w4", incarnation=1).info.identity)
    _, later = await listing.ask()
    assert len(read) == len(first) + 2 and ids(later) == ids(first) - {"w4"} | {"new"}
    assert later[Role.VERIFIER, "w3"].address == "h:2"


async def test_a_redis_that_has_lost_a_change_does_not_hide_the_next(
    store: RedisStore, record: Record
) -> None:
    """As a replica that takes over: it may be a few words behind."""
    listing = Listing(store._redis, store._asked, 60_000)
    await store.beat(record("a"))
    await listing.ask()
    behind = await store._redis.get("outrider:mark")
    await store.beat(record("b"))
    _, both = await listing.ask()
    assert ids(both) == {"a", "b"}
    await store._redis.delete("outrider:worker:verifier:b")
    for name in ("outrider:workers", "outrider:alive"):
        await store._redis.zrem(name, "verifier:b")
    await store._redis.set("outrider:mark", behind)
    await store.beat(record("c"))
    _, found = await listing.ask()
    assert ids(found) == {"a", "c"}


async def test_words_to_many_workers_are_one_call(store: RedisStore, record: Record) -> None:
    calls: list[int] = []
    answer = store._answer

    async def counted(**asked: Any) -> Any:
        calls.append(len(asked["keys"]))
        return await answer(**asked)

    store._answer = counted  # type: ignore[assignment]
    workers = [record(f"w{each}") for each in range(MOST_WORDS + 100)]
    for worker in workers:
        await store.beat(worker)
    telling = [asyncio.create_task(store.answer(each.info.identity, "r", None)) for each in workers]
    await asyncio.sleep(0)
    telling[0].cancel()  # who tells for the others
    await asyncio.gather(*telling, return_exceptions=True)
    assert calls == [1, MOST_WORDS, 100], "its own is told once more, with the others"
    assert {(await store.beat(worker)).taken_in_by for worker in workers[1:]} == {("r",)}
