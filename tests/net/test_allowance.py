"""What a peer that is not trusted may say, and what becomes of one that says more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.net.allowance import ENTRIES_AT_ONCE, ENTRY_UNITS, MESSAGE_UNITS, Allowance, CutOff


def allowance(now: list[float], burst: float = 10_000.0) -> Allowance:
    return Allowance("drafter", 1000.0, burst, lambda: now[0])


def test_who_says_no_more_than_it_may_is_heard_for_ever() -> None:
    now = [0.0]
    heard = allowance(now)
    for _ in range(1000):
        now[0] += 1.0
        heard.message(1000 - MESSAGE_UNITS)


def test_bytes_and_messages_count_and_who_says_more_is_cut_off_with_a_sentence() -> None:
    for size, said in ((0, 10_000 // MESSAGE_UNITS), (5000 - MESSAGE_UNITS, 2)):
        heard = allowance([0.0])
        for _ in range(said):
            heard.message(size)
        with pytest.raises(CutOff, match="the drafter is cut off for 60 seconds: it says more than") as cut:
            heard.message(size)
        assert cut.value.retry_after == 60


def test_of_a_list_without_end_little_is_read() -> None:
    read = 0

    def entries() -> Iterator[int]:
        nonlocal read
        while True:
            read += 1
            yield read

    with pytest.raises(CutOff):
        for _ in allowance([0.0], 10 * ENTRIES_AT_ONCE * ENTRY_UNITS).entries(entries()):
            pass
    assert read <= 11 * ENTRIES_AT_ONCE
