"""What waits for a drafter that does not read, or does not acknowledge."""

from __future__ import annotations

import asyncio

import pytest

from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from outrider.wire.speculation import CommitBatch
from verifier.bounded_map import REMEMBERED
from verifier.drafter_peer import CLAIM_SECONDS, MAX_CLAIMS, MOST_REPEATED, MOST_TOLD, DrafterPeer
from verifier.drafter_seat import DrafterSeat
from verifier.session import Session, SessionSpec


def session(output: int = 0) -> Session:
    spec = SessionSpec(
        b"s" * 16, SessionParams((1, 2), SamplingParams(), 10**6), (5,) * output, 100, b"k" * 16
    )
    return Session(spec, 4)


async def next_batch(peer: DrafterPeer) -> CommitBatch:
    return await anext(peer.batches())


async def test_a_commit_starts_at_what_was_acknowledged() -> None:
    peer, one = DrafterPeer("d", lambda: 0.0), session()
    seat = DrafterSeat(one)
    peer.attached(seat)
    one.log += range(10)
    peer.committed(seat)
    (commit,) = (await next_batch(peer)).commits
    assert (commit.base, list(commit.tokens)) == (2, list(range(10)))
    seat.acknowledged = 7
    one.log += range(3)
    peer.committed(seat)
    (commit,) = (await next_batch(peer)).commits
    assert (commit.base, list(commit.tokens)) == (7, one.log[7:])


async def test_who_never_acknowledges_gets_no_ever_longer_commits_and_misses_nothing() -> None:
    peer, one = DrafterPeer("d", lambda: 0.0), session()
    seat = DrafterSeat(one)
    peer.attached(seat)
    known = one.log[:]
    for step in range(200):
        one.log += [step] * 50
        peer.committed(seat)
        (commit,) = (await next_batch(peer)).commits
        assert len(commit.tokens) <= MOST_REPEATED + 50
        assert commit.base <= len(known)
        known[commit.base :] = commit.tokens
    assert known == one.log


async def test_an_acknowledgement_that_goes_back_brings_no_more() -> None:
    peer, one = DrafterPeer("d", lambda: 0.0), session()
    seat = DrafterSeat(one)
    peer.attached(seat)
    one.log += [1] * 5000
    peer.committed(seat)
    await next_batch(peer)
    seat.acknowledged = 2
    one.log += [1]
    peer.committed(seat)
    (commit,) = (await next_batch(peer)).commits
    assert len(commit.tokens) == MOST_REPEATED + 1


async def test_what_waits_for_one_that_does_not_read_is_bounded() -> None:
    peer, one = DrafterPeer("d", lambda: 0.0), session()
    seat = DrafterSeat(one)
    for turn in range(3 * REMEMBERED):
        peer.revoke(turn.to_bytes(16), b"k")
        peer.attached(seat)
        peer.committed(seat)
    assert peer.unsent == REMEMBERED + 1
    told = [claim.session_id for claim in (await next_batch(peer)).revoked]
    assert (told[0], told[-1]) == ((2 * REMEMBERED).to_bytes(16), (3 * REMEMBERED - 1).to_bytes(16))


async def test_of_a_session_that_it_has_lost_it_hears_nothing_more() -> None:
    peer, one = DrafterPeer("d", lambda: 0.0), session()
    seat = DrafterSeat(one)
    peer.attached(seat)
    peer.detached(b"s" * 16)
    peer.beat()
    assert not (await next_batch(peer)).commits


async def test_an_old_claim_goes_where_there_are_too_many() -> None:
    peer = DrafterPeer("d", lambda: 0.0)
    assert all(peer.claim(turn.to_bytes(16), b"k") for turn in range(MAX_CLAIMS))
    assert not peer.claim(b"s" * 16, b"k")
    assert len(peer.claims) == MAX_CLAIMS and b"s" * 16 in peer.claims


async def test_a_claim_to_what_never_comes_is_forgotten() -> None:
    now = 0.0
    peer = DrafterPeer("d", lambda: now)
    for turn in range(MAX_CLAIMS):
        peer.claim(turn.to_bytes(16), b"k")
    peer.claim((0).to_bytes(16), b"k2")
    now = CLAIM_SECONDS + 1
    assert peer.claim(b"s" * 16, b"k") and list(peer.claims) == [b"s" * 16]


async def test_while_it_rests_it_hears_of_no_commit_and_then_of_all_that_it_has_missed() -> None:
    peer, one = DrafterPeer("d", lambda: 0.0, resting=True), session()
    seat = DrafterSeat(one)
    peer.attached(seat)
    for token in range(2000):
        one.log.append(token)
        peer.committed(seat)
    peer.rest(True)
    with pytest.raises(TimeoutError):  # it is left in peace, but for signs of life
        async with asyncio.timeout(0):
            await next_batch(peer)
    peer.beat()
    batch = await next_batch(peer)
    assert batch.rest and not batch.commits
    peer.rest(False)
    batch = await next_batch(peer)
    (commit,) = batch.commits
    assert not batch.rest and (commit.base, list(commit.tokens)) == (2, list(range(2000)))


async def test_what_it_has_missed_comes_in_messages_of_bounded_size() -> None:
    peer = DrafterPeer("d", lambda: 0.0, resting=True)
    for number in range(20):
        spec = SessionSpec(
            bytes([number]) * 16, SessionParams((1, 2), SamplingParams(), 10**6), (), 100, b"k" * 16
        )
        seat = DrafterSeat(Session(spec, 4))
        peer.attached(seat)
        seat.session.log += range(MOST_TOLD // 8)
        peer.committed(seat)
    peer.rest(False)
    told = [[commit.session_id for commit in (await next_batch(peer)).commits] for _ in range(3)]
    assert [len(ids) for ids in told] == [8, 8, 4]
    assert {each for ids in told for each in ids} == {bytes([number]) * 16 for number in range(20)}
