"""What a request adds to the logits of some tokens."""

from __future__ import annotations

from array import array
from functools import cached_property


class LogitBias(dict[int, float]):
    """Token id -> what is added to its logit. It is not changed once it is made.

    Draws take it as two arrays, which the first of them makes: a step does nothing for each entry."""

    @cached_property
    def ids(self) -> array[int]:
        """Returns the token ids, of 64 bits each."""
        return array("q", self)

    @cached_property
    def added(self) -> array[float]:
        """Returns what is added to the logit of each of `ids`, of 32 bits each."""
        return array("f", self.values())
