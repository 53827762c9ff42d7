"""What waits to be sent to each peer: facts, merged until the stream is ready to take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from outrider.errors import OutriderError
from outrider.v1 import verifier_pb2
from verifier.pace import Pace
from verifier.session import Finish, Outcome, Session
from verifier.stepper import Load, Running

FINISH_REASONS = {
    Finish.STOP: verifier_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: verifier_pb2.FINISH_REASON_LENGTH,
}


class RouterPeer:
    """The events for one router."""

    def __init__(self, load: Load) -> None:
        """`load`: as of now."""
        self._load = load
        self._events = verifier_pb2.VerifierEvents()
        self._ready = asyncio.Event()
        self._over = False

    def committed(self, running: Running, outcome: Outcome) -> None:
        session = running.session
        first = outcome.base == len(session.spec.prompt) + len(session.spec.output)
        self._events.committed.add(
            session_id=running.id,
            base=outcome.base,
            tokens=outcome.tokens,
            accepted=outcome.accepted,
            verified=outcome.verified,
            cached_prompt_tokens=(running.cached_prompt_tokens or 0) if first else 0,
        )
        if outcome.finish is not None:
            self._events.finished.add(session_id=running.id, reason=FINISH_REASONS[outcome.finish])

    def failed(self, session_id: bytes, error: OutriderError) -> None:
        self._events.failed.add(session_id=session_id, code=error.grpc_code.value[0], message=error.message)
        self._ready.set()

    def report(self, load: Load) -> None:
        """Sends what has gathered, with the load."""
        self._load = load
        self._ready.set()

    def end(self) -> None:
        self._over = True
        self._ready.set()

    async def events(self) -> AsyncIterator[verifier_pb2.VerifierEvents]:
        """One message whenever there is something to tell; a slow reader gets fewer, larger ones."""
        while True:
            await self._ready.wait()
            if self._over:
                return
            self._ready.clear()
            events, self._events = self._events, verifier_pb2.VerifierEvents()
            events.load.CopyFrom(load_to_wire(self._load))
            yield events


class DrafterPeer:
    """The commits for one drafter, and its pace."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.pace = Pace()
        self._clock = clock
        self._dirty: dict[bytes, Session] = {}
        self._ended: dict[bytes, None] = {}
        self._stamp_us = 0
        self._heard_at = 0.0
        self._ready = asyncio.Event()
        self._over = False

    def heard(self, stamp_us: int) -> None:
        self._stamp_us, self._heard_at = stamp_us, self._clock()

    def committed(self, session: Session) -> None:
        """There is more of this session's log than the drafter has acknowledged."""
        self._dirty[session.spec.session_id] = session
        self._ready.set()

    def ended(self, session_id: bytes) -> None:
        self._dirty.pop(session_id, None)
        self._ended[session_id] = None
        self._ready.set()

    def end(self) -> None:
        self._over = True
        self._ready.set()

    async def batches(self) -> AsyncIterator[verifier_pb2.CommitBatch]:
        """One message whenever there is something to tell; commits of a session merge while they wait."""
        while True:
            await self._ready.wait()
            if self._over:
                return
            self._ready.clear()
            dirty, self._dirty = self._dirty, {}
            ended, self._ended = self._ended, {}
            batch = verifier_pb2.CommitBatch(ended=ended)
            for session_id, session in dirty.items():
                base = session.acknowledged or 0
                batch.commits.add(session_id=session_id, base=base, tokens=session.log[base:])
            if self._stamp_us:
                batch.echo_us = self._stamp_us
                batch.held_us = int((self._clock() - self._heard_at) * 1e6)
            yield batch


def load_to_wire(load: Load) -> verifier_pb2.Load:
    return verifier_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        step_seconds=load.step_seconds,
        step_tokens=load.step_tokens,
        price=load.price,
        typical_step_seconds=load.typical_step_seconds,
        preemptions=load.preemptions,
        draining=load.draining,
        draft_starvation=load.draft_starvation,
    )
