"""The distance that a model learns by, and the overlap of two of them, on numbers told by hand."""

from __future__ import annotations

import math

import pytest
import torch

from distillation.losses import distance, overlap

WANTED = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
SAID = torch.tensor([[0.5, 0.5], [0.75, 0.25]])
DIVERGENCE = 0.25 * math.log(0.25 / 0.75) + 0.75 * math.log(
    0.75 / 0.25
)  # of the second row; the first has none


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_the_distance_is_divergence_and_total_variation_in_the_mean_of_the_rows(weight: float) -> None:
    assert float(distance(SAID.log(), WANTED, weight)) == pytest.approx((DIVERGENCE + weight * 0.5) / 2)
    assert float(distance(WANTED.log(), WANTED, weight)) == pytest.approx(0.0, abs=1e-6)


def test_a_step_along_the_gradient_brings_a_model_nearer() -> None:
    logits = SAID.log().requires_grad_()
    distance(logits, WANTED, 1.0).backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert float(distance(logits.detach() - 0.1 * logits.grad, WANTED, 1.0)) < float(
        distance(logits, WANTED, 1.0)
    )


def test_the_overlap_is_what_two_distributions_share() -> None:
    assert overlap(SAID, WANTED) == pytest.approx((1.0 + 0.5) / 2)
