"""Session ids to which something happened lately, with a note each. The map forgets the oldest if it is
full."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

REMEMBERED = 4096

Note = TypeVar("Note")


class BoundedMap(Generic[Note]):
    def __init__(self, limit: int = REMEMBERED) -> None:
        self._ids: OrderedDict[bytes, Note] = OrderedDict()
        self._limit = limit

    def add(self, session_id: bytes, note: Note) -> None:
        self._ids[session_id] = note
        if len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def discard(self, session_id: bytes) -> None:
        self._ids.pop(session_id, None)

    def __contains__(self, session_id: bytes) -> bool:
        return session_id in self._ids

    def get(self, session_id: bytes) -> Note | None:
        """Returns the note, or None."""
        return self._ids.get(session_id)
