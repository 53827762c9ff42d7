"""Drafts that do not hold what they promise are believed less."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from verifier.survival_calibration import DEPTHS, TOLERANCE, SurvivalCalibration


def after(promise: float, truth: float, *, steps: int, tokens: int = 4, seed: int = 1) -> SurvivalCalibration:
    """A session whose drafter says `promise` of every token, of which `truth` are right."""
    rng, trust = random.Random(seed), SurvivalCalibration()
    for _ in range(steps):
        accepted = 0
        while accepted < tokens and rng.random() < truth:
            accepted += 1
        trust.observe([promise] * tokens, accepted)
    return trust


def test_at_first_everything_is_believed() -> None:
    assert SurvivalCalibration().factors == (1.0,) * DEPTHS


def test_who_promises_what_is_true_is_believed() -> None:
    for truth in (0.3, 0.6, 0.9):
        assert fmean(after(truth, truth, steps=200, seed=seed).at(0) for seed in range(40)) > 0.95


def test_who_promises_too_much_is_believed_as_far_as_it_was_true() -> None:
    assert abs(after(1.0, 0.5, steps=300).at(0) - 0.5 * TOLERANCE) < 0.1
    assert after(1.0, 0.0, steps=20).at(0) < 0.2


def test_who_promises_too_little_is_not_believed_more() -> None:
    assert after(0.3, 0.9, steps=50).at(0) == 1


def test_what_stands_behind_a_wrong_token_was_not_judged() -> None:
    long, short = SurvivalCalibration(), SurvivalCalibration()
    long.observe([0.9] * 8, 1)
    short.observe([0.9] * 2, 1)
    assert long == short


def test_who_lied_gets_another_try_after_some_hundred_steps_and_not_before() -> None:
    trust = after(1.0, 0.0, steps=10)
    for _ in range(50):
        trust.observe([], 0)
    assert trust.at(0) < 0.5
    for _ in range(1200):
        trust.observe([], 0)
    assert trust.at(0) > 0.6


def test_sums_are_weighed_anew_before_they_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = after(0.9, 0.4, steps=400)
    monkeypatch.setattr("verifier.survival_calibration.HEAVIEST", 1.1)
    anew = after(0.9, 0.4, steps=400)
    assert anew.weight < 1.2 < usual.weight
    assert anew.factors == pytest.approx(usual.factors)
    assert max(anew.promised) < 100  # a step forgets .02 of them, and adds 1 at most


def test_what_is_beside_the_likeliest_is_judged_apart() -> None:
    trust = SurvivalCalibration()
    for _ in range(50):
        trust.judge([(0, 0.5, True)], [(0.5, False)])
    assert trust.at(0) == 1 and trust.beside < 0.2 and trust.copy() == trust
    assert SurvivalCalibration().beside == 1


def test_right_first_tokens_buy_no_belief_for_a_wrong_tail() -> None:
    trust = SurvivalCalibration()
    for _ in range(100):
        trust.observe([1.0] * 8, 2)
    assert trust.factors[:2] == (1.0, 1.0)
    assert trust.at(2) < 0.1
    assert trust.at(3) < 0.9, "what was never judged is believed as all together are"
