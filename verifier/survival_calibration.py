"""Measures if a seat's drafts hold what their survival promises: one that does not is believed less.

Pure. Survival is the word of a drafter, which may be mistaken or hostile: it decides who enters a step, so a
drafter that says 1 of everything would crowd out the others. What was promised is therefore held against what
came true, draft token by draft token, as far as it was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PRIOR = 3.0  # draft tokens that are believed in advance
TOLERANCE = 1.1  # an honest estimate is out by so much now and then
FORGETTING = 0.98  # a step that verified drafts
IDLE_FORGETTING = 0.998  # a step that did not: so that another try comes, once in some hundred steps


@dataclass(slots=True)
class SurvivalCalibration:
    promised: float = 0.0  # sum of P(accepted | all before it are) of the draft tokens that were judged
    kept: float = 0.0  # of them, accepted

    @property
    def factor(self) -> float:
        """Returns the factor for each promised probability; at most 1."""
        return min(1.0, TOLERANCE * (self.kept + PRIOR) / (self.promised + PRIOR))

    def observe(self, chances: Sequence[float], accepted: int) -> None:
        """Takes in a step that verified a path with these promised probabilities and accepted its first
        `accepted`; the token after them was judged too, and those behind it were not."""
        forgetting = FORGETTING if chances else IDLE_FORGETTING
        self.promised = forgetting * self.promised + sum(chances[: accepted + 1])
        self.kept = forgetting * self.kept + accepted
