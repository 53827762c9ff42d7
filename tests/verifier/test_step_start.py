"""When a step waits for drafts. The step takes .2 s here, and the longest wait is half of it."""

from __future__ import annotations

from verifier.step_start import Arrivals, Awaited, Pace, Waits, acceptance_after, lock_step, start_at


def awaited(
    lead: float | None = 0.02,
    token: float | None = 0.01,
    last_at: float | None = None,
    tokens: int = 0,
    wanted: int = 5,
    acceptance: float = 0.8,
    survival: float | None = None,
) -> Awaited:
    survival = acceptance**tokens if survival is None else survival
    return Awaited(10.0, last_at, tokens, wanted, acceptance, lead, token, survival)


def start(now: float, *sessions: Awaited, goodput: float = 2.0, price: float = 0.0) -> float:
    return start_at(now, 10.0, 0.2, goodput, sessions, price)


def test_nobody_awaited_starts_at_once() -> None:
    assert start(10.0) == 10.0


def test_drafts_that_are_worth_more_than_the_time_until_they_come_are_waited_for() -> None:
    assert start(10.0, awaited()) > 10.02


def test_the_busier_the_verifier_the_dearer_the_wait() -> None:
    """With .8, 1.44, 1.952 tokens in .02, .03, .04 s, what lasts is 1 - .2 * .02 goodput: the three are worth
    it up to 1.952 / (.04 + 1.952 * .004) = 40.8 tokens/s, fewer or more of them up to less."""
    assert start(10.0, awaited(), goodput=40.5) > 10.0
    assert start(10.0, awaited(), goodput=41.2) == 10.0


def test_what_stands_for_the_next_step_anyway_is_not_waited_for_at_its_full_worth() -> None:
    """One token at most is due, in .02 s."""
    slow = awaited(acceptance=0.6, wanted=1, lead=0.02)
    assert start(10.0, slow, goodput=23.0) > 10.0  # .6 * (1 - .4 * .46) = .49 > .46
    assert start(10.0, slow, goodput=26.0) == 10.0  # .6 * (1 - .4 * .52) = .475 < .52, though .6 is more


def test_a_drafter_whose_guesses_are_wrong_is_not_waited_for() -> None:
    assert start(10.0, awaited(acceptance=0.01)) == 10.0


def test_an_unmeasured_drafter_is_not_waited_for() -> None:
    assert start(10.0, awaited(lead=None)) == 10.0
    assert start(10.0, awaited(token=None)) == 10.0


def test_a_token_that_costs_more_than_it_brings_is_not_waited_for() -> None:
    assert start(10.0, awaited(), price=0.7) > 10.0
    assert start(10.0, awaited(), price=0.9) == 10.0
    assert start(10.0, awaited(), goodput=35.0) > 10.0
    assert start(10.0, awaited(), goodput=35.0, price=0.2) == 10.0


def test_what_would_come_after_half_a_step_is_not_waited_for() -> None:
    assert start(10.0, awaited(lead=0.11), goodput=0.1) == 10.0
    assert start(10.0, awaited(lead=0.09), goodput=0.1) > 10.0


def test_what_many_sessions_gain_by_the_same_wait_counts_together() -> None:
    assert start(10.0, awaited(lead=0.03), goodput=60.0) == 10.0
    assert start(10.0, *[awaited(lead=0.03)] * 8, goodput=60.0) > 10.0


def test_a_path_that_hardly_survives_is_not_waited_on_for_more() -> None:
    assert start(10.03, awaited(last_at=10.03, tokens=2, survival=0.9), goodput=20.0) > 10.03
    assert start(10.03, awaited(last_at=10.03, tokens=2, survival=0.1), goodput=20.0) == 10.03


def test_a_drafter_that_is_late_by_its_own_pace_has_gone_quiet() -> None:
    assert start(10.039, awaited()) > 10.039
    assert start(10.041, awaited()) == 10.041
    assert start(10.059, awaited(last_at=10.02, tokens=2)) > 10.059
    assert start(10.061, awaited(last_at=10.02, tokens=2)) == 10.061


def test_each_further_token_is_waited_for_while_it_pays() -> None:
    assert start(10.03, awaited(last_at=10.03, tokens=2), goodput=20.0) >= 10.04
    assert start(10.03, awaited(last_at=10.03, tokens=2), goodput=60.0) == 10.03


def test_the_wait_ends_where_all_wanted_tokens_are_there() -> None:
    assert start(10.03, awaited(last_at=10.03, tokens=5)) == 10.03


def test_the_wait_is_bounded() -> None:
    assert start(10.0, awaited(lead=0.08, token=0.005), goodput=0.1) <= 10.1
    assert start(10.0, awaited(), awaited(lead=0.09), goodput=0.1) <= 10.1


def test_asked_again_and_again_it_comes_to_an_end() -> None:
    now, asked = 10.0, 0
    while (until := start(now, awaited(), awaited(lead=0.05, token=0.001), goodput=0.1)) > now:
        now, asked = until, asked + 1
    assert now <= 10.1 and asked < 5


def test_in_lock_step_everybody_waits_for_all_drafts_of_everybody() -> None:
    def until(now: float, *sessions: Awaited) -> float:
        return lock_step(now, 10.0, 0.2, 1e9, sessions, 1.0)

    assert until(10.0, awaited(tokens=4, wanted=5, lead=None)) > 10.0
    assert until(10.0, awaited(tokens=5, wanted=5), awaited(tokens=0, wanted=0)) == 10.0
    assert until(10.9, awaited(tokens=1, wanted=5)) > 10.9
    assert until(11.1, awaited(tokens=1, wanted=5)) == 11.1  # it has said nothing for a second
    assert until(11.1, awaited(tokens=2, wanted=5, last_at=10.8)) > 11.1


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


def test_what_follows_a_commit_that_left_drafts_says_nothing_about_the_lead() -> None:
    """The drafter went on as if nothing had happened: what comes was under way before."""
    pace, arrivals = Pace(), Arrivals()
    arrivals.arrived(0.9, 3, pace)
    arrivals = arrivals.committed(1.0, verified=3, left=2)
    assert arrivals.last_at == 0.9
    arrivals.arrived(1.001, 1, pace)
    assert pace.lead is None
    assert pace.token is None  # nor about the time between tokens: the window may have been full
    arrivals.committed(2.0, verified=3, left=0).arrived(2.5, 1, pace)
    assert pace.lead == 0.5


def test_a_drafter_that_does_not_answer_in_time_counts_for_less() -> None:
    pace = Pace()
    pace.missed()
    missed_once = pace.punctual
    pace.missed()
    assert pace.punctual < missed_once < 1
    for _ in range(50):
        pace.first(0.1)
    assert pace.punctual > 0.99


def test_waits_that_bring_nothing_are_expected_to_bring_less_and_are_tried_again_later() -> None:
    waits = Waits()
    assert waits.factor == 1.0
    for _ in range(5):
        waits.observe(cost=2.0, accepted=0)
    assert waits.factor < 0.25
    for _ in range(1000):
        waits.observe(cost=0.0, accepted=0)
    assert waits.factor > 0.9


def test_waits_that_pay_are_believed() -> None:
    waits = Waits()
    for _ in range(50):
        waits.observe(cost=1.0, accepted=2)  # a half of what comes lasts
    assert waits.factor == 1.0
    for _ in range(50):
        waits.observe(cost=1.0, accepted=1)
    assert waits.factor < 0.7
