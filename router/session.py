"""One session: its transcript, its workers, and how far its draft runs ahead.

Everything is decided when an event arrives, whether or not a client is reading. A reader goes through the
transcript from its beginning; there is one at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from outrider.errors import Cancelled, DeadlineExceeded, OutriderError, Unavailable
from outrider.net.draft_right import right
from outrider.wire.session import FinishReason, SessionId
from router import losses, numerics
from router.fleet import Fleet
from router.reader import Reader, lost_track, superseded
from router.rebalance import Unbegun
from router.requests import SessionEnded, TokensCommitted
from router.session_log_writer import SessionLogWriter, TakenSession
from router.session_state import TRANSITIONS, Event, State
from router.speculation import Estimator, PairAcceptance, choose_k, settled, welcome, window, worth_sending
from router.transcript import Transcript
from router.workers import Drafter, Verifier

log = logging.getLogger(__name__)

RESUME_SECONDS = 60.0  # a session that lost its verifier waits so long for another

PairFor = Callable[[str, str], PairAcceptance]
"""Gives the acceptance of a (target fingerprint, draft fingerprint) pair."""


class Session:
    """Open from its reader's first wait until an end or an error, or `close`.

    Both of its workers may be lost at any time: it goes on with others, from what is committed. The same seed
    gives the same tokens there."""

    def __init__(
        self,
        draft_key: bytes,
        transcript: Transcript,
        log_writer: SessionLogWriter,
        fleet: Fleet,
        pair_for: PairFor,
        cap: int,
        lock_step: bool = False,
        taken: TakenSession | None = None,
        same_numerics: bool = False,
    ) -> None:
        """`cap`: most draft tokens in a step; 0 = no speculation. `lock_step`: the window is k. `taken`: the
        log that it goes on with; None = it begins one. `same_numerics`: rather than with others it waits."""
        request = transcript.request
        assert request.session_id is not None and request.fingerprint is not None, "named when it is admitted"
        self.id: SessionId = request.session_id
        self._fingerprint: str = request.fingerprint
        self.transcript = transcript
        self._draft_key = draft_key
        self._request = request
        self._log_writer = log_writer
        self._cursor = (
            log_writer.begin(transcript, self._superseded)
            if taken is None
            else log_writer.go_on(taken, self._superseded)
        )
        self._verifier: Verifier | None = None  # None = not opened yet, or lost and not replaced yet
        self._losses = losses.Losses()
        self._pause: asyncio.TimerHandle | None = None  # until it seeks another verifier
        self._lost: frozenset[tuple[str, int]] = frozenset()  # verifiers where it was lost: others come first
        self._state = State.NEW
        self._deadline: asyncio.TimerHandle | None = None  # while there is no verifier
        self._expiry: asyncio.TimerHandle | None = None  # where the request has a deadline
        self._drafter: Drafter | None = None
        self._turn = -1  # how many drafters it has had before the last one
        self._gave_up: frozenset[tuple[str, int]] = frozenset()  # drafters that ended it of their own accord
        self._fleet = fleet
        self._pair_for = pair_for
        self._cap = cap
        self._lock_step = lock_step
        self._same_numerics = same_numerics
        self.outcome: SessionEnded | OutriderError | None = None  # None = it goes on
        self.reader: Reader | None = None
        self.news = asyncio.Event()  # for readers
        self._pair = pair_for(self._fingerprint, "")
        self._estimator = Estimator(self._pair.mean)
        self._k = 0
        self._window = 0

    def read(self) -> Reader:
        """Gives it a reader, which begins with the first output token. The former one hears Superseded."""
        self.reader = Reader(self)
        self.news.set()
        return self.reader

    @property
    def broken_off(self) -> bool:
        """It ended before its end: its log can be gone on with."""
        return isinstance(self.outcome, OutriderError) and not isinstance(self.outcome, Cancelled)

    def open(self) -> bool:
        """Seeks its workers; False where that has begun already."""
        if self._state is not State.NEW:
            return False
        self._note(Event.READ)
        self.seek_verifier()
        if self._verifier is None:
            self._await_verifier()
        return True

    def seek_verifier(self) -> None:
        """Gives the session a verifier, and with it a drafter, where it has none and one runs its model."""
        if self._state not in (State.SEEKING, State.GIVEN_BACK) or self._pause is not None:
            return
        verifier = self._fleet.verifier_for(self.transcript, self._same_numerics, self._lost)
        if verifier is None or verifier.identity.model_fingerprint != self._fingerprint:
            return
        self._verifier = verifier
        self._note(Event.PLACED)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        drafter = self._find_drafter()
        if drafter is not None:
            self._expect(drafter)
        self._k = choose_k(self._estimator, verifier.load.price, self._cap)
        verifier.open(
            self.id,
            self._request.params,
            output=self.transcript.output,
            num_speculative_tokens=self._k,
            draft_key=self._draft_key if self._cap else b"",
            listener=self,
        )
        self._open_at(drafter, verifier)

    @property
    def unbegun(self) -> Unbegun | None:
        """As it waits at its verifier, or seems to; None where it does not, or has moved for that before: it
        does so once, lest it goes to and fro."""
        if self._verifier is None or self._state not in (State.WAITING, State.ASKED_BACK):
            return None
        worker_id, tokens = self._verifier.identity.worker_id, len(self.transcript.log)
        most, asked_back = self._request.params.most_tokens, self._state is State.ASKED_BACK
        return Unbegun(worker_id, tokens, most, asked_back, self.transcript.numerics)

    def ask_back(self) -> None:
        """Has it move to another verifier, unless it has begun where it is."""
        if self._verifier is not None and self._state is State.WAITING:
            self._note(Event.ASKED)
            self._verifier.ask_back(self.id)

    def expire_at(self, deadline: float | None) -> None:
        """Ends it then, on the event loop's clock (None = never); its log can be gone on with."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = None
        if deadline is not None:
            self._expiry = asyncio.get_running_loop().call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._end(DeadlineExceeded(f"the request was not finished by its deadline{self._missing_numerics}"))

    @property
    def _missing_numerics(self) -> str:
        waits = self._verifier is None and self._same_numerics
        return numerics.missing(self.transcript.numerics, waits)

    def close(self) -> None:
        """Frees the session on every worker that still has it, at once."""
        if self._state is State.OVER:
            return
        self._note(Event.ENDED)
        for timer in (self._expiry, self._deadline, self._pause):
            if timer is not None:
                timer.cancel()
        if self._verifier is not None:
            self._verifier.close(self.id)
        self._leave_drafter()
        self._pair.absorb(self._estimator.accepted, self._estimator.observed)
        self._log_writer.close(self._cursor)

    def _note(self, event: Event) -> None:
        self._state = TRANSITIONS[self._state, event]

    # From the verifier.

    def committed(
        self, base: int, tokens: Sequence[int], accepted: int, verified: int, cached_prompt_tokens: int
    ) -> None:
        if not self._state.placed:
            return
        known = len(self.transcript.log) - base  # tokens of the message that are committed already
        vocab_size = self._verifier.registration.info.model.vocab_size if self._verifier is not None else 0
        if not self.transcript.continued_by(base, tokens, accepted, verified, vocab_size):
            log.error(
                "session %s: %d tokens (%d of %d drafts accepted) at %d do not continue a log of %d",
                *(self.id.hex(), len(tokens), accepted, verified, base, len(self.transcript.log)),
            )
            self.failed(lost_track())
            return
        if known >= len(tokens):
            return
        here = self._verifier.numerics if self._verifier is not None else ""
        step = TokensCommitted(
            tokens=tuple(tokens[known:]),
            accepted=max(0, accepted - known),
            verified=max(0, verified - known),
            # At a second verifier it is the first one's work that is, or is not, found in a cache.
            cached_prompt_tokens=min(cached_prompt_tokens, base)
            if base == len(self._request.params.prompt)
            else 0,
            numerics=numerics.news(self.transcript.numerics, here),
        )
        if step.numerics and self.transcript.numerics:
            self._fleet.numerics_changed(self.id, self.transcript, here)
        self._losses.gained()
        self._note(Event.TOKENS)
        self.transcript.add(step)
        self._log_writer.note(self._cursor)
        self.news.set()
        self._estimator.observe(step.accepted, step.verified, len(step.tokens))
        self._leave_if_silent(step)
        self._steer()

    def finished(self, reason: FinishReason) -> None:
        # Nobody ends a session as cancelled: such a one fails.
        self._end(lost_track() if reason is FinishReason.CANCELLED else SessionEnded(reason))

    def failed(self, error: OutriderError) -> None:
        if not isinstance(error, Unavailable):
            self._end(error)
        elif self._state is State.ASKED_BACK or (self._verifier is not None and self._verifier.load.draining):
            self._move(Event.RETURNED)  # one that leaves gives all back: that says nothing of the request
        else:
            self.verifier_lost()

    def verifier_lost(self) -> None:
        """The session goes on at another verifier, unless it may be what they die of."""
        if self._verifier is not None:
            self._lost |= {self._verifier.instance}
        pause, too_many = self._losses.lost(asyncio.get_running_loop().time()), self._losses.too_many
        if too_many is None:
            self._move(Event.LOST, pause)
        else:
            self._verifier = None
            self._end(too_many)

    def _move(self, why: Event, pause: float = 0.0) -> None:
        """Goes on at another verifier, after so many seconds or as soon as there is one."""
        if not self._state.placed:
            return
        self._note(why)
        self._verifier = None
        self._leave_drafter()  # it drafts for the old verifier's address
        self._gave_up = frozenset()  # perhaps only because that verifier was gone
        log.info("session %s: no verifier after %d tokens", self.id.hex(), self.transcript.output_tokens)
        if pause:
            self._pause = asyncio.get_running_loop().call_later(pause, self._go_on)
        self.seek_verifier()
        if self._verifier is None:
            self._await_verifier()

    def _go_on(self) -> None:
        self._pause = None
        self.seek_verifier()

    def _await_verifier(self) -> None:
        missing = self._missing_numerics
        if missing and self._expiry is not None:
            return  # it waits as long as its client does
        none_came = losses.none_came(RESUME_SECONDS, missing)
        self._deadline = asyncio.get_running_loop().call_later(RESUME_SECONDS, self._end, none_came)

    def stop(self) -> None:
        """The router is about to go."""
        self._end(Unavailable("the service is stopping; send the request again"))

    def _superseded(self) -> None:
        """Another router goes on with it."""
        self._end(superseded())

    def _end(self, outcome: SessionEnded | OutriderError) -> None:
        """An end or a cancellation is final, and logged; after any other error somebody may go on."""
        if self._state is State.OVER:
            return
        self.outcome = outcome
        if isinstance(outcome, SessionEnded):
            self.transcript.end = outcome.reason
        elif isinstance(outcome, Cancelled):
            self.transcript.end = FinishReason.CANCELLED
        self._log_writer.note(self._cursor)
        self.news.set()
        self.close()

    def drafter_cut_off(self, turn: int, reason: str) -> None:
        """The verifier takes nothing of the drafter of that turn any more: another one drafts."""
        drafter = self._drafter
        if drafter is not None and turn == self._turn:
            self._fleet.distrust(drafter, reason)
            drafter.close(self.id)
            self.draft_ended(f"the verifier cut it off: {reason}")

    # From the drafter.

    def draft_ended(self, reason: str) -> None:
        drafter = self._drafter
        if drafter is not None:
            log.info("session %s: drafter %s ended it: %s", self.id.hex(), drafter.identity.worker_id, reason)
            self._gave_up |= {drafter.instance}
        self.drafter_lost()

    def drafter_lost(self) -> None:
        """The session goes on plainly; another drafter starts from prompt and output."""
        self._drafter = None
        self.seek_drafter()

    def _leave_if_silent(self, step: TokensCommitted) -> None:
        """Another drafts, if there is one, where nothing came of this one that could be verified."""
        drafter, verifier = self._drafter, self._verifier
        if drafter is None or verifier is None:
            return
        wanted = welcome(self._k, self._estimator.acceptance, verifier.load.price)
        silent = wanted and drafter.silent(step.verified, len(step.tokens))
        if silent and self._fleet.passed_over(drafter, verifier, self._gave_up, self._acceptance):
            drafter.close(self.id)
            self.draft_ended("nothing of it was verified")

    def _leave_drafter(self) -> None:
        if self._drafter is not None:
            self._drafter.close(self.id)
            self._drafter = None

    def seek_drafter(self) -> None:
        """Gives the session a drafter where it has none and one fits."""
        drafter, verifier = self._find_drafter(), self._verifier
        if drafter is not None and verifier is not None:
            self._expect(drafter)
            self._open_at(drafter, verifier)

    def _open_at(self, drafter: Drafter | None, verifier: Verifier) -> None:
        if drafter is None:
            return
        self._drafter = drafter
        self._turn += 1
        self._set_window(self._wanted_window(verifier, drafter))
        drafter.open(
            self.id,
            self._request.params,
            output=self.transcript.output,
            verifier_address=verifier.registration.address,
            draft_key=right(self._draft_key, self._turn),
            window=self._window,
            target_vocab_size=verifier.registration.info.model.vocab_size,
            listener=self,
        )

    def _find_drafter(self) -> Drafter | None:
        if self._state is State.OVER or self._cap == 0 or self._drafter is not None or self._verifier is None:
            return None
        return self._fleet.drafter_for(self._verifier, self._gave_up, self._acceptance)

    def _acceptance(self, target: str, draft: str) -> float:
        return self._pair_for(target, draft).mean

    def _expect(self, drafter: Drafter) -> None:
        """What was learnt about one draft model says nothing about another."""
        pair = self._pair_for(self._fingerprint, drafter.identity.model_fingerprint)
        if pair is not self._pair:
            self._pair.absorb(self._estimator.accepted, self._estimator.observed)
            self._pair = pair
            self._estimator = Estimator(pair.mean)

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
        self._fleet.metrics.draft_window(self._request.model, tokens)

    def _wanted_window(self, verifier: Verifier, drafter: Drafter) -> int:
        if self._lock_step:
            return self._k
        load = drafter.load
        round_trip = load.round_trips.get(verifier.registration.address, load.round_trip_seconds)
        return window(self._k, verifier.load.typical_step_seconds, round_trip, load.token_seconds)
