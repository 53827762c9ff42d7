"""What a router holds of its sessions' logs beside the store: how far each is written, and what is over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.store.logs import Owner
from outrider.wire.session import SessionId
from router.transcript import Transcript


@dataclass(slots=True, eq=False)
class LogCursor:
    """Says how much of one session the store has."""

    transcript: Transcript
    owner: Owner
    on_superseded: Callable[[], None] = lambda: None
    written: int = 0  # records that the store has, as far as is known
    unsure: bool = False  # whether it still has them; it is asked by an append of none
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # set once it was written to, or cannot be
    losses: int = 0  # how often it turned out to have lost some
    refusals: int = 0  # how often in a row it did not take what comes next, though it took a probe
    closed: bool = False  # no more comes
    given_up: bool = False
    session_id: SessionId = field(init=False)

    def __post_init__(self) -> None:
        session_id = self.transcript.request.session_id
        assert session_id is not None, "a session is named when it is admitted"
        self.session_id = session_id

    @property
    def is_written(self) -> bool:
        return not self.unsure and self.written >= self.transcript.length


@dataclass(frozen=True, slots=True)
class TakenSession:
    """A log that this router owns now."""

    transcript: Transcript
    owner: Owner
    written: int  # in records


class KeptLogs:
    """Those of answers that go on and have several sessions: one that is over is kept for its companions."""

    def __init__(self) -> None:
        self._answers = Counter[SessionId]()  # that go on: a client may be back before its former stream ends
        self._cursors: dict[SessionId, LogCursor] = {}

    def __iter__(self) -> Iterator[LogCursor]:
        return iter(list(self._cursors.values()))

    def __len__(self) -> int:
        return len(self._cursors)

    def keep(self, session_ids: Sequence[SessionId]) -> None:
        """From now on `hold` takes these."""
        self._answers.update(session_ids)

    def release(self, session_ids: Sequence[SessionId]) -> list[LogCursor]:
        """An answer is over. Returns what is over and nobody keeps any more."""
        self._answers.subtract(session_ids)
        alone = [one for one in session_ids if not self._answers[one]]
        for session_id in alone:
            del self._answers[session_id]
        gone = [self._cursors.pop(one) for one in alone if one in self._cursors]
        return [one for one in gone if one.closed]

    def hold(self, cursor: LogCursor) -> bool:
        """Holds it if it is to be kept, in place of a former one of that session. Returns whether it is."""
        kept = cursor.session_id in self._answers
        if kept:
            self._cursors[cursor.session_id] = cursor
        return kept

    def get(self, session_id: SessionId) -> LogCursor | None:
        return self._cursors.get(session_id)

    def drop(self, cursor: LogCursor) -> None:
        if self._cursors.get(cursor.session_id) is cursor:
            del self._cursors[cursor.session_id]


CLOSED_BYTES = 3072  # that one takes beside its transcript's content


class ClosedLogs:
    """Those of sessions that are over, as long as they are held: so many bytes, of all owners together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of: dict[str, dict[SessionId, LogCursor]] = {}  # by owner of the key; an owner's oldest first
        self._bytes = Counter[str]()

    def add(self, cursor: LogCursor) -> list[LogCursor]:
        """Returns what is too much now, and gone: of the owner who has most, the oldest."""
        owner = cursor.transcript.request.owner
        former = self._of.get(owner, {}).get(cursor.session_id)
        if former is not None:
            self.drop(former)
        self._of.setdefault(owner, {})[cursor.session_id] = cursor
        self._bytes[owner] += CLOSED_BYTES + cursor.transcript.size_bytes
        gone: list[LogCursor] = []
        while self._bytes.total() > self._max_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(iter(self._of[most].values()))
            self.drop(oldest)
            gone.append(oldest)
        return gone

    def drop(self, cursor: LogCursor) -> None:
        owner, session_id = cursor.transcript.request.owner, cursor.session_id
        if self._of.get(owner, {}).get(session_id) is not cursor:
            return
        del self._of[owner][session_id]
        self._bytes[owner] -= CLOSED_BYTES + cursor.transcript.size_bytes
        if not self._of[owner]:
            del self._of[owner], self._bytes[owner]
