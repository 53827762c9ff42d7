"""Has a drafter that was added helped? If not it goes again: pure decisions over what verifiers measured.

Drafters that are busy and still too slow look the same on a host whose cores are taken, where one more makes
all of them slower. So each growth of the pool is a trial: the pool keeps its new size only if the verifiers
then commit more, and one that failed is tried again after a pause that doubles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HELPED = 1.05  # times the pace before: less is noise
PAUSE_SECONDS = 1800.0  # after a trial that failed, before the next one
LONGEST_PAUSE_SECONDS = 8 * 3600.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the verifiers are, all together."""

    goodput: float = 0.0  # committed tokens a second
    sessions: float = 0.0  # that share it

    def beats(self, other: Pace) -> bool:
        """Returns whether it is clearly more: in all, or for each session where fewer share it."""
        in_all = self.goodput > HELPED * other.goodput
        return in_all or self.goodput * other.sessions > HELPED * other.goodput * self.sessions


@dataclass(frozen=True, slots=True)
class Trial:
    """A growth of the pool that has to show that it helps."""

    workers: int  # before it
    pace: Pace  # before it
    since: float  # when the pool had its new size and worked


@dataclass(frozen=True, slots=True)
class Growth:
    """What is remembered of a pool between two looks at it."""

    workers: int = 0  # at the last look; 0 = there was none
    pace: Pace = Pace()
    trial: Trial | None = None
    limit: int | None = None  # what the pool went back to
    again: float = 0.0  # when more than that may be tried
    pause: float = PAUSE_SECONDS  # the next one

    def allowed(self, wanted: int, now: float) -> int:
        """Returns how many workers there may be of those wanted."""
        most = [wanted]
        if self.trial is not None:
            most.append(self.workers)
        if self.limit is not None and now < self.again:
            most.append(self.limit)
        return min(most)


def after(growth: Growth, workers: int, reporting: int, pace: Pace, now: float, settle: float) -> Growth:
    """Returns what is remembered after a look at a pool that is to have `workers`, of which some report.

    A trial takes `settle` seconds: sessions find the new drafter, and averages forget the time before.
    """
    if workers < growth.workers:
        growth = replace(growth, workers=workers, pace=pace, trial=None)
        if growth.again < math.inf:
            return growth
        pause = min(2 * growth.pause, LONGEST_PAUSE_SECONDS)
        return replace(growth, again=now + growth.pause, pause=pause)
    if workers > growth.workers:
        trial = Trial(growth.workers, growth.pace, now) if growth.workers else None
        return replace(growth, workers=workers, pace=pace, trial=trial)
    if growth.trial is None:
        return replace(growth, pace=pace)
    if reporting < workers or pace.sessions <= 0:  # it does not work yet
        return replace(growth, trial=replace(growth.trial, since=now))
    if now - growth.trial.since < settle:
        return growth
    if pace.beats(growth.trial.pace):
        return Growth(workers, pace)
    return Growth(workers, pace, limit=growth.trial.workers, again=math.inf, pause=growth.pause)
