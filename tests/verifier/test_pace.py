"""When a step waits for drafts. The step takes 1 s here, and the longest wait is a tenth of it."""

from __future__ import annotations

from verifier.pace import Arrivals, Awaited, Pace, acceptance_after, start_at


def awaited(
    lead: float | None = 0.02,
    token: float | None = 0.01,
    last_at: float | None = None,
    tokens: int = 0,
    wanted: int = 5,
    acceptance: float = 0.8,
) -> Awaited:
    return Awaited(10.0, last_at, tokens, wanted, acceptance, lead, token)


def start(now: float, *sessions: Awaited, goodput: float = 2.0) -> float:
    return start_at(now, 10.0, 1.0, goodput, sessions)


def test_nobody_awaited_starts_at_once() -> None:
    assert start(10.0) == 10.0


def test_drafts_that_are_worth_more_than_the_time_until_they_come_are_waited_for() -> None:
    assert start(10.0, awaited()) > 10.02


def test_the_busier_the_verifier_the_dearer_the_wait() -> None:
    """.8 tokens in .02 s are worth it up to 40 tokens/s, 1.44 in .03 s up to 48, and so on for five."""
    assert start(10.0, awaited(), goodput=44.0) > 10.0
    assert start(10.0, awaited(), goodput=60.0) == 10.0


def test_a_drafter_whose_guesses_are_wrong_is_not_waited_for() -> None:
    assert start(10.0, awaited(acceptance=0.01)) == 10.0


def test_an_unmeasured_drafter_is_not_waited_for() -> None:
    assert start(10.0, awaited(lead=None)) == 10.0
    assert start(10.0, awaited(token=None)) == 10.0


def test_a_slow_drafter_is_not_waited_for() -> None:
    assert start(10.0, awaited(lead=0.095), goodput=0.1) == 10.0  # the second token would come after a tenth
    assert start(10.0, awaited(lead=0.085), goodput=0.1) > 10.0
    assert start(10.0, awaited(lead=0.095, wanted=1), goodput=0.1) > 10.0  # there is no second one


def test_a_drafter_that_is_late_by_its_own_pace_has_gone_quiet() -> None:
    assert start(10.041, awaited()) == 10.041
    assert start(10.05, awaited(last_at=10.02, tokens=2)) == 10.05


def test_each_further_token_is_waited_for_while_it_pays() -> None:
    assert start(10.03, awaited(last_at=10.03, tokens=2), goodput=20.0) > 10.04
    assert start(10.03, awaited(last_at=10.03, tokens=2), goodput=60.0) == 10.03


def test_the_wait_ends_where_all_wanted_tokens_are_there() -> None:
    assert start(10.03, awaited(last_at=10.03, tokens=5)) == 10.03


def test_the_wait_is_bounded() -> None:
    assert start(10.0, awaited(lead=0.08, token=0.005), goodput=0.1) <= 10.1
    assert start(10.0, awaited(), awaited(lead=0.05), goodput=0.1) <= 10.1


def test_acceptance_follows_what_the_target_chose() -> None:
    assert acceptance_after(0.5, accepted=3, verified=3) > acceptance_after(0.5, accepted=3, verified=4) > 0.5
    assert acceptance_after(0.5, accepted=0, verified=8) < 0.5
    assert acceptance_after(0.5, accepted=0, verified=0) == 0.5


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
