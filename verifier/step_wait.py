"""The wait for drafts before a step: how long it is to be, and what came of it."""

from __future__ import annotations

from collections.abc import Collection

from verifier.meter import Meter
from verifier.running import Running
from verifier.step_start import StartAt, Waits


class StepWait:
    """Asks when a step should start, of what the sessions await and what the meter has measured."""

    def __init__(self, decide: StartAt, meter: Meter) -> None:
        """`decide`: step_start.start_at, or another function of its kind."""
        self._decide = decide
        self._meter = meter
        self._waits = Waits()

    def start_at(self, sessions: Collection[Running], now: float, free_since: float) -> float:
        """Returns the time at which the next step should start; not after `now` = at once."""
        believed = self._waits.factor
        awaited = [found for running in sessions for found in running.awaited(believed)]
        if not awaited:
            return now
        meter = self._meter
        return self._decide(now, free_since, meter.step_seconds, meter.goodput, awaited, meter.price)
