"""Decides how far ahead a request's draft may run: pure arithmetic over what its steps showed.

From a session's acceptance, with old steps forgotten and its model pair's mean as a prior, follows the chance
that the first j draft tokens all survive: acceptance^j. k is the deepest j whose chance may be worth the
verifier's price for one more token in a step. Which of them enter, the verifier decides step by step, from
what the drafter says of each token: it knows more. So k errs on the high side.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

FORGETTING = 0.95  # per draft token observed: what is remembered is about the last 20
PRIOR_TOKENS = 2.0  # the prior weighs as much as so many observed tokens
MARGIN = 0.15  # of the price: k cuts off what is surely not worth it, the verifier judges what comes
PROBE_TOKENS = 64  # with k = 0 by price, one draft token is tried after this many plain ones
MAX_WINDOW = 256
WORTH_A_MESSAGE = 0.25  # relative change below which a window is left as it is

SILENT_TOKENS = 128  # committed of a session without one of its drafter's, though drafts were welcome
WELCOME = 0.25  # of the acceptance: a price up to it lets any good draft in
AUDIBLE = 0.5  # of the acceptance: a price up to it lets some of a good drafter's tokens in
HOPELESS = 0.25  # acceptance below which a drafter is no good, whatever a token costs

FIRST_ACCEPTANCE = 0.65  # of a pair that nothing is known of
LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 0.05, 0.97  # that a session begins with
PAIR_RATE = 0.03  # how fast a pair's mean follows its sessions, once it has seen some
MOST_PAIRS = 4096  # of models that a router remembers
LEAST_OBSERVED = 8  # draft tokens; shorter sessions say nothing about the pair


@dataclass(slots=True)
class PairAcceptance:
    """How often a target takes the draft tokens of a draft model: the mean over some sessions."""

    mean: float = FIRST_ACCEPTANCE
    sessions: int = 0
    of_all: PairAcceptance | None = None  # which these sessions are among

    def absorb(self, accepted: int, observed: int) -> None:
        """Takes in a session that is over."""
        if observed >= LEAST_OBSERVED:
            self.sessions += 1
            rate = max(PAIR_RATE, 1 / (self.sessions + 4))  # the first sessions move it faster
            self.mean += rate * (accepted / observed - self.mean)
        if self.of_all is not None:
            self.of_all.absorb(accepted, observed)


class Pairs:
    """What a router knows of pairs of models, by the fingerprints of target and draft and by whose requests
    they were: what one owner of a key asks for tells little of another's. A fingerprint is what a drafter
    says of itself: if there are more than MOST_PAIRS, the one asked for longest ago goes first."""

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[str, str, str], PairAcceptance] = OrderedDict()

    def of(self, target: str, draft: str, owner: str = "") -> PairAcceptance:
        """Returns an owner's, which begins as that of all is; "" = that of all."""
        of_all = self._made("", target, draft, PairAcceptance)
        if not owner:
            return of_all
        return self._made(owner, target, draft, lambda: PairAcceptance(of_all.mean, of_all=of_all))

    def _made(self, owner: str, target: str, draft: str, new: Callable[[], PairAcceptance]) -> PairAcceptance:
        key = owner, target, draft
        pair = self._of[key] if key in self._of else self._of.setdefault(key, new())
        self._of.move_to_end(key)
        if len(self._of) > MOST_PAIRS:
            self._of.popitem(last=False)
        return pair


class Estimator:
    """One session's acceptance, followed step by step."""

    def __init__(self, prior: float = FIRST_ACCEPTANCE) -> None:
        """`prior`: the acceptance to expect before its first step."""
        self.accepted = 0  # of the drafter's guesses
        self.observed = 0
        self.unobserved_tokens = 0  # committed since the last step that verified a draft
        self._successes = PRIOR_TOKENS * min(max(prior, LEAST_ACCEPTANCE), MOST_ACCEPTANCE)
        self._prior_successes = self._successes
        self._trials = PRIOR_TOKENS

    def observe(self, accepted: int, verified: int, committed: int, own: bool = False) -> None:
        """Takes in a step that verified `verified` draft tokens, accepted the first `accepted`, and committed
        `committed`. `own`: the verifier itself had guessed some of them, which says nothing of a drafter.

        What stood behind the first rejected token was not observed.
        """
        if verified == 0:
            self.unobserved_tokens += committed
            return
        self.unobserved_tokens = 0
        trials = accepted + (accepted < verified)
        if not own:
            self.accepted += accepted
            self.observed += trials
        kept = FORGETTING**trials
        self._successes = kept * (self._successes - self._prior_successes) + accepted + self._prior_successes
        self._trials = kept * (self._trials - PRIOR_TOKENS) + trials + PRIOR_TOKENS

    @property
    def due(self) -> bool:
        """Returns whether one token is to be tried, whatever it costs."""
        return self.unobserved_tokens >= PROBE_TOKENS

    @property
    def acceptance(self) -> float:
        """Returns P(the next draft token is accepted), above 0 and below 1."""
        return self._successes / self._trials


def choose_k(estimator: Estimator, price: float, cap: int) -> int:
    """Returns max { j <= cap : acceptance^j >= MARGIN * price }; a price of 0 gives cap.

    If that is 0, one token is allowed once PROBE_TOKENS were committed without an observation, so that a
    session whose drafts became good is found out.
    """
    least = MARGIN * price
    if not least > 0:  # a verifier may report anything, NaN included
        return cap
    k = min(cap, int(math.log(least) / math.log(estimator.acceptance))) if least < 1 else 0
    return min(1, cap) if k == 0 and estimator.due else k


def welcome(k: int, acceptance: float, price: float) -> bool:
    """Returns whether a step would have verified a draft, had there been one: it is not for the price that
    there was none."""
    return k > 0 and price <= WELCOME * acceptance


def blamed(k: int, acceptance: float, price: float, heard: bool) -> bool:
    """Returns whether it is the drafter's doing that a step verified no draft of its: one was welcome, or
    only that of a drafter which is more often right. `heard`: whether any of its was verified before, for the
    session; of who is mute it is believed at a price up to which a good one is heard now and then."""
    hopeless = acceptance < HOPELESS and price <= WELCOME * FIRST_ACCEPTANCE
    mute = not heard and price <= AUDIBLE * FIRST_ACCEPTANCE
    return hopeless or mute or welcome(k, acceptance, price)


def settled(current: int, wanted: int) -> int:
    """Returns the k to keep, so that not every change of the price becomes a message: raised at once, as the
    verifier still takes only what is worth its place, and lowered if it falls to half or less."""
    return current if current / 2 < wanted < current else wanted


def window(k: int, step_seconds: float, round_trip_seconds: float, draft_token_seconds: float) -> int:
    """Returns the most unverified tokens that a drafter may hold ahead of the log: k + ceil((T_step + RTT) /
    t_draft).

    That keeps it drafting until the next verdict comes. It is cut to what the steps in flight could verify,
    (k + 1) tokens each, so that a fast drafter does not draft in vain; two steps' worth if the paces are
    not measured yet. 0 if k is 0.
    """
    if k == 0:
        return 0
    if not (step_seconds > 0 and draft_token_seconds > 0):
        return 2 * (k + 1)
    busy_until_verdict = k + _ceil((step_seconds + round_trip_seconds) / draft_token_seconds)
    steps_in_flight = 2 + _ceil(round_trip_seconds / step_seconds)
    return min(busy_until_verdict, (k + 1) * steps_in_flight, max(k, MAX_WINDOW))


def _ceil(ratio: float) -> int:
    """Returns the ceiling of a ratio of times. Workers report these: they may be infinite or NaN."""
    return math.ceil(ratio) if 0 <= ratio < MAX_WINDOW else MAX_WINDOW


def worth_sending(current: int, wanted: int) -> bool:
    """Returns True if a window has moved enough for a message: measured paces jitter, and messages cost."""
    if current == wanted:
        return False
    return current == 0 or wanted == 0 or abs(wanted - current) > WORTH_A_MESSAGE * current
