"""How much of drafters is read: seconds of a processor, by identity and at the verifier as a whole.

Reading is paid for by what it brings: each draft token that is accepted saves time, and its stream may cost
as much. Beyond that an identity (a certificate; without one an address) has little, however many streams
it opens, and all of them together not much more. So drafts that bring nothing take next to no time from
sessions, whoever sends them. Pure: every time is a number of seconds on the caller's clock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from outrider.net.token_bucket import TokenBucket

IDENTITY_RATE = 0.01  # of a processor, that one identity may cost though nothing of its drafts is accepted
WHOLE_RATE = 0.02  # that all of them may cost so
BURST_SECONDS = 0.25
REMEMBERED = 1024  # identities; the one that was heard longest ago goes first
MOST_EARNED_SECONDS = 1.0
MESSAGE_SECONDS = 1e-4  # that gRPC and the event loop take for a message, before it is decoded
BYTE_SECONDS = 1e-8
TOLD_SECONDS = 3.5e-8  # to tell a drafter a token, and to send it


@dataclass(slots=True)
class StreamAllowance:
    """What may be read of one stream."""

    identity: TokenBucket
    whole: TokenBucket
    earned: float = 0.0  # seconds

    def owed(self, now: float) -> float:
        """Returns the seconds to wait before more is read; 0 = there is some left. To be asked before that:
        who leaves instead has spent nothing, and leaves no debt to others."""
        return 0.0 if self.earned > 0 else max(self.identity.spend(0, now), self.whole.spend(0, now))

    def spend(self, seconds: float, now: float) -> float:
        """Takes so many seconds that reading has taken. Returns what `owed` does."""
        paid = min(seconds, self.earned)
        self.earned -= paid
        owed = seconds - paid
        return max(self.identity.spend(owed, now), self.whole.spend(owed, now)) if owed else 0.0

    def message(self, size: int, now: float) -> float:
        """Returns what `spend` does, for a message of so many bytes that is decoded."""
        return self.spend(MESSAGE_SECONDS + size * BYTE_SECONDS, now)

    def earn(self, seconds: float) -> None:
        """Drafts of the stream have saved so much time."""
        self.earned = min(self.earned + seconds, MOST_EARNED_SECONDS)


@dataclass(slots=True)
class ReadingAllowance:
    """How much of drafters a verifier reads."""

    _whole: TokenBucket = field(default_factory=lambda: TokenBucket(WHOLE_RATE, BURST_SECONDS))
    _of: OrderedDict[str, TokenBucket] = field(default_factory=OrderedDict)

    def of(self, identity: str) -> StreamAllowance:
        """Returns that of one more stream of an identity."""
        bucket = self._of.setdefault(identity, TokenBucket(IDENTITY_RATE, BURST_SECONDS))
        self._of.move_to_end(identity)
        if len(self._of) > REMEMBERED:
            self._of.popitem(last=False)
        return StreamAllowance(bucket, self._whole)
