"""What somebody else has written in the place of a session's log, or of the books of all."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.store.logs import Append, Lead, Owner
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


@pytest.mark.parametrize("odd", ["9" * 40, "1e308", "abc", "nan", "-1", "", "1.5", str(10**15)])
@pytest.mark.parametrize("field", ["generation", "bytes", "booked"])
async def test_a_log_with_an_odd_number_is_written_again(store: RedisStore, field: str, odd: str) -> None:
    session_id, lead, owner = SessionId(bytes(16)), SessionId(b"l" * 16), Owner("router")
    log = Append(session_id, owner, 0, [b"one"])
    assert await store.logs.append([log], 60) == [1]
    await store._redis.hset(f"outrider:owner:{session_id.hex()}", field, odd)
    claim = await store.logs.claim(session_id)
    assert claim is None or claim.owner == owner
    assert await store.logs.append([Append(session_id, owner, 1, [b"two"])], 60) == [0]
    assert await store.logs.append([Append(session_id, owner, 0, [b"one", b"two"])], 60) == [2]
    await store._redis.hset(f"outrider:owner:{session_id.hex()}", field, odd)
    assert await store.logs.take(session_id, "another", 60) is None
    assert await store.logs.append([log, Append(lead, owner, 0, [b"first"])], 60) == [1, 1]
    await store._redis.hset(f"outrider:owner:{lead.hex()}", field, odd)
    assert await store.logs.take(session_id, "another", 60, Lead(lead, owner)) is not None
