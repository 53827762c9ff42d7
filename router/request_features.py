"""What a request is like, as numbers: what is seen of one tells something of those that are like it. Pure.

Features are hashed (Weinberger et al., "Feature hashing for large scale multitask learning", 2009): each of
the prompt's last tokens counts at one of a few places, with a sign, so that tokens that share a place cancel
out in the mean. Which of them matter, and for whom, is learned from outcomes: nobody lists kinds of requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

DIMENSIONS = 128
TAIL = 128  # tokens at the prompt's end
LENGTHS = 16  # places for the prompt's length, by its logarithm
ALIKE, LENGTH = 0.25, 0.1  # shares of the whole's square: of what all requests have, and of the length
_FIRST = 1 + LENGTHS  # place for tokens
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: neighbours are spread


def _any() -> Floats:
    shared = np.zeros(DIMENSIONS, np.float32)
    shared[0] = 1.0
    return shared


ANY = _any()  # a request of which nothing is known


def features(prompt: Sequence[int]) -> Floats:
    """Returns what a request with this prompt is like: [DIMENSIONS], of length 1."""
    tokens, counts = np.unique(np.asarray(prompt[-TAIL:], np.uint64), return_counts=True)
    mixed = tokens * _MIX
    places = (mixed >> np.uint64(40)) % np.uint64(DIMENSIONS - _FIRST)
    signs = 1.0 - 2.0 * (mixed >> np.uint64(63)).astype(np.float64)
    found = np.zeros(DIMENSIONS, np.float32)
    found[_FIRST:] = np.bincount(places.astype(np.int64), signs * np.sqrt(counts), DIMENSIONS - _FIRST)
    found *= np.sqrt(1 - ALIKE - LENGTH) / max(float(np.linalg.norm(found)), 1e-9)
    found[0] = np.sqrt(ALIKE)
    found[1 + min(len(prompt).bit_length(), LENGTHS - 1)] = np.sqrt(LENGTH)
    return found
