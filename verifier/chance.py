"""How often guesses of one kind were right lately. Pure."""

from __future__ import annotations

from dataclasses import dataclass

PRIOR = 1.0  # guesses that the first chances weigh as much as
FORGETTING = 0.95  # a guess of the same kind


@dataclass(slots=True)
class Chance:
    """How often guesses of one kind were right lately."""

    right: float
    seen: float = PRIOR

    @classmethod
    def first(cls, chance: float) -> Chance:
        """Returns that of a kind of which none was seen yet."""
        return cls(PRIOR * chance)

    def observe(self, right: bool) -> None:
        self.right, self.seen = FORGETTING * self.right + right, FORGETTING * self.seen + 1

    @property
    def value(self) -> float:
        return self.right / self.seen
