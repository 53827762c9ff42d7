"""Decides if a step starts at once, or after a bounded wait for drafts that are about to arrive.

Pure: every time is a number of seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

LONGEST_WAIT = 0.5  # in parts of a step's time: what comes later is better found by the step after this one
LATE = 3  # draft tokens' time after which the next one is not expected any more
LOCK_STEP_SECONDS = 1.0  # a drafter that says nothing for so long is not waited for in lock-step either
BELIEVED = 2.0  # tokens that waits may lose before they are expected to bring less
WAIT_FORGETTING = 0.95  # a step that was waited with
NO_WAIT_FORGETTING = 0.995  # a step that was not: so that waiting is tried again, once in some hundred steps
SMOOTHING = 0.2  # weight of a new measurement in a moving average
ACCEPTANCE_SMOOTHING = 0.1  # of one more draft token in a session's acceptance
FIRST_ACCEPTANCE = 0.5  # of a session whose drafts have not been verified yet


@dataclass(slots=True)
class Pace:
    """How fast one drafter answers, measured on its arrivals."""

    lead: float | None = None  # from a commit that left no draft to the first token that follows it
    token: float | None = None  # between draft tokens of a session
    punctual: float = 1.0  # share of commits that it answered before the next one

    def first(self, seconds: float) -> None:
        self.lead = _average(self.lead, seconds)
        self.punctual = _average(self.punctual, 1.0)

    def following(self, seconds: float, tokens: int) -> None:
        self.token = _average(self.token, seconds / tokens)

    def missed(self) -> None:
        self.punctual = _average(self.punctual, 0.0)


@dataclass(slots=True)
class Arrivals:
    """What arrived for one session, as far as it matters for its next step."""

    committed_at: float | None = None  # None = nothing was committed yet
    last_at: float | None = None  # of the newest draft token of the path that stands; None = there is none
    heard: bool = False  # whether anything came since the last commit
    missed: bool = False  # nothing came between the two commits before, and no draft was left over either

    @property
    def silent(self) -> bool:
        """Returns True if the drafter no longer answers for this session. It counts again once something
        arrives."""
        return self.missed and not self.heard

    def committed(self, now: float, verified: int, left: int = 0) -> Arrivals:
        """Returns what is known after a commit; `verified` draft tokens took part in its step, and `left`
        stand."""
        missed = self.committed_at is not None and not self.heard and verified == 0
        return Arrivals(now, self.last_at if left else None, missed=missed)

    def arrived(self, now: float, tokens: int, pace: Pace) -> None:
        """Notes `tokens` new draft tokens and lets its drafter's pace learn from them."""
        if self.last_at is None:
            if self.committed_at is not None:  # before that, both have been reading the prompt
                pace.first(now - self.committed_at)
        elif self.heard:  # else the drafter may have paused, its window full
            pace.following(now - self.last_at, tokens)
        self.last_at, self.heard = now, True


@dataclass(slots=True)
class Waits:
    """Tells if waiting has paid: what it cost and what it brought, in committed tokens.

    Paces are averages, and a drafter on a busy machine is often later than that. So what waits brought is
    held against what they cost; if it was less, less is expected of the next ones."""

    cost: float = 0.0
    gain: float = 0.0

    @property
    def factor(self) -> float:
        """Returns the factor for the expected gain of a wait; at most 1."""
        return min(1.0, (self.gain + BELIEVED) / (self.cost + BELIEVED))

    def observe(self, cost: float, accepted: int) -> None:
        """Takes in a step. `cost` is that of the wait before it; 0 = there was none. `accepted`: draft tokens
        of those that came meanwhile. A half of their gain lasts, at least (see _lasting), and no more is
        counted."""
        forgetting = WAIT_FORGETTING if cost else NO_WAIT_FORGETTING
        self.cost = forgetting * self.cost + cost
        self.gain = forgetting * self.gain + accepted / 2


class Awaited(NamedTuple):
    """A session that could verify more draft tokens than it has."""

    committed_at: float | None  # None = nothing was committed yet
    last_at: float | None  # of the newest draft token of the path that is there; None = there is none
    tokens: int  # draft tokens that could be verified now
    wanted: int  # num_speculative_tokens
    acceptance: float  # share of the session's draft tokens that were right lately
    lead: float | None  # its drafter's pace, as measured
    token: float | None
    survival: float = 1.0  # of the tokens that are there: P(all right, and the drafter answers in time)


StartAt = Callable[[float, float, float, float, Iterable[Awaited], float], float]


def start_at(
    now: float,
    free_since: float,
    step_seconds: float,
    goodput: float,
    awaited: Iterable[Awaited],
    price: float = 0.0,
) -> float:
    """Returns the time at which the next step should start; not after `now` = at once. To be asked again at
    every arrival, and then.

    A second of waiting costs `goodput`: the tokens that all sessions together commit in a second, waits
    included. A token in a step costs `price`: goodput * dT/dn. The draft tokens that are due, by their
    drafters' measured paces, bring their chance to survive. So the step waits for the next n of them, of all
    sessions, where their gain exceeds goodput * (time until they are due) + n * price, for some n. A drafter
    that is late by its own pace has gone quiet and is not waited for. See docs/speculation.md.

    No wait is longer than half a step: drafts that come later are at hand when a step that starts now is
    over, and mostly still of use then, so that waiting for them gains less than they are worth. Simulated for
    steps of 4.5 to 82 ms, draft tokens of .8 to 3 ms and round trips of 1 to 20 ms, half a step is the
    longest wait that nowhere loses more than 2 % to never waiting; it gains up to a third.
    """
    limit = free_since + LONGEST_WAIT * step_seconds
    due: list[tuple[float, float, float]] = []  # (when, gain, when it is late) of every token that may come
    for session in awaited:
        due += _due(now, limit, goodput, price, session)
    due.sort()
    start, gain, best, late = now, 0.0, 0.0, limit
    for arrival, worth, late_at in due:
        gain += worth
        late = min(late, late_at)
        if gain - goodput * (arrival - now) > best:
            best, start = gain - goodput * (arrival - now), late
    return start


def _due(
    now: float, limit: float, goodput: float, price: float, session: Awaited
) -> list[tuple[float, float, float]]:
    if session.lead is None or session.token is None or session.committed_at is None:
        return []
    if session.last_at is None:
        first, late_at = session.committed_at + session.lead, session.committed_at + 2 * session.lead
    else:
        first, late_at = session.last_at + session.token, session.last_at + (1 + LATE) * session.token
    if now >= late_at:
        return []
    due = []
    lasting = _lasting(goodput * session.lead, session.acceptance)
    worth = session.survival
    for further in range(session.wanted - session.tokens):
        arrival = max(now, first + further * session.token)
        worth *= session.acceptance
        if arrival > limit or worth <= price:
            break
        due.append((arrival, (worth - price) * lasting, late_at))
    return due


def _lasting(refill: float, acceptance: float) -> float:
    """Returns what a token gained by waiting is worth in the long run.

    A draft token that is not verified now is not lost: it still stands in the next step, if this step's own
    token agrees with it. Each one verified now, with the acceptance a, makes it 1 - a less likely that any
    stand then. A session without drafts is behind one with drafts by a + a^2 + ... tokens in its next step,
    by a / (1 - a^2) until both have drafts; or by what waiting for them costs, `refill`, if that is less.
    """
    behind = refill if acceptance >= 1 else min(acceptance / (1 - acceptance**2), refill)
    return 1 - (1 - acceptance) * behind


def lock_step(
    now: float,
    free_since: float,
    step_seconds: float,
    goodput: float,
    awaited: Iterable[Awaited],
    price: float = 0.0,
) -> float:
    """Takes the place of `start_at`: waits until every session has all the drafts that it may verify.
    Streaming is compared with this. A drafter that says nothing for a second is not waited for."""
    start = now
    for session in awaited:
        heard = max(free_since, session.last_at or 0.0)
        if session.tokens < session.wanted:
            start = max(start, heard + LOCK_STEP_SECONDS)
    return start


def acceptance_after(acceptance: float, accepted: int, verified: int) -> float:
    """Returns a session's moving acceptance after a step: `accepted` draft tokens were right, the next, if
    any, wrong."""
    kept = 1 - ACCEPTANCE_SMOOTHING
    acceptance = 1 - (1 - acceptance) * kept**accepted
    return acceptance * kept if accepted < verified else acceptance


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
