"""What drafters brought to the sessions that they had, as verifiers told it: who gets sessions, who a trial.

A drafter's merit for a target model is the draft tokens accepted a step, less what those that were verified
cost in the mean, as their verifier reckons it. It holds all that matters (acceptance, pace, distance, load,
silence), and nothing that the drafter says of itself. Sessions go to those that do about as well as the best.
Who is not known yet, or did not pay, gets a session on trial now and then: of all steps of the target's
sessions at most one in TRIAL_SHARE is one of a trial. Pure.

One drafter is good at code, another at chat or at texts that are copied. So a merit is a linear function of
what a request is like (request_features.py), learned from the sessions themselves by the rule of Widrow and
Hoff (1960): what one shows counts for another as far as they are alike. How much is known of such requests
is learned by the same rule, as if each had shown 1; the merit is the one over the other, so that for requests
unlike all before it is what the drafter brings in general.

What an owner of API keys asks for shows others little, and it may be made up to mislead them. So each owner's
merits are those of its own requests (`OwnedMerits`). What all showed counts as far as these tell nothing yet,
and of one owner's steps no more than of all others' together. That a drafter does not pay others is no reason
never to try it: an owner for whom nobody seems to pay has a trial at once, and the next ones soon.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from router.request_features import ANY, DIMENSIONS, Floats

SEEN_STEPS = 28  # after which a merit is known
TRIAL_STEPS = 64  # that a trial takes, those included in which its drafter reads the text
FORGETTING = 0.99  # a step of a request that is like it
KNOWN = 0.6  # of 1: who has had nothing that is more like a request is not known for it
PAYS = 0.05  # accepted tokens a step: a drafter that brings less gets no sessions
CLEARLY = 1.5  # times the merit of another: then sessions change to it
TRIAL_SHARE = 16
MOST_DOUBLINGS = 4  # of a drafter's pause between trials
TRIAL_PAUSE = TRIAL_SHARE * TRIAL_STEPS  # of a target's steps, between two trials
REMEMBERED = 4096  # pairs of a target and a drafter; who was observed longest ago goes first
MOST_OWNERS, OWN_REMEMBERED = 256, 64  # and of each owner so many pairs; who asked longest ago goes first

Instance = tuple[str, int]
"""A worker's id and incarnation."""


class Candidate(Protocol):
    @property
    def merit(self) -> float | None:
        """None = not known yet."""

    @property
    def due(self) -> bool:
        """Whether it may have a session on trial."""


Found = TypeVar("Found", bound=Candidate)


def preferred(candidates: Sequence[Found], may_try: bool, may_seek: bool = False) -> tuple[list[Found], bool]:
    """Returns those of which one is to draft for a session, and whether that is a trial. `may_try`: whether a
    trial may begin; `may_seek`: whether it may where nobody pays. None are left where plain decoding is
    better."""
    best = max((one.merit for one in candidates if one.merit is not None), default=0.0)
    good = [one for one in candidates if one.merit is not None and is_good(one.merit, best)]
    due = [one for one in candidates if one not in good and one.due]
    if due and (may_try or (may_seek and not good)):
        return due, True
    return good or [one for one in candidates if one.merit is None], False


def is_good(merit: float, best: float) -> bool:
    """Returns whether one pays, and does about as well as the best."""
    return merit >= PAYS and merit * CLEARLY >= best


@dataclass(slots=True)
class Outcome:
    """What came of a drafter in some steps of a session."""

    steps: int = 0
    gained: float = 0.0

    def add(self, gained: float) -> None:
        self.steps += 1
        self.gained += gained


def _nothing() -> Floats:
    return np.zeros(DIMENSIONS, np.float32)


@dataclass(slots=True)
class _Merit:
    gains: Floats = field(default_factory=_nothing)  # [DIMENSIONS] tokens a step, by what a request is like
    known: Floats = field(default_factory=_nothing)  # [DIMENSIONS] how much is known, the same way
    steps: int = 0  # that were observed since it got a trial, or has come
    trials: int = 0  # in a row, that it has not come out of well
    due: int = 0  # the target's step at which the next one may begin
    tried: Floats | None = None  # [DIMENSIONS] what the last one's request is like
    owner: str = ""  # whose steps it was that were more than those of others, among all owners'
    ahead: int = 0  # by so many at most


class DrafterMerits:
    """The merits of drafters, by one owner's requests or by all."""

    def __init__(
        self, remembered: int = REMEMBERED, owner: str = "", told: DrafterMerits | None = None
    ) -> None:
        """`told`: by all, `owner` being one of them."""
        self._remembered, self._owner, self._told = remembered, owner, told
        self._of: OrderedDict[tuple[str, Instance], _Merit] = OrderedDict()
        self._steps: Counter[str] = Counter()  # of all sessions of a target
        self._trials: dict[str, tuple[int, int]] = {}  # a target's: how many, and the step of the last
        self._next_change: Counter[str] = Counter()

    def passed(self, target: str) -> None:
        """A session has made a step."""
        self._steps[target] += 1

    def observe(self, target: str, drafter: Instance, seen: Outcome, like: Floats = ANY) -> None:
        """A session of a request that is `like` that had a drafter, of which this has come."""
        if self._told is not None and self._told._hears(target, drafter, self._owner, seen.steps):
            self._told.observe(target, drafter, seen, like)
        merit = self._made(target, drafter)
        merit.steps += seen.steps
        weight = max(seen.steps / merit.steps, 1 - FORGETTING**seen.steps)  # after a trial it is judged anew
        merit.gains += weight * (seen.gained / seen.steps - float(merit.gains @ like)) * like
        merit.known += weight * (1 - float(merit.known @ like)) * like

    def of(self, target: str, drafter: Instance, like: Floats = ANY) -> float | None:
        """Returns the tokens that it gains a step with such a request; None if too little is known."""
        merit = self._of.get((target, drafter))
        told = None if self._told is None else self._told.of(target, drafter, like)
        if merit is None:
            return told
        known, gains = float(merit.known @ like), float(merit.gains @ like)
        if merit.steps < SEEN_STEPS:
            if merit.tried is None:
                return told
            # On trial it is judged by what it does in that. What it does for others is known as before.
            if known < KNOWN or float(merit.tried @ like) >= KNOWN:
                return None
        if known >= KNOWN:
            return gains / known
        return told if told is None or known < 0 else (gains + (KNOWN - known) * told) / KNOWN

    def due(self, target: str, drafter: Instance) -> bool:
        merit = self._of.get((target, drafter))
        return merit is None or self._steps[target] >= merit.due

    def may_try(self, target: str) -> bool:
        _, last = self._trials.get(target, (0, 0))
        return self._steps[target] >= last + TRIAL_PAUSE

    def may_seek(self, target: str) -> bool:
        """Returns whether a trial may begin where nobody pays: the first ones come sooner."""
        count, last = self._trials.get(target, (0, 0))
        return self._steps[target] >= last + (min(TRIAL_STEPS * 2**count, TRIAL_PAUSE) if count else 0)

    def tried(self, target: str, drafter: Instance, like: Floats = ANY) -> None:
        """Notes that a drafter has got a session on trial: for requests that are `like` its one it is judged
        anew."""
        merit = self._made(target, drafter)
        count, _ = self._trials.get(target, (0, 0))
        self._trials[target] = min(count + 1, TRIAL_SHARE), self._steps[target]
        merit.steps, merit.tried = 0, like
        merit.due = self._steps[target] + TRIAL_PAUSE * 2**merit.trials
        merit.trials = min(merit.trials + 1, MOST_DOUBLINGS)

    def may_change(self, target: str) -> bool:
        """Returns whether a session may change from a drafter that pays to one that would clearly do more.
        One does at a time: it may take what made the other one better."""
        return self._steps[target] >= self._next_change[target]

    def changed(self, target: str, drafter: Instance) -> None:
        self._next_change[target] = self._steps[target] + SEEN_STEPS
        self._made(target, drafter).trials = 0

    def _hears(self, target: str, drafter: Instance, owner: str, steps: int) -> bool:
        """Returns whether so many steps of that owner count for all: those of one that are more than all
        others' do not, but for the first few (as Boyer and Moore find a majority, 1981)."""
        merit = self._made(target, drafter)
        if owner == merit.owner:
            if merit.ahead >= SEEN_STEPS:
                return False
            merit.ahead += steps
        elif merit.ahead > steps:
            merit.ahead -= steps
        else:
            merit.owner, merit.ahead = owner, steps - merit.ahead
        return True

    def _made(self, target: str, drafter: Instance) -> _Merit:
        merit = self._of.setdefault((target, drafter), _Merit())
        self._of.move_to_end((target, drafter))
        if len(self._of) > self._remembered:
            self._of.popitem(last=False)
        return merit


class OwnedMerits:
    """The merits that one router knows, by the owner of the key that requests are asked with."""

    def __init__(self) -> None:
        self._of_all = DrafterMerits()
        self._of: OrderedDict[str, DrafterMerits] = OrderedDict()

    def of(self, owner: str) -> DrafterMerits:
        """Returns an owner's; "" is that of all requests where keys are not asked for."""
        if not owner:
            return self._of_all
        if owner not in self._of:
            self._of[owner] = DrafterMerits(OWN_REMEMBERED, owner, self._of_all)
        self._of.move_to_end(owner)
        if len(self._of) > MOST_OWNERS:
            self._of.popitem(last=False)
        return self._of[owner]
