"""How far ahead a request's draft may run: pure arithmetic over what its steps showed.

The acceptance of a session's drafts is followed by a mixture of Beta estimators that forget at different
rates. From it comes the predictive probability that the first j draft tokens all survive, which falls more
slowly than alpha^j because acceptance comes in bursts and is not known exactly. k is the deepest j whose
survival may be worth the verifier's price for one more token in a step. Which of them enter, the verifier
decides step by step, from what the drafter says of each token: it knows more. So k errs on the high side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

FORGETTING = (0.8, 0.95, 0.995)  # per observation: experts that remember about 5, 20 and 200 tokens
MARGIN = 0.25  # of the price: k cuts off what is surely not worth it, the verifier judges what comes
WEIGHT_FORGETTING = 0.97  # of the experts' log-weights
PROBE_TOKENS = 64  # with k = 0 by price, one draft token is tried after this many plain ones
MAX_WINDOW = 256
WORTH_A_MESSAGE = 0.25  # relative change below which a window is left as it is

POOL_RATE = 0.03  # how fast a pool follows its sessions, once it has seen some
POOL_MIN_TRIALS = 8  # shorter sessions say nothing about the pair
MOST_NEWS = 1000  # sessions; the oldest matter little by then


@dataclass(frozen=True, slots=True)
class Prior:
    """Beta(a, b): what to expect of a session before its first step."""

    a: float
    b: float


@dataclass(slots=True)
class PriorPool:
    """Acceptance of the sessions of one (target, draft) pair: their mean, and how they differ."""

    mean: float = 0.65
    variance: float = 0.06
    sessions: int = 0
    news: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=MOST_NEWS), compare=False, repr=False
    )  # (accepted, observed) of the sessions absorbed here that no other router knows of yet

    def prior(self) -> Prior:
        """Moment-matched: strength c = m(1-m)/v - 1, in [.5, 12] observations."""
        mean = min(max(self.mean, 0.05), 0.97)
        strength = min(max(mean * (1 - mean) / max(self.variance, 1e-3) - 1, 0.5), 12.0)
        return Prior(mean * strength, (1 - mean) * strength)

    def absorb(self, accepted: int, observed: int) -> None:
        """Takes in a session that is over, less the binomial part of its deviation from the mean."""
        if observed < POOL_MIN_TRIALS:
            return
        self.news.append((accepted, observed))
        self.sessions += 1
        rate = max(POOL_RATE, 1 / (self.sessions + 4))  # the first sessions move the pool faster
        mean = accepted / observed
        deviation = mean - self.mean
        between = max(0.0, deviation**2 - mean * (1 - mean) / observed)
        self.mean += rate * deviation
        self.variance += rate * (between - self.variance)


@dataclass(slots=True)
class Estimator:
    """One session's acceptance, followed step by step."""

    prior: Prior
    accepted: int = 0
    observed: int = 0
    unobserved_tokens: int = 0  # committed since the last step that verified a draft
    _successes: list[float] = field(default_factory=lambda: [0.0] * len(FORGETTING))
    _failures: list[float] = field(default_factory=lambda: [0.0] * len(FORGETTING))
    _log_weights: list[float] = field(default_factory=lambda: [0.0] * len(FORGETTING))

    def observe(self, accepted: int, verified: int, committed: int) -> None:
        """A step verified `verified` draft tokens, accepted the first `accepted`, and committed `committed`.

        What stood behind the first rejected token was not observed.
        """
        if verified == 0:
            self.unobserved_tokens += committed
            return
        self.unobserved_tokens = 0
        for _ in range(accepted):
            self._trial(True)
        if accepted < verified:
            self._trial(False)

    def _trial(self, success: bool) -> None:
        self.observed += 1
        self.accepted += success
        for g, forgetting in enumerate(FORGETTING):
            a = self._successes[g] + self.prior.a
            b = self._failures[g] + self.prior.b
            likelihood = (a if success else b) / (a + b)
            self._log_weights[g] = WEIGHT_FORGETTING * self._log_weights[g] + math.log(likelihood)
            self._successes[g] = forgetting * self._successes[g] + success
            self._failures[g] = forgetting * self._failures[g] + (not success)

    def survival(self, depth: int) -> Iterator[float]:
        """[j] = P(draft tokens 0..j are all accepted), j < depth; worked out as far as it is asked for.

        Beta predictive of the mixture: sum_g w_g prod_{l<=j} (a_g + l) / (a_g + b_g + l).
        """
        top = max(self._log_weights)
        weights = [math.exp(lw - top) for lw in self._log_weights]
        total = sum(weights)
        paths = [w / total for w in weights]
        successes = [successes + self.prior.a for successes in self._successes]
        trials = [a + failures + self.prior.b for a, failures in zip(successes, self._failures, strict=True)]
        for level in range(depth):
            for g, (a, n) in enumerate(zip(successes, trials, strict=True)):
                paths[g] *= (a + level) / (n + level)
            yield sum(paths)


def choose_k(estimator: Estimator, price: float, cap: int) -> int:
    """max { j <= cap : P(first j all accepted) >= MARGIN * price }; a price of 0 gives cap.

    Where that is 0, one token is allowed once PROBE_TOKENS were committed without an observation, so that a
    session whose drafts became good is found out.
    """
    k = 0
    for survival in estimator.survival(cap) if price > 0 else ():
        if survival < MARGIN * price:  # nor are deeper ones worth it: survival never rises with depth
            break
        k += 1
    else:
        return cap
    return 1 if k == 0 and estimator.unobserved_tokens >= PROBE_TOKENS else k


def settled(current: int, wanted: int) -> int:
    """The k to keep, so that not every change of the price becomes a message: raised at once, as the verifier
    still takes only what is worth its place, and lowered where it falls to half or less."""
    return current if current / 2 < wanted < current else wanted


def window(k: int, step_seconds: float, round_trip_seconds: float, draft_token_seconds: float) -> int:
    """Most unverified tokens that a drafter may hold ahead of the log: k + ceil((T_step + RTT) / t_draft).

    That keeps it drafting until the next verdict comes. It is cut to what the steps in flight could verify,
    (k + 1) tokens each, so that a fast drafter does not draft in vain; two steps' worth where the paces are
    not measured yet. 0 where k is 0.
    """
    if k == 0:
        return 0
    if not (step_seconds > 0 and draft_token_seconds > 0):
        return 2 * (k + 1)
    busy_until_verdict = k + _ceil((step_seconds + round_trip_seconds) / draft_token_seconds)
    steps_in_flight = 2 + _ceil(round_trip_seconds / step_seconds)
    return min(busy_until_verdict, (k + 1) * steps_in_flight, max(k, MAX_WINDOW))


def _ceil(ratio: float) -> int:
    """Of a ratio of times that workers report: they may be anything, infinite and NaN included."""
    return math.ceil(ratio) if 0 <= ratio < MAX_WINDOW else MAX_WINDOW


def worth_sending(current: int, wanted: int) -> bool:
    """Whether a window has moved enough for a message: measured paces jitter, and each change costs one."""
    if current == wanted:
        return False
    return current == 0 or wanted == 0 or abs(wanted - current) > WORTH_A_MESSAGE * current
