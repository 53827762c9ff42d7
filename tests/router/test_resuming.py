"""Sessions that are gone on with: by another connection, after their client left, by another router."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from outrider.errors import Cancelled, Overloaded, Superseded, Unavailable, UnknownSession
from outrider.store.logs import Append, SessionLogs
from outrider.store.memory import MemoryStore
from outrider.store.redis import RedisStore
from outrider.store.url import parse_store_url
from outrider.v1 import verifier_pb2
from outrider.wire.codec import sampling_from_wire
from outrider.wire.hello import Role
from outrider.wire.session import FinishReason, SessionId, SessionParams, new_session_id
from router import losses
from router.requests import GenerationRequest, SessionEnded, TokensCommitted
from router.router import Router
from router.sessions import Sessions
from router.transcript import Transcript
from tests.redis_server import RedisServer
from tests.router.asking import PROMPT, SAMPLING, Running, committed, finished, first_step, request
from tests.router.conftest import Rig, Worker

FIRST, SECOND = TokensCommitted((10, 11), 1, 2, 2), TokensCommitted((12,), 0, 2)
LENGTH, BY_LENGTH = SessionEnded(FinishReason.LENGTH), verifier_pb2.FINISH_REASON_LENGTH


class Resuming(Running):
    """A session that somebody resumes."""

    def __init__(self, sessions: Sessions, session_id: SessionId) -> None:
        self.events: list[Any] = []
        self.task = asyncio.create_task(self._read(sessions.resume(session_id)))


def first(session_id: bytes) -> dict[str, Any]:
    return committed(session_id, 3, 10, 11, accepted=1, verified=2, cached=2)


def second(session_id: bytes) -> dict[str, Any]:
    return committed(session_id, 5, 12, accepted=0, verified=2)


async def begun(rig: Rig, verifier: Worker, **changes: Any) -> tuple[Running, SessionId]:
    """A session with a first step."""
    running = Running(rig, request(**{"max_tokens": 3, **changes}))
    opened = await verifier.next_command("open")
    verifier.say(**first(opened.session_id))
    await rig.until(lambda: running.events == [FIRST])
    return running, SessionId(opened.session_id)


async def left(rig: Rig, verifier: Worker, **changes: Any) -> SessionId:
    """A session whose client went after the first step."""
    running, session_id = await begun(rig, verifier, **changes)
    running.task.cancel()
    await verifier.next_command("close")
    return session_id


@asynccontextmanager
async def another(rig: Rig) -> AsyncIterator[Router]:
    """Another router with the same logs, but workers of its own."""
    store = MemoryStore(ttl_seconds=1000)
    store.logs = rig.store.logs
    router = Router(store, num_speculative_tokens=8, max_sessions=2)
    await router.start()
    try:
        yield router
    finally:
        await router.stop(0)


async def verifier_of(rig: Rig, router: Router, worker_id: str = "v2", **about: Any) -> Worker:
    worker = await rig.worker(Role.VERIFIER, worker_id, **about)
    await router.store.beat(worker.record())
    await rig.until(router.sessions.ready)
    return worker


async def test_what_was_asked_for_is_recalled_by_any_router(rig: Rig) -> None:
    verifier = await rig.verifier()
    named = new_session_id()
    asked = request(session_id=named, model="", num_speculative_tokens=3)
    events = rig.sessions.run(asked, answer=b"chat")
    reading = asyncio.ensure_future(first_step(events))
    assert (await verifier.next_command("open")).session_id == named
    live = await rig.sessions.recall(named)
    async with another(rig) as router:
        stored = await router.sessions.recall(named)
    assert live.answer == stored.answer == b"chat"
    assert live.request == stored.request
    assert stored.request == GenerationRequest(
        "m", SessionParams(PROMPT, SAMPLING, 50, (0, 3)), 3, named, fingerprint="VERIFIER model"
    )
    reading.cancel()


async def test_a_live_session_is_read_from_its_beginning_and_only_by_who_came_last(rig: Rig) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    former, session_id = await begun(rig, verifier)
    await drafter.next_command("open")
    latter = Resuming(rig.sessions, session_id)
    with pytest.raises(Superseded):
        await former.task
    await rig.until(lambda: latter.events == [FIRST])
    verifier.say(**second(session_id))
    verifier.say(**finished(session_id, BY_LENGTH))
    assert await latter.task == [FIRST, SECOND, LENGTH]
    assert former.events == [FIRST]
    assert verifier.commands.empty(), "for the workers nothing has changed"
    assert (await drafter.next_command("close")).session_id == session_id
    assert rig.sessions._open == {}


async def test_a_session_that_ended_is_told_again_and_needs_no_worker(rig: Rig) -> None:
    verifier = await rig.verifier()
    running, session_id = await begun(rig, verifier)
    verifier.say(**second(session_id), **finished(session_id, BY_LENGTH))
    told = await running.task
    assert told == [FIRST, SECOND, LENGTH]
    async with another(rig) as router:
        for sessions in (rig.sessions, router.sessions, rig.sessions):
            assert await Resuming(sessions, session_id).task == told
    assert verifier.commands.empty()


async def test_a_session_whose_client_left_goes_on_from_its_log(rig: Rig) -> None:
    verifier = await rig.verifier()
    session_id = await left(rig, verifier)
    resumed = Resuming(rig.sessions, session_id)
    opened = await verifier.next_command("open")
    assert (opened.session_id, tuple(opened.params.prompt), list(opened.output)) == (
        session_id,
        PROMPT,
        [10, 11],
    )
    assert sampling_from_wire(opened.params.sampling) == SAMPLING
    assert (opened.params.max_tokens, list(opened.params.stop_token_ids)) == (3, [0, 3])
    verifier.say(
        **committed(session_id, 4, 11, 12, accepted=1, verified=3),
        **finished(session_id, BY_LENGTH),
    )
    assert await resumed.task == [FIRST, SECOND, LENGTH]
    assert await Resuming(rig.sessions, session_id).task == [FIRST, SECOND, LENGTH]


async def test_another_router_goes_on_and_the_former_one_is_fenced(rig: Rig) -> None:
    verifier = await rig.verifier()
    former, session_id = await begun(rig, verifier, max_tokens=4)
    async with another(rig) as router:
        elsewhere = await verifier_of(rig, router)
        resumed = Resuming(router.sessions, session_id)
        opened = await elsewhere.next_command("open")
        assert list(opened.output) == [10, 11]
        verifier.say(**committed(session_id, 5, 12, 13))  # both compute it
        with pytest.raises(Superseded):
            await former.task
        assert (await verifier.next_command("close")).session_id == session_id
        elsewhere.say(**second(session_id))
        elsewhere.say(**committed(session_id, 6, 13), **finished(session_id, BY_LENGTH))
        told = await resumed.task
    assert told == [FIRST, SECOND, TokensCommitted((13,), 0, 0), LENGTH]
    assert await Resuming(rig.sessions, session_id).task == told


async def test_who_ended_superseded_can_have_it_back(rig: Rig) -> None:
    """Though the reader of then has not heard of it yet: it does not read."""
    verifier = await rig.verifier()
    slow = rig.sessions.run(request(max_tokens=3))
    opening = asyncio.ensure_future(first_step(slow))
    session_id = SessionId((await verifier.next_command("open")).session_id)
    verifier.say(**first(session_id))
    assert await opening == FIRST
    async with another(rig) as router:
        elsewhere = await verifier_of(rig, router)
        resumed = Resuming(router.sessions, session_id)
        await elsewhere.next_command("open")
        verifier.say(**committed(session_id, 5, 99))
        assert (await verifier.next_command("close")).session_id == session_id  # it is fenced
        back = Resuming(rig.sessions, session_id)
        assert list((await verifier.next_command("open")).output) == [10, 11]
        elsewhere.say(**second(session_id))
        with pytest.raises(Superseded):
            await resumed.task
    verifier.say(**second(session_id), **finished(session_id, BY_LENGTH))
    assert await back.task == [FIRST, SECOND, LENGTH]
    assert await anext(slow) == TokensCommitted((99,), 0, 0)
    with pytest.raises(Superseded):
        await anext(slow)
    assert rig.sessions._open == {}


@pytest.mark.parametrize(
    ("asked", "end"),
    [({"max_tokens": 3}, FinishReason.LENGTH), ({}, FinishReason.STOP)],
)
async def test_where_all_tokens_are_in_the_log_no_worker_is_needed(
    rig: Rig, asked: dict[str, Any], end: FinishReason
) -> None:
    """The end itself was never told."""
    verifier = await rig.verifier()
    running, session_id = await begun(rig, verifier, **asked)
    last = 12 if end is FinishReason.LENGTH else 3
    verifier.say(**committed(session_id, 5, last))
    await rig.until(lambda: len(running.events) == 2)
    running.task.cancel()
    await verifier.next_command("close")
    told = await Resuming(rig.sessions, session_id).task
    assert told == [FIRST, TokensCommitted((last,), 0, 0), SessionEnded(end)]
    assert verifier.commands.empty()


async def test_a_stop_token_of_the_model_does_not_end_who_ignores_it(rig: Rig) -> None:
    verifier = await rig.verifier()
    running, session_id = await begun(rig, verifier, stop_token_ids=(), max_tokens=50)
    verifier.say(**committed(session_id, 5, 3))
    await rig.until(lambda: len(running.events) == 2)
    running.task.cancel()
    await verifier.next_command("close")
    resumed = Resuming(rig.sessions, session_id)
    opened = await verifier.next_command("open")
    assert (list(opened.output), list(opened.params.stop_token_ids)) == ([10, 11, 3], [])
    resumed.task.cancel()


async def test_a_cancelled_session_stays_cancelled(rig: Rig) -> None:
    verifier = await rig.verifier()
    running, session_id = await begun(rig, verifier)
    await rig.sessions.cancel(session_id)
    with pytest.raises(Cancelled):
        await running.task
    await verifier.next_command("close")
    resumed = Resuming(rig.sessions, session_id)
    with pytest.raises(Cancelled):
        await resumed.task
    assert resumed.events == [FIRST]
    assert verifier.commands.empty()


async def test_a_session_that_nobody_knows(rig: Rig) -> None:
    await rig.verifier()
    with pytest.raises(UnknownSession):
        await rig.sessions.recall(new_session_id())
    with pytest.raises(UnknownSession):
        await Resuming(rig.sessions, new_session_id()).task


async def test_where_no_verifier_is_left_it_waits_for_one(rig: Rig) -> None:
    verifier = await rig.verifier()
    session_id = await left(rig, verifier)
    async with another(rig) as router:
        resumed = Resuming(router.sessions, session_id)
        await rig.until(lambda: resumed.events == [FIRST])
        elsewhere = await verifier_of(rig, router)
        assert list((await elsewhere.next_command("open")).output) == [10, 11]
        elsewhere.say(**second(session_id), **finished(session_id, BY_LENGTH))
        assert await resumed.task == [FIRST, SECOND, LENGTH]


async def test_where_none_comes_it_ends_with_an_error_and_can_be_resumed_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = await rig.verifier()
    session_id = await left(rig, verifier)
    async with another(rig) as router:
        with monkeypatch.context() as patched:
            patched.setattr(losses, "RESUME_SECONDS", 0.05)
            resumed = Resuming(router.sessions, session_id)
            with pytest.raises(Unavailable, match="none came in its place"):
                await resumed.task
            assert resumed.events == [FIRST]
        elsewhere = await verifier_of(rig, router)
        again = Resuming(router.sessions, session_id)
        assert list((await elsewhere.next_command("open")).output) == [10, 11]
        elsewhere.say(**second(session_id), **finished(session_id, BY_LENGTH))
        assert await again.task == [FIRST, SECOND, LENGTH]


async def test_two_who_resume_at_once_share_a_session_and_the_last_reads_it(rig: Rig) -> None:
    verifier = await rig.verifier()
    session_id = await left(rig, verifier)
    async with another(rig) as router:
        elsewhere = await verifier_of(rig, router)
        both = [Resuming(router.sessions, session_id) for _ in range(2)]
        await elsewhere.next_command("open")
        elsewhere.say(**second(session_id), **finished(session_id, BY_LENGTH))
        told = await asyncio.gather(*(one.task for one in both), return_exceptions=True)
        assert [FIRST, SECOND, LENGTH] in told
        assert [type(one) for one in told].count(Superseded) == 1
        assert elsewhere.commands.empty()
    assert await Resuming(rig.sessions, session_id).task == [FIRST, SECOND, LENGTH], "all of it was written"


@pytest.mark.parametrize("later", range(0, 12, 2))
async def test_whenever_the_second_comes_its_session_is_not_taken_from_it(
    rig: Rig, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the log again from under the first, by whose session both were told that it is elsewhere."""
    verifier = await rig.verifier()
    session_id = await left(rig, verifier)
    take = rig.store.logs.take

    async def slow(*about: Any) -> Any:
        await asyncio.gather(*(asyncio.sleep(0) for _ in range(5)))
        return await take(*about)

    monkeypatch.setattr(rig.store.logs, "take", slow)
    former = Resuming(rig.sessions, session_id)
    for _ in range(later):
        await asyncio.sleep(0)
    latter = Resuming(rig.sessions, session_id)
    await verifier.next_command("open")
    with pytest.raises(Superseded):
        await former.task
    verifier.say(**second(session_id))
    await rig.until(lambda: latter.events == [FIRST, SECOND])
    await rig.sessions._log_writer.flush()
    verifier.say(**finished(session_id, BY_LENGTH))
    assert await latter.task == [FIRST, SECOND, LENGTH]


async def test_a_resumed_session_counts_as_a_request(rig: Rig) -> None:
    verifier = await rig.verifier()
    ids = [await left(rig, verifier) for _ in range(3)]
    async with another(rig) as router:
        elsewhere = await verifier_of(rig, router)
        two = [Resuming(router.sessions, session_id) for session_id in ids[:2]]
        for _ in two:
            await elsewhere.next_command("open")
        with pytest.raises(Overloaded):
            await Resuming(router.sessions, ids[2]).task
        two[0].task.cancel()
        await elsewhere.next_command("close")
        third = Resuming(router.sessions, ids[2])
        assert (await elsewhere.next_command("open")).session_id == ids[2]
        third.task.cancel()


class Counted:
    """The logs of a Redis, with the number of its appends."""

    def __init__(self, logs: SessionLogs) -> None:
        self._logs = logs
        self.appends = 0

    async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
        self.appends += 1
        return await self._logs.append(appends, ttl_seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logs, name)


@pytest.mark.parametrize("hang", [False, True])
async def test_tokens_do_not_wait_for_a_redis_that_is_away_and_are_in_its_log_when_it_is_back(
    rig: Rig, hang: bool
) -> None:
    with RedisServer() as redis:
        redis_store = RedisStore(parse_store_url(redis.url))
        rig.store.logs = logs = Counted(redis_store.logs)  # type: ignore[assignment]
        async with another(rig) as router:
            verifier = await verifier_of(rig, router)
            running = Running(router, request(max_tokens=200, stop_token_ids=()))
            session_id = SessionId((await verifier.next_command("open")).session_id)
            verifier.say(**first(session_id))
            await rig.until(lambda: running.events == [FIRST])
            await router.log_writer.flush()
            redis.signal(signal.SIGSTOP) if hang else redis.kill()
            before = logs.appends
            for n in range(100):
                verifier.say(**committed(session_id, 5 + n, n))
                await rig.until(lambda n=n: len(running.events) == n + 2)
            assert logs.appends - before < 20, "none of them had to wait for a writing"
            await rig.until(lambda: router.log_writer.degraded)
            assert router.sessions.degraded()
            with pytest.raises(Unavailable, match="the store cannot be reached"):
                await Resuming(router.sessions, new_session_id()).task
            redis.signal(signal.SIGCONT) if hang else redis.start()
            await rig.until(lambda: not router.log_writer.degraded)
            taken = await logs.take(session_id, "another", 100)
            assert Transcript.from_log(session_id, taken.content).output == [10, 11, *range(100)]
            running.task.cancel()
        await redis_store.close()


async def test_another_checkpoint_does_not_go_on_with_it(rig: Rig) -> None:
    verifier = await rig.verifier()
    session_id = await left(rig, verifier)
    async with another(rig) as router:
        await verifier_of(rig, router, fingerprint="another")
        with pytest.raises(Unavailable, match="another checkpoint"):
            await Resuming(router.sessions, session_id).task
