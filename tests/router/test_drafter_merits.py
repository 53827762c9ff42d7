"""Who drafts, by what verifiers saw: sessions go to who does most, and the others cost only trials."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.sampling.params import SamplingParams
from outrider.wire.drafter_sessions import DrafterEvents
from outrider.wire.guesses import DrafterCounts
from outrider.wire.hello import Role
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.session import SessionId, SessionParams
from outrider.wire.verifier_sessions import VerifierEvents
from router.drafter_merits import (
    MOST_OWNERS,
    OWN_REMEMBERED,
    REMEMBERED,
    SEEN_STEPS,
    TRIAL_SHARE,
    TRIAL_STEPS,
    Outcome,
    OwnedMerits,
)
from router.fleet import Fleet
from router.requests import GenerationRequest, TokensCommitted
from router.session_draft import SessionDraft
from router.speculation import PairAcceptance
from router.transcript import Transcript
from router.workers import Drafter
from tests.router.test_large_fleet import NoStream, fleet_of, registration

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
        self.steps_of: dict[bool, Counter[str | None]] = {True: Counter(), False: Counter()}  # greedy or not
        self.committed, self.mixed = 0, False
        self.pairs: dict[str, PairAcceptance] = {}
        self.owners: tuple[str, ...] = ("",)  # whose the sessions are, in turns

    def open(self) -> SessionDraft:
        self.sessions += 1
        temperature = 0.0 if self.mixed and self.sessions % 2 else 1.0
        request = GenerationRequest(
            "m",
            SessionParams((1, 2, 3), SamplingParams(temperature, seed=1), 10**6),
            session_id=SessionId(f"{self.sessions:016}".encode()),
            fingerprint=self.verifier.identity.model_fingerprint,
            owner=self.owners[self.sessions % len(self.owners)],
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
        (drafter,) = [drafter for _, drafter in draft._seated] or [None]
        name = None if drafter is None else drafter.identity.worker_id
        gain = self.gains[name](step, drafter.placed) if drafter is not None and name is not None else 0.0
        greedy = draft._request.params.sampling.greedy
        gain = 0.0 if self.mixed and not greedy else gain  # as suffix lookup, say
        self.steps_of[greedy][name] += 1
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


async def test_one_that_is_good_at_greedy_text_alone_drafts_for_that_alone() -> None:
    fleet = await fleet_of(1, 1)
    simulation = Simulation(fleet, always(1.0))
    simulation.mixed = True
    simulation.run()
    greedy, drawn = simulation.steps_of[True], simulation.steps_of[False]
    assert greedy[None] == 0
    assert drawn[None] > (1 - 1 / TRIAL_SHARE) * drawn.total() - STREAMS * TRIAL_STEPS


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


class Several:
    """Sessions that may have two drafters at a time, each of another model: what they guess right is drawn,
    and a step accepts what the one that is right for longer has said."""

    def __init__(self, fleet: Fleet, *rights: float | None) -> None:
        """`rights`: how often each is right, whatever the others are; None = it says what the first says."""
        self.fleet, self.rng = fleet, random.Random(1)
        (self.verifier,) = fleet.verifiers.values()
        self.verifier._dispatch(VerifierEvents(load=VerifierLoad(draft_cost=0.02)))
        self.rights = dict(zip(fleet.drafters, rights, strict=True))
        self.steps: Counter[tuple[str, ...]] = Counter()  # by who drafted
        self.committed, self.pair = 0, PairAcceptance()

    def run(self, sessions: int = 20, steps: int = 200) -> None:
        for number in range(sessions):
            request = GenerationRequest(
                "m",
                SessionParams((1, 2, 3), SamplingParams(seed=1), 10**6),
                session_id=SessionId(f"{number:016}".encode()),
                fingerprint=self.verifier.identity.model_fingerprint,
            )
            transcript = Transcript(request)
            draft = SessionDraft(transcript, b"k" * 16, self.fleet, lambda *_: self.pair, 8, drafters=2)
            draft.begin(self.verifier)
            draft.start()
            for _ in range(steps):
                self._step(draft)
            draft.close()

    def _step(self, draft: SessionDraft) -> None:
        seated = [(place.turn, drafter.identity.worker_id) for place, drafter in draft._seated]
        first = next(iter(self.rights.values()))
        assert first is not None
        firsts, said = self._said(first), dict[int, int]()
        for turn, name in seated:
            right = self.rights[name]
            same = right is None or name == next(iter(self.rights))
            said[turn] = firsts if same else self._said(right or 0.0)
        accepted = max(said.values(), default=0)
        counts = []
        for turn, own in said.items():
            others = max((other for each, other in said.items() if each != turn), default=0)
            copied = len(said) > 1 and self.rights[dict(seated)[turn]] is None
            alone = 0 if copied else 4 - min(own, others)  # nobody else goes on where one is wrong
            counts.append(DrafterCounts(turn, 4, own, alone))
        self.steps[tuple(sorted(name for _, name in seated))] += 1
        self.committed += 1 + accepted
        told = tuple(counts) if len(counts) > 1 else ()
        verified = 4 if said else 0
        draft.committed(TokensCommitted((7,) * (1 + accepted), accepted, verified, drafters=told))

    def _said(self, right: float) -> int:
        return next((count for count in range(4) if self.rng.random() >= right), 4)

    def share(self, *numbers: int) -> float:
        """Of the steps, those with these drafters."""
        names = list(self.rights)
        return self.steps[tuple(sorted(names[number] for number in numbers))] / self.steps.total()


async def several(*rights: float | None) -> Several:
    fleet = await fleet_of(1)
    connection: Any = NoStream()
    for number in range(len(rights)):
        one = registration(Role.DRAFTER, number, name=f"draft {number}", fingerprint=f"draft {number}")
        identity = replace(one.info.identity, model_fingerprint=f"draft {number}")
        one = replace(one, info=replace(one.info, identity=identity))
        fleet.add_drafter(Drafter(one, connection, None))
    made = Several(fleet, *rights)
    made.run()
    return made


async def test_two_that_err_independently_both_draft_and_commit_more_than_the_best_alone() -> None:
    both, alone = await several(0.6, 0.6), await several(0.6)
    assert both.share(0, 1) > 0.95
    assert both.committed > 1.25 * alone.committed
    metrics = both.fleet.metrics.guesses.by_source
    assert [source for source, *_ in metrics] == ["draft 0", "draft 1"]
    assert all(0.3 < accepted / verified < 0.5 for _, verified, accepted in metrics)


@pytest.mark.parametrize("right", [0.0, None], ids=["garbage", "the same"])
async def test_a_second_that_adds_nothing_gets_its_trials_only(right: float | None) -> None:
    both, alone = await several(0.8, right), await several(0.8)
    assert both.share(0, 1) < 2 / TRIAL_SHARE, "until it is known it drafts, too"
    assert both.committed > 0.98 * alone.committed


async def test_of_three_the_two_that_bring_most_draft() -> None:
    """And no session has more than two."""
    three = await several(0.1, 0.8, 0.6)
    assert three.share(1, 2) > 0.7
    assert all(len(names) <= 2 for names in three.steps)


class Misled(Simulation):
    """One owner of a key has nearly all requests, and made up their prompts: each drafter brings to them what
    is far from what it brings to another owner's."""

    def __init__(self, fleet: Fleet, misled: tuple[float, ...], honest: tuple[float, ...]) -> None:
        super().__init__(fleet, *map(always, honest))
        self.owners = ("honest", *["misleading"] * 7)
        self.brings = {"honest": honest, "misleading": misled}
        self.by_owner: Counter[tuple[str, str | None]] = Counter()  # steps, and by whom they were drafted for

    def _step(self, draft: SessionDraft, step: int) -> int:
        owner = draft._request.owner
        self.gains = dict(zip(self.fleet.drafters, map(always, self.brings[owner]), strict=True))
        drafters = [drafter.identity.worker_id for _, drafter in draft._seated]
        self.by_owner[owner, *(drafters or [None])] += 1
        return super()._step(draft, step)

    def share_of(self, owner: str, number: int) -> float:
        """Of an owner's steps, those with that drafter."""
        steps = sum(count for (whose, _), count in self.by_owner.items() if whose == owner)
        return self.by_owner[owner, list(self.fleet.drafters)[number]] / steps


@pytest.mark.parametrize(
    ("misled", "honest"),
    [((0.0,), (3.0,)), ((3.0, 0.0), (0.0, 3.0)), ((0.0, 0.0), (0.0, 3.0))],
    ids=["none seems to pay", "a bad one seems to be good", "the good one seems to be as bad as another"],
)
async def test_what_one_owner_asks_for_teaches_nothing_wrong_about_anothers_requests(
    misled: tuple[float, ...], honest: tuple[float, ...]
) -> None:
    both = Misled(await fleet_of(1, len(honest)), misled, honest)
    both.run(3000)
    assert both.share_of("honest", honest.index(3.0)) > 0.85
    if not any(misled):
        assert sum(both.share_of("misleading", number) for number in range(len(misled))) < 2 / TRIAL_SHARE


async def test_a_new_owner_begins_with_what_others_have_seen_of_drafters() -> None:
    """And nobody's own requests are more than half of that."""
    merits, good, bad = OwnedMerits(), ("good", 1), ("bad", 1)
    for _ in range(SEEN_STEPS):
        merits.of("a").observe("t", good, Outcome(4, 12.0))
        merits.of("b").observe("t", bad, Outcome(4))
        merits.of("a").observe("t", bad, Outcome(4))
        for _ in range(20):
            merits.of("b").observe("t", good, Outcome(4))
    known = merits.of("new").of("t", good)
    assert merits.of("new").of("t", bad) == 0.0 and known is not None and 1.0 < known < 2.0
    assert not merits.of("new").may_try("t")


async def test_memory_is_bounded() -> None:
    every: Any = OwnedMerits()
    for number in range(2 * REMEMBERED):
        every.of("").observe("t", (str(number), 1), Outcome(1, 1.0))
    for number in range(2 * MOST_OWNERS):
        every.of(str(number)).passed("t")
    for number in range(2 * OWN_REMEMBERED):
        every.of("one").observe("t", (str(number), 1), Outcome(1, 1.0))
    sizes = len(every.of("")._of), len(every._of), len(every.of("one")._of)
    assert sizes == (REMEMBERED, MOST_OWNERS, OWN_REMEMBERED)


class Kinds(Simulation):
    """Requests of two kinds, by their prompts: each drafter is good at one of them."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet, *[always(0.0)] * 2)
        self.right: Counter[bool] = Counter()  # steps, by whether the one that is good at them drafted
        self.told = True  # whether the router sees the prompts

    def open(self) -> SessionDraft:
        self.sessions += 1
        kind = self.rng.randrange(2)
        # As in texts: some tokens are common, a template's ones are everybody's, and most are the kind's.
        words = [int(50 * self.rng.random() ** 3) for _ in range(40)]
        words += [
            1000 + 1000 * kind + int(300 * self.rng.random() ** 2) for _ in range(self.rng.randrange(20, 80))
        ]
        self.rng.shuffle(words)
        prompt = (*words, *range(9000, 9016)) if self.told else (1, 2, 3)
        request = GenerationRequest(
            "m",
            SessionParams(prompt, SamplingParams(1.0, seed=1), 10**6),
            session_id=SessionId(f"{kind}{self.sessions:015}".encode()),
            fingerprint=self.verifier.identity.model_fingerprint,
        )
        pair = self.pairs.setdefault("", PairAcceptance())
        draft = SessionDraft(Transcript(request), b"k" * 16, self.fleet, lambda *_: pair, 8)
        draft.begin(self.verifier)
        draft.start()
        return draft

    def _step(self, draft: SessionDraft, step: int) -> int:
        (drafter,) = [drafter for _, drafter in draft._seated] or [None]
        kind = int(chr(draft._id[0]))
        right = drafter is not None and list(self.gains).index(drafter.identity.worker_id) == kind
        gain = 0.0 if drafter is None else 3.0 if right else 0.5
        accepted = int(gain) + (self.rng.random() < gain % 1)
        self.right[right] += 1
        self.committed += 1 + accepted
        draft.committed(TokensCommitted((7,) * (1 + accepted), accepted, 4 if drafter is not None else 0))
        return 1 + accepted


async def test_who_is_good_at_a_kind_of_requests_drafts_for_those() -> None:
    """What a router knows of kinds is what it has seen come of requests with such prompts."""
    blind, seeing = Kinds(await fleet_of(1, 2)), Kinds(await fleet_of(1, 2))
    blind.told = False
    for each in (blind, seeing):
        each.run()
    assert blind.right[True] < 0.6 * blind.right.total()
    assert seeing.right[True] > 0.85 * seeing.right.total()
    assert seeing.committed > 1.25 * blind.committed
