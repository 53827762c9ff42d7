"""How much a peer that is not trusted may say: bytes, and entries of lists, which cost more than bytes.

Who says more is cut off. What is allowed is far more than an honest peer has to say, so that none is ever
held back, and little enough that the reading of it takes a small share of a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from outrider.errors import Overloaded
from outrider.net.token_bucket import TokenBucket

CUT_OFF_SECONDS = 60  # before a peer that was cut off is let in again
MESSAGE_UNITS = 256  # a unit is what a byte costs: some nanoseconds
ENTRY_UNITS = 64
ENTRIES_AT_ONCE = 32  # that are read before they are counted

T = TypeVar("T")


class CutOff(Overloaded):
    """A peer has said more than it may."""


class Allowance:
    """What one peer may still say."""

    def __init__(
        self, what: str, bytes_per_second: float, burst_bytes: float, clock: Callable[[], float]
    ) -> None:
        """`what` names the peer in sentences. `clock` gives seconds."""
        self._what = what
        self._bucket = TokenBucket(bytes_per_second, burst_bytes)
        self._clock = clock

    def message(self, size: int) -> None:
        """Counts a message of so many bytes, before it is decoded. Raises CutOff."""
        self.spend(MESSAGE_UNITS + size)

    def entries(self, entries: Iterable[T]) -> Iterator[T]:
        """Yields the entries. Raises CutOff in between if they are too many."""
        for index, entry in enumerate(entries, 1):
            if index % ENTRIES_AT_ONCE == 0:
                self.spend(ENTRIES_AT_ONCE * ENTRY_UNITS)
            yield entry

    def spend(self, units: float) -> None:
        """Counts what else it takes to read of the peer. Raises CutOff."""
        if self._bucket.spend(units, self._clock()) > 0:
            raise self.cut_off(f"it says more than {self._bucket.rate / 2**20:g} MiB a second")

    def cut_off(self, why: str) -> CutOff:
        """Returns the sentence for a peer that has done what none may."""
        return CutOff(
            f"the {self._what} is cut off for {CUT_OFF_SECONDS} seconds: {why}", retry_after=CUT_OFF_SECONDS
        )
