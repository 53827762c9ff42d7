"""Drafters that break the protocol, at a real verifier: the text stays, others go on, all is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.net.draft_right import right
from outrider.v1 import verifier_pb2
from outrider.wire.hello import MAX_NAME
from outrider.wire.methods import SPECULATE
from outrider.wire.speculation import MAX_BATCH_BYTES
from tests.verifier.talk import KEY, Running, Talk, attach, drafter, greeting, open_session, output, router
from verifier.misbehavior import HELD_BACK, LIMIT, WEIGHTS

PROMPT = 3  # tokens of talk.open_session's prompt
OURS, THEIRS = b"o" * 16, b"t" * 16  # sessions: the honest drafter's, the hostile one's
LENGTH = 120
TOP = 2**32 - 1


def batch(**draft: Any) -> verifier_pb2.DraftBatch:
    return verifier_pb2.DraftBatch(drafts=[verifier_pb2.Draft(**{"session_id": THEIRS, "base": 3} | draft)])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def status(talk: Talk) -> grpc.aio.AioRpcError:
    """With which the stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while True:
            await talk.hear()
    return ended.value


class Honest:
    """Drafts all that will be right for one session, and acknowledges what it hears."""

    def __init__(self, talk: Talk, session_id: bytes, text: list[int]) -> None:
        self._talk, self._id, self._text = talk, session_id, text

    async def run(self) -> None:
        while True:
            heard = await self._talk.hear()
            for commit in heard.commits:
                base = commit.base + len(commit.tokens)
                draft = verifier_pb2.Draft(session_id=self._id, base=base, tokens=self._text[base - PROMPT :])
                self._talk.say(verifier_pb2.DraftBatch(drafts=[draft]))


async def story(talk: Talk, wanted: set[bytes]) -> dict[bytes, tuple[list[int], int]]:
    """Returns each session's output, and how many of its tokens had been drafted."""
    told: dict[bytes, tuple[list[int], int]] = {session_id: ([], 0) for session_id in wanted}
    while wanted:
        events = await talk.hear()
        for step in events.committed:
            tokens, accepted = told[step.session_id]
            assert step.base == PROMPT + len(tokens)
            told[step.session_id] = tokens + list(step.tokens), accepted + step.accepted
        wanted = wanted - {end.session_id for end in events.finished}
    return told


numbers = st.one_of(st.integers(0, 60), st.sampled_from([0, 2, 3, 198, 199, 2**31 - 1, 2**31, TOP]))
ids = st.one_of(st.sampled_from([OURS, THEIRS, b"", b"short", b"x" * 16]), st.binary(max_size=20))
drafts = st.builds(
    verifier_pb2.Draft,
    session_id=st.one_of(st.just(THEIRS), ids),
    base=numbers,
    tokens=st.lists(st.one_of(st.integers(0, 198), numbers), max_size=30),
    parents=st.one_of(
        st.just([]), st.lists(st.integers(-2, 30), max_size=30), st.lists(st.integers(-(2**31), 2**31 - 1))
    ),
    survival=st.one_of(st.just(b""), st.binary(max_size=30)),
)
claims = st.builds(
    verifier_pb2.Attach,
    session_id=ids,
    draft_key=st.one_of(st.just(KEY), st.just(right(KEY, 0)[:-1]), st.just(b""), st.binary(max_size=100)),
)
batches = st.builds(
    verifier_pb2.DraftBatch,
    attach=st.lists(claims, max_size=3),
    drafts=st.lists(drafts, max_size=6),
    stamp_us=st.integers(0, 2**64 - 1),
).map(verifier_pb2.DraftBatch.SerializeToString)
sayings = st.lists(st.one_of(batches, batches, batches, st.binary(max_size=60)), min_size=1, max_size=12)


def opened(session_id: bytes) -> verifier_pb2.VerifierCommand:
    return open_session(session_id, max_tokens=LENGTH)


@pytest.fixture
async def plain(verifier: Running) -> list[int]:
    """What plain decoding gives."""
    talk = await router(verifier)
    talk.say(open_session(b"p" * 16, max_tokens=LENGTH, num_speculative_tokens=0))
    text = await output(talk, b"p" * 16)
    talk.call.cancel()
    return text


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(said=sayings)
async def test_nothing_that_a_drafter_says_changes_a_text_or_disturbs_an_honest_one(
    verifier: Running, plain: list[int], said: list[bytes]
) -> None:
    drafters = verifier.service.drafters
    drafters._misbehaviors._by_name.clear()  # each example is a service of its own
    for session_id in (OURS, THEIRS):
        drafters._ended.discard(session_id)
    talk = await router(verifier)
    right, wrong = await drafter(verifier, "honest"), raw(verifier)
    wrong.say(greeting(verifier, "hostile").SerializeToString())
    await wrong.hear()
    right.say(attach(OURS))
    wrong.say(attach(THEIRS).SerializeToString())
    helping = asyncio.create_task(Honest(right, OURS, plain).run())
    await until(lambda: sum(len(peer.claims) for peer in drafters._streams) == 2)
    talk.say(opened(THEIRS))
    talk.say(opened(OURS))
    for message in said:
        wrong.say(message)
    told = await story(talk, {OURS, THEIRS})
    assert told[OURS][0] == told[THEIRS][0] == plain
    assert told[OURS][1] > LENGTH // 4
    helping.cancel()
    for each in (wrong, right, talk):
        each.call.cancel()
    await until(lambda: not drafters._streams)


def raw(verifier: Running) -> Talk:
    """A stream on which the drafter says bytes."""
    heard = verifier_pb2.CommitBatch.FromString
    return Talk.start(verifier.connection.stream_stream(SPECULATE.path, bytes, heard))


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("bad_token", batch(tokens=[199])),
        ("bad_token", batch(tokens=[2**31])),
        ("bad_token", batch(tokens=[1, TOP])),
        ("bad_tree", batch(tokens=[1, 2], parents=[-1])),
        ("bad_tree", batch(tokens=[1, 2], parents=[-1, 1])),
        ("bad_tree", batch(tokens=[1, 2], parents=[-2, -1])),
        ("bad_tree", batch(tokens=[1, 2], survival=b"\xff")),
        ("ahead", batch(base=1003, tokens=[1])),
        ("beyond", batch(base=1004, tokens=[1])),
        ("beyond", batch(base=TOP, tokens=[1])),
        ("before_output", batch(base=0, tokens=[1])),
        ("too_long", batch(tokens=[1] * 3000)),
        ("too_long", batch(base=TOP, tokens=[1] * 3000)),  # wherever it would begin
        ("not_given", batch(session_id=OURS, tokens=[1])),
        ("not_given", batch(session_id=b"", tokens=[1])),
        ("wrong_key", attach(OURS, b"wrong")),
        ("bad_attach", attach(b"short")),
    ],
)
async def test_what_cannot_be_used_is_counted_by_reason(
    verifier: Running, reason: str, said: verifier_pb2.DraftBatch
) -> None:
    talk, wrong = await router(verifier), await drafter(verifier)
    talk.say(open_session(THEIRS, max_tokens=1000))
    talk.say(open_session(OURS, max_tokens=1000))
    wrong.say(attach(THEIRS))
    await wrong.hear()
    wrong.say(said)
    dropped = verifier.service.drafters.dropped
    await until(lambda: dropped[reason] == 1)
    assert set(dropped) == {reason}
    assert verifier.service.stats()[f"dropped_{reason}"] == 1
    verifier.service.routers.beat()
    events = await talk.hear()
    while not events.dropped:
        events = await talk.hear()
    assert events.dropped == {reason: 1}


@pytest.mark.parametrize(
    ("reason", "said", "told"),
    [
        ("garbage", b"\xff" * 9, "the bytes are no DraftBatch"),
        ("too_large", bytes(MAX_BATCH_BYTES + 1), "a DraftBatch may have at most 1048576 bytes, not 1048577"),
    ],
)
async def test_bytes_that_are_no_batch_end_the_stream_with_a_sentence(
    verifier: Running, reason: str, said: bytes, told: str
) -> None:
    talk = raw(verifier)
    talk.say(greeting(verifier).SerializeToString())
    talk.say(said)
    ended = await status(talk)
    assert ended.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ended.details() == told
    assert verifier.service.drafters.dropped == {reason: 1}


@pytest.mark.parametrize("said", [b"\xff" * 9, bytes(MAX_BATCH_BYTES + 1)], ids=["garbage", "too_large"])
async def test_who_comes_back_with_such_bytes_again_and_again_is_refused(
    verifier: Running, said: bytes
) -> None:
    opening = await router(verifier)
    opening.say(open_session(THEIRS, max_tokens=1000))
    for _ in range(3):  # twice would be enough, but for what leaks away meanwhile
        talk = raw(verifier)
        talk.say(greeting(verifier).SerializeToString())
        talk.say(attach(THEIRS).SerializeToString())
        while not (await talk.hear()).commits:
            pass
        talk.say(said)
        await status(talk)
    again = Talk.start(verifier.stub.Speculate)
    again.say(greeting(verifier))
    assert "refused for another" in ((await status(again)).details() or "")


@pytest.mark.parametrize(
    "said", [b"\xff" * 9, bytes(MAX_BATCH_BYTES + 1), attach(b"short").SerializeToString() * 9]
)
async def test_what_a_stranger_does_is_not_held_against_whose_name_it_gives(
    verifier: Running, said: bytes
) -> None:
    """Who shows no right that a router gave may say any name: that of an honest drafter, which would be
    refused in its place."""
    for _ in range(9):
        talk = raw(verifier)
        talk.say(greeting(verifier, "honest").SerializeToString())
        await talk.hear()
        talk.say(said)
        if said.startswith(b"\xff") or len(said) > MAX_BATCH_BYTES:
            await status(talk)
    dropped = verifier.service.drafters.dropped
    await until(lambda: dropped.total() >= 9)
    talk, honest = await router(verifier), await drafter(verifier, "honest")
    talk.say(open_session(OURS, max_tokens=1000))
    honest.say(attach(OURS))
    assert (await honest.hear()).commits[0].session_id == OURS


async def test_a_name_without_end_is_refused(verifier: Running) -> None:
    talk = Talk.start(verifier.stub.Speculate)
    talk.say(greeting(verifier, "n" * (MAX_NAME + 1)))
    assert "worker_id" in ((await status(talk)).details() or "")
    await drafter(verifier, "n" * MAX_NAME)


async def test_one_that_keeps_misbehaving_is_cut_off_and_the_router_is_told(verifier: Running) -> None:
    talk, wrong = await router(verifier), await drafter(verifier)
    talk.say(open_session(THEIRS, max_tokens=1000))
    wrong.say(attach(THEIRS))
    await wrong.hear()
    both = batch(tokens=[TOP])  # and something that weighs less, which adds nothing to it
    both.drafts.add(session_id=OURS, base=3, tokens=[1])
    enough = int(LIMIT / WEIGHTS["bad_token"]) + 1  # one more, for what leaks away meanwhile
    for _ in range(enough):  # and not more: gRPC may tell who writes after the end of that, not of its cause
        wrong.say(both)
    ended = await status(wrong)
    assert verifier.service.drafters.dropped["bad_token"] >= LIMIT / WEIGHTS["bad_token"]
    assert ended.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "cut off" in ended.details() and "bad_token" in ended.details()
    events = await talk.hear()
    while not events.cut_off:
        events = await talk.hear()
    cut = [(each.session_id, each.turn, each.reason) for each in events.cut_off]
    assert cut == [(THEIRS, 0, "bad_token")]
    again = Talk.start(verifier.stub.Speculate)
    again.say(greeting(verifier))
    assert "refused for another" in ((await status(again)).details() or "")
    running = verifier.stepper.get(THEIRS)
    assert running is not None and not running.drafted
    renamed = await drafter(verifier, "another")  # who knows what the one that was cut off knew
    renamed.say(attach(THEIRS))
    assert list((await renamed.hear()).revoked) == list(attach(THEIRS).attach)
    assert not running.drafted and verifier.service.drafters.dropped["former_turn"] == 1
    renamed.say(attach(THEIRS, turn=1))
    assert (await renamed.hear()).commits[0].session_id == THEIRS


async def test_a_drafter_that_was_replaced_cannot_take_the_session_back(verifier: Running) -> None:
    first, second, talk = await drafter(verifier, "1"), await drafter(verifier, "2"), await router(verifier)
    talk.say(open_session(OURS, max_tokens=1000))
    first.say(attach(OURS))
    await first.hear()
    second.say(attach(OURS, turn=1))
    await second.hear()
    while not (heard := await first.hear()).revoked:
        pass
    assert list(heard.revoked) == list(attach(OURS).attach)
    drafters = verifier.service.drafters
    first.say(attach(OURS))
    await until(lambda: drafters.dropped["former_turn"] == 1)
    peer = drafters._seats[OURS][0].peer
    assert peer is not None and peer.name.startswith("2 ")


async def test_a_drafter_whose_stream_broke_has_its_session_again(verifier: Running) -> None:
    talk, former = await router(verifier), await drafter(verifier)
    talk.say(open_session(OURS, max_tokens=1000))
    former.say(attach(OURS))
    await former.hear()
    again = await drafter(verifier)  # before the end of the former stream is seen
    again.say(attach(OURS))
    assert (await again.hear()).commits[0].session_id == OURS
    former.call.cancel()
    await until(lambda: len(verifier.service.drafters._streams) == 1)
    running = verifier.stepper.get(OURS)
    assert running is not None and running.drafted
    assert verifier.service.drafters.dropped.total() == 0


async def test_who_claims_a_session_that_is_over_hears_so(verifier: Running) -> None:
    talk, late = await router(verifier), await drafter(verifier)
    talk.say(opened(OURS))
    await output(talk, OURS)
    late.say(attach(OURS))
    while not (heard := await late.hear()).revoked:
        pass
    assert list(heard.revoked) == list(attach(OURS).attach)
    assert verifier.service.drafters.dropped.total() == 0


async def test_honest_races_are_never_an_offence(verifier: Running) -> None:
    """Drafts that are overtaken, repeated, or cross the end of their session or another drafter's coming."""
    talk, late = await router(verifier), await drafter(verifier)
    talk.say(open_session(THEIRS, max_tokens=8))
    talk.say(open_session(OURS, max_tokens=1000))
    late.say(attach(THEIRS))
    late.say(attach(OURS))
    await output(talk, THEIRS)
    other = await drafter(verifier, "other")
    for _ in range(100):
        late.say(batch(tokens=[1]))
        late.say(batch(session_id=OURS, tokens=[1]))
    other.say(attach(OURS))
    for _ in range(100):
        late.say(batch(session_id=OURS, tokens=[1]))
    dropped = verifier.service.drafters.dropped
    await until(lambda: dropped.total() >= 299)
    assert set(dropped) <= {"stale", "not_attached"}
    late.say(verifier_pb2.DraftBatch(stamp_us=7))
    assert len(verifier.service.drafters._streams) == 2


async def test_a_flood_is_read_slowly_and_others_go_on(verifier: Running) -> None:
    flood, talk = await drafter(verifier), await router(verifier)
    talk.say(open_session(THEIRS, max_tokens=900))
    flood.say(attach(THEIRS))
    await flood.hear()
    tree = verifier_pb2.Draft(session_id=THEIRS, base=3, tokens=[1] * 250, parents=range(-1, 249))
    full = verifier_pb2.DraftBatch(drafts=[tree] * 400)
    for _ in range(50):
        flood.say(full)
    dropped = verifier.service.drafters.dropped
    await until(lambda: dropped[HELD_BACK] > 0)
    talk.say(opened(OURS))
    assert len(await output(talk, OURS)) == LENGTH
    await flood.hear()  # it is slow, and not cut off
