"""Writes what sessions commit into the store's logs, and takes logs over from there.

No session waits for it: it only says that it has news. One task writes the news of all sessions together;
what comes while it writes, or while the store is away, is in the sessions' own transcripts and goes with the
next writing. A client alone waits, before its first event, until its request is written; 2 s at most.

A store may lose what it had. The next append to a log tells, and the log is written again. Of an answer with
several sessions those that are over have no next append: while it goes on the store is asked for their logs.

If a writing fails and the store takes a probe all the same, it is the writing's fault: its halves are written
one after the other, so that the others go on. What fails alone is given up after a few tries.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from itertools import islice
from typing import NoReturn

from outrider.errors import OutriderError, Unavailable, unknown_session
from outrider.store.logs import SESSION_TTL_SECONDS, Append, Claim, Lead, Owner, SessionLogs
from outrider.wire.session import SessionId
from outrider.wire.session_log import UNLOGGED_RECORD, is_end
from router.held_logs import ClosedLogs, KeptLogs, LogCursor, TakenSession
from router.metrics import Metrics
from router.transcript import Transcript

log = logging.getLogger(__name__)

MAX_CLOSED_BYTES = 64 * 2**20  # of sessions that are over and held here
MAX_WRITE_BYTES = 2**20  # in one writing, about: what a long absence left goes in several
MAX_WRITE_RECORDS = 1024  # of one session in one writing
APPEND_BYTES = 4096  # that an append counts beside its records: a writing of many takes the loop's time
MAX_ASKED = 256  # of those that are kept, at a time
MAX_LOSSES = 16  # a log that the store loses more often than this is not written again
MAX_REFUSALS = 5  # in a row, of the same records: a log that the store does not take is not written again
PROBE_SECONDS = 2.0  # a store that nothing is written to is asked so often whether it is there
AWAY_SECONDS = 0.25  # between attempts to reach one that is away
MISSED_SECONDS = 2.0  # in which all routers have written what they could not, once it is back
SHORT_BYTES = 4096  # a log that is decoded in less time than it is handed to a thread
GATHERED_SECONDS = 0.02  # in which what comes is written together, but for what somebody waits for
ASKED = 10  # times in the life of a log, about one that is kept
BEGUN_SECONDS = 2.0  # that a slow store may hold back what a client hears first; then it counts as away


Writing = tuple[LogCursor, Append]


class SessionLogWriter:
    """The log writer of one router. `run` writes; all other methods only take notes, or ask."""

    def __init__(
        self,
        logs: SessionLogs,
        name: str,
        metrics: Metrics,
        ttl_seconds: float = SESSION_TTL_SECONDS,
        max_closed_bytes: int = MAX_CLOSED_BYTES,
        decoding: Executor | None = None,
    ) -> None:
        """`name` is that of this router's incarnation. `decoding`: where long logs are decoded."""
        self._logs = logs
        self._name = name
        self._metrics = metrics
        self._asked_seconds = ttl_seconds / ASKED
        self._ttl_seconds = ttl_seconds + self._asked_seconds  # from when it was asked about last, too
        self._decoding = decoding
        self._dirty: dict[SessionId, LogCursor] = {}  # not all written, or to be asked about
        self._kept = KeptLogs()
        self._closed = ClosedLogs(max_closed_bytes)  # those of both that are over
        self._ask_at = 0.0  # about all that are kept, on the event loop's clock
        self._unasked = deque[LogCursor]()  # of these, the ones whose turn comes yet
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()  # set while somebody waits for what is dirty
        self._written = asyncio.Event()  # set while nothing is dirty
        self._written.set()
        self.degraded = ""  # a sentence while the store is away
        self._back_at = -MISSED_SECONDS  # on the event loop's clock

    def begin(self, transcript: Transcript, on_superseded: Callable[[], None]) -> LogCursor:
        """Opens a log for a new session. `on_superseded` is called when another router has taken it over."""
        return self._open(LogCursor(transcript, Owner(self._name), on_superseded))

    def go_on(self, taken: TakenSession, on_superseded: Callable[[], None]) -> LogCursor:
        """Returns the cursor of a session whose log was taken over."""
        return self._open(LogCursor(taken.transcript, taken.owner, on_superseded, taken.written))

    def _open(self, cursor: LogCursor) -> LogCursor:
        for former in (self._dirty.get(cursor.session_id), self._kept.get(cursor.session_id)):
            if former is not None:
                self._forget(former)
        self._kept.hold(cursor)
        self.note(cursor)
        self._wanted.set()
        return cursor

    def _held(self, session_id: SessionId) -> LogCursor | None:
        return self._dirty.get(session_id) or self._kept.get(session_id)

    def note(self, cursor: LogCursor) -> None:
        """Notes that the transcript has grown."""
        if cursor.given_up or self._dirty.get(cursor.session_id) is cursor:
            return
        if not cursor.is_written:
            self._dirty[cursor.session_id] = cursor
            self._news.set()
            self._written.clear()

    def close(self, cursor: LogCursor) -> None:
        """Notes that no more comes. What the store may not have yet waits, and may be dropped if it is long
        away: of the owner who has most, the oldest first."""
        cursor.closed = True
        if cursor.transcript.end is None:
            self._ask(cursor)
        if self._held(cursor.session_id) is cursor:
            self._wanted.set()  # who had it may ask for it elsewhere
            self._retain(cursor)

    def _retain(self, cursor: LogCursor) -> None:
        for gone in self._closed.add(cursor):
            if self._dirty.get(gone.session_id) is gone:
                self._metrics.session_log_dropped()
            self._forget(gone)

    def _ask(self, cursor: LogCursor) -> None:
        """The store may have lost it: it is held here until the store says that it has not."""
        cursor.unsure = True
        self.note(cursor)

    @contextmanager
    def keep(self, session_ids: Sequence[SessionId]) -> Iterator[None]:
        """Meanwhile those of these sessions that are over stay here as well, and the store has them again if
        it loses them."""
        self._kept.keep(session_ids)
        try:
            yield
        finally:
            for cursor in self._kept.release(session_ids):
                self._ask(cursor)

    def _ask_of_kept(self) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._ask_at:
            self._ask_at, self._unasked = now + self._asked_seconds, deque(self._kept)
        for _ in range(min(MAX_ASKED, len(self._unasked))):
            if self._kept.get((cursor := self._unasked.popleft()).session_id) is cursor:
                self._ask(cursor)
        if self._unasked:
            self._news.set()

    async def begun(self, session_id: SessionId) -> None:
        """Waits until the log has the session's request, so that another router can go on with it: for at
        most BEGUN_SECONDS, and not at all while the store is away."""
        cursor = self._dirty.get(session_id)
        if cursor is None or self.degraded:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGUN_SECONDS):
                await cursor.begun.wait()

    async def read(self, session_id: SessionId) -> Transcript:
        """Returns the session as its log begins: the steps may be missing. Raises UnknownSession or
        Unavailable."""
        cursor = self._held(session_id)
        if cursor is not None:
            return cursor.transcript
        first = await self._logs.read(session_id)
        if first is None:
            raise self._missing()
        return await self._decoded(session_id, first)

    async def cancel(self, session_id: SessionId) -> None:
        """Notes it for the router that has the session."""
        with suppress(Unavailable):
            await self._logs.cancel(session_id)

    async def claim(self, cursor: LogCursor) -> Claim | None:
        """Returns what the store says of a session's owner; None if it says nothing."""
        with suppress(Unavailable):
            return await self._logs.claim(cursor.session_id)
        return None

    async def ended(self, session_id: SessionId) -> bool:
        """Returns whether the session's log says that it is over."""
        cursor = self._held(session_id)
        if cursor is not None:
            return cursor.transcript.end is not None
        with suppress(Unavailable):
            last = await self._logs.last(session_id)
            return last is not None and is_end(last)
        return False

    async def take(self, session_id: SessionId, lead: Lead | None = None) -> TakenSession:
        """Takes the log over, from whichever router. Raises UnknownSession or Unavailable, and Superseded if
        another router has taken the log of `lead` since; None = nobody leads."""
        cursor = self._held(session_id)
        try:
            if cursor is not None:
                self._ask(cursor)
                if self.degraded:
                    raise Unavailable(self.degraded)
            while cursor is not None and self._dirty.get(session_id) is cursor:
                await self._write(self._one_writing(deque((cursor,))))
            taken = await self._logs.take(session_id, self._name, self._ttl_seconds, lead)
        except Unavailable:
            if cursor is None or self._held(session_id) is not cursor:
                raise
            return TakenSession(cursor.transcript, cursor.owner, 0)  # over, and still all here
        if taken is None:
            raise self._missing()
        transcript = await self._decoded(session_id, taken.content)
        cursor = LogCursor(transcript, taken.owner, written=taken.length, closed=True)
        if self._kept.hold(cursor):
            self._retain(cursor)
        return TakenSession(transcript, taken.owner, taken.length)

    async def _decoded(self, session_id: SessionId, content: bytes) -> Transcript:
        if len(content) <= SHORT_BYTES:
            return Transcript.from_log(session_id, content)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._decoding, Transcript.from_log, session_id, content)

    def _missing(self) -> OutriderError:
        """Returns why there is no such log: while nothing can be written, and a little longer, another router
        may have it in its memory alone."""
        if not self.degraded and asyncio.get_running_loop().time() >= self._back_at + MISSED_SECONDS:
            return unknown_session()
        away = "takes no logs at the moment" if self.degraded else "was away a moment ago"
        here = "ask the router where it runs, or this one later"
        return Unavailable(f"the store {away}, and has no log of this session: {here}")

    async def run(self) -> NoReturn:
        """Writes until it is cancelled. Raises StartupError if the store is there but refuses."""
        while True:
            idle = await self._wait()
            try:
                if idle or self.degraded:
                    await self._probe()
                self._ask_of_kept()
                await self._write_all()
            except Unavailable as error:
                self._note_away(error)
                self._news.set()
                await asyncio.sleep(AWAY_SECONDS)
            else:
                self._note_back()
                await self._gather()

    async def _gather(self) -> None:
        """Lets steps come that are written with the next ones."""
        with suppress(TimeoutError):
            async with asyncio.timeout(GATHERED_SECONDS):
                await self._wanted.wait()

    async def _wait(self) -> bool:
        """Waits for news. Returns True if there were none for PROBE_SECONDS, or until kept logs are due."""
        seconds = min(PROBE_SECONDS, self._asked_seconds) if self._kept else PROBE_SECONDS
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return True
        self._news.clear()
        self._wanted.clear()
        return False

    async def flush(self) -> None:
        """Waits until all is written, which may be never: call it with a timeout."""
        self._wanted.set()
        await self._written.wait()

    async def _probe(self) -> None:
        """Raises Unavailable unless the store is there and can be written to."""
        await self._logs.append((), self._ttl_seconds)

    async def _write_all(self) -> None:
        """Writes of each session as much as goes into one writing. What is left goes with the next. Raises
        Unavailable if the store takes nothing."""
        cursors = deque(sorted(self._dirty.values(), key=lambda cursor: cursor.refusals))
        refused = 0
        while appends := self._one_writing(cursors):
            refused += await self._write_what_it_takes(appends)
        if len(self._dirty) > refused:
            self._news.set()
        elif refused:
            asyncio.get_running_loop().call_later(AWAY_SECONDS, self._news.set)

    def _one_writing(self, cursors: deque[LogCursor]) -> list[Writing]:
        """Takes out of `cursors` the first that together have as much to write as goes into one writing."""
        appends: list[Writing] = []
        room = MAX_WRITE_BYTES
        while cursors and room > 0:
            cursor = cursors.popleft()
            if self._dirty.get(cursor.session_id) is not cursor:
                continue  # it has been written meanwhile, or is dropped
            records = list(islice(cursor.transcript.records(cursor.written), MAX_WRITE_RECORDS))
            tenant = cursor.transcript.request.owner
            appends.append((cursor, Append(cursor.session_id, cursor.owner, cursor.written, records, tenant)))
            room -= APPEND_BYTES + sum(map(len, records))
        return appends

    async def _write_what_it_takes(self, appends: Sequence[Writing]) -> int:
        """Returns how many logs the store does not take now, and may later. Raises Unavailable if it takes
        nothing."""
        try:
            await self._write(appends)
            return 0
        except Unavailable:
            await self._probe()
        half = len(appends) // 2
        if half:
            first = await self._write_what_it_takes(appends[:half])
            return first + await self._write_what_it_takes(appends[half:])
        cursor, _ = appends[0]
        cursor.refusals += 1
        if cursor.refusals >= MAX_REFUSALS:
            await self._give_up(cursor)
        return 0 if cursor.given_up else 1

    async def _give_up(self, cursor: LogCursor) -> None:
        """The session goes on without a log. If none has begun, whoever asks for it is told so."""
        cursor.given_up = True
        cursor.begun.set()
        self._metrics.session_log_dropped()
        log.warning(
            "the store does not take the log of session %s, which goes on without", cursor.session_id.hex()
        )
        self._forget(cursor)
        if not cursor.written:
            kept_out = Append(cursor.session_id, cursor.owner, 0, (UNLOGGED_RECORD,))
            await self._logs.append((kept_out,), self._ttl_seconds)

    async def _write(self, appends: Sequence[Writing]) -> None:
        """Raises Unavailable."""
        lengths = await self._logs.append([append for _, append in appends], self._ttl_seconds)
        for (cursor, append), length in zip(appends, lengths, strict=True):
            self._take_note(cursor, append, length)

    def _take_note(self, cursor: LogCursor, append: Append, length: int | None) -> None:
        """Notes what became of an append."""
        if not cursor.begun.is_set():
            cursor.begun.set()
        cursor.refusals = 0
        if length is None:
            cursor.given_up = True
            if not cursor.closed:
                log.info("session %s goes on at another router", cursor.session_id.hex())
                cursor.on_superseded()
        else:
            cursor.written, cursor.unsure = length, False
            if length < append.base or len(append.records) == MAX_WRITE_RECORDS:
                self._wanted.set()  # there is more to write than what comes now
            if length < append.base:
                self._ask_at = 0.0  # it may have lost others, too
                cursor.losses += 1
                cursor.given_up = cursor.losses > MAX_LOSSES
                if cursor.given_up:
                    self._metrics.session_log_dropped()
        if cursor.given_up:
            self._forget(cursor)
        elif cursor.is_written:
            self._settle(cursor)
        elif self._dirty.get(cursor.session_id) is cursor:
            self._dirty[cursor.session_id] = self._dirty.pop(cursor.session_id)  # the others first

    def _forget(self, cursor: LogCursor) -> None:
        """Drops what is not written of a session, and keeps it no longer."""
        self._kept.drop(cursor)
        self._settle(cursor)

    def _settle(self, cursor: LogCursor) -> None:
        """Nothing more of it is to be written now."""
        if self._dirty.get(cursor.session_id) is cursor:
            del self._dirty[cursor.session_id]
        if self._kept.get(cursor.session_id) is not cursor:
            self._closed.drop(cursor)
        if not self._dirty:
            self._written.set()

    def _note_away(self, error: Unavailable) -> None:
        if not self.degraded:
            log.warning("%s; sessions go on, but cannot be resumed elsewhere until it is back", error.message)
            self.degraded = "the store is away: sessions cannot be resumed by another router"
            self._ask_at = 0.0  # it may come back empty
            self._metrics.store_degraded(True)
            for cursor in self._dirty.values():
                cursor.begun.set()

    def _note_back(self) -> None:
        if self.degraded:
            log.warning("the store is back, and gets what it missed")
            self.degraded = ""
            self._back_at = asyncio.get_running_loop().time()
            self._metrics.store_degraded(False)
