"""How much is read of one identity, and of all of them."""

from __future__ import annotations

import pytest

from verifier.reading_allowance import (
    BURST_SECONDS,
    IDENTITY_RATE,
    MESSAGE_SECONDS,
    MOST_EARNED_SECONDS,
    REMEMBERED,
    WHOLE_RATE,
    ReadingAllowance,
    StreamAllowance,
)

HOUR = 3600.0


def read_in_an_hour(streams: list[StreamAllowance]) -> float:
    """The seconds of a processor that streams cost that always have something to say."""
    read, free_at = 0.0, dict.fromkeys(range(len(streams)), 0.0)
    while True:
        number = min(free_at, key=free_at.__getitem__)
        now = free_at[number]
        if now >= HOUR:
            return read
        read += 1.0
        free_at[number] = now + streams[number].spend(1.0, now)


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_an_identity_costs_no_more_by_more_streams(streams: int) -> None:
    allowance = ReadingAllowance()
    read = read_in_an_hour([allowance.of("a") for _ in range(streams)])
    assert read <= IDENTITY_RATE * HOUR + BURST_SECONDS + streams


def test_all_identities_together_cost_no_more_than_the_whole() -> None:
    allowance = ReadingAllowance()
    read = read_in_an_hour([allowance.of(str(number)) for number in range(16)])
    assert IDENTITY_RATE < WHOLE_RATE and read <= WHOLE_RATE * HOUR + BURST_SECONDS + 16


def test_what_accepted_drafts_saved_is_read_for_nothing_and_is_the_streams_own() -> None:
    allowance = ReadingAllowance()
    flood, honest = allowance.of("a"), allowance.of("a")
    assert flood.spend(10.0, 0.0) > 0
    honest.earn(0.5)
    assert honest.spend(0.5, 0.0) == 0
    assert honest.spend(MESSAGE_SECONDS, 0.0) > 0 and flood.spend(MESSAGE_SECONDS, 0.0) > 0
    honest.earn(100.0)
    assert honest.earned == MOST_EARNED_SECONDS


def test_an_empty_message_weighs_and_bytes_weigh_more() -> None:
    small, large = ReadingAllowance().of("a"), ReadingAllowance().of("a")
    assert sum(small.message(0, 0.0) > 0 for _ in range(round(2 * BURST_SECONDS / MESSAGE_SECONDS))) > 0
    waits = [large.message(2**20, 0.0) for _ in range(100)]
    assert waits[-1] > 0


def test_who_comes_back_has_no_new_allowance_and_names_without_end_take_no_memory_without_end() -> None:
    allowance = ReadingAllowance()
    allowance.of("a").spend(10.0, 0.0)
    assert allowance.of("a").spend(MESSAGE_SECONDS, 0.0) > 0
    for number in range(2 * REMEMBERED):
        allowance.of(str(number))
    assert len(allowance._of) == REMEMBERED
