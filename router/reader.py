"""Who reads a session: what has come of it already, then what comes."""

from __future__ import annotations

from outrider.errors import OutriderError, superseded
from router.requests import SessionEvent
from router.session import Session


class Reader:
    """Goes through a session's events, from the first output token on: `known` ones, and those of `next`. The
    former reader hears Superseded."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._steps = session.transcript.steps  # that it has had
        self.known = session.transcript.known() if self._steps else ()
        session.read_by(self)

    @property
    def superseded(self) -> bool:
        return self._session.reader is not self

    async def next(self) -> SessionEvent:
        """What comes next. Raises the error that ended the session, and Superseded where another reads it."""
        session = self._session
        while True:
            if self.superseded:
                raise superseded()
            if self._steps < session.transcript.steps:
                self._steps += 1
                return session.transcript.step(self._steps - 1)
            if isinstance(session.outcome, OutriderError):
                raise session.outcome
            if session.outcome is not None:
                return session.outcome
            if session.open():  # once what is known has been read
                continue
            session.news.clear()
            await session.news.wait()
