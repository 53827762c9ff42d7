"""A stepper that waits for every drafter, so that drafts always take part, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from verifier.step_start import Awaited, StartAt
from verifier.stepper import Running, Stepper

COMING_SECONDS = 2.0  # that a session waits for its drafter to come: one that is refused never does
POLL_SECONDS = 1e-3


class PatientStepper(Stepper):
    def __init__(self, *args: Any, silence: float, expected: Callable[[], bool], **more: Any) -> None:
        """`silence`: seconds that a step waits for a drafter that has nothing to say. `expected`: whether
        there are drafters at all: a session waits for one that still dials."""
        super().__init__(*args, start_at=_patient(silence), **more)
        self._expected = expected
        self._waited: Counter[bytes] = Counter()  # polls of each session, all its drafters together

    async def _until_due(self, free_since: float) -> tuple[float, float]:
        while waiting := [key for key, running in self._sessions.items() if self._waits(running)]:
            await asyncio.sleep(POLL_SECONDS)
            self._waited.update(waiting)
        return await super()._until_due(free_since)

    def _waits(self, running: Running) -> bool:
        """Returns whether it may still get a drafter."""
        session = running.session
        if running.drafted or session.wanted == 0 or session.resting or not self._expected():
            return False
        return self._waited[running.id] * POLL_SECONDS < COMING_SECONDS


def _patient(seconds: float) -> StartAt:
    """Takes the place of step_start.start_at."""

    def start_at(
        now: float, free_since: float, _: float, __: float, awaited: Iterable[Awaited], *more: float
    ) -> float:
        waits = any(session.tokens == 0 < session.wanted for session in awaited)
        return free_since + seconds if waits else now

    return start_at
