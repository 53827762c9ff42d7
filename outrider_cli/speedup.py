"""Computes how much faster decoding gets with drafts, and how many drafters that takes: exact for a simple
model.

The model: each position of a text is guessed right by the draft with the same probability a, independently of
the others; a step takes the same time but for what its draft tokens add; drafts are streamed. After a wrong
guess the drafter begins anew as soon as it hears of it, so the n-th guess is at the verifier n draft tokens
and one round trip after the commit. From there on nothing is random but where the next wrong guess stands:

    C_0 = 0,  C_{i+1} = C_i + 1 + min(k, guesses that arrived until step i begins, less C_i)

are the tokens that i steps commit while all guesses are right. The stretch between two wrong guesses has m+1
tokens with probability a^m (1 - a), and it takes step i if C_i <= m, which has the probability a^C_i. So

    tokens / time = 1/(1-a) / sum_i a^C_i (time of step i, with what it waited)

by the renewal-reward theorem (S. M. Ross, Introduction to Probability Models, chapter 7). With all k guesses
always there it is the known (1 - a^(k+1)) / (1 - a) tokens a step (Leviathan, Kalman, Matias 2023, "Fast
Inference from Transformers via Speculative Decoding").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from drafter.config import DrafterConfig
from outrider.options.option import check, option, same, wrong

LONGEST_WAIT = 0.5  # of a step: how long a verifier waits for drafts at most
NEGLIGIBLE = 1e-12  # probability below which the sum ends
SHORTEST_MS, LONGEST_MS = 1e-4, 1e6
LOOK_UP_MS = 0.04  # of a guess that is looked up, with what is learned from it; measured on one CPU core


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and what guesses for it, on their machines. Checked when made: raises WrongOption."""

    target_step_ms: float = option(
        help="Time of a step of plain decoding, with all sessions in it.", least=SHORTEST_MS, most=LONGEST_MS
    )
    acceptance: float = option(  # the sum has some 28 / (1 - acceptance) terms at most
        help="Share of draft tokens that are right, as requests with -k 1 show it.", least=0, most=0.999
    )
    rtt_ms: float = option(
        help="Round trip between drafter and verifier, as ping shows it.", least=0, most=LONGEST_MS
    )
    draft_token_ms: float | None = option(
        None,
        "Time in which the draft model drafts one token.",
        least=SHORTEST_MS,
        most=LONGEST_MS,
        shown="none: --propose says how",
    )
    propose: str | None = same(DrafterConfig, "propose")
    target_token_ms: float = option(
        0.0, "What each draft token adds to a step of the target.", least=0, most=LONGEST_MS
    )
    sessions: int = option(1, "Sessions at a time on one verifier.", least=1)
    draft_batch: int = option(1, "Sessions for which one forward of the draft model drafts.", least=1)

    def __post_init__(self) -> None:
        check(self)
        if (self.draft_token_ms is None) == (self.propose is None):
            sentence = (
                "or --propose, but not both, must say what guesses: how long a draft model takes, or suffix"
            )
            raise wrong("draft_token_ms", sentence)

    @property
    def guess_ms(self) -> float:
        """Returns the time in which a drafter guesses one token for each of `draft_batch` sessions."""
        return self.draft_token_ms or LOOK_UP_MS


@dataclass(frozen=True, slots=True)
class Speedup:
    """The figures to expect with at most k draft tokens in a step."""

    k: int
    speedup: float  # over plain decoding on the same target
    tokens_per_step: float
    drafter_share: float  # of a drafter's time that one session takes, if it is the only one
    drafters: float  # for each verifier


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a stretch in which all guesses are right."""

    before: int  # tokens of the stretch that were committed when it began: C_i
    end: float  # milliseconds since the wrong guess before
    milliseconds: float  # with what it waited


def expect(pair: Pair, k: int) -> Speedup:
    """Returns what to expect of `pair`."""
    if k == 0:
        return Speedup(0, 1.0, 1.0, 0.0, 0.0)
    steps = _stretch(pair, k, goodput=0.0, waits=False)
    if pair.sessions == 1:
        for _ in range(2):  # what waiting costs depends on the speed, and the speed on waiting
            steps = _stretch(pair, k, goodput=_rate(pair, steps), waits=True)
    rate = _rate(pair, steps)
    taken = sum(pair.acceptance**step.before for step in steps)
    share = min(1.0, _drafted(pair, k, steps) * pair.guess_ms / _mean_time(pair, steps))
    return Speedup(
        k=k,
        speedup=rate * pair.target_step_ms,
        tokens_per_step=1 / (1 - pair.acceptance) / taken,
        drafter_share=share,
        drafters=pair.sessions * share / pair.draft_batch,
    )


def cost(rate: float, price_per_hour: float) -> float:
    """Returns what a million tokens costs at so many a second, on what has this price an hour."""
    return price_per_hour / (3600 * rate) * 1e6 if rate > 0 else float("inf")


def _stretch(pair: Pair, k: int, goodput: float, waits: bool) -> list[_Step]:
    """Returns the steps from one wrong guess on, as long as it is likely enough that there was no other."""
    steps: list[_Step] = []
    committed, now = 0, 0.0
    while not steps or pair.acceptance**committed > NEGLIGIBLE:
        ready = min(k, max(0, _arrived(pair, now) - committed))
        start = _wait(pair, k, committed, ready, now, goodput) if waits else now
        ready = min(k, max(0, _arrived(pair, start) - committed))
        end = start + pair.target_step_ms + ready * pair.sessions * pair.target_token_ms
        steps.append(_Step(committed, end, end - now))
        committed, now = committed + 1 + ready, end
    return steps


def _arrived(pair: Pair, now: float) -> int:
    """Returns how many guesses of the stretch are at the verifier."""
    return max(0, math.floor((now - pair.rtt_ms) / pair.guess_ms + 1e-9))


def _wait(pair: Pair, k: int, committed: int, ready: int, now: float, goodput: float) -> float:
    """Returns when the verifier starts a step for which it has `ready` drafts: the rule of
    verifier/step_start.py. It waits for those that gain most beyond what the wait and they cost, for half a
    step at most."""
    start, best, gain = now, 0.0, 0.0
    for n in range(ready + 1, k + 1):
        due = pair.rtt_ms + (committed + n) * pair.guess_ms
        if due > now + LONGEST_WAIT * pair.target_step_ms:
            break
        gain += pair.acceptance**n - goodput * pair.target_token_ms
        if gain - goodput * (due - now) > best:
            start, best = due, gain - goodput * (due - now)
    return start


def _rate(pair: Pair, steps: list[_Step]) -> float:
    """Returns the tokens a millisecond."""
    return 1 / (1 - pair.acceptance) / _mean_time(pair, steps)


def _mean_time(pair: Pair, steps: list[_Step]) -> float:
    """Returns the milliseconds from one wrong guess to the next."""
    return sum(pair.acceptance**step.before * step.milliseconds for step in steps)


def _drafted(pair: Pair, k: int, steps: list[_Step]) -> float:
    """Returns the tokens drafted from one wrong guess to the next: without a pause, but for the bound of the
    window."""
    busy = k + math.ceil((pair.target_step_ms + pair.rtt_ms) / pair.guess_ms)
    in_flight = (k + 1) * (2 + math.ceil(pair.rtt_ms / pair.target_step_ms))  # router/speculation.py: window
    total = 0.0
    for step, after in pairwise([*steps, None]):
        assert step is not None
        last = pair.acceptance**step.before - (pair.acceptance**after.before if after else 0.0)
        total += last * min(step.end / pair.guess_ms, step.before + min(busy, in_flight))
    return total
