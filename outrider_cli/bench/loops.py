"""How much of a text only repeats itself: guesses for it are easy, and flatter every figure. Pure."""

from __future__ import annotations

import re

GRAM = 8  # words and marks in a row


def looped_share(text: str) -> float:
    """Returns the share of words and marks that are in a run of GRAM which the text had before; 0 to 1."""
    pieces = re.findall(r"\w+|[^\w\s]", text)
    inside: set[int] = set()
    known: set[tuple[str, ...]] = set()
    for end in range(GRAM, len(pieces) + 1):
        run = tuple(pieces[end - GRAM : end])
        if run in known:
            inside.update(range(end - GRAM, end))
        known.add(run)
    return len(inside) / len(pieces) if pieces else 0.0
