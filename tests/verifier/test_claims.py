"""Claims of drafters to sessions: before these come, with a wrong key, and to some that never come."""

from __future__ import annotations

from outrider.v1 import verifier_pb2
from tests.verifier.talk import KEY, Running, attach, drafter, open_session, router
from tests.verifier.test_drafters import OURS, THEIRS, batch, opened, until
from verifier.misbehavior import TOO_MANY_CLAIMS


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
