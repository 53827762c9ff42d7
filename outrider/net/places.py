"""Places for calls that nobody needs a key for: so many in all, of which one address has at most a share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.errors import Overloaded


class Places:
    def __init__(self, most: int, share: int, refusal: str) -> None:
        """One address has at most one in `share` of `most`. `refusal`: what one too many is told."""
        self._most, self._share, self._refusal = most, share, refusal
        self._taken: Counter[str] = Counter()  # by address
        self.total = 0  # that are taken

    @contextmanager
    def taken(self, address: str) -> Iterator[None]:
        """Takes a place. Raises Overloaded if there is none."""
        if self.total >= self._most or self._taken[address] >= self._most // self._share:
            raise Overloaded(self._refusal)
        self._taken[address] += 1
        self.total += 1
        try:
            yield
        finally:
            self.total -= 1
            self._taken[address] -= 1
            if not self._taken[address]:
                del self._taken[address]


def host_of(peer: str) -> str:
    """Returns the host in a gRPC peer's name, such as "ipv4:192.0.2.1:50051"."""
    return peer.rpartition(":")[0]
