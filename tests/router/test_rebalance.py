"""Sessions that wait at a full verifier, and one that has room for them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import Unavailable
from outrider.v1 import verifier_pb2
from outrider.wire.load import VerifierLoad
from router.losses import MAX_LOSSES
from router.placement import VerifierCandidate
from router.rebalance import Unbegun, sessions_to_move
from tests.router.asking import Running, committed, finished, request

FULL = VerifierCandidate("full", "m", VerifierLoad(running=4, waiting=3, kv_usage=1.0), 7, 1000)
ROOMY = VerifierCandidate("roomy", "m", VerifierLoad(), 0, 1000)


def unbegun(tokens: int = 100, at: str = "full", most: int = 500, asked_back: bool = False) -> Unbegun:
    return Unbegun(at, tokens, most, asked_back)


def loaded(one: VerifierCandidate, placed: int | None = None, **load: Any) -> VerifierCandidate:
    return replace(one, load=replace(one.load, **load), placed=one.placed if placed is None else placed)


def moved(*sessions: Unbegun, full: VerifierCandidate = FULL, roomy: VerifierCandidate = ROOMY) -> list[int]:
    return sessions_to_move(sessions, [full, roomy], roomy)


def test_who_waits_moves_where_there_is_room_and_in_order_of_arrival() -> None:
    assert moved(*[unbegun()] * 3) == [0, 1, 2]
    assert moved(unbegun(500), unbegun(400), unbegun(60)) == [0, 1]  # 1000, and 16 for each
    assert moved(unbegun(500), unbegun(490), unbegun(60)) == [0]  # nobody is overtaken by who is shorter


def test_text_moves_within_its_numerics() -> None:
    here = replace(ROOMY, numerics="float32-1")
    text = [replace(unbegun(), numerics=one) for one in ("bfloat16-2", "float32-1", "")]
    assert moved(*text, roomy=here) == [1, 2]
    assert moved(*text) == [2], "of a verifier that does not tell, nothing is known"


def test_those_whose_prompt_is_being_read_stay() -> None:
    assert moved(*[unbegun()] * 5) == [2, 3, 4]


def test_only_who_cannot_begin_where_it_is_moves() -> None:
    assert moved(unbegun(), full=loaded(FULL, kv_usage=0.5, unread_prompt_tokens=300)) == []
    assert moved(unbegun(), full=loaded(FULL, kv_usage=0.5, unread_prompt_tokens=400)) == [0]
    assert moved(unbegun(), full=loaded(FULL, kv_usage=0.5, running=30)) == [0]
    assert moved(unbegun(), full=loaded(FULL, waiting=0)) == []
    assert moved(unbegun(), full=replace(FULL, model="other")) == []


def test_nobody_moves_where_it_would_wait_again_or_be_refused() -> None:
    assert moved(unbegun(), roomy=loaded(ROOMY, draining=True)) == []
    assert moved(unbegun(), roomy=loaded(ROOMY, kv_usage=0.9, running=1, placed=1)) == []
    assert moved(unbegun(), roomy=loaded(ROOMY, unread_prompt_tokens=900)) == []
    assert moved(unbegun(), roomy=loaded(ROOMY, placed=1)) == []  # which its report does not tell of
    assert moved(unbegun(most=1001), unbegun()) == [1]
    assert moved(unbegun(), full=FULL, roomy=FULL) == []


def test_who_is_on_its_way_has_its_room_and_is_not_asked_for_again() -> None:
    assert moved(unbegun(600, asked_back=True), unbegun(300)) == [1]
    assert moved(unbegun(600, asked_back=True), unbegun(400)) == []


async def waiting_session(rig: Any) -> tuple[Any, Any, Running, Any]:
    """At the first of two verifiers, which is full before the other joins."""
    full = await rig.verifier("full")
    running = Running(rig, request())
    opened = await full.next_command("open")
    full.say(load=NO_ROOM)
    await rig.until(lambda: rig.fleet.verifiers["full"].load.waiting == 1)
    roomy = await rig.verifier("roomy")
    roomy.say(load=verifier_pb2.VerifierLoad())
    asked = await full.next_command("give_back")
    assert asked.session_id == opened.session_id
    return full, roomy, running, opened


NO_ROOM = verifier_pb2.VerifierLoad(running=2, waiting=1, kv_usage=1.0)


def give_back(session_id: bytes) -> dict[str, Any]:
    code = Unavailable.grpc_code
    return {"failed": [verifier_pb2.Failed(session_id=session_id, code=code, message="no room")]}


async def test_a_session_that_waits_is_asked_for_once_and_moves_when_it_is_given_back(rig: Any) -> None:
    full, roomy, running, opened = await waiting_session(rig)
    for _ in range(3):
        roomy.say(load=verifier_pb2.VerifierLoad())
    full.say(load=verifier_pb2.VerifierLoad(running=2, kv_usage=1.0), **give_back(opened.session_id))
    moved = await roomy.next_command("open")
    assert (moved.session_id, list(moved.output)) == (opened.session_id, [])
    assert full.commands.empty()
    (session,) = rig.sessions._open.values()
    assert session._losses._last is None
    roomy.say(load=NO_ROOM)  # others were quicker
    await rig.until(lambda: rig.fleet.verifiers["roomy"].load.waiting == 1)
    for _ in range(3):
        full.say(load=verifier_pb2.VerifierLoad(step_tokens=5))
    await rig.until(lambda: rig.fleet.verifiers["full"].load.step_tokens == 5)
    roomy.say(**committed(moved.session_id, 3, 3), **finished(moved.session_id))
    await running.task
    assert roomy.commands.empty()  # it is not asked for again


async def test_one_that_is_given_back_again_and_again_ends(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.losses.APART_SECONDS", 0.0)
    full, roomy, running, opened = await waiting_session(rig)
    await roomy.stop()
    await rig.until(lambda: list(rig.fleet.verifiers) == ["full"])
    for _ in range(1 + MAX_LOSSES):
        full.say(load=verifier_pb2.VerifierLoad(), **give_back(opened.session_id))  # there is room again
        assert (await full.next_command("open")).session_id == opened.session_id
    full.say(**give_back(opened.session_id))
    with pytest.raises(Unavailable, match="4 target workers in a row"):
        await running.task


async def test_one_that_has_begun_after_all_stays_and_one_that_is_lost_may_move_again(rig: Any) -> None:
    full, roomy, running, opened = await waiting_session(rig)
    full.say(**committed(opened.session_id, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    roomy.say(load=verifier_pb2.VerifierLoad(step_tokens=5))
    await rig.until(lambda: rig.fleet.verifiers["roomy"].load.step_tokens == 5)
    assert full.commands.empty() and roomy.commands.empty()
    await full.stop()
    moved = await roomy.next_command("open")
    assert list(moved.output) == [10]
    roomy.say(load=NO_ROOM)
    await rig.until(lambda: rig.fleet.verifiers["roomy"].load.waiting == 1)
    third = await rig.verifier("third")
    third.say(load=verifier_pb2.VerifierLoad())
    assert (await roomy.next_command("give_back")).session_id == opened.session_id
    running.task.cancel()
    await asyncio.gather(running.task, return_exceptions=True)
