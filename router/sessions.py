"""All sessions of this router: admits requests and runs them on the fleet."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from weakref import WeakValueDictionary

from outrider.errors import Overloaded, Unavailable, UnknownModel, superseded
from outrider.store.logs import Lead
from outrider.telemetry.spans import Tracer, current_trace
from outrider.wire.session import FinishReason, SessionId, new_session_id
from router import losses
from router.admission import NOBODY, Lasting, Refusal, refused, share_ahead
from router.fleet import Fleet
from router.held_logs import TakenSession
from router.placement import VerifierCandidate
from router.places import Places, Together
from router.prompt_record import PromptRecord
from router.rebalance import has_room, sessions_to_move
from router.requests import (
    GenerationRequest,
    Recalled,
    Resumption,
    ServedModel,
    SessionBegun,
    SessionEnded,
    SessionEvent,
)
from router.session import Session
from router.session_draft import SessionDraft
from router.session_events import SessionEvents
from router.session_log_writer import SessionLogWriter
from router.session_span import SessionSpan
from router.speculation import PairAcceptance, Pairs
from router.transcript import Transcript
from router.workers import Verifier

DRAFT_KEY_BYTES = 16
BLOCK = 16  # tokens of a prompt that another has read, which are read again


class Sessions:
    """Implements router.requests.SessionRunner."""

    def __init__(
        self,
        fleet: Fleet,
        log_writer: SessionLogWriter,
        *,
        max_sessions: int,
        num_speculative_tokens: int,
        lock_step: bool = False,
        drafters_per_session: int = 1,
        same_numerics: bool = False,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
        tracer: Tracer | None = None,
        record: PromptRecord | None = None,
    ) -> None:
        """`num_speculative_tokens`: most draft tokens in one step of any session. `lock_step`: no draft runs
        ahead of its verdict. `drafters_per_session`: most at a time. `same_numerics`: a text goes on only
        where it is computed alike. `tracer`: None = sessions have no spans. `record`:
        keeps prompts; None = none are kept."""
        self._tracer = tracer
        self._record = record
        self._fleet = fleet
        self._log_writer = log_writer
        self._num_speculative_tokens = num_speculative_tokens
        self._lock_step = lock_step
        self._drafters_per_session = drafters_per_session
        self._same_numerics = same_numerics
        self._random_bytes = random_bytes
        self._open: dict[SessionId, Session] = {}
        self._resuming = WeakValueDictionary[SessionId, asyncio.Lock]()
        self._resumptions = WeakValueDictionary[
            SessionId, Resumption
        ]()  # by first session; the latest of each
        self._lasting = Lasting()
        self._places = Places(max_sessions, self._lasting)
        self._pairs = Pairs()
        self._idle = asyncio.Event()
        self._idle.set()
        fleet.on_verifier_joined.append(self._offer_verifier)
        fleet.on_drafter_joined.append(self._offer_drafter)
        fleet.on_verifier_load.append(self._offer_room)

    @property
    def open(self) -> dict[SessionId, Session]:
        """Returns those that are open, the newest last."""
        return self._open

    def model(self, name: str) -> ServedModel:
        models = self.models() + self._fleet.absent_models()
        if not models:
            raise Unavailable("no target worker is registered at the moment; try again shortly")
        by_name = [model for model in models if name in ("", model.name)]
        for model in by_name or [model for model in models if name in model.aliases]:
            return replace(model, absent_context=self._fleet.absent_context(model.name))
        served = ", ".join(repr(model.name) for model in models)
        raise UnknownModel(f"the model {name!r} is not served here; there is {served}", field="model")

    def models(self) -> list[ServedModel]:
        return self._fleet.models()

    def ready(self) -> bool:
        standings, verifiers = self._fleet.standings, self._fleet.verifiers.values()
        return any(not one.load.draining and not standings.aside(one) for one in verifiers)

    def degraded(self) -> str:
        return "; ".join(filter(None, [self._log_writer.degraded, self._fleet.doubts.told()]))

    def run(self, request: GenerationRequest, answer: bytes = b"") -> SessionEvents:
        return self._events(lambda: self._admit(request, answer))

    async def recall(self, session_id: SessionId) -> Recalled:
        session = self._open.get(session_id)
        transcript = await self._log_writer.read(session_id) if session is None else session.transcript
        return Recalled(transcript.request, transcript.answer, transcript.output_tokens)

    async def resume(
        self, session_id: SessionId, resumption: Resumption | None = None
    ) -> AsyncGenerator[SessionEvent, None]:
        resumption = resumption or Resumption(session_id)
        leads = session_id == resumption.first
        if not leads:
            await resumption.led.wait()
        async with self._resuming.setdefault(session_id, asyncio.Lock()):  # else one's log is taken from it
            if not leads and self._resumptions.get(resumption.first) is not resumption:
                raise superseded()
            found = await self._take_up(session_id, resumption.lead)
            if leads:
                owner = found.cursor.owner if isinstance(found, Session) else found.owner
                resumption.lead = Lead(session_id, owner)
                resumption.led.set()
                self._resumptions[session_id] = resumption
        if isinstance(found, TakenSession):
            end = found.transcript.reached
            self._places.give_up(session_id)
            yield SessionBegun(found.transcript.known(), over=True)
            assert end is not None, "else the session is taken up"
            if end is FinishReason.CANCELLED:
                raise losses.cancelled()
            yield SessionEnded(end)
            return
        found.expire_at(None)  # that was the former client's
        async with aclosing(self._events(lambda: found)) as events:
            async for event in events:
                yield event

    async def _take_up(self, session_id: SessionId, lead: Lead | None) -> Session | TakenSession:
        """Returns the session, or its log if it is over."""
        session = self._resumable(session_id)
        if session is None:
            taken = await self._log_writer.take(session_id, lead)
            if taken.transcript.reached is not None:
                return taken
            session = self._readmit(taken)
        return session

    def _resumable(self, session_id: SessionId) -> Session | None:
        """Returns the open session, unless it has broken off and only its reader does not know it yet."""
        session = self._open.get(session_id)
        return None if session is None or session.broken_off else session

    def _events(self, open_session: Callable[[], Session]) -> SessionEvents:
        return SessionEvents(open_session, self._log_writer.begun, self._leave)

    def _leave(self, session: Session, lasted: float | None) -> None:
        """Nobody reads a session any more: it is closed."""
        if lasted is not None:
            self._lasting.observe(lasted)
        session.close()
        if self._open.get(session.id) is session:
            self._forget(session)
        if not self._open:
            self._idle.set()

    def _admit(self, request: GenerationRequest, answer: bytes) -> Session:
        model = self.model(request.model)
        if request.fingerprint not in (None, model.fingerprint):
            raise _another_checkpoint(model.name)
        session_id = request.session_id or new_session_id(self._random_bytes)
        promise = self._places.promise(session_id)
        if promise is None:
            self.check_room(request.owner)
        if promise is None or not promise.begun:
            self._check_load(request, model.name, promise)
        named = replace(request, model=model.name, session_id=session_id, fingerprint=model.fingerprint)
        session = self._add(Transcript(named, answer))
        session.expire_at(request.deadline)
        if self._record is not None:
            self._record.add(model.name, request.params.prompt)
        return session

    def _readmit(self, taken: TakenSession) -> Session:
        """A session that another router began, or this one and its client left: it waits for a verifier."""
        request = taken.transcript.request
        for model in self.models():
            if model.name == request.model and model.fingerprint != request.fingerprint:
                raise _another_checkpoint(model.name)
        assert request.session_id is not None
        if self._places.promise(request.session_id) is None:
            self.check_room(request.owner)
        return self._add(taken.transcript, taken)

    def pair(self, target: str, draft: str, owner: str = "") -> PairAcceptance:
        """Returns what an owner's requests show of a pair of models, by their fingerprints."""
        return self._pairs.of(target, draft, owner)

    def check_room(self, owner: str, sessions: int = 1) -> None:
        self._places.check(owner, sessions)

    def _check_load(self, request: GenerationRequest, model: str, together: Together | None) -> None:
        """Refuses what would wait too long for its first token, with all that begin `together`."""
        by = [at for at in (request.first_token_by, request.deadline) if at is not None]
        patience = min(by) - asyncio.get_running_loop().time() if by else math.inf
        params, before = request.params, share_ahead(self._places.of_owners, request.owner)

        def why(candidates: Iterable[VerifierCandidate]) -> Refusal | None:
            lasting, priority = self._lasting.seconds, params.priority
            most, (read, sessions) = params.most_tokens, (len(params.prompt), 1)
            if together is not None:
                read, sessions = together.prompt_tokens, together.sessions
            return refused(candidates, model, read, patience, lasting, priority, before, most, sessions)

        refusal: Refusal | None = NOBODY
        for candidates in self._fleet.looks(model, params.prompt, params.cache_salt, request.owner):
            refusal = why(candidates)
            if refusal is None:
                return
        if refusal is NOBODY and (awaited := self._fleet.awaited(model, self._unplaced(model))):
            refusal = why(awaited)
        if refusal is NOBODY:
            raise Unavailable(f"no target worker for {model!r} is free to take requests at the moment")
        if refusal is not None:
            raise Overloaded(refusal.message, retry_after=refusal.retry_after)

    def _unplaced(self, model: str) -> int:
        sessions = self._open.values()
        return sum(one.unplaced and one.transcript.request.model == model for one in sessions)

    def _add(self, transcript: Transcript, taken: TakenSession | None = None) -> Session:
        trace, span = current_trace(), None
        if self._tracer is not None:
            span = SessionSpan(self._tracer, trace, transcript, asyncio.get_running_loop().time)
        draft = SessionDraft(
            transcript,
            self._random_bytes(DRAFT_KEY_BYTES),
            self._fleet,
            partial(self.pair, owner=transcript.request.owner),
            self._cap(transcript.request),
            self._lock_step,
            self._drafters_per_session,
            span,
            trace,
        )
        session = Session(draft, transcript, self._log_writer, self._fleet, taken, self._same_numerics)
        if (former := self._open.get(session.id)) is not None:
            self._forget(former)
        self._open[session.id] = session
        self._places.take(session.id, transcript.request.owner)
        self._idle.clear()
        return session

    def _forget(self, session: Session) -> None:
        del self._open[session.id]
        self._places.leave(session.transcript.request.owner)

    def _cap(self, request: GenerationRequest) -> int:
        if request.num_speculative_tokens is None:
            return self._num_speculative_tokens
        return min(request.num_speculative_tokens, self._num_speculative_tokens)

    @contextmanager
    def together(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        ids = [one.session_id for one in requests if one.session_id is not None]
        new = [session_id for session_id in ids if session_id not in self._open]
        tokens, last = 0, None
        for one in requests:  # those of the same prompt come one after the other, and read it once
            tokens += BLOCK if one.params.prompt is last else len(one.params.prompt)
            last = one.params.prompt
        with self._places.together(requests[0].owner, new, tokens), self._log_writer.keep(ids):
            yield

    async def cancel(self, session_id: SessionId) -> None:
        session = self._open.get(session_id)
        if session is not None:
            session.cancel()
        elif not self._fleet.was_told(session_id) and not await self._log_writer.ended(session_id):
            await self._log_writer.cancel(session_id)  # it may be another router's
            self._fleet.cancel(session_id)

    async def until_idle(self) -> None:
        """Until no session is open."""
        await self._idle.wait()

    def stop(self) -> None:
        """Ends all sessions: their clients hear that the service is stopping."""
        for session in list(self._open.values()):
            session.stop()

    def _offer_verifier(self) -> None:
        for session in self._open.values():
            if session.unplaced:
                self._fleet.turns.soon(session.seek_verifier)

    def _offer_room(self, verifier: Verifier) -> None:
        """Has sessions that wait at others and have not begun move to a verifier that has room for them."""
        if self._fleet.standings.due(verifier):
            self._offer_verifier()
        full = [one for one in self._fleet.waiting if one is not verifier]
        if not full:
            return
        (roomy,) = self._fleet.candidates([verifier])
        if not has_room(roomy) or not self._fleet.standings.may_place(verifier):
            return
        waiting = [
            (session, one)
            for session_id in dict.fromkeys(chain.from_iterable(one.session_ids for one in full))
            if (session := self._open.get(session_id)) and (one := session.unbegun) is not None
        ]
        waiting.sort(key=lambda pair: pair[0].begun_at)
        candidates = self._fleet.candidates(full)
        for index in sessions_to_move([one for _, one in waiting], candidates, roomy):
            waiting[index][0].ask_back()

    def _offer_drafter(self) -> None:
        for session in self._open.values():
            if session.draft.seeks:
                self._fleet.turns.soon(session.draft.seek)


def _another_checkpoint(model: str) -> Unavailable:
    return Unavailable(f"another checkpoint of {model!r} is served since; send the request again")
