"""The verifier's streams, spoken to by hand: who is let in, and what becomes of what they say."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from outrider.sampling.params import SamplingParams
from outrider.v1 import verifier_pb2
from outrider.wire.codec import sampling_to_wire
from outrider.wire.hello import Role
from tests.verifier.talk import (
    KEY,
    Running,
    Talk,
    attach,
    drafter,
    hello,
    open_session,
    output,
    router,
)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (verifier_pb2.DraftBatch(), "hello"),
        (verifier_pb2.DraftBatch(hello=hello(Role.ROUTER)), "drafter"),
        (verifier_pb2.DraftBatch(hello=hello(Role.DRAFTER, version=9)), "version 9"),
        (verifier_pb2.DraftBatch(hello=hello(Role.DRAFTER, "another")), "tokenizer"),
    ],
)
async def test_a_stranger_is_refused_with_a_sentence(verifier: Running, first: Any, said: str) -> None:
    talk = Talk.start(verifier.stub.Speculate)
    talk.say(first)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await talk.hear()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert said in refused.value.details()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, 199]}, "198"),
        ({"prompt": [5] * 1000, "max_tokens": 100}, "1024"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"sampling": sampling_to_wire(SamplingParams(top_p=2.0))}, "top_p"),
        ({"session_id": b"short"}, "session_id"),
    ],
)
async def test_a_session_that_cannot_run_fails_alone(
    verifier: Running, changed: dict[str, Any], said: str
) -> None:
    talk = await router(verifier)
    talk.say(open_session(**{"session_id": b"b" * 16, **changed}))
    talk.say(open_session(b"g" * 16))
    failed = (await talk.hear()).failed[0]
    assert failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert said in failed.message
    assert len(await output(talk, b"g" * 16)) == 4


async def test_an_attachment_may_come_before_its_session(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(attach(b"s" * 16))
    talk.say(open_session(b"t" * 16))
    plain = await output(talk, b"t" * 16)  # the attachment has been read by now
    talk.say(open_session(b"s" * 16))
    assert await output(talk, b"s" * 16) == plain
    committed: list[int] = []
    while True:
        batch = await drafting.hear()
        for commit in batch.commits:
            assert commit.base == 3  # nothing has been acknowledged since
            committed = list(commit.tokens)
        if batch.revoked:
            assert list(batch.revoked) == list(attach(b"s" * 16).attach)
            break
    assert committed == plain[: len(committed)]


async def test_only_who_has_the_key_may_draft(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=500))
    await talk.hear()
    drafting.say(attach(b"s" * 16, b"wrong"))
    drafting.say(
        verifier_pb2.DraftBatch(drafts=[verifier_pb2.Draft(session_id=b"s" * 16, base=3, tokens=[1])])
    )
    await output(talk, b"s" * 16)
    assert verifier.service.drafters.dropped == {"wrong_key": 1, "not_attached": 1}


@pytest.mark.parametrize(
    "claim",
    [
        verifier_pb2.Attach(session_id=b"short", draft_key=KEY),
        verifier_pb2.Attach(session_id=b"s" * 16, draft_key=b"k" * 1000),
    ],
)
async def test_a_claim_of_the_wrong_size_is_dropped(verifier: Running, claim: verifier_pb2.Attach) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(verifier_pb2.DraftBatch(attach=[claim]))
    talk.say(open_session(b"t" * 16))
    await output(talk, b"t" * 16)
    assert verifier.service.drafters.dropped["bad_attach"] == 1


async def test_a_session_without_a_key_has_no_drafter(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(attach(b"s" * 16, b""))
    talk.say(open_session(b"t" * 16))
    await output(talk, b"t" * 16)  # the attachment has been read by now
    talk.say(open_session(b"s" * 16, draft_key=b""))
    await output(talk, b"s" * 16)
    assert verifier.service.drafters.dropped == {"wrong_key": 1}


async def test_a_closed_session_frees_its_blocks_and_the_router_hears_the_load(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    await talk.hear()
    talk.say(verifier_pb2.VerifierCommand(close=verifier_pb2.CloseSession(session_id=b"s" * 16)))
    while (await talk.hear()).load.kv_usage > 0:
        pass


async def test_the_round_trip_can_be_measured(verifier: Running) -> None:
    drafting, talk = await drafter(verifier), await router(verifier)
    drafting.say(verifier_pb2.DraftBatch(stamp_us=77, attach=attach(b"s" * 16).attach))
    talk.say(open_session(b"s" * 16))
    batch = await drafting.hear()
    assert batch.echo_us == 77


async def test_steps_without_a_draft_are_counted_as_starvation(verifier: Running) -> None:
    talk = await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=30, num_speculative_tokens=0))
    await output(talk, b"s" * 16)
    assert verifier.service.stats()["draft_starvation"] == 0
    talk.say(open_session(b"t" * 16, max_tokens=30))
    await output(talk, b"t" * 16)
    assert verifier.service.stats()["draft_starvation"] > 0.5
    assert verifier.service.stepper.load.goodput > 0


async def test_a_router_hears_of_no_step_without_a_session_of_its_own(verifier: Running) -> None:
    other = await router(verifier)
    (idle,) = verifier.service.routers._peers
    talk = await router(verifier)
    reported = []
    idle.report = lambda load: reported.append(load)  # type: ignore[method-assign]
    talk.say(open_session(b"s" * 16, max_tokens=20))
    assert len(await output(talk, b"s" * 16)) == 20
    assert not reported and not idle._ready.is_set()
    other.call.cancel()


async def test_a_seat_is_left_at_a_turn_that_can_be_told_whatever_a_router_says(verifier: Running) -> None:
    most, talk = 2**32 - 1, await router(verifier)
    talk.say(open_session(b"s" * 16, max_tokens=1000))
    for seat in (most, 0):
        ended = verifier_pb2.EndDrafts(session_id=b"s" * 16, seat=seat, turn=most)
        talk.say(verifier_pb2.VerifierCommand(end_drafts=ended))
    while (running := verifier.stepper.get(b"s" * 16)) is None or not running.seat(0).turn:
        await talk.hear()
    assert [seat.turn for seat in running.seats] == [most]
    talk.call.cancel()
