"""The right to draft: of one session and one turn."""

from __future__ import annotations

from outrider.net.draft_right import LAST_TURN, right, turn_of

KEY = b"k" * 16


def test_each_turn_has_its_own() -> None:
    assert [turn_of(KEY, right(KEY, turn)) for turn in (0, 1, 256, LAST_TURN)] == [0, 1, 256, LAST_TURN]


def test_it_is_of_one_session() -> None:
    assert turn_of(b"l" * 16, right(KEY, 3)) is None


def test_who_has_one_turn_cannot_make_another_of_it() -> None:
    shown = right(KEY, 3)
    assert turn_of(KEY, (4).to_bytes(4) + shown[4:]) is None
    assert turn_of(KEY, shown[:-1]) is None and turn_of(KEY, shown + b"x") is None
    assert turn_of(KEY, KEY) is None and turn_of(KEY, b"") is None
