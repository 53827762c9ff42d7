"""What was written to HTTP connections and waits for their clients: how much of it there may be in all.

A small request may have a large answer, which lies here until its client takes it. Where that is too much,
connections are closed: of the address that holds most, the one that holds most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from outrider.net.half_said import MOST_HELD, Held, too_much

logger = logging.getLogger(__name__)
SILENT_SECONDS = 60.0  # between two lines of the log
LEFT = 7 / 8  # of the most, where there is more: else each write would have all looked at


class Writing(Protocol):
    """A connection that is written to."""

    address: str

    def untaken(self) -> int:
        """Returns the bytes that wait for its client now."""
        ...

    def drop(self) -> None: ...


class Untaken:
    """All connections to which something was written that waits. Costs a connection whose client reads
    nothing."""

    def __init__(self, most: int = MOST_HELD, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` is in bytes. `clock` gives seconds."""
        self._most = most
        self._clock = clock
        self._held: dict[Writing, int] = {}  # as it was when each was looked at last
        self._total = 0
        self._told_at: float | None = None

    def wrote(self, connection: Writing) -> None:
        """Something was written to it."""
        self._note(connection)
        if self._total <= self._most:
            return
        for one in list(self._held):  # they may have been taken since
            self._note(one)
        if self._total <= self._most:
            return
        waiting = list(self._held)
        held = [Held(at, one.address, self._held[one]) for at, one in enumerate(waiting)]
        for each in too_much(held, LEFT * self._most):
            self.forget(waiting[each.descriptor])
            waiting[each.descriptor].drop()
            self._tell()

    def forget(self, connection: Writing) -> None:
        """It is closed."""
        self._total -= self._held.pop(connection, 0)

    def _note(self, connection: Writing) -> None:
        self.forget(connection)
        if size := connection.untaken():
            self._held[connection] = size
            self._total += size

    def _tell(self) -> None:
        now = self._clock()
        if self._told_at is None or now - self._told_at >= SILENT_SECONDS:
            self._told_at = now
            logger.warning("answers of over %d bytes waited for their clients: some were closed", self._most)
