"""The calibration learns how often the target takes a token, and stays sane whatever it is shown."""

from __future__ import annotations

import math
import random

import pytest

from drafter.survival import FIRST_RECENT, Calibration, on_the_wire, recent_after


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def world(rng: random.Random, weights: tuple[float, float, float, float]) -> tuple[float, float, int, bool]:
    """One trial whose outcome follows the model with these weights."""
    confidence, recent, depth = rng.uniform(0.02, 0.98), rng.uniform(0.1, 0.95), rng.randrange(8)
    logits = [math.log(c / (1 - c)) for c in (confidence, recent)]
    score = sum(w * x for w, x in zip(weights, (1.0, *logits, depth / 8), strict=True))
    return confidence, recent, depth, rng.random() < sigmoid(score)


def mean_error(calibration: Calibration, weights: tuple[float, float, float, float], seed: int) -> float:
    """Mean distance of its probabilities from the world's."""
    rng, total = random.Random(seed), 0.0
    for _ in range(400):
        confidence, recent, depth, _ = world(rng, weights)
        logits = [math.log(c / (1 - c)) for c in (confidence, recent)]
        truth = sigmoid(sum(w * x for w, x in zip(weights, (1.0, *logits, depth / 8), strict=True)))
        total += abs(calibration.probability(confidence, recent, depth) - truth)
    return total / 400


def test_it_finds_the_probabilities_of_a_world_that_follows_the_model() -> None:
    weights, rng = (-0.7, 1.4, 0.3, -1.2), random.Random(1)
    calibration = Calibration()
    untaught = mean_error(calibration, weights, 2)
    for _ in range(500):
        calibration.observe(*world(rng, weights))
    assert untaught > 0.15
    assert mean_error(calibration, weights, 2) < 0.05


def test_it_forgets_what_is_no_longer_true() -> None:
    before, after, rng = (2.0, 0.5, 0.5, 0.0), (-2.0, 1.0, 0.0, 0.0), random.Random(3)
    calibration = Calibration()
    for weights in (before, after):
        for _ in range(3000):
            calibration.observe(*world(rng, weights))
        assert mean_error(calibration, weights, 4) < 0.05


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("confidence", [0.0, 1.0, math.nan, 0.5])
def test_ten_thousand_equal_trials_leave_it_finite_and_sure(confidence: float, accepted: bool) -> None:
    """Nothing to tell the features apart by, for ten times what it remembers."""
    calibration = Calibration()
    for _ in range(10_000):
        calibration.observe(confidence, 1.0, 3, accepted)
    probability = calibration.probability(confidence, 1.0, 3)
    assert all(math.isfinite(weight) for weight in calibration.weights)
    assert abs(probability - accepted) < 0.01
    # Then the world changes, and it follows before it has forgotten half of it.
    for _ in range(300):
        calibration.observe(confidence, 1.0, 3, not accepted)
    assert abs(calibration.probability(confidence, 1.0, 3) - accepted) > 0.2


def test_before_any_trial_a_confident_draft_is_likelier_to_survive() -> None:
    low, high = (Calibration().probability(confidence, FIRST_RECENT, 0) for confidence in (0.2, 0.95))
    assert 0 < low < 0.5 < high < 1


def test_recent_acceptance_follows_the_outcomes() -> None:
    recent = FIRST_RECENT
    for _ in range(40):
        recent = recent_after(recent, True)
    assert 0.98 < recent < 1
    assert recent_after(recent, False) < 0.9


def test_survival_is_a_byte_a_token() -> None:
    assert on_the_wire([1.0, 0.5, 0.001, 0.0]) == bytes([255, 128, 0, 0])
