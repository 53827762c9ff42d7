"""Sessions that end early, leave a verifier, or come to it, as its streams tell."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from outrider.v1 import verifier_pb2
from outrider.wire.hello import Role
from tests.verifier.talk import (
    Running,
    Talk,
    attach,
    drafter,
    failure,
    hello,
    open_session,
    output,
    router,
)
from verifier.stepper import StepReport


async def test_another_router_may_cancel_a_session_and_its_own_hears_of_it(verifier: Running) -> None:
    owner, other = await router(verifier), await router(verifier)
    owner.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await owner.hear()).committed
    other.say(verifier_pb2.VerifierCommand(cancel=verifier_pb2.CloseSession(session_id=b"s" * 16)))
    failed = await failure(owner)
    assert (failed.session_id, failed.code) == (b"s" * 16, grpc.StatusCode.CANCELLED.value[0])
    assert verifier.stepper.load.running == 0 and verifier.stepper.load.kv_usage == 0


async def test_draining_finishes_what_is_there_and_takes_nothing_new(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=200))
    assert (await talk.hear()).committed
    verifier.service.drain()
    talk.say(open_session(b"t" * 16))
    refused = await failure(talk)
    assert (refused.session_id, refused.code) == (b"t" * 16, grpc.StatusCode.UNAVAILABLE.value[0])
    await verifier.service.until_idle()
    await (
        verifier.service.close_gracefully()
    )  # who hears that the verifier leaves hangs up: the end has to be there before
    assert len(await output(talk, b"s" * 16)) > 100
    while await talk.call.read() is not grpc.aio.EOF:
        pass
    assert await talk.call.code() is grpc.StatusCode.OK
    assert verifier.service.load().draining


async def test_what_a_verifier_that_leaves_gives_back_is_heard_before_its_stream_ends(
    verifier: Running,
) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await talk.hear()).committed
    verifier.service.drain()
    verifier.service.give_back()
    await verifier.service.close_gracefully()
    assert (await failure(talk)).code == grpc.StatusCode.UNAVAILABLE.value[0]
    late = Talk.start(verifier.stub.Sessions)
    late.say(verifier_pb2.VerifierCommand(hello=hello(Role.ROUTER)))
    assert await late.call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_verifier_that_leaves_waits_for_no_router_whose_stream_breaks(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await talk.hear()).committed
    verifier.service.drain()
    talk.call.cancel()
    async with asyncio.timeout(120):
        await verifier.service.until_idle()
    assert verifier.service.routers._orphans.all() == [] and verifier.stepper.get(b"s" * 16) is None


async def test_only_the_router_of_a_session_decides_how_far_it_speculates(verifier: Running) -> None:
    owner, other = await router(verifier), await router(verifier)
    owner.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await owner.hear()).committed
    change = verifier_pb2.SetSpeculation(session_id=b"s" * 16, num_speculative_tokens=9)
    other.say(verifier_pb2.VerifierCommand(speculation=change))
    other.say(open_session(b"t" * 16))
    await output(other, b"t" * 16)  # that has been read by now
    running = verifier.stepper.get(b"s" * 16)
    assert running is not None and running.session.num_speculative_tokens == 4
    owner.say(verifier_pb2.VerifierCommand(speculation=change))
    async with asyncio.timeout(120):
        while running.session.num_speculative_tokens != 9:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_is_given_back_can_go_on_elsewhere(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await talk.hear()).committed
    verifier.service.drain()
    verifier.service.give_back()
    given = await failure(talk)
    assert (given.session_id, given.code) == (b"s" * 16, grpc.StatusCode.UNAVAILABLE.value[0])
    async with asyncio.timeout(120):
        await verifier.service.until_idle()
    assert verifier.stepper.load.kv_usage == 0


async def test_a_session_that_comes_back_may_be_drafted_for_again(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=3))
    tokens = await output(talk, b"s" * 16)
    talk.say(open_session(b"s" * 16, max_tokens=500, output=tokens))
    assert (await talk.hear()).committed
    drafting.say(attach(b"s" * 16))
    batch = await drafting.hear()
    assert batch.commits[0].base == 3 + len(tokens) and not batch.revoked
    verifier.service.give_back()
    await failure(talk)
    drafting.say(attach(b"s" * 16))  # before its router has opened it again
    talk.say(open_session(b"t" * 16))
    await output(talk, b"t" * 16)  # that has been read by now
    talk.say(open_session(b"s" * 16, max_tokens=500, output=tokens))
    while not (batch := await drafting.hear()).commits:
        assert not batch.revoked


async def test_of_a_session_that_goes_on_elsewhere_the_drafter_hears_from_its_router_alone(
    verifier: Running,
) -> None:
    """It may have been told to draft for it at another verifier already, and would give that up."""
    drafting, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await talk.hear()).committed
    drafting.say(attach(b"s" * 16))
    assert (await drafting.hear()).commits
    verifier.service.give_back()
    await failure(talk)
    drafting.say(
        verifier_pb2.DraftBatch(
            attach=attach(b"s" * 16).attach,  # again, before the router has opened it again
            drafts=[verifier_pb2.Draft(session_id=b"s" * 16, base=4, tokens=[1])],
        )
    )
    talk.say(open_session(b"t" * 16))
    await output(talk, b"t" * 16)  # that has been read by now
    talk.say(open_session(b"s" * 16, max_tokens=900))
    assert (await talk.hear()).committed
    running = verifier.stepper.get(b"s" * 16)
    assert running is not None and running.drafted  # its claim stands
    for _ in range(3):
        assert not (await drafting.hear()).revoked


@pytest.mark.parametrize("closed", [False, True])
async def test_a_right_of_the_router_that_comes_may_be_shown_before_that_has_the_session(
    verifier: Running, closed: bool
) -> None:
    """Its drafter is told at the same time, and may be faster."""
    drafting, former, talk = await drafter(verifier), await router(verifier), await router(verifier)
    former.say(open_session(b"s" * 16, max_tokens=1000))
    drafting.say(attach(b"s" * 16))
    assert (await drafting.hear()).commits
    if closed:
        former.say(verifier_pb2.VerifierCommand(close=verifier_pb2.CloseSession(session_id=b"s" * 16)))
        while not (heard := await drafting.hear()).revoked:
            pass
        assert list(heard.revoked) == list(attach(b"s" * 16).attach)
    drafting.say(attach(b"s" * 16, b"another key"))
    talk.say(open_session(b"t" * 16))
    await output(talk, b"t" * 16)  # that has been read by now
    talk.say(open_session(b"s" * 16, max_tokens=1000, draft_key=b"another key"))
    while not (await talk.hear()).committed:
        pass
    running = verifier.stepper.get(b"s" * 16)
    assert running is not None and running.drafted
    drafting.say(attach(b"s" * 16))  # late: the former router's
    for _ in range(3):
        assert not (await drafting.hear()).revoked
    assert running.drafted


async def test_a_router_may_be_back_before_the_end_of_its_former_stream_is_seen(verifier: Running) -> None:
    former, talk = await router(verifier), await router(verifier)
    former.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await former.hear()).committed
    talk.say(open_session(b"s" * 16, max_tokens=500))
    while not (events := await talk.hear()).committed:
        assert not events.failed
    former.call.cancel()
    first = events.committed[0]
    assert first.base == 3
    assert len(await output(talk, b"s" * 16)) == 500 - len(first.tokens)
    assert verifier.stepper.load.running == 0


async def test_a_step_that_fails_ends_what_it_ran_and_not_what_was_opened_anew_meanwhile(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    former, talk = await router(verifier), await router(verifier)
    engine = verifier.stepper._engine
    choose, running, go_on = engine.choose, threading.Event(), threading.Event()

    def fail_once(*work: Any) -> list[int]:
        monkeypatch.setattr(engine, "choose", choose)
        running.set()
        go_on.wait()
        raise RuntimeError("a mistake")

    monkeypatch.setattr(engine, "choose", fail_once)
    former.say(open_session(b"s" * 16))
    await asyncio.to_thread(running.wait)
    before = verifier.stepper.get(b"s" * 16)
    talk.say(open_session(b"s" * 16, max_tokens=5))  # another request
    while verifier.stepper.get(b"s" * 16) is before:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert before is not None
    verifier.service.on_step(StepReport((), (before,), verifier.stepper.load))  # told late
    go_on.set()
    assert len(await output(talk, b"s" * 16)) == 5


async def test_a_session_that_was_cancelled_on_its_way_here_does_not_begin(verifier: Running) -> None:
    talk, other = await router(verifier), await router(verifier)
    other.say(verifier_pb2.VerifierCommand(cancel=verifier_pb2.CloseSession(session_id=b"s" * 16)))
    other.say(open_session(b"t" * 16))
    await output(other, b"t" * 16)  # the cancel has been read by now
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    failed = await failure(talk)
    assert (failed.session_id, failed.code) == (b"s" * 16, grpc.StatusCode.CANCELLED.value[0])
    assert verifier.stepper.load.running == 0


async def test_a_router_that_comes_hears_at_once_that_the_verifier_drains(verifier: Running) -> None:
    verifier.service.drain()
    talk = Talk.start(verifier.stub.Sessions)
    talk.say(verifier_pb2.VerifierCommand(hello=hello(Role.ROUTER)))
    assert (await talk.hear()).load.draining
    talk.say(open_session(b"s" * 16))
    assert (await talk.hear()).load.draining


async def test_a_session_is_given_back_to_its_router_alone_and_only_before_it_has_begun(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_back(session_id: bytes) -> verifier_pb2.VerifierCommand:
        return verifier_pb2.VerifierCommand(give_back=verifier_pb2.CloseSession(session_id=session_id))

    owner, other = await router(verifier), await router(verifier)
    owner.say(open_session(b"s" * 16, max_tokens=1000))
    assert (await owner.hear()).committed
    planner = verifier.stepper._planner
    monkeypatch.setattr(planner, "limits", replace(planner.limits, max_tokens=1))
    owner.say(open_session(b"t" * 16, max_tokens=3))  # no step has room for it beside the other
    other.say(ask_back(b"t" * 16))
    other.say(open_session(b"u" * 16, max_tokens=3))
    while verifier.stepper.get(b"u" * 16) is None:  # noqa: ASYNC110 (the ask has been read by then)
        await asyncio.sleep(0.005)
    assert verifier.stepper.get(b"t" * 16) is not None
    for session_id in (b"s" * 16, b"x" * 16, b"t" * 16):
        owner.say(ask_back(session_id))
    given = await failure(owner)
    assert (given.session_id, given.code) == (b"t" * 16, grpc.StatusCode.UNAVAILABLE.value[0])
    assert verifier.stepper.get(b"t" * 16) is None and verifier.stepper.get(b"s" * 16) is not None
    assert (await owner.hear()).committed


async def test_a_command_for_a_former_opening_does_not_reach_the_one_after_it(verifier: Running) -> None:
    talk = await router(verifier)
    former = verifier_pb2.CloseSession(session_id=b"s" * 16, opening=1)
    talk.say(open_session(b"s" * 16, max_tokens=1000, opening=1))
    talk.say(verifier_pb2.VerifierCommand(close=former))
    talk.say(open_session(b"s" * 16, max_tokens=1000, opening=2))
    change = verifier_pb2.SetSpeculation(session_id=b"s" * 16, opening=1, num_speculative_tokens=9)
    talk.say(verifier_pb2.VerifierCommand(speculation=change))
    talk.say(verifier_pb2.VerifierCommand(give_back=former))
    talk.say(verifier_pb2.VerifierCommand(close=former))
    talk.say(open_session(b"t" * 16, max_tokens=3, opening=3))
    told: set[tuple[bytes, int]] = set()
    while (b"t" * 16, 3) not in told:
        events = await talk.hear()
        told |= {(step.session_id, step.opening) for step in events.committed}
        assert not events.failed
    running = verifier.stepper.get(b"s" * 16)
    assert running is not None and running.session.num_speculative_tokens == 4
    talk.say(verifier_pb2.VerifierCommand(cancel=verifier_pb2.CloseSession(session_id=b"s" * 16)))
    assert (await failure(talk)).opening == 2
