"""Who else decides k: the same for all, rules that others use, and what only hindsight can know."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.controllers import Verifier
from benchmarks.simulation.world import MOST_DRAFTS, Bools, Floats, Ints, World
from router.speculation import window


class Start(Enum):
    """When a step starts."""

    AT_ONCE = "at once"
    ALL_DRAFTS = "when every session's k drafts are there"
    BY_PRICE = "by price"


class Fixed:
    """The same k all the time, for all sessions or for each its own; all that arrived is verified."""

    def __init__(self, name: str, k: Sequence[int], start: Start) -> None:
        """Decides nothing yet. `k` is that of each trace."""
        self.name, self._k, self._start = name, np.array(k), start

    def begin(self, world: World) -> None:
        self.world = world
        self._verifier = Verifier(world)

    def opened(self, session: int) -> None:
        self._verifier.opened(session)

    def k(self) -> Ints:
        return np.asarray(self._k[self.world.trace])

    def windows(self, k: Ints) -> Ints:
        if self._start is Start.ALL_DRAFTS:
            return k
        measured = (self._verifier.meter.step_seconds, self.world.round_trip, self.world.draft_seconds)
        by_k = np.array([window(each, *measured) for each in range(MOST_DRAFTS + 1)])
        return np.asarray(by_k[k])

    def probabilities(self, sessions: Ints, depth: Ints, confidence: Floats) -> Floats:
        return confidence

    def scored(self, session: int, confidence: Floats, accepted: NDArray[np.bool_]) -> None:
        pass

    def arrived(self, sessions: Ints) -> None:
        self._verifier.arrived(sessions)

    def start_at(self, now: float, free_since: float, usable: Ints) -> float:
        if self._start is Start.AT_ONCE:
            return now
        if self._start is Start.ALL_DRAFTS:
            complete = usable >= np.minimum(self.world.k, self.world.room())
            return now if complete.all() else float("inf")
        return self._verifier.start_at(now, free_since, usable)

    def admit(self, usable: Ints) -> Ints:
        admitted = np.minimum(usable, self._most())
        self._verifier.judged(usable, admitted)
        return admitted

    @property
    def price(self) -> float:
        return self._verifier.meter.price

    def beside(self) -> Bools | None:
        return None

    def _most(self) -> Ints:
        """Returns how much is verified of what arrived."""
        return self.world.k

    def stepped(self, seconds: float, waited: float, admitted: Ints, accepted: Ints, committed: Ints) -> None:
        self._verifier.stepped(seconds, waited, admitted, accepted, committed)


class Heuristic(Fixed):
    """The rule of transformers' heuristic: 2 more if all were accepted, else 1 less; at least 1."""

    def __init__(self) -> None:
        super().__init__("+2/-1", [], Start.BY_PRICE)

    def begin(self, world: World) -> None:
        super().begin(world)
        self._now = np.full(world.sessions, 5)

    def opened(self, session: int) -> None:
        super().opened(session)
        self._now[session] = 5

    def k(self) -> Ints:
        return np.asarray(np.minimum(self._now, MOST_DRAFTS))

    def stepped(self, seconds: float, waited: float, admitted: Ints, accepted: Ints, committed: Ints) -> None:
        super().stepped(seconds, waited, admitted, accepted, committed)
        changed = np.where(accepted == admitted, np.minimum(self._now + 2, 20), np.maximum(self._now - 1, 1))
        self._now = np.where(admitted > 0, changed, self._now)


class Confidence(Fixed):
    """The rule of transformers: a draft ends with the first token of which the draft model is less sure than
    .4."""

    def __init__(self, traces: int) -> None:
        super().__init__("confidence .4", [MOST_DRAFTS] * traces, Start.BY_PRICE)

    def _most(self) -> Ints:
        unsure = self.world.confidence() < 0.4
        return np.where(unsure.any(axis=1), unsure.argmax(axis=1) + 1, MOST_DRAFTS)
