"""The places of a router: so many sessions are open at a time, and so many of one API key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from outrider.errors import InvalidRequest, Overloaded
from outrider.wire.session import SessionId
from router.admission import Lasting, retry_after

SPARED = 8  # one in so many places is not for the owner of all others


@dataclass(slots=True)
class Together:
    """Sessions of one request, which have places before the first of them begins: if there is none for one,
    none is begun."""

    owner: str
    sessions: int
    prompt_tokens: int  # that all of them read
    begun: int = 0


class Places:
    """Counts the sessions that have one, of each owner."""

    def __init__(self, most: int, lasting: Lasting) -> None:
        """`lasting`: by which who finds none is told when to come back."""
        self._most = most
        self._lasting = lasting
        self._taken = 0
        self._of: Counter[str] = Counter()
        self._promised: dict[SessionId, Together] = {}  # they are counted as taken

    @property
    def of_owners(self) -> Mapping[str, int]:
        """Returns how many each owner has, or is promised; of those only who has any."""
        return self._of

    def check(self, owner: str, sessions: int = 1) -> None:
        """Raises Overloaded if so many more are too many now, InvalidRequest if they always are."""
        most = self._most
        limits = [(self._taken, most, "here")]
        if owner:  # some places are never one's own: others find one
            limits.append((self._of[owner], most - most // SPARED, "for one API key"))
        for _, most, whose in limits:
            if sessions > most:
                raise InvalidRequest(
                    f"the request asks for {sessions} answers, and {most} are the most at a time {whose}: "
                    "ask for fewer together"
                )
        for there, most, whose in limits:
            if there + sessions > most:
                raise Overloaded(
                    f"{there} answers are in progress, and {most} are the most {whose}; try again shortly, "
                    "or ask for fewer",
                    retry_after=retry_after(self._lasting.seconds / self._most),
                )

    @contextmanager
    def together(
        self, owner: str, session_ids: Collection[SessionId], prompt_tokens: int = 0
    ) -> Iterator[None]:
        """Promises places to these sessions, which they have until they have ended, or until this ends if
        they have not begun. Raises what `check` raises."""
        new = [one for one in session_ids if one not in self._promised]
        if new:
            self.check(owner, len(new))
        promise = Together(owner, len(new), prompt_tokens)
        for one in new:
            self._promised[one] = promise
            self._count(owner, 1)
        try:
            yield
        finally:
            for one in new:
                if self._promised.get(one) is promise:
                    self.give_up(one)

    def promise(self, session_id: SessionId) -> Together | None:
        return self._promised.get(session_id)

    def give_up(self, session_id: SessionId) -> None:
        """A session does not begin: what it was promised is free."""
        if (promise := self._promised.pop(session_id, None)) is not None:
            self._count(promise.owner, -1)

    def take(self, session_id: SessionId, owner: str) -> None:
        if (promise := self._promised.pop(session_id, None)) is None:
            self._count(owner, 1)
        else:
            promise.begun += 1

    def leave(self, owner: str) -> None:
        self._count(owner, -1)

    def _count(self, owner: str, change: int) -> None:
        self._taken += change
        self._of[owner] += change  # not by a difference of counters, which goes through all owners
        if not self._of[owner]:
            del self._of[owner]
