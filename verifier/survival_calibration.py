"""Measures if a drafter's drafts hold what their survival promises: one that does not is believed less.

Pure. Survival is the word of a drafter, which may be mistaken or hostile: it decides who enters a step, so a
drafter that says 1 of everything would crowd out the others. What was promised is therefore held against what
came true, draft token by draft token, as far as it was seen, at each depth of the path by itself: first
tokens that are right buy no belief for a wrong tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verifier.disputes import DEPTHS, Prevailing

PRIOR = 3.0  # draft tokens that are believed in advance
DOUBTED = 0.5  # factor below which what is said is doubted
TOLERANCE = 1.1  # an honest estimate is out by so much now and then
FORGETTING = 0.98  # a step that verified a draft token there
AGREED = 0.6  # of the chance to be wrong, what is left of it if several say a token: before any was judged
AGREED_PRIOR = 1.0  # wrong tokens that this weighs as much as
AGREED_FORGETTING = 0.99  # a token that several said
IDLE_FORGETTING = 0.998  # a step that did not: so that another try comes, once in some hundred steps
JUDGED = FORGETTING / IDLE_FORGETTING  # what of the sums there stays, over what of the others does
HEAVIEST = 1e12  # weight of the last step, in that of the first, up to which all is summed as it is


@dataclass(slots=True)
class Agreement:
    """How often tokens are wrong that several sources say, over how often they would be if the one that makes
    them likeliest had said them alone."""

    promised: float = 0.0  # sum of the chances to be wrong, by that one's word
    wrong: float = 0.0

    @property
    def factor(self) -> float:
        return min(1.0, (self.wrong + AGREED * AGREED_PRIOR) / (self.promised + AGREED_PRIOR))

    def judge(self, chance: float, right: bool) -> None:
        """Takes in a token that several sources had said, and that counted as so likely."""
        self.promised = AGREED_FORGETTING * self.promised + (1 - chance) / self.factor
        self.wrong = AGREED_FORGETTING * self.wrong + (not right)


@dataclass(slots=True)
class SurvivalCalibration:
    """How far a source is believed at each depth; the first draft token of a path has depth 0.

    A step forgets a little of all sums. Instead, what it adds weighs more than what was added before."""

    promised: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    """Sums of P(accepted | all before it are) of the draft tokens that were judged, times `weight`."""
    kept: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    """Of them, accepted."""
    beside_promised: float = 0.0  # the same of those that were not the likeliest at their place, at any depth
    beside_kept: float = 0.0
    weight: float = 1.0  # of what the last step showed
    prevailing: Prevailing = field(default_factory=Prevailing)  # where others said something else
    _factors: tuple[float, ...] | None = field(default=None, compare=False)  # once they were asked for
    _beside: float | None = field(default=None, compare=False)

    def copy(self) -> SurvivalCalibration:
        beside = self.beside_promised, self.beside_kept
        return SurvivalCalibration(
            self.promised[:], self.kept[:], *beside, self.weight, self.prevailing.copy()
        )

    @property
    def factors(self) -> tuple[float, ...]:
        """Returns the factor for a promised probability at each depth; at most 1. A depth of which little is
        known is believed as all together are."""
        if self._factors is None:
            prior = PRIOR * self.weight
            known = prior * ((sum(self.kept) + prior) / (sum(self.promised) + prior))
            found = [
                TOLERANCE * (kept + known) / (promised + prior)
                for kept, promised in zip(self.kept, self.promised, strict=True)
            ]
            self._factors = tuple([factor if factor < 1.0 else 1.0 for factor in found])
        return self._factors

    @property
    def beside(self) -> float:
        """Returns the factor for what is not the likeliest at its place."""
        if self._beside is None:
            prior = PRIOR * self.weight
            self._beside = min(1.0, TOLERANCE * (self.beside_kept + prior) / (self.beside_promised + prior))
        return self._beside

    @property
    def wins(self) -> Sequence[float]:
        """Returns the factors for what would have its way against what others said."""
        return self.prevailing.factors

    def at(self, depth: int) -> float:
        return self.factors[min(depth, DEPTHS - 1)]

    def observe(self, chances: Sequence[float], accepted: int) -> None:
        """Takes in a step that verified a path with these promised probabilities and accepted its first
        `accepted`; the token after them was judged too, and those behind it were not."""
        judged = chances[: accepted + 1]
        self.judge([(place, chance, place < accepted) for place, chance in enumerate(judged)])

    def judge(
        self, likeliest: Sequence[tuple[int, float, bool]], beside: Sequence[tuple[float, bool]] = ()
    ) -> None:
        """Takes in a step: of the draft tokens that were judged, the likeliest at each depth (the depth, what
        was promised, whether it was right), and of those beside them the same."""
        promised, kept, weight = self.promised, self.kept, self.weight / IDLE_FORGETTING
        for depth, chance, right in likeliest:
            if depth < DEPTHS:
                promised[depth] = JUDGED * promised[depth] + weight * chance
                kept[depth] = JUDGED * kept[depth] + weight * right
            else:
                promised[-1] += weight * chance
                kept[-1] += weight * right
        if beside:
            self.beside_promised *= JUDGED
            self.beside_kept *= JUDGED
        for chance, right in beside:
            self.beside_promised += weight * chance
            self.beside_kept += weight * right
        self.weight, self._factors, self._beside = weight, None, None
        if weight > HEAVIEST:
            self._weigh_anew()

    def _weigh_anew(self) -> None:
        """Lets the last step weigh 1."""
        self.promised = [each / self.weight for each in self.promised]
        self.kept = [each / self.weight for each in self.kept]
        self.beside_promised /= self.weight
        self.beside_kept /= self.weight
        self.weight = 1.0
