from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.api.acceptance import SpeculationStats

STEP = st.integers(0, 8).flatmap(lambda verified: st.tuples(st.integers(0, verified), st.just(verified)))


def counted(steps: list[tuple[int, int]]) -> SpeculationStats:
    stats = SpeculationStats()
    for accepted, verified in steps:
        stats.add(accepted, verified)
    return stats


@given(st.lists(STEP))
def test_the_integers_reconcile(steps: list[tuple[int, int]]) -> None:
    stats = counted(steps)
    assert sum(stats.histogram) == stats.steps == sum(1 for _, verified in steps if verified)
    assert sum(i * count for i, count in enumerate(stats.histogram)) == stats.accepted
    assert stats.drafted == sum(verified for _, verified in steps)


@given(st.lists(STEP), st.lists(STEP))
def test_merging_is_counting_both(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    stats = counted(one)
    stats.merge(counted(other))
    assert stats == counted(one + other)


def test_ratios_as_vllm_defines_them() -> None:
    # vLLM's own example: 39 steps accept 0, one accepts 1, three accept 3, of 3 drafted each.
    stats = counted([(0, 3)] * 39 + [(1, 3)] + [(3, 3)] * 3)
    assert stats.as_json() == {
        "mean_acceptance_length": 1.2325581395348837,
        "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3],
        "num_spec_steps": 43,
        "num_accepted_draft_tokens": 10,
        "num_draft_tokens": 129,
    }


def test_without_speculation_the_ratios_are_still_numbers() -> None:
    stats = counted([(0, 0), (0, 0)]).as_json()
    assert stats["mean_acceptance_length"] == 1.0 and stats["draft_acceptance_rate"] == 0.0
    assert stats["num_spec_steps"] == 0 and stats["acceptance_histogram"] == []
