"""Says if a drafter would guess right, and how sure it is, position by position: made up, or recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MEANS = {"code": 0.9, "chat": 0.6, "hostile": 0.2}
RECORDED = Path(__file__).resolve().parents[2] / "tests/drafter/trace.npz"  # of the demo pair, code and prose
KINDS = (*MEANS, "mix", "switching", "recorded")

EASY, HARD = 0.97, 0.15  # acceptance within a burst, and between two
HARD_TOKENS = 4.0  # mean length of what lies between two bursts
SURENESS, SLOPE, OFFSET = 1.0, 1.5, 0.5  # the drafter's confidence: noisy, too steep, too high
RECORDED_TEXTS = 3  # that make one answer
OTHERS = 3  # tokens that a drafter would have guessed in the place of each guess
RATES = (0.55, 0.18, 0.07)  # how often the target takes each, if it does not take the guess
MEAN_TOKENS = 300.0
SHORTEST, LONGEST = 40, 1200


@dataclass(frozen=True)
class Trace:
    """One session's answer. Both arrays go on beyond `tokens`, so that a draft may run ahead of the end."""

    accepted: NDArray[np.bool_]  # [n]: at p, whether the guess after the true tokens before p is the target's
    confidence: NDArray[np.float64]  # [n]: the draft's probability of that guess
    tokens: int  # length of the answer
    greedy: bool = True
    others: NDArray[np.int64] | None = None  # [n]: which of OTHERS is the target's, from 1 on; 0 = none is


def make(kind: str, sessions: int, seed: int, beyond: int) -> list[Trace]:
    """Returns `sessions` answers of one of KINDS, each followed by `beyond` more positions."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    if kind == "recorded":
        return _recorded(sessions, beyond, rng)
    traces = []
    for number in range(sessions):
        tokens = int(np.clip(rng.gamma(4, MEAN_TOKENS / 4), SHORTEST, LONGEST))
        rates = _rates(kind, number, tokens + beyond, rng)
        accepted = rng.random(len(rates)) < rates
        noise = rng.normal(0, SURENESS, len(rates))
        confidence = sigmoid(SLOPE * (logit(rates) + noise) + OFFSET)
        traces.append(Trace(accepted, confidence, tokens, others=_others(accepted, seed, number)))
    return traces


def _others(accepted: NDArray[np.bool_], seed: int, number: int) -> NDArray[np.int64]:
    drawn = np.random.default_rng([seed, number, OTHERS]).random(len(accepted))
    ranks = np.searchsorted(np.cumsum(RATES), drawn) + 1
    return np.where(accepted | (ranks > OTHERS), 0, ranks)


def _recorded(sessions: int, beyond: int, rng: np.random.Generator) -> list[Trace]:
    """Returns answers from what benchmarks/trace.py wrote: some texts of one kind, one after the other, are
    an answer. Behind its end stands its beginning."""
    with np.load(RECORDED) as found:
        accepted, confidence = found["right"] == 0, found["shares"][:, :, 0] / 65535
        others = np.maximum(found["right"].astype(np.int64), 0)
        told = list(zip(found["workload"].tolist(), found["temperature"].tolist(), strict=True))
    kinds = sorted(set(told))
    traces = []
    for number in range(sessions):
        alike = [text for text, kind in enumerate(told) if kind == kinds[number % len(kinds)]]
        texts = rng.choice(alike, RECORDED_TEXTS, replace=False)
        right, sure, ranks = accepted[texts].ravel(), confidence[texts].ravel(), others[texts].ravel()
        length = len(right)
        greedy = kinds[number % len(kinds)][1] == 0
        traces.append(
            Trace(
                np.resize(right, length + beyond),
                np.resize(sure, length + beyond),
                length,
                greedy,
                np.resize(ranks, length + beyond),
            )
        )
    return traces


def _rates(kind: str, number: int, length: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if kind in MEANS:
        return _bursts(MEANS[kind], length, rng)
    means = list(MEANS.values())
    if kind == "mix":
        return _bursts(means[number % len(means)], length, rng)
    parts: list[NDArray[np.float64]] = []
    while sum(map(len, parts)) < length:
        parts.append(_bursts(means[rng.integers(len(means))], 30 + int(rng.geometric(1 / 70)), rng))
    return np.concatenate(parts)[:length]


def _bursts(mean: float, length: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Returns stretches that are easy and stretches that are hard, in turn; `mean` of all positions
    together."""
    share = (mean - HARD) / (EASY - HARD)
    easy = rng.random() < share
    rates = np.empty(length)
    at = 0
    while at < length:
        stretch = rng.geometric(1 / max(1.0, HARD_TOKENS * share / (1 - share) if easy else HARD_TOKENS))
        rates[at : at + stretch] = EASY if easy else HARD
        at, easy = at + stretch, not easy
    return rates


def logit(p: NDArray[np.float64]) -> NDArray[np.float64]:
    clipped = np.clip(p, 1e-4, 1 - 1e-4)
    return np.log(clipped / (1 - clipped))


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-x)))


@dataclass(frozen=True)
class Book:
    """Traces as arrays, one row a trace, for looking many sessions up at once."""

    accepted: NDArray[np.bool_]  # [traces, positions]
    confidence: NDArray[np.float64]  # [traces, positions]
    first_wrong: NDArray[np.int64]  # [traces, positions]: the first position from there on not accepted
    tokens: NDArray[np.int64]  # [traces]
    greedy: NDArray[np.bool_]  # [traces]
    others: NDArray[np.int64]  # [traces, positions]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Book:
        width = max(len(trace.accepted) for trace in traces)
        accepted = np.zeros((len(traces), width), bool)
        confidence = np.full((len(traces), width), 0.5)
        others = np.zeros((len(traces), width), np.int64)
        for row, trace in enumerate(traces):
            accepted[row, : len(trace.accepted)] = trace.accepted
            confidence[row, : len(trace.confidence)] = trace.confidence
            if trace.others is not None:
                others[row, : len(trace.others)] = trace.others
        positions = np.where(accepted, width, np.arange(width))
        first_wrong = np.minimum.accumulate(positions[:, ::-1], axis=1)[:, ::-1]
        tokens, greedy = [trace.tokens for trace in traces], [trace.greedy for trace in traces]
        return cls(accepted, confidence, first_wrong, np.array(tokens), np.array(greedy), others)

    def rounds(self, k: int) -> NDArray[np.int64]:
        """Returns [traces]: the steps that each answer takes if every step verifies k drafts."""
        at = np.zeros(len(self.tokens), np.int64)
        rounds = np.zeros(len(self.tokens), np.int64)
        rows = np.arange(len(self.tokens))
        while (going := at < self.tokens).any():
            here = np.minimum(at, self.tokens)
            at = np.where(going, at + np.minimum(self.first_wrong[rows, here] - here, k) + 1, at)
            rounds += going
        return rounds
