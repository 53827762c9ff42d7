"""The right to draft: of one session, one seat and one turn."""

from __future__ import annotations

from outrider.net.draft_right import LAST_TURN, MOST_SEATS, right, right_of

KEY = b"k" * 16


def test_each_seat_and_turn_has_its_own() -> None:
    for seat in range(MOST_SEATS):
        for turn in (0, 1, 256, LAST_TURN):
            assert right_of(KEY, right(KEY, turn, seat)) == (seat, turn)


def test_it_is_of_one_session() -> None:
    assert right_of(b"l" * 16, right(KEY, 3)) is None
    assert right_of(b"", right(b"", 0)) is None, "no key, no right"


def test_who_has_one_turn_cannot_make_another_of_it_nor_another_seat() -> None:
    shown = right(KEY, 3)
    assert right_of(KEY, shown[:1] + (4).to_bytes(4) + shown[5:]) is None
    assert right_of(KEY, b"\1" + shown[1:]) is None
    assert right_of(KEY, shown[:-1]) is None and right_of(KEY, shown + b"x") is None
    assert right_of(KEY, KEY) is None and right_of(KEY, b"") is None


def test_a_session_has_only_so_many_seats() -> None:
    assert right_of(KEY, right(KEY, 0, MOST_SEATS)) is None
