"""What one more token in a step costs: pure arithmetic over measured step times.

With G the verifier's goodput (tokens committed a second, all sessions together) and T(n) the time of a step
with n tokens, one more token costs G * dT/dn committed tokens. A draft token is worth its place where it
survives with at least that probability. DESIGN section 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SMOOTHING = 0.1  # weight of one more step in the correction
AHEAD = 8  # tokens over which dT/dn is taken: few enough to be local, enough to outweigh jitter


@dataclass(slots=True)
class StepTime:
    """T(n), from a profile at start; corrected by what steps take."""

    profile: tuple[tuple[int, float], ...]  # (tokens, seconds), both rising; at least one
    correction: float = 1.0  # what steps take, over what the profile says

    @classmethod
    def measured(cls, seconds: Mapping[int, float]) -> StepTime:
        """From seconds by number of tokens; a time that falls with more tokens is jitter."""
        rising, longest = [], 0.0
        for tokens in sorted(seconds):
            longest = max(longest, seconds[tokens])
            rising.append((tokens, longest))
        return cls(tuple(rising))

    def at(self, tokens: float) -> float:
        """Seconds: on the line between two points of the profile, beyond the last one on the last line."""
        before = self.profile[0]
        if tokens <= before[0]:
            return before[1] * self.correction
        slope = 0.0
        for point in self.profile[1:]:
            slope = (point[1] - before[1]) / (point[0] - before[0])
            if tokens <= point[0]:
                break
            before = point
        return (before[1] + slope * (tokens - before[0])) * self.correction

    def observe(self, tokens: int, seconds: float) -> None:
        """A step took that long."""
        expected = self.at(tokens)
        if expected > 0:
            self.correction *= 1 + SMOOTHING * (seconds / expected - 1)

    def price(self, goodput: float, tokens: float) -> float:
        """Committed tokens that one more token costs in a step that has `tokens`: G * dT/dn, at most 1."""
        slope = (self.at(tokens + AHEAD) - self.at(tokens)) / AHEAD
        return min(goodput * slope, 1.0)
