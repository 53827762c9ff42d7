"""The logs of sessions in the memory of one process, bounded in bytes and shared out evenly among tenants."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.errors import superseded
from outrider.store.logs import MAX_BYTES, Append, Claim, Lead, Owner, Taken
from outrider.wire.session import SessionId

LOG_BYTES = 500  # that a log takes up beside its records


@dataclass(slots=True)
class _Log:
    owner: Owner
    tenant: str
    expires: float
    length: int = 0  # in records
    first: bytes = b""
    last: bytes = b""
    cancelled: bool = False
    content: bytearray = field(default_factory=bytearray)

    @property
    def size(self) -> int:
        return LOG_BYTES + len(self.content)

    def extend(self, records: Sequence[bytes]) -> None:
        for record in records:
            self.first, self.last = self.first or record, record
            self.content += record
            self.length += 1


class MemorySessionLogs:
    """Implements SessionLogs. Beyond the limit, the tenant that has most loses the log whose last append is
    oldest."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._max_bytes = max_bytes
        self._clock = clock
        self._logs: dict[SessionId, _Log] = {}  # the one written to longest ago first
        self._of: defaultdict[str, dict[SessionId, None]] = defaultdict(dict)  # the same by tenant
        self._sizes: Counter[str] = Counter()  # bytes by tenant
        self.size = 0  # bytes

    async def append(self, appends: Sequence[Append], ttl_seconds: float) -> list[int | None]:
        expires = self._clock() + ttl_seconds
        return [self._append(one, expires) for one in appends]

    def _append(self, append: Append, expires: float) -> int | None:
        log = self._live(append.session_id)
        if log is not None and log.owner != append.owner:
            if not append.owner.prevails_over(log.owner):
                return None
            self._forget(append.session_id)
            log = None
        if log is None:
            if append.base > 0:
                return 0
            log = _Log(append.owner, append.tenant, expires)
            log.extend(append.records)
            self._keep(append.session_id, log, expires)
        elif append.base > log.length:
            return log.length
        else:
            before = log.size
            log.extend(append.records[log.length - append.base :])
            self._renew(append.session_id, log, log.size - before, expires)
        return log.length

    async def take(
        self, session_id: SessionId, name: str, ttl_seconds: float, lead: Lead | None = None
    ) -> Taken | None:
        led = None if lead is None else self._live(lead.session_id)
        if lead is not None and led is not None and not lead.owner.prevails_over(led.owner):
            raise superseded()
        log = self._live(session_id)
        if log is None:
            return None
        self._forget(session_id)
        log.owner = Owner(name, log.owner.generation + 1)
        self._keep(session_id, log, self._clock() + ttl_seconds)
        return Taken(log.owner, log.length, bytes(log.content))

    async def read(self, session_id: SessionId) -> bytes | None:
        log = self._live(session_id)
        return None if log is None else log.first

    async def cancel(self, session_id: SessionId) -> None:
        log = self._live(session_id)
        if log is not None:
            log.cancelled = True

    async def claim(self, session_id: SessionId) -> Claim | None:
        log = self._live(session_id)
        return None if log is None else Claim(log.owner, log.cancelled)

    async def last(self, session_id: SessionId) -> bytes | None:
        log = self._live(session_id)
        return None if log is None else log.last

    def _keep(self, session_id: SessionId, log: _Log, expires: float) -> None:
        log.expires = expires
        self._logs[session_id] = log
        self._of[log.tenant][session_id] = None
        self._grown(log.tenant, log.size)

    def _renew(self, session_id: SessionId, log: _Log, grown: int, expires: float) -> None:
        """It is the newest now, and larger by so many bytes."""
        log.expires = expires
        of_tenant = self._of[log.tenant]
        self._logs[session_id], of_tenant[session_id] = self._logs.pop(session_id), of_tenant.pop(session_id)
        self._grown(log.tenant, grown)

    def _grown(self, tenant: str, grown: int) -> None:
        self._sizes[tenant] += grown
        self.size += grown
        while self.size > self._max_bytes:
            greatest = max(self._sizes, key=self._sizes.__getitem__)
            self._forget(next(iter(self._of[greatest])))

    def _forget(self, session_id: SessionId) -> None:
        log = self._logs.pop(session_id)
        del self._of[log.tenant][session_id]
        self._sizes[log.tenant] -= log.size
        self.size -= log.size
        if not self._of[log.tenant]:
            del self._of[log.tenant], self._sizes[log.tenant]

    def _live(self, session_id: SessionId) -> _Log | None:
        """Returns that log. Forgets the oldest logs if their time is over."""
        now = self._clock()
        while self._logs and next(iter(self._logs.values())).expires <= now:
            self._forget(next(iter(self._logs)))
        log = self._logs.get(session_id)
        if log is not None and log.expires <= now:
            self._forget(session_id)
            return None
        return log
