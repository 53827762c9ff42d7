"""The logs of sessions: one suite for every store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from outrider.errors import Superseded
from outrider.store.logs import Append, Claim, Lead, Owner, SessionLogs, Taken
from outrider.store.memory_logs import LOG_BYTES, MemorySessionLogs
from outrider.store.redis import RedisStore
from outrider.store.redis_logs import RedisSessionLogs
from outrider.store.url import parse_store_url
from outrider.wire.session import SessionId
from tests.redis_server import RedisServer

TTL = 100.0
ONE, OTHER = SessionId(b"\x01" * 16), SessionId(b"\xfe" * 16)
A, B = Owner("a"), Owner("b")


@pytest.fixture(params=["memory", "redis"])
async def logs(request: pytest.FixtureRequest, redis_of_all: RedisServer) -> AsyncIterator[SessionLogs]:
    if request.param == "memory":
        yield MemorySessionLogs()
        return
    store = RedisStore(parse_store_url(redis_of_all.url))
    await store._redis.flushall()
    yield store.logs
    await store.close()


def append(
    base: int, *records: bytes, owner: Owner = A, session: SessionId = ONE, tenant: str = ""
) -> Append:
    return Append(session, owner, base, records, tenant)


async def content(logs: SessionLogs, session: SessionId = ONE) -> bytes | None:
    taken = await logs.take(session, "reader", TTL)
    return None if taken is None else taken.content


async def test_what_is_appended_is_read_and_taken(logs: SessionLogs) -> None:
    assert await logs.append([append(0, b"request", b"\x00\xff")], TTL) == [2]
    assert await logs.append([append(2, b"", b"x" * 100_000, b"end")], TTL) == [5]
    assert (await logs.read(ONE), await logs.last(ONE)) == (b"request", b"end")
    assert await logs.last(OTHER) is None
    assert await logs.take(ONE, "b", TTL) == Taken(
        Owner("b", 1), 5, b"request\x00\xff" + b"x" * 100_000 + b"end"
    )
    assert await logs.read(ONE) == b"request"


async def test_whose_a_log_is_and_whether_it_is_cancelled_is_known(logs: SessionLogs) -> None:
    await logs.cancel(ONE)
    assert await logs.claim(ONE) is None, "a log does not begin by that"
    await logs.append([append(0, b"request")], TTL)
    assert await logs.claim(ONE) == Claim(append(0).owner, False)
    await logs.cancel(ONE)
    await logs.take(ONE, "b", TTL)
    assert await logs.claim(ONE) == Claim(Owner("b", 1), True)


async def test_many_logs_in_one_call_each_go_their_own_way(logs: SessionLogs) -> None:
    ids = [SessionId(bytes([n]) * 16) for n in range(100)]
    assert await logs.append([append(0, b"r", b"%d" % n, session=id) for n, id in enumerate(ids)], TTL) == (
        [2] * 100
    )
    await logs.take(ids[7], "b", TTL)
    wanted: list[int | None] = [3] * 100
    wanted[7], wanted[9] = None, 2
    appends = [append(2, b"!", session=id) for id in ids]
    appends[9] = append(5, b"a gap", session=ids[9])
    assert await logs.append(appends, TTL) == wanted
    assert await content(logs, ids[99]) == b"r99!"
    assert await content(logs, ids[9]) == b"r9"


async def test_no_appends_are_asked_for_without_harm(logs: SessionLogs) -> None:
    assert await logs.append([], TTL) == []


async def test_an_append_that_is_repeated_or_overlaps_is_made_once(logs: SessionLogs) -> None:
    await logs.append([append(0, b"0", b"1")], TTL)
    assert await logs.append([append(0, b"0", b"1")], TTL) == [2]
    assert await logs.append([append(1, b"1", b"2", b"3")], TTL) == [4]
    assert await logs.append([append(0, b"0")], TTL) == [4]  # the answer to a later one was lost
    assert await content(logs) == b"0123"


async def test_a_gap_is_refused_and_the_length_is_told(logs: SessionLogs) -> None:
    assert await logs.append([append(3, b"3")], TTL) == [0]
    assert await logs.read(ONE) is None
    await logs.append([append(0, b"0", b"1")], TTL)
    assert await logs.append([append(3, b"3")], TTL) == [2]
    assert await content(logs) == b"01"


async def test_only_the_owner_appends_and_who_takes_the_log_is_the_owner(logs: SessionLogs) -> None:
    await logs.append([append(0, b"0")], TTL)
    assert await logs.append([append(0, b"9", owner=B)], TTL) == [None]
    taken = await logs.take(ONE, "b", TTL)
    assert taken == Taken(Owner("b", 1), 1, b"0")
    assert await logs.append([append(1, b"1")], TTL) == [None]
    assert await logs.append([append(1, b"1", owner=taken.owner)], TTL) == [2]
    again = await logs.take(ONE, "a", TTL)
    assert again == Taken(Owner("a", 2), 2, b"01")
    assert await logs.append([append(2, b"2", owner=taken.owner)], TTL) == [None]
    assert await logs.append([append(2, b"2")], TTL) == [None], "what it was before it was taken from it"
    assert await logs.append([append(2, b"2", owner=again.owner)], TTL) == [3]


async def test_who_has_the_first_log_of_an_answer_may_take_its_others(logs: SessionLogs) -> None:
    await logs.append([append(0, b"first"), append(0, b"second", session=OTHER)], TTL)
    one, other = await logs.take(ONE, "one", TTL), await logs.take(ONE, "other", TTL)
    assert one is not None and other is not None
    with pytest.raises(Superseded):
        await logs.take(OTHER, "one", TTL, Lead(ONE, one.owner))
    assert await logs.claim(OTHER) == Claim(A, False)
    taken = await logs.take(OTHER, "other", TTL, Lead(ONE, other.owner))
    assert taken == Taken(Owner("other", 1), 1, b"second")
    with pytest.raises(Superseded):
        await logs.take(OTHER, "other", TTL, Lead(ONE, Owner("like", other.owner.generation)))


async def test_a_first_log_that_is_lost_or_of_before_a_loss_keeps_nobody_from_the_others(
    logs: SessionLogs,
) -> None:
    await logs.append([append(0, b"second", session=OTHER)], TTL)
    assert await logs.take(OTHER, "b", TTL, Lead(ONE, A)) == Taken(Owner("b", 1), 1, b"second")
    await logs.append([append(0, b"first")], TTL)
    assert await logs.take(OTHER, "c", TTL, Lead(ONE, Owner("c", 1))) is not None


async def test_after_a_loss_the_later_owner_has_it(logs: SessionLogs) -> None:
    """A Redis that lost its memory has forgotten the take, too."""
    later = Owner("b", 1)
    assert await logs.append([append(0, b"0", b"1", owner=A)], TTL) == [2]
    assert await logs.append([append(2, b"2", owner=later)], TTL) == [0], "it is to write all of it"
    assert await logs.append([append(0, b"01", b"2", owner=later)], TTL) == [2]
    assert await logs.append([append(2, b"3", owner=A)], TTL) == [None]
    assert await logs.append([append(2, b"3", owner=Owner("c", 1))], TTL) == [None]
    assert await content(logs) == b"012"


async def test_there_is_no_log_that_never_was(logs: SessionLogs) -> None:
    await logs.append([append(0, b"0")], TTL)
    assert await logs.take(OTHER, "b", TTL) is None
    assert await logs.read(OTHER) is None


async def test_a_log_lives_for_so_long_after_its_last_append_or_take(logs: SessionLogs) -> None:
    third = SessionId(b"\x03" * 16)
    await logs.append([append(0, b"0")], 0.5)
    await logs.append([append(0, b"0")], TTL)  # nothing new, but a sign of life
    await logs.append([append(0, b"0", session=third)], TTL)
    await logs.take(third, "b", 0.5)
    await logs.append([append(0, b"0", session=OTHER)], 0.5)
    for session in (OTHER, third):
        while await logs.read(session) is not None:  # noqa: ASYNC110 (an expiry tells nobody)
            await asyncio.sleep(0.01)
    assert await logs.read(ONE) == b"0"
    assert await logs.take(OTHER, "b", TTL) is None
    assert await logs.append([append(1, b"1", session=OTHER)], TTL) == [0]


async def test_a_log_that_is_asked_about_lives_on(logs: SessionLogs) -> None:
    third = SessionId(b"\x03" * 16)
    for session in (ONE, OTHER):
        await logs.append([append(0, b"0", b"1", session=session)], 2.0)
    asked = [append(2, session=ONE), append(2, session=third)]  # of one there is no log, and none begins
    assert await logs.append(asked, TTL) == [2, 0]
    while await logs.read(OTHER) is not None:  # noqa: ASYNC110 (an expiry tells nobody)
        await asyncio.sleep(0.01)
    assert await logs.claim(ONE) == Claim(A, False)
    assert await content(logs) == b"01"
    assert await logs.read(third) is None
    await logs.take(ONE, "b", TTL)
    assert await logs.append([append(2, session=ONE)], TTL) == [None]


async def test_a_redis_that_evicted_half_of_a_log_has_none(redis_of_all: RedisServer) -> None:
    store = RedisStore(parse_store_url(redis_of_all.url))
    for evicted in ("session", "owner"):
        await store._redis.flushall()
        await store.logs.append([append(0, b"0", b"1")], TTL)
        await store._redis.delete(f"outrider:{evicted}:{ONE.hex()}")
        assert await store.logs.take(ONE, "b", TTL) is None
        assert await store.logs.append([append(2, b"2")], TTL) == [0]
        assert await store.logs.append([append(0, b"0", b"1", b"2")], TTL) == [3]
        assert await content(store.logs) == b"012"
    await store.close()


def some(first: int, count: int) -> list[SessionId]:
    return [SessionId(bytes([n]) * 16) for n in range(first, first + count)]


@pytest.fixture(params=["memory", "redis"])
async def small(request: pytest.FixtureRequest, redis_of_all: RedisServer) -> AsyncIterator[SessionLogs]:
    """A store with room for 100,000 bytes of logs."""
    if request.param == "memory":
        yield MemorySessionLogs(100_000)
        return
    store = RedisStore(parse_store_url(redis_of_all.url))
    await store._redis.flushall()
    yield RedisSessionLogs(store._redis, store._asked, 100_000)
    await store.close()


async def test_the_logs_of_one_tenant_push_out_none_of_another(small: SessionLogs) -> None:
    mine, theirs = some(1, 3), some(100, 50)
    for id in mine:
        await small.append([append(0, b"x" * 1000, session=id, tenant="me")], TTL)
    for id in theirs:
        await small.append([append(0, b"y" * 10_000, session=id, tenant="them")], TTL)
        for n in range(3):  # one that is written to again and again is the newest
            await small.append([append(1 + n, b"y" * 3000, session=id, tenant="them")], TTL)
    assert [await small.read(id) is not None for id in mine] == [True] * 3
    kept = [await small.read(id) is not None for id in theirs]
    assert kept == sorted(kept) and 2 <= sum(kept) <= 4, "the newest of them, as many as there is room for"


async def test_who_comes_late_gets_an_even_share(small: SessionLogs) -> None:
    for id in some(1, 9):
        await small.append([append(0, b"x" * 5000, session=id, tenant="early")], TTL)
    for id in some(100, 9):
        await small.append([append(0, b"y" * 5000, session=id, tenant="late")], TTL)
    kept = [[await small.read(id) is not None for id in one] for one in (some(1, 9), some(100, 9))]
    assert all(one == sorted(one) for one in kept)
    assert abs(sum(kept[0]) - sum(kept[1])) <= 1 and sum(kept[0]) >= 4


async def test_a_taken_log_stays_its_tenants(small: SessionLogs) -> None:
    await small.append([append(0, b"x" * 5000, tenant="me")], TTL)
    taken = await small.take(ONE, "another router", TTL)
    assert taken is not None
    for id in some(100, 9):
        await small.append([append(0, b"y" * 20_000, session=id, tenant="them")], TTL)
    assert await small.append([append(1, b"x", owner=taken.owner, tenant="them")], TTL) == [2]


async def test_redis_keeps_no_books_of_what_is_gone(redis_of_all: RedisServer) -> None:
    store = RedisStore(parse_store_url(redis_of_all.url))
    redis = store._redis
    await redis.flushall()
    logs = RedisSessionLogs(redis, store._asked, 100_000)
    for id in some(1, 5):
        await logs.append([append(0, b"x" * 1000, session=id, tenant="me")], 2.0)
    await logs.append([append(1, session=some(1, 1)[0], tenant="me")], TTL)
    assert await redis.zscore("outrider:tenants", "me") == 5 * 6016
    while await redis.zcard("outrider:logs") > 2:
        await logs.append([append(0, b"x", session=OTHER, tenant="them")], TTL)
    assert await redis.zrange("outrider:tenants", 0, -1, withscores=True) == [(b"them", 5017), (b"me", 6016)]
    assert await redis.get("outrider:bytes") == b"11033"
    assert await redis.hlen("outrider:sizes") == 2
    await redis.delete("outrider:tenants", "outrider:sizes", "outrider:logs")  # by somebody else
    await logs.append([append(0, b"x" * 200_000, session=some(9, 1)[0])], TTL)
    assert int(await redis.get("outrider:bytes")) < 300_000
    await store.close()


async def test_a_redis_needs_no_more_than_the_books_say(redis_of_all: RedisServer) -> None:
    store = RedisStore(parse_store_url(redis_of_all.url))
    redis = store._redis
    for records, size in ((1, 300), (200, 20), (20, 2000)):
        await redis.flushall()
        before = (await redis.info("memory"))["used_memory"]
        await store.logs.append(
            [append(0, *[b"x" * size] * records, session=SessionId(n.to_bytes(16))) for n in range(300)], TTL
        )
        used = (await redis.info("memory"))["used_memory"] - before
        booked = int(await redis.get("outrider:bytes"))
        assert used / 1.3 < booked < used * 2.5, (records, size)
    await store.close()


async def test_in_memory_what_was_written_to_longest_ago_is_forgotten_first() -> None:
    logs = MemorySessionLogs(max_bytes=3 * (LOG_BYTES + 10))
    ids = [SessionId(bytes([n]) * 16) for n in range(4)]
    for id in ids[:3]:
        await logs.append([append(0, b"12345", session=id)], TTL)
    await logs.append([append(1, b"6789!", session=ids[0])], TTL)
    await logs.append([append(0, b"1234567890", session=ids[3])], TTL)
    assert [await logs.read(id) is not None for id in ids] == [True, False, True, True]
    assert logs.size == 2 * (LOG_BYTES + 10) + LOG_BYTES + 5
    assert await logs.append([append(1, b"6", session=ids[1])], TTL) == [0]


async def test_in_memory_nothing_is_left_of_what_expired() -> None:
    now = [0.0]
    logs = MemorySessionLogs(clock=lambda: now[0])
    for n in range(10):
        await logs.append([append(0, b"0", session=SessionId(bytes([n]) * 16))], 5.0)
    now[0] = 5.0
    assert await logs.read(ONE) is None
    assert (logs.size, logs._logs) == (0, {})
