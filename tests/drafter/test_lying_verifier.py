"""What a verifier that lies costs a drafter, and its sessions of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from drafter import link as link_module
from drafter.link import BURST_BYTES, ENTRIES_AT_ONCE, IDLE_ENTRY_UNITS, VerifierLink
from drafter.session import DraftSession, DraftSpec
from outrider.net.allowance import CutOff
from outrider.sampling.params import SamplingParams
from outrider.wire.hello import Identity, Role
from outrider.wire.session import SessionParams
from outrider.wire.speculation import Attach, Commit, CommitBatch

ID, KEY, PROMPT, MOST = b"s" * 16, b"k" * 21, (1, 2), 50


@asynccontextmanager
async def link_of(
    commits: list[int], clock: Callable[[], float] = lambda: 0.0
) -> AsyncIterator[tuple[VerifierLink, DraftSession]]:
    """A link with a session; `commits` gets the base of each commit that is handed on."""
    spec = DraftSpec(ID, SessionParams(PROMPT, SamplingParams(), MOST), (), KEY, 100)
    session = DraftSession(spec, 8)

    def on_commit(session: DraftSession, base: int, tokens: object) -> None:
        assert isinstance(tokens, list)
        commits.append(base)
        session.apply(base, tokens)

    link = VerifierLink(
        "127.0.0.1:1",
        Identity(Role.DRAFTER, "d", 1, "", "tokenizer"),
        on_commit,
        lambda *ended: None,
        lambda: None,
        clock,
    )
    link.add(session)
    try:
        yield link, session
    finally:
        await link.close()


@pytest.mark.parametrize("base", [3, 52, 10**9])
async def test_a_log_grows_to_what_was_asked_for_and_no_further(base: int) -> None:
    """Four hundred thousand tokens a message had made a drafter's memory grow by 100 MB a second, without
    end."""
    commits: list[int] = []
    async with link_of(commits) as (link, session):
        await link._heard(CommitBatch(commits=[Commit(ID, 2, [7] * (MOST - 1)), Commit(ID, 51, [7])]))
        assert len(session.log) == len(PROMPT) + MOST
        with pytest.raises(CutOff, match="more tokens than were asked for"):
            await link._heard(CommitBatch(commits=[Commit(ID, base, [7] * MOST)] * 2))
        assert commits == [2, 51]
        assert len(session.log) == len(PROMPT) + MOST


NOTHING = [
    pytest.param(CommitBatch(commits=[Commit(ID, 2, [])] * 10_000), id="no tokens"),
    pytest.param(CommitBatch(commits=[Commit(ID, 2, [7])] * 10_000), id="the same token"),
    pytest.param(CommitBatch(commits=[Commit(b"o" * 16, 2, [7])] * 10_000), id="unknown session"),
    pytest.param(CommitBatch(revoked=[Attach(ID, b"another")] * 10_000), id="unknown right"),
]


@pytest.mark.parametrize("batch", NOTHING)
async def test_what_tells_a_session_nothing_ends_soon(batch: CommitBatch) -> None:
    """Twenty thousand commits without tokens, 400 KB, had held a drafter's event loop for a second."""
    commits: list[int] = []
    async with link_of(commits) as (link, _):
        with pytest.raises(CutOff):
            await link._heard(batch)
        assert len(commits) <= BURST_BYTES // IDLE_ENTRY_UNITS + 1


async def test_messages_are_counted_and_so_are_the_sessions_that_rest_by_them() -> None:
    async with link_of([]) as (link, _):
        with pytest.raises(CutOff):
            for number in range(BURST_BYTES // link_module.MESSAGE_UNITS + 1):
                await link._heard(CommitBatch(rest=number % 2 > 0))


async def test_others_have_their_turn_amid_a_message() -> None:
    commits: list[int] = []
    seen: list[int] = []
    async with link_of(commits) as (link, _):
        over = asyncio.Event()

        async def look() -> None:
            while not over.is_set():
                seen.append(len(commits))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        await link._heard(CommitBatch(commits=[Commit(ID, 2, [])] * 1000))
        over.set()
        await looking
    assert max(b - a for a, b in pairwise(seen)) <= ENTRIES_AT_ONCE


async def test_a_sound_verifier_is_never_cut_off() -> None:
    """It commits a token at a time, repeats what was not acknowledged, and greets each session that comes."""
    commits: list[int] = []
    async with link_of(commits, time.monotonic) as (link, session):
        for _ in range(1000):
            await link._heard(CommitBatch(commits=[Commit(ID, 2, [])]))
        for end in range(1, MOST + 1):
            await link._heard(CommitBatch(commits=[Commit(ID, 2, [7] * end)]))
        await link._heard(CommitBatch(revoked=[Attach(ID, KEY)]))
        assert len(session.log) == len(PROMPT) + MOST
