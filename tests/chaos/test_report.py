"""What a report says of streams and faults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.clients import Record
from tests.chaos.report import Happened, Recovery, Report, held_up, pause, quantile, summarise, to_markdown


def record(times: list[float], error: str | None = None, **about: Any) -> Record:
    arrivals = [(at, index + 1) for index, at in enumerate(times)]
    return Record("grpc", 0, 0.0, 100.0, len(times), arrivals, [(0.0, 0)], error=error, **about)


def steady(start: float, end: float, every: float = 0.1) -> list[float]:
    return [start + every * index for index in range(round((end - start) / every))]


def report(records: list[Record], *happened: Happened) -> Report:
    return summarise(records, happened, seed=5, seconds=60, streams=4)


def test_a_fault_is_felt_by_the_stream_that_it_holds_up() -> None:
    untouched, touched = record(steady(1, 20)), record([*steady(1, 10), *steady(12.5, 20)])
    told = report([untouched, touched], Happened(9.95, "verifier killed", "verifier-1", 1.0))
    recovery = told.recovery["verifier killed"]
    assert (recovery.faults, recovery.felt) == (1, 1)
    assert recovery.p50 == recovery.worst == pytest.approx(2.55)
    assert told.longest_pause == pytest.approx(2.6)


def test_a_fault_that_nobody_felt_has_no_recovery() -> None:
    told = report([record(steady(1, 20))], Happened(9.95, "drafter killed", "drafter-1", 1.0))
    assert told.recovery["drafter killed"] == Recovery(1, 0, None, None, None)
    assert "| drafter killed | 1 | 0 | - | - | - |" in to_markdown(told)


def test_a_pause_counts_for_the_fault_that_it_began_with() -> None:
    times = [*steady(1, 10), *steady(15, 20)]
    assert held_up(times, 9.95) == pytest.approx(5.05)
    assert held_up(times, 13.0) is None  # it was held up before
    assert held_up(times, 0.5) is None  # it had not begun
    assert held_up(times, 30.0) is None  # it was over
    assert held_up(times, 5.0) is None  # it went on at once


def test_streams_are_counted_by_how_they_ended() -> None:
    told = report(
        [
            record([1.0, 2.0], resumptions=2),
            record([1.0], error="different: at 1 came [3]"),
            record([1.0], error="no token for 120 s; {}", repeats=3, logs_lost=1),
        ]
    )
    assert (told.streams, told.tokens_compared, told.differences, told.unfinished) == (3, 4, 1, 1)
    assert (told.resumptions, told.repeats, told.logs_lost) == (2, 3, 1)
    assert not told.sound
    assert "different: at 1" in to_markdown(told)


def test_a_storm_in_which_nothing_was_compared_is_not_sound() -> None:
    assert report([record([1.0])]).sound
    assert not report([]).sound
    assert not report([record([])]).sound


def test_pauses_and_quantiles() -> None:
    assert pause(record([])) == 0.0
    assert pause(record([1.0, 1.5, 4.0, 4.1])) == 2.5
    assert quantile([], 0.5) is None
    assert [quantile([1, 2, 3, 4], share) for share in (0.25, 0.5, 0.95, 1.0)] == [1, 2, 4, 4]
