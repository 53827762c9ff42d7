"""Which tokens a session's prompt and output hold, kept up to date as tokens are committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Counted = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Distinct token ids [n], and how often each occurs in the output [n]."""


class TokenCounts:
    """Distinct tokens of prompt and output, and how often each occurs in the output."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int] = ()) -> None:
        self._place: dict[int, int] = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._place, dtype=np.int64)
        self._in_output = np.zeros(len(self._ids), dtype=np.int64)
        self.extend(output)

    def extend(self, output: Iterable[int]) -> None:
        """Adds committed output tokens."""
        for token in output:
            place = self._place.get(token)
            if place is None:
                place = self._place[token] = len(self._place)
                if place == len(self._ids):  # doubles, so that adding a token costs no copy as a rule
                    self._ids, self._in_output = (
                        np.concatenate([column, np.zeros(max(16, place), dtype=np.int64)])
                        for column in (self._ids, self._in_output)
                    )
                self._ids[place] = token
            self._in_output[place] += 1

    @property
    def committed(self) -> Counted:
        """Returns all tokens of prompt and output, in no copy."""
        known = len(self._place)
        return self._ids[:known], self._in_output[:known]

    def with_drafted(self, drafted: Sequence[int]) -> Counted:
        """Returns the drafted tokens, counted as output that follows what is committed."""
        found = Counter(drafted)
        ids = np.fromiter(found, np.int64, len(found))
        counts = np.fromiter(found.values(), np.int64, len(found))
        places = np.fromiter((self._place.get(token, -1) for token in found), np.int64, len(found))
        known = places >= 0
        counts[known] += self._in_output[places[known]]
        return ids, counts
