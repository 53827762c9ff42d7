"""Which tokens a session's prompt and output hold, kept up to date as tokens are committed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt


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

    def with_drafted(self, drafted: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns (ids [n], occurrences in the output [n]), with the drafted tokens counted as output."""
        known = len(self._place)
        ids, counts = self._ids[:known], self._in_output[:known]
        if not drafted:
            return ids, counts
        new = list(dict.fromkeys(token for token in drafted if token not in self._place))
        place = {token: known + index for index, token in enumerate(new)}
        ids = np.concatenate([ids, np.array(new, dtype=np.int64)])
        counts = np.concatenate([counts, np.zeros(len(new), dtype=np.int64)])
        for token in drafted:
            counts[self._place.get(token, place.get(token, -1))] += 1
        return ids, counts
