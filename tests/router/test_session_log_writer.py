"""The session log writer on a real Redis: what it costs, and what a Redis that goes away cannot do to it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import Unavailable, UnknownSession
from outrider.store.logs import Append
from outrider.store.memory_logs import MemorySessionLogs
from outrider.wire.session import FinishReason, new_session_id
from router import session_log_writer as log_writer_module
from router.held_logs import CLOSED_BYTES
from router.transcript import Transcript
from tests.redis_server import RedisServer
from tests.router.log_writers import commit, cursors, metric, store_of, taken, transcript, until, writing


@pytest.fixture(scope="module")
def redis_of_all() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One of the test's own, to be maltreated."""
    with RedisServer() as server:
        yield server


async def test_a_step_of_all_sessions_is_one_command(redis_of_all: RedisServer) -> None:
    async with store_of(redis_of_all) as store, writing(store.logs) as log_writer:
        opened = cursors(log_writer, 64)
        await log_writer.flush()

        async def calls() -> dict[str, int]:
            stats: Any = await store._redis.info("commandstats")
            by_client = {
                name for name in stats if "eval" in name or name in ("cmdstat_ping", "cmdstat_script|load")
            }
            return {name: stats[name]["calls"] for name in by_client}

        before = await calls()
        for step in range(10):
            for cursor in opened:
                commit(cursor.transcript)
                log_writer.note(cursor)
            await log_writer.flush()
            assert [cursor.written for cursor in opened] == [step + 2] * 64
        after = await calls()
        assert after.pop("cmdstat_evalsha") - before.pop("cmdstat_evalsha") == 10
        assert after == before
        assert (await taken(store.logs, opened[-1])).output == list(range(10))


async def test_steps_soon_after_one_another_are_written_together_but_for_what_somebody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Noting(MemorySessionLogs):
        appends = 0

        async def append(self, appends: Any, ttl_seconds: float) -> list[int | None]:
            self.appends += 1
            return await super().append(appends, ttl_seconds)

    logs = Noting()
    async with writing(logs) as log_writer:
        (cursor,) = cursors(log_writer, 1)
        await asyncio.wait_for(cursor.begun.wait(), 10)
        before = logs.appends
        for _ in range(400):
            commit(cursor.transcript)
            log_writer.note(cursor)
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # in which the writer would have written
        assert logs.appends - before < 100
        await until(lambda: cursor.written == 401)
        monkeypatch.setattr(log_writer_module, "GATHERED_SECONDS", 1000.0)
        for wanted in (log_writer.flush, lambda: log_writer.close(cursor)):
            for _ in range(2):  # the first may have been waited for yet
                commit(cursor.transcript)
                log_writer.note(cursor)
                for _ in range(20):
                    await asyncio.sleep(0)
            assert cursor.written < cursor.transcript.length
            done = wanted()
            if done is not None:
                await asyncio.wait_for(done, 30)
            await until(lambda: cursor.written == cursor.transcript.length)


async def test_what_comes_while_it_writes_goes_together_with_the_next(redis_of_all: RedisServer) -> None:
    class Slow(MemorySessionLogs):
        def __init__(self) -> None:
            super().__init__()
            self.may, self.appends = asyncio.Semaphore(0), list[list[Append]]()

        async def append(self, appends: Any, ttl_seconds: float) -> list[int | None]:
            self.appends.append(list(appends))
            await self.may.acquire()
            return await super().append(appends, ttl_seconds)

    logs = Slow()
    async with writing(logs) as log_writer:
        (cursor,) = cursors(log_writer, 1)
        await until(lambda: logs.appends)
        for _ in range(100):
            commit(cursor.transcript)
            log_writer.note(cursor)
            await asyncio.sleep(0)
        logs.may.release()
        logs.may.release()
        await log_writer.flush()
        assert [[len(one.records) for one in appends] for appends in logs.appends] == [[1], [100]]


class Held(MemorySessionLogs):
    """Nothing is written before `may` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = asyncio.Event(), asyncio.Event()

    async def append(self, appends: Any, ttl_seconds: float) -> list[int | None]:
        self.asked.set()
        await self.may.wait()
        return await super().append(appends, ttl_seconds)


async def test_a_session_has_begun_once_its_request_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer_module, "BEGUN_SECONDS", 1000.0)
    logs = Held()
    async with writing(logs) as log_writer:
        (cursor,) = cursors(log_writer, 1)
        begun = asyncio.create_task(log_writer.begun(cursor.session_id))
        await logs.asked.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not begun.done()
        logs.may.set()
        await begun
        assert await logs.read(cursor.session_id) is not None
        await log_writer.begun(cursor.session_id)  # and it stays so
        await log_writer.begun(new_session_id())


async def test_a_slow_store_does_not_hold_a_session_back_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer_module, "BEGUN_SECONDS", 0.01)
    logs = Held()
    async with writing(logs) as log_writer:
        (cursor,) = cursors(log_writer, 1)
        await log_writer.begun(cursor.session_id)
        assert cursor.written == 0


async def test_a_store_that_is_away_does_not_hold_sessions_back(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those that wait when that is noticed, nor those that come after."""
    monkeypatch.setattr(log_writer_module, "BEGUN_SECONDS", 1000.0)
    async with store_of(redis) as store, writing(store.logs) as log_writer:
        redis.kill()
        (before,) = cursors(log_writer, 1)
        await log_writer.begun(before.session_id)
        assert log_writer.degraded
        (after,) = cursors(log_writer, 1)
        await log_writer.begun(after.session_id)
        assert before.written == after.written == 0


@pytest.mark.parametrize("hang", [False, True])
async def test_a_redis_that_is_away_keeps_nobody_waiting_and_is_caught_up_when_it_is_back(
    redis: RedisServer, hang: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with store_of(redis) as store, writing(store.logs) as log_writer:
        live, ending, idle = cursors(log_writer, 3)
        await log_writer.flush()
        redis.signal(signal.SIGSTOP) if hang else redis.kill()
        turns = 0
        while not log_writer.degraded:
            commit(live.transcript)
            log_writer.note(live)
            commit(ending.transcript)
            log_writer.note(ending)
            await asyncio.sleep(0)  # nothing to wait for but the others' turn
            turns += 1
            if hang:
                await asyncio.sleep(0.01)
        assert metric(log_writer, "outrider_store_degraded") == 1
        ending.transcript.end = FinishReason.LENGTH
        log_writer.note(ending)
        log_writer.close(ending)
        assert live.written == 1
        with pytest.raises(Unavailable):
            await log_writer.take(new_session_id())
        redis.signal(signal.SIGCONT) if hang else redis.start()
        await log_writer.flush()
        assert (live.transcript.output_tokens, ending.transcript.output_tokens) == (turns, turns)
        await until(lambda: not log_writer.degraded)
        assert metric(log_writer, "outrider_store_degraded") == 0
        for cursor in (live, ending):
            found = await taken(store.logs, cursor)
            assert (found.output, found.end) == (cursor.transcript.output, cursor.transcript.end)
        if not hang:
            assert await store.logs.read(idle.session_id) is None, "a Redis without memory has lost it"
            commit(idle.transcript)
            log_writer.note(idle)
            await log_writer.flush()
        assert (await taken(store.logs, idle)).output == idle.transcript.output
    said = [record.getMessage() for record in caplog.records if record.name == "router.session_log_writer"]
    assert len(said) == 2 and "cannot be reached" in said[0] and "is back" in said[1]


async def test_it_notices_that_the_store_is_away_though_it_has_nothing_to_write(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer_module, "PROBE_SECONDS", 0.05)
    async with store_of(redis) as store, writing(store.logs) as log_writer:
        redis.kill()
        await until(lambda: log_writer.degraded)
        redis.start()
        await until(lambda: not log_writer.degraded)


async def test_what_is_over_and_not_written_is_bounded_and_the_oldest_goes_first(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 3 * (CLOSED_BYTES + transcript(5).size_bytes)
    async with store_of(redis) as store, writing(store.logs, max_closed_bytes=room) as log_writer:
        redis.kill()
        live = log_writer.begin(transcript(100), lambda: None)
        await until(lambda: log_writer.degraded)
        over = [log_writer.begin(transcript(5), lambda: None) for _ in range(5)]
        for cursor in over:
            log_writer.close(cursor)
        assert metric(log_writer, "outrider_session_logs_dropped_total") == 2
        for cursor in over[:2]:
            with pytest.raises(Unavailable):
                await log_writer.read(cursor.session_id)
        assert await log_writer.read(over[2].session_id) is over[2].transcript
        redis.start()
        await log_writer.flush()
        assert not log_writer._closed._bytes and not log_writer._closed._of
        monkeypatch.setattr(log_writer_module, "MISSED_SECONDS", 0.0)
        for cursor in over[:2]:
            with pytest.raises(UnknownSession):
                await log_writer.take(cursor.session_id)
        for cursor in (live, *over[2:]):
            assert (await taken(store.logs, cursor)).output == cursor.transcript.output


async def test_of_what_is_over_and_not_written_that_of_the_owner_who_has_most_goes(
    redis: RedisServer,
) -> None:
    def made(owner: str) -> Transcript:
        one = transcript(5)
        one.request = replace(one.request, owner=owner)
        return one

    room = 3 * (CLOSED_BYTES + transcript(5).size_bytes)
    async with store_of(redis) as store, writing(store.logs, max_closed_bytes=room) as log_writer:
        redis.kill()
        over = [log_writer.begin(made(owner), lambda: None) for owner in ("bob", *["alice"] * 5)]
        for cursor in over:
            log_writer.close(cursor)
        await until(lambda: log_writer.degraded)
        for cursor in over[1:4]:
            with pytest.raises(Unavailable):
                await log_writer.read(cursor.session_id)
        redis.start()
        await log_writer.flush()
        for cursor in (over[0], *over[4:]):
            assert (await taken(store.logs, cursor)).output == cursor.transcript.output
        assert not log_writer._closed._bytes and not log_writer._closed._of


async def test_a_session_that_is_not_written_yet_is_taken_from_where_it_is(redis: RedisServer) -> None:
    async with store_of(redis) as store, writing(store.logs) as log_writer:
        redis.kill()
        cursor = log_writer.begin(transcript(5), lambda: None)
        log_writer.close(cursor)
        got = await log_writer.take(cursor.session_id)
        assert got.transcript is cursor.transcript
        again = log_writer.go_on(got, lambda: None)
        commit(again.transcript)
        log_writer.note(again)
        redis.start()
        await log_writer.flush()
        assert (await taken(store.logs, cursor)).output == list(range(6))
