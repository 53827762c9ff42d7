"""A bound on the metadata that a call has. gRPC bounds what is written out; but HTTP/2 has a byte for an
entry that was said before (RFC 7541, 6.1), and of these gRPC counts none: 16 KB are 16,000 entries, a head
that goes on over many frames has millions. Of each it makes an object, on the event loop, before any code of
ours sees the call.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakSet, ref

from grpc._cython import cygrpc  # it makes the entries, and has no option that bounds them

MOST_BYTES = 2**15  # of a call's, each entry counted as HTTP/2 does; gRPC takes 2**14 of those that it counts
OVERHEAD = 32  # bytes of an entry


class TooMuchMetadata(Exception):
    """A call of a server has too much: who called is told so. A client's gRPC refuses it by itself."""


class _Entries:
    """Makes the entries of calls, each of which has a task of its own: of each as many as there may be, until
    it is known that it has no more."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._task: Any = lambda: None
        self._size = 0.0  # of what was made for that task
        self._bounded = WeakSet[Any]()  # tasks

    def __call__(self, key: str, value: str | bytes) -> Any:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # a thread without a loop, and so without a server
            task = None
        if task is None:
            return self._make(key, value)
        if task is not self._task():
            self._task, self._size = ref(task), float("-inf") if task in self._bounded else 0.0
        self._size += OVERHEAD + len(key) + len(value)
        if self._size > MOST_BYTES:
            raise TooMuchMetadata("the call has too much metadata")
        return self._make(key, value)

    def all_made(self) -> None:
        """Takes in that all of this call have been made, and may be made again for whoever looks."""
        self._bounded.add(asyncio.current_task())
        self._size = float("-inf")


entries = cygrpc._Metadatum = _Entries(cygrpc._Metadatum)
