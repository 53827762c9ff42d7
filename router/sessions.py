"""All sessions of this router: admits requests and runs them on the fleet."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable

from outrider.errors import Cancelled, Overloaded, Unavailable, UnknownModel
from outrider.wire.codec import SessionId, new_session_id
from router.fleet import Fleet
from router.priors import Priors
from router.requests import GenerationRequest, ServedModel, SessionEnded, SessionEvent
from router.session import Session

DRAFT_KEY_BYTES = 16


class Sessions:
    """Implements router.requests.SessionRunner."""

    def __init__(
        self,
        fleet: Fleet,
        priors: Priors,
        *,
        max_sessions: int,
        num_speculative_tokens: int,
        lock_step: bool = False,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`num_speculative_tokens`: most draft tokens in one step of any session. `lock_step`: no draft runs
        ahead of its verdict."""
        self._fleet = fleet
        self._max_sessions = max_sessions
        self._num_speculative_tokens = num_speculative_tokens
        self._lock_step = lock_step
        self._random_bytes = random_bytes
        self._open: dict[SessionId, Session] = {}
        self._priors = priors
        self._idle = asyncio.Event()
        self._idle.set()
        fleet.on_verifier_joined.append(self._offer_verifier)
        fleet.on_drafter_joined.append(self._offer_drafter)

    def model(self, name: str) -> ServedModel:
        models = self.models()
        if not models:
            raise Unavailable("no target worker is registered at the moment; try again shortly")
        for model in models:
            if name in ("", model.name):
                return model
        served = ", ".join(repr(model.name) for model in models)
        raise UnknownModel(f"the model {name!r} is not served here; there is {served}", field="model")

    def models(self) -> list[ServedModel]:
        return self._fleet.models()

    def ready(self) -> bool:
        return any(not verifier.load.draining for verifier in self._fleet.verifiers.values())

    async def run(self, request: GenerationRequest) -> AsyncGenerator[SessionEvent, None]:
        session = self._admit(request)
        try:
            session.open()
            while True:
                event = await session.next()
                yield event
                if isinstance(event, SessionEnded):
                    return
        finally:
            session.close()
            del self._open[session.id]
            if not self._open:
                self._idle.set()

    def _admit(self, request: GenerationRequest) -> Session:
        model = self.model(request.model)
        if request.fingerprint not in (None, model.fingerprint):
            raise Unavailable(f"another checkpoint of {model.name!r} is served since; send the request again")
        if len(self._open) >= self._max_sessions:
            raise Overloaded(
                f"{self._max_sessions} requests are in progress, the most here; try again shortly"
            )
        if self._fleet.verifier_for(model.name, request.prompt, request.most_tokens) is None:
            raise Unavailable(f"no target worker for {model.name!r} is free to take requests at the moment")
        session = Session(
            request.session_id or new_session_id(self._random_bytes),
            self._random_bytes(DRAFT_KEY_BYTES),
            request,
            model,
            self._fleet,
            self._priors.pool,
            self._cap(request),
            self._lock_step,
        )
        self._open[session.id] = session
        self._idle.clear()
        return session

    def _cap(self, request: GenerationRequest) -> int:
        if request.num_speculative_tokens is None:
            return self._num_speculative_tokens
        return min(request.num_speculative_tokens, self._num_speculative_tokens)

    def cancel(self, session_id: SessionId) -> None:
        session = self._open.get(session_id)
        if session is not None:
            session.failed(Cancelled("the request was cancelled"))
            return
        for verifier in self._fleet.verifiers.values():  # it may be another router's
            verifier.cancel(session_id)

    async def until_idle(self) -> None:
        """Until no session is open."""
        await self._idle.wait()

    def stop(self) -> None:
        """Ends all sessions: their clients hear that the service is stopping."""
        for session in list(self._open.values()):
            session.stop()

    def _offer_verifier(self) -> None:
        for session in self._open.values():
            session.seek_verifier()

    def _offer_drafter(self) -> None:
        for session in self._open.values():
            session.seek_drafter()
