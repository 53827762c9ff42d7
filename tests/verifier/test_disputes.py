"""Who is believed where drafters contradict one another."""

from __future__ import annotations

import pytest

from tests.verifier.test_drafter_seat import seated, settle
from verifier.disputes import DEPTHS, Prevailing, prevailed


def test_of_several_tokens_the_one_that_counts_as_likelier_is_judged() -> None:
    claims = {"a": [(1, 0.9), (2, 0.5), (3, 0.9)], "b": [(1, 0.8), (7, 0.6), (8, 1.0)]}
    assert prevailed(claims, [1, 2, 3]) == [("b", 1, 0.6, False)]
    assert prevailed(claims, [1, 7, 8]) == [("b", 1, 0.6, True)]
    assert prevailed(claims, [4, 2, 3]) == [], "behind a wrong token nothing is judged"
    assert prevailed(claims, [1]) == []
    assert prevailed({}, [1, 2]) == prevailed({"a": [(1, 0.9)]}, [2]) == []


def test_of_equals_all_are_judged_and_who_agrees_with_another_without_being_so_sure_is_not() -> None:
    claims = {"a": [(1, 1.0)], "b": [(2, 1.0)], "c": [(2, 0.3)]}
    assert prevailed(claims, [1]) == [("a", 0, 1.0, True), ("b", 0, 1.0, False)]


def test_a_third_is_judged_once_it_alone_contradicts() -> None:
    claims = {"a": [(1, 1.0), (2, 0.5)], "b": [(1, 1.0), (3, 0.7)], "c": [(4, 0.1)]}
    assert prevailed(claims, [1, 2]) == [("a", 0, 1.0, True), ("b", 0, 1.0, True), ("b", 1, 0.7, False)]


def test_who_is_wrong_there_is_believed_less_at_that_depth_and_who_is_right_as_it_says_is_not() -> None:
    wrong, right = Prevailing(), Prevailing()
    for step in range(200):
        wrong.judge(DEPTHS + 3, 1.0, False)
        right.judge(0, 0.5, step % 2 == 0)
    assert wrong.factors[:-1] == [1.0] * (DEPTHS - 1) and wrong.factors[-1] < 0.07
    assert right.factors[0] > 0.95
    wrong.judge(0, 0.1, True)
    assert max(wrong.factors) == 1
    assert wrong.copy() == wrong


@pytest.mark.parametrize("sure", [255, 140])
def test_one_that_repeats_what_is_easy_takes_no_hard_token_s_place_for_long(sure: int) -> None:
    """The honest one's next token is sure, the one behind it is right though it says .5. The other repeats
    the first, and says another in the place of the second: in the mean it keeps its promise well enough."""
    running, honest, rider = seated()
    accepted = []
    for step in range(15):
        base, now = len(running.session.log), float(step)
        running.table.length = base - 1
        honest.offer(base, [base, base + 1], (), bytes([255, 127]), now)
        rider.offer(base, [base, 99], (), bytes([255, sure]), now)
        accepted.append(settle(running, [base, base + 1, base + 2], now))
        if running.session.room <= 3:
            break
    assert accepted[0] == 1 and accepted[-5:] == [2] * 5
    assert rider.calibration.prevailing.factors[1] < 1 == honest.calibration.prevailing.factors[1]
    peer = rider.peer
    assert peer is not None
    rider.take(peer, 5, b"another right")
    assert rider.calibration.prevailing.factors[1] < 1, "in its next session, too"
