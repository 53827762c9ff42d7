"""A place for a drafter at a session: who drafts there, what came of it, and how far ahead it may run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from outrider.wire.drafter_sessions import DraftEndCause
from outrider.wire.guesses import DrafterCounts
from router.drafter_merits import Outcome
from router.requests import TokensCommitted
from router.speculation import PairAcceptance
from router.workers import Drafter


class PlaceListener(Protocol):
    """What a place calls: a session's draft."""

    def draft_ended(self, place: Place, cause: DraftEndCause, reason: str) -> None: ...
    def drafter_lost(self, place: Place) -> None: ...


class Place:
    """The first one is there always; a session that may have several drafters has more."""

    def __init__(self, seat: int, listener: PlaceListener, pair: PairAcceptance) -> None:
        """`seat`: its number, as verifiers know it."""
        self.seat = seat
        self.drafter: Drafter | None = None  # None = nobody drafts here
        self.turn = -1  # of the session's drafters, counted over all places
        self.window = 0
        self.unverified = 0  # tokens committed, though a draft was welcome, since one of its was verified
        self.had = 0  # tokens committed since its drafter was chosen, or nobody was
        self.heard = False  # of that drafter, something was verified
        self.accepted = self.observed = 0  # of its guesses
        self.alone, self.added = Outcome(), Outcome()  # of it by itself, and beside others; not reported yet
        self._listener = listener
        self._pair = pair  # of the target and its draft model

    def take(self, drafter: Drafter, turn: int, pair: PairAcceptance) -> None:
        self.drafter, self.turn, self._pair = drafter, turn, pair
        self.unverified = self.had = self.accepted = self.observed = 0
        self.heard = False

    def leave(self) -> None:
        """Nobody drafts here any more; what its drafter has shown is remembered of the pair of models."""
        self.drafter = None
        self._pair.absorb(self.accepted, self.observed)
        self.accepted = self.observed = 0

    def observe(self, counts: DrafterCounts, accepted: int, verified: int) -> None:
        """Takes in a step in which so much of it was verified, and of all drafts `accepted` of a path of
        `verified`. What stood behind its first wrong guess was not observed."""
        ended = counts.accepted < accepted or accepted < verified  # else the step ended before its guesses
        self.heard |= counts.verified > 0
        self.accepted += counts.accepted
        self.observed += counts.accepted + (ended and counts.accepted < counts.verified)

    # From its drafter.

    def draft_ended(self, cause: DraftEndCause, reason: str) -> None:
        self._listener.draft_ended(self, cause, reason)

    def drafter_lost(self) -> None:
        self._listener.drafter_lost(self)


def counts_by_turn(step: TokensCommitted, first: int) -> Mapping[int, DrafterCounts] | None:
    """Returns by turn what a step says of the session's drafters; None = nothing. Before it has had a second
    one all is of the first, which has the turn `first`, but for what the verifier guessed itself: that is no
    drafter's merit."""
    own = step.own
    if step.drafters or own.speculated:  # beside a speculator a drafter is told apart, too
        return {one.turn: one for one in step.drafters}
    guessed, right = max(own.predicted, own.forced), max(own.predicted_accepted, own.forced_accepted)
    if right < guessed:  # the step ended before what a drafter alone had guessed
        return None
    verified, accepted = step.verified + step.beside - guessed, step.accepted - guessed
    return {first: DrafterCounts(first, verified, accepted, verified)} if verified else {}
