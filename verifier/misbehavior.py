"""How a drafter behaves: what it must not send is weighed, and who sends too much of it is cut off.

Pure: every time is a number of seconds on the caller's clock.

A batch counts as the worst thing in it. Offences leak away, so that a fault now and then costs nothing, and
what honest drafters do too weighs nothing: drafts that the target has overtaken, that are known already, or
that cross the end of their session or its being opened anew, and claims to sessions that never come. Those
cost reading time alone, and that is rationed by a token bucket.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

LIMIT = 32.0  # weight of the offences at which a drafter is cut off
LEAK = 1.0  # weight that is forgotten in a second
BAN_SECONDS = 60.0  # that it is refused afterwards
REMEMBERED = 1024  # drafters

NOT_GIVEN = "not_given"  # a draft for a session that it never claimed
NOT_ATTACHED = "not_attached"  # for one that it did: over, another's by now, or not here yet
BAD_ATTACH = "bad_attach"  # a claim of the wrong size
WRONG_KEY = "wrong_key"  # a claim with a right that is none, or not yet, or of a former opening
FORMER_TURN = "former_turn"  # a claim to a session that another drafter has been given since
TOO_MANY_CLAIMS = "too_many_claims"  # that wait for their sessions
GARBAGE = "garbage"  # bytes that are no message
TOO_LARGE = "too_large"  # a message over the limit
UNANNOUNCED = "unannounced"  # a stream that shows no right to any session here
HELD_BACK = "held_back"  # its allowance is used up: nothing is dropped, it is read later

WEIGHTS = {
    NOT_GIVEN: 1.0,
    "beyond": 1.0,
    BAD_ATTACH: 4.0,
    "before_output": 4.0,
    "bad_token": 4.0,
    "bad_tree": 4.0,
    "too_long": 4.0,
    GARBAGE: 16.0,
    TOO_LARGE: 16.0,
}
"""The weight of each offence, by the reason under which it is counted; others weigh nothing."""


@dataclass(slots=True)
class Misbehavior:
    """What one drafter has done."""

    level: float = 0.0  # of what it has done, not forgotten yet
    at: float = 0.0  # time of that level
    banned_until: float = 0.0

    def offend(self, weight: float, now: float) -> bool:
        """Returns whether that was too much."""
        self.level = max(0.0, self.level - LEAK * (now - self.at)) + weight
        self.at = now
        return self.level >= LIMIT


Name = tuple[str, str]
"""Whose a drafter is (a certificate; without one an address), and its worker_id."""


@dataclass(slots=True)
class Misbehaviors:
    """What all drafters have done, by name: they come back, and may be other processes then."""

    _by_name: OrderedDict[Name, Misbehavior] = field(default_factory=OrderedDict)

    def offend(self, name: Name, weight: float, now: float) -> bool:
        """Notes an offence. Returns True if the drafter is to be cut off: it is banned from now on."""
        if weight <= 0:
            return False
        known = self._by_name.setdefault(name, Misbehavior(at=now))
        self._by_name.move_to_end(name)
        if len(self._by_name) > REMEMBERED:
            self._by_name.popitem(last=False)
        if not known.offend(weight, now):
            return False
        known.level, known.banned_until = 0.0, now + BAN_SECONDS
        return True

    def banned_for(self, name: Name, now: float) -> float:
        """Returns the seconds for which it is still refused."""
        known = self._by_name.get(name)
        return max(0.0, known.banned_until - now) if known is not None else 0.0
