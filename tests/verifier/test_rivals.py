"""A hostile drafter beside an honest one at the same session: what it costs that one's guesses and its merit.

Counted in virtual time, as in test_hostile.py. Nothing is verified here but a path: where branches are, a
token in whose place another's stands is verified beside it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import pytest

from benchmarks.hostile_kinds import KINDS, K
from outrider.net.draft_right import MOST_SEATS
from outrider.wire.speculation import Draft, DraftBatch
from tests.verifier.test_hostile import SECONDS, SESSION, STEPS, TEXT, attached, hostile
from tests.verifier.virtual_time import VOCAB, Verifier, run, truth
from verifier.stepper import StepReport

EASY, HARD = 0.97, 0.5  # chance of the honest one's guess, as it says itself
HONEST = 0  # its seat


def is_hard(position: int) -> bool:
    return position * 40503 % 65_521 % 10 < 3


def guess(position: int) -> int:
    """The honest one's: of those that are hard one in two is wrong."""
    chance = HARD if is_hard(position) else EASY
    return truth(position) if random.Random(position).random() < chance else (truth(position) + 1) % VOCAB


def told(chances: list[float]) -> bytes:
    return bytes(round(255 * survival) for survival in accumulate(chances, mul))


Saying = Callable[[int], Draft]
"""What one says when so much of the text is committed."""


def saying(token: Callable[[int], int], sure: float = EASY, unsure: float = HARD) -> Saying:
    def said(end: int) -> Draft:
        places = range(end, end + 2 * K)
        chances = [unsure if is_hard(place) else sure for place in places]
        return Draft(SESSION, end, [token(place) for place in places], (), told(chances))

    return said


def wrong_if_hard(position: int) -> int:
    return TEXT.wrong(position) if is_hard(position) else guess(position)


def twice(end: int) -> Draft:
    """All nodes twice, and each time with another chance."""
    tokens = [guess(end + at) for at in range(K)]
    parents = (*range(-1, K - 1), -1, *range(K, 2 * K - 1))
    return Draft(SESSION, end, tokens * 2, parents, bytes([255, 1] * K))


RIDERS: dict[str, Saying] = {
    "certain, and wrong where the other is not sure": saying(wrong_if_hard, 1.0, 1.0),
    "just above the other, and wrong where that is not sure": saying(wrong_if_hard, EASY, HARD + 0.05),
    "certain of the same": saying(guess, 1.0, 1.0),
    "the same twice": twice,
}
"""Who knows what the honest one will say."""


async def draft(verifier: Verifier, saying: Saying, seat: int) -> None:
    outgoing, heard = attached(verifier, seat)
    async for batch in heard:
        for commit in batch.commits:
            outgoing.put_nowait(DraftBatch(drafts=[saying(commit.base + len(commit.tokens))]))


@dataclass
class Counted:
    committed: int
    verified: int  # of the honest one
    accepted: int


async def _counted(name: str, rivals: int) -> Counted:
    """What is counted in SECONDS, after SECONDS. `name`: of the others, in KINDS or RIDERS."""
    verifier = Verifier(STEPS)
    on_step, of_honest = verifier._on_step, [0, 0]

    def note(report: StepReport) -> None:
        on_step(report)
        for _, outcome in report.outcomes:
            for each in outcome.drafters:
                if each.turn == HONEST:
                    of_honest[0] += each.verified
                    of_honest[1] += each.accepted

    verifier.stepper._on_step = note
    tasks = [asyncio.create_task(verifier.serve(SESSION, K))]
    tasks.append(asyncio.create_task(draft(verifier, saying(guess), HONEST)))
    for seat in range(1, 1 + rivals):
        if name in RIDERS:
            tasks.append(asyncio.create_task(draft(verifier, RIDERS[name], seat)))
        else:
            tasks.append(asyncio.create_task(hostile(verifier, KINDS[name], seat)))
    found: list[tuple[int, int, int]] = []
    for _ in range(2):
        await asyncio.sleep(SECONDS)
        found.append((verifier.committed, of_honest[0], of_honest[1]))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Counted(*(after - before for before, after in zip(*found, strict=True)))


def counted(name: str, rivals: int = 1) -> Counted:
    found = run(_counted(name, rivals))
    assert isinstance(found, Counted)
    return found


@pytest.fixture(scope="module")
def alone() -> Counted:
    return counted("silence")


@pytest.mark.parametrize("name", [*KINDS, *RIDERS])
def test_an_honest_drafter_brings_as_much_beside_a_hostile_one(name: str, alone: Counted) -> None:
    assert counted(name).committed >= 0.98 * alone.committed


@pytest.mark.parametrize("name", ["the wrong tail after three", "random full trees", *RIDERS])
def test_or_beside_three_that_are_agreed(name: str, alone: Counted) -> None:
    found = counted(name, rivals=MOST_SEATS - 1)
    assert found.committed >= 0.98 * alone.committed


@pytest.mark.parametrize("name", RIDERS)
def test_nor_does_its_merit_suffer_where_others_ride_on_it(name: str, alone: Counted) -> None:
    """Routers count the tokens that were accepted and that it had said."""
    assert counted(name).accepted >= 0.98 * alone.accepted
