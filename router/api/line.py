"""Where requests wait to be begun: a few begin in each turn of the event loop, and their owners have turns.

An answer needs many turns of the loop: for its place, for what is written to workers, for what they say. If
all that comes were begun at once, a turn would last as long as all of it takes, and others' answers many of
those. A turn is for a request that has come whole: what is missing of it could come for all in the same turn
of the loop. Who has left when its turn comes costs no more.
"""

from __future__ import annotations

import asyncio

from outrider.errors import Overloaded
from router.api.threads import OWNERS_SHARE

A_TURN = 2  # requests that begin in one of the loop
PLACES = 2048  # requests that wait


class Line:
    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}  # by owner, whose turn is next first
        self._count = 0
        self._begun = 0  # in this turn of the loop

    async def turn(self, owner: str) -> None:
        """Returns when a request may begin. `owner`: name of its key, or "". Raises Overloaded."""
        loop = asyncio.get_running_loop()
        if not self._waiting and self._begun < A_TURN:
            if not self._begun:
                loop.call_soon(self._next)
            self._begun += 1
            return
        mine, most = self._waiting.get(owner, {}), self._places // OWNERS_SHARE if owner else self._places
        if self._count >= self._places or len(mine) >= most:
            raise Overloaded("too many requests wait to be begun; try again shortly")
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(owner, {})[turn] = None
        self._count += 1
        try:
            await turn
        except asyncio.CancelledError:
            self._forget(owner, turn)
            raise

    def _next(self) -> None:
        self._begun = 0
        while self._waiting and self._begun < A_TURN:
            owner = next(iter(self._waiting))
            turn = next(iter(self._waiting[owner]))
            self._forget(owner, turn)
            if owner in self._waiting:
                self._waiting[owner] = self._waiting.pop(owner)  # behind the others
            if not turn.done():
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(owner, {})
        if turn in waiting:
            del waiting[turn]
            self._count -= 1
            if not waiting:
                del self._waiting[owner]
