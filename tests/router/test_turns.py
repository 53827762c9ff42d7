"""What many sessions have to do at once holds the loop for no longer than one of them does."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from outrider.v1 import verifier_pb2
from router.turns import Turns
from tests.router.asking import Running, request

SESSIONS = 4  # as many as a rig's router takes


@contextmanager
def watched(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Counts how often a verifier is sought, by turn of the loop."""
    sought, turns, seek = Counter[int](), 0, rig.fleet.verifier_for

    def counted(*about: Any, **how: Any) -> Any:
        sought[turns] += 1
        return seek(*about, **how)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(rig.fleet, "verifier_for", counted)
    turning = asyncio.create_task(turn())
    yield sought
    turning.cancel()


async def test_sessions_that_lose_their_verifier_go_on_one_in_a_turn(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await rig.verifier("a")
    running = [Running(rig, request()) for _ in range(SESSIONS)]
    for _ in range(SESSIONS):
        await first.next_command("open")
    other = await rig.verifier("b")
    with watched(rig, monkeypatch) as sought:
        await first.stop()
        for _ in range(SESSIONS):
            await other.next_command("open")
    assert sought.total() == SESSIONS and max(sought.values()) == 1
    for one in running:
        one.task.cancel()


async def test_sessions_that_a_verifier_gives_back_go_on_one_in_a_turn(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await rig.verifier("a")
    running = [Running(rig, request()) for _ in range(SESSIONS)]
    ids = [(await first.next_command("open")).session_id for _ in range(SESSIONS)]
    other = await rig.verifier("b")
    first.say(load=verifier_pb2.VerifierLoad(draining=True))
    await rig.until(lambda: rig.fleet.verifiers["a"].load.draining)
    with watched(rig, monkeypatch) as sought:
        first.say(failed=[verifier_pb2.Failed(session_id=one, code=14, message="it leaves") for one in ids])
        for _ in range(SESSIONS):
            await other.next_command("open")
    assert sought.total() == SESSIONS and max(sought.values()) == 1
    for one in running:
        one.task.cancel()


async def test_sessions_that_waited_for_a_verifier_go_to_one_that_comes_one_in_a_turn(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await rig.verifier("a")
    running = [Running(rig, request()) for _ in range(SESSIONS)]
    for _ in range(SESSIONS):
        await first.next_command("open")
    await first.stop()
    await rig.until(lambda: all(one.unplaced for one in rig.sessions.open.values()))
    with watched(rig, monkeypatch) as sought:
        other = await rig.verifier("b")
        for _ in range(SESSIONS):
            await other.next_command("open")
    assert max(sought.values()) == 1
    for one in running:
        one.task.cancel()


async def test_a_piece_that_fails_does_not_keep_the_others_from_their_turns() -> None:
    turns, done = Turns(), list[str]()
    told = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about["exception"]))

    def fails() -> None:
        turns.soon(last)
        raise ValueError

    def last() -> None:
        done.append("last")

    for piece in (fails, lambda: done.append("first"), last, last):
        turns.soon(piece)
    for _ in range(6):
        await asyncio.sleep(0)
    assert done == ["first", "last"] and [type(error) for error in told] == [ValueError]
