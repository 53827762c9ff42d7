"""A log that the store does not take: the others go on, and it is told that this one cannot be resumed."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.errors import Unavailable, UnknownSession
from outrider.store.memory_logs import MemorySessionLogs
from outrider.wire.session import SessionId, new_session_id
from router import session_log_writer as log_writer_module
from router.held_logs import LogCursor
from router.session_log_writer import MAX_REFUSALS
from router.transcript import Transcript
from tests.redis_server import RedisServer
from tests.router.log_writers import commit, cursors, metric, store_of, taken, transcript, until, writing

REFUSED, BROKEN_OFF = 2 * 2**20, 12 * 2**20  # bytes of a log, of which this Redis takes one MiB


def large(size: int) -> Transcript:
    made = transcript()
    return Transcript(made.request, b"x" * size)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer_module, "AWAY_SECONDS", 0.001)


async def test_a_log_that_redis_refuses_or_hangs_up_on_leaves_no_other_unwritten() -> None:
    with RedisServer() as redis:
        async with store_of(redis) as store:
            await store._redis.config_set("proto-max-bulk-len", "1mb")
            async with writing(store.logs) as log_writer:
                refused = [log_writer.begin(large(size), lambda: None) for size in (REFUSED, BROKEN_OFF)]
                others = cursors(log_writer, 5)
                await until(lambda: all(cursor.written == 1 for cursor in others))
                await log_writer.flush()
                assert [cursor.given_up for cursor in refused] == [True, True]
                assert metric(log_writer, "outrider_session_logs_dropped_total") == 2
                assert not log_writer.degraded
                for cursor in others:
                    commit(cursor.transcript)
                    log_writer.note(cursor)
                commit(refused[0].transcript)
                log_writer.note(refused[0])
                await log_writer.flush()
                assert (await taken(store.logs, others[0])).output == [0]
            async with writing(store.logs, "another router") as elsewhere:
                for ask in (elsewhere.read, elsewhere.take):
                    with pytest.raises(UnknownSession, match="did not take this session's log"):
                        await ask(refused[0].session_id)


async def test_a_redis_that_takes_nothing_is_away_and_gives_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory is full and its policy evicts nothing: no log is at fault."""
    with RedisServer() as redis:
        async with store_of(redis) as store, writing(store.logs) as log_writer:
            await store._redis.config_set("maxmemory", "1")
            book = cursors(log_writer, 3)
            await until(lambda: log_writer.degraded)
            assert metric(log_writer, "outrider_store_degraded") == 1
            for _ in range(20):
                await until(log_writer._news.is_set)
            assert not any(cursor.given_up or cursor.refusals for cursor in book)
            unwritten = new_session_id()  # another router may have it in its memory
            for ask in (log_writer.read, log_writer.take):
                with pytest.raises(Unavailable, match="takes no logs at the moment"):
                    await ask(unwritten)
            await store._redis.config_set("maxmemory", "0")
            await log_writer.flush()
            assert [cursor.written for cursor in book] == [1] * 3
            await until(lambda: not log_writer.degraded)
            monkeypatch.setattr(log_writer_module, "MISSED_SECONDS", 3600.0)
            for ask in (log_writer.read, log_writer.take):  # another router may not have written it yet
                with pytest.raises(Unavailable, match="was away a moment ago"):
                    await ask(unwritten)
            monkeypatch.setattr(log_writer_module, "MISSED_SECONDS", 0.0)
            with pytest.raises(UnknownSession, match="it never was"):
                await log_writer.read(unwritten)


class Picky(MemorySessionLogs):
    """Takes no record `bad` of a session: the first `times` it is asked."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.tries, self.wrote = times, 0, list[list[SessionId]]()
        self.bad: LogCursor | None = None

    async def append(self, appends: Any, ttl_seconds: float) -> list[int | None]:
        ids = [one.session_id for one in appends]
        if self.bad is not None and self.bad.session_id in ids and self.tries < self.times:
            self.tries += len(ids) == 1
            raise Unavailable("refused")
        self.wrote.append(ids)
        return await super().append(appends, ttl_seconds)


async def test_what_is_taken_after_a_few_tries_is_written_and_the_tries_are_forgotten() -> None:
    logs = Picky(MAX_REFUSALS - 1)
    async with writing(logs) as log_writer:
        book = cursors(log_writer, 8)
        logs.bad = book[3]
        await log_writer.flush()
        assert [cursor.written for cursor in book] == [1] * 8
        assert (book[3].refusals, book[3].given_up, logs.tries) == (0, False, MAX_REFUSALS - 1)


async def test_a_log_refused_later_is_gone_on_with_from_what_was_taken() -> None:
    logs = Picky(1000)
    async with writing(logs) as log_writer:
        (cursor,) = cursors(log_writer, 1)
        await log_writer.flush()
        logs.bad = cursor
        commit(cursor.transcript)
        log_writer.note(cursor)
        await log_writer.flush()
        assert cursor.given_up and logs.tries == MAX_REFUSALS
        assert (await taken(logs, cursor)).output == [], "what is missing is computed again"


async def test_the_halves_of_a_refused_writing_are_written_in_few_tries() -> None:
    logs = Picky(1000)
    async with writing(logs) as log_writer:
        book = cursors(log_writer, 64)
        logs.bad = book[40]
        await until(lambda: all(cursor.written for cursor in book if cursor is not book[40]))
        assert len([ids for ids in logs.wrote if ids]) <= 6
