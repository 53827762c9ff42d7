"""Which draft tokens enter a step."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.admission import admit
from verifier.meter import LONGEST_STEP
from verifier.price import StepTime

FLAT = StepTime.measured({1: 0.04, 512: 0.04})
STEEP = StepTime.measured({1: 0.001, 512: 0.512})  # a millisecond a token: saturated
SLOPE = StepTime.measured({1: 0.01, 513: 0.522})  # of 10 ms, and a millisecond a token
KNEE = StepTime.measured({1: 0.04, 8: 0.04, 108: 0.24})  # eight tokens are free, then 2 ms each


def test_where_tokens_take_no_time_all_of_them_enter() -> None:
    admission = admit([[0.9, 0.5, 0.1], [0.01]], 2, 2, FLAT, 100)
    assert admission.counts == [3, 1] and admission.price == 0


def test_where_the_machine_is_saturated_only_what_nearly_brings_itself_in_enters() -> None:
    admission = admit([[0.999, 0.4], [0.3]], 64, 64, STEEP, 100)
    assert admission.counts == [0, 0] and admission.price == pytest.approx(1)
    assert admit([[0.9, 0.8], [0.3]], 64, 32, STEEP, 100).counts == [2, 0]  # where a token is had for less


def test_who_has_no_drafts_waits_for_others_so_long_and_no_longer() -> None:
    forced = [[0.99**depth for depth in range(1, 33)]] * 15
    beside = admit([*forced, []], 16, 16, SLOPE, 512).counts
    assert SLOPE.at(16 + sum(beside)) <= LONGEST_STEP * SLOPE.at(16) < SLOPE.at(17 + sum(beside))
    assert admit([*forced, [0.0]], 16, 16, SLOPE, 512).counts[:15] == beside[:15], "as good as none"
    better_off = admit([*forced, [1.0]], 16, 16, SLOPE, 512).counts
    assert 2 * sum(beside) < sum(better_off) and better_off[15] == 1, "which has two tokens a step"
    among_its_like = admit([*forced, forced[0]], 16, 16, SLOPE, 512).counts
    assert 6 * sum(beside) < sum(among_its_like), "nobody waits without having something of it"
    usual = [6.0] * 16
    now_and_then = admit([*forced, []], 16, 16, SLOPE, 512, usual).counts
    assert 6 * sum(beside) < sum(now_and_then), "who has none now and has had some lately is like them"
    assert admit([*forced, []], 16, 16, SLOPE, 512, [*usual[:15], 1.0]).counts == beside
    assert admit([*forced, []], 16, 15, SLOPE, 512, [*usual[:15], math.inf]).counts == now_and_then[:16]


def test_at_a_knee_the_likeliest_fill_what_is_free_whosever_they_are() -> None:
    sessions = [[0.9, 0.2, 0.1], [0.8, 0.7, 0.6], [0.05] * 3]
    admission = admit(sessions, 3, 3, KNEE, 100)
    assert admission.counts == [2, 3, 0]  # five of nine fit under the knee; a sixth would cost .27 tokens
    assert admission.price == pytest.approx(6.2 / 0.04 * 2e-3)


def test_the_budget_bounds_what_enters() -> None:
    assert admit([[0.9, 0.8], [0.85]], 2, 2, FLAT, 2).counts == [1, 1]
    assert admit([[0.9]], 2, 2, FLAT, 0).counts == [0]
    assert admit([[0.9]], 2, 2, FLAT, -3).counts == [0]


def test_nobody_and_nothing() -> None:
    assert admit([], 0, 0, FLAT, 10).counts == []
    assert admit([[], []], 2, 2, FLAT, 10).counts == [0, 0]


paths = st.lists(st.floats(0, 1), max_size=3).map(
    lambda chances: [float(np.prod(chances[: end + 1])) for end in range(len(chances))]
)


@given(
    st.lists(paths, max_size=3),
    st.integers(1, 4),
    st.lists(st.floats(0.001, 0.1), min_size=4, max_size=4),
    st.integers(0, 9),
)
def test_no_other_choice_commits_more_a_second(
    survival: list[list[float]], alone: int, seconds: list[float], budget: int
) -> None:
    step_time = StepTime.measured(dict(zip((1, 2, 5, 9), itertools.accumulate(seconds), strict=True)))

    def gains(counts: tuple[int, ...]) -> list[float]:
        """Of each session that the tokens belong to."""
        return [1 + sum(path[:count]) for path, count in zip(survival, counts, strict=True)]

    def rate(counts: tuple[int, ...]) -> float:
        gain = alone + sum(sum(path[:count]) for path, count in zip(survival, counts, strict=True))
        return gain / step_time.at(alone + sum(counts))

    def may_be(counts: tuple[int, ...]) -> bool:
        slower = step_time.at(alone + sum(counts)) / (LONGEST_STEP * step_time.at(alone))
        return sum(counts) <= budget and (not any(counts) or slower <= min(gains(counts)))

    admission = admit(survival, alone, alone, step_time, budget)
    got = tuple(admission.counts)
    likeliest = sorted((-chance, index) for index, path in enumerate(survival) for chance in path)
    entering = [[index for _, index in likeliest[:count]] for count in range(len(likeliest) + 1)]
    beginnings = [tuple(each.count(index) for index in range(len(survival))) for each in entering]
    assert may_be(got)
    assert rate(got) == pytest.approx(max(rate(counts) for counts in beginnings if may_be(counts)))
    choices = [*itertools.product(*(range(len(path) + 1) for path in survival))]
    if all(may_be(counts) for counts in choices if sum(counts) <= budget):
        assert rate(got) == pytest.approx(max(rate(counts) for counts in choices if sum(counts) <= budget))
    assert 0 <= admission.price <= 1
