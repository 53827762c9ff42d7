"""The governor in a made-up world: what it loses against the best way, and what it notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.simulation.ways import DRAFTED, Rate, World
from verifier.governor import BLOCK_STEPS, SETTLING_STEPS, Governor, StepSeen

PLAIN = 1
CHANGE = 150.0  # seconds
SEEDS = range(6)


def always(rate: float) -> Rate:
    return lambda _: rate


def change(before: float, after: float) -> Rate:
    return lambda now: before if now < CHANGE else after


def worlds(rates: Sequence[Rate], sessions: int | Callable[[float], int], seconds: float) -> list[World]:
    count = sessions if callable(sessions) else lambda _: sessions
    return [World(rates, count, seconds, seed=seed) for seed in SEEDS]


def median(shares: Sequence[float]) -> float:
    return sorted(shares)[len(shares) // 2]


@pytest.mark.parametrize(
    ("drafted", "plain", "sessions", "seconds"),
    [
        (5.8, 15.0, 1, 0.3),  # both models share all cores
        (250.0, 330.0, 16, 0.15),  # the target could have the drafter's core
        (300.0, 330.0, 64, 0.3),
        (250.0, 330.0, 16, 0.02),
    ],
)
def test_drafts_that_do_not_pay_rest(drafted: float, plain: float, sessions: int, seconds: float) -> None:
    shares, gains = [], []
    for world in worlds([always(drafted), always(plain)], sessions, seconds):
        world.run(CHANGE)
        shares.append(world.run(CHANGE + 600).share)
        gains.append(world.governor.gain(DRAFTED, PLAIN))
        assert world.governor.usual == PLAIN
    assert median(gains) == pytest.approx(drafted / plain, rel=0.1)
    assert min(shares) > 0.97


@pytest.mark.parametrize(
    ("drafted", "plain", "sessions", "seconds"),
    [(47.0, 15.0, 1, 0.1), (450.0, 300.0, 64, 0.3), (9000.0, 5000.0, 64, 0.013), (270.0, 250.0, 16, 0.1)],
)
def test_where_drafts_pay_comparing_costs_little(
    drafted: float, plain: float, sessions: int, seconds: float
) -> None:
    shares = []
    for world in worlds([always(drafted), always(plain)], sessions, seconds):
        world.run(CHANGE)
        shares.append(world.run(CHANGE + 600).share)
        assert world.governor.usual == DRAFTED
    assert median(shares) > 0.98 and min(shares) > 0.96


def test_where_nothing_is_to_gain_nothing_is_lost() -> None:
    for world in worlds([always(250.0), always(250.0)], 16, 0.1):
        assert world.run(600.0).share > 0.975


def test_drafts_that_become_slow_are_noticed_at_once() -> None:
    shares = []
    for world in worlds([change(500.0, 280.0), always(330.0)], 16, 0.1):
        world.run(CHANGE)
        shares.append(world.run(CHANGE + 120).share)
        assert world.governor.usual == PLAIN
    assert median(shares) > 0.97


def test_another_number_of_sessions_is_another_load() -> None:
    for before, after in ((1, 16), (16, 1)):
        rates = [
            change(*(47.0, 250.0)[:: 1 if before == 1 else -1]),
            change(*(15.0, 330.0)[:: 1 if before == 1 else -1]),
        ]
        ways = []
        for world in worlds(rates, lambda now, a=before, b=after: a if now < CHANGE else b, 0.1):  # type: ignore[misc]
            world.run(CHANGE + 60)
            ways.append(world.governor.usual)
        assert median(ways) == (PLAIN if after == 16 else DRAFTED)


@pytest.mark.parametrize("after", [5.0, 10.0, 30.0])
def test_of_several_ways_the_best_is_found_soon_when_the_load_is_another(after: float) -> None:
    """Though another is better than the usual one, too, and is tried first; and though trials of a while ago
    are not paid for."""

    def change(before: float, later: float) -> Rate:
        return lambda now: before if now < after else later

    rates = [change(107, 203), change(32, 300), change(100, 202), change(20, 215)]
    for world in worlds(rates, lambda now: 1 if now < after else 16, 0.05):
        world.run(after + 20)
        assert world.governor.usual == PLAIN


def test_drafts_that_become_good_while_they_rest_are_found_out() -> None:
    for world in worlds([change(200.0, 500.0), always(330.0)], 16, 0.1):
        world.run(CHANGE)
        assert world.governor.usual == PLAIN
        world.run(CHANGE + 300)
        assert world.governor.usual == DRAFTED


def test_of_several_ways_the_best_is_found_as_others_take_and_give_back_a_core() -> None:
    ways = []
    for world in worlds([change(250.0, 130.0), change(330.0, 170.0), change(200.0, 195.0)], 16, 0.1):
        world.run(CHANGE)
        assert world.governor.usual == PLAIN
        world.run(CHANGE + 300)
        ways.append(world.governor.usual)
    assert ways.count(2) >= len(ways) - 1


def test_sessions_that_come_and_go_do_not_mislead() -> None:
    counts = [8, 16, 4, 20]

    def sessions(now: float) -> int:
        return counts[int(now // 12) % 4]

    for world in worlds([lambda now: 20.0 * sessions(now), lambda now: 12.0 * sessions(now)], sessions, 0.1):
        assert world.run(600.0).share > 0.95 and world.governor.usual == DRAFTED


def test_a_drafter_has_time_to_catch_up_before_it_is_judged() -> None:
    governor = Governor(2, lambda: 0.5)
    while governor.way == DRAFTED:
        governor.observe(StepSeen(0.1, 10, 10, 0.0))
    while governor.way == PLAIN:
        governor.observe(StepSeen(0.1, 5, 10, None))
    for _ in range(SETTLING_STEPS + 8):  # nothing comes at first
        governor.observe(StepSeen(0.1, 1, 10, 1.0))
    for _ in range(BLOCK_STEPS):
        governor.observe(StepSeen(0.1, 10, 10, 0.0))
    assert governor.way == DRAFTED == governor.usual
    assert governor.gain(PLAIN, DRAFTED) == pytest.approx(0.5, rel=0.01)


def test_it_is_not_fooled_by_a_machine_that_slows_down_for_a_trial_and_after() -> None:
    """Drafts are 1.05 times as fast, and the machine becomes slower by a tenth with each block."""
    governor, speed, before = Governor(2, lambda: 0.5), 1.0, 0
    for _ in range(60):
        way = governor.way
        speed *= 0.9 if way != before else 1.0
        before = way
        governor.observe(StepSeen(0.1, (10.5 if way == DRAFTED else 10.0) * speed, 10, 0.0))
    assert governor.usual == DRAFTED and governor.trials


@pytest.mark.parametrize("gain", [1.5, 6.0])
def test_it_is_not_fooled_by_others_that_give_back_the_cores_as_a_trial_begins(gain: float) -> None:
    """What was ten times slower before is as fast as ever during the trial and after it."""
    governor, speed, ways = Governor(2, lambda: 0.5), 0.1, set()
    for _ in range(200):
        if governor.way == PLAIN:
            speed = 1.0
        governor.observe(StepSeen(0.1, (gain if governor.way == DRAFTED else 1.0) * 10 * speed, 10, 0.0))
        ways.add(governor.usual)
    assert ways == {DRAFTED} and governor.trials
    assert governor.gain(DRAFTED, PLAIN) == pytest.approx(gain, rel=0.5)
