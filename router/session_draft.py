"""Who drafts for one session, and how far ahead of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from outrider.errors import OutriderError
from outrider.net.draft_right import right
from outrider.wire.drafter_sessions import DraftEndCause
from outrider.wire.guesses import DrafterCounts
from outrider.wire.load import VerifierLoad
from outrider.wire.trace_context import TraceContext
from router.draft_place import Place, counts_by_turn
from router.drafter_choice import Wanted
from router.drafter_merits import Outcome
from router.drafting import Drafting, why_undrafted
from router.fleet import Fleet
from router.placement import bounded
from router.request_features import ANY, features
from router.requests import SessionEnded, TokensCommitted
from router.session_span import SessionSpan
from router.speculation import (
    SILENT_TOKENS,
    Estimator,
    PairAcceptance,
    blamed,
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
REPORTED_STEPS = 4  # after which what came of a drafter is noted for others
LOOK_TOKENS = 16  # between two looks at whether another should draft, or any
MOST_LOST = 4  # drafters in a row that brought nothing: then it only looks, as drafters may come and go

PairFor = Callable[[str, str], PairAcceptance]
"""Gives the acceptance of a (target fingerprint, draft fingerprint) pair."""


class SessionDraft:
    """A drafter may be lost at any time: the session goes on with its others, or plainly until one drafts."""

    def __init__(
        self,
        transcript: Transcript,
        draft_key: bytes,
        fleet: Fleet,
        pair_for: PairFor,
        cap: int,
        lock_step: bool = False,
        drafters: int = 1,
        span: SessionSpan | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        """`cap`: most draft tokens in a step; 0 = no speculation. `lock_step`: the window is k. `drafters`:
        most at a time. `span`: the session's, and None = nobody asks for it; `trace`: what it belongs to."""
        self.span = span
        self.trace = trace if span is None else span.context
        request = transcript.request
        # What the client predicts the verifier guesses itself.
        params = request.params
        self._params = replace(params, prediction=()) if params.prediction else params
        assert request.session_id is not None and request.fingerprint is not None, "named when it is admitted"
        self._id = request.session_id
        self._fingerprint: str = request.fingerprint
        self._request = request
        # Greedy text is guessed much better than drawn text: who is good at the one may be of no use for the
        # other, so that merits are counted apart.
        self._kind = self._fingerprint + " greedy" * request.params.sampling.greedy
        self._like = features(request.params.prompt) if cap else ANY
        self._transcript = transcript
        self._draft_key = draft_key
        self._fleet = fleet
        self._pair_for = pair_for
        self._cap = cap
        self._lock_step = lock_step
        self._verifier: Verifier | None = None  # None = nobody drafts
        self._next: Drafter | None = None  # who will draft, once the verifier has been told of the session
        self._turn = -1  # how many drafters it has had before the last one
        self._lost = 0  # in a row, of which nothing was verified
        self._gave_up: frozenset[tuple[str, int]] = frozenset()  # drafters that ended it of their own accord
        self._pair = pair_for(self._fingerprint, "")
        self._places = [Place(seat, self, self._pair) for seat in range(drafters)]
        self._estimator = Estimator(self._pair.mean)
        self._k = 0
        self._steered_by: VerifierLoad | None = None  # what its verifier had said when k was chosen last

    @property
    def key(self) -> bytes:
        """Returns that from which its drafters' rights follow; empty = nobody's."""
        return self._draft_key if self._cap else b""

    def seen(self) -> Drafting:
        seated, verifier = self._seated, self._verifier
        load = None if verifier is None else verifier.load
        return Drafting(
            "" if verifier is None else verifier.identity.worker_id,
            tuple(drafter.identity.worker_id for _, drafter in seated),
            self._k,
            max((place.window for place, _ in seated), default=0),
            self._estimator.acceptance,
            why_undrafted(self._cap, load, bool(self._fleet.drafters), bool(seated), self._k),
        )

    @property
    def _seated(self) -> list[tuple[Place, Drafter]]:
        return [(place, place.drafter) for place in self._places if place.drafter is not None]

    def begin(self, verifier: Verifier) -> int:
        """The session is about to be opened there. Returns k, by what is known of who will draft."""
        self._verifier, self._next = verifier, self._find(self._places[0], verifier)
        if self._next is not None:
            self._expect(self._next)
        self._k = choose_k(self._estimator, verifier.load.price, self._cap)
        return self._k

    def start(self) -> None:
        """The verifier has been told."""
        drafter, self._next = self._next, None
        if drafter is not None and self._verifier is not None:
            self._open(self._places[0], drafter, self._verifier)
        for place in self._places[1:]:
            self._fill(place)

    def pause(self) -> None:
        """The session has left its verifier, for whose address its drafters draft."""
        for place in self._places:
            self._leave(place)
        self._verifier = None
        self._gave_up = frozenset()  # perhaps only because that verifier was gone

    def close(self, outcome: SessionEnded | OutriderError | None = None) -> None:
        """`outcome` of the session; None = it was left."""
        for place in self._places:
            self._leave(place)
        self._verifier = None
        if self.span is not None:
            self.span.over(outcome)

    def committed(self, step: TokensCommitted) -> None:
        """A step of the session; changes its drafters, k and windows where that is due."""
        choice, verifier = self._fleet.choice, self._verifier
        for merits in (choice.merits, choice.added):
            merits.of(self._request.owner).passed(self._kind)
        if verifier is None:
            return
        if not verifier.load.drafts_rest:  # else that nothing was verified says nothing
            self._estimator.observe(step.accepted, step.verified, len(step.tokens), any(step.own))
            seated = self._seated
            if seated:
                counts = counts_by_turn(step, self._places[0].turn)
                for place, drafter in seated:
                    self._judge(place, drafter, verifier, step, counts)
                self._leave_if_silent(verifier, step)
            for place in self._places:
                self._reconsider(place, verifier, len(step.tokens))
            if step.verified or verifier.load is not self._steered_by or seated or self._estimator.due:
                self._steer()

    def named(self, counts: Iterable[DrafterCounts]) -> tuple[DrafterCounts, ...]:
        """Returns those of the drafters that it has now, each with its model's name."""
        names = {place.turn: drafter.registration.info.model.name for place, drafter in self._seated}
        return tuple(one._replace(name=names[one.turn]) for one in counts if one.turn in names)

    def cut_off(self, turn: int, reason: str) -> None:
        """The verifier takes nothing of the drafter of that turn any more: another one drafts."""
        for place, drafter in self._seated:
            if place.turn == turn:
                self._fleet.doubts.cut_off(drafter, reason)
                drafter.close(self._id)
                self._gave_up_by(place, drafter, f"the verifier cut it off: {reason}")

    # From a drafter, by its place.

    def draft_ended(self, place: Place, cause: DraftEndCause, reason: str) -> None:
        drafter, verifier = place.drafter, self._verifier
        if drafter is None or verifier is None:
            self.drafter_lost(place)
            return
        self._fleet.metrics.draft_ended(cause)
        if cause is DraftEndCause.UNREACHED:
            self._fleet.doubts.unreached(drafter, verifier, reason)
        # If the verifier has the session no more, it is over as a rule, and we are about to hear so: nobody
        # is to read it in vain. If it goes on, the next look finds another drafter.
        self._gave_up_by(place, drafter, reason, follow=cause is not DraftEndCause.REVOKED)

    def _gave_up_by(self, place: Place, drafter: Drafter, reason: str, follow: bool = True) -> None:
        log.info("session %s: drafter %s ended it: %s", self._id.hex(), drafter.identity.worker_id, reason)
        self._gave_up |= {drafter.instance}
        if self.span is not None:
            self.span.drafter("drafter gone", drafter.identity.worker_id, reason)
        self.drafter_lost(place, follow)

    def drafter_lost(self, place: Place, follow: bool = True) -> None:
        """The session goes on without it; if `follow`, another drafter starts from prompt and output."""
        self._lost = 0 if place.heard else self._lost + 1
        if place.drafter is not None:
            self._report(place, place.drafter)
        place.leave()
        if follow:  # not at once: other sessions may have lost it, too
            self._fleet.turns.soon(partial(self._follow, place, place.turn))

    def _follow(self, place: Place, turn: int) -> None:
        """Has another draft at a place that the drafter of that turn has left."""
        if self._lost < MOST_LOST:
            self._fill(place)
        self._end_unfilled(place, turn)

    @property
    def seeks(self) -> bool:
        """Whether a drafter that comes is of interest to it."""
        wants = self._cap > 0 and self._verifier is not None and self._lost < MOST_LOST
        return wants and any(place.drafter is None for place in self._places)

    def seek(self) -> None:
        """Gives the session drafters where it has room for one, and one fits."""
        for place in self._places if self.seeks else ():
            self._fill(place)

    def _fill(self, place: Place) -> None:
        verifier = self._verifier
        drafter = None if verifier is None or place.drafter is not None else self._find(place, verifier)
        if drafter is not None and verifier is not None:
            self._expect(drafter)
            self._open(place, drafter, verifier)

    def _open(self, place: Place, drafter: Drafter, verifier: Verifier) -> None:
        self._turn += 1
        place.take(drafter, self._turn, self._pair_of(drafter))
        self._set_window(place, self._wanted_window(verifier, drafter))
        drafter.open(
            self._id,
            self._params,
            output=self._transcript.output,
            verifier_address=drafter.way_to(verifier),
            draft_key=right(self._draft_key, self._turn, place.seat),
            window=place.window,
            target_vocab_size=verifier.registration.info.model.vocab_size,
            target=self._fingerprint,
            listener=place,
            trace=self.trace,
        )
        if self.span is not None:
            self.span.drafter("drafter taken", drafter.identity.worker_id)

    def _find(self, place: Place, verifier: Verifier) -> Drafter | None:
        return None if self._cap == 0 else self._fleet.choice.drafter_for(self._wanted(place, verifier))

    def _wanted(self, place: Place, verifier: Verifier) -> Wanted:
        others = [drafter for other, drafter in self._seated if other is not place]
        beside = frozenset(drafter.identity.model_fingerprint for drafter in others)
        return Wanted(
            verifier,
            self._gave_up,
            self._acceptance,
            beside,
            further=place.seat > 0,
            sessions=self._kind,
            owner=self._request.owner,
            like=self._like,
        )

    def _acceptance(self, target: str, draft: str) -> float:
        return self._pair_for(target, draft).mean

    def _pair_of(self, drafter: Drafter) -> PairAcceptance:
        return self._pair_for(self._fingerprint, drafter.identity.model_fingerprint)

    def _expect(self, drafter: Drafter) -> None:
        """What was learnt about one draft model says nothing about another, if that drafts alone."""
        pair = self._pair_of(drafter)
        if pair is not self._pair and not self._seated:
            self._pair, self._estimator = pair, Estimator(pair.mean)

    def _end_unfilled(self, place: Place, turn: int) -> None:
        """Where nobody follows the drafter of that turn, its verifier tells it nothing more of the session.
        From another that follows it hears so itself."""
        if place.drafter is None and self._verifier is not None:
            self._verifier.end_drafts(self._id, place.seat, turn)

    def _leave(self, place: Place) -> None:
        if place.drafter is not None:
            self._report(place, place.drafter)
            place.drafter.close(self._id)
            place.leave()

    def _judge(
        self,
        place: Place,
        drafter: Drafter,
        verifier: Verifier,
        step: TokensCommitted,
        counts: Mapping[int, DrafterCounts] | None,
    ) -> None:
        """Notes what the step says of the drafter, if it says anything."""
        if counts is None:
            return
        own = counts.get(place.turn, DrafterCounts(place.turn, 0, 0, 0))
        place.observe(own, step.accepted, step.verified)
        if own.verified:
            name = drafter.registration.info.model.name
            self._fleet.metrics.guesses.count(self._request.model, name, own.verified, own.accepted)
        acceptance, price = self._estimator.acceptance, verifier.load.price
        told = step.verified > 0 or blamed(self._k, acceptance, price, place.heard)
        if not (own.verified or ((place.heard or place.had >= READING_TOKENS) and told)):
            return
        cost = bounded(verifier.load.draft_cost, 0.0, 1.0)
        place.alone.add(own.accepted - cost * own.verified)
        if len(self._seated) > 1:
            others = [one.accepted for one in counts.values() if one.turn != place.turn]
            without = max([*others, step.own.predicted_accepted, step.own.forced_accepted])
            added = max(0, own.accepted - without) - cost * own.alone
            place.added.add(added)
        if place.alone.steps >= REPORTED_STEPS:
            self._report(place, drafter)

    def _report(self, place: Place, drafter: Drafter) -> None:
        """Notes what came of the drafter since the last time."""
        choice = self._fleet.choice
        for merits, seen in ((choice.merits, place.alone), (choice.added, place.added)):
            if seen.steps:
                merits.of(self._request.owner).observe(self._kind, drafter.instance, seen, self._like)
        place.alone, place.added = Outcome(), Outcome()

    def _reconsider(self, place: Place, verifier: Verifier, tokens: int) -> None:
        """Now and then looks if another should draft, if nobody should, or if somebody should again."""
        before, drafter = place.had, place.drafter
        place.had += tokens
        if before // LOOK_TOKENS == place.had // LOOK_TOKENS or self._transcript.is_full:
            return
        if drafter is None:
            self._fill(place)
            return
        other = self._fleet.choice.drafter_after(drafter, self._wanted(place, verifier))
        if other is drafter:
            return
        log.debug("session %s: drafter %s is left", self._id.hex(), drafter.identity.worker_id)
        self._leave(place)
        place.had = 0
        if other is not None:
            self._expect(other)
            self._open(place, other, verifier)
        self._end_unfilled(place, place.turn)

    def _leave_if_silent(self, verifier: Verifier, step: TokensCommitted) -> None:
        """Another drafts, if there is one, where nothing came of the only one that could be verified, though
        a draft was welcome. What it says of itself is not asked, nor what it does for other sessions."""
        if len(self._seated) != 1:
            return  # of several each is judged by what it adds
        ((place, drafter),) = self._seated
        if step.verified or not welcome(self._k, self._estimator.acceptance, verifier.load.price):
            place.unverified = 0 if step.verified else place.unverified
            return
        place.unverified += len(step.tokens)
        if place.unverified < SILENT_TOKENS:
            return
        place.unverified = 0
        if self._fleet.choice.passed_over(drafter, self._wanted(place, verifier)):
            drafter.close(self._id)
            self._gave_up_by(place, drafter, "nothing of it was verified")

    def _steer(self) -> None:
        """Sends k and the windows where they have changed."""
        verifier = self._verifier
        if verifier is None:
            return
        self._steered_by = verifier.load
        k = settled(self._k, choose_k(self._estimator, verifier.load.price, self._cap))
        if k != self._k:
            self._k = k
            verifier.set_speculation(self._id, k)
        for place, drafter in self._seated:
            wanted = self._wanted_window(verifier, drafter)
            if wanted != place.window if self._lock_step else worth_sending(place.window, wanted):
                self._set_window(place, wanted)
                drafter.set_window(self._id, wanted)

    def _set_window(self, place: Place, tokens: int) -> None:
        place.window = tokens
        self._fleet.metrics.draft_window(self._request.model, tokens)

    def _wanted_window(self, verifier: Verifier, drafter: Drafter) -> int:
        if self._lock_step:
            return self._k
        load = drafter.load
        round_trip = load.round_trips.get(drafter.way_to(verifier), load.round_trip_seconds)
        return window(self._k, verifier.load.typical_step_seconds, round_trip, load.token_seconds)
