"""Deadlines, refusals by load, and drafters that verifiers cut off, at a router with scripted workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import DeadlineExceeded, Overloaded, Unavailable
from outrider.v1 import drafter_pb2, verifier_pb2
from router.drafter_merits import PAYS, SEEN_STEPS
from router.request_features import features
from router.session_draft import LOOK_TOKENS, READING_TOKENS
from router.speculation import SILENT_TOKENS
from tests.router.asking import Running, committed, request


def in_seconds(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_what_runs_past_its_deadline_is_ended_and_closed_at_its_workers(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request(deadline=in_seconds(0.3), first_token_by=in_seconds(60)))
    session_id = (await verifier.next_command("open")).session_id
    await drafter.next_command("open")
    verifier.say(**committed(session_id, 3, 10))
    with pytest.raises(DeadlineExceeded):
        await running.task
    assert [event.tokens for event in running.events] == [(10,)]
    assert (await verifier.next_command("close")).session_id == session_id
    assert (await drafter.next_command("close")).session_id == session_id


async def test_a_deadline_that_comes_before_a_verifier_is_no_fault_of_the_clients(rig: Any) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request(deadline=in_seconds(0.5)))
    await verifier.next_command("open")
    await verifier.stop()
    with pytest.raises(Unavailable, match="no target worker came"):
        await running.task


async def test_the_deadline_of_a_session_that_has_ended_holds_nothing(rig: Any) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request(deadline=in_seconds(3600)))
    await verifier.next_command("open")
    (session,) = rig.sessions._open.values()
    running.task.cancel()
    await verifier.next_command("close")
    assert session._expiry.cancelled()


async def test_what_cannot_begin_in_time_is_refused_before_any_worker_hears_of_it(rig: Any) -> None:
    verifier = await rig.verifier()
    load = verifier_pb2.VerifierLoad(running=1, unread_prompt_tokens=50, prompt_token_seconds=0.1)
    verifier.say(load=load)
    await rig.until(lambda: rig.fleet.verifiers["v"].load.unread_prompt_tokens == 50)
    with pytest.raises(Overloaded, match="first token would come after some 10") as refused:
        await Running(rig, request(first_token_by=in_seconds(5))).task
    assert 4 <= refused.value.retry_after <= 6
    assert verifier.commands.empty()
    patient = Running(rig, request(first_token_by=in_seconds(60)))
    await verifier.next_command("open")
    patient.task.cancel()


async def test_a_full_queue_refuses(rig: Any) -> None:
    verifier = await rig.verifier()
    verifier.say(load=verifier_pb2.VerifierLoad(running=4, waiting=9, kv_usage=1.0))
    await rig.until(lambda: rig.fleet.verifiers["v"].load.waiting == 9)
    with pytest.raises(Overloaded, match="full queue"):
        await Running(rig, request()).task


async def test_a_drafter_that_a_verifier_cut_off_is_replaced_and_others_are_preferred(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    verifier, liar = await rig.verifier(), await rig.drafter("a")
    running = [Running(rig, request()) for _ in range(2)]
    ids = [(await verifier.next_command("open")).session_id for _ in running]
    for _ in running:
        await liar.next_command("open")
    honest = await rig.drafter("b")
    verifier.say(
        cut_off=[verifier_pb2.DrafterCutOff(session_id=each, turn=0, reason="bad_token") for each in ids],
        dropped={"bad_token": 9},
    )
    assert {(await honest.next_command("open")).session_id for _ in ids} == set(ids)
    assert {(await liar.next_command("close")).session_id for _ in ids} == set(ids)
    assert [record.getMessage() for record in caplog.records if "cut off" in record.getMessage()] == [
        "drafter a was cut off by a verifier (bad_token): others are preferred"
    ]
    shown = rig.metrics.exposition().decode()
    assert "outrider_drafters_cut_off_total 1.0" in shown
    assert 'outrider_drafts_dropped_total{engine="v",model_name="m",reason="bad_token"} 9.0' in shown
    third = Running(rig, request())  # though the honest one has two sessions already, and the other none
    assert (await honest.next_command("open")).session_id not in ids
    for session in [*running, third]:
        session.task.cancel()


async def test_a_drafter_of_which_nothing_is_verified_is_left_whatever_it_says_of_its_pace(rig: Any) -> None:
    verifier, liar, honest = await rig.verifier(), await rig.drafter("a"), await rig.drafter("b")
    liar.say(load=drafter_pb2.DrafterLoad(token_seconds=1e-6))
    honest.say(load=drafter_pb2.DrafterLoad(token_seconds=1.0))
    await rig.until(lambda: rig.fleet.drafters["b"].load.token_seconds == 1.0)
    running = Running(rig, request(max_tokens=4 * SILENT_TOKENS, owner="one"))
    session_id = (await verifier.next_command("open")).session_id
    await liar.next_command("open")
    enough = READING_TOKENS + SEEN_STEPS  # and no look may lie between
    for base in range(3, 3 + enough + LOOK_TOKENS):
        verifier.say(**committed(session_id, base, 10))
    assert (await liar.next_command("close")).session_id == session_id
    assert (await honest.next_command("open")).session_id == session_id
    second = Running(rig, request(owner="one"))
    assert (await honest.next_command("open")).session_id != session_id
    other = Running(rig, request(owner="other"))  # who finds out by itself: it may be what was asked for
    await liar.next_command("open")
    for session in (running, second, other):
        session.task.cancel()


async def test_one_session_that_a_drafter_serves_does_not_hide_those_that_it_starves(rig: Any) -> None:
    verifier, drafter, other = await rig.verifier(), await rig.drafter("a"), await rig.drafter("b")
    rig.fleet.choice.merits.of("").tried(
        "VERIFIER model", ("none", 1)
    )  # so that no other trial begins meanwhile
    other.say(load=drafter_pb2.DrafterLoad(token_seconds=1.0, sessions=60))
    await rig.until(lambda: rig.fleet.drafters["b"].load.token_seconds == 1.0)
    running = [Running(rig, request(max_tokens=4 * SILENT_TOKENS)) for _ in range(2)]
    served, starved = [(await verifier.next_command("open")).session_id for _ in running]
    assert {(await drafter.next_command("open")).session_id for _ in running} == {served, starved}
    for base in range(3, 3 + SILENT_TOKENS):
        verifier.say(**committed(served, base, 10, accepted=1, verified=1))
        verifier.say(**committed(starved, base, 10))
    assert (await other.next_command("open")).session_id == starved
    assert rig.fleet.drafters["a"].placed == 1
    assert "outrider_drafters_silent_total 1.0" in rig.metrics.exposition().decode()
    for session in running:
        session.task.cancel()


@pytest.mark.parametrize(
    ("price", "verified"),
    [(0.9, 0), (0.0, 1)],  # no draft is worth that price; now and then one is verified
)
async def test_a_drafter_is_not_left_for_the_price_nor_while_something_comes(
    rig: Any, price: float, verified: int
) -> None:
    verifier, first, _ = await rig.verifier(), await rig.drafter("a"), await rig.drafter("b")
    rig.fleet.choice.merits.of("").tried(
        "VERIFIER model", ("none", 1)
    )  # so that no other trial begins meanwhile
    running = Running(rig, request(max_tokens=4 * SILENT_TOKENS))
    session_id = (await verifier.next_command("open")).session_id
    await first.next_command("open")
    verifier.say(load=verifier_pb2.VerifierLoad(price=price))
    for base in range(3, 3 + 2 * SILENT_TOKENS):
        came = verified if base % 10 == 0 else 0
        verifier.say(**committed(session_id, base, 10, accepted=came, verified=came))
    await rig.until(lambda: len(running.events) == 2 * SILENT_TOKENS)
    assert [rig.fleet.drafters[each].placed for each in "ab"] == [1, 0]
    running.task.cancel()


@pytest.mark.parametrize(("cost", "drafted"), [(0.3, True), (0.9, False)])
async def test_a_drafter_is_judged_by_what_its_drafts_cost_and_not_by_what_one_more_would(
    rig: Any, cost: float, drafted: bool
) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter("a")
    running = Running(rig, request(max_tokens=8 * SEEN_STEPS))
    session_id = (await verifier.next_command("open")).session_id
    await drafter.next_command("open")
    verifier.say(load=verifier_pb2.VerifierLoad(price=1.0, draft_cost=cost))
    for base in range(3, 3 + 4 * SEEN_STEPS, 4):
        verifier.say(**committed(session_id, base, 10, 11, 12, 13, accepted=3, verified=7))
    await rig.until(lambda: len(running.events) == SEEN_STEPS)
    instance, like = rig.fleet.drafters["a"].instance, features(request().params.prompt)
    merit = rig.fleet.choice.merits.of("").of("VERIFIER model", instance, like)
    assert (merit is not None and merit > PAYS) is drafted
    running.task.cancel()


async def test_where_there_is_no_other_a_distrusted_drafter_is_better_than_none(rig: Any) -> None:
    verifier, liar = await rig.verifier(), await rig.drafter("a")
    running = Running(rig, request())
    session_id = (await verifier.next_command("open")).session_id
    await liar.next_command("open")
    verifier.say(cut_off=[verifier_pb2.DrafterCutOff(session_id=session_id, reason="ahead")])
    await liar.next_command("close")
    second = Running(rig, request())
    assert (await liar.next_command("open")).session_id != session_id
    for session in (running, second):
        session.task.cancel()


async def test_a_drafters_rejections_are_shown(rig: Any) -> None:
    await rig.verifier()  # without a target that it fits, a drafter is not taken in
    drafter = await rig.drafter("d")
    drafter.say(load=drafter_pb2.DrafterLoad(rejections=7, rejections_covered=5))
    await rig.until(lambda: rig.fleet.drafters["d"].load.rejections == 7)
    shown = rig.metrics.exposition().decode()
    assert 'outrider_draft_rejections_total{model_name="m"} 7.0' in shown
    assert 'outrider_draft_rejections_covered_total{model_name="m"} 5.0' in shown
