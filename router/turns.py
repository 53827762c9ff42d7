"""Work that may take long, done piece by piece: what comes meanwhile is heard between two pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Turns:
    """One piece in a turn of the event loop."""

    def __init__(self) -> None:
        self._pieces: dict[Callable[[], None], None] = {}
        self._going = False

    def soon(self, piece: Callable[[], None]) -> None:
        """Calls it when its turn comes: once, however often it was asked for until then."""
        self._pieces[piece] = None
        if not self._going:
            self._going = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        piece = next(iter(self._pieces))
        del self._pieces[piece]
        try:
            piece()
        finally:
            self._going = bool(self._pieces)
            if self._going:
                asyncio.get_running_loop().call_soon(self._next)
