"""Which drafters draft for a session: of those that are registered a few are looked at, by what is known of
them.

A session has up to so many at a time as the router is told. Its first drafter is the one that brings most by
itself; each further one runs another draft model, and is there for what it adds to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

from router.compatibility import tokenizer_fits
from router.drafter_doubts import DrafterDoubts
from router.drafter_merits import CLEARLY, PAYS, DrafterMerits, OwnedMerits, preferred
from router.placement import DrafterCandidate, choose_drafter, host_of, usable
from router.pool import Below, Pools
from router.request_features import ANY, Floats
from router.workers import Drafter, Verifier

FEW = 8  # drafters of each model that are drawn to be looked at
FEW_MODELS = 8  # of which some are looked at
NEIGHBOURS = 4  # of a verifier's host that are looked at, too

Acceptance = Callable[[str, str], float]
"""Returns the share of draft tokens that a (target fingerprint, draft fingerprint) pair has accepted."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A drafter for a session at the verifier."""

    verifier: Verifier
    gave_up: frozenset[tuple[str, int]]  # (worker_id, incarnation) of those that gave the session up before
    acceptance: Acceptance
    beside: frozenset[str] = frozenset()  # fingerprints of the models that others draft with for it
    further: bool = False  # it is not to be its first drafter
    sessions: str = ""  # which of the target's: merits are those of these; empty = all
    owner: str = ""  # whose they are
    like: Floats = field(default_factory=lambda: ANY)  # what the request is like

    def but(self, one: Drafter) -> Wanted:
        """Returns the same without that one."""
        gave_up = self.gave_up | {one.instance}
        return replace(self, gave_up=gave_up)


class DrafterChoice:
    """Chooses among the drafters of one router."""

    def __init__(self, drafters: Mapping[str, Drafter], doubts: DrafterDoubts, below: Below) -> None:
        """`below` draws those that are looked at, and one of those that are as good."""
        self._drafters = drafters
        self._doubts = doubts
        self._below = below
        self._of_draft: Pools[tuple[str, str], Drafter] = Pools()  # by tokenizer and model fingerprint
        self._on_host: Pools[str, Drafter] = Pools()
        self.merits = OwnedMerits()  # of each by itself
        self.added = OwnedMerits()  # what each brought that the session's others had not guessed

    def add(self, drafter: Drafter) -> None:
        self._of_draft.add(_draft(drafter), drafter)
        self._on_host.add(host_of(drafter.registration.address), drafter)

    def remove(self, drafter: Drafter) -> None:
        self._of_draft.remove(_draft(drafter), drafter)
        self._on_host.remove(host_of(drafter.registration.address), drafter)

    def passed_over(self, silent: Drafter, wanted: Wanted) -> bool:
        """Returns whether another could draft for a session in the place of one of which nothing is verified;
        if so, others are preferred to it for a while."""
        if self.drafter_for(wanted.but(silent)) is None:
            return False
        self._doubts.silent(silent, wanted.owner)
        return True

    def drafter_for(self, wanted: Wanted) -> Drafter | None:
        """Returns a drafter; None where the session is better off without."""
        drafter, on_trial = self._choose(wanted, self._merits(wanted).may_seek(_of(wanted)))
        if drafter is not None and on_trial:
            self._merits(wanted).tried(_of(wanted), drafter.instance, wanted.like)
        return drafter

    def drafter_after(self, former: Drafter, wanted: Wanted) -> Drafter | None:
        """Returns who is to draft on for a session: the former one, another that would clearly do more or is
        on trial, or None where the session is better off without."""
        model, merits = _of(wanted), self._merits(wanted)
        merit = merits.of(model, former.instance, wanted.like)
        if merit is None or (merit >= PAYS and not (merits.may_try(model) or merits.may_change(model))):
            return former
        other, on_trial = self._choose(wanted.but(former), merit < PAYS and merits.may_seek(model))
        found = None if other is None else merits.of(model, other.instance, wanted.like)
        if other is not None and on_trial:
            merits.tried(model, other.instance, wanted.like)
        elif merit >= PAYS:
            if other is None or found is None or found < CLEARLY * merit or not merits.may_change(model):
                return former
            merits.changed(model, other.instance)
        return other

    def _merits(self, wanted: Wanted) -> DrafterMerits:
        return (self.added if wanted.further else self.merits).of(wanted.owner)

    def _choose(self, wanted: Wanted, may_seek: bool) -> tuple[Drafter | None, bool]:
        """Returns the drafter, and whether it is on trial. `may_seek`: where nobody pays, one may be."""
        verifier, merits, sessions = wanted.verifier, self._merits(wanted), _of(wanted)
        target, address = verifier.identity, verifier.registration.address
        acceptance = cache(partial(wanted.acceptance, target.model_fingerprint))  # it is its model's
        chosen, on_trial = None, False
        for drafters in self._looks(verifier):
            candidates = (
                DrafterCandidate(
                    one.identity.worker_id,
                    one.identity.incarnation,
                    one.identity.tokenizer_hash,
                    one.registration.address,
                    one.load,
                    one.placed,
                    acceptance(one.identity.model_fingerprint),
                    distrusted=self._doubts.about(one.identity.worker_id, target.worker_id, wanted.owner),
                    unreported=one.unreported,
                    merit=merits.of(sessions, one.instance, wanted.like),
                    due=merits.due(sessions, one.instance),
                    way=way,
                )
                for one in drafters
                if (way := one.way_to(verifier)) and one.identity.model_fingerprint not in wanted.beside
            )
            some = usable(candidates, target.tokenizer_hash, wanted.gave_up)
            fitting, on_trial = preferred(some, merits.may_try(sessions), may_seek)
            chosen = choose_drafter(fitting, target.tokenizer_hash, address, below=self._below)
            if chosen is None and some:
                break  # none of a few pays: it is not worth to look at all, again and again
            if chosen is not None and not self._doubts.about(chosen, target.worker_id, wanted.owner):
                verifier.drafted_by(chosen)
                break
        return self._drafters[chosen] if chosen is not None else None, on_trial

    def _looks(self, verifier: Verifier) -> Iterator[Iterable[Drafter]]:
        """Yields a few drafters of each model, drawn at random, with those that are near; then all."""
        tokenizer = verifier.identity.tokenizer_hash
        fitting = [draft for draft in self._of_draft if tokenizer_fits(draft[0], tokenizer)]
        drafts = fitting[:]
        while len(drafts) > FEW_MODELS:
            drafts.pop(self._below(len(drafts)))
        few = dict.fromkeys(one for draft in drafts for one in self._of_draft[draft].draw(FEW, self._below))
        if len(few) < sum(len(self._of_draft[draft]) for draft in fitting):
            host = host_of(verifier.registration.address)
            few.update(dict.fromkeys(self._on_host[host].draw(NEIGHBOURS, self._below)))
            known = (self._drafters[one] for one in verifier.drafters if one in self._drafters)
            few.update(dict.fromkeys(known))
            yield few
        yield (one for draft in fitting for one in self._of_draft[draft])


def _of(wanted: Wanted) -> str:
    """Returns the sessions whose merits count."""
    return wanted.sessions or wanted.verifier.identity.model_fingerprint


def _draft(drafter: Drafter) -> tuple[str, str]:
    return drafter.identity.tokenizer_hash, drafter.identity.model_fingerprint
