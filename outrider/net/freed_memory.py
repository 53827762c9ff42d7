"""What a flood of calls has taken is given back to the system. gRPC frees it when the calls are over, but
glibc keeps what is freed in pieces: 14,000 calls with 170 entries of metadata each, 30 MB, had made a server
700 MiB larger for good.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

# Bytes above the least that this process has had: more than what a step frees and needs again.
GROWN = 128 * 2**20
LITTLE = 32 * 2**20  # bytes that were given back: the next time comes later then
MOST_PAUSE = 64  # looks from one time to the next


def give_back() -> None:
    """Gives the system what was freed. Another C library keeps what it has."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


class FreedMemory:
    """Says when to give back. It is not known what was freed: what a process holds may be needed. So where
    little was given back the pause doubles."""

    def __init__(self, memory: Callable[[], int]) -> None:
        """`memory`: returns the bytes that this process has in memory."""
        self._memory = memory
        self._least = self._last = self._seen = memory()
        self._pause = self._left = 1  # looks

    def due(self) -> bool:
        """Looks. Returns whether there may be much to give back."""
        now = self._seen = self._memory()
        self._least = min(self._least, now)
        if now > self._last + GROWN:
            self._last, self._pause, self._left = now, 1, min(self._left, 1)
        if now <= self._least + GROWN:
            return False
        self._left -= 1
        return self._left <= 0

    def given_back(self) -> None:
        """Takes in that it was done."""
        self._last = self._memory()
        self._pause = 1 if self._seen - self._last > LITTLE else min(2 * self._pause, MOST_PAUSE)
        self._left = self._pause
