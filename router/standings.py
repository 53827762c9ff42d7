"""Which verifiers get no sessions for a while, for what was seen of them: that they idle they only say.

Who takes sessions on and commits nothing, or says what no sound verifier says, is set aside. After a pause it
is tried again with one session, and the pause doubles until it has been good for a while.

That sessions fail may be for what they ask. So a verifier at which those of one owner of a key fail is set
aside for that owner, and for all once it has failed several of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

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
MOST_OWNERS = 64  # that are told apart at one of them

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

    @property
    def longest(self) -> bool:
        """Returns whether it promised a token so late that it is not held to that: what is to be read may
        take so long."""
        return self._promised >= MOST_PATIENCE_SECONDS

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

    def doubted(self, now: float) -> bool:
        """Returns whether it was set aside lately, and has not been good since."""
        return self._until is not None and now < self._until + MOST_ASIDE_SECONDS

    def due(self, now: float) -> bool:
        """Returns whether it waits for a session to be tried with."""
        return self._until is not None and self.may_place(now)

    def placed(self) -> None:
        self._tried = self._until is not None

    def served(self, now: float) -> None:
        """Notes that the verifier has committed the first token of a session."""
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
        """Does what `failed` does, for a session that had tokens from the verifier."""
        if now - self._amid_at < APART_SECONDS:
            return 0.0
        self._amid, self._amid_at = self._amid + 1, now
        return self.broke(now) if self._amid >= FAILURES else 0.0

    def finished(self) -> None:
        """Notes that the verifier has brought a text to its end."""
        self._amid = 0

    def broke(self, now: float) -> float:
        """Notes what no sound verifier does. Returns how many seconds it is set aside: 0 if it is already."""
        if self.aside(now):
            return 0.0
        good = now - self._good_since if self._until is None else 0.0
        seconds = self._backoff.after(good)
        self._failures, self._amid, self._until, self._tried = 0, 0, now + seconds, False
        return seconds


class Standings:
    """The standing of each verifier that was not faultless. `clock` gives seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        # By worker_id, as who comes back is no better for it, and by whose sessions count; "" = all.
        self._known: dict[str, dict[str, Standing]] = {}

    def aside(self, verifier: Verifier) -> bool:
        """For all owners."""
        standing = self._of(verifier).get("")
        return standing is not None and standing.aside(self._clock())

    def may_place(self, verifier: Verifier, owner: str = "") -> bool:
        if verifier.identity.worker_id not in self._known:
            return True
        now = self._clock()
        return all(standing.may_place(now) for standing in self._for(verifier, owner))

    def due(self, verifier: Verifier) -> bool:
        """For any owner."""
        now = self._clock()
        return any(standing.due(now) for standing in self._of(verifier).values())

    def placed(self, verifier: Verifier, owner: str) -> None:
        for standing in self._for(verifier, owner):
            standing.placed()

    def served(self, verifier: Verifier, owner: str) -> None:
        for standing in self._for(verifier, owner):
            standing.served(self._clock())

    def left(self, verifier: Verifier, owner: str, waited: Waited) -> None:
        """A client has left a session that had waited so for a token."""
        if waited.too_long(LEFT_SECONDS):
            self.failed(verifier, owner)

    def gone(self, verifier: Verifier, owner: str) -> None:
        """A session has left, whyever: if that says something of the verifier, it was told before."""
        for standing in self._for(verifier, owner):
            standing.gone()

    def failed(self, verifier: Verifier, owner: str, amid: bool = False) -> None:
        """`amid`: it had tokens of the session."""
        now, standing = self._clock(), self._made(verifier, owner)
        seconds = standing.failed_amid(now) if amid else standing.failed(now)
        why = "texts end there one after another in the middle"
        why = why if amid else "sessions end there one after another without a token"
        self._set_aside(verifier, owner, "failed", why, seconds)

    def finished(self, verifier: Verifier, owner: str) -> None:
        for standing in self._for(verifier, owner):
            standing.finished()

    def broke(self, verifier: Verifier, reason: str, why: str, owner: str = "") -> None:
        """`reason`: for the metric; `why`: for people; `owner`: of what may be for what is asked for."""
        seconds = self._made(verifier, owner).broke(self._clock())
        self._set_aside(verifier, owner, reason, why, seconds)

    def _set_aside(self, verifier: Verifier, owner: str, reason: str, why: str, seconds: float) -> None:
        self._tell(verifier, owner, reason, why, seconds)
        now = self._clock()
        owners = [one for whose, one in self._of(verifier).items() if whose and one.doubted(now)]
        if seconds and owner and len(owners) >= FAILURES:
            self.broke(verifier, reason, why)

    def _of(self, verifier: Verifier) -> Mapping[str, Standing]:
        return self._known.get(verifier.identity.worker_id, {})

    def _for(self, verifier: Verifier, owner: str) -> list[Standing]:
        """Returns those that count for an owner's sessions."""
        known = self._of(verifier)
        return [known[whose] for whose in {"", owner} if whose in known] if known else []

    def _made(self, verifier: Verifier, owner: str) -> Standing:
        worker_id = verifier.identity.worker_id
        known = self._known[worker_id] = self._known.pop(worker_id, {})
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
        standing = known[owner] = known.pop(owner, Standing())
        if len(known) > MOST_OWNERS:
            del known[next(iter(known))]
        return standing

    def _tell(self, verifier: Verifier, owner: str, reason: str, why: str, seconds: float) -> None:
        if seconds:
            whose = f" of {owner}" if owner else ""
            log.warning(
                "verifier %s gets no sessions%s for %g s: %s",
                *(verifier.identity.worker_id, whose, seconds, why),
            )
            self._metrics.verifier_set_aside(reason)
