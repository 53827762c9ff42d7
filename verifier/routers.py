"""The routers of a verifier: whose session is whose, and what becomes of those whose router is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import NamedTuple

from outrider.errors import Cancelled, InvalidRequest, OutriderError, Superseded, Unavailable
from outrider.net.commands import one_by_one
from outrider.wire.codec import session_id_from_wire
from outrider.wire.hello import Identity, Role, read_hello
from outrider.wire.session import SESSION_ID_BYTES
from outrider.wire.verifier_sessions import (
    CancelSession,
    CloseSession,
    EndDrafts,
    GiveBack,
    OpenSession,
    SetSpeculation,
    VerifierCommand,
    VerifierEvents,
)
from verifier.bounded_map import BoundedMap
from verifier.drafters import Drafters
from verifier.orphans import GRACE_SECONDS, Orphans
from verifier.router_peer import RouterPeer
from verifier.session import SessionSpec
from verifier.stepper import Running, Stepper, StepReport


class Opening(NamedTuple):
    """A session as a router opened it last. What is told of it carries the number."""

    peer: RouterPeer
    number: int  # of the Open on that router's stream


class Routers:
    def __init__(
        self,
        stepper: Stepper,
        drafters: Drafters,
        identity: Identity,
        vocab_size: int,
        clock: Callable[[], float],
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        """`grace_seconds` is for how long sessions run on after the stream of their router broke."""
        self._stepper = stepper
        self._drafters = drafters
        self._identity = identity
        self._vocab_size = vocab_size
        self._peers: set[RouterPeer] = set()
        self._alone = asyncio.Event()  # there is no stream
        self._alone.set()
        self._owners: dict[bytes, Opening] = {}  # session -> how it was opened last
        self._orphans = Orphans(clock, grace_seconds)
        self._cancelled = BoundedMap()  # before they came here
        self._closed: OutriderError | None = None  # why no router is let in, if none is
        self._leaving = False

    # -- the streams --

    async def sessions(
        self, messages: AsyncIterator[VerifierCommand]
    ) -> AsyncGenerator[VerifierEvents, None]:
        _, commands = await read_hello(messages, Role.ROUTER)
        if self._closed is not None:
            raise self._closed
        load = self._stepper.load
        peer = RouterPeer(load)
        self._peers.add(peer)
        self._alone.clear()
        reader = asyncio.create_task(self._obey(peer, commands))
        try:
            yield VerifierEvents(hello=self._identity.hello(), load=load)
            async for events in peer.events():
                yield events
            if reader.done():
                reader.result()  # raises what ended it
        finally:
            reader.cancel()
            self._peers.discard(peer)
            for session_id in [key for key, owner in self._owners.items() if owner.peer is peer]:
                self._orphan(session_id)
            if not self._peers:
                self._alone.set()

    def _orphan(self, session_id: bytes) -> None:
        running = self._stepper.get(session_id)
        if running is None or self._leaving:
            self._close(session_id, over=False)
        else:
            del self._owners[session_id]
            self._orphans.add(running)

    async def _obey(self, peer: RouterPeer, commands: AsyncIterator[VerifierCommand]) -> None:
        try:
            async for command in one_by_one(commands):
                match command.command:
                    case OpenSession() as asked:
                        self._open(peer, asked)
                    case SetSpeculation(session_id, number, num_speculative_tokens):
                        running = self._stepper.get(session_id)
                        if running is not None and self._owners.get(session_id) == (peer, number):
                            running.session.num_speculative_tokens = num_speculative_tokens
                    case EndDrafts(session_id, number, seat, turn):
                        if self._owners.get(session_id) == Opening(peer, number):
                            self._drafters.end(session_id, seat, turn)
                    case CloseSession(session_id, number):
                        if self._owners.get(session_id) == Opening(peer, number):
                            self._close(session_id)
                        peer.report(self._stepper.load)
                    case GiveBack(session_id, number):
                        self._give_back_unbegun(session_id, Opening(peer, number))
                    case CancelSession(session_id):
                        self._cancel(session_id)
        finally:
            peer.end()

    def _open(self, peer: RouterPeer, asked: OpenSession) -> None:
        opening = Opening(peer, asked.opening)
        try:
            spec = SessionSpec(
                session_id=session_id_from_wire(asked.session_id),
                params=asked.params,
                output=asked.output,
                vocab_size=self._vocab_size,
                draft_key=asked.draft_key,
                trace=asked.trace,
            )
            if spec.session_id in self._cancelled:
                raise _cancelled()
            if self._adopt(opening, spec, asked.num_speculative_tokens):
                return
            running = self._stepper.open(spec, asked.num_speculative_tokens)
        except OutriderError as error:
            peer.failed(asked.session_id, asked.opening, error)
            return
        self._owners[spec.session_id] = opening
        self._drafters.opened(running)

    def _adopt(self, opening: Opening, spec: SessionSpec, num_speculative_tokens: int) -> bool:
        """Returns True if a session that is here without this router is the one that it opens, which it then
        has. If not, none of that id is here any more."""
        session_id = spec.session_id
        former = self._owners.get(session_id)
        if former is not None and former.peer is opening.peer:
            return False  # it has it already: that is for the stepper to refuse
        finished = self._orphans.finished(session_id)
        running = self._stepper.get(session_id) if finished is None else finished.running
        if former is not None:
            why = Superseded("the session goes on by another connection or router")
            former.peer.failed(session_id, former.number, why)
        elif running is None:
            return False
        if running is None or not running.continues(spec):
            self._close(session_id, over=False)
            return False
        self._orphans.forget(session_id)
        running.adopted(spec)
        opening.peer.adopted(running, opening.number, None if finished is None else finished.finish)
        if finished is None:
            self._owners[session_id] = opening
            running.session.num_speculative_tokens = num_speculative_tokens
            self._drafters.opened(running)
        return True

    def _cancel(self, session_id: bytes) -> None:
        """Ends a session, whoever opened it: now, or when it comes, as it may be moving here."""
        owner = self._owners.get(session_id)
        if owner is not None:
            self._close(session_id)
            owner.peer.failed(session_id, owner.number, _cancelled())
        elif len(session_id) == SESSION_ID_BYTES:
            if session_id in self._orphans:
                self._close(session_id)
            self._cancelled.add(session_id)

    def _give_back_unbegun(self, session_id: bytes, opening: Opening) -> None:
        """Ends a session that has only waited here, as its router knows of room elsewhere."""
        running = self._stepper.get(session_id)
        if running is None or running.begun or self._owners.get(session_id) != opening:
            return
        self._close(session_id, over=False)
        why = Unavailable("this target worker has no room for it")
        opening.peer.failed(session_id, opening.number, why)
        opening.peer.report(self._stepper.load)

    def _close(self, session_id: bytes, over: bool = True) -> None:
        self._forget(session_id, over)
        self._stepper.close(session_id)

    def _forget(self, session_id: bytes, over: bool = True) -> None:
        """Lets go of a session: it is over, or it goes on elsewhere, or may come back."""
        self._owners.pop(session_id, None)
        self._orphans.forget(session_id)
        self._drafters.forget(session_id, over)

    # -- what the service tells --

    def on_step(self, report: StepReport) -> None:
        """Hands a step's results to the streams: one batch for each router whose sessions were in it, and one
        for each drafter."""
        concerned: set[RouterPeer] = set()
        committed = sum(len(outcome.tokens) for _, outcome in report.outcomes)
        seconds = report.load.step_seconds / max(committed, 1)
        for running, outcome in report.outcomes:
            if not self._is_here(running):
                continue
            owner = self._owners.get(running.id)
            if owner is not None:
                concerned.add(owner.peer)
                owner.peer.committed(running, owner.number, outcome)
            if outcome.finish is None:
                self._drafters.committed(running, seconds)
                continue
            self._forget(running.id)
            if owner is None:
                self._orphans.finish(running, outcome.finish)
        for running in report.failed:
            if not self._is_here(running):
                continue
            owner = self._owners.get(running.id)
            if owner is not None:
                concerned.add(owner.peer)
                why = OutriderError("the target worker failed on this request; send it again")
                if running.lost:
                    why = InvalidRequest(
                        "the grammar that the text is to obey takes too much to follow, or cannot be "
                        f"({running.fault}): bound its repetitions more tightly, and let fewer of its parts "
                        "begin alike or be left out"
                    )
                owner.peer.failed(running.id, owner.number, why)
            self._forget(running.id)
        for router in concerned:
            router.report(report.load)

    def _is_here(self, running: Running) -> bool:
        """Returns True if it has not been closed since, nor opened anew."""
        known = running.id in self._owners or running.id in self._orphans
        return known and self._stepper.get(running.id) in (None, running)

    def cut_off(self, session_id: bytes, turn: int, reason: str) -> None:
        """Tells the router whose session it is that the drafter of that turn was cut off."""
        owner = self._owners.get(session_id)
        if owner is not None:
            owner.peer.cut_off(session_id, owner.number, turn, reason)

    def beat(self) -> None:
        """Gives every router a sign of life, with what was dropped. Drops orphans for which nobody came
        back."""
        for session_id in self._orphans.lapsed():
            self._close(session_id, over=False)
        load, concerned = self._stepper.load, {owner.peer for owner in self._owners.values()}
        for router in self._peers:
            router.dropped(self._drafters.dropped)
            router.beat(load, router in concerned)

    @property
    def open(self) -> bool:
        """True while routers are let in and it is not about to leave."""
        return self._closed is None and not self._leaving

    def drain(self) -> None:
        """Waits for nobody any more."""
        self._leaving = True
        for session_id in self._orphans.all():
            self._close(session_id, over=False)
        for router in self._peers:
            router.report(self._stepper.load)

    def give_back(self) -> None:
        """Ends all sessions here; they go on elsewhere."""
        for session_id, owner in list(self._owners.items()):
            self._close(session_id, over=False)
            owner.peer.failed(session_id, owner.number, Unavailable("this target worker leaves"))

    def turn_away(self, why: OutriderError) -> None:
        """Ends all streams and their sessions, which the routers take for the loss of this worker, and lets
        nobody in before `let_in`."""
        self._closed = why
        for session_id in [*self._owners, *self._orphans.all()]:
            self._close(session_id, over=False)
        for router in self._peers:
            router.end(why)

    def let_in(self) -> None:
        if not self._leaving:
            self._closed = None

    async def close_gracefully(self) -> None:
        """Ends the streams when all is said. Returns once the routers have what was said, or are gone."""
        self._leaving = True
        self._closed = Unavailable("this target worker leaves")
        for router in self._peers:
            router.close_gracefully()
        await self._alone.wait()


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled")
