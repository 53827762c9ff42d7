"""Finds earlier places in a text with the same last tokens as its end. Pure.

A token costs a bounded time. Positions with the same two tokens hang on one chain, the latest first, as in
the hash chains of LZ77.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

SHORTEST = 2  # tokens that must be the same
LONGEST = 16  # tokens that are compared
PLACES = 32  # on a chain that are looked at
FACTORS = 0x9E3779B1, 0x85EBCA77  # odd and far apart: neighbours get different keys


class TextIndex:
    """An index of `text`, which the caller extends. It takes at most twelve bytes a token."""

    def __init__(self, text: Sequence[int], capacity: int) -> None:
        """`capacity` is the length that the text may come to: beyond it, lookups only become slower."""
        self._text = text
        self._mask = (1 << max(capacity - 1, 1).bit_length()) - 1
        self._latest = array("i", [-1]) * (self._mask + 1)  # by key: the last position with it
        self._earlier = array("i")  # by position: the one before it with the same key; -1 = none
        self._add_all()

    def _add_all(self) -> None:
        """Adds a whole prompt by array operations: it may have a hundred thousand tokens."""
        tokens = np.asarray(self._text, dtype=np.uint64)
        length = max(len(tokens) - 1, 0)  # the last token has no continuation yet
        earlier = np.full(length, -1, dtype=np.int32)
        if length >= SHORTEST:
            keys = (tokens[: length - 1] * FACTORS[0] + tokens[1:length] * FACTORS[1]) & self._mask
            order = np.argsort(keys, kind="stable")  # positions stay in order within a key
            same = keys[order[1:]] == keys[order[:-1]]
            earlier[1 + order[1:][same]] = 1 + order[:-1][same]
            last = np.append(~same, True)
            latest = np.frombuffer(self._latest, dtype=np.int32)
            latest[keys[order[last]].astype(np.int64)] = 1 + order[last]
        self._earlier.frombytes(earlier.tobytes())

    def extended(self) -> None:
        """Adds what the text has gained."""
        for end in range(len(self._earlier), len(self._text) - 1):
            if end + 1 < SHORTEST:
                self._earlier.append(-1)
                continue
            key = self._key(end)
            self._earlier.append(self._latest[key])
            self._latest[key] = end

    def longest_match(self) -> tuple[int, int] | None:
        """Returns (position after the match, tokens that are the same) of the place most like the text's end.

        It is the longest of the latest PLACES places; the latest of several. None if there is no place with
        the same SHORTEST tokens."""
        text, best, found = self._text, SHORTEST - 1, -1
        end = len(text) - 1
        if end + 1 < SHORTEST:
            return None
        place = self._latest[self._key(end)]
        for _ in range(PLACES):
            if place < 0:
                break
            most, length = min(LONGEST, place + 1), 0
            while length < most and text[place - length] == text[end - length]:
                length += 1
            if length > best:
                best, found = length, place
                if length == LONGEST:
                    break
            place = self._earlier[place]
        return (found + 1, best) if found >= 0 else None

    def _key(self, end: int) -> int:
        return (self._text[end - 1] * FACTORS[0] + self._text[end] * FACTORS[1]) & self._mask
