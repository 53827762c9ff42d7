"""Of several who come back to one answer at once, at one router or at two, exactly one has it all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import Superseded
from outrider.wire.session import SessionId
from router.requests import Resumption
from router.sessions import Sessions
from tests.router.asking import Running, finished
from tests.router.conftest import Rig, Worker
from tests.router.test_resuming import (
    BY_LENGTH,
    FIRST,
    LENGTH,
    SECOND,
    Resuming,
    another,
    begun,
    left,
    second,
    verifier_of,
)
from tests.router.test_standings import ABORTED, failed


class Client:
    """One that comes back to an answer."""

    def __init__(self, sessions: Sessions, answer: list[SessionId]) -> None:
        self._sessions, self._answer = sessions, answer
        self._resumption = Resumption(answer[0])

    def resume(self, index: int) -> Reading:
        return Reading(self._sessions.resume(self._answer[index], self._resumption))

    async def begin(self, index: int) -> Reading:
        """Resumes one, and waits until it is here. Raises what refuses it."""
        reading = self.resume(index)
        waits = asyncio.create_task(reading.begun.wait())
        await asyncio.wait({reading.task, waits}, return_when=asyncio.FIRST_COMPLETED)
        waits.cancel()
        if not reading.begun.is_set():
            await reading.task
        return reading


class Reading(Running):
    def __init__(self, events: Any) -> None:
        self.events, self.begun = [], asyncio.Event()
        self.task = asyncio.create_task(self._read(self._noting(events)))

    async def _noting(self, events: Any) -> Any:
        async for event in events:
            self.begun.set()
            yield event


async def goes_to_its_end(verifier: Worker, answer: list[SessionId], readings: list[Reading]) -> None:
    for session_id, reading in zip(answer, readings, strict=True):
        assert (await verifier.next_command("open")).session_id == session_id
        verifier.say(**second(session_id), **finished(session_id, BY_LENGTH))
        assert await reading.task == [FIRST, SECOND, LENGTH]


async def test_at_two_routers_who_took_the_first_session_last_has_the_others(rig: Rig) -> None:
    verifier = await rig.verifier()
    answer = [await left(rig, verifier) for _ in range(2)]
    async with another(rig) as router:
        elsewhere = await verifier_of(rig, router)
        former, latter = Client(rig.sessions, answer), Client(router.sessions, answer)
        lost = await former.begin(0)
        readings = [await latter.begin(0), await latter.begin(1)]
        with pytest.raises(Superseded):
            await former.begin(1)
        await goes_to_its_end(elsewhere, answer, readings)
        verifier.say(**second(answer[0]))
        with pytest.raises(Superseded):
            await lost.task


async def test_at_two_routers_what_the_former_has_taken_already_is_taken_from_it(rig: Rig) -> None:
    verifier = await rig.verifier()
    answer = [await left(rig, verifier) for _ in range(2)]
    async with another(rig) as router:
        elsewhere = await verifier_of(rig, router)
        former, latter = Client(rig.sessions, answer), Client(router.sessions, answer)
        lost = [await former.begin(0), await former.begin(1)]
        readings = [await latter.begin(0), await latter.begin(1)]
        await goes_to_its_end(elsewhere, answer, readings)
        for session_id, reading in zip(answer, lost, strict=True):
            verifier.say(**second(session_id))
            with pytest.raises(Superseded):
                await reading.task


async def test_at_one_router_who_came_last_to_the_first_session_has_the_others(rig: Rig) -> None:
    verifier = await rig.verifier()
    answer = [await left(rig, verifier) for _ in range(2)]
    former, latter = Client(rig.sessions, answer), Client(rig.sessions, answer)
    lost = await former.begin(0)
    readings = [await latter.begin(0), await latter.begin(1)]
    with pytest.raises(Superseded):
        await former.begin(1)
    with pytest.raises(Superseded):
        await lost.task
    await goes_to_its_end(verifier, answer, readings)


async def test_the_others_wait_for_the_first_session(rig: Rig) -> None:
    verifier = await rig.verifier()
    answer = [await left(rig, verifier) for _ in range(2)]
    client = Client(rig.sessions, answer)
    second_one = client.resume(1)
    await asyncio.sleep(0)
    assert not second_one.begun.is_set() and not rig.sessions.open
    readings = [await client.begin(0), second_one]
    await goes_to_its_end(verifier, answer, readings)


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_late_word_of_who_had_it_before_is_not_held_against_its_verifier(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, resumed: bool
) -> None:
    """A router that has lost a session to this one may open it after this one has: then the verifier says
    that it is the other's, and the log that it is not."""
    blamed: list[Any] = []
    monkeypatch.setattr(rig.fleet.standings, "failed", lambda *about: blamed.append(about))
    verifier = await rig.verifier()
    if resumed:
        session_id = await left(rig, verifier, max_tokens=3)
        running: Running = Resuming(rig.sessions, session_id)
        await verifier.next_command("open")
    else:
        running, session_id = await begun(rig, verifier, max_tokens=3)
    verifier.say(**failed(session_id, ABORTED))
    await verifier.next_command("open")
    verifier.say(**second(session_id), **finished(session_id, BY_LENGTH))
    assert await running.task == [FIRST, SECOND, LENGTH]
    assert bool(blamed) != resumed
