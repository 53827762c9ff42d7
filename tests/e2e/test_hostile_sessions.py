"""Nineteen kinds of hostile drafter at a router and a verifier, through many sessions: what they cost, when
five seconds have passed.

The router's drafts and the verifier are the real ones; between them there is no network, and seconds are
virtual (tests/verifier/virtual_time.py). So all is counted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from benchmarks.hostile_kinds import KINDS, K, Kind, Said, Text, drafts
from outrider.errors import OutriderError
from outrider.sampling.params import SamplingParams
from outrider.wire.drafter_sessions import CloseDraft, DrafterEvents, OpenDraft
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad
from outrider.wire.methods import SPECULATE
from outrider.wire.session import SessionId, SessionParams
from outrider.wire.speculation import Attach, DraftBatch
from outrider.wire.verifier_sessions import Committed, VerifierCommand
from router.drafter_merits import TRIAL_STEPS
from router.fleet import Fleet
from router.requests import GenerationRequest, TokensCommitted
from router.session_draft import SessionDraft
from router.speculation import Pairs
from router.transcript import Transcript
from tests.router.test_large_fleet import fleet_of
from tests.verifier.virtual_time import VOCAB, Verifier, run, truth
from verifier.reading_allowance import BURST_SECONDS, IDENTITY_RATE, MESSAGE_SECONDS

STEP, ROW = 0.005, 0.0006  # seconds of a step of one token, and of each further one
STEPS = {1: STEP, 65: STEP + 64 * ROW}
SECONDS, LONG = 5.0, 10.0
TOKENS = 512  # of an answer
PROMPTS = [tuple((17 * each + 5 * at) % VOCAB for at in range(24)) for each in range(8)]


@dataclass
class Counted:
    committed: int = 0
    in_vain: int = 0  # rows
    waited: float = 0.0  # steps, of the waits that brought nothing
    told: int = 0  # messages to the drafter
    read: int = 0  # messages of the drafter
    steps: int = 0
    held: int = 0  # of them, those of sessions that it had

    def __sub__(self, before: Counted) -> Counted:
        return Counted(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


class Session:
    """One of the router's: what its steps say goes to its draft."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.over = asyncio.Event()
        request = GenerationRequest(
            "m",
            SessionParams(PROMPTS[number % len(PROMPTS)], SamplingParams(temperature=0.0), TOKENS),
            session_id=SessionId(f"{number:016}".encode()),
            fingerprint=world.at.identity.model_fingerprint,
        )
        pairs = world.pairs
        self.draft = SessionDraft(Transcript(request), b"k" * 16, world.fleet, pairs.of, K)
        self.request = request

    def begin(self) -> None:
        at, session_id = self._world.at, self.request.session_id
        assert session_id is not None
        k = self.draft.begin(at)
        at.open(
            session_id,
            self.request.params,
            output=(),
            num_speculative_tokens=k,
            draft_key=self.draft.key,
            listener=self,  # type: ignore[arg-type]
        )
        self.draft.start()

    def committed(self, told: Committed) -> None:
        counted = self._world.counted
        counted.committed += len(told.tokens)
        counted.in_vain += told.verified - told.accepted
        counted.steps += 1
        counted.held += bool(self.draft._seated)
        step = TokensCommitted(tuple(told.tokens), told.accepted, told.verified, own=told.own)
        self.draft._transcript.add(step)
        self.draft.committed(step)

    def finished(self, reason: object) -> None:
        self.draft.close()
        self.over.set()

    def drafter_cut_off(self, turn: int, reason: str) -> None:
        self.draft.cut_off(turn, reason)


class World:
    def __init__(self, fleet: Fleet, kind: Kind) -> None:
        self.fleet, self.kind, self.pairs = fleet, kind, Pairs()
        (self.at,) = fleet.verifiers.values()
        (self.drafter,) = fleet.drafters.values()
        self.drafter._dispatch(DrafterEvents(load=DrafterLoad(token_seconds=1e-6)))
        self.verifier = Verifier(STEPS)
        self.counted = Counted()
        self.steps: dict[bytes, int] = {}
        self._judge = self.verifier.stepper._wait.judge
        self.verifier.stepper._wait.judge = self._note  # type: ignore[method-assign]

    def _note(self, waited: float, outcomes: Any, meter: Any) -> None:
        outcomes = list(outcomes)
        if not any(outcome.accepted for _, outcome in outcomes):
            self.counted.waited += waited / STEP
        self._judge(waited, outcomes, meter)

    async def route(self) -> None:
        """What the router and the verifier say to one another."""

        async def commands() -> AsyncIterator[VerifierCommand]:
            yield VerifierCommand(hello=Identity(Role.ROUTER, "r", 1).hello())
            async for command in aiter(self.at._outbox):
                yield command

        async for events in self.verifier.routers.sessions(commands()):
            self.at._dispatch(events)

    async def draft(self) -> None:
        """What the drafter hears and says."""
        outgoing: asyncio.Queue[DraftBatch] = asyncio.Queue()
        loop, rng = asyncio.get_running_loop(), random.Random(1)
        texts: dict[bytes, Text] = {}

        async def obey() -> None:
            async for command in aiter(self.drafter._outbox):
                match command.command:
                    case OpenDraft() as asked:
                        texts[asked.session_id] = Text(truth, VOCAB, len(asked.params.prompt))
                        self.steps[asked.session_id] = 0
                        outgoing.put_nowait(DraftBatch(attach=[Attach(asked.session_id, asked.draft_key)]))
                    case CloseDraft(session_id, _):
                        texts.pop(session_id, None)

        async def raws() -> AsyncIterator[bytes]:
            while True:
                batch = await outgoing.get()
                self.counted.read += 1
                yield SPECULATE.asked.to_bytes(batch)

        obeying = asyncio.create_task(obey())
        try:
            while True:
                outgoing.put_nowait(DraftBatch(hello=Identity(Role.DRAFTER, "d", 1).hello()))
                try:
                    async for batch in self.verifier.drafters.speculate(raws(), "host"):
                        self.counted.told += 1
                        for commit in batch.commits:
                            if commit.session_id not in texts:
                                continue
                            text = texts[commit.session_id]
                            end, step = commit.base + len(commit.tokens), self.steps[commit.session_id]
                            for late, draft in drafts(self.kind, text, commit.session_id, end, step, rng):
                                said = DraftBatch(drafts=[draft])
                                loop.call_later(late * STEP, outgoing.put_nowait, said)
                            self.steps[commit.session_id] += 1
                except OutriderError:
                    pass
                await asyncio.sleep(0.5)
        finally:
            obeying.cancel()

    async def ask(self) -> None:
        number = 0
        while True:
            session = Session(self, number)
            session.begin()
            await session.over.wait()
            number += 1


async def _counted(kind: Kind) -> Counted:
    """What is counted in LONG seconds, after SECONDS."""
    world = World(await fleet_of(1, 1), kind)
    steps = world.verifier.stepper.run()
    tasks = [asyncio.create_task(each) for each in (steps, world.route(), world.draft(), world.ask())]
    await asyncio.sleep(SECONDS)
    before = replace(world.counted)
    await asyncio.sleep(LONG)
    for task in tasks:
        assert not task.done(), task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return world.counted - before


def counted(kind: Kind) -> Counted:
    found = run(_counted(kind))
    assert isinstance(found, Counted)
    return found


@pytest.mark.parametrize("name", list(KINDS))
def test_a_drafter_that_does_not_pay_costs_short_trials_and_nothing_between_them(name: str) -> None:
    found, plain = counted(KINDS[name]), LONG / STEP
    gained = max(found.committed - plain, 0.0)
    assert found.committed >= 0.97 * plain
    assert found.read * MESSAGE_SECONDS <= BURST_SECONDS + IDENTITY_RATE * LONG + gained * STEP
    if gained > 0.05 * plain:
        assert found.in_vain <= 2.5 * gained
        assert found.waited <= 0.5 * gained
    else:
        assert found.held <= 3 * TRIAL_STEPS
        assert found.told <= found.held + 8  # one a step, and when sessions come and go
        assert found.in_vain <= 0.02 * plain
        assert found.waited <= 0.01 * plain


def honest(right: float, share: float) -> Kind:
    """It has something to say in that share of the steps; each token is right so often, and it says so."""

    def said(text: Text, base: int, step: int, rng: random.Random) -> Said | None:
        if rng.random() >= share:
            return None
        truth, wrong = text.path(base, K), text.path(base, 0)
        tokens = [truth[at] if rng.random() < right else wrong[at] for at in range(K)]
        return Said(tokens, survival=bytes(round(255 * right ** (at + 1)) for at in range(K)))

    return said


@pytest.mark.parametrize(("share", "gain"), [(1.0, 1.1), (0.1, 1.02)])
def test_an_honest_drafter_keeps_its_sessions_though_it_is_mostly_wrong_or_silent(
    share: float, gain: float
) -> None:
    right = 0.3 if share == 1 else 0.4
    found, plain = counted(honest(right, share)), LONG / STEP
    assert found.held >= 0.95 * found.steps
    assert found.committed >= gain * plain
