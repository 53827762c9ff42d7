"""Verifiers that take sessions and do nothing for them, or lie: others get these, and that is noticed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from outrider.errors import Cancelled, InvalidRequest, OutriderError, Superseded, Unavailable
from outrider.v1 import verifier_pb2
from outrider.wire.load import VerifierLoad
from router.standings import (
    APART_SECONDS,
    FAILURES,
    FIRST_ASIDE_SECONDS,
    MOST_PATIENCE_SECONDS,
    PATIENCE,
    Standing,
    Waited,
    patience,
)
from tests.router.asking import Running, committed, finished, request

INTERNAL, INVALID, UNAVAILABLE, CANCELLED, ABORTED = 13, 3, 14, 1, 10


def test_failures_in_a_row_set_a_verifier_aside_and_a_first_token_in_between_does_not() -> None:
    standing = Standing()
    for _ in range(5):
        assert [standing.failed(0.0) for _ in range(FAILURES - 1)] == [0.0] * (FAILURES - 1)
        standing.served(0.0)
    seconds = [standing.failed(0.0) for _ in range(FAILURES)][-1]
    assert seconds == FIRST_ASIDE_SECONDS
    assert standing.aside(4.9) and not standing.may_place(4.9)
    standing.served(1.0)  # of a session that it had before
    assert standing.aside(4.9)


def test_one_that_was_set_aside_is_tried_with_one_session_at_a_time_and_the_pause_doubles() -> None:
    standing, now = Standing(), 0.0
    pauses = []
    for _ in range(7):
        pauses.append(standing.broke(now))
        assert standing.broke(now) == 0.0  # it is set aside already
        now += pauses[-1]
        assert standing.due(now) and not standing.due(now - 0.1)
        standing.placed()
        assert not standing.may_place(now)
    assert pauses == [5, 10, 20, 40, 80, 120, 120]
    standing.gone()
    assert standing.due(now)
    standing.placed()
    assert standing.failed(now) == 120  # on trial one is enough
    standing.served(now + 120)
    assert standing.may_place(now + 120)
    assert standing.broke(now + 130) == 120  # it was not good for long
    standing.served(now + 250)
    assert standing.broke(now + 1000) == 5


@pytest.mark.parametrize(
    ("load", "unread", "seconds"),
    [
        (VerifierLoad(), 1000, 60.0),
        (VerifierLoad(prompt_token_seconds=0.01), 1000, PATIENCE * 20),
        (VerifierLoad(prompt_token_seconds=0.01, unread_prompt_tokens=500), 500, PATIENCE * 20),
        (VerifierLoad(typical_step_seconds=10.0), 5, PATIENCE * 10),
        (VerifierLoad(waiting=1), 5, MOST_PATIENCE_SECONDS),
        (VerifierLoad(prompt_token_seconds=1e9, unread_prompt_tokens=2**31), 5, MOST_PATIENCE_SECONDS),
    ],
)
def test_a_verifier_is_held_to_its_own_word(load: VerifierLoad, unread: int, seconds: float) -> None:
    assert patience(load, unread) == seconds


def test_the_last_of_many_prompts_has_the_time_that_was_promised_when_they_all_waited() -> None:
    waited = Waited(5.0)
    reports = [
        VerifierLoad(prompt_token_seconds=5e-3, unread_prompt_tokens=100 * left) for left in (63, 9, 0)
    ]
    for report in reports:
        waited.tick(12)  # a minute
        waited.heard(report, 100)
        assert not waited.too_long(60.0)
    promised = PATIENCE * 2 * 6400 * 5e-3
    while waited.seconds < promised:
        assert not waited.too_long(60.0)
        waited.tick()
    assert waited.too_long(60.0)  # and is held to that
    waited.moved()
    waited.tick(12)
    waited.heard(reports[-1], 0)
    assert waited.too_long(60.0)  # what was promised before its last token is over


class Clock:
    """The fleet's."""

    def __init__(self, rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1.0
        monkeypatch.setattr(rig.fleet.standings, "_clock", lambda: self.now)


@pytest.fixture
def clock(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(rig, monkeypatch)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience is short."""
    monkeypatch.setattr("router.session.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("router.standings.patience", lambda load, unread, least: 0.05)
    monkeypatch.setattr("router.session.LEAST_PATIENCE_SECONDS", 0.05)


def failed(session_id: bytes, code: int) -> dict[str, Any]:
    return {"failed": [verifier_pb2.Failed(session_id=session_id, code=code, message="it does not work")]}


def set_aside(rig: Any, reason: str) -> float | None:
    found: float | None = rig.metrics.registry.get_sample_value(
        "outrider_verifiers_set_aside_total", {"reason": reason}
    )
    return found


async def sick_and_sound(rig: Any) -> tuple[Any, Any]:
    """The sick one idles, and so is preferred."""
    sick, sound = await rig.verifier("a"), await rig.verifier("b")
    sound.say(load=verifier_pb2.VerifierLoad(running=30))
    await rig.until(lambda: rig.fleet.verifiers["b"].load.running == 30)
    return sick, sound


async def served(sound: Any, session_id: bytes, base: int = 3) -> None:
    opened = await sound.next_command("open")
    assert opened.session_id == session_id
    sound.say(**committed(session_id, base, 3), **finished(session_id))


@pytest.mark.parametrize("code", [INTERNAL, INVALID, UNAVAILABLE])
async def test_who_fails_all_sessions_and_claims_to_idle_gets_no_more_and_is_tried_again(
    rig: Any, clock: Clock, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    sick, sound = await sick_and_sound(rig)
    for _ in range(FAILURES):
        running = Running(rig, request())
        session_id = (await sick.next_command("open")).session_id
        sick.say(**failed(session_id, code))
        await served(sound, session_id)
        assert len(await running.task) == 2
    assert set_aside(rig, "failed") == 1
    assert caplog.text.count("verifier a gets no sessions for 5 s") == 1
    spared = Running(rig, request())
    sound.say(**committed((sid := (await sound.next_command("open")).session_id), 3, 3), **finished(sid))
    assert len(await spared.task) == 2
    clock.now += FIRST_ASIDE_SECONDS
    trial, beside = Running(rig, request()), Running(rig, request())
    tried = (await sick.next_command("open")).session_id
    sound.say(**committed((sid := (await sound.next_command("open")).session_id), 3, 3), **finished(sid))
    assert len(await beside.task) == 2 and sick.commands.empty()
    sick.say(**committed(tried, 3, 3), **finished(tried))
    assert len(await trial.task) == 2
    again = Running(rig, request())
    assert (await sick.next_command("open")).session_id  # it is as good as any
    again.task.cancel()


async def test_who_commits_one_token_and_fails_gets_no_more_either(rig: Any, clock: Clock) -> None:
    sick, sound = await sick_and_sound(rig)
    for number in range(FAILURES):
        clock.now += APART_SECONDS
        assert set_aside(rig, "failed") is None, number
        together = [Running(rig, request()) for _ in range(2)]  # what fails at once is one failure
        opened = [(await sick.next_command("open")).session_id for _ in together]
        for session_id in opened:
            sick.say(**committed(session_id, 3, 10))
        sick.say(failed=[failed(session_id, INTERNAL)["failed"][0] for session_id in opened])
        for _ in opened:
            session_id = (await sound.next_command("open")).session_id
            sound.say(**committed(session_id, 4, 3), **finished(session_id))
        for running in together:
            assert len(await running.task) == 3
    assert set_aside(rig, "failed") == 1


def test_a_text_that_is_brought_to_its_end_makes_the_losses_of_others_forgotten() -> None:
    standing = Standing()
    for number in range(2 * FAILURES):
        assert standing.failed_amid(APART_SECONDS * number) == 0.0
        if number % 2:
            standing.finished()
    assert [standing.failed_amid(100.0 + number / 10) for number in range(9)] == [0.0] * 9


@pytest.mark.parametrize("code", [CANCELLED, ABORTED])
async def test_a_session_ends_by_a_verifiers_word_only_if_its_log_has_it(rig: Any, code: int) -> None:
    sick, sound = await sick_and_sound(rig)
    running = Running(rig, request())
    session_id = (await sick.next_command("open")).session_id
    sick.say(**committed(session_id, 3, 10), **failed(session_id, code))
    await served(sound, session_id, base=4)
    assert len(await running.task) == 3

    running = Running(rig, request())
    session_id = (await sick.next_command("open")).session_id
    await rig.sessions._log_writer.flush()
    if code == CANCELLED:
        await rig.store.logs.cancel(session_id)
    else:
        await rig.store.logs.take(session_id, "another router", 60.0)
    sick.say(**failed(session_id, code))
    with pytest.raises(Cancelled if code == CANCELLED else Superseded):
        await running.task


@pytest.mark.parametrize("code", [INTERNAL, UNAVAILABLE])
async def test_if_it_is_the_only_one_requests_are_told_so_and_one_tries_it_later(
    rig: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("router.losses.APART_SECONDS", 0.001)
    sick = await rig.verifier()
    for _ in range(FAILURES):
        running = Running(rig, request())
        while rig.sessions.ready() and not running.task.done():
            if not sick.commands.empty():
                sick.say(**failed((await sick.next_command("open")).session_id, code))
            await asyncio.sleep(0.005)
        if code == INTERNAL or rig.sessions.ready():
            with pytest.raises(Unavailable):
                await running.task
    with pytest.raises(Unavailable, match="no target worker for 'm' is free"):
        await Running(rig, request()).task
    assert not rig.sessions.ready() and set_aside(rig, "failed") == 1
    clock.now += FIRST_ASIDE_SECONDS
    assert rig.sessions.ready()
    sick.say(load=verifier_pb2.VerifierLoad())  # as it does twice a second
    trial = Running(rig, request()) if code == INTERNAL else running  # which waits, and is offered to it
    tried = (await sick.next_command("open")).session_id
    sick.say(**committed(tried, 3, 3), **finished(tried))
    assert len(await trial.task) == 2


async def test_a_grammar_that_takes_too_much_says_nothing_of_the_verifier(rig: Any) -> None:
    verifier = await rig.verifier()
    for _ in range(FAILURES):
        params = replace(request().params, grammar="start: /(a|b)*/")
        running = Running(rig, request(params=params))
        verifier.say(**failed((await verifier.next_command("open")).session_id, INVALID))
        with pytest.raises(InvalidRequest):
            await running.task
    assert rig.sessions.ready() and set_aside(rig, "failed") is None


async def test_what_one_owners_sessions_fail_of_takes_the_verifier_from_nobody_else(rig: Any) -> None:
    """Until it has failed several owners."""
    verifier = await rig.verifier()
    for aside, owner in enumerate("abc", 1):
        for _ in range(FAILURES):
            running = Running(rig, request(owner=owner))
            verifier.say(**failed((await verifier.next_command("open")).session_id, INTERNAL))
            with pytest.raises(Unavailable):
                await running.task
        assert set_aside(rig, "failed") == aside + (aside == FAILURES)
        with pytest.raises(Unavailable, match="no target worker for 'm' is free"):
            await Running(rig, request(owner=owner)).task
        assert rig.sessions.ready() is (owner != "c")
    with pytest.raises(Unavailable, match="no target worker for 'm' is free"):
        await Running(rig, request(owner="d")).task


async def test_a_session_of_which_nothing_is_committed_moves_and_its_verifier_is_set_aside(
    rig: Any, hurried: None
) -> None:
    """Though it beats, and serves another one."""
    sick, sound = await sick_and_sound(rig)
    good, bad = Running(rig, request()), Running(rig, request())
    favourite, starved = [(await sick.next_command("open")).session_id for _ in range(2)]
    base = 3
    while sound.commands.empty():
        sick.say(**committed(favourite, base, 10))
        base += 1
        await asyncio.sleep(0.01)
    assert (await sick.next_command("close")).session_id == starved
    await served(sound, starved)
    assert len(await bad.task) == 2
    assert set_aside(rig, "stalled") == 1
    assert not good.task.done()
    good.task.cancel()


async def test_a_text_with_a_grammar_that_stands_still_takes_the_verifier_from_its_owner_alone(
    rig: Any, hurried: None
) -> None:
    verifier = await rig.verifier()
    params = replace(request().params, grammar="start: /(a|b)*/")
    running = Running(rig, request(params=params, owner="one"))
    await verifier.next_command("open")
    with pytest.raises(OutriderError, match="lost track"):
        await running.task
    await verifier.next_command("close")
    with pytest.raises(Unavailable, match="no target worker for 'm' is free"):
        await Running(rig, request(owner="one")).task
    other = Running(rig, request(owner="other"))
    opened = await verifier.next_command("open")
    verifier.say(**committed(opened.session_id, 3, 3), **finished(opened.session_id))
    assert len(await other.task) == 2 and set_aside(rig, "stalled") == 1


async def test_a_prompt_that_takes_longer_to_read_than_anybody_waits_takes_it_from_its_owner_alone(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a large model may read for more than ten minutes: nobody had the verifier then for a while."""
    monkeypatch.setattr("router.session.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("router.session.LEAST_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("router.standings.MOST_PATIENCE_SECONDS", 0.05)
    verifier = await rig.verifier()
    verifier.say(load=verifier_pb2.VerifierLoad(prompt_token_seconds=0.1))
    await rig.until(lambda: rig.fleet.verifiers["v"].load.prompt_token_seconds > 0)
    with pytest.raises(OutriderError, match="lost track"):
        await Running(rig, request(owner="one")).task
    assert set_aside(rig, "stalled") == 1
    may_place, held = rig.fleet.standings.may_place, rig.fleet.verifiers["v"]
    assert (may_place(held, "one"), may_place(held, "other")) == (False, True)


async def test_one_that_stops_in_the_middle_of_a_text_loses_it(rig: Any, hurried: None) -> None:
    sick, sound = await sick_and_sound(rig)
    running = Running(rig, request())
    session_id = (await sick.next_command("open")).session_id
    sick.say(**committed(session_id, 3, 10))
    await served(sound, session_id, base=4)
    assert len(await running.task) == 3


async def test_an_end_that_is_not_told_is_known(rig: Any, hurried: None) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request(max_tokens=1))
    verifier.say(**committed((await verifier.next_command("open")).session_id, 3, 10))
    assert len(await running.task) == 2


async def test_clients_that_leave_before_patience_ends_tell_something_too(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.session.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("router.standings.LEFT_SECONDS", 0.02)
    sick = await rig.verifier()
    for patient in (True, False, True, True):
        running = Running(rig, request())
        await sick.next_command("open")
        (session,) = rig.sessions._open.values()
        if patient:
            await rig.until(lambda session=session: session._still.seconds >= 0.02)
        running.task.cancel()
        await sick.next_command("close")
    assert set_aside(rig, "failed") == 1


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [((10,), "LENGTH"), ((10,), "STOP"), ((), "STOP"), ((), "LENGTH"), ((10,), "UNSPECIFIED")],
)
async def test_an_end_that_comes_too_early_cuts_no_text(
    rig: Any, tokens: tuple[int, ...], reason: str
) -> None:
    sick, sound = await sick_and_sound(rig)
    running = Running(rig, request())
    session_id = (await sick.next_command("open")).session_id
    said = committed(session_id, 3, *tokens) if tokens else {}
    sick.say(**said, **finished(session_id, getattr(verifier_pb2, f"FINISH_REASON_{reason}")))
    await served(sound, session_id, base=3 + len(tokens))
    *steps, _end = await running.task
    assert [token for step in steps for token in step.tokens] == [*tokens, 3]
    assert set_aside(rig, "lied") == 1
    assert rig.fleet.standings.aside(rig.fleet.verifiers["a"])


async def test_who_waits_for_room_while_others_are_served_says_nothing_of_the_verifier(
    rig: Any, hurried: None
) -> None:
    """One key's long queue had it set aside for all, again and again."""
    verifier = await rig.verifier()
    served, waiting = Running(rig, request()), Running(rig, request())
    first, second = [(await verifier.next_command("open")).session_id for _ in range(2)]
    verifier.say(load=verifier_pb2.VerifierLoad(running=1, waiting=1))
    base = 3
    while not waiting.task.done():
        verifier.say(**committed(first, base, 10))
        base += 1
        await rig.until(lambda base=base: len(served.events) >= base - 3)
    with pytest.raises(Unavailable, match="has had no room for this request"):
        await waiting.task
    assert (await verifier.next_command("close")).session_id == second
    assert set_aside(rig, "stalled") is None and rig.fleet.standings.may_place(rig.fleet.verifiers["v"])
    verifier.say(**committed(first, base, 3), **finished(first))
    await served.task
