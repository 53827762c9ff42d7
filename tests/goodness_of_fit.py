"""How well a sample fits a distribution, as p-values.

This is little of what scipy has. But where scipy is installed, transformers imports it in every process that
runs a model, and the tests start hundreds of those."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

TERMS = 100  # of a series whose terms fall as exp(-k**2)


def chi_square(seen: Sequence[float] | np.ndarray, expected: Sequence[float] | np.ndarray = ()) -> float:
    """Returns Pearson's p-value of counts. Without `expected`, all are equally likely."""
    counts = np.asarray(seen, dtype=np.float64)
    wanted = np.asarray(expected, dtype=np.float64) if len(expected) else np.full_like(counts, counts.mean())
    assert math.isclose(counts.sum(), wanted.sum(), rel_tol=1e-8), "they do not count the same sample"
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    halves = torch.tensor([len(counts) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


def uniform(sample: np.ndarray) -> float:
    """Returns Kolmogorov's p-value of numbers from 0 to 1, which are thousands: it is that of his limit."""
    ordered, count = np.sort(sample), len(sample)
    above = (np.arange(1, count + 1) / count - ordered).max()
    below = (ordered - np.arange(count) / count).max()
    reach = 2 * count * max(above, below) ** 2
    return 2 * sum((-1) ** (k - 1) * math.exp(-reach * k * k) for k in range(1, TERMS))
