"""Finds places in a text where the same tokens stand as at the end of another, or of itself. Pure.

A token costs a bounded time. Positions with the same few last tokens hang on one chain, the latest first, as
in the hash chains of LZ77.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

SHORTEST = 2  # tokens that must be the same
LONGEST = 16  # tokens that are compared
PLACES = 32  # on a chain that are looked at
FACTORS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)  # odd and far apart: neighbours get different keys


class TextIndex:
    """An index of `text`, which the caller extends. It takes at most twelve bytes a token."""

    def __init__(self, text: Sequence[int], capacity: int, shortest: int = SHORTEST) -> None:
        """`capacity` is the length that the text may come to: beyond it, lookups only become slower.
        `shortest`: tokens that must be the same, at most four."""
        self._text = text
        self._factors = FACTORS[:shortest]
        self._mask = (1 << max(capacity - 1, 1).bit_length()) - 1
        self._latest = array("i", [-1]) * (self._mask + 1)  # by key: the last position with it
        self._earlier = array("i")  # by position: the one before it with the same key; -1 = none
        self._add_all()

    def _add_all(self) -> None:
        """Adds a whole prompt by array operations: it may have a hundred thousand tokens."""
        tokens = np.asarray(self._text, dtype=np.uint64)
        length = max(len(tokens) - 1, 0)  # the last token has no continuation yet
        earlier = np.full(length, -1, dtype=np.int32)
        first = len(self._factors) - 1
        if length > first:
            keys = np.zeros(length - first, dtype=np.uint64)
            for back, factor in enumerate(self._factors):
                keys += tokens[first - back : length - back] * np.uint64(factor)
            keys &= np.uint64(self._mask)
            order = np.argsort(keys, kind="stable")  # positions stay in order within a key
            same = keys[order[1:]] == keys[order[:-1]]
            earlier[first + order[1:][same]] = first + order[:-1][same]
            last = np.append(~same, True)
            latest = np.frombuffer(self._latest, dtype=np.int32)
            latest[keys[order[last]].astype(np.int64)] = first + order[last]
        self._earlier.frombytes(earlier.tobytes())

    def extended(self) -> None:
        """Adds what the text has gained."""
        text, first = self._text, len(self._factors) - 1
        for end in range(len(self._earlier), len(text) - 1):
            if end < first:
                self._earlier.append(-1)
                continue
            key = self._key(text, end)
            self._earlier.append(self._latest[key])
            self._latest[key] = end

    def matches(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """Returns (position after the match, tokens that are the same) of the latest PLACES places with the
        same tokens as the end of `tail`, which may be that of the text itself."""
        text, end, found = self._text, len(tail) - 1, []
        if end + 1 < len(self._factors):
            return []
        place = self._latest[self._key(tail, end)]
        for _ in range(PLACES):
            if place < 0:
                break
            most, length = min(LONGEST, place + 1, end + 1), 0
            while length < most and text[place - length] == tail[end - length]:
                length += 1
            if length >= len(self._factors):
                found.append((place + 1, length))
            place = self._earlier[place]
        return found

    def _key(self, text: Sequence[int], end: int) -> int:
        return sum(text[end - back] * factor for back, factor in enumerate(self._factors)) & self._mask
