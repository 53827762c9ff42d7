"""Decides which of the draft tokens that have arrived enter a step: a pure function over their survival.

A token costs the time by which it lengthens the step, and brings a committed token if it survives. So the
likeliest ones enter, of all sessions together, as many as make the step commit most a second. If steps are
bound by memory all of them do; if the machine is saturated only the near-certain; none is a choice, too.

All sessions of a step wait for what is verified of one. So each gets its next token at most LONGEST_STEP
times later than without drafts, what it may expect of its own considered: who has none pays so much for
others' and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from verifier.meter import LONGEST_STEP
from verifier.price import Floats, StepTime


@dataclass(frozen=True, slots=True)
class Admission:
    counts: list[int]  # of each session: so many tokens of its path enter
    price: float  # committed tokens that one more token in this step would cost: G * dT/dn, at most 1


def admit(
    survival: Sequence[Sequence[float]],
    tokens: int,
    committing: int,
    step_time: StepTime,
    budget: int,
    usual: Sequence[float] | None = None,
) -> Admission:
    """Returns the draft tokens that enter: of all sessions' by survival, the first m <= `budget` that
    maximise

        (committing + sum of their survival) / T(tokens + m)

    and with which T(tokens + m) is at most LONGEST_STEP * T(tokens) times what any session may expect to
    commit, or usually does.

    `survival[i]`: of session i's path, not rising, 0 to 1. `tokens` run anyway; of the sessions that they
    belong to, `committing` commit one token anyway. Each session's share is the beginning of its path.
    `usual[i]`: what session i has committed a step lately, 1 at least; infinite where it commits nothing now.
    None = 1 of each.
    """
    lengths = [len(path) for path in survival]
    every = np.fromiter(chain.from_iterable(survival), np.float64, sum(lengths))
    order = np.argsort(-every, kind="stable")[: max(budget, 0)]  # stable: of equals, the path's order
    whose = np.repeat(np.arange(len(lengths)), lengths)[order]
    gains = committing + np.concatenate(([0.0], np.cumsum(every[order])))  # [m + 1]
    times = step_time.times(tokens + np.arange(len(gains)))
    rates = gains / times
    best = int(rates.argmax())
    slower = times / (LONGEST_STEP * times[0])
    if slower[best] > 1:  # else it is short enough for whoever has nothing to expect
        least = _least(whose, every[order], np.ones(len(lengths)) if usual is None else np.array(usual))
        best = int(np.where(slower <= least, rates, -1.0).argmax())
    counts = np.bincount(whose[:best], minlength=len(lengths))
    return Admission(counts.tolist(), step_time.price(float(rates[best]), tokens + best))


def _least(whose: npt.NDArray[np.int64], survival: Floats, usual: Floats) -> Floats:
    """Returns, if the first m draft tokens enter, what the session commits that may expect least: [m + 1]."""
    entering = np.unique(whose)
    others = float(np.delete(usual, entering).min(initial=np.inf))
    each = 1 + np.cumsum(np.where(whose == entering[:, None], survival, 0.0), axis=1)  # [sessions, m]
    least = np.maximum(each, usual[entering, None]).min(axis=0)
    return np.concatenate(([np.inf], np.minimum(least, others)))  # none makes nobody wait
