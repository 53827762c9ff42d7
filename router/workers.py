"""The router's hold on one worker: its Sessions stream, the sessions that run there, and its last load."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio

from outrider.errors import InvalidRequest, OutriderError, PeerRefused, TooLarge, Unavailable
from outrider.net.allowance import Allowance
from outrider.net.commands import together
from outrider.net.heartbeat import IDLE_SILENCE_SECONDS, SILENCE_SECONDS, Stillness
from outrider.net.outbox import Outbox
from outrider.wire.drafter_sessions import (
    CloseDraft,
    DraftEndCause,
    DrafterCommand,
    DrafterEvents,
    OpenDraft,
    ReachVerifier,
    SetWindow,
)
from outrider.wire.hello import Identity, Role, check_hello
from outrider.wire.load import DrafterLoad, Load, VerifierLoad
from outrider.wire.methods import DRAFTER_SESSIONS, VERIFIER_SESSIONS, Method
from outrider.wire.session import FinishReason, SessionId, SessionParams
from outrider.wire.trace_context import TraceContext
from outrider.wire.verifier_sessions import (
    CancelSession,
    CloseSession,
    Command,
    Committed,
    EndDrafts,
    GiveBack,
    OpenSession,
    SetSpeculation,
    VerifierCommand,
    VerifierEvents,
)
from router.compatibility import Registration
from router.joined_stream import Connection, conversation
from router.prefixes import PlacedPrefixes

ANSWER_SECONDS = 5.0  # a worker that registers must answer within this
BYTES_PER_SECOND, BURST_BYTES, MESSAGE_UNITS = 2**18, 2**20, 2**11  # of a drafter: more than it has to say
VERIFIER_BYTES = 16 * 2**20, 32 * 2**20  # that a verifier may say a second, and at once
VERIFIER_MESSAGE_UNITS = 4096  # of a verifier, with its load: sessions are placed by it
VERIFIER_ENTRY_UNITS = 512  # of one that brings no session its tokens; of a guess in it an eighth of it
MOST_ROUND_TRIPS = 1024  # of a drafter that are remembered: to the verifiers for which it drafted last
MOST_DRAFTERS = 4  # of a verifier that are remembered: how far they are from it is known
MAX_UNSENT_COMMANDS = 16_384  # a worker that lets more pile up does not read; its stream is ended


class VerifierListener(Protocol):
    """What a verifier's events call: a session."""

    def committed(self, step: Committed) -> bool: ...  # whether it brought anything
    def finished(self, reason: FinishReason) -> None: ...
    def failed(self, error: OutriderError) -> None: ...
    def drafter_cut_off(self, turn: int, reason: str) -> None: ...
    def verifier_lost(self) -> None: ...


class DrafterListener(Protocol):
    """What a drafter's events call: a session."""

    def draft_ended(self, cause: DraftEndCause, reason: str) -> None: ...
    def drafter_lost(self) -> None: ...


Listener = TypeVar("Listener")


class Worker(Generic[Listener]):
    """What verifiers and drafters have in common: a stream, and listeners by session id."""

    def __init__(
        self,
        registration: Registration,
        connection: Connection,
        method: Method[Any, Any],
        allowance: Allowance,
    ) -> None:
        self.registration = registration
        self.identity = registration.info.identity
        # Its id and incarnation: a worker that is started anew is another one.
        self.instance = self.identity.worker_id, self.identity.incarnation
        self._allowance = allowance
        # Why it does not fit, or None once it is known to fit.
        self.verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._outbox: Outbox[Any] = Outbox(MAX_UNSENT_COMMANDS)
        self._call, self._events = conversation(connection, method, together(self._outbox), allowance)
        self._silence = Stillness()
        self._given_up = ""  # why its stream was ended here
        self.on_busy: Callable[[], object] = lambda: None  # called when it gets a session and had none
        self._opening = self.unreported = 0  # number of the last one; sessions opened since its last report
        self.numerics = registration.info.model.numerics
        self._listeners: dict[SessionId, tuple[int, Listener]] = {}  # by session, with its opening's number

    @property
    def placed(self) -> int:
        """Returns how many sessions this router has open there."""
        return len(self._listeners)

    @property
    def session_ids(self) -> Iterable[SessionId]:
        """Returns those of the sessions that this router has open there, in the order in which they came."""
        return self._listeners

    async def greet(self, hello: object) -> Any:
        """Exchanges hellos and returns the worker's. Raises Unavailable if another process answers."""
        self._send(hello)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                first = await anext(self._events)
        except (TimeoutError, StopAsyncIteration):
            raise Unavailable(
                "the worker did not answer the router's hello at its registered address"
            ) from None
        except grpc.aio.AioRpcError as error:
            raise worker_error(error) from None
        except InvalidRequest as error:
            raise Unavailable(f"the worker's hello is not understood: {error.message}") from None
        with suppress(PeerRefused):  # of another role, for instance: that is no fault of the worker's
            if check_hello(first.hello, self.identity.role) == self.identity:
                return first
        raise Unavailable("another process answered at the worker's registered address")

    async def listen(self) -> str:
        """Passes events on until the stream ends, or `tick` ends it. Returns what happened. Raises CutOff if
        it has said more than it may."""
        try:
            async for events in self._events:
                self._silence.moved()
                self._dispatch(events)
                del events  # else it is kept until the next ones come: for seconds, of a worker that idles
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise self._allowance.cut_off("a message is over the limit") from None
            return f"its stream broke off ({error.code().name})"
        except InvalidRequest as error:
            if self.identity.role is Role.DRAFTER or isinstance(error, TooLarge):
                raise self._allowance.cut_off(error.message) from None
            return f"what it says is not understood: {error.message}"
        except asyncio.CancelledError:  # so ends a call that was cancelled here, too
            if not self._given_up:
                raise
            return self._given_up
        return "its stream ended"

    @property
    def has_sessions(self) -> bool:
        return bool(self._listeners)

    def tick(self, ticks: int = 1) -> None:
        """Lets so many ticks of the router's time pass. Ends the stream of who is silent for too long."""
        limit = SILENCE_SECONDS if self._listeners else IDLE_SILENCE_SECONDS
        if self._silence.tick(ticks) >= limit:
            self.give_up(f"it has been silent for {limit:g} seconds")

    def give_up(self, why: str) -> None:
        """Ends the stream; `listen` says why."""
        self._given_up = why
        self._call.cancel()

    def hang_up(self) -> None:
        """Ends the stream."""
        self._call.cancel()
        self._outbox.close()  # who waits there to write is not ended if the other side ended the stream

    def take_listeners(self) -> list[Listener]:
        """Returns the sessions that lose this worker, which forgets them."""
        listeners = [listener for _, listener in self._listeners.values()]
        self._listeners.clear()
        return listeners

    def _opened(self, session_id: SessionId, listener: Listener) -> int:
        """Returns the number of this opening."""
        if not self._listeners:
            self._silence.moved()  # from now on it has more to say
            self.on_busy()
        self._opening += 1
        self.unreported += 1
        self._listeners[session_id] = self._opening, listener
        return self._opening

    def _opening_of(self, session_id: SessionId) -> int:
        """Returns the number of a session's opening; 0 = it is not open there."""
        return self._listeners[session_id][0] if session_id in self._listeners else 0

    def _listener(self, session_id: bytes, opening: int, over: bool = False) -> Listener | None:
        """Returns who hears of a session as it was opened then. What was on its way when the session was
        closed, or opened anew, is for nobody. If it is `over`, the worker has forgotten it."""
        number, listener = self._listeners.get(SessionId(session_id), (0, None))
        if listener is None or number != opening:
            return None
        if over:
            del self._listeners[SessionId(session_id)]
        return listener

    def _send(self, command: object) -> None:
        if not self._outbox.put(command):
            self.give_up("it does not read what it is told")

    def _dispatch(self, events: Any) -> None:
        raise NotImplementedError


class Verifier(Worker[VerifierListener]):
    """A verifier and the sessions that this router has open there."""

    def __init__(self, registration: Registration, connection: grpc.aio.Channel, load: Load | None) -> None:
        """`load`: what the worker said before the router knew it; good until it answers the hello."""
        allowance = Allowance("verifier", *VERIFIER_BYTES, time.monotonic)
        super().__init__(registration, connection, VERIFIER_SESSIONS, allowance)
        self.load = load if isinstance(load, VerifierLoad) else VerifierLoad()
        self.prefixes = PlacedPrefixes(registration.info.kv_blocks, registration.info.kv_block_size)
        self.kv_tokens = registration.info.kv_blocks * registration.info.kv_block_size  # a session's most
        self.on_load: Callable[[Verifier, VerifierLoad], None] | None = None
        self.on_dropped: Callable[[Verifier, Mapping[str, int]], None] | None = None
        self.drafters: OrderedDict[str, None] = OrderedDict()  # worker_ids of those that drafted here last
        self.brought = 0  # steps that gave a session of this router its tokens

    def drafted_by(self, worker_id: str) -> None:
        self.drafters[worker_id] = None
        self.drafters.move_to_end(worker_id)
        if len(self.drafters) > MOST_DRAFTERS:
            self.drafters.popitem(last=False)

    async def connect(self, router: Identity) -> None:
        self._dispatch(await self.greet(VerifierCommand(hello=router.hello())))

    def open(
        self,
        session_id: SessionId,
        params: SessionParams,
        *,
        output: Sequence[int],
        num_speculative_tokens: int,
        draft_key: bytes,
        listener: VerifierListener,
        trace: TraceContext | None = None,
    ) -> None:
        k, opening = num_speculative_tokens, self._opened(session_id, listener)
        self._tell(OpenSession(session_id, params, tuple(output), k, draft_key, opening, trace))

    def set_speculation(self, session_id: SessionId, num_speculative_tokens: int) -> None:
        self._tell(SetSpeculation(session_id, self._opening_of(session_id), num_speculative_tokens))

    def end_drafts(self, session_id: SessionId, seat: int, turn: int) -> None:
        """Nobody drafts for the session from that seat, until one of a later turn does."""
        self._tell(EndDrafts(session_id, self._opening_of(session_id), seat, turn))

    def close(self, session_id: SessionId) -> None:
        """Frees the session there; nothing is sent if the verifier has forgotten it already."""
        if opening := self._opening_of(session_id):
            del self._listeners[session_id]
            self._tell(CloseSession(session_id, opening))

    def ask_back(self, session_id: SessionId) -> None:
        """Lets the session fail there as Unavailable, unless it has begun."""
        self._tell(GiveBack(session_id, self._opening_of(session_id)))

    def cancel(self, session_id: SessionId) -> None:
        """Ends a session that another router may have opened there, and hears of it."""
        self._tell(CancelSession(session_id))

    def _tell(self, command: Command) -> None:
        self._send(VerifierCommand(command=command))

    def _dispatch(self, events: VerifierEvents) -> None:
        units: float = VERIFIER_MESSAGE_UNITS
        units += VERIFIER_ENTRY_UNITS * (len(events.cut_off) + len(events.finished) + len(events.failed))
        if events.load is not None:  # first: the sessions below decide by it
            self.load, self.unreported = events.load, 0
            if self.on_load is not None:
                self.on_load(self, self.load)
        if events.dropped and self.on_dropped is not None:
            self.on_dropped(self, events.dropped)
        for blamed in events.cut_off:
            listener = self._listener(blamed.session_id, blamed.opening)
            if listener is not None:
                listener.drafter_cut_off(blamed.turn, blamed.reason)
        for step in events.committed:
            listener = self._listener(step.session_id, step.opening)
            if listener is None or not listener.committed(step):
                parts = len(step.guesses) + len(step.drafters) + len(step.logprobs)
                units += VERIFIER_ENTRY_UNITS * (1 + parts / 8)
        for end in events.finished:
            listener = self._listener(end.session_id, end.opening, over=True)
            if listener is not None:
                listener.finished(end.reason)
        for failure in events.failed:
            listener = self._listener(failure.session_id, failure.opening, over=True)
            if listener is not None:
                listener.failed(failure.error)
        self._allowance.spend(units)


class Drafter(Worker[DrafterListener]):
    """A drafter and the sessions that this router has open there."""

    def __init__(self, registration: Registration, connection: Connection, load: Load | None) -> None:
        """`load`: what the worker said before the router knew it."""
        allowance = Allowance("drafter", BYTES_PER_SECOND, BURST_BYTES, time.monotonic)
        super().__init__(registration, connection, DRAFTER_SESSIONS, allowance)
        self.load = load if isinstance(load, DrafterLoad) else DrafterLoad()
        self._reported: DrafterLoad | None = None
        self._round_trips: OrderedDict[str, float] = OrderedDict()  # the last that it told
        self.on_load: Callable[[Drafter, DrafterLoad], None] | None = None
        self._on_unreached: Callable[[str], None] | None = None  # until it has answered

    @property
    def joined(self) -> bool:
        """Returns True if it opened its stream by itself: it cannot be called, and shows no certificate."""
        return not self.registration.address

    def way_to(self, verifier: Verifier) -> str:
        """Returns the address at which it reaches the verifier; empty = it does not."""
        there = verifier.registration
        return there.join_address if self.joined else there.address

    async def connect(self, router: Identity) -> None:
        await self.greet(DrafterCommand(hello=router.hello()))

    def open(
        self,
        session_id: SessionId,
        params: SessionParams,
        *,
        output: Sequence[int],
        verifier_address: str,
        draft_key: bytes,
        window: int,
        target_vocab_size: int,
        target: str,
        listener: DrafterListener,
        trace: TraceContext | None = None,
    ) -> None:
        opened = OpenDraft(
            *(session_id, params, tuple(output), verifier_address, draft_key, window, target_vocab_size),
            *(self._opened(session_id, listener), target, trace),
        )
        self._send(DrafterCommand(command=opened))

    def set_window(self, session_id: SessionId, window: int) -> None:
        self._send(DrafterCommand(command=SetWindow(session_id, self._opening_of(session_id), window)))

    def close(self, session_id: SessionId) -> None:
        """Ends drafting for the session; nothing is sent if the drafter has forgotten it already."""
        if opening := self._opening_of(session_id):
            del self._listeners[session_id]
            self._send(DrafterCommand(command=CloseDraft(session_id, opening)))

    def reach(self, verifier: Verifier, on_unreached: Callable[[str], None]) -> None:
        """Lets it find out if it reaches a verifier; `on_unreached` hears why, if it does not."""
        self._on_unreached = on_unreached
        self._send(DrafterCommand(command=ReachVerifier(self.way_to(verifier))))

    def _note_round_trips(self, changed: Mapping[str, float]) -> None:
        for address, seconds in changed.items():
            self._round_trips[address] = seconds
            self._round_trips.move_to_end(address)
        while len(self._round_trips) > MOST_ROUND_TRIPS:
            self._round_trips.popitem(last=False)

    def _dispatch(self, events: DrafterEvents) -> None:
        self._allowance.spend(MESSAGE_UNITS)
        self.unreported = self.unreported if events.load is None else 0
        if events.load is not None and events.load != self._reported:  # one that idles tells the same again
            self._reported = events.load
            self._note_round_trips(events.load.round_trips)
            self.load = replace(events.load, round_trips=self._round_trips)
            if self.on_load is not None:
                self.on_load(self, self.load)
        if events.reached is not None:
            told, self._on_unreached = self._on_unreached, None
            if told is not None and events.reached:
                told(events.reached)
        for end in self._allowance.entries(events.ended):
            listener = self._listener(end.session_id, end.opening, over=True)
            if listener is not None:
                listener.draft_ended(end.cause, end.reason)


def worker_error(error: grpc.aio.AioRpcError) -> Unavailable:
    """Returns why a worker does not answer. If it refuses this router, another may have it all the same."""
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return Unavailable(f"the worker refuses the router: {error.details()}")
    return Unavailable(
        f"the router cannot reach the worker at the address it registered ({error.code().name}): "
        "the address must be one that the router's machine can connect to"
    )
