"""Whom to believe where drafters contradict one another: told by what came true at such places. Pure.

One that repeats what is easy to guess keeps its promises in the mean, and so could be certain of a wrong
token wherever another knows better. So it is held against what came true where it would have taken another's
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verifier.nodes import Source

DEPTHS = 8  # that are told apart: who is right at first may be wrong behind that, and the other way round
PRIOR = 3.0  # tokens that are believed in advance
TOLERANCE = 1.1  # an honest estimate is out by so much
FORGETTING = 0.98  # a token that was judged

Claims = Mapping[Source, Sequence[tuple[int, float]]]
"""The likeliest path of each source by itself: tokens, and how likely each counts as."""


@dataclass(slots=True)
class Prevailing:
    """How far one is believed where it would have its way against others, by depth: the last stands for all
    beyond."""

    promised: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    right: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)
    factors: list[float] = field(default_factory=lambda: [1.0] * DEPTHS)  # that follow from the two

    def copy(self) -> Prevailing:
        return Prevailing(self.promised[:], self.right[:], self.factors)

    def judge(self, depth: int, chance: float, right: bool) -> None:
        """Takes in a token that counted as so likely."""
        place = min(depth, DEPTHS - 1)
        self.promised[place] = FORGETTING * self.promised[place] + chance
        self.right[place] = FORGETTING * self.right[place] + right
        factor = TOLERANCE * (self.right[place] + PRIOR) / (self.promised[place] + PRIOR)
        self.factors = [*self.factors[:place], min(1.0, factor), *self.factors[place + 1 :]]


def prevailed(claims: Claims, tokens: Sequence[int]) -> list[tuple[Source, int, float, bool]]:
    """Returns of each place where sources said several tokens, behind what came true until there, who would
    have had its way: who, the depth, how likely its token counted as, and whether it came true. `tokens`:
    what came."""
    found: list[tuple[Source, int, float, bool]] = []
    right_so_far = dict(claims)
    for depth, token in enumerate(tokens):
        here = {source: path[depth] for source, path in right_so_far.items() if depth < len(path)}
        if len(here) < 2:
            break
        if len({said for said, _ in here.values()}) > 1:
            most = max(chance for _, chance in here.values())
            found += [
                (who, depth, most, said == token) for who, (said, chance) in here.items() if chance == most
            ]
        right_so_far = {source: claims[source] for source, (said, _) in here.items() if said == token}
    return found
