"""When does a step start: at once, or after a bounded wait for drafts that are about to arrive?

Pure: every time is a number of seconds on the caller's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST_WAIT = 0.1  # in parts of a step's time
MIN_TOKENS_DUE = 2  # draft tokens that must be due within it for a wait to begin
SMOOTHING = 0.2  # weight of a new measurement in a moving average
ACCEPTANCE_SMOOTHING = 0.1  # of one more draft token in a session's acceptance


@dataclass(slots=True)
class Pace:
    """How fast one drafter answers, measured on its arrivals."""

    lead: float | None = None  # from a commit to the first draft token that follows it
    token: float | None = None  # between draft tokens of a session

    def first(self, seconds: float) -> None:
        self.lead = _average(self.lead, seconds)

    def following(self, seconds: float, tokens: int) -> None:
        self.token = _average(self.token, seconds / tokens)


@dataclass(slots=True)
class Arrivals:
    """What arrived for one session since its last commit."""

    committed_at: float | None = None  # None = nothing was committed yet
    last_at: float | None = None
    missed: bool = False  # nothing came between the two commits before, and no draft was left over either

    @property
    def silent(self) -> bool:
        """Whether the drafter answers for this session no more; it counts again once something arrives."""
        return self.missed and self.last_at is None

    def committed(self, now: float, verified: int) -> Arrivals:
        """What is known after a commit; `verified` draft tokens took part in its step."""
        return Arrivals(now, missed=self.committed_at is not None and self.last_at is None and verified == 0)

    def arrived(self, now: float, tokens: int, pace: Pace) -> None:
        """Notes `tokens` new draft tokens and lets its drafter's pace learn from them."""
        if self.last_at is not None:
            pace.following(now - self.last_at, tokens)
        elif self.committed_at is not None:  # before that, both have been reading the prompt
            pace.first(now - self.committed_at)
        self.last_at = now


@dataclass(frozen=True, slots=True)
class Awaited:
    """A session that had no draft when the engine became free."""

    committed_at: float | None  # None = nothing was committed yet
    last_at: float | None  # of the newest draft token since
    tokens: int  # draft tokens that could be verified now
    wanted: int  # num_speculative_tokens
    acceptance: float  # share of the session's draft tokens that were right lately
    lead: float | None  # its drafter's pace, as measured
    token: float | None


def start_at(
    now: float, free_since: float, step_seconds: float, goodput: float, awaited: Iterable[Awaited]
) -> float:
    """The time at which the next step should start; not after `now` = at once. Asked again at every arrival.

    A session that had no draft is waited for where its drafter's measured pace says that two or more tokens
    are due within a tenth of a step, and they are worth it. A second of waiting costs `goodput`: the tokens
    that all sessions together commit in a second. The next n draft tokens gain acceptance + ... +
    acceptance^n. So the gain must exceed goodput * (time until they are due), for some n. A drafter that is
    late by its own pace has gone quiet and is not waited for. DESIGN sections 3 and 4.
    """
    limit = free_since + LONGEST_WAIT * step_seconds
    return max((_worth_waiting_until(now, limit, goodput, session) for session in awaited), default=now)


def _worth_waiting_until(now: float, limit: float, goodput: float, session: Awaited) -> float:
    if session.lead is None or session.token is None or session.committed_at is None:
        return now
    if session.last_at is None:
        due, slack = session.committed_at + session.lead, session.lead
    else:
        due, slack = session.last_at + session.token, session.token
    if now > due + slack:
        return now
    gain = 0.0
    for further in range(session.wanted - session.tokens):
        arrival = due + further * session.token
        if arrival > limit:
            break
        gain += session.acceptance ** (session.tokens + further + 1)
        enough = session.tokens + further + 1 >= min(MIN_TOKENS_DUE, session.wanted)
        if enough and gain > goodput * (arrival - now):
            return min(limit, due + slack)
    return now


def acceptance_after(acceptance: float, accepted: int, verified: int) -> float:
    """A session's moving acceptance after a step: `accepted` draft tokens were right, the next, if any,
    wrong."""
    for right in [1] * accepted + [0] * (accepted < verified):
        acceptance += ACCEPTANCE_SMOOTHING * (right - acceptance)
    return acceptance


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
