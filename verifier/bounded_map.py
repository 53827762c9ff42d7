"""Session ids to which something happened lately, with a note each. The map forgets the oldest if it is
full."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 4096


class BoundedMap:
    def __init__(self, limit: int = REMEMBERED) -> None:
        self._ids: OrderedDict[bytes, bytes] = OrderedDict()
        self._limit = limit

    def add(self, session_id: bytes, note: bytes = b"") -> None:
        self._ids[session_id] = note
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def discard(self, session_id: bytes) -> None:
        self._ids.pop(session_id, None)

    def __contains__(self, session_id: bytes) -> bool:
        return session_id in self._ids

    def get(self, session_id: bytes) -> bytes | None:
        """Returns the note, or None."""
        return self._ids.get(session_id)
