"""What the places in grammars of one process cost together, as all of a step's sessions wait. No torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from weakref import WeakSet

COSTLY_SECONDS = 0.002  # a place whose masks take longer gets the next one before its session has a step
ORDINARY_SECONDS = 0.0001  # all places whose masks take longer share that time: the more there are, the less
FORCED_REST = 50.0  # times what finding a long forced text took: for so long none is looked for
LIKELY_REST = 10.0  # times what finding likely text took: for so long none is looked for


class Company:
    """What the places in grammars of one process cost together: all of a step's sessions wait for it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._dear: WeakSet[Hashable] = WeakSet()  # whose masks take more than ordinary ones
        self._rests_until = -math.inf
        self._chooses_from = -math.inf

    def is_costly(self, place: Hashable, seconds: float) -> bool:
        """Returns whether steps are not to wait for masks of the place, one of which took so long."""
        with self._lock:
            (self._dear.add if seconds > ORDINARY_SECONDS else self._dear.discard)(place)
            dear = len(self._dear)
        return dear > 0 and seconds > max(ORDINARY_SECONDS, COSTLY_SECONDS / dear)

    @property
    def may_force(self) -> bool:
        """Returns whether forced text may be looked for: meanwhile nothing else runs in this process."""
        return self._clock() >= self._rests_until

    def forced(self, seconds: float) -> None:
        """Takes in how long that took."""
        if seconds > ORDINARY_SECONDS:
            self._rests_until = self._clock() + FORCED_REST * seconds

    @property
    def may_choose(self) -> bool:
        """Returns whether likely text may be looked for: steps wait for it, so it has a share of the time."""
        return self._clock() >= self._chooses_from

    def chose(self, seconds: float) -> None:
        """Takes in how long that took."""
        self._chooses_from = self._clock() + LIKELY_REST * seconds
