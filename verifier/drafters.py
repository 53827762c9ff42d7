"""The drafters of a verifier: who drafts for which session, and what becomes of what they send.

They are not trusted. A stream that no router has announced, by giving its drafter the right to draft for a
session, is refused. Whatever one sends is bounded, and what cannot be used is dropped and counted by reason;
one that keeps sending what no drafter should is cut off, refused for a while, and the routers are told.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NoReturn

from outrider.errors import InvalidRequest, Overloaded, PeerRefused, TooLarge, Unavailable
from outrider.net.draft_right import LAST_TURN, MOST_SEATS, right_of
from outrider.wire.hello import MAX_NAME, Identity, Role, read_hello
from outrider.wire.methods import SPECULATE
from outrider.wire.session import SESSION_ID_BYTES
from outrider.wire.speculation import Attach, CommitBatch, Draft, DraftBatch
from verifier import misbehavior
from verifier.bounded_map import BoundedMap
from verifier.draft_tree import MAX_NODES
from verifier.drafter_peer import DrafterPeer
from verifier.drafter_seat import DrafterSeat
from verifier.misbehavior import BAN_SECONDS, WEIGHTS, Misbehaviors
from verifier.reading_allowance import TOLD_SECONDS, ReadingAllowance, StreamAllowance
from verifier.session import MAX_BEHIND, DraftFate
from verifier.stepper import Running, Stepper

log = logging.getLogger(__name__)

MAX_KEY_BYTES = 64
MAX_STREAMS = 1024
IDENTITY_SHARE = 4  # one identity has at most one in so many of the streams

ANNOUNCED_SECONDS = 10.0  # in which a stream shows a right that a router gave it
SECONDS_AT_ONCE = 5e-4  # of reading, before it is held against the allowance
NUMBERS_AT_ONCE = 256  # of drafts that are read before it is measured what that took: .1 ms or so
DRAFT_NUMBERS = 8  # that the rest of a draft takes as long as


class Drafters:
    """`on_cut_off` is called with each session whose drafter was cut off, its turn, and why."""

    def __init__(
        self,
        stepper: Stepper,
        identity: Identity,
        clock: Callable[[], float],
        on_cut_off: Callable[[bytes, int, str], None],
        processor_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`processor_clock` gives the seconds of a processor that this thread has taken."""
        self._stepper = stepper
        self._identity = identity
        self._clock = clock
        self._on_cut_off = on_cut_off
        self._processor_clock = processor_clock
        # Those that come where everybody may, and those that do not: neither takes the others' share.
        self._allowances = ReadingAllowance(), ReadingAllowance()
        self._streams: set[DrafterPeer] = set()
        self._seats: dict[bytes, list[DrafterSeat]] = {}  # by session
        self._ended = BoundedMap()
        self._misbehaviors = Misbehaviors()
        # Of both, streams by whose they are, those without a hello included.
        self._streams_of: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self.dropped: Counter[str] = Counter()  # drafts, claims and messages, by reason

    # -- the verifier's sessions --

    def opened(self, running: Running) -> None:
        """A session has come, perhaps back or to another router: who claimed it before may draft for it now.
        Where the right to draft was given anew, the former drafter has lost it, and hears so from its own
        router."""
        draft_key = running.session.spec.draft_key
        for seat in running.seats:
            if seat.draft_key != draft_key:
                if seat.peer is not None:
                    seat.peer.detached(running.id)
                seat.renew(draft_key)
        self._seats[running.id] = running.seats
        self._ended.discard(running.id)
        for peer in self._streams:
            shown = peer.claimed(running.id)
            if shown is not None:
                self._count(self._attach(running, peer, shown))

    def committed(self, running: Running, seconds: float) -> None:
        """A step has committed tokens of a session that goes on, each in so many seconds: what the accepted
        drafts saved."""
        for seat in running.seats:
            if seat.peer is not None:
                seat.peer.allowance.earn(seat.unpaid * seconds)
                seat.peer.committed(seat)
            seat.unpaid = 0

    def end(self, session_id: bytes, number: int, turn: int) -> None:
        """Nobody drafts for a session from that seat, who has had it until that turn included: it is told
        nothing more of the session, and nothing is taken of it."""
        running = self._stepper.get(session_id)
        if running is None or number >= MOST_SEATS or (seat := running.seat(number)).turn > turn:
            return
        if seat.peer is not None:
            seat.peer.detached(session_id)
        seat.leave()
        seat.turn = min(turn + 1, LAST_TURN)

    def forget(self, session_id: bytes, over: bool) -> None:
        """A session has left. Its drafter is told where it is over; of one that goes on elsewhere, or may
        come back, it hears from the router alone: our word would end what the router has begun anew."""
        seats = self._seats.pop(session_id, None)
        if seats is None:
            return
        for seat in seats:
            if seat.peer is not None:
                seat.peer.detached(session_id)
                if over:
                    seat.peer.revoke(session_id, seat.shown)
        if over:
            self._ended.add(session_id, seats[0].draft_key)

    def rest(self, resting: bool, beside: float = 0.0) -> None:
        """Drafts are not taken from now on, or they are again; of those beside a path from that chance on."""
        for peer in self._streams:
            peer.beside = beside
            peer.rest(resting)

    def beat(self) -> None:
        """Gives a sign of life to every drafter."""
        for peer in self._streams:
            peer.beat()

    def close_gracefully(self) -> None:
        """Ends all streams: the verifier leaves."""
        for peer in self._streams:
            peer.end()

    # -- the streams --

    async def speculate(
        self, messages: AsyncIterator[bytes], host: str = "", certificate: str = "", joined: bool = False
    ) -> AsyncGenerator[CommitBatch, None]:
        """Serves a stream from `host`, of who showed that certificate, if any. `joined`: it came where none
        is asked for, and has no part in what is kept for those that show one. Raises what ends it, with a
        sentence for the drafter."""
        whose, streams = certificate or host, self._streams_of[joined]
        if streams.total() >= MAX_STREAMS or streams[whose] >= MAX_STREAMS // IDENTITY_SHARE:
            raise Overloaded("this verifier has as many drafters as it takes; try again later")
        streams[whose] += 1
        peer = reader = unannounced = None
        try:
            allowance = self._allowances[joined].of(whose)
            greeting = self._greeted(self._decoded(messages, allowance), host, whose)
            name, worker_id, batches = await greeting
            peer = DrafterPeer(name, self._clock, allowance, worker_id, self._stepper.resting, whose)
            peer.beside = self._stepper.beside
            self._streams.add(peer)
            loop = asyncio.get_running_loop()
            unannounced = loop.call_later(ANNOUNCED_SECONDS, self._refuse_unannounced, peer)
            reader = asyncio.create_task(self._listen(peer, batches))
            hello = self._identity.hello()
            yield CommitBatch(hello=hello, rest=self._stepper.resting, beside=self._stepper.beside)
            async for batch in peer.batches():
                yield batch
            if reader.done():
                reader.result()  # raises what ended it
            if peer.refused:
                raise Unavailable(peer.refused)
        finally:
            if unannounced is not None:
                unannounced.cancel()
            streams.subtract([whose])
            if not streams[whose]:
                del streams[whose]
            if reader is not None:
                reader.cancel()
            if peer is not None:
                self._leave(peer)

    async def _decoded(
        self, messages: AsyncIterator[bytes], allowance: StreamAllowance
    ) -> AsyncIterator[DraftBatch]:
        paid_at = 0.0  # when what the last message cost is paid for
        async for raw in messages:
            await self._wait(allowance, paid_at - self._clock())
            # One over the limit is refused unread.
            size, now = min(len(raw), SPECULATE.asked.max_bytes), self._clock()
            paid_at = now + allowance.message(size, now)
            yield SPECULATE.asked.from_bytes(raw)

    def _refuse_unannounced(self, peer: DrafterPeer) -> None:
        if not peer.announced:
            self._count(misbehavior.UNANNOUNCED)
            log.info("drafter %r is refused: no router has announced it", peer.name)
            peer.end("no router has given this drafter the right to draft for a session here")

    async def _greeted(
        self, messages: AsyncIterator[DraftBatch], host: str, whose: str
    ) -> tuple[str, str, AsyncIterator[DraftBatch]]:
        """Returns the name by which it is known here, its own, and the batches that follow. Raises
        PeerRefused."""
        drafter, batches = await read_hello(
            messages, Role.DRAFTER, tokenizer_hash=self._identity.tokenizer_hash
        )
        if len(drafter.worker_id) > MAX_NAME:
            raise PeerRefused(f"the hello's worker_id has more than {MAX_NAME} characters")
        name = f"{drafter.worker_id} at {host}" if host else drafter.worker_id
        banned_for = self._misbehaviors.banned_for((whose, drafter.worker_id), self._clock())
        if banned_for > 0:
            raise PeerRefused(f"this drafter was cut off and is refused for another {banned_for:.0f} seconds")
        return name, drafter.worker_id, batches

    async def _listen(self, peer: DrafterPeer, batches: AsyncIterator[DraftBatch]) -> None:
        try:
            async for batch in batches:
                await self._take(peer, batch)
        except TooLarge:
            self._judge(peer, self._count(misbehavior.TOO_LARGE))
            raise
        except InvalidRequest:
            self._judge(peer, self._count(misbehavior.GARBAGE))
            raise
        finally:
            peer.end()

    async def _take(self, peer: DrafterPeer, batch: DraftBatch) -> None:
        """Raises PeerRefused where it cuts the drafter off."""
        peer.heard(batch.stamp_us)
        seen: set[str] = set()
        since = self._processor_clock()
        clock = self._processor_clock
        for attach in batch.attach:
            seen |= self._count(self._claim(peer, attach))
            if clock() - since + TOLD_SECONDS * peer.retold >= SECONDS_AT_ONCE:
                since = await self._ration(peer, since)
        unmeasured = 0  # numbers read since the clock was looked at, which takes as long as a short draft
        for draft in batch.drafts:
            if (reason := self._offer(peer, draft)) is not None:
                seen |= self._count(reason)
            unmeasured += DRAFT_NUMBERS + len(draft.tokens)
            if unmeasured >= NUMBERS_AT_ONCE:
                unmeasured = 0
                if clock() - since >= SECONDS_AT_ONCE:
                    since = await self._ration(peer, since)
        await self._ration(peer, since)
        if misbehavior.NOT_GIVEN in seen and not peer.announced:
            raise PeerRefused("a drafter shows its right to a session before it drafts for it")
        self._judge(peer, seen)

    async def _ration(self, peer: DrafterPeer, since: float) -> float:
        """Holds what reading took against the allowance, and what is told anew. Returns since when reading is
        to be held against it."""
        now = self._processor_clock()
        told, peer.retold = peer.retold, 0
        owed = peer.allowance.spend(now - since + TOLD_SECONDS * told, self._clock())
        if owed <= 0:
            return now
        await self._wait(peer.allowance, owed)
        return self._processor_clock()

    async def _wait(self, allowance: StreamAllowance, seconds: float) -> None:
        """Lets a drafter wait so long, and until its allowance is not used up: till then nothing is read."""
        if (seconds := max(seconds, allowance.owed(self._clock()))) <= 0:
            return
        self._count(misbehavior.HELD_BACK)
        while seconds > 0:  # others of its identity wait, too, and one is read first
            await asyncio.sleep(seconds)
            seconds = allowance.owed(self._clock())

    def _count(self, reason: str | None) -> set[str]:
        if reason is None:
            return set()
        self.dropped[reason] += 1
        return {reason}

    def _judge(self, peer: DrafterPeer, reasons: set[str]) -> None:
        if not peer.announced:  # it may say any name, and its stream will not last
            return
        weight = max((WEIGHTS.get(reason, 0.0) for reason in reasons), default=0.0)
        if self._misbehaviors.offend((peer.whose, peer.worker_id), weight, self._clock()):
            self._cut_off(peer, max(reasons, key=lambda reason: WEIGHTS.get(reason, 0.0)))

    def _cut_off(self, peer: DrafterPeer, reason: str) -> NoReturn:
        what = f"cut off for {BAN_SECONDS:.0f} seconds: it keeps sending what no drafter may, lately {reason}"
        log.warning("drafter %r is %s", peer.name, what)
        for session_id, seat in self._leave(peer):
            seat.turn += 1
            self._on_cut_off(session_id, seat.turn - 1, reason)
        raise PeerRefused(f"this drafter is {what}")

    def _claim(self, peer: DrafterPeer, attach: Attach) -> str | None:
        """Returns why it was dropped, if it was."""
        if len(attach.session_id) != SESSION_ID_BYTES or len(attach.draft_key) > MAX_KEY_BYTES:
            return misbehavior.BAD_ATTACH
        peer.given.add(attach.session_id)
        running = self._stepper.get(attach.session_id)
        if running is not None and not running.orphaned:
            return self._attach(running, peer, attach.draft_key)
        former_key = self._ended.get(attach.session_id)
        if former_key and right_of(former_key, attach.draft_key) is not None:
            peer.announced = True
            peer.revoke(attach.session_id, attach.draft_key)
            return None
        # The drafter was faster than the Open of the router, which may be one that comes back.
        return None if peer.claim(attach.session_id, attach.draft_key) else misbehavior.TOO_MANY_CLAIMS

    def _attach(self, running: Running, peer: DrafterPeer, shown: bytes) -> str | None:
        given = right_of(running.session.spec.draft_key, shown)
        if given is None:
            # It may be of another router, to which the session is just about to move.
            peer.claim(running.id, shown)
            return misbehavior.WRONG_KEY
        peer.announced = True
        seat, turn = running.seat(given.seat), given.turn
        if turn < seat.turn:
            peer.revoke(running.id, shown)
            return misbehavior.FORMER_TURN
        if seat.peer is not None and seat.peer is not peer:
            seat.peer.detached(running.id)
            seat.peer.revoke(running.id, seat.shown)
        for former in running.seats:
            if former is not seat and former.peer is peer:
                former.leave()
        seat.take(peer, turn, shown)
        peer.attached(seat)
        return None

    def _offer(self, peer: DrafterPeer, draft: Draft) -> str | None:
        """Returns why it was dropped, if it was."""
        session_id = draft.session_id
        running = self._stepper.get(session_id)
        seat = None if running is None else running.seat_of(peer)
        if seat is None:
            return misbehavior.NOT_ATTACHED if session_id in peer.given else misbehavior.NOT_GIVEN
        tokens = draft.tokens
        if len(tokens) > MAX_NODES + MAX_BEHIND:
            return DraftFate.TOO_LONG.value
        fate = self._stepper.offer(seat, draft.base, tokens, draft.parents, draft.survival)
        return fate.value if fate is not DraftFate.TAKEN and tokens else None

    def _leave(self, peer: DrafterPeer) -> list[tuple[bytes, DrafterSeat]]:
        """Empties its seats; their sessions decode plainly from now on, or with who else drafts for them.
        Returns those seats, with the ids of their sessions."""
        self._streams.discard(peer)
        left = [(key, seat) for key, seats in self._seats.items() for seat in seats if seat.peer is peer]
        for _, seat in left:
            seat.leave()
        peer.end()
        return left
