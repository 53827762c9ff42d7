"""P-values that tables have, and samples that fit or do not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.goodness_of_fit import chi_square, uniform


def test_a_chi_square_is_that_of_the_tables() -> None:
    """The 5 % point of one degree of freedom is 3.841, of four it is 9.488."""
    off = (3.841 * 50 / 2) ** 0.5
    assert chi_square([50 + off, 50 - off]) == pytest.approx(0.05, abs=1e-4)
    off = (9.488 * 20 / 2) ** 0.5
    assert chi_square([20 + off, 20 - off, 20, 20, 20]) == pytest.approx(0.05, abs=1e-4)
    assert chi_square([30, 70], [30.0, 70.0]) == 1


def test_kolmogorovs_limit_is_that_of_the_tables() -> None:
    """The 5 % point is 1.358 / sqrt(n)."""
    count = 10_000
    even = (np.arange(count) + 0.5) / count
    shifted = even + 1.358 / count**0.5 - 0.5 / count
    assert uniform(shifted) == pytest.approx(0.05, abs=1e-3)
    assert uniform(np.random.default_rng(1).random(count)) > 0.01
    assert uniform(np.random.default_rng(1).random(count) ** 1.1) < 1e-4
