"""One drafter on its stream: what it was given, and what waits to be sent to it, merged until it is read."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from outrider.wire.speculation import Attach, Commit, CommitBatch
from verifier.bounded_map import REMEMBERED, BoundedMap
from verifier.reading_allowance import ReadingAllowance, StreamAllowance
from verifier.session import Session
from verifier.step_start import Pace
from verifier.survival_calibration import SurvivalCalibration

MAX_CLAIMS = 1024  # that wait for their sessions
CLAIM_SECONDS = 60.0  # that one waits: what was closed meanwhile never comes
MOST_TOLD = 2**17  # tokens in a message; a session's are not divided
MOST_REPEATED = 1024  # tokens that are sent again because they were not acknowledged yet


class Seat(Protocol):
    """A session that it drafts for, and how far it is known to have the log."""

    session: Session
    acknowledged: int | None


class DrafterPeer:
    """The commits for one drafter, its claims, and its pace."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float],
        allowance: StreamAllowance | None = None,
        worker_id: str = "",
        resting: bool = False,
        whose: str = "",
    ) -> None:
        """`name`: by which it is known here; `worker_id`: its own; `resting`: it is to draft nothing for
        now. `whose`: the certificate that it shows, or its address."""
        self.name = name
        self.worker_id = worker_id
        self.whose = whose
        self.pace = Pace()
        self.calibration = (
            SurvivalCalibration()
        )  # of its drafts for whichever session: new ones begin with it
        self.allowance = allowance or ReadingAllowance().of(name)
        self.announced = False  # it has shown a right that a router gave it
        self.refused = ""  # why it was ended here, if it was
        self.given = BoundedMap()  # sessions that it has claimed
        self.claims: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()  # session -> right, when
        self._clock = clock
        self._told: dict[bytes, int] = {}  # its sessions -> length of the log that was sent to it
        self._dirty: dict[bytes, Seat] = {}
        self._revoked: OrderedDict[bytes, bytes] = OrderedDict()  # session -> right
        self.retold = 0  # tokens that it is told anew, and that were not held against it yet
        self._stamp_us = 0
        self._heard_at = 0.0
        self._ready = asyncio.Event()
        self._over = False
        self._resting = resting
        self.beside = 0.0  # what it is told of tokens beside a path

    def heard(self, stamp_us: int) -> None:
        self._stamp_us, self._heard_at = stamp_us, self._clock()

    def claim(self, session_id: bytes, shown: bytes) -> bool:
        """Keeps a claim until its session comes, for a while; False where another had to go for it."""
        now = self._clock()
        self.claims.pop(session_id, None)
        self.claims[session_id] = shown, now
        while now - next(iter(self.claims.values()))[1] > CLAIM_SECONDS:
            self.claims.popitem(last=False)
        if len(self.claims) <= MAX_CLAIMS:
            return True
        self.claims.popitem(last=False)
        return False

    def claimed(self, session_id: bytes) -> bytes | None:
        """Returns the right of a claim that waits, which it does no more."""
        shown, _ = self.claims.pop(session_id, (None, 0.0))
        return shown

    def attached(self, seat: Seat) -> None:
        """Notes that it drafts for the seat's session, of which it knows what the router told it."""
        spec = seat.session.spec
        seat.acknowledged = len(spec.params.prompt) + len(spec.output)
        self.retold += len(seat.session.log) - seat.acknowledged  # it may say so again and again
        self._told[spec.session_id] = seat.acknowledged
        self.committed(seat)

    def detached(self, session_id: bytes) -> None:
        """Notes that it does not any more."""
        self._dirty.pop(session_id, None)
        self._told.pop(session_id, None)

    def committed(self, seat: Seat) -> None:
        """There is more of the session's log than the drafter has acknowledged."""
        self._dirty[seat.session.spec.session_id] = seat
        if not self._resting:
            self._ready.set()

    def revoke(self, session_id: bytes, shown: bytes) -> None:
        """Tells it that the right with which it came is worth nothing any more. Of a drafter that does not
        read, the oldest are forgotten: it hears of them from the router, too."""
        self._revoked[session_id] = shown
        if len(self._revoked) > REMEMBERED:
            self._revoked.popitem(last=False)
        self._ready.set()

    def rest(self, resting: bool) -> None:
        """It is to draft nothing and hears of no commits; or to draft again, and hears what it has missed."""
        if resting is not self._resting:
            self._resting = resting
            self._ready.set()

    def beat(self) -> None:
        """Gives a sign of life, perhaps with nothing to say."""
        self._ready.set()

    def end(self, refused: str = "") -> None:
        """`refused`: what it hears of that."""
        self._over, self.refused = True, self.refused or refused
        self._ready.set()

    @property
    def unsent(self) -> int:
        """Sessions of which there is something to tell."""
        return len(self._dirty) + len(self._revoked)

    async def batches(self) -> AsyncIterator[CommitBatch]:
        """Yields one message whenever there is something to tell; commits of a session merge while they
        wait."""
        while True:
            await self._ready.wait()
            if self._over:
                return
            self._ready.clear()
            commits = [] if self._resting else self._commits()
            revoked, self._revoked = self._revoked, OrderedDict()
            yield CommitBatch(
                commits=commits,
                revoked=[Attach(session_id, shown) for session_id, shown in revoked.items()],
                echo_us=self._stamp_us,
                held_us=int((self._clock() - self._heard_at) * 1e6) if self._stamp_us else 0,
                rest=self._resting,
                beside=self.beside,
            )

    def _commits(self) -> list[Commit]:
        """Returns what there is to tell, as far as it makes one message: after a rest it may be much."""
        commits, tokens = [], 0
        while self._dirty and tokens < MOST_TOLD:
            session_id = next(iter(self._dirty))
            commits.append(self._commit(session_id, self._dirty.pop(session_id)))
            tokens += len(commits[-1].tokens)
        if self._dirty:
            self._ready.set()
        return commits

    def _commit(self, session_id: bytes, seat: Seat) -> Commit:
        base = self._base(session_id, seat)
        return Commit(session_id, base, seat.session.log[base:])

    def _base(self, session_id: bytes, seat: Seat) -> int:
        """Returns where a commit starts: at what was acknowledged. A stream loses nothing, so that one that
        does not acknowledge gets what it was sent before again only as far as an honest one may need it."""
        told = self._told.get(session_id, 0)
        self._told[session_id] = len(seat.session.log)
        return max(seat.acknowledged or 0, told - MOST_REPEATED)
