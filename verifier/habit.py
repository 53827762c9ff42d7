"""What a text does where its grammar leaves little choice: what it did there before, as with the white space
between the parts of a JSON text, or a quotation mark and what follows it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.grammar_matcher import Mask
from verifier.chance import Chance

LITTLE = 12  # of a mask's bytes one in so many has a token that may come, at most
LEAST_LITTLE = 8  # bytes of it, in a small vocabulary
KNOWN = 1024  # tokens of a text behind which something is known
LATEST = 256  # tokens that were said last
FOLLOWERS = 4  # of each
READ = 512  # tokens of the prompt, its last
FIRST_CHANCE = 0.7  # that what came behind the same token comes again
FIRST_CHANCE_LATEST = 0.6  # that of what may come the one comes that was said last, wherever


class Habit:
    """What came behind each token of one text, and how often it came there again."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """`output`: what there is already."""
        self._after: dict[int, dict[int, Chance]] = {}  # by token: what came behind it, the latest last
        self._latest: dict[int, None] = {}  # tokens of the output, the latest last
        self._elsewhere = Chance.first(FIRST_CHANCE_LATEST)
        self._last: int | None = None
        for token in prompt[-READ:]:
            self._comes(token)
        for token in output[-KNOWN:]:
            self._says(token)

    def follow(self, log: Sequence[int], count: int) -> None:
        """Takes in that the log has got its last `count` tokens."""
        for token in log[len(log) - count :]:
            self._says(token)

    def choose(self, before: int | None, mask: Mask) -> int | None:
        """Returns which of the tokens that may come behind one is likely to, if they are few. None = behind
        the text's last one, and none is likely."""
        some = np.flatnonzero(mask)
        if len(some) > max(LEAST_LITTLE, len(mask) // LITTLE):
            return None
        followers = self._after.get(self._behind(before), {})
        known = [token for token in reversed(followers) if _allows(mask, token)]
        if known:
            return max(known, key=lambda token: followers[token].value)  # of equals the latest
        if len(some) == 1 and (bits := int(mask[some[0]])).bit_count() == 1:
            return 8 * int(some[0]) + bits.bit_length() - 1
        return next((token for token in reversed(self._latest) if _allows(mask, token)), None)

    def chance(self, before: int | None, token: int) -> Chance:
        """Returns how likely a token that was chosen is to come behind another."""
        return self._after.get(self._behind(before), {}).get(token, self._elsewhere)

    def _behind(self, before: int | None) -> int:
        found = self._last if before is None else before
        return -1 if found is None else found

    def _says(self, token: int) -> None:
        self._latest.pop(token, None)
        self._latest[token] = None
        if len(self._latest) > LATEST:
            del self._latest[next(iter(self._latest))]
        self._comes(token)

    def _comes(self, token: int) -> None:
        if self._last is not None:
            followers = self._after.pop(self._last, {})
            chance = followers.pop(token, None) or Chance.first(FIRST_CHANCE)
            followers[token] = chance
            if len(followers) > FOLLOWERS:
                del followers[next(iter(followers))]
            self._after[self._last] = followers
            if len(self._after) > KNOWN:
                del self._after[next(iter(self._after))]
        self._last = token


def _allows(mask: Mask, token: int) -> bool:
    return token < 8 * len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
