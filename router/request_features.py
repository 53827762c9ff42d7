"""What a request is like, as numbers: what is seen of one tells something of those that are like it. Pure.

Features are hashed (Weinberger et al., "Feature hashing for large scale multitask learning", 2009): each of
the prompt's last tokens counts at one of a few places, with a sign, so that tokens that share a place cancel
out in the mean. Which of them matter, and for whom, is learned from outcomes: nobody lists kinds of requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

DIMENSIONS = 128
TAIL = 128  # tokens at the prompt's end
LENGTHS = 16  # places for the prompt's length, by its logarithm
ALIKE, LENGTH = 0.25, 0.1  # shares of the whole's square: of what all requests have, and of the length
_ALIKE, _LENGTH, _TOKENS = (math.sqrt(share) for share in (ALIKE, LENGTH, 1 - ALIKE - LENGTH))
_FIRST = 1 + LENGTHS  # place for tokens
_PLACES = DIMENSIONS - _FIRST
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: neighbours are spread


def _any() -> Floats:
    shared = np.zeros(DIMENSIONS, np.float32)
    shared[0] = 1.0
    return shared


ANY = _any()  # a request of which nothing is known


def features(prompt: Sequence[int]) -> Floats:
    """Returns what a request with this prompt is like: [DIMENSIONS], of length 1."""
    mixed = np.asarray(prompt[-TAIL:], np.uint64) * _MIX
    # A place has two halves, one for each sign. What comes often there counts less, by its root.
    places = (mixed >> np.uint64(40)) % np.uint64(_PLACES) + np.uint64(_PLACES) * (mixed >> np.uint64(63))
    roots = np.sqrt(np.bincount(places.view(np.int64), minlength=2 * _PLACES))
    signed = roots[:_PLACES] - roots[_PLACES:]
    found = np.zeros(DIMENSIONS, np.float32)
    found[_FIRST:] = signed * (_TOKENS / max(math.sqrt(signed @ signed), 1e-9))
    found[0] = _ALIKE
    found[1 + min(len(prompt).bit_length(), LENGTHS - 1)] = _LENGTH
    return found
