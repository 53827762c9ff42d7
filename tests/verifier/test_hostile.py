"""Nineteen kinds of hostile drafter at a real verifier: what they cost, when five seconds have passed.

Seconds are virtual (virtual_time.py), so all is counted: rows that were verified in vain, the time that was
waited in vain, and the text's tokens a second against those of plain decoding.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from outrider.errors import OutriderError
from outrider.net.draft_right import right
from outrider.wire.hello import Identity, Role
from outrider.wire.methods import SPECULATE
from outrider.wire.speculation import Attach, Draft, DraftBatch
from tests.verifier.virtual_time import KEY, PROMPT, VOCAB, Verifier, run, truth
from verifier.reading_allowance import IDENTITY_RATE, MESSAGE_SECONDS

K = 8
STEP, ROW = 0.02, 0.0004  # seconds of a step of one token, and of each further one
STEPS = {1: STEP, 65: STEP + 64 * ROW}
SECONDS = 5.0
SESSION = b"s" * 16


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    parents: tuple[int, ...] = ()
    survival: bytes = b""  # empty = certain
    base: int | None = None  # another than the log's end
    late: float | None = None  # steps after the commit that it follows; None = it is there before the next
    times: int = 1
    session_id: bytes = SESSION


Kind = Callable[[int, int, random.Random], Said | None]
"""What a drafter says after a commit, by the log's length and the number of commits before."""


def wrong(position: int) -> int:
    return (truth(position) + 3) % VOCAB


def path(base: int, good: int, count: int = K) -> list[int]:
    """Tokens of which the first `good` are right."""
    return [(truth if place < good else wrong)(base + place) for place in range(count)]


def full_tree(base: int, rng: random.Random) -> Said:
    return Said([rng.randrange(VOCAB) for _ in range(250)], tuple(rng.randrange(-1, at) for at in range(250)))


def soon(base: int, good: int, late: float = 0.1) -> Said:
    """Two tokens that are of use only to a step that waits for them."""
    return Said(path(base - 1, good, 2), late=late)


KINDS: dict[str, Kind] = {
    "empty drafts for sessions of nobody": lambda base, _, rng: Said([], session_id=rng.randbytes(16)),
    "empty drafts for its own": lambda *_: Said([], times=20),
    "silence": lambda *_: None,
    "answers and then silence": lambda base, step, _: soon(base, K) if step < 300 else None,
    "answers now and then": lambda base, step, _: Said(path(base, 1, 1)) if step // 8 % 2 else None,
    "all wrong": lambda base, *_: Said(path(base, 0)),
    "off by one": lambda base, *_: Said([(truth(base + at) + 1) % VOCAB for at in range(K)]),
    "a place too far": lambda base, *_: Said([truth(base + at + 1) for at in range(K)]),
    "the wrong tail": lambda base, *_: Said(path(base, 1)),
    "the wrong tail after three": lambda base, *_: Said(path(base, 3)),
    "random full trees": lambda base, _, rng: full_tree(base, rng),
    "wrong branches beside the right one": lambda base, *_: Said(
        [*path(base, K), *path(base, 0)], (*range(-1, K - 1), -1, *range(K, 2 * K - 1))
    ),
    "wrong, and modest": lambda base, *_: Said(path(base, 0), survival=bytes([128] * K)),
    "the same again and again": lambda base, *_: Said(path(base, 0), times=20),
    "what is over": lambda base, *_: Said(path(base - K - 2, K), base=max(len(PROMPT), base - K - 2)),
    "soon and late by turns": lambda base, step, _: soon(base, 1, late=0.1 if step % 2 else 0.45),
    "soon, and right and wrong by turns": lambda base, step, _: soon(base, step // 20 % 2),
    "right and wrong by turns": lambda base, step, _: Said(path(base, K if step // 20 % 2 else 0)),
    "just below the limit": lambda base, step, _: Said(path(base, 0) if step % 50 else [VOCAB]),
}


def after_the_next(base: int, said: Said) -> Said:
    """A step is under way and commits a token: what is said begins with that, and is there for the next."""
    parents = (-1, *(parent + 1 for parent in said.parents)) if said.parents else ()
    survival = bytes([255]) + said.survival if said.survival else b""
    return replace(said, tokens=[truth(base), *said.tokens], parents=parents, survival=survival)


def messages(said: Said) -> list[tuple[list[int], float]]:
    """The tokens of each, and its seconds after the commit: what is late comes token by token."""
    if said.late is None:
        return [(said.tokens, 0.0)] * said.times
    return [(said.tokens[: at + 1], (said.late + 0.05 * at) * STEP) for at in range(len(said.tokens))]


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
                base = commit.base + len(commit.tokens)  # of what is committed
                said, step = kind(base + 1, step, rng), step + 1
                if said is None:
                    continue
                if said.base is not None:
                    base = said.base
                elif said.late is None and said.tokens:
                    said = after_the_next(base, said)
                for said_by_then, delay in messages(said):
                    draft = Draft(said.session_id, base, said_by_then, said.parents, said.survival)
                    loop.call_later(delay, outgoing.put_nowait, DraftBatch(drafts=[draft]))
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
