"""The places of a router: of all sessions, of one key's owner, and all or none of one request's."""

import asyncio
from typing import Any

import pytest

from outrider.errors import InvalidRequest, Overloaded
from outrider.wire.session import SessionId
from router import places
from router.sessions import BLOCK
from tests.router.asking import PROMPT, Running, request


async def test_one_owner_s_sessions_leave_places_to_others(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SPARED", 4)  # of four places
    verifier = await rig.verifier()
    running = [Running(rig, request(owner="a")) for _ in range(3)]
    for _ in running:
        await verifier.next_command("open")
    with pytest.raises(Overloaded, match=r"3 answers are in progress, .* 3 are the most for one API key"):
        await Running(rig, request(owner="a")).task
    other = Running(rig, request(owner="b"))
    await verifier.next_command("open")
    with pytest.raises(Overloaded, match=r"4 answers are in progress, .* 4 are the most here"):
        await Running(rig, request(owner="b")).task
    running[0].task.cancel()
    await verifier.next_command("close")
    again = Running(rig, request(owner="a"))
    await verifier.next_command("open")
    for session in [*running, other, again]:
        session.task.cancel()
    await asyncio.gather(*(session.task for session in [*running, other, again]), return_exceptions=True)
    assert not rig.sessions._places.of_owners and not rig.sessions.open


async def test_more_answers_than_there_ever_is_room_for_are_refused_for_good(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SPARED", 4)  # of four places
    for owner, sessions, most in (("", 5, "4 are the most at a time here"), ("a", 4, "3 .* for one API key")):
        with pytest.raises(InvalidRequest, match=f"asks for {sessions} answers, and {most}"):
            rig.sessions.check_room(owner, sessions)
        rig.sessions.check_room(owner, sessions - 1)
    verifier = await rig.verifier()
    running = [Running(rig, request(owner="b")) for _ in range(2)]
    for _ in running:
        await verifier.next_command("open")
    with pytest.raises(InvalidRequest):  # it would not help to wait for the others' end
        rig.sessions.check_room("a", 4)
    with pytest.raises(Overloaded):
        rig.sessions.check_room("a", 3)
    for session in running:
        session.task.cancel()


async def test_sessions_of_one_request_all_have_a_place_or_none(rig: Any) -> None:
    """Of four places: else of several requests each would begin some, and none get through."""
    verifier = await rig.verifier()
    one = Running(rig, request())
    await verifier.next_command("open")
    wanted = [request(session_id=SessionId(bytes([at]) * 16)) for at in range(1, 4)]
    with rig.sessions.together(wanted):
        with pytest.raises(Overloaded, match="4 answers are in progress"):
            await Running(rig, request()).task
        with pytest.raises(Overloaded), rig.sessions.together([request(session_id=SessionId(bytes(16)))]):
            pytest.fail("there is no place left")
        promise = rig.sessions._places.promise(wanted[0].session_id)
        assert promise.prompt_tokens == len(PROMPT) + 2 * BLOCK, "the prompt is read once"
        begun = [Running(rig, each) for each in wanted[:2]]
        for _ in begun:
            await verifier.next_command("open")
        begun.pop().task.cancel()
        await verifier.next_command("close")
        again = Running(rig, request())  # in the place of the one that has ended
        await verifier.next_command("open")
        with pytest.raises(Overloaded, match="4 answers are in progress"):
            await Running(rig, request()).task
    last = Running(rig, request())  # in that of the one that has not begun
    await verifier.next_command("open")
    running = [one, *begun, again, last]
    for session in running:
        session.task.cancel()
    await asyncio.gather(*(session.task for session in running), return_exceptions=True)
    assert not rig.sessions._places.of_owners and not rig.sessions.open
