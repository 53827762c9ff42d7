"""The stream to one verifier: drafts out, commits in, for every session whose target runs there."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import chain

import grpc
import grpc.aio

from drafter.session import DraftSession
from drafter.survival import on_the_wire
from outrider.errors import InvalidRequest, OutriderError
from outrider.net.allowance import CUT_OFF_SECONDS, ENTRY_UNITS, Allowance, CutOff
from outrider.net.backoff import Backoff
from outrider.net.conversation import Conversation, converse
from outrider.net.diagnosis import why_unreachable
from outrider.net.heartbeat import SILENCE_SECONDS, Stillness, fell_silent
from outrider.net.rpc import channel
from outrider.net.tasks import propagate_cancel
from outrider.net.tls import Credentials
from outrider.wire.drafter_sessions import DraftEndCause
from outrider.wire.hello import Identity, Role, check_hello
from outrider.wire.methods import SPECULATE
from outrider.wire.speculation import Attach, Commit, CommitBatch, Draft, DraftBatch

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
MOST_FAILURES = 3  # to connect, in a row: then the sessions are somebody else's
IDLE_SECONDS = 30.0  # without a session: then the stream is ended, which the verifier has but so many of
ROUND_TRIPS_KEPT = 16
BYTES_PER_SECOND = 16 * 2**20  # that a verifier may say
BURST_BYTES = 32 * 2**20
MESSAGE_UNITS = 4096  # of it, beside its bytes: what a message takes to read
IDLE_ENTRY_UNITS = 8192  # of one that tells a session nothing: a sound verifier says few of them
ENTRIES_AT_ONCE = 64  # that are read before others have their turn


class VerifierLink:
    """Reconnects for as long as it has sessions; without any, the end of the stream is the end of the link,
    and the stream is ended after a while.

    After a reconnect the sessions are attached and acknowledged anew. Those of a verifier that cannot be
    reached are given up: a drafter that can may have them.
    """

    def __init__(
        self,
        address: str,
        identity: Identity,
        on_commit: Callable[[DraftSession, int, Sequence[int]], None],
        on_ended: Callable[[bytes, DraftEndCause, str], None],
        on_over: Callable[[], object],
        clock: Callable[[], float],
        tls: Credentials | None = None,
    ) -> None:
        self._address = address
        self._tls = tls
        self._identity = identity
        self._on_commit = on_commit
        self._on_ended = on_ended
        self._on_over = on_over
        self._clock = clock
        self._sessions: dict[bytes, DraftSession] = {}
        self._attach: dict[bytes, None] = {}  # to be claimed on the stream
        self._changed: dict[bytes, None] = {}  # to be told of
        self._ready = asyncio.Event()
        self._failures = 0  # to connect, since a verifier answered last
        self._round_trips: deque[float] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._allowance = Allowance("verifier", BYTES_PER_SECOND, BURST_BYTES, clock)
        self._idle_since = clock()  # where it has no sessions
        self._shut = ""  # why no session is taken at the moment
        self._resting = False  # whether the verifier takes no drafts for now
        self._beside = 0.0  # chance with which it takes a token beside the likeliest; 0 = it takes none
        self._task = asyncio.create_task(self._keep_connected())

    @property
    def round_trip_seconds(self) -> float:
        """Returns the smallest recent measurement; 0 = none yet."""
        return min(self._round_trips, default=0.0)

    def add(self, session: DraftSession) -> None:
        if self._shut:
            self._on_ended(session.id, DraftEndCause.CUT_OFF, self._shut)
            return
        session.resting, session.beside = self._resting, self._beside
        self._sessions[session.id] = session
        self._attach[session.id] = None
        self.changed(session)

    def remove(self, session_id: bytes) -> None:
        if self._sessions.pop(session_id, None) is not None and not self._sessions:
            self._idle_since = self._clock()

    def changed(self, session: DraftSession) -> None:
        """Notes that the session's log or draft is not what the verifier was told last."""
        self._changed[session.id] = None
        self._ready.set()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_connected(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, good=LAST_BACKOFF_SECONDS)
        while True:
            connected_at = self._clock()
            try:
                await propagate_cancel(self._speculate())
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self._refused(
                        DraftEndCause.UNREACHED, error.details() or "the verifier refused this drafter"
                    )
                log.info("stream to the verifier at %s ended: %s", self._address, error.details())
            except (CutOff, InvalidRequest) as error:
                await self._cut_off(error)
            except OutriderError as error:
                self._refused(DraftEndCause.UNREACHED, error.message)
            except Exception:
                log.exception("the stream to the verifier at %s failed", self._address)
            self._failures += 1
            if self._failures >= MOST_FAILURES:
                await self._not_reached()
            if not self._sessions:
                self._on_over()
                return
            await asyncio.sleep(backoff.after(self._clock() - connected_at))

    async def _cut_off(self, error: OutriderError) -> None:
        """Drafts for no session of this verifier for a while."""
        log.warning("the verifier at %s is cut off: %s", self._address, error.message)
        self._shut = error.message
        self._refused(DraftEndCause.CUT_OFF, error.message)
        await asyncio.sleep(CUT_OFF_SECONDS)
        self._shut = ""

    async def _not_reached(self) -> None:
        """Gives its sessions up, and says why: else a drafter that reaches nobody looks as if it did."""
        why = await why_unreachable(self._address, self._tls) or "its answers do not come"
        if self._failures == MOST_FAILURES:
            log.warning("no draft reaches the verifier at %s: %s", self._address, why)
        self._refused(DraftEndCause.UNREACHED, f"the drafter does not reach the verifier: {why}")

    def _refused(self, cause: DraftEndCause, reason: str) -> None:
        for session_id in list(self._sessions):
            self._on_ended(session_id, cause, reason)

    async def _speculate(self) -> None:
        async with channel(self._address, self._tls, SPECULATE.answered.max_bytes) as connection:
            self._attach = dict.fromkeys(self._sessions)
            self._changed = dict.fromkeys(self._sessions)
            for session in self._sessions.values():
                session.tell_anew()
            self._ready.set()
            stream = converse(connection, SPECULATE)
            greeted = asyncio.Event()
            writer = asyncio.create_task(self._write(stream, greeted))
            try:
                silence = Stillness()
                if await fell_silent(self._read(stream.heard(self._allowance), silence, greeted), silence):
                    log.info("the verifier at %s has been silent for %g s", self._address, SILENCE_SECONDS)
            finally:  # a writer left over would take what is meant for the next stream
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _read(
        self, stream: AsyncIterable[CommitBatch], silence: Stillness, greeted: asyncio.Event
    ) -> None:
        async for batch in stream:
            if not greeted.is_set():
                check_hello(batch.hello, Role.VERIFIER, tokenizer_hash=self._identity.tokenizer_hash)
                self._failures = 0
                greeted.set()
            silence.moved()
            await self._heard(batch)
            if not self._sessions and self._clock() - self._idle_since >= IDLE_SECONDS:
                return

    async def _write(self, stream: Conversation[DraftBatch, CommitBatch], greeted: asyncio.Event) -> None:
        await stream.write(DraftBatch(hello=self._identity.hello()))
        await greeted.wait()
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                await stream.write(batch)

    async def _heard(self, batch: CommitBatch) -> None:
        """Raises CutOff if it is more than a verifier may say, or what no sound one says."""
        self._allowance.spend(MESSAGE_UNITS)
        if (batch.rest, batch.beside) != (self._resting, self._beside):
            self._allowance.spend(ENTRY_UNITS * len(self._sessions))
        if batch.rest != self._resting:  # once it is over, commits come, which wake the proposer
            self._resting = batch.rest
            for each in self._sessions.values():
                each.resting = batch.rest
                each.tell_anew()  # what was told before is forgotten there
        if batch.beside != self._beside:
            self._beside = batch.beside
            for each in self._sessions.values():
                each.beside = batch.beside
        if batch.echo_us:
            self._round_trips.append(max(0.0, self._clock() - (batch.echo_us + batch.held_us) / 1e6))
        entries: Iterable[Commit | Attach] = chain(batch.commits, batch.revoked)
        for index, entry in enumerate(self._allowance.entries(entries), 1):
            told = self._committed(entry) if isinstance(entry, Commit) else self._revoked(entry)
            if not told:
                self._allowance.spend(IDLE_ENTRY_UNITS)
            if index % ENTRIES_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _committed(self, commit: Commit) -> bool:
        """Returns whether it tells a session something. Raises CutOff if that is more than was asked for."""
        session, end = self._sessions.get(commit.session_id), commit.base + len(commit.tokens)
        if session is None:
            return False
        if end > session.spec.params.most_tokens:  # its log would grow without end
            raise self._allowance.cut_off("it commits more tokens than were asked for")
        news, session.heard = end > session.heard, max(end, session.heard)
        self._on_commit(session, commit.base, commit.tokens)
        return news

    def _revoked(self, claim: Attach) -> bool:
        """Returns whether it ends a session."""
        session = self._sessions.get(claim.session_id)
        # Another router may have opened the session here anew since, with another right.
        if session is None or session.spec.draft_key != claim.draft_key:
            return False
        self._on_ended(claim.session_id, DraftEndCause.REVOKED, "the verifier has no such session")
        return True

    async def _batches(self) -> AsyncGenerator[DraftBatch, None]:
        """Yields one message whenever there is something new; drafts of a session merge while they wait."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            attach, self._attach = self._attach, {}
            changed, self._changed = self._changed, {}
            claims = [
                Attach(session_id, session.spec.draft_key)
                for session_id in attach
                if (session := self._sessions.get(session_id)) is not None
            ]
            drafts = [
                self._draft(session)
                for session_id in changed
                if (session := self._sessions.get(session_id)) is not None
            ]
            if claims or drafts:
                yield DraftBatch(attach=claims, drafts=drafts, stamp_us=int(self._clock() * 1e6))

    def _draft(self, session: DraftSession) -> Draft:
        tokens, parents, survival = session.tell()
        return Draft(session.id, len(session.log), tokens, parents, on_the_wire(survival))
