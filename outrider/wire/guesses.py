"""The draft tokens that a step verified, as who asked for them is told: plain data, and messages of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from outrider.v1 import common_pb2


class Guess(NamedTuple):
    """A draft token for a position."""

    token: int
    chance: float  # of being accepted if all before it are: as its drafter said, 0..1
    drafter: str  # worker_id of who had guessed it, or "prediction", "grammar" or "speculator"


Guesses = tuple[Guess, ...]


class OwnCounts(NamedTuple):
    """How many of the draft tokens that a step verified the verifier itself had guessed. What two sources
    guessed counts for both."""

    predicted: int = 0  # the client's prediction said them
    predicted_accepted: int = 0
    forced: int = 0  # the grammar left no choice, or little
    forced_accepted: int = 0
    speculated: int = 0  # the target's speculator said them
    speculated_accepted: int = 0

    @property
    def by_source(self) -> tuple[tuple[str, int, int], ...]:
        """Returns (name, draft tokens, accepted ones) of each source."""
        return (
            ("prediction", self.predicted, self.predicted_accepted),
            ("grammar", self.forced, self.forced_accepted),
            ("speculator", self.speculated, self.speculated_accepted),
        )

    def after(self, known: int) -> OwnCounts:
        """Returns the same without the step's first `known` tokens."""
        return OwnCounts(*(max(0, count - known) for count in self)) if any(self) else self

    def plus(self, other: OwnCounts) -> OwnCounts:
        return OwnCounts(*map(sum, zip(self, other, strict=True)))

    def possible(self, accepted: int, verified: int) -> bool:
        """Returns whether they may be of a step that accepted so many of so many draft tokens."""
        return not any(self) or all(
            of <= verified and right == min(of, accepted) for _, of, right in self.by_source
        )


NO_OWN = OwnCounts()


class DrafterCounts(NamedTuple):
    """How many of the draft tokens that a step verified one of a session's several drafters had guessed. What
    two guessed counts for both."""

    turn: int  # which of the session's drafters
    verified: int  # on all branches
    accepted: int
    alone: int  # of those verified, those that nobody else had guessed
    name: str = ""  # of its model, where its router has told it

    def after(self, known: int) -> DrafterCounts:
        """Returns the same without the step's first `known` tokens."""
        verified, accepted = max(0, self.verified - known), max(0, self.accepted - known)
        return self._replace(verified=verified, accepted=accepted, alone=min(self.alone, verified))

    def possible(self, accepted: int, verified: int) -> bool:
        """Returns whether they may be of a step that accepted so many of so many draft tokens."""
        return self.accepted <= min(accepted, self.verified) and self.alone <= self.verified <= verified


def drafters_to_wire(counts: Iterable[DrafterCounts]) -> list[common_pb2.DrafterCounts]:
    return [common_pb2.DrafterCounts(**each._asdict()) for each in counts]


def drafters_from_wire(messages: Iterable[common_pb2.DrafterCounts]) -> tuple[DrafterCounts, ...]:
    return tuple(DrafterCounts(one.turn, one.verified, one.accepted, one.alone, one.name) for one in messages)


def guesses_to_wire(guesses: Iterable[Guess]) -> list[common_pb2.Guess]:
    return [common_pb2.Guess(token=one.token, chance=one.chance, drafter=one.drafter) for one in guesses]


def guesses_from_wire(messages: Iterable[common_pb2.Guess]) -> Guesses:
    return tuple(Guess(one.token, one.chance, one.drafter) for one in messages)


def own_to_wire(own: OwnCounts) -> common_pb2.OwnCounts | None:
    """Returns None for those of most steps, which have none."""
    return common_pb2.OwnCounts(**own._asdict()) if any(own) else None


def own_from_wire(message: common_pb2.OwnCounts) -> OwnCounts:
    return OwnCounts(*(getattr(message, name) for name in OwnCounts._fields))
