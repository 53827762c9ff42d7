"""What who asked for a session hears of it: that it has begun, its steps, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from outrider.net.tasks import cancel
from outrider.wire.session import SessionId
from router.reader import Reader
from router.requests import SessionBegun, SessionEnded, SessionEvent
from router.session import Session


class SessionEvents:
    """An asynchronous iterator. Who reads a session last closes it: with the last event, with an error, or by
    `aclose`."""

    def __init__(
        self,
        open_session: Callable[[], Session],
        log_begun: Callable[[SessionId], Awaitable[None]],
        left: Callable[[Session, float | None], None],
    ) -> None:
        """`open_session` is called with the first event, and raises what refuses it. `log_begun` waits until
        its log has been begun. `left` is told when its last reader leaves, and of the seconds that it lasted
        if it came to its end."""
        self._open_session = open_session
        self._log_begun = log_begun
        self._left = left
        self._session: Session | None = None
        self._reader: Reader | None = None
        self._first: asyncio.Task[SessionEvent] | None = None  # after SessionBegun
        self._over = False

    def __aiter__(self) -> SessionEvents:
        return self

    async def __anext__(self) -> SessionEvent:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._reader is None:
                return await self._begin()
            if self._first is not None:
                event, self._first = await self._first, None
            else:
                event = await self._reader.next()
        except BaseException:
            await self.aclose()
            raise
        if isinstance(event, SessionEnded):
            await self._close(asyncio.get_running_loop().time() - self._began)
        return event

    async def _begin(self) -> SessionBegun:
        self._session = self._open_session()
        self._reader = Reader(self._session)
        self._began = asyncio.get_running_loop().time()
        if not self._reader.known:  # which may hold a stop string: no worker is needed then
            self._first = asyncio.create_task(self._reader.next())  # the workers read the prompt meanwhile
        await self._log_begun(self._session.id)
        return SessionBegun(self._reader.known)

    async def aclose(self) -> None:
        await self._close(None)

    async def _close(self, lasted: float | None) -> None:
        if self._over:
            return
        self._over = True
        if self._session is not None and self._reader is not None and not self._reader.superseded:
            self._left(self._session, lasted)
        if self._first is not None:
            await cancel([self._first])
