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
from outrider.net.draft_right import right
from outrider.wire.hello import Identity, Role
from outrider.wire.methods import SPECULATE
from outrider.wire.speculation import Attach, DraftBatch
from tests.verifier.virtual_time import KEY, PROMPT, VOCAB, Verifier, run, truth
from verifier.reading_allowance import IDENTITY_RATE, MESSAGE_SECONDS

STEP, ROW = 0.02, 0.0004  # seconds of a step of one token, and of each further one
STEPS = {1: STEP, 65: STEP + 64 * ROW}
SECONDS = 5.0
SESSION = b"s" * 16


TEXT = Text(truth, VOCAB, len(PROMPT))


async def hostile(verifier: Verifier, kind: Kind) -> None:
    """Drafts so until it is refused."""
    outgoing: asyncio.Queue[DraftBatch] = asyncio.Queue()
    outgoing.put_nowait(DraftBatch(hello=Identity(Role.DRAFTER, "d", 1).hello()))
    outgoing.put_nowait(DraftBatch(attach=[Attach(SESSION, right(KEY, 0))]))

    async def raws() -> AsyncIterator[bytes]:
        while True:
            yield SPECULATE.asked.to_bytes(await outgoing.get())

    step, rng = 0, random.Random(1)
    loop = asyncio.get_running_loop()
    try:
        async for batch in verifier.drafters.speculate(raws(), "host"):
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


async def _counted(kind: Kind) -> Counted:
    """What is counted in SECONDS, after SECONDS."""
    verifier = Verifier(STEPS)
    serving = asyncio.create_task(verifier.serve(SESSION, K))
    drafting = asyncio.create_task(hostile(verifier, kind))
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
    for task in (serving, drafting):
        task.cancel()
    await asyncio.gather(serving, drafting, return_exceptions=True)
    before, after = counts
    return Counted(after[0] - before[0], after[1] - before[1], after[2] - before[2], after[3] - before[3])


def counted(kind: Kind) -> Counted:
    found = run(_counted(kind))
    assert isinstance(found, Counted)
    return found


def test_there_are_nineteen() -> None:
    assert len(KINDS) == 19


@pytest.mark.parametrize("name", list(KINDS))
def test_a_hostile_drafter_costs_next_to_nothing(name: str) -> None:
    found, plain = counted(KINDS[name]), SECONDS / STEP
    assert found.committed >= 0.97 * plain
    gained = max(found.committed - plain, 0.0)
    assert found.in_vain <= 0.05 * plain + 2.5 * gained
    assert found.waited <= 0.02 * plain + 0.5 * gained
    assert found.read * MESSAGE_SECONDS <= IDENTITY_RATE * SECONDS + gained * STEP
