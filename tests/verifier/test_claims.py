"""Claims of drafters to sessions: before these come, with a wrong key, and to some that never come."""

from __future__ import annotations

import asyncio

from outrider.v1 import verifier_pb2
from tests.verifier.talk import KEY, Running, attach, drafter, open_session, router
from tests.verifier.test_drafters import OURS, THEIRS, batch, opened, until
from verifier.misbehavior import LIMIT, TOO_MANY_CLAIMS, WRONG_KEY


async def test_a_claim_with_the_wrong_key_takes_nothing_from_who_has_the_right_one(verifier: Running) -> None:
    right, wrong, talk = await drafter(verifier, "r"), await drafter(verifier, "w"), await router(verifier)
    drafters = verifier.service.drafters
    right.say(attach(OURS))
    await until(lambda: any(peer.claims for peer in drafters._streams))
    wrong.say(attach(OURS, b"stolen"))
    await until(lambda: all(peer.claims for peer in drafters._streams))
    talk.say(opened(OURS))
    assert (await right.hear()).commits[0].session_id == OURS
    assert drafters.dropped == {"wrong_key": 1}
    wrong.say(batch(session_id=OURS, tokens=[1]))
    await until(lambda: drafters.dropped["not_attached"] == 1)


async def test_claims_without_end_push_out_nobody_elses(verifier: Running) -> None:
    right, wrong, talk = await drafter(verifier, "r"), await drafter(verifier, "w"), await router(verifier)
    drafters = verifier.service.drafters
    right.say(attach(OURS))
    await until(lambda: any(peer.claims for peer in drafters._streams))
    many = [verifier_pb2.Attach(session_id=i.to_bytes(16), draft_key=KEY) for i in range(5000)]
    wrong.say(verifier_pb2.DraftBatch(attach=many))
    await until(lambda: drafters.dropped[TOO_MANY_CLAIMS] > 3000)
    talk.say(opened(OURS))
    assert (await right.hear()).commits[0].session_id == OURS


async def test_who_claims_many_sessions_that_never_come_drafts_on(verifier: Running) -> None:
    """Clients hang up, and routers are lost: that is no fault of the drafter that was told of them."""
    one, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(THEIRS, max_tokens=900))
    one.say(attach(THEIRS))
    await one.hear()
    claims = [verifier_pb2.Attach(session_id=i.to_bytes(16), draft_key=KEY) for i in range(1100)]
    one.say(verifier_pb2.DraftBatch(attach=claims))
    for claim in claims[:100]:
        one.say(verifier_pb2.DraftBatch(attach=[claim]))
    await until(lambda: verifier.service.drafters.dropped[TOO_MANY_CLAIMS] > 100)
    one.say(attach(OURS))
    talk.say(opened(OURS))
    while not any(commit.session_id == OURS for commit in (await one.hear()).commits):
        pass


async def test_a_session_that_is_opened_anew_again_and_again_costs_no_drafter_anything(
    verifier: Running,
) -> None:
    """Its client leaves and resumes: what its drafter says then is of the former opening. One such client had
    honest drafters cut off for everybody, a minute at a time."""
    one, talk = await drafter(verifier), await router(verifier)
    drafters, third = verifier.service.drafters, b"3" * 16
    talk.say(opened(THEIRS))
    one.say(attach(THEIRS))
    await one.hear()
    while drafters.dropped[WRONG_KEY] < 2 * LIMIT:
        if verifier.stepper.get(OURS) is None:
            talk.say(open_session(OURS, max_tokens=900, draft_key=b"now"))
            await until(lambda: verifier.stepper.get(OURS) is not None)
        one.say(attach(OURS, b"former"))
        await asyncio.sleep(0.002)
    one.say(attach(third))
    await until(lambda: any(third in peer.claims for peer in drafters._streams))
    talk.say(opened(third))
    while not any(commit.session_id == third for commit in (await one.hear()).commits):
        pass
