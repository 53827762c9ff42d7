"""Sessions whose router's stream broke: they run on for a while, for whoever comes back for them.

Pure: the clock is passed in. The sessions themselves stay with the stepper; here is until when, what those
came to that have finished since, and which of them is in the way of others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.kv_blocks import BlockPool
from outrider.engine.scheduler import Schedule
from outrider.wire.session import FinishReason
from verifier.running import Running

GRACE_SECONDS = 5.0
MOST_FINISHED = 256  # that are remembered; the oldest go first


@dataclass(frozen=True, slots=True)
class Finished:
    """A session whose end nobody has heard."""

    running: Running
    finish: FinishReason


class Orphans:
    def __init__(self, clock: Callable[[], float], grace_seconds: float = GRACE_SECONDS) -> None:
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._until: dict[bytes, float] = {}  # in the order in which they lapse
        self._finished: dict[bytes, Finished] = {}

    def add(self, running: Running) -> None:
        running.orphaned = True
        self._until[running.id] = self._clock() + self._grace_seconds

    def finish(self, running: Running, finish: FinishReason) -> None:
        """Notes that an orphan is over: its end is kept for what is left of its time."""
        self._finished[running.id] = Finished(running, finish)
        if len(self._finished) > MOST_FINISHED:
            self.forget(next(iter(self._finished)))

    def finished(self, session_id: bytes) -> Finished | None:
        return self._finished.get(session_id)

    def forget(self, session_id: bytes) -> None:
        """Forgets a session that has a router again, or is closed. Unknown ids are ignored."""
        self._until.pop(session_id, None)
        self._finished.pop(session_id, None)

    def __contains__(self, session_id: bytes) -> bool:
        return session_id in self._until

    def all(self) -> list[bytes]:
        return list(self._until)

    def lapsed(self) -> list[bytes]:
        """Returns the orphans for which nobody has come back in time."""
        now = self._clock()
        return [session_id for session_id, until in self._until.items() if until <= now]


def dispensable(sessions: Sequence[Running], schedule: Schedule, pool: BlockPool) -> Running | None:
    """Returns the youngest orphan, if one of the other sessions is short of KV blocks: it would be preempted,
    or waits for those of its prompt that nobody holds."""
    orphan = next((running for running in reversed(sessions) if running.orphaned), None)
    if orphan is None or schedule.preempt is not None:
        return orphan
    granted = {grant.index for grant in schedule.grants}
    for index, running in enumerate(sessions):
        waits = not running.table.blocks and not running.orphaned and running.ready and index not in granted
        if waits:
            salt = running.session.spec.params.cache_salt
            found = pool.cached(running.session.log, salt, running.digests)
            need = -(-(running.pending + 1) // pool.block_size) - found.held
            if need + len(granted) > pool.available:
                return orphan
    return None
