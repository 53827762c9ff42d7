"""A verifier under a governor, made up: what each way would commit is known, and so what is lost."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verifier.governor import Governor, StepSeen

DRAFTED = 0  # the way whose drafts have to catch up, after it has not run

Rate = Callable[[float], float]
"""Tokens a second that a way commits at a time, with all that it waits for."""


@dataclass
class World:
    """Ways by what they commit; one of them runs at a time."""

    rates: Sequence[Rate]  # by way
    sessions: Callable[[float], int] = lambda _: 16
    step_seconds: float = 0.1
    noise: float = 0.3  # standard deviation of what a step commits, as a share of it, for one session
    drift: float = 0.0  # the same of the machine's speed, which wanders slowly
    catching_up: float = 0.05  # seconds without drafts after a second without them
    seed: int = 1
    now: float = 0.0
    committed: float = 0.0
    best: float = 0.0  # what the best way would have committed meanwhile
    chosen: list[tuple[float, int]] = field(default_factory=list)  # when, which way from then on

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.governor = Governor(len(self.rates), self.rng.random)
        self._speed = 0.0
        self._behind = 0.0
        self._usual = -1

    def run(self, until: float) -> World:
        """Steps until then; counts what is committed from now on."""
        self.committed = self.best = 0.0
        while self.now < until:
            self._step()
        return self

    @property
    def share(self) -> float:
        """Returns what was committed, over what the best way would have."""
        return self.committed / self.best

    def _step(self) -> None:
        way, sessions, now = self.governor.way, self.sessions(self.now), self.now
        self._speed += self.rng.gauss(0.0, self.drift) * 0.3 - 0.05 * self._speed
        rates = [rate(now) * math.exp(self._speed) for rate in self.rates]
        rate, behind, seconds = rates[way], None, self.step_seconds
        spread = 0.05  # of a step without drafts: its time alone
        if way == DRAFTED:
            behind, spread = 0.0, self.noise / math.sqrt(sessions)
            if self._behind > 0:
                self._behind -= seconds
                rate, behind = 0.7 * min(rates), 1.0
        else:
            self._behind = min(self._behind + self.catching_up * seconds, 3.0)
        committed = rate * seconds * max(0.05, self.rng.gauss(1.0, spread))
        self.now += seconds
        self.committed += committed
        self.best += max(rates) * seconds
        self.governor.observe(StepSeen(seconds, committed, sessions, behind))
        if self.governor.usual != self._usual:
            self._usual = self.governor.usual
            self.chosen.append((self.now, self._usual))
