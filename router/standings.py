"""Which verifiers get no sessions for a while, for what was seen of them: that they idle they only say.

Who takes sessions on and commits nothing, or says what no sound verifier says, is set aside. After a pause it
is tried again with one session, and the pause doubles until it has been good for a while.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from outrider.net.backoff import Backoff
from outrider.net.heartbeat import Stillness
from outrider.wire.load import VerifierLoad
from router.metrics import Metrics
from router.placement import bounded
from router.workers import Verifier

log = logging.getLogger(__name__)

FAILURES = 3  # sessions in a row that failed, or were left, without a token of any in between
APART_SECONDS = 2.0  # texts that a verifier loses at once are one failure: a step of all of them failed
FIRST_ASIDE_SECONDS = 5.0
MOST_ASIDE_SECONDS = 120.0
GOOD_SECONDS = 120.0  # after which a verifier is as good as one that was never set aside
REMEMBERED = 256  # verifiers; the oldest go first

PATIENCE = 8.0  # times what a verifier's report promises, in which it commits a token
LEAST_PATIENCE_SECONDS = 60.0
MOST_PATIENCE_SECONDS = 600.0  # also of one of which sessions wait for KV blocks: others come before it
LEFT_SECONDS = 10.0  # after which a client that leaves says something of the verifier
READING_SHARE = 0.5  # of the time in which prompts are read while others decode
MAX_SECONDS = 60.0  # of a step


def patience(load: VerifierLoad, unread: int, least: float = LEAST_PATIENCE_SECONDS) -> float:
    """Returns the seconds in which a sound verifier that reports such a load commits a token of a session, of
    which `unread` tokens are still to be read: it is held to its own word. `least`: not below that."""
    if load.waiting:
        return MOST_PATIENCE_SECONDS
    reading = (load.unread_prompt_tokens + unread) * bounded(load.prompt_token_seconds, 0.0, 1.0)
    promised = reading / READING_SHARE + bounded(load.typical_step_seconds, 0.0, MAX_SECONDS)
    return min(max(PATIENCE * promised, least), MOST_PATIENCE_SECONDS)


class Waited(Stillness):
    """For how long a verifier has committed nothing of a session, against what it promised meanwhile.

    Of its reports the one that promises the latest token counts: when a session's turn comes, what was read
    before it is in no report any more, and who came last has waited for all of that."""

    def __init__(self, tick_seconds: float) -> None:
        super().__init__(tick_seconds)
        self._promised = 0.0

    def moved(self) -> None:
        super().moved()
        self._promised = 0.0

    def heard(self, load: VerifierLoad, unread: int) -> None:
        """Takes in what it reports; `unread` as for `patience`."""
        self._promised = max(self._promised, patience(load, unread, 0.0))

    def too_long(self, least: float) -> bool:
        """Returns whether a sound verifier would have committed a token by now; it has `least` seconds."""
        return self.seconds >= max(self._promised, least)


class Standing:
    """What was seen of one verifier. Pure: times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._amid = 0  # of texts that had begun, in a row
        self._amid_at = -math.inf  # when the last was counted
        self._until: float | None = None  # set aside until then, and on trial from then on; None = neither
        self._tried = False  # a session is there on trial
        self._good_since = 0.0
        self._backoff = Backoff(FIRST_ASIDE_SECONDS, MOST_ASIDE_SECONDS, GOOD_SECONDS)

    def aside(self, now: float) -> bool:
        return self._until is not None and now < self._until

    def may_place(self, now: float) -> bool:
        return self._until is None or (now >= self._until and not self._tried)

    def due(self, now: float) -> bool:
        """Returns whether it waits for a session to be tried with."""
        return self._until is not None and self.may_place(now)

    def placed(self) -> None:
        self._tried = self._until is not None

    def served(self, now: float) -> None:
        """It has committed the first token of a session."""
        self._failures = 0
        if self._until is not None and now >= self._until:
            self._until, self._tried, self._good_since = None, False, now

    def gone(self) -> None:
        """A session has left."""
        self._tried = False

    def failed(self, now: float) -> float:
        """A session has ended there without a token. Returns for how many seconds it is set aside for that; 0
        = it is not."""
        self._failures += 1
        on_trial = self._until is not None and now >= self._until
        return self.broke(now) if self._failures >= FAILURES or on_trial else 0.0

    def failed_amid(self, now: float) -> float:
        """As `failed`, of a session that had tokens of it."""
        if now - self._amid_at < APART_SECONDS:
            return 0.0
        self._amid, self._amid_at = self._amid + 1, now
        return self.broke(now) if self._amid >= FAILURES else 0.0

    def finished(self) -> None:
        """It has brought a text to its end."""
        self._amid = 0

    def broke(self, now: float) -> float:
        """It did what no sound verifier does. Returns the seconds for which it is set aside; 0 = it is."""
        if self.aside(now):
            return 0.0
        good = now - self._good_since if self._until is None else 0.0
        seconds = self._backoff.after(good)
        self._failures, self._amid, self._until, self._tried = 0, 0, now + seconds, False
        return seconds


class Standings:
    """Those of all verifiers that were not faultless. `clock` gives seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._known: dict[str, Standing] = {}  # by worker_id: who comes back is no better for it

    def aside(self, verifier: Verifier) -> bool:
        standing = self._of(verifier)
        return standing is not None and standing.aside(self._clock())

    def may_place(self, verifier: Verifier) -> bool:
        standing = self._of(verifier)
        return standing is None or standing.may_place(self._clock())

    def due(self, verifier: Verifier) -> bool:
        standing = self._of(verifier)
        return standing is not None and standing.due(self._clock())

    def placed(self, verifier: Verifier) -> None:
        if (standing := self._of(verifier)) is not None:
            standing.placed()

    def served(self, verifier: Verifier) -> None:
        if (standing := self._of(verifier)) is not None:
            standing.served(self._clock())

    def left(self, verifier: Verifier, waited: Waited) -> None:
        """A client has left a session that had waited so for a token."""
        if waited.too_long(LEFT_SECONDS):
            self.failed(verifier)

    def gone(self, verifier: Verifier) -> None:
        """A session has left, whyever: if that says something of the verifier, it was told before."""
        if (standing := self._of(verifier)) is not None:
            standing.gone()

    def failed(self, verifier: Verifier) -> None:
        seconds = self._made(verifier).failed(self._clock())
        self._tell(verifier, "failed", "sessions end there one after another without a token", seconds)

    def failed_amid(self, verifier: Verifier) -> None:
        seconds = self._made(verifier).failed_amid(self._clock())
        self._tell(verifier, "failed", "texts end there one after another in the middle", seconds)

    def finished(self, verifier: Verifier) -> None:
        if (standing := self._of(verifier)) is not None:
            standing.finished()

    def broke(self, verifier: Verifier, reason: str, why: str) -> None:
        """`reason`: for the metric; `why`: for people."""
        self._tell(verifier, reason, why, self._made(verifier).broke(self._clock()))

    def _of(self, verifier: Verifier) -> Standing | None:
        return self._known.get(verifier.identity.worker_id)

    def _made(self, verifier: Verifier) -> Standing:
        worker_id = verifier.identity.worker_id
        standing = self._known[worker_id] = self._known.pop(worker_id, Standing())
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        return standing

    def _tell(self, verifier: Verifier, reason: str, why: str, seconds: float) -> None:
        if seconds:
            worker_id = verifier.identity.worker_id
            log.warning("verifier %s gets no sessions for %g s: %s", worker_id, seconds, why)
            self._metrics.verifier_set_aside(reason)
