"""Nineteen kinds of hostile drafter at a real verifier: what they cost, when five seconds have passed.

Seconds are virtual (virtual_time.py), so all is counted: rows that were verified in vain, the time that was
waited in vain, and the text's tokens a second against those of plain decoding.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.hostile_kinds import KINDS, K, Kind, Text, drafts
from outrider.errors import OutriderError
from outrider.net.draft_right import MOST_SEATS, right
from outrider.wire.hello import Identity, Role
from outrider.wire.methods import SPECULATE
from outrider.wire.speculation import Attach, CommitBatch, DraftBatch
from tests.verifier.virtual_time import KEY, PROMPT, VOCAB, Verifier, run, truth
from verifier.reading_allowance import IDENTITY_RATE, MESSAGE_SECONDS

STEP, ROW = 0.02, 0.0004  # seconds of a step of one token, and of each further one
STEPS = {1: STEP, 65: STEP + 64 * ROW}
SECONDS = 5.0
SESSION = b"s" * 16


TEXT = Text(truth, VOCAB, len(PROMPT))


def attached(verifier: Verifier, seat: int) -> tuple[asyncio.Queue[DraftBatch], AsyncIterator[CommitBatch]]:
    """Returns what a drafter with the right to that seat of the session sends, and what it hears."""
    outgoing: asyncio.Queue[DraftBatch] = asyncio.Queue()
    outgoing.put_nowait(DraftBatch(hello=Identity(Role.DRAFTER, f"d{seat}", 1).hello()))
    outgoing.put_nowait(DraftBatch(attach=[Attach(SESSION, right(KEY, seat, seat))]))

    async def raws() -> AsyncIterator[bytes]:
        while True:
            yield SPECULATE.asked.to_bytes(await outgoing.get())

    return outgoing, verifier.drafters.speculate(raws(), f"host {seat}")


async def hostile(verifier: Verifier, kind: Kind, seat: int) -> None:
    """Drafts so until it is refused: whatever its seat, the same."""
    outgoing, heard = attached(verifier, seat)
    step, rng = 0, random.Random(1)
    loop = asyncio.get_running_loop()
    try:
        async for batch in heard:
            for commit in batch.commits:
                end = commit.base + len(commit.tokens)  # of what is committed
                for steps, draft in drafts(kind, TEXT, SESSION, end, step, rng):
                    loop.call_later(steps * STEP, outgoing.put_nowait, DraftBatch(drafts=[draft]))
                step += 1
    except OutriderError:
        return


@dataclass
class Counted:
    committed: int
    in_vain: int  # rows
    waited: float  # steps
    read: int  # messages


async def _counted(kind: Kind, seats: int) -> Counted:
    """What is counted in SECONDS, after SECONDS."""
    verifier = Verifier(STEPS)
    serving = asyncio.create_task(verifier.serve(SESSION, K))
    drafting = [asyncio.create_task(hostile(verifier, kind, seat)) for seat in range(seats)]
    waits: list[float] = []
    judge = verifier.stepper._wait.judge

    def note(waited: float, *others: Any) -> None:
        waits.append(waited)
        judge(waited, *others)

    verifier.stepper._wait.judge = note  # type: ignore[method-assign]
    counts: list[tuple[int, int, float, int]] = []
    for _ in range(2):
        await asyncio.sleep(SECONDS)
        in_vain = verifier.verified - verifier.accepted
        counts.append((verifier.committed, in_vain, sum(waits) / STEP, verifier.read))
    running = verifier.stepper.get(SESSION)
    assert running is not None
    output = running.session.log[len(PROMPT) :]
    assert output == [truth(len(PROMPT) + at) for at in range(len(output))]
    for task in (serving, *drafting):
        task.cancel()
    await asyncio.gather(serving, *drafting, return_exceptions=True)
    before, after = counts
    return Counted(after[0] - before[0], after[1] - before[1], after[2] - before[2], after[3] - before[3])


def counted(kind: Kind, seats: int = 1) -> Counted:
    found = run(_counted(kind, seats))
    assert isinstance(found, Counted)
    return found


def test_there_are_nineteen() -> None:
    assert len(KINDS) == 19


@pytest.mark.parametrize("name", list(KINDS))
def test_a_hostile_drafter_costs_next_to_nothing(name: str) -> None:
    judge(counted(KINDS[name]))


@pytest.mark.parametrize(
    "name", ["all wrong", "the wrong tail", "right and wrong by turns", "random full trees"]
)
def test_several_that_are_agreed_cost_no_more_than_one(name: str) -> None:
    """In all seats of a session, and saying the same: a token that several say counts as likelier."""
    judge(counted(KINDS[name], MOST_SEATS), MOST_SEATS)


def judge(found: Counted, drafters: int = 1) -> None:
    plain = SECONDS / STEP
    assert found.committed >= 0.97 * plain
    gained = max(found.committed - plain, 0.0)
    assert found.in_vain <= 0.05 * plain + 2.5 * gained
    assert found.waited <= 0.02 * plain + 0.5 * gained
    assert found.read * MESSAGE_SECONDS <= drafters * (IDENTITY_RATE * SECONDS + gained * STEP)
