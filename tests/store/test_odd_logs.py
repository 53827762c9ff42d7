"""What somebody else has written in the place of a session's log, or of the books of all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.store.logs import Append, Owner
from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.wire.session import SessionId
from tests.redis_server import RedisServer


@pytest.fixture
async def store(redis_of_all: RedisServer) -> AsyncIterator[RedisStore]:
    made = RedisStore(parse_store_url(redis_of_all.url))
    await made._redis.flushall()
    yield made
    await made.close()


async def test_a_sum_that_redis_cannot_count_on_with_is_taken_away(store: RedisStore) -> None:
    for number, odd in enumerate(("9" * 20, str(2**63 - 1), str(-(2**63)), "007", "-0", "1.5", "")):
        await store._redis.set("outrider:bytes", odd)
        log = Append(SessionId(bytes([number]) * 16), Owner("router"), 0, [b"record"])
        assert await store.logs.append([log], 60) == [1], odd


async def test_what_is_no_log_is_none(store: RedisStore) -> None:
    session_id = SessionId(bytes(16))
    await store._redis.hset(
        f"outrider:owner:{session_id.hex()}", mapping={"name": b"\xff", "generation": "x"}
    )
    await store._redis.xadd(f"outrider:session:{session_id.hex()}", {"odd": "1"}, id="1-0")
    assert await store.logs.claim(session_id) is None
    assert await store.logs.last(session_id) is None and await store.logs.read(session_id) is None
