"""How much of one peer is read: a token bucket. Pure: times are seconds on the caller's clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Lets `rate` units a second be read, and `burst` at once."""

    rate: float
    burst: float
    _used: float = 0.0
    _at: float = 0.0

    def spend(self, units: float, now: float) -> float:
        """Takes units. Returns the seconds to wait before more is read; 0 = there is some left."""
        self._used = max(0.0, self._used - self.rate * (now - self._at)) + units
        self._at = now
        return max(0.0, self._used - self.burst) / self.rate
