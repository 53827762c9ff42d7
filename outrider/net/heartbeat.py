"""Signs of life on streams: how often a worker gives them, and how a listener notices that they are missing.

Silence is counted in ticks of the listener, not read from a clock. A process that was stopped has not
listened meanwhile; it must not mistake its own absence for that of all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from outrider.net.tasks import cancel

HEARTBEAT_SECONDS = 0.5  # a worker says something at least so often on each stream that was opened to it
SILENCE_SECONDS = 2.0  # without a word, after which who opened the stream gives it up
# Of which one is given to a router that has no session here, if it would tell nothing new. A router of
# thousands of workers does little else than to hear them while it idles.
IDLE_HEARTBEATS = 10
# Without a word, after which a router gives up a worker where it has no session. It gives it one before: then
# the shorter time counts.
IDLE_SILENCE_SECONDS = 15.0
TICK_SECONDS = 0.25  # between two looks at who is silent
IDLE_TICKS = 4  # between two looks of a router at the workers where it has no session: they may be thousands


class Stillness:
    """Counts for how long something has not moved."""

    def __init__(self, tick_seconds: float = TICK_SECONDS) -> None:
        self._tick_seconds = tick_seconds
        self._seconds = 0.0

    def moved(self) -> None:
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds

    def tick(self, ticks: int = 1) -> float:
        """Notes that so many ticks of the listener's time have passed. Returns the seconds since the last
        move."""
        self._seconds += ticks * self._tick_seconds
        return self._seconds


async def fell_silent(reading: Coroutine[Any, Any, None], silence: Stillness) -> bool:
    """Returns True if the stream fell silent, and False if reading it ended by itself.

    `reading` reads the stream and tells `silence` of all that comes. If nothing comes for SILENCE_SECONDS it
    is cancelled. Raises what `reading` raises.
    """
    task = asyncio.create_task(reading)
    try:
        while not task.done():
            await asyncio.wait((task,), timeout=TICK_SECONDS)
            if silence.tick() >= SILENCE_SECONDS:
                return True
        task.result()
        return False
    finally:
        await cancel([task])
