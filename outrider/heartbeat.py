"""Signs of life on streams: how often they are given, and how their absence is noticed.

Silence is counted in ticks of who listens, not read from a clock: a process that was stopped or stood still
itself has not listened meanwhile, and must not take its own absence for that of all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from outrider.tasks import cancel

HEARTBEAT_SECONDS = 0.5  # a worker says something at least so often on each stream that was opened to it
SILENCE_SECONDS = 2.0  # without a word, after which who opened the stream gives it up
TICK_SECONDS = 0.25  # between two looks at who is silent


class Stillness:
    """For how long something has not moved."""

    def __init__(self, tick_seconds: float = TICK_SECONDS) -> None:
        self._tick_seconds = tick_seconds
        self._seconds = 0.0

    def moved(self) -> None:
        self._seconds = 0.0

    def tick(self) -> float:
        """So much of the listener's time has passed; the seconds since it moved last."""
        self._seconds += self._tick_seconds
        return self._seconds


async def fell_silent(reading: Coroutine[Any, Any, None], silence: Stillness) -> bool:
    """Runs `reading`, which reads a stream and tells `silence` of all that comes, until it ends, and raises
    what it raises; or until nothing has come for SILENCE_SECONDS: then it is cancelled, and the answer is
    True."""
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
