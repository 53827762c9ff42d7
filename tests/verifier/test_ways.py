"""What follows from the way in which a verifier runs: the engine's threads, and what a step is to take."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from verifier.governor import StepSeen
from verifier.price import StepTime
from verifier.ways import Ways


class Threads:
    threads, resting_threads = 1, 4

    def use_threads(self, count: int) -> None:
        self.threads = count


def test_the_engine_has_more_threads_while_drafts_rest() -> None:
    engine = Threads()
    ways = Ways(engine, None, lambda: 0.5)
    ran = []
    for _ in range(200):  # with four threads a step takes half the time
        ways.use_threads(reading=0)
        ran.append((ways.resting, engine.threads))
        seconds = 0.2 / (2 if engine.threads == 4 else 1)
        ways.observe(StepSeen(seconds, 8, 8, None if ways.resting else 0.0), drafted=True)
    assert set(ran) == {(False, 1), (True, 4), (True, 1)}
    assert ran[-100:].count((True, 4)) > 70
    assert 0.4 < ways.gain < 0.6


def test_drafts_that_take_no_core_go_with_fewer_threads_where_those_are_faster() -> None:
    engine = Threads()
    engine.threads, engine.resting_threads = 4, 1
    ways = Ways(engine, None, lambda: 0.5)
    ran = []
    for _ in range(
        800
    ):  # a small step, for which threads that wait for one another cost more than they compute
        ways.use_threads(reading=0)
        ran.append((ways.resting, engine.threads))
        seconds = 0.1 if engine.threads == 1 else 0.2
        ways.observe(
            StepSeen(seconds, 8 if ways.resting else 16, 8, None if ways.resting else 0.0), drafted=True
        )
    assert ran[0] == (False, 4)
    assert set(ran) == {(False, 4), (False, 1), (True, 4), (True, 1)}
    assert ran[-200:].count((False, 1)) > 160
    assert 1.6 < ways.gain < 2.4
    ways.use_threads(reading=1000)
    assert engine.threads == 4


def test_without_a_source_of_random_numbers_drafts_are_always_taken() -> None:
    ways = Ways(Threads(), None)
    assert not any(ways.observe(StepSeen(1.0, 8, 8, 1.0), drafted=True) for _ in range(100))
    assert (ways.resting, ways.gain, ways.trials) == (False, 0.0, 0)


def test_a_step_is_expected_to_take_as_long_as_in_the_slowest_way() -> None:
    ways = Ways(Threads(), StepTime.measured({1: 0.01, 8: 0.01}), lambda: 0.5)
    for _ in range(100):
        ways.meter.step_time.observe(1, 0.1)
    assert ways.longest_step(1) > 0.05


def test_drafts_that_do_not_pay_for_drawn_text_are_taken_for_greedy_text() -> None:
    engine, rested = Threads(), {0: list[bool](), 1: list[bool]()}
    ways = Ways(engine, None, lambda: 0.5)
    for number in range(1200):
        greedy = number // 40 % 2  # one answer of forty steps after another
        ways.turn_to(greedy, 1)
        ways.use_threads(reading=0)
        rested[greedy].append(ways.resting)
        committed = 1 if ways.resting else 5 if greedy else 1.5
        seconds = 0.05 if ways.resting and engine.threads == 4 else 0.1
        ways.observe(StepSeen(seconds, committed, 1, None if ways.resting else 0.0), drafted=True)
    assert sum(rested[0][-400:]) > 300
    assert sum(rested[1]) < 60


@pytest.mark.parametrize("starved", [0.0, 1.0])  # who looks guesses up has none for most steps
def test_answers_of_half_a_second_greedy_and_drawn_in_turn_are_compared_too(starved: float) -> None:
    engine, rested = Threads(), {0: list[bool](), 1: list[bool]()}
    ways = Ways(engine, None, lambda: 0.5)
    for number in range(12_000):
        greedy = number // 60 % 2
        ways.turn_to(greedy, 1)
        ways.use_threads(reading=0)
        rested[greedy].append(ways.resting)
        seconds = 0.006 if ways.resting and engine.threads == 4 else 0.008
        ways.observe(StepSeen(seconds, 1, 1, None if ways.resting else starved), drafted=True)
    assert all(sum(each[-1000:]) > 900 for each in rested.values())


def test_a_few_sessions_of_the_other_kind_change_nothing() -> None:
    ways = Ways(Threads(), None, lambda: 0.5)
    ways.turn_to(0, 8)
    while not ways.resting:  # drafts bring nothing to what is drawn
        ways.observe(StepSeen(0.1, 8, 8, None if ways.resting else 0.0), drafted=True)
    assert not ways.turn_to(4, 8)
    assert ways.resting
    assert ways.turn_to(6, 8)
    assert not ways.resting
    assert not ways.turn_to(4, 8)
    assert not ways.resting


def test_a_drafter_that_is_back_is_no_reason_to_compare_and_a_new_one_is() -> None:
    """A session begins without drafts: with one after the other, a drafter comes back with each."""

    def trials(drafter: Callable[[int], str]) -> int:
        ways = Ways(Threads(), None, lambda: 0.5)
        for number in range(4000):
            drafted = number % 100 >= 10
            seconds = 0.01 if ways.resting else 0.014
            seen = StepSeen(seconds, 1, 1, None if ways.resting else 0.0)
            ways.observe(seen, drafted, lambda: [drafter(number // 100)])  # noqa: B023
        return ways.trials

    usual = trials(lambda session: "d")
    assert trials(lambda session: f"d{session}") > 2 * usual
    assert trials(lambda session: f"d{session % 2}") <= usual + 2


def test_sessions_that_want_no_drafts_say_nothing_of_drafts(caplog: pytest.LogCaptureFixture) -> None:
    """Answers with and without came in turn, as a benchmark asks for them: drafts that made four times as
    many tokens a step were found to bring nothing, and rested."""
    ways, rested = Ways(Threads(), None, lambda: 0.5), 0
    caplog.set_level(logging.INFO)
    for _ in range(40):
        for _ in range(60):
            ways.turn_to(1, 1, wanted=False)  # its own are faster with more threads
            ways.observe(StepSeen(0.01 if ways.resting else 0.03, 1, 1, None), drafted=False)
        for _ in range(15):
            ways.turn_to(1, 1, wanted=True)
            rested += ways.resting
            committed = 1 if ways.resting else 4
            ways.observe(StepSeen(0.03, committed, 1, None if ways.resting else 0.0), drafted=True)
    assert rested < 40 * 15 * 0.1 and 3 < ways.gain < 5
    ways.turn_to(1, 1, wanted=False)
    assert ways.resting and not caplog.records, "nobody's drafts rest by that"
