"""Which tokens of a row top_k and top_p keep, on a CPU: in a few passes over its logits, without a sort.

A row's log p' are at most 0, so the bits of a number's magnitude order them: the upper ones of those bits
tell in which of 2**13 bins it is. Whether a bin is kept follows from the counts or masses of the bins. Only
the members of one bin, in which the limit lies, are looked at one by one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]

BINS = 2**13
LEAST = -700.0  # log p' below it have no mass that counts, and one that float64 computes slowly


def kth_largest(log_p: Row, k: int) -> np.float32:
    """Returns the k-th largest of log p' [V], none above 0, for k from 1 to V."""
    bins = _bins(log_p)
    up_to = np.bincount(bins, minlength=BINS).cumsum()  # [B] tokens in a bin and those of likelier ones
    limit = int(up_to.searchsorted(k))
    members = log_p[bins == limit]
    place = int(up_to[limit]) - k  # of the k-th, from the smallest
    found: np.float32 = np.partition(members, place)[place]
    return found


def beyond_mass(log_p: Row, top_p: float) -> npt.NDArray[np.bool_]:
    """Returns [V], True for the tokens before which the likelier ones have top_p < 1 of the mass of all
    together; of equal ones the lower id comes first. `log_p` [V] has 0 as its largest."""
    bins = _bins(log_p)
    mass = np.exp(np.maximum(log_p, np.float32(LEAST)).astype(np.float64))
    up_to = np.bincount(bins, weights=mass, minlength=BINS).cumsum()
    wanted = top_p * up_to[-1]
    limit = int(up_to.searchsorted(wanted))
    out: npt.NDArray[np.bool_] = bins > limit
    members = (bins == limit).nonzero()[0]
    members = members[np.argsort(-log_p[members], kind="stable")]
    before = np.concatenate(([up_to[limit - 1] if limit else 0.0], mass[members])).cumsum()[:-1]
    out[members[before >= wanted]] = True
    return out


def _bins(log_p: Row) -> npt.NDArray[np.uint32]:
    return np.abs(log_p).view(np.uint32) >> np.uint32(18)
