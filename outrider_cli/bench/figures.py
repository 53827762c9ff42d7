"""Makes figures out of answers. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from outrider_cli.bench.cells import ALL_KINDS, Cell
from outrider_cli.bench.group import Answers
from outrider_cli.bench.loops import looped_share


@dataclass(frozen=True, slots=True)
class Measured:
    """One group, once."""

    rate: float  # tokens a second, from the last stream's first token to the end of the last answer
    first_token_seconds: list[float]  # from sending to the first token, by stream; prompts were read before
    gap_seconds: list[float]  # between one arrival of text and the next of the same stream
    tokens_per_arrival: float
    prompt_tokens: int  # median
    drafted: int  # draft tokens verified
    accepted: int  # of them
    speculative_steps: int  # steps of a stream that verified any
    cpu_shares: dict[str, float]  # CPU seconds a second in that time, by role
    tokens_per_target_second: float | None  # over CPU seconds of the target's process; None = not known
    tokens_per_core_second: float | None  # over CPU seconds of all that serves; None = not known
    looped: float  # share of what was said that only repeats itself


def measured(answers: Answers) -> Measured:
    """Returns the figures of a group that ran together."""
    replies = answers.replies
    arrivals = [reply.arrivals for reply in replies]
    start, end = max(one[0][0] for one in arrivals), max(one[-1][0] for one in arrivals)
    each = sum(reply.tokens for reply in replies) / sum(map(len, arrivals))
    further = [(at, each if tokens is None else tokens) for at, tokens in answers.further]
    rate = _rate([*arrivals, further], start, end)
    alone = replies[0].cpu_seconds if len(replies) == 1 else None
    used = {"target": alone} if alone is not None else answers.cpu_seconds
    shares = {role: seconds / (end - start) for role, seconds in used.items()} if end > start else {}
    serving = sum(share for role, share in shares.items() if role != "client")
    return Measured(
        rate=rate,
        first_token_seconds=[reply.arrivals[0][0] - reply.sent for reply in replies],
        gap_seconds=[later[0] - sooner[0] for one in arrivals for sooner, later in pairwise(one)],
        tokens_per_arrival=each,
        prompt_tokens=round(statistics.median(reply.prompt_tokens for reply in replies)),
        drafted=sum(reply.drafted for reply in replies),
        accepted=sum(reply.accepted for reply in replies),
        speculative_steps=sum(reply.speculative_steps for reply in replies),
        cpu_shares=shares,
        tokens_per_target_second=rate / shares["target"] if shares.get("target") else None,
        tokens_per_core_second=rate / serving if serving else None,
        looped=statistics.fmean(looped_share(reply.text) for reply in replies),
    )


def _rate(arrivals: Sequence[Sequence[tuple[float, float]]], start: float, end: float) -> float:
    """Returns the tokens a second that arrived after `start`, up to `end`; 0 if no time passed."""
    tokens = sum(count for one in arrivals for at, count in one if start < at <= end)
    return tokens / (end - start) if end > start else 0.0


@dataclass(frozen=True, slots=True)
class Rejections:
    """What became of the drafted tokens in whose place the target took another."""

    count: int
    covered: int  # of them, those where a branch had the token that it took

    def __str__(self) -> str:
        return f"{self.covered / self.count:.0%} of {self.count:,}" if self.count else "none"


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle of several values, and the middle half of them."""

    median: float
    lower_quartile: float
    upper_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of at least one value."""
        return cls(percentile(values, 50), percentile(values, 25), percentile(values, 75))

    def __str__(self) -> str:
        digits = 1 if self.median >= 10 else 2
        return (
            f"{self.median:.{digits}f} ({self.lower_quartile:.{digits}f} to {self.upper_quartile:.{digits}f})"
        )


def percentile(values: Sequence[float], percent: int) -> float:
    """Returns a percentile of at least one value, by linear interpolation."""
    return float(np.percentile(values, percent))


@dataclass(frozen=True, slots=True)
class Figures:
    """A cell over all repetitions. Percentiles are over all streams of all repetitions."""

    rate: Spread
    first_token_ms: tuple[float, float]  # p50, p95
    gap_ms: tuple[float, float] | None  # p50, p95; None = everything came at once
    acceptance_rate: float | None  # accepted over verified draft tokens; None = none was verified
    mean_accepted_length: float | None  # tokens a speculative step, the target's own included
    tokens_per_arrival: float
    tokens_per_target_second: Spread | None
    tokens_per_core_second: Spread | None
    looped: float  # mean share of an answer that only repeats itself
    cpu_shares: dict[str, float] = field(default_factory=dict)  # medians
    prompt_tokens: int = 0


def figures(repetitions: Sequence[Measured]) -> Figures:
    """Returns the figures of a cell from at least one repetition."""
    first = [second for one in repetitions for second in one.first_token_seconds]
    gaps = [second for one in repetitions for second in one.gap_seconds]
    drafted, accepted, steps = (
        sum(one.drafted for one in repetitions),
        sum(one.accepted for one in repetitions),
        sum(one.speculative_steps for one in repetitions),
    )
    told = [one.tokens_per_target_second for one in repetitions if one.tokens_per_target_second is not None]
    told_all = [one.tokens_per_core_second for one in repetitions if one.tokens_per_core_second is not None]
    roles = {role for one in repetitions for role in one.cpu_shares}
    return Figures(
        rate=Spread.of([one.rate for one in repetitions]),
        first_token_ms=(1e3 * percentile(first, 50), 1e3 * percentile(first, 95)),
        gap_ms=(1e3 * percentile(gaps, 50), 1e3 * percentile(gaps, 95)) if gaps else None,
        acceptance_rate=accepted / drafted if drafted else None,
        mean_accepted_length=(accepted + steps) / steps if steps else None,
        tokens_per_arrival=statistics.fmean(one.tokens_per_arrival for one in repetitions),
        tokens_per_target_second=Spread.of(told) if told else None,
        tokens_per_core_second=Spread.of(told_all) if told_all else None,
        looped=statistics.fmean(one.looped for one in repetitions),
        cpu_shares={
            role: statistics.median(one.cpu_shares[role] for one in repetitions if role in one.cpu_shares)
            for role in sorted(roles)
        },
        prompt_tokens=round(statistics.median(one.prompt_tokens for one in repetitions)),
    )


Runs = Mapping[Cell, Sequence[Measured]]  # repetitions of each cell


def over(runs: Runs, cell: Cell, way: str) -> Spread | None:
    """Returns how many times the rate of another way in the same setting it is, repetition by repetition;
    None if that was not measured, or was 0."""
    over, under = runs[cell], runs.get(replace(cell, way=way))
    if under is None or not all(below.rate > 0 for below in under):
        return None
    return Spread.of([above.rate / below.rate for above, below in zip(over, under, strict=True)])


def with_all_kinds(runs: Runs) -> Runs:
    """Returns them and, if there are several workloads, those of all together."""
    if len({cell.setting.workload for cell in runs}) == 1:
        return runs
    joined: defaultdict[Cell, list[Measured]] = defaultdict(list)
    for cell in sorted(runs):
        joined[replace(cell, setting=replace(cell.setting, workload=ALL_KINDS))] += runs[cell]
    return {**runs, **joined}
