"""How much a real verifier reads of drafters, and of whom nothing at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import grpc
import pytest

from outrider.net.draft_right import right
from tests.verifier.talk import KEY, Running, attach, drafter, greeting, open_session, output, router
from tests.verifier.test_drafters import (
    LENGTH,
    OURS,
    THEIRS,
    Honest,
    batch,
    opened,
    status,
    story,
    until,
)
from verifier.misbehavior import HELD_BACK, NOT_GIVEN, UNANNOUNCED
from verifier.reading_allowance import BURST_SECONDS, MESSAGE_SECONDS, ReadingAllowance


async def test_empty_drafts_on_many_streams_are_read_no_more_than_on_one(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They name sessions that nobody has, and are in nobody's name."""
    messages = 12  # that the identity may cost, its hellos included
    monkeypatch.setattr("verifier.reading_allowance.IDENTITY_RATE", 1e-9)
    monkeypatch.setattr("verifier.reading_allowance.BURST_SECONDS", messages * MESSAGE_SECONDS)
    drafters, talk = verifier.service.drafters, await router(verifier)
    drafters._processor_clock = lambda: 0.0
    read: list[object] = []
    monkeypatch.setattr(drafters, "_offer", lambda _, draft: read.append(draft))
    empty = batch(session_id=OURS)
    empty.attach.add(session_id=OURS, draft_key=right(KEY, 0))
    for flood in [await drafter(verifier, f"flood {number}") for number in range(4)]:
        for _ in range(50):
            flood.say(empty)
    talk.say(opened(THEIRS))
    assert len(await output(talk, THEIRS)) == LENGTH
    assert 1 <= len(read) <= messages and drafters.dropped[HELD_BACK] == 4


async def test_what_a_long_batch_takes_is_held_against_the_allowance_while_it_is_read(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier.reading_allowance.IDENTITY_RATE", 1e-9)
    monkeypatch.setattr("verifier.reading_allowance.BURST_SECONDS", 10e-3)
    drafters, read = verifier.service.drafters, list[object]()
    monkeypatch.setattr(drafters, "_offer", lambda _, draft: read.append(draft))
    drafters._processor_clock = lambda: 1e-3 * len(read)
    long = batch(session_id=OURS, tokens=[1] * 24)
    for _ in range(99):
        long.drafts.add().CopyFrom(long.drafts[0])
    (await drafter(verifier)).say(long)
    await until(lambda: drafters.dropped[HELD_BACK] > 0)
    assert len(read) < 30


async def test_a_drafter_earns_by_accepted_drafts_that_more_is_read_of_it(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier.reading_allowance.IDENTITY_RATE", 1e-9)
    monkeypatch.setattr("verifier.reading_allowance.BURST_SECONDS", 20 * MESSAGE_SECONDS)
    drafters, talk, honest = verifier.service.drafters, await router(verifier), await drafter(verifier)
    drafters._processor_clock = lambda: 0.0
    talk.say(open_session(b"p" * 16, max_tokens=LENGTH, num_speculative_tokens=0))
    plain = await output(talk, b"p" * 16)
    honest.say(attach(OURS))
    helping = asyncio.create_task(Honest(honest, OURS, plain).run())
    await until(lambda: any(peer.claims for peer in drafters._streams))
    talk.say(open_session(OURS, max_tokens=LENGTH, num_speculative_tokens=1))  # many small steps
    told = await story(talk, {OURS})
    assert told[OURS][0] == plain and told[OURS][1] > LENGTH // 4
    assert drafters.dropped[HELD_BACK] == 0
    helping.cancel()


async def test_who_claims_a_session_again_and_again_pays_for_what_it_is_told_again(
    verifier: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole output, each time: 160 times the work that reading the claim is."""
    monkeypatch.setattr("verifier.reading_allowance.IDENTITY_RATE", 1e-9)
    monkeypatch.setattr("verifier.reading_allowance.BURST_SECONDS", 20 * MESSAGE_SECONDS)
    monkeypatch.setattr("verifier.drafters.TOLD_SECONDS", 100 * MESSAGE_SECONDS)
    drafters, talk, again = verifier.service.drafters, await router(verifier), await drafter(verifier)
    drafters._processor_clock = lambda: 0.0
    again.say(attach(OURS))
    await until(lambda: any(peer.claims for peer in drafters._streams))
    talk.say(open_session(OURS, max_tokens=900))
    while not any(commit.tokens for commit in (await again.hear()).commits):
        pass
    assert drafters.dropped[HELD_BACK] == 0
    again.say(attach(OURS))
    await until(lambda: drafters.dropped[HELD_BACK] > 0)


async def test_who_sends_much_and_leaves_shuts_nobody_out(verifier: Running) -> None:
    """Eight messages of 15 MB in 4 seconds had left so much to be paid for by all that drafters of others,
    which connected then, were not read for a minute."""
    drafters = verifier.service.drafters

    async def says(first: bytes) -> AsyncIterator[bytes]:
        yield first
        await asyncio.Event().wait()

    for _ in range(100):
        stream = drafters.speculate(says(b"x" * 2**22), host="a")
        leaving = asyncio.create_task(anext(stream))
        await asyncio.wait({leaving}, timeout=0.002)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    honest = drafters.speculate(says(greeting(verifier).SerializeToString()), host="b")
    assert (await anext(honest)).hello.worker_id == "v"
    await honest.aclose()


@pytest.mark.parametrize("claims", [True, False])
async def test_a_stream_that_no_router_has_announced_is_refused(
    verifier: Running, claims: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verifier.drafters.ANNOUNCED_SECONDS", 0.1 if claims else 1e6)
    talk, stranger, known = await router(verifier), await drafter(verifier, "s"), await drafter(verifier, "k")
    talk.say(open_session(OURS, max_tokens=1000))
    known.say(attach(OURS))
    assert (await known.hear()).commits[0].session_id == OURS
    said = batch(tokens=[1])
    if claims:
        said.MergeFrom(attach(THEIRS))  # which may come still, for a while
    stranger.say(said)
    ended = await status(stranger)
    assert ended.code() is (grpc.StatusCode.UNAVAILABLE if claims else grpc.StatusCode.FAILED_PRECONDITION)
    assert "right to" in (ended.details() or "")
    dropped = verifier.service.drafters.dropped
    assert dropped[UNANNOUNCED] == claims and dropped[NOT_GIVEN] == (not claims)
    assert [peer.name.split()[0] for peer in verifier.service.drafters._streams] == ["k"]


async def test_what_accepted_drafts_saved_later_pays_for_no_message_before(verifier: Running) -> None:
    """Else who has a draft accepted now and then could send a megabyte each time."""
    drafters, read = verifier.service.drafters, list[object]()
    allowance = ReadingAllowance().of("a")
    allowance.spend(BURST_SECONDS, drafters._clock())

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b""
            allowance.earn(MESSAGE_SECONDS / 2)  # a draft was accepted meanwhile

    async def listen() -> None:
        async for each in drafters._decoded(messages(), allowance):
            read.append(each)

    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await listen()
    assert 1 <= len(read) < 100 and drafters.dropped[HELD_BACK] > 0
