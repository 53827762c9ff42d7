"""The store of one process. `outrider serve` and a router without --store use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from outrider.store.memory_logs import MemorySessionLogs
from outrider.store.store import (
    TTL_SECONDS,
    WORD_SECONDS,
    Answer,
    Word,
    WorkerRecord,
    answer_of,
    changed,
    gives_way,
    id_in_use,
    twice,
)
from outrider.wire.hello import Identity, WorkerKey


@dataclass(slots=True)
class _Entry:
    record: WorkerRecord
    caller: str
    expires: float
    words: dict[str, tuple[float, Word]] = field(default_factory=dict)  # by router id: (good until, word)


class MemoryStore:
    """Implements Store. Belongs to one event loop."""

    def __init__(
        self,
        ttl_seconds: float = TTL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        word_seconds: float = WORD_SECONDS,
    ) -> None:
        """`clock` gives seconds; waits are the event loop's."""
        self.logs = MemorySessionLogs(clock=clock)
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._word_seconds = word_seconds
        self._entries: dict[WorkerKey, _Entry] = {}
        self._news = asyncio.Event()  # set once something changed, and then replaced

    async def beat(self, record: WorkerRecord, caller: str = "") -> Answer:
        identity = record.info.identity
        self._check_owned(identity, caller)
        entry = self._entries.get(identity.key)
        if entry is not None and gives_way(record, entry.record):
            raise twice(identity)
        former, now = self._live(identity), self._clock()
        said = {} if former is None else former.words
        words = {router_id: word for router_id, word in said.items() if word[0] > now}
        self._entries[identity.key] = _Entry(record, caller, now + self._ttl_seconds, words)
        if former is None or (former.record.info, former.record.address) != (record.info, record.address):
            self._tell()
        return answer_of({router_id: word for router_id, (_, word) in words.items()})

    async def leave(self, identity: Identity, caller: str = "") -> None:
        self._check_owned(identity, caller)
        if self._live(identity) is not None:
            del self._entries[identity.key]
            self._tell()

    async def close(self) -> None:
        """Does nothing: there is nothing to close."""

    async def workers(self) -> AsyncIterator[Mapping[WorkerKey, WorkerRecord]]:
        said: Mapping[WorkerKey, WorkerRecord] | None = None
        while True:
            self._expire()
            news, records = self._news, self._records()
            if said is None or changed(said, records):
                said = records
                yield records
                continue  # time has passed
            expiry = min((entry.expires for entry in self._entries.values()), default=None)
            try:
                async with asyncio.timeout(None if expiry is None else max(expiry - self._clock(), 0)):
                    await news.wait()
            except TimeoutError:
                pass

    async def answer(
        self, identity: Identity, router_id: str, refusal: str | None, trouble: str | None = None
    ) -> None:
        entry = self._live(identity)
        if entry is not None:
            entry.words[router_id] = self._clock() + self._word_seconds, (refusal, trouble)

    def _records(self) -> dict[WorkerKey, WorkerRecord]:
        return {key: entry.record for key, entry in self._entries.items()}

    def _check_owned(self, identity: Identity, caller: str) -> None:
        """Raises IdInUse if another caller has registered that worker."""
        self._expire()
        entry = self._entries.get(identity.key)
        if entry is not None and entry.caller != caller:
            raise id_in_use(identity)

    def _live(self, identity: Identity) -> _Entry | None:
        """Returns the record if it is that incarnation's and has not expired."""
        self._expire()
        entry = self._entries.get(identity.key)
        if entry is None or entry.record.info.identity.incarnation != identity.incarnation:
            return None
        return entry

    def _expire(self) -> None:
        now = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.expires <= now]:
            del self._entries[key]

    def _tell(self) -> None:
        """Makes the watchers look again. They notice expiries by themselves."""
        self._news.set()
        self._news = asyncio.Event()
