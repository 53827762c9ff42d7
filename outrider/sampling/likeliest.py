"""A row's likeliest tokens and its normalizer, on a CPU: in a few passes, without float64 or a sort of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

FOLDS = 128  # parts of a row: the largest of each place in them tell where the likeliest tokens can be
AT_ONCE = 2**16  # elements, to stay in the processor's caches


def log_normalizer(row: Row, most: np.float32) -> float:
    """Returns log sum exp(row - most) of a row [V] with `most` as its largest, a finite number.

    What float32 rounds is a share of each term, and those of the likeliest are 1 exactly. So this is good to
    a share of 1e-7, also where it is next to 0."""
    scratch, total = np.empty(min(AT_ONCE, len(row)), np.float32), 0.0
    for first in range(0, len(row), AT_ONCE):
        part = row[first : first + AT_ONCE]
        terms = np.subtract(part, most, out=scratch[: len(part)])
        total += float(np.exp(terms, out=terms).sum(dtype=np.float64))
    return float(np.log(total))


def likeliest(row: Row, count: int) -> Ids:
    """Returns the ids of the `count` largest of a row [V] without NaN, or all: the largest first, of equal
    ones the lowest id."""
    width = len(row) // FOLDS
    if count == 0:
        return np.empty(0, np.int64)
    if width <= count:
        return _ordered(row, np.arange(len(row)), count)
    whole, rest = row[: FOLDS * width].reshape(FOLDS, width), row[FOLDS * width :]
    columns = whole.max(0)
    least = np.partition(columns, width - count)[width - count]  # so many columns, and tokens, reach it
    reach = (columns >= least).nonzero()[0]
    folds, which = (whole[:, reach] >= least).nonzero()
    behind = (rest >= least).nonzero()[0] + FOLDS * width
    return _ordered(row, np.concatenate((folds * width + reach[which], behind)), count)


def _ordered(row: Row, ids: Ids, count: int) -> Ids:
    return ids[np.lexsort((ids, -row[ids]))[:count]]
