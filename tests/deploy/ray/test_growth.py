"""Drafters that are added must have helped: the policy's decisions, by counts of looks at a pool."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from deploy.autoscaling import DrafterPolicy
from deploy.growth import PAUSE_SECONDS, Growth, Pace, after

LOOK_SECONDS = 10.0
SETTLE_SECONDS = 40.0
MOST = 3  # drafters
HOURS = 3600 / LOOK_SECONDS  # in looks
TAKEN = {
    1: 470.0,
    2: 360.0,
    3: 300.0,
}  # measured: tokens/s with so many drafters on a host without free cores
FREE = {1: 470.0, 2: 700.0, 3: 900.0}


def sizes(goodput: Callable[[int, int], float], looks: int, sessions: Callable[[int], float]) -> list[int]:
    """The size of the pool at each look, if drafts are always wanting and drafters always busy."""
    policy, size, found = DrafterPolicy(SETTLE_SECONDS), 1, []
    for look in range(looks):
        stats = {
            "busy": 0.9,
            "kv_usage": 0.1,
            "draft_starvation": 0.5,
            "target_goodput": goodput(size, look),
            "target_sessions": sessions(look),
        }
        context = SimpleNamespace(
            target_num_replicas=size,
            aggregated_metrics={name: dict.fromkeys(range(size), value) for name, value in stats.items()},
            current_time=look * LOOK_SECONDS,
        )
        wanted, _ = policy(context)  # type: ignore[arg-type]
        size = min(MOST, max(1, wanted))
        found.append(size)
    return found


def test_where_drafters_help_there_are_as_many_as_may_be() -> None:
    found = sizes(lambda size, look: FREE[size], 60, lambda look: 8)
    assert found[-1] == MOST
    assert found == sorted(found), "the pool never shrinks"


def test_where_the_cores_are_taken_there_is_one_and_another_try_is_rare() -> None:
    found = sizes(lambda size, look: TAKEN[size], int(24 * HOURS), lambda look: 8)
    assert max(found) == 2, "what made it slower is not done again at once"
    assert found[-1] == 1
    tries = sum(earlier < later for earlier, later in zip([1, *found], found, strict=False))
    assert tries == 7, "at once, then after half an hour, after one, two, four, eight and eight"
    assert found.count(2) <= tries * (SETTLE_SECONDS / LOOK_SECONDS + 1)


def test_cores_that_become_free_are_found() -> None:
    freed = int(2 * HOURS)
    pace = lambda size, look: (TAKEN if look < freed else FREE)[size]  # noqa: E731
    found = sizes(pace, int(8 * HOURS), lambda look: 8)
    assert found[freed] == 1 and found[-1] == MOST


def test_sessions_that_come_or_go_meanwhile_are_not_held_against_a_drafter() -> None:
    """It has helped if all of them together get more, or each of fewer does."""
    before = Pace(400, 8)
    assert Pace(500, 16).beats(before), "more sessions, each with less"
    assert Pace(300, 4).beats(before), "fewer sessions, each with more"
    assert not Pace(400, 8).beats(before)
    assert not Pace(410, 8).beats(before), "that is noise"
    assert not Pace(300, 8).beats(before)
    assert not Pace(200, 4).beats(before)


def test_a_trial_begins_when_the_new_drafter_works_and_there_is_something_to_do() -> None:
    growth = after(Growth(), 1, 1, Pace(400, 8), 0, SETTLE_SECONDS)
    growth = after(growth, 2, 1, Pace(400, 8), 10, SETTLE_SECONDS)
    for now in (60, 120, 180):
        growth = after(growth, 2, 1, Pace(380, 8), now, SETTLE_SECONDS)  # one of two has not reported yet
    growth = after(growth, 2, 2, Pace(0, 0), 240, SETTLE_SECONDS)  # nobody asks for anything
    growth = after(growth, 2, 2, Pace(300, 8), 270, SETTLE_SECONDS)
    assert growth.allowed(3, 270) == 2, "the trial is on"
    growth = after(growth, 2, 2, Pace(300, 8), 280, SETTLE_SECONDS)
    assert growth.allowed(3, 280) == 1, "it has failed"


@pytest.mark.parametrize("waited", [PAUSE_SECONDS - 1, PAUSE_SECONDS + 1])
def test_the_pause_counts_from_when_the_pool_is_small_again(waited: float) -> None:
    """Serve shrinks a pool only when that was wanted for a while, which is not the pause."""
    growth = after(Growth(), 1, 1, Pace(400, 8), 0, SETTLE_SECONDS)
    for now in (10, 60):
        growth = after(growth, 2, 2, Pace(300, 8), now, SETTLE_SECONDS)
    late = 10 * PAUSE_SECONDS
    assert growth.allowed(3, late) == 1
    growth = after(growth, 1, 1, Pace(400, 8), late, SETTLE_SECONDS)
    assert growth.allowed(2, late + waited) == (1 if waited < PAUSE_SECONDS else 2)
