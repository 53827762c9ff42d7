"""Which draft tokens enter a step."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.admission import admit
from verifier.price import StepTime

FLAT = StepTime.measured({1: 0.04, 512: 0.04})
STEEP = StepTime.measured({1: 0.001, 512: 0.512})  # a millisecond a token: saturated
KNEE = StepTime.measured({1: 0.04, 8: 0.04, 108: 0.24})  # eight tokens are free, then 2 ms each


def test_where_tokens_take_no_time_all_of_them_enter() -> None:
    admission = admit([[0.9, 0.5, 0.1], [0.01]], 2, 2, FLAT, 100)
    assert admission.counts == [3, 1] and admission.price == 0


def test_where_the_machine_is_saturated_only_what_nearly_brings_itself_in_enters() -> None:
    admission = admit([[0.999, 0.4], [0.3]], 64, 64, STEEP, 100)
    assert admission.counts == [0, 0] and admission.price == pytest.approx(1)
    assert admit([[0.9, 0.8], [0.3]], 64, 32, STEEP, 100).counts == [2, 0]  # where a token is had for less


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

    def rate(counts: tuple[int, ...]) -> float:
        gain = alone + sum(sum(path[:count]) for path, count in zip(survival, counts, strict=True))
        return gain / step_time.at(alone + sum(counts))

    got = admit(survival, alone, alone, step_time, budget)
    choices = itertools.product(*(range(len(path) + 1) for path in survival))
    best = max(rate(counts) for counts in choices if sum(counts) <= budget)
    assert sum(got.counts) <= budget
    assert rate(tuple(got.counts)) == pytest.approx(best)
    assert 0 <= got.price <= 1
