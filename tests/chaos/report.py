"""What a storm showed, as numbers: JSON and a short page. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.clients import Record
from tests.chaos.guests import Visit

FLOWING_SECONDS = 2.0  # a stream whose last token is older was held up by something before the fault
HELD_UP_SECONDS = 0.25  # a wait below it, or below so many of the stream's ordinary ones, is no fault's doing
ORDINARY = 4.0


@dataclass(frozen=True)
class Happened:
    """One fault."""

    at: float  # seconds, on the clock of the records
    label: str
    target: str
    seconds: float  # until it was mended


@dataclass(frozen=True)
class Recovery:
    """Seconds until the next token of the stream that waited longest, for one kind of fault."""

    faults: int
    felt: int  # of them, those that held up any stream: the quantiles are over these
    p50: float | None  # None = none did
    p95: float | None
    worst: float | None


@dataclass(frozen=True)
class Report:
    seed: int
    seconds: float
    streams_at_a_time: int
    faults: dict[str, int]
    streams: int
    by_client: dict[str, int]
    tokens_compared: int
    differences: int  # streams whose tokens or text were not the reference's
    unfinished: int  # streams that did not end
    errors: list[str]
    resumptions: int
    repeats: int
    logs_lost: int
    breaks: dict[str, int]  # what streams were interrupted by
    recovery: dict[str, Recovery]
    longest_pause: float  # between two tokens of a stream, seconds
    longest_first_token: float  # from a request to its first token, seconds
    deaths: list[str] = field(default_factory=list)  # processes that ended without a fault
    no_cables: str | None = None  # why no link was cut
    visit: Visit = field(default_factory=Visit)  # what the guests did that attacked all the time

    @property
    def sound(self) -> bool:
        """Nothing lost, nothing doubled, nothing different, nobody's death but by a fault, something done."""
        bad = self.differences or self.unfinished or self.deaths or self.visit.errors
        return self.streams > 0 and self.tokens_compared > 0 and not bad


def summarise(
    records: Sequence[Record],
    happened: Sequence[Happened],
    *,
    seed: int,
    seconds: float,
    streams: int,
    deaths: Sequence[str] = (),
    no_cables: str | None = None,
    visit: Visit | None = None,
) -> Report:
    errors = [f"{record.client}, case {record.case}: {record.error}" for record in records if record.error]
    different = sum(1 for record in records if record.error and record.error.startswith("different"))
    breaks: Counter[str] = Counter()
    for record in records:
        breaks.update(record.breaks)
    return Report(
        seed=seed,
        seconds=seconds,
        streams_at_a_time=streams,
        faults=dict(sorted(Counter(fault.label for fault in happened).items())),
        streams=len(records),
        by_client=dict(sorted(Counter(record.client for record in records).items())),
        tokens_compared=sum(record.tokens for record in records),
        differences=different,
        unfinished=len(errors) - different,
        errors=errors[:20],
        resumptions=sum(record.resumptions for record in records),
        repeats=sum(record.repeats for record in records),
        logs_lost=sum(record.logs_lost for record in records),
        breaks=dict(breaks.most_common(20)),
        recovery=recoveries(records, happened),
        longest_pause=max((pause(record) for record in records), default=0.0),
        longest_first_token=max(
            (record.arrivals[0][0] - record.began for record in records if record.arrivals), default=0.0
        ),
        deaths=[death[:4000] for death in deaths],
        no_cables=no_cables,
        visit=visit or Visit(),
    )


def pause(record: Record) -> float:
    """The longest between two tokens, seconds."""
    times = [at for at, _ in record.arrivals]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def recoveries(records: Sequence[Record], happened: Sequence[Happened]) -> dict[str, Recovery]:
    """Returns figures by label. Streams that were held up before a fault already count for the one that held
    them up."""
    found: dict[str, list[float]] = {fault.label: [] for fault in happened}
    times = [[at for at, _ in record.arrivals] for record in records]
    for fault in happened:
        waits = [wait for one in times if (wait := held_up(one, fault.at)) is not None]
        if waits:
            found[fault.label].append(max(waits))
    count = Counter(fault.label for fault in happened)
    return {label: _recovery(count[label], sorted(waits)) for label, waits in sorted(found.items())}


def held_up(times: Sequence[float], at: float) -> float | None:
    """Seconds from `at` to the next of a stream's tokens; None = it did not flow then, or was not held up."""
    index = bisect_right(times, at)
    if index == 0 or index == len(times) or at - times[index - 1] > FLOWING_SECONDS:
        return None
    wait = times[index] - at
    ordinary = statistics.median(after - before for before, after in itertools.pairwise(times))
    return wait if wait > max(HELD_UP_SECONDS, ORDINARY * ordinary) else None


def _recovery(faults: int, waits: Sequence[float]) -> Recovery:
    return Recovery(
        faults, len(waits), quantile(waits, 0.5), quantile(waits, 0.95), waits[-1] if waits else None
    )


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest that so large a share is not above."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def to_markdown(report: Report) -> str:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        f"| {label} | {of.faults} | {of.felt} | {seconds(of.p50)} | {seconds(of.p95)} | {seconds(of.worst)} |"
        for label, of in report.recovery.items()
    ]
    clients = ", ".join(f"{count} {client}" for client, count in report.by_client.items())
    lines = [
        "# A storm",
        "",
        f"{report.seconds:.0f} seconds, {report.streams_at_a_time} streams at a time, seed {report.seed}; "
        f"{sum(report.faults.values())} faults.",
        "",
        "| | |",
        "|---|---|",
        f"| streams | {report.streams} ({clients}) |",
        f"| tokens compared | {report.tokens_compared} |",
        f"| streams that differed from their reference | {report.differences} |",
        f"| streams that did not end | {report.unfinished} |",
        f"| resumed by their clients | {report.resumptions} times |",
        f"| sent again, as no id had come yet | {report.repeats - report.logs_lost} times |",
        f"| begun again, as the log was lost | {report.logs_lost} times |",
        f"| longest pause between two tokens | {report.longest_pause:.2f} s |",
        f"| longest wait for a first token | {report.longest_first_token:.2f} s |",
        f"| processes that ended without a fault | {len(report.deaths)} |",
        "",
        "From a fault to the next token of the stream that waited longest for it, in seconds:",
        "",
        "| fault | times | held up a stream | p50 | p95 | worst |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    if report.no_cables is not None:
        lines += [f"No link was cut: {report.no_cables}.", ""]
    if report.visit.attempts:
        did = ", ".join(f"{name} {count}" for name, count in sorted(report.visit.attempts.items()))
        lines += [f"Guests that attacked all the time, by what they were answered: {did}.", ""]
    if report.visit.errors:
        lines += ["What guests should not have been answered:", ""]
        lines += [*(f"- {error}" for error in report.visit.errors[:20]), ""]
    if report.errors:
        lines += ["Errors:", "", *(f"- {error}" for error in report.errors), ""]
    return "\n".join(lines)
