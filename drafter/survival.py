"""Estimates how likely the target takes a drafted token. Learned online, from every committed position.

The drafter knows what it would have drafted at each position that is committed, so every position is a trial,
and none is censored: guesses it held, corrections, bonus tokens, and stretches in which it did not draft.
See docs/drafts.md, "Survival".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FORGETTING = 0.999  # weight of what is known, at one more trial
FEATURES = 4
# Before anything was seen: half confidence, half history. Worth so many trials in every direction.
FIRST_WEIGHTS = (0.0, 0.5, 0.5, 0.0)
FIRST_TRIALS = 2.0
PRIOR = FIRST_TRIALS / 4  # a trial's curvature is at most 1/4
SURE = 7.0  # logits beyond it say no more
LEAST_SHARE = 1 / (1 + math.exp(SURE))  # .0009
DEPTH_UNIT = 8.0
LARGEST_STEP = 1.0  # that one trial may move its own logit: a surprise is no proof
RECENT_SMOOTHING = 0.1  # weight of one more trial in a session's recent acceptance
FIRST_RECENT = 0.5
CERTAIN = 255  # survival on the wire is a byte


class Calibration:
    """Online logistic regression on [1, logit confidence, logit recent acceptance, depth / 8].

    One Newton step a trial on the forgetting log-likelihood: with H <- .999 H + p (1 - p) x x',
    w <- w + (H + R)^-1 [(y - p) x - .001 R (w - w0)]. R, the weight of what was believed at first, does not
    fade: it keeps the system solvable and the weights finite, whatever the trials show.

    Plain numbers: arrays would take several times as long for four of them, and the next draft waits."""

    def __init__(self) -> None:
        self.weights = list(FIRST_WEIGHTS)
        self.trials = 0
        self._curvature = [[0.0] * FEATURES for _ in range(FEATURES)]

    def probability(self, confidence: float, recent: float, depth: int) -> float:
        """Returns P(the target takes the token | it took all before it), strictly between 0 and 1.

        `confidence`: of the draw; `recent`: its session's recent acceptance; `depth` >= 0: tokens of the
        draft before it."""
        one, of_confidence, of_recent, of_depth = self.weights
        known = one + of_depth * depth / DEPTH_UNIT
        return _sigmoid(known + of_confidence * _logit(confidence) + of_recent * _logit(recent))

    def observe(self, confidence: float, recent: float, depth: int, accepted: bool) -> None:
        """Learns from one token: whether it was the target's, given that all before it were."""
        x = (1.0, _logit(confidence), _logit(recent), depth / DEPTH_UNIT)
        score = _product(x, self.weights)
        p = _sigmoid(score)
        agreed = abs(score) > SURE and (score > 0) == accepted  # no weight can say it more clearly
        error = 0.0 if agreed else accepted - p
        for row, xi in zip(self._curvature, x, strict=True):
            for at, xj in enumerate(x):
                row[at] = FORGETTING * row[at] + p * (1 - p) * xi * xj
        back = (1 - FORGETTING) * PRIOR
        pulls = zip(x, self.weights, FIRST_WEIGHTS, strict=True)
        step = _solved(self._curvature, [error * xi - back * (w - first) for xi, w, first in pulls])
        share = min(1.0, LARGEST_STEP / max(abs(_product(x, step)), LARGEST_STEP))
        self.weights = [w + share * s for w, s in zip(self.weights, step, strict=True)]
        self.trials += 1


def recent_after(recent: float, accepted: bool) -> float:
    """Returns a session's recent acceptance after one more position."""
    return recent + RECENT_SMOOTHING * (accepted - recent)


def on_the_wire(survival: Sequence[float]) -> bytes:
    """Returns one byte a token, for shares in [0, 1]."""
    return bytes([round(share * CERTAIN) for share in survival])


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _solved(curvature: Sequence[Sequence[float]], right: list[float]) -> list[float]:
    """Returns z with (curvature + R) z = right, by elimination: that matrix is positive definite."""
    rows = [
        [*row[:at], row[at] + PRIOR, *row[at + 1 :], value]
        for at, (row, value) in enumerate(zip(curvature, right, strict=True))
    ]
    for at, pivot in enumerate(rows):
        for row in rows[at + 1 :]:
            factor = row[at] / pivot[at]
            for place in range(at + 1, FEATURES + 1):
                row[place] -= factor * pivot[place]
    found = [0.0] * FEATURES
    for at in reversed(range(FEATURES)):
        row = rows[at]
        known = sum(row[place] * found[place] for place in range(at + 1, FEATURES))
        found[at] = (row[FEATURES] - known) / row[at]
    return found


def _logit(share: float) -> float:
    """Returns the logit of a share in [0, 1], within [-SURE, SURE]. What is no number counts as 1/2."""
    if LEAST_SHARE < share < 1 - LEAST_SHARE:
        return math.log(share / (1 - share))
    return SURE if share > 0.5 else -SURE if share < 0.5 else 0.0


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-min(max(logit, -SURE), SURE)))
