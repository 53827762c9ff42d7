"""Who goes on with a session, by its log: taking it, being superseded, a log that is lost."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from outrider.errors import Unavailable
from outrider.store.logs import Owner, Taken
from outrider.store.memory_logs import MemorySessionLogs
from outrider.wire.session import FinishReason, SessionId
from router import session_log_writer as log_writer_module
from router.held_logs import TakenSession
from router.metrics import Metrics
from router.session_log_writer import SessionLogWriter
from router.transcript import Transcript
from tests.router.log_writers import TTL, commit, metric, taken, transcript, until, writing


async def test_a_session_is_written_before_it_is_taken() -> None:
    """Its last tokens may only just have come."""
    logs = MemorySessionLogs()
    log_writer = SessionLogWriter(logs, "router", Metrics(), TTL)  # that nobody runs
    cursor = log_writer.begin(transcript(3000), lambda: None)
    log_writer.close(cursor)
    got = await log_writer.take(cursor.session_id)
    assert got.transcript.output == list(range(3000))
    assert got.owner.generation == 1 and got.written == 3001
    log_writer.go_on(got, lambda: None)
    assert not log_writer._dirty  # all of it is there


async def test_a_long_log_is_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    log_writer = SessionLogWriter(
        MemorySessionLogs(), "router", Metrics(), TTL, decoding=ThreadPoolExecutor(1, "logs")
    )
    cursor = log_writer.begin(transcript(3000), lambda: None)
    log_writer.close(cursor)
    decode, names = Transcript.from_log, []

    def noted(*log: Any) -> Transcript:
        names.append(threading.current_thread().name)
        return decode(*log)

    monkeypatch.setattr(Transcript, "from_log", noted)
    assert (await log_writer.take(cursor.session_id)).transcript.output == list(range(3000))
    assert names == ["logs_0"]


async def test_what_is_written_and_cannot_be_taken_is_not_gone_on_with() -> None:
    """Another router may have it by now."""

    class Away(MemorySessionLogs):
        async def take(self, *about: Any) -> Taken | None:
            raise Unavailable("the store is away")

    log_writer = SessionLogWriter(Away(), "router", Metrics(), TTL)
    cursor = log_writer.begin(transcript(2), lambda: None)
    with pytest.raises(Unavailable):
        await log_writer.take(cursor.session_id)


async def test_who_went_on_with_a_session_is_not_taken_for_who_had_it_before() -> None:
    class Slow(MemorySessionLogs):
        def __init__(self) -> None:
            super().__init__()
            self.may, self.asked = asyncio.Event(), asyncio.Event()

        async def append(self, *about: Any) -> list[int | None]:
            self.asked.set()
            await self.may.wait()
            return await super().append(*about)

    logs = Slow()
    async with writing(logs) as log_writer:
        former = log_writer.begin(transcript(2), lambda: None)
        await logs.asked.wait()
        longer = transcript(5, former.session_id)
        cursor = log_writer.go_on(TakenSession(longer, Owner("router", 1), 0), lambda: None)
        logs.may.set()
        await until(lambda: former.written)
        await log_writer.flush()
        assert (await taken(logs, cursor)).output == longer.output


async def test_who_is_superseded_hears_it_once_and_writes_no_more() -> None:
    logs = MemorySessionLogs()
    async with writing(logs) as log_writer:
        heard: list[str] = []
        cursor = log_writer.begin(transcript(2), lambda: heard.append("superseded"))
        await log_writer.flush()
        assert (await taken(logs, cursor)).output == [0, 1]
        for _ in range(3):
            commit(cursor.transcript)
            log_writer.note(cursor)
            await log_writer.flush()
        assert heard == ["superseded"]
        assert (await taken(logs, cursor)).output == [0, 1]


async def test_of_one_that_is_over_nobody_hears_that_it_goes_on_elsewhere() -> None:
    logs = MemorySessionLogs()
    log_writer = SessionLogWriter(logs, "router", Metrics(), TTL)
    cursor = log_writer.begin(transcript(2), lambda: pytest.fail("there is nobody to tell"))
    await log_writer._write_all()
    await taken(logs, cursor)
    cursor.transcript.end = FinishReason.LENGTH
    log_writer.note(cursor)
    log_writer.close(cursor)
    await log_writer._write_all()
    assert cursor.given_up
    await log_writer.flush()


async def test_one_with_much_to_write_lets_the_others_write_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer_module, "MAX_WRITE_BYTES", 1)

    class Ordered(MemorySessionLogs):
        def __init__(self) -> None:
            super().__init__()
            self.order: list[SessionId] = []

        async def append(self, appends: Any, ttl_seconds: float) -> list[int | None]:
            self.order += [one.session_id for one in appends]
            return await super().append(appends, ttl_seconds)

    logs = Ordered()
    async with writing(logs) as log_writer:
        long, short = (log_writer.begin(transcript(tokens), lambda: None) for tokens in (5000, 1))
        await log_writer.flush()
        assert logs.order[:3] == [long.session_id, short.session_id, long.session_id]


async def test_a_long_absence_is_made_good_in_several_writings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer_module, "MAX_WRITE_BYTES", 10_000)

    class Counting(MemorySessionLogs):
        def __init__(self) -> None:
            super().__init__()
            self.sizes: list[int] = []

        async def append(self, appends: Any, ttl_seconds: float) -> list[int | None]:
            self.sizes.append(sum(len(record) for one in appends for record in one.records))
            return await super().append(appends, ttl_seconds)

    logs = Counting()
    async with writing(logs) as log_writer:
        book = [log_writer.begin(transcript(3000), lambda: None) for _ in range(5)]
        await log_writer.flush()
        assert max(logs.sizes) < 2 * 10_000 and len(logs.sizes) > 5
        for cursor in book:
            assert (await taken(logs, cursor)).output == list(range(3000))


async def test_a_log_that_is_lost_again_and_again_is_given_up() -> None:
    """The store may take too little memory for what runs."""
    logs = MemorySessionLogs(max_bytes=1000)
    async with writing(logs) as log_writer:
        book = [log_writer.begin(transcript(), lambda: None) for _ in range(5)]
        for _ in range(100):
            for cursor in book:
                commit(cursor.transcript)
                log_writer.note(cursor)
            await log_writer.flush()
        given_up = len([cursor for cursor in book if cursor.given_up])
        assert given_up >= 4, "there is room for one"
        assert metric(log_writer, "outrider_session_logs_dropped_total") == given_up
        assert logs.size <= 1000
