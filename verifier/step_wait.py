"""The wait for drafts before a step: how long it is to be, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from verifier.meter import Meter
from verifier.running import Running
from verifier.session import Outcome
from verifier.step_start import StartAt, Waits


class StepWait:
    """Asks when a step should start, of what the sessions await and what the meter has measured."""

    def __init__(self, decide: StartAt) -> None:
        """`decide`: step_start.start_at, or another function of its kind."""
        self._decide = decide
        self._waits = Waits()
        self._at_hand: dict[bytes, int] | None = None  # drafts of each session when a wait began, if one did

    def start_at(self, sessions: Collection[Running], now: float, free_since: float, meter: Meter) -> float:
        """Returns the time at which the next step should start; not after `now` = at once."""
        believed = self._waits.factor
        awaited = [found for running in sessions for found in running.awaited(believed)]
        if not awaited:
            return now
        start = self._decide(now, free_since, meter.step_seconds, meter.goodput, awaited, meter.price)
        if start > now and self._at_hand is None:
            self._at_hand = {running.id: len(running.session.tree.path) for running in sessions}
        return start

    def judge(self, waited: float, outcomes: Iterable[tuple[Running, Outcome]], meter: Meter) -> None:
        """Learns from a step what came of the wait before it, if there was one: `waited` seconds."""
        at_hand, self._at_hand = self._at_hand, None
        if at_hand is None:
            self._waits.observe(0.0, 0)
            return
        came = sum(
            max(0, outcome.accepted - at_hand.get(running.id, outcome.accepted))
            for running, outcome in outcomes
        )
        self._waits.observe(meter.goodput * waited, came)
