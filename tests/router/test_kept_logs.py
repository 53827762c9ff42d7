"""Logs of an answer's sessions that are over while others of it go on: a store may lose what it had."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from outrider.errors import Unavailable, UnknownSession
from outrider.store.logs import Append
from outrider.store.memory_logs import MemorySessionLogs
from outrider.wire.session import FinishReason
from router.held_logs import CLOSED_BYTES, LogCursor
from router.metrics import Metrics
from router.session_log_writer import MAX_ASKED, SessionLogWriter
from tests.redis_server import RedisServer
from tests.router.log_writers import TTL, commit, store_of, taken, transcript, until, writing


class Lossy(MemorySessionLogs):
    """May lose all, or be away."""

    away = False
    asked = 0  # for logs, by appends without records

    def lose_all(self) -> None:
        for one in list(self._logs):
            self._forget(one)

    async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
        self._check()
        self.asked += sum(not one.records for one in appends)
        return await super().append(appends, ttl_seconds)

    async def take(self, *about: Any) -> Any:
        self._check()
        return await super().take(*about)

    async def read(self, *about: Any) -> Any:
        self._check()
        return await super().read(*about)

    def _check(self) -> None:
        if self.away:
            raise Unavailable("the store is away")


def answer(log_writer: SessionLogWriter) -> tuple[LogCursor, LogCursor]:
    """Returns one that is over and one that goes on; both are written soon."""
    over, goes_on = (log_writer.begin(transcript(3), lambda: None) for _ in range(2))
    over.transcript.end = FinishReason.LENGTH
    log_writer.note(over)
    log_writer.close(over)
    return over, goes_on


def ids(cursors: Sequence[LogCursor]) -> list[Any]:
    return [one.session_id for one in cursors]


async def begun(log_writer: SessionLogWriter) -> tuple[Any, LogCursor, LogCursor]:
    """Returns what keeps the answer, and its cursors. The store has both."""
    over, goes_on = transcript(3), transcript(3)
    over.end = FinishReason.LENGTH
    keeping = log_writer.keep([one.request.session_id for one in (over, goes_on)])  # type: ignore[misc]
    keeping.__enter__()
    first, second = (log_writer.begin(one, lambda: None) for one in (over, goes_on))
    log_writer.close(first)
    await log_writer.flush()
    return keeping, first, second


async def test_a_store_that_lost_all_has_both_again_after_the_next_step() -> None:
    logs = Lossy()
    async with writing(logs) as log_writer:
        keeping, over, goes_on = await begun(log_writer)
        logs.lose_all()
        commit(goes_on.transcript)
        log_writer.note(goes_on)
        await until(lambda: len(logs._logs) == 2)
        await log_writer.flush()
        assert (await taken(logs, over)).end is FinishReason.LENGTH
        assert (await taken(logs, goes_on)).output == list(range(4))
        keeping.__exit__(None, None, None)


async def test_a_redis_that_comes_back_empty_has_both_again() -> None:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        store = await stack.enter_async_context(store_of(redis))
        log_writer = await stack.enter_async_context(writing(store.logs))
        keeping, over, _ = await begun(log_writer)
        redis.kill()
        await until(lambda: log_writer.degraded)
        redis.start()
        await until(lambda: not log_writer.degraded)
        await log_writer.flush()
        assert (await taken(store.logs, over)).output == [0, 1, 2]
        keeping.__exit__(None, None, None)


async def test_a_log_that_is_kept_outlives_its_time_though_nothing_is_written() -> None:
    now = 0.0
    logs = Lossy(clock=lambda: now)
    async with writing(logs, ttl=0.2) as log_writer:
        keeping, over, _ = await begun(log_writer)
        for _ in range(4):
            asked = logs.asked
            await until(lambda: logs.asked >= asked + 2)  # noqa: B023
            now += 0.1
        assert (await taken(logs, over)).output == [0, 1, 2]
        keeping.__exit__(None, None, None)
        await log_writer.flush()
        assert not len(log_writer._kept)


async def test_its_client_may_come_back_while_the_store_is_away() -> None:
    """Nothing is kept for it any more, as it has left; but what the store may have lost stays here."""
    logs = Lossy()
    async with writing(logs) as log_writer:
        keeping, over, goes_on = await begun(log_writer)
        logs.away = True
        log_writer.close(goes_on)
        keeping.__exit__(None, None, None)
        for _ in range(2):
            assert (await log_writer.read(over.session_id)).output == [0, 1, 2]
            with log_writer.keep(ids([over, goes_on])):
                got = [await log_writer.take(one.session_id) for one in (over, goes_on)]
                assert [one.transcript for one in got] == [over.transcript, goes_on.transcript]
                again = log_writer.go_on(got[1], lambda: None)
                log_writer.close(again)
        logs.lose_all()
        logs.away = False
        await log_writer.flush()
        assert (await taken(logs, over)).output == (await taken(logs, goes_on)).output == [0, 1, 2]
        assert not log_writer._closed._bytes and not len(log_writer._kept), "nothing is held"


async def test_one_that_was_taken_over_is_kept_as_well() -> None:
    logs = Lossy()
    former = SessionLogWriter(logs, "former", Metrics(), TTL)
    over = transcript(3)
    over.end = FinishReason.LENGTH
    goes_on = transcript(3)
    cursors = [former.begin(one, lambda: None) for one in (over, goes_on)]
    await former._write_all()
    async with writing(logs) as log_writer:
        with log_writer.keep(ids(cursors)):
            await log_writer.take(cursors[0].session_id)
            cursor = log_writer.go_on(await log_writer.take(cursors[1].session_id), lambda: None)
            logs.lose_all()
            commit(cursor.transcript)
            log_writer.note(cursor)
            await until(lambda: len(logs._logs) == 2)
            await log_writer.flush()
            assert (await taken(logs, cursors[0])).end is FinishReason.LENGTH


async def test_what_another_router_took_over_is_its_own() -> None:
    logs = Lossy(clock=lambda: 0.0)
    async with writing(logs, ttl=0.2) as log_writer:
        keeping, over, _ = await begun(log_writer)
        found = await taken(logs, over)
        await until(lambda: log_writer._kept.get(over.session_id) is None)
        assert over.given_up and found.end is FinishReason.LENGTH
        assert not log_writer._closed._bytes
        keeping.__exit__(None, None, None)


async def test_two_streams_of_one_answer_keep_it_till_the_last_ends() -> None:
    logs = Lossy()
    async with writing(logs) as log_writer:
        keeping, over, goes_on = await begun(log_writer)
        with log_writer.keep(ids([over, goes_on])):
            keeping.__exit__(None, None, None)
            assert log_writer._kept.get(over.session_id) is over
        assert log_writer._kept.get(over.session_id) is None
        log_writer.close(goes_on)
        await log_writer.flush()
        assert not log_writer._closed._bytes


async def test_what_is_kept_is_bounded() -> None:
    logs = Lossy()
    room = 2 * (CLOSED_BYTES + transcript(3).size_bytes)
    async with writing(logs, max_closed_bytes=room) as log_writer:
        answers = [await begun(log_writer) for _ in range(4)]
        assert sum(log_writer._kept.get(over.session_id) is over for _, over, _ in answers) == 2
        logs.lose_all()
        commit(answers[0][2].transcript)
        log_writer.note(answers[0][2])
        await until(lambda: len(logs._logs) == 6)
        with pytest.raises(UnknownSession):
            await log_writer.take(answers[0][1].session_id)
        for keeping, _, goes_on in answers:
            log_writer.close(goes_on)
            keeping.__exit__(None, None, None)
        await asyncio.wait_for(log_writer.flush(), 60)
        assert not log_writer._closed._bytes and not len(log_writer._kept)


async def test_of_an_ordinary_answer_nothing_more_is_asked() -> None:
    logs = Lossy(clock=lambda: 0.0)
    async with writing(logs, ttl=0.2) as log_writer:
        answer(log_writer)
        await log_writer.flush()
        await asyncio.sleep(0.1)
        assert not logs.asked and not log_writer._closed._bytes


async def test_of_many_that_are_kept_a_few_are_asked_about_at_a_time() -> None:
    """Thousands at once took the event loop for a tenth of a second, and other keys' streams with it."""
    sizes: list[int] = []

    class Counting(Lossy):
        async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
            sizes.append(len(appends))
            return await super().append(appends, ttl_seconds)

    logs = Counting()
    async with writing(logs) as log_writer:
        many = [transcript(1) for _ in range(3 * MAX_ASKED)]
        with log_writer.keep([one.request.session_id for one in many]):  # type: ignore[misc]
            for one in many:
                one.end = FinishReason.LENGTH
                log_writer.close(log_writer.begin(one, lambda: None))
            await log_writer.flush()
            sizes.clear()
            log_writer._ask_at = 0.0
            log_writer._news.set()
            await until(lambda: sum(sizes) >= len(many))
    assert max(sizes) <= MAX_ASKED
