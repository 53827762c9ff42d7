"""Who drafts, by what verifiers saw: sessions go to who does most, and the others cost only trials."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outrider.sampling.params import SamplingParams
from outrider.wire.drafter_sessions import DrafterEvents
from outrider.wire.load import DrafterLoad
from outrider.wire.session import SessionId, SessionParams
from router.drafter_merits import REMEMBERED, TRIAL_SHARE, TRIAL_STEPS, DrafterMerits
from router.fleet import Fleet
from router.requests import GenerationRequest, TokensCommitted
from router.session_draft import SessionDraft
from router.speculation import PairAcceptance
from router.transcript import Transcript
from tests.router.test_large_fleet import fleet_of

STREAMS, STEPS, LENGTH = 8, 2000, 400
SILENT = -1.0

Gain = Callable[[int, int], float]
"""Tokens of a drafter that are accepted a step, at that step and with so many sessions there."""


def always(gain: float) -> Gain:
    return lambda *_: gain


class Simulation:
    """A router's sessions at one verifier, with real drafts to place and none to send."""

    def __init__(self, fleet: Fleet, *gains: Gain) -> None:
        self.fleet, self.rng, self.sessions = fleet, random.Random(1), 0
        (self.verifier,) = fleet.verifiers.values()
        self.gains = dict(zip(fleet.drafters, gains, strict=True))
        self.steps: Counter[str | None] = Counter()  # by who drafted
        self.committed = 0
        self.pairs: dict[str, PairAcceptance] = {}

    def open(self) -> SessionDraft:
        self.sessions += 1
        request = GenerationRequest(
            "m",
            SessionParams((1, 2, 3), SamplingParams(seed=1), 10**6),
            session_id=SessionId(f"{self.sessions:016}".encode()),
            fingerprint=self.verifier.identity.model_fingerprint,
        )
        pair = self.pairs.setdefault("", PairAcceptance())
        draft = SessionDraft(Transcript(request), b"k" * 16, self.fleet, lambda *_: pair, 8)
        draft.begin(self.verifier)
        draft.start()
        return draft

    def run(self, steps: int = STEPS, length: int = LENGTH) -> None:
        streams = [(self.open(), self.rng.randrange(length)) for _ in range(STREAMS)]
        for step in range(steps):
            for index, (draft, left) in enumerate(streams):
                left -= self._step(draft, step)
                if left <= 0:
                    draft.close()
                    draft, left = self.open(), length
                streams[index] = draft, left

    def _step(self, draft: SessionDraft, step: int) -> int:
        drafter = draft._drafter
        name = None if drafter is None else drafter.identity.worker_id
        gain = self.gains[name](step, drafter.placed) if drafter is not None and name is not None else 0.0
        silent, gain = gain < 0, max(gain, 0.0)
        accepted = int(gain) + (self.rng.random() < gain % 1)
        self.steps[name] += 1
        self.committed += 1 + accepted
        verified = 0 if silent or name is None else max(4, accepted)
        draft.committed(TokensCommitted((7,) * (1 + accepted), accepted, verified))
        return 1 + accepted

    def share(self, number: int) -> float:
        """Of the steps, those with that drafter."""
        return self.steps[list(self.gains)[number]] / self.steps.total()


async def simulated(*gains: Gain, length: int = LENGTH, claims: tuple[float, ...] = ()) -> Simulation:
    fleet = await fleet_of(1, len(gains))
    for drafter, seconds in zip(fleet.drafters.values(), claims, strict=False):
        drafter._dispatch(DrafterEvents(load=DrafterLoad(token_seconds=seconds)))
    simulation = Simulation(fleet, *gains)
    simulation.run(length=length)
    return simulation


@pytest.mark.parametrize("length", [LENGTH, 10**6], ids=["short answers", "answers without end"])
@pytest.mark.parametrize("bad", [0.0, 0.02, 0.6])
async def test_a_bad_drafter_beside_a_good_one_costs_its_trials_only(bad: float, length: int) -> None:
    alone = await simulated(always(3.0), length=length)
    both = await simulated(always(bad), always(3.0), length=length)
    assert alone.share(0) > 0.99
    assert both.share(0) < 1 / TRIAL_SHARE
    assert both.committed > (1 - 1 / TRIAL_SHARE) * alone.committed


@pytest.mark.parametrize("length", [LENGTH, 10**6], ids=["short answers", "answers without end"])
async def test_twelve_bad_ones_cost_together_no_more_trials_than_one(length: int) -> None:
    many = await simulated(*[always(0.0)] * 12, always(3.0), length=length)
    assert many.share(12) > 1 - 2 / TRIAL_SHARE  # until the good one is found all are new


@pytest.mark.parametrize("gain", [0.0, SILENT], ids=["wrong", "silent"])
async def test_where_no_drafter_pays_sessions_decode_plainly_but_for_trials(gain: float) -> None:
    nobody = await simulated(always(gain), always(gain))
    at_first = 2 * STREAMS * TRIAL_STEPS  # while nothing is known of either
    assert nobody.steps[None] > (1 - 1 / TRIAL_SHARE) * nobody.steps.total() - at_first
    assert min(nobody.share(0), nobody.share(1)) > 0


async def test_a_magnet_gets_no_more_than_a_trial_whatever_it_says_of_its_pace() -> None:
    magnet = await simulated(always(SILENT), always(2.0), claims=(1e-6, 0.05))
    assert magnet.share(0) < 1 / TRIAL_SHARE


async def test_a_drafter_that_has_become_good_is_found_again() -> None:
    recovered = await simulated(lambda step, _: 3.0 if step > STEPS / 4 else 0.0)
    assert recovered.share(0) > 0.5


async def test_one_that_has_become_bad_is_left_by_sessions_that_run() -> None:
    both = await simulated(
        lambda step, _: 0.0 if step > STEPS / 4 else 3.0, lambda step, _: 3.0, length=10**6
    )
    assert both.share(0) < 1 / 4 + 1 / TRIAL_SHARE


async def test_two_that_are_worth_less_the_more_they_have_share_the_sessions() -> None:
    """Sessions change one by one: all at once would go to and fro."""

    def loaded(_: int, sessions: int) -> float:
        return min(3.0, 12.0 / sessions)

    both = await simulated(loaded, loaded, length=10**6)
    assert 0.35 < both.share(0) < 0.65
    opened = sum(drafter._opening for drafter in both.fleet.drafters.values())
    assert opened < STREAMS + 2 * STEPS * STREAMS / 1024  # two changes for each trial


async def test_memory_is_bounded() -> None:
    merits: Any = DrafterMerits()
    for number in range(2 * REMEMBERED):
        merits.observe("t", (str(number), 1), 1.0)
    assert len(merits._of) == REMEMBERED
