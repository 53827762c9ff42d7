"""Decides which of the draft tokens that have arrived enter a step: a pure function over their survival.

A token costs the time by which it lengthens the step, and brings a committed token if it survives. So the
likeliest ones enter, of all sessions together, as many as make the step commit most a second. If steps are
bound by memory all of them do; if the machine is saturated only the near-certain; none is a choice, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from verifier.price import StepTime


@dataclass(frozen=True, slots=True)
class Admission:
    counts: list[int]  # of each session: so many tokens of its path enter
    price: float  # committed tokens that one more token in this step would cost: G * dT/dn, at most 1


def admit(
    survival: Sequence[Sequence[float]], tokens: int, committing: int, step_time: StepTime, budget: int
) -> Admission:
    """Returns the draft tokens that enter: of all sessions' by survival, the first m <= `budget` that
    maximise

        (committing + sum of their survival) / T(tokens + m)

    `survival[i]`: of session i's path, not rising, 0 to 1. `tokens` run anyway; of the sessions that they
    belong to, `committing` commit one token anyway. Each session's share is the beginning of its path.
    """
    lengths = [len(path) for path in survival]
    every = np.fromiter(chain.from_iterable(survival), np.float64, sum(lengths))
    order = np.argsort(-every, kind="stable")[: max(budget, 0)]  # stable: of equals, the path's order
    gains = committing + np.concatenate(([0.0], np.cumsum(every[order])))  # [m + 1]
    rates = gains / step_time.times(tokens + np.arange(len(gains)))
    best = int(rates.argmax())
    counts = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[order[:best]], minlength=len(lengths))
    return Admission(counts.tolist(), step_time.price(float(rates[best]), tokens + best))
