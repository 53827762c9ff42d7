"""When a step waits for drafts. The step takes 1 s here, so the longest wait is 0.1 s."""

from __future__ import annotations

from verifier.pace import Arrivals, Awaited, Pace, start_at


def awaited(
    lead: float | None = 0.01,
    token: float | None = 0.01,
    last_at: float | None = None,
    tokens: int = 0,
    wanted: int = 5,
) -> Awaited:
    return Awaited(committed_at=10.0, last_at=last_at, tokens=tokens, wanted=wanted, lead=lead, token=token)


def start(now: float, *sessions: Awaited) -> float:
    return start_at(now, 10.0, 1.0, sessions)


def test_nobody_awaited_starts_at_once() -> None:
    assert start(10.0) == 10.0


def test_two_tokens_due_within_a_tenth_of_a_step_are_waited_for() -> None:
    assert start(10.0, awaited()) > 10.01


def test_an_unmeasured_drafter_is_not_waited_for() -> None:
    assert start(10.0, awaited(lead=None)) == 10.0
    assert start(10.0, awaited(token=None)) == 10.0


def test_a_slow_drafter_is_not_waited_for() -> None:
    assert start(10.0, awaited(lead=0.095, token=0.01)) == 10.0  # the second token would come too late
    assert start(10.0, awaited(lead=0.2)) == 10.0


def test_a_drafter_that_is_late_by_its_own_pace_has_gone_quiet() -> None:
    assert start(10.021, awaited()) == 10.021
    assert start(10.05, awaited(last_at=10.02, tokens=2)) == 10.05


def test_each_further_token_is_waited_for_while_it_is_due_in_time() -> None:
    assert start(10.03, awaited(last_at=10.03, tokens=2)) > 10.04
    assert start(10.095, awaited(last_at=10.095, tokens=4)) == 10.095  # the next would be due after the tenth


def test_the_wait_ends_where_all_wanted_tokens_are_there() -> None:
    assert start(10.03, awaited(last_at=10.03, tokens=5)) == 10.03


def test_the_wait_is_bounded() -> None:
    assert start(10.0, awaited(lead=0.08, token=0.005)) <= 10.1
    assert start(10.0, awaited(), awaited(lead=0.05)) <= 10.1


def test_the_pace_is_measured_on_arrivals() -> None:
    pace, arrivals = Pace(), Arrivals(committed_at=1.0)
    arrivals.arrived(1.5, 1, pace)
    assert (pace.lead, pace.token) == (0.5, None)
    arrivals.arrived(1.9, 2, pace)
    assert pace.token is not None and abs(pace.token - 0.2) < 1e-9


def test_what_came_before_the_first_commit_says_nothing_about_the_pace() -> None:
    pace, arrivals = Pace(), Arrivals()
    arrivals.arrived(5.0, 1, pace)
    assert pace.lead is None


def test_a_session_that_missed_a_whole_step_is_not_waited_for_until_something_arrives() -> None:
    pace, arrivals = Pace(), Arrivals()
    arrivals = arrivals.committed(1.0, verified=0)
    assert not arrivals.silent
    arrivals = arrivals.committed(2.0, verified=0)
    assert arrivals.silent
    arrivals.arrived(2.5, 1, pace)
    assert not arrivals.silent
    assert not arrivals.committed(3.0, verified=1).silent


def test_a_drafter_with_a_full_window_has_not_gone_silent() -> None:
    arrivals = Arrivals(committed_at=1.0)
    assert not arrivals.committed(2.0, verified=4).silent
