"""Estimates how likely the target takes a drafted token. Learned online, from every committed position.

The drafter knows what it would have drafted at each position that is committed, so every position is a trial,
and none is censored: guesses it held, corrections, bonus tokens, and stretches in which it did not draft.
See docs/drafts.md, "Survival".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FORGETTING = 0.999  # weight of what is known, at one more trial
FEATURES = 4
# Before anything was seen: half confidence, half history. Worth so many trials in every direction.
FIRST_WEIGHTS = (0.0, 0.5, 0.5, 0.0)
FIRST_TRIALS = 2.0
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
    fade: it keeps the system solvable and the weights finite, whatever the trials show."""

    def __init__(self) -> None:
        self.weights: Floats = np.array(FIRST_WEIGHTS)
        self.trials = 0
        self._first: Floats = np.array(FIRST_WEIGHTS)
        self._prior: Floats = np.eye(FEATURES) * FIRST_TRIALS / 4  # a trial's curvature is at most 1/4
        self._curvature: Floats = np.zeros((FEATURES, FEATURES))

    def probabilities(
        self, confidence: Sequence[float] | Floats, recent: Sequence[float] | Floats, depth: Sequence[int]
    ) -> Floats:
        """Returns [n] P(the target takes the token | it took all before it), each strictly between 0 and 1.

        `confidence` [n], of the draw; `recent` [n], its session's recent acceptance; `depth` [n] >= 0,
        tokens of the draft before it."""
        features = np.empty((len(confidence), FEATURES))
        features[:, 0] = 1.0
        features[:, 1] = _logit(confidence)
        features[:, 2] = _logit(recent)
        features[:, 3] = np.asarray(depth) / DEPTH_UNIT
        return _sigmoid(features @ self.weights)

    def observe(self, confidence: float, recent: float, depth: int, accepted: bool) -> None:
        """Learns from one token: whether it was the target's, given that all before it were."""
        x = np.array([1.0, *_logit((confidence, recent)), depth / DEPTH_UNIT])
        score = float(x @ self.weights)
        p = float(_sigmoid(score))
        self._curvature *= FORGETTING
        self._curvature += p * (1 - p) * np.outer(x, x)
        back = (1 - FORGETTING) * self._prior @ (self.weights - self._first)
        agreed = abs(score) > SURE and (score > 0) == accepted  # no weight can say it more clearly
        step = np.linalg.solve(self._curvature + self._prior, (0.0 if agreed else accepted - p) * x - back)
        self.weights += step * min(1.0, LARGEST_STEP / max(abs(float(x @ step)), LARGEST_STEP))
        self.trials += 1


def recent_after(recent: float, accepted: bool) -> float:
    """Returns a session's recent acceptance after one more position."""
    return recent + RECENT_SMOOTHING * (accepted - recent)


def on_the_wire(survival: Sequence[float]) -> bytes:
    """Returns one byte a token, for shares in [0, 1]."""
    return bytes([round(share * CERTAIN) for share in survival])


def _logit(share: Sequence[float] | Floats) -> Floats:
    """Returns the logits of shares in [0, 1], within [-SURE, SURE]. A share that is no number counts as
    1/2."""
    values = np.asarray(share, dtype=np.float64)
    values = np.clip(np.where(np.isnan(values), 0.5, values), LEAST_SHARE, 1 - LEAST_SHARE)
    found: Floats = np.log(values / (1 - values))
    return found


def _sigmoid(logits: Floats | float) -> Floats:
    found: Floats = 1 / (1 + np.exp(-np.clip(logits, -SURE, SURE)))
    return found
