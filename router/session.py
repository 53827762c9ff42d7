"""One session: its log, its workers, and how far its draft runs ahead.

Everything is decided when an event arrives, whether or not the client is reading; the queue only holds what
the client has not taken yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from outrider.errors import OutriderError, Unavailable
from outrider.wire.codec import SessionId
from router.fleet import Fleet
from router.requests import (
    FinishReason,
    GenerationRequest,
    ServedModel,
    SessionEnded,
    SessionEvent,
    TokensCommitted,
)
from router.speculation import Estimator, PriorPool, choose_k, settled, window, worth_sending
from router.workers import Drafter, Verifier

log = logging.getLogger(__name__)

RESUME_SECONDS = 60.0  # a session that lost its verifier waits so long for another
MAX_MOVES = 3  # from verifier to verifier without a token gained: the request itself may be what they die of

PoolFor = Callable[[str, str], PriorPool]
"""The pool of a (target fingerprint, draft fingerprint) pair."""


class Session:
    """Open from `open` until an end or an error is queued, or `close`.

    Both of its workers may be lost at any time: it goes on with others, from what is committed. The same seed
    gives the same tokens there."""

    def __init__(
        self,
        session_id: SessionId,
        draft_key: bytes,
        request: GenerationRequest,
        model: ServedModel,
        fleet: Fleet,
        pool_for: PoolFor,
        cap: int,
        lock_step: bool = False,
    ) -> None:
        """`cap`: most draft tokens in a step; 0 = no speculation. `lock_step`: the window is k."""
        self.id = session_id
        self._draft_key = draft_key
        self._request = request
        self._model = model
        self._verifier: Verifier | None = None  # None = not opened yet, or lost and not replaced yet
        self._moves = 0  # to another verifier, since the last committed token
        self._deadline: asyncio.TimerHandle | None = None  # while there is no verifier
        self._drafter: Drafter | None = None
        self._gave_up: frozenset[tuple[str, int]] = frozenset()  # drafters that ended it of their own accord
        self._fleet = fleet
        self._pool_for = pool_for
        self._cap = cap
        self._lock_step = lock_step
        self._log: list[int] = list(request.prompt)  # committed tokens, by position; it only grows
        self._queue: asyncio.Queue[SessionEvent | OutriderError] = asyncio.Queue()
        self._over = False
        self._pool = pool_for(model.fingerprint, "")
        self._estimator = Estimator(self._pool.prior())
        self._k = 0
        self._window = 0

    def open(self) -> None:
        self.seek_verifier()
        if self._verifier is None:
            self._await_verifier()

    def seek_verifier(self) -> None:
        """Gives the session a verifier, and with it a drafter, where it has none and one runs its model."""
        if self._over or self._verifier is not None:
            return
        verifier = self._fleet.verifier_for(self._model.name, self._log, self._request.most_tokens)
        if verifier is None or verifier.identity.model_fingerprint != self._model.fingerprint:
            return
        self._verifier = verifier
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        drafter = self._find_drafter()
        if drafter is not None:
            self._expect(drafter)
        self._k = choose_k(self._estimator, verifier.load.price, self._cap)
        verifier.open(
            self.id,
            self._request,
            output=self._output,
            stop_token_ids=() if self._request.ignore_eos else sorted(self._model.eos_token_ids),
            num_speculative_tokens=self._k,
            draft_key=self._draft_key if self._cap else b"",
            listener=self,
        )
        self.seek_drafter()

    @property
    def _output(self) -> list[int]:
        return self._log[len(self._request.prompt) :]

    async def next(self) -> SessionEvent:
        """What comes next. Raises the error that ended the session."""
        event = await self._queue.get()
        if isinstance(event, OutriderError):
            raise event
        return event

    def close(self) -> None:
        """Frees the session on every worker that still has it, at once."""
        if self._over:
            return
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._verifier is not None:
            self._verifier.close(self.id)
        self._leave_drafter()
        self._pool.absorb(self._estimator.accepted, self._estimator.observed)

    # From the verifier.

    def committed(
        self, base: int, tokens: Sequence[int], accepted: int, verified: int, cached_prompt_tokens: int
    ) -> None:
        if self._over:
            return
        known = len(self._log) - base  # tokens of the message that the log has already
        repeated = list(tokens[: max(known, 0)])
        sound = known >= 0 and repeated == self._log[base : base + len(repeated)]
        if not sound or accepted > min(verified, len(tokens)):
            log.error(
                "session %s: %d tokens (%d of %d drafts accepted) at %d do not continue a log of %d",
                *(self.id.hex(), len(tokens), accepted, verified, base, len(self._log)),
            )
            self.failed(OutriderError("the target worker lost track of this request; send it again"))
            return
        if known >= len(tokens):
            return
        step = TokensCommitted(
            tokens=tuple(tokens[known:]),
            accepted=max(0, accepted - known),
            verified=max(0, verified - known),
            # At a second verifier it is the first one's work that is, or is not, found in a cache.
            cached_prompt_tokens=cached_prompt_tokens if base == len(self._request.prompt) else 0,
        )
        self._moves = 0
        self._log.extend(step.tokens)
        self._queue.put_nowait(step)
        self._estimator.observe(step.accepted, step.verified, len(step.tokens))
        self._steer()

    def finished(self, reason: FinishReason) -> None:
        self._end(SessionEnded(reason))

    def failed(self, error: OutriderError) -> None:
        if isinstance(error, Unavailable):
            self.verifier_lost()
        else:
            self._end(error)

    def verifier_lost(self) -> None:
        """The session goes on at another verifier, now or as soon as there is one."""
        if self._over:
            return
        self._verifier = None
        self._leave_drafter()  # it drafts for the old verifier's address
        self._gave_up = frozenset()  # perhaps only because that verifier was gone
        self._moves += 1
        if self._moves > MAX_MOVES:
            self._end(Unavailable(f"{self._moves} target workers in a row were lost on this request"))
            return
        log.info("session %s: lost its verifier after %d tokens", self.id.hex(), len(self._output))
        self.seek_verifier()
        if self._verifier is None:
            self._await_verifier()

    def _await_verifier(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(
            RESUME_SECONDS,
            self._end,
            Unavailable(
                "the target worker that served this request was lost, and none came in its place within "
                f"{RESUME_SECONDS:g} seconds; send it again"
            ),
        )

    def stop(self) -> None:
        """The router is about to go."""
        self._end(Unavailable("the service is stopping; send the request again"))

    def _end(self, event: SessionEnded | OutriderError) -> None:
        if not self._over:
            self._queue.put_nowait(event)
            self.close()

    # From the drafter.

    def draft_ended(self, reason: str) -> None:
        drafter = self._drafter
        if drafter is not None:
            log.info("session %s: drafter %s ended it: %s", self.id.hex(), drafter.identity.worker_id, reason)
            self._gave_up |= {(drafter.identity.worker_id, drafter.identity.incarnation)}
        self.drafter_lost()

    def drafter_lost(self) -> None:
        """The session goes on plainly; another drafter starts from prompt and output."""
        self._drafter = None
        self.seek_drafter()

    def _leave_drafter(self) -> None:
        if self._drafter is not None:
            self._drafter.close(self.id)
            self._drafter = None

    def seek_drafter(self) -> None:
        """Gives the session a drafter where it has none and one fits."""
        drafter, verifier = self._find_drafter(), self._verifier
        if drafter is None or verifier is None:
            return
        self._expect(drafter)
        self._drafter = drafter
        self._set_window(self._wanted_window(verifier, drafter))
        drafter.open(
            self.id,
            self._request,
            output=self._output,
            verifier_address=verifier.registration.address,
            draft_key=self._draft_key,
            window=self._window,
            target_vocab_size=self._model.vocab_size,
            listener=self,
        )

    def _find_drafter(self) -> Drafter | None:
        if self._over or self._cap == 0 or self._drafter is not None or self._verifier is None:
            return None
        return self._fleet.drafter_for(self._verifier, self._gave_up, self._acceptance)

    def _acceptance(self, target: str, draft: str) -> float:
        return self._pool_for(target, draft).mean

    def _expect(self, drafter: Drafter) -> None:
        """What was learnt about one draft model says nothing about another."""
        pool = self._pool_for(self._model.fingerprint, drafter.identity.model_fingerprint)
        if pool is not self._pool:
            self._pool.absorb(self._estimator.accepted, self._estimator.observed)
            self._pool = pool
            self._estimator = Estimator(pool.prior())

    def _steer(self) -> None:
        """Sends k and the window where they have changed."""
        verifier = self._verifier
        if verifier is None:
            return
        k = settled(self._k, choose_k(self._estimator, verifier.load.price, self._cap))
        if k != self._k:
            self._k = k
            verifier.set_speculation(self.id, k)
        if self._drafter is not None:
            wanted = self._wanted_window(verifier, self._drafter)
            if wanted != self._window if self._lock_step else worth_sending(self._window, wanted):
                self._set_window(wanted)
                self._drafter.set_window(self.id, wanted)

    def _set_window(self, tokens: int) -> None:
        self._window = tokens
        self._fleet.metrics.draft_window(self._model.name, tokens)

    def _wanted_window(self, verifier: Verifier, drafter: Drafter) -> int:
        if self._lock_step:
            return self._k
        return window(
            self._k,
            verifier.load.typical_step_seconds,
            drafter.load.round_trips.get(verifier.registration.address, drafter.load.round_trip_seconds),
            drafter.load.token_seconds,
        )
