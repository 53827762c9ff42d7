"""A Redis that has given its place to another: its address leads elsewhere, and it lives on as a replica.

A Kubernetes Service, a proxy or a name works like that: connections that are open stay where they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from outrider.errors import Unavailable
from outrider.store.logs import Append, Owner
from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.description import WorkerRecord
from outrider.wire.session import SessionId
from tests.redis_server import QUOTED_PASSWORD, RedisServer, passed_on

SESSION = SessionId(bytes(16))


class Address:
    """One address, for one Redis after the other."""

    def __init__(self, master: RedisServer, next_one: RedisServer) -> None:
        self.master, self._next = master, next_one
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await passed_on(reader, writer, self.master.port)

    async def fail_over(self) -> None:
        former, self.master = self.master, self._next
        at_former = RedisStore(parse_store_url(former.url))
        await at_former._redis.replicaof("127.0.0.1", str(self.master.port))
        await at_former.close()


@pytest.fixture
def redises() -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer() as one, RedisServer() as other:
        yield one, other


@pytest.fixture
async def address(redises: tuple[RedisServer, RedisServer]) -> AsyncIterator[Address]:
    address = Address(*redises)
    server = await asyncio.start_server(address.serve, "127.0.0.1", 0)
    address.port = server.sockets[0].getsockname()[1]
    yield address
    server.close()


@pytest.fixture
async def store(address: Address, ttl_seconds: float) -> AsyncIterator[RedisStore]:
    url = f"redis://:{QUOTED_PASSWORD}@127.0.0.1:{address.port}"
    made = RedisStore(parse_store_url(url), ttl_seconds)
    yield made
    await made.close()


async def test_a_worker_registers_with_the_one_that_has_taken_over(
    address: Address, store: RedisStore, record: Callable[..., WorkerRecord]
) -> None:
    await store.beat(record())
    await address.fail_over()
    with pytest.raises(Unavailable):
        await store.beat(record())
    await store.beat(record())
    at_new = RedisStore(parse_store_url(address.master.url))
    assert [worker_id for _, worker_id in await anext(at_new.workers())] == ["v"]
    await at_new.close()


async def test_a_router_writes_its_logs_there(address: Address, store: RedisStore) -> None:
    """It asks first whether the store can be written to, as it has nothing to write or the store was away."""
    append = Append(SESSION, Owner("r"), 0, [b"request"])
    assert await store.logs.append([append], 60) == [1]
    await address.fail_over()
    with pytest.raises(Unavailable):
        await store.logs.append((), 60)
    await store.logs.append((), 60)
    assert await store.logs.append([append], 60) == [1]
