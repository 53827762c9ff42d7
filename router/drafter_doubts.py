"""Which drafters others are preferred to, for what verifiers and sessions saw of them.

A doubt ends by itself after a while, and the drafter is tried again. That nothing of it is verified may be
due to what is asked for: such a doubt is for the requests of one owner."""

from __future__ import annotations

import logging
from collections.abc import Callable

from outrider.errors import MAX_MESSAGE, printable
from router.metrics import Metrics
from router.workers import Drafter, Verifier

log = logging.getLogger(__name__)

CUT_OFF_SECONDS = 600.0
SILENT_SECONDS = 60.0
UNREACHED_SECONDS = 30.0
MOST_DOUBTS = 4096  # the oldest go first
MOST_TOLD = 3

Doubt = tuple[str, str, str]
"""The drafter's id, that of the verifier which it does not reach, and whose requests; "" = all."""


class DrafterDoubts:
    """The doubts of one router."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._until: dict[Doubt, float] = {}

    def about(self, drafter_id: str, verifier_id: str, owner: str = "") -> bool:
        """Returns whether others are preferred to the drafter for the owner's sessions at the verifier."""
        if not self._until:  # as a rule; it is asked for each drafter that is looked at
            return False
        now = self._clock()
        doubts = (drafter_id, "", ""), (drafter_id, verifier_id, ""), (drafter_id, "", owner)
        return any(self._until.get(doubt, 0.0) > now for doubt in doubts)

    def cut_off(self, drafter: Drafter, reason: str) -> None:
        """Notes that a verifier cut the drafter off for what no drafter may send."""
        worker_id = drafter.identity.worker_id
        if self._note((worker_id, "", ""), CUT_OFF_SECONDS):
            log.warning("drafter %s was cut off by a verifier (%s): others are preferred", worker_id, reason)
            self._metrics.drafter_cut_off()

    def silent(self, drafter: Drafter, owner: str) -> None:
        """Notes that nothing of the drafter was verified for a session of the owner's, though another could
        draft for it."""
        worker_id = drafter.identity.worker_id
        if self._note((worker_id, "", owner), SILENT_SECONDS):
            whom = f" for sessions of {owner}" if owner else ""
            log.warning("nothing that drafter %s sends is verified%s: others are preferred", worker_id, whom)
            self._metrics.drafter_silent()

    def unreached(self, drafter: Drafter, verifier: Verifier, reason: str) -> None:
        """Notes that the drafter's drafts do not reach the verifier."""
        ids = drafter.identity.worker_id, verifier.identity.worker_id
        if self._note((*ids, ""), UNREACHED_SECONDS):
            said = printable(reason, MAX_MESSAGE)
            log.warning("drafter %s does not draft for verifier %s: %s", *ids, said)

    def told(self) -> str:
        """Returns a sentence about the drafters that reach a verifier not, or ""."""
        now = self._clock()
        pairs = [doubt for doubt, until in self._until.items() if doubt[1] and until > now]
        sentences = [f"drafter {pair[0]} does not draft for verifier {pair[1]}" for pair in pairs[:MOST_TOLD]]
        more = len(pairs) - MOST_TOLD
        return "; ".join([*sentences, f"and {more} more"] if more > 0 else sentences)

    def _note(self, doubt: Doubt, seconds: float) -> bool:
        """Returns whether the doubt is new."""
        now = self._clock()
        new = self._until.get(doubt, 0.0) <= now
        until = max(now + seconds, self._until.pop(doubt, 0.0))
        while len(self._until) >= MOST_DOUBTS:
            del self._until[next(iter(self._until))]
        self._until[doubt] = until
        return new
