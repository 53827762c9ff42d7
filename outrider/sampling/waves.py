"""Orders the drawing of rows: first those that are needed in any case, then those that turn out to be.

A row that follows a drafted token is needed only where that token is drawn. Drawing one row of each session
after the other would leave none in vain, but few rows at a time cost more each. So each session goes on by as
many rows at a time as fill what is drawn together anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.sampling.noisy_argmax import Ids

NOT_DRAWN = -1


def in_waves(after: Sequence[int | None], at_once: int, draw: Callable[[Ids], Ids]) -> list[int]:
    """Returns the token of each row, or NOT_DRAWN for one that is not needed. Row i is needed unless after[i]
    is a token that row i - 1, of the same session, does not draw, or that row is not needed itself; the first
    one always is, and there is one. `draw` gives the tokens of some rows, rising; `at_once` of them cost less
    each than fewer."""
    tokens = [NOT_DRAWN] * len(after)
    starts = [row for row, token in enumerate(after) if token is None or row == 0]
    waiting = list(zip(starts, [*starts[1:], len(after)], strict=True))  # (next row, end) of each session
    while waiting:
        depth = max(1, at_once // len(waiting))
        wave = [row for first, end in waiting for row in range(first, min(first + depth, end))]
        for row, token in zip(wave, draw(np.array(wave)).tolist(), strict=True):
            tokens[row] = token
        waiting = [
            (first + depth, end)
            for first, end in waiting
            if first + depth < end and tokens[first : first + depth] == after[first + 1 : first + depth + 1]
        ]
    return tokens
