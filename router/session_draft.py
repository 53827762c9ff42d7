"""Who drafts for one session, and how far ahead of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from outrider.net.draft_right import right
from outrider.wire.drafter_sessions import DraftEndCause
from router.fleet import Fleet
from router.placement import bounded
from router.requests import TokensCommitted
from router.speculation import (
    SILENT_TOKENS,
    Estimator,
    PairAcceptance,
    choose_k,
    settled,
    welcome,
    window,
    worth_sending,
)
from router.transcript import Transcript
from router.workers import Drafter, Verifier

log = logging.getLogger(__name__)

READING_TOKENS = 16  # committed while a drafter reads the text: that nothing comes says nothing yet
LOOK_TOKENS = 16  # between two looks at whether another should draft, or any

PairFor = Callable[[str, str], PairAcceptance]
"""Gives the acceptance of a (target fingerprint, draft fingerprint) pair."""


class Drafting(NamedTuple):
    """How a session is drafted for at the moment."""

    verifier: str  # worker_id; empty = it has none
    drafter: str  # worker_id; empty = nobody drafts
    k: int
    window: int
    acceptance: float  # expected of its next draft token


class SessionDraft:
    """A drafter may be lost at any time: the session goes on plainly until another one drafts."""

    def __init__(
        self,
        transcript: Transcript,
        draft_key: bytes,
        fleet: Fleet,
        pair_for: PairFor,
        cap: int,
        lock_step: bool = False,
    ) -> None:
        """`cap`: most draft tokens in a step; 0 = no speculation. `lock_step`: the window is k."""
        request = transcript.request
        assert request.session_id is not None and request.fingerprint is not None, "named when it is admitted"
        self._id = request.session_id
        self._fingerprint: str = request.fingerprint
        self._request = request
        self._transcript = transcript
        self._draft_key = draft_key
        self._fleet = fleet
        self._pair_for = pair_for
        self._cap = cap
        self._lock_step = lock_step
        self._verifier: Verifier | None = None  # None = nobody drafts
        self._drafter: Drafter | None = None
        self._next: Drafter | None = None  # who will draft, once the verifier has been told of the session
        self._turn = -1  # how many drafters it has had before the last one
        self._gave_up: frozenset[tuple[str, int]] = frozenset()  # drafters that ended it of their own accord
        self._unverified = 0  # tokens committed, though a draft was welcome, since one of its was verified
        self._had = 0  # tokens committed since its drafter was chosen, or nobody was
        self._heard = False  # of that drafter, something was verified
        self._pair = pair_for(self._fingerprint, "")
        self._estimator = Estimator(self._pair.mean)
        self._k = 0
        self._window = 0

    @property
    def key(self) -> bytes:
        """Returns that from which its drafters' rights follow; empty = nobody's."""
        return self._draft_key if self._cap else b""

    def seen(self) -> Drafting:
        verifier, drafter = self._verifier, self._drafter
        return Drafting(
            "" if verifier is None else verifier.identity.worker_id,
            "" if drafter is None else drafter.identity.worker_id,
            self._k,
            0 if drafter is None else self._window,
            self._estimator.acceptance,
        )

    def begin(self, verifier: Verifier) -> int:
        """The session is about to be opened there. Returns k, by what is known of who will draft."""
        self._verifier, self._next = verifier, self._find_at(verifier)
        if self._next is not None:
            self._expect(self._next)
        self._k = choose_k(self._estimator, verifier.load.price, self._cap)
        return self._k

    def start(self) -> None:
        """The verifier has been told."""
        drafter, self._next = self._next, None
        if drafter is not None and self._verifier is not None:
            self._open_at(drafter, self._verifier)

    def pause(self) -> None:
        """The session has left its verifier, for whose address its drafter drafts."""
        self._leave()
        self._verifier = None
        self._gave_up = frozenset()  # perhaps only because that verifier was gone

    def close(self) -> None:
        self._leave()
        self._verifier = None
        self._pair.absorb(self._estimator.accepted, self._estimator.observed)

    def committed(self, step: TokensCommitted) -> None:
        """A step of the session; changes its drafter, k and window where that is due."""
        if self._verifier is not None and self._verifier.load.drafts_rest:
            self._fleet.merits.passed(self._fingerprint)  # that nothing was verified says nothing
            return
        self._estimator.observe(step.accepted, step.verified, len(step.tokens), any(step.own))
        self._judge(step)
        self._leave_if_silent(step)
        self._reconsider(step)
        self._steer()

    def cut_off(self, turn: int, reason: str) -> None:
        """The verifier takes nothing of the drafter of that turn any more: another one drafts."""
        drafter = self._drafter
        if drafter is not None and turn == self._turn:
            self._fleet.doubts.cut_off(drafter, reason)
            drafter.close(self._id)
            self._gave_up_by(drafter, f"the verifier cut it off: {reason}")

    # From the drafter.

    def draft_ended(self, cause: DraftEndCause, reason: str) -> None:
        drafter, verifier = self._drafter, self._verifier
        if drafter is None or verifier is None:
            self.drafter_lost()
            return
        self._fleet.metrics.draft_ended(cause)
        if cause is DraftEndCause.UNREACHED:
            self._fleet.doubts.unreached(drafter, verifier, reason)
        self._gave_up_by(drafter, reason)

    def _gave_up_by(self, drafter: Drafter, reason: str) -> None:
        log.info("session %s: drafter %s ended it: %s", self._id.hex(), drafter.identity.worker_id, reason)
        self._gave_up |= {drafter.instance}
        self.drafter_lost()

    def drafter_lost(self) -> None:
        """The session goes on plainly; another drafter starts from prompt and output."""
        self._drafter = None
        self.seek()

    def seek(self) -> None:
        """Gives the session a drafter where it has none and one fits."""
        verifier = self._verifier
        drafter = None if verifier is None or self._drafter is not None else self._find_at(verifier)
        if drafter is not None and verifier is not None:
            self._expect(drafter)
            self._open_at(drafter, verifier)

    def _open_at(self, drafter: Drafter, verifier: Verifier) -> None:
        self._drafter = drafter
        self._turn += 1
        self._unverified = self._had = 0
        self._heard = False
        self._set_window(self._wanted_window(verifier, drafter))
        drafter.open(
            self._id,
            replace(self._request.params, prediction=()),
            output=self._transcript.output,
            verifier_address=drafter.way_to(verifier),
            draft_key=right(self._draft_key, self._turn),
            window=self._window,
            target_vocab_size=verifier.registration.info.model.vocab_size,
            target=self._fingerprint,
            listener=self,
        )

    def _find_at(self, verifier: Verifier) -> Drafter | None:
        if self._cap == 0:
            return None
        return self._fleet.drafter_for(verifier, self._gave_up, self._acceptance)

    def _acceptance(self, target: str, draft: str) -> float:
        return self._pair_for(target, draft).mean

    def _expect(self, drafter: Drafter) -> None:
        """What was learnt about one draft model says nothing about another."""
        pair = self._pair_for(self._fingerprint, drafter.identity.model_fingerprint)
        if pair is not self._pair:
            self._pair.absorb(self._estimator.accepted, self._estimator.observed)
            self._pair = pair
            self._estimator = Estimator(pair.mean)

    def _leave(self) -> None:
        if self._drafter is not None:
            self._drafter.close(self._id)
            self._drafter = None

    def _judge(self, step: TokensCommitted) -> None:
        """Notes what the step says of the drafter, if it says anything."""
        drafter, verifier, merits = self._drafter, self._verifier, self._fleet.merits
        self._heard |= step.verified > 0
        if drafter is None or verifier is None or any(step.own):
            merits.passed(self._fingerprint)  # what the verifier guessed itself is no drafter's merit
        elif step.verified or (
            (self._heard or self._had >= READING_TOKENS)
            and welcome(self._k, self._estimator.acceptance, verifier.load.price)
        ):
            cost = bounded(verifier.load.draft_cost, 0.0, 1.0)
            gained = step.accepted - cost * (step.verified + step.beside)
            merits.observe(self._fingerprint, drafter.instance, gained)
        else:
            merits.passed(self._fingerprint)

    def _reconsider(self, step: TokensCommitted) -> None:
        """Now and then looks if another should draft, if nobody should, or if somebody should again."""
        before, drafter, verifier = self._had, self._drafter, self._verifier
        self._had += len(step.tokens)
        if verifier is None or before // LOOK_TOKENS == self._had // LOOK_TOKENS:
            return
        if drafter is None:
            self.seek()
            return
        other = self._fleet.drafter_after(drafter, verifier, self._gave_up, self._acceptance)
        if other is drafter:
            return
        log.debug("session %s: drafter %s is left", self._id.hex(), drafter.identity.worker_id)
        self._leave()
        self._had = 0
        if other is not None:
            self._expect(other)
            self._open_at(other, verifier)

    def _leave_if_silent(self, step: TokensCommitted) -> None:
        """Another drafts, if there is one, where nothing came of this one that could be verified, though a
        draft was welcome. What it says of itself is not asked, nor what it does for other sessions."""
        drafter, verifier = self._drafter, self._verifier
        if drafter is None or verifier is None:
            return
        if step.verified or not welcome(self._k, self._estimator.acceptance, verifier.load.price):
            self._unverified = 0 if step.verified else self._unverified
            return
        self._unverified += len(step.tokens)
        if self._unverified < SILENT_TOKENS:
            return
        self._unverified = 0
        if self._fleet.passed_over(drafter, verifier, self._gave_up, self._acceptance):
            drafter.close(self._id)
            self._gave_up_by(drafter, "nothing of it was verified")

    def _steer(self) -> None:
        """Sends k and the window where they have changed."""
        verifier = self._verifier
        if verifier is None:
            return
        k = settled(self._k, choose_k(self._estimator, verifier.load.price, self._cap))
        if k != self._k:
            self._k = k
            verifier.set_speculation(self._id, k)
        if self._drafter is not None:
            wanted = self._wanted_window(verifier, self._drafter)
            if wanted != self._window if self._lock_step else worth_sending(self._window, wanted):
                self._set_window(wanted)
                self._drafter.set_window(self._id, wanted)

    def _set_window(self, tokens: int) -> None:
        self._window = tokens
        self._fleet.metrics.draft_window(self._request.model, tokens)

    def _wanted_window(self, verifier: Verifier, drafter: Drafter) -> int:
        if self._lock_step:
            return self._k
        load = drafter.load
        round_trip = load.round_trips.get(drafter.way_to(verifier), load.round_trip_seconds)
        return window(self._k, verifier.load.typical_step_seconds, round_trip, load.token_seconds)
