"""Which losses of verifiers count."""

import pytest

from router.losses import APART_SECONDS, MAX_LOSSES, Losses


def lost_at(*times: float) -> tuple[list[float], bool]:
    losses = Losses()
    return [losses.lost(at) for at in times], losses.too_many is not None


def test_the_first_loss_costs_no_time_and_all_further_ones_a_moment() -> None:
    assert lost_at(7.0)[0] == [0.0]
    assert lost_at(7.0, 7.0, 99.0)[0] == [0.0, APART_SECONDS, APART_SECONDS]


@pytest.mark.parametrize("count", [MAX_LOSSES + 1, 50])
def test_those_at_once_are_one(count: int) -> None:
    assert not lost_at(*(0.01 * number for number in range(count)))[1]


def test_one_after_another_they_are_too_many() -> None:
    times = [number * APART_SECONDS for number in range(MAX_LOSSES + 1)]
    assert lost_at(*times)[1] and not lost_at(*times[:-1])[1]


def test_what_dies_of_a_request_at_once_is_not_asked_for_ever() -> None:
    losses, now, asked = Losses(), 0.0, 0
    while not losses.too_many:
        now += losses.lost(now) + 0.001
        asked += 1
    assert asked <= MAX_LOSSES + 2


def test_a_token_makes_them_forgotten() -> None:
    losses = Losses()
    for number in range(MAX_LOSSES):
        losses.lost(number * APART_SECONDS)
    losses.gained()
    assert losses.lost(99.0) == 0.0 and not losses.too_many
