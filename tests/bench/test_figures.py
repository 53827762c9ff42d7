"""From arrivals to figures, ratios and the comparison of texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider_cli.bench.cells import ALL_KINDS, LOCK_STEP, PLAIN, STREAMING, TUNED, Cell, Setting
from outrider_cli.bench.client import Reply, count_tokens
from outrider_cli.bench.figures import (
    Measured,
    Spread,
    figures,
    measured,
    over,
    percentile,
    with_all_kinds,
)
from outrider_cli.bench.group import Answers
from outrider_cli.bench.texts import Texts

NEAR = Setting("code", 0.0, 1, 0.0)
FAR = replace(NEAR, rtt_ms=20.0)


def reply(sent: float, *arrivals: tuple[float, int], **told: int) -> Reply:
    return Reply(sent=sent, arrivals=list(arrivals), **told)


def group(*replies: Reply, cpu: dict[str, float] | None = None) -> Measured:
    return measured(Answers(list(replies), cpu_seconds=cpu or {}))


def at_rate(rate: float) -> Measured:
    return group(reply(0, (1, 1), (2, round(rate))))


def test_a_single_stream_is_counted_from_its_first_token() -> None:
    found = group(reply(1.0, (3.0, 1), (4.0, 2), (5.0, 4)), cpu={"target": 1.5, "draft": 0.5})
    assert found.rate == 6 / 2
    assert found.first_token_seconds == [2.0]
    assert found.gap_seconds == [1.0, 1.0]
    assert found.tokens_per_arrival == 7 / 3
    assert found.cpu_shares == {"target": 0.75, "draft": 0.25}
    assert found.tokens_per_target_second == 6 / 1.5
    assert found.tokens_per_core_second == 6 / (1.5 + 0.5)


def test_several_workloads_have_figures_of_all_together() -> None:
    prose = replace(NEAR, workload="prose")
    runs = {
        Cell(PLAIN, NEAR): [at_rate(10)],
        Cell(STREAMING, NEAR): [at_rate(20)],
        Cell(PLAIN, prose): [at_rate(30)],
        Cell(STREAMING, prose): [at_rate(90)],
    }
    everything = with_all_kinds(runs)
    both = replace(NEAR, workload=ALL_KINDS)
    assert len(everything) == 6 and everything.items() >= runs.items()
    assert figures(everything[Cell(STREAMING, both)]).rate.median == 55
    ratio = over(everything, Cell(STREAMING, both), PLAIN)
    assert ratio is not None and ratio.median == 2.5
    one = {cell: found for cell, found in runs.items() if cell.setting == NEAR}
    assert with_all_kinds(one) == one


def test_what_counts_begins_with_the_last_stream_and_ends_with_the_last_answer() -> None:
    early = reply(0.0, (1.0, 5), (2.0, 1), (3.0, 1), (4.0, 2))
    late = reply(0.0, (2.0, 1), (3.0, 1), (4.0, 1), (7.0, 6))
    further = [
        (1.5, 50),
        (5.0, 3),
        (7.0, 4),
        (7.5, 50),
    ]  # the last one was cut off
    found = measured(Answers([early, late], further, {"target": 2.0}))
    assert found.rate == (1 + 2 + 1 + 1 + 6 + 3 + 4) / (7 - 2)
    assert found.tokens_per_target_second == 18 / 2.0
    assert (found.tokens_per_arrival, len(found.first_token_seconds), len(found.gap_seconds)) == (
        18 / 8,
        2,
        6,
    )


def test_what_a_server_does_not_tell_of_further_answers_is_as_in_the_first() -> None:
    found = measured(
        Answers([reply(0, (1, 2), (2, 4)), reply(0, (1, 2), (3, 4))], [(2.5, None), (3.0, None)])
    )
    assert found.rate == (4 + 4 + 2 * 3) / (3 - 1)


def test_all_tokens_at_once_have_no_rate() -> None:
    found = group(reply(0, (1, 8)))
    assert found.rate == 0
    assert figures([found]).gap_ms is None


def test_figures_over_repetitions() -> None:
    one = group(reply(0, (1, 1), (2, 3), drafted=10, accepted=6, speculative_steps=4), cpu={"target": 0.5})
    two = group(reply(0, (2, 1), (3, 5), drafted=10, accepted=2, speculative_steps=4), cpu={"target": 0.25})
    found = figures([one, two])
    assert found.rate == Spread(4, 3.5, 4.5)
    assert found.acceptance_rate == 8 / 20
    assert found.mean_accepted_length == (8 + 8) / 8
    assert found.first_token_ms == pytest.approx((1500, 1950))
    assert found.cpu_shares == {"target": 0.375}
    assert found.tokens_per_target_second == Spread(13, 9.5, 16.5)
    assert figures([at_rate(3)]).acceptance_rate is None


def test_what_a_processor_told_with_the_reply_counts_for_a_single_stream() -> None:
    told = reply(0, (1, 1), (3, 4))
    told.cpu_seconds = 4.0
    assert group(told, cpu={"client": 1.0}).tokens_per_target_second == 1.0


def test_spread_and_percentiles() -> None:
    assert Spread.of([5.0]) == Spread(5, 5, 5)
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3, 2, 4)
    assert str(Spread(1.234, 1.0, 2.0)) == "1.23 (1.00 to 2.00)"
    assert str(Spread(123.4, 100, 200.0)) == "123.4 (100.0 to 200.0)"
    assert percentile([7.0], 95) == 7
    assert percentile([float(n) for n in range(101)], 95) == 95


def test_ratios_are_taken_repetition_by_repetition_and_in_the_same_setting() -> None:
    runs = {
        Cell(STREAMING, NEAR): [at_rate(4), at_rate(30)],
        Cell(PLAIN, NEAR): [at_rate(2), at_rate(10)],
        Cell(LOCK_STEP, NEAR): [at_rate(2), at_rate(0)],
        Cell(TUNED, FAR): [at_rate(1), at_rate(1)],
    }
    assert over(runs, Cell(STREAMING, NEAR), PLAIN) == Spread(2.5, 2.25, 2.75)
    assert over(runs, Cell(STREAMING, NEAR), LOCK_STEP) is None
    assert over(runs, Cell(STREAMING, NEAR), TUNED) is None


def test_texts_are_the_same_only_where_all_of_them_are() -> None:
    texts = Texts()
    near, far = NEAR, FAR
    texts.add(Cell(PLAIN, near), 0, "a")
    texts.add(Cell(STREAMING, near), 0, "a")
    texts.add(Cell(STREAMING, far), 0, "a")
    texts.add(Cell(STREAMING, far), 1, "b")  # plain was not asked this
    assert texts.same(STREAMING, PLAIN) == (1, 1)
    texts.add(Cell(PLAIN, near), 1, "c")
    assert texts.same(STREAMING, PLAIN) == (1, 2)
    texts.add(Cell(STREAMING, replace(near, streams=4)), 0, "other")
    assert texts.same(STREAMING, PLAIN) == (0, 2)
    assert texts.same(PLAIN, PLAIN) == (2, 2)


def test_tokens_of_a_piece_as_the_server_tells_them() -> None:
    assert count_tokens([(1.0, "a", 1), (2.0, "bcd", 5)], 5) == [(1.0, 1), (2.0, 4)]


def test_tokens_of_a_piece_by_its_length_where_only_the_sum_is_told() -> None:
    assert count_tokens([(1.0, "ab", None), (2.0, "abcdef", None)], 4) == [(1.0, 1), (2.0, 3)]


def test_one_token_a_piece_where_nothing_is_told() -> None:
    assert count_tokens([(1.0, "ab", None), (2.0, "abcdef", None)], None) == [(1.0, 1), (2.0, 1)]
