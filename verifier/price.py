"""What one more token in a step costs: pure arithmetic over measured step times.

With G the verifier's goodput (tokens committed a second, all sessions together) and T(n) the time of a step
with n tokens, one more token costs G * dT/dn committed tokens. A draft token is worth its place where it
survives with at least that probability. See docs/speculation.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

NEAR = 0.1  # weight of one more step in the correction of the points that it lies between
FAR = 0.05  # and of all others: what makes steps longer mostly touches all of them
MOST_SURPRISE = 1.5  # factor by which one step is believed to differ from what was expected
AHEAD = 8  # tokens over which dT/dn is taken: few enough to be local, enough to outweigh jitter

Floats = npt.NDArray[np.float64]


class StepTime:
    """T(n) from a profile at start, corrected by what steps take, each size on its own.

    T(n) is what a step of n tokens adds to the clock: the forward pass and what goes on around it. Longer
    contexts make all sizes slower; the correction carries that, as it follows the steps that run now.
    """

    def __init__(self, tokens: Floats, seconds: Floats) -> None:
        """Takes the points of the profile: both [P], rising; at least one."""
        self.tokens = tokens
        self.profile = seconds
        self.correction: Floats = np.ones(len(tokens))  # [P] what steps take, over what the profile says
        self._now = seconds  # [P] the two together
        self._line: tuple[list[float], list[float]] = (
            tokens.tolist(),
            seconds.tolist(),
        )  # the same, for a single number of tokens

    @classmethod
    def measured(cls, seconds: Mapping[int, float]) -> StepTime:
        """Makes it from seconds by number of tokens; a time that falls with more tokens is jitter."""
        tokens = sorted(seconds)
        times = np.array([seconds[count] for count in tokens], np.float64)
        return cls(np.array(tokens, np.float64), np.maximum.accumulate(times))

    def at(self, tokens: float) -> float:
        """Returns the seconds of a step of so many tokens."""
        known, seconds = self._line
        last = len(known) - 1
        if last == 0 or tokens <= known[0]:
            return seconds[0]
        above = min(bisect_left(known, tokens), last)
        slope = (seconds[above] - seconds[above - 1]) / (known[above] - known[above - 1])
        return seconds[above - 1] + slope * (tokens - known[above - 1])

    def times(self, tokens: Floats | npt.NDArray[np.int64]) -> Floats:
        """Returns the seconds of each: on the line between two points, beyond the last one on the last
        line."""
        between: Floats = np.interp(tokens, self.tokens, self._now)
        if len(self.tokens) == 1:
            return between
        slope = (self._now[-1] - self._now[-2]) / (self.tokens[-1] - self.tokens[-2])
        beyond: Floats = np.maximum(tokens - self.tokens[-1], 0.0)
        between += slope * beyond
        return between

    def observe(self, tokens: float, seconds: float) -> None:
        """Takes in that a step took so long. One that was far from what was expected is believed only in
        part."""
        expected = self.at(tokens)
        if expected <= 0:
            return
        surprise = min(max(seconds / expected, 1 / MOST_SURPRISE), MOST_SURPRISE)
        weight = np.full(len(self.tokens), FAR)
        above = int(np.searchsorted(self.tokens, tokens))
        weight[max(above - 1, 0) : above + 1] = NEAR
        self.correction *= 1 + weight * (surprise - 1)
        self._now = np.maximum.accumulate(self.profile * self.correction)
        self._line = self._line[0], self._now.tolist()

    def slope(self, tokens: float) -> float:
        """Returns the seconds that one more token adds to a step that has `tokens`."""
        return (self.at(tokens + AHEAD) - self.at(tokens)) / AHEAD

    def price(self, goodput: float, tokens: float) -> float:
        """Returns the committed tokens that one more token costs in a step that has `tokens`: G * dT/dn, at
        most 1."""
        return min(goodput * self.slope(tokens), 1.0)
