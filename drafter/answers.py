"""Finished answers, in which others of the same owner and model look up what may come next. Bounded in bytes.

One owner never reads another's. Where all together are too many, those of the owner who was here longest ago
are forgotten first, and of these the oldest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence

from drafter.text_index import TextIndex

LEAST = 8  # tokens of an answer that is worth remembering
MOST = 2**17  # tokens of one owner: to forget half of them takes some ten milliseconds
SHORTEST = 4  # tokens that must be the same: among many texts, fewer say little
FIRST = 2**10  # tokens that there is room for at first
END = 2**32 - 1  # stands between answers, and is no token
TOKEN_BYTES = 16


class Answered:
    """One owner's answers, one after the other."""

    def __init__(self) -> None:
        self.text = array("I")
        self._build()

    @property
    def bytes(self) -> int:
        return TOKEN_BYTES * self._capacity

    def add(self, answer: Sequence[int]) -> None:
        self.text.extend(answer[-MOST // 2 :])
        self.text.append(END)
        if len(self.text) > MOST:
            self.forget()
        elif len(self.text) > self._capacity:
            self._build()
        else:
            self._index.extended()

    def forget(self) -> None:
        """Drops the oldest half."""
        self.text = self.text[(len(self.text) + 1) // 2 :]
        self._build()

    def matches(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """As TextIndex's."""
        return self._index.matches(tail)

    def _build(self) -> None:
        self._capacity = max(FIRST, 1 << len(self.text).bit_length())
        self._index = TextIndex(self.text, self._capacity, SHORTEST)


class Answers:
    """All that is remembered, by owner."""

    def __init__(self, most_bytes: int) -> None:
        """0 = nothing is."""
        self._most_bytes = most_bytes
        self._owners: dict[Hashable, Answered] = {}  # who was here longest ago first
        self.bytes = 0

    def of(self, owner: Hashable) -> Answered | None:
        answered = self._owners.pop(owner, None)
        if answered is not None:
            self._owners[owner] = answered
        return answered

    def add(self, owner: Hashable, answer: Sequence[int]) -> None:
        if not self._most_bytes or len(answer) < LEAST:
            return
        answered = self.of(owner)
        if answered is None:
            answered = self._owners[owner] = Answered()
            self.bytes += answered.bytes
        self._change(answered, lambda: answered.add(answer))
        while self.bytes > self._most_bytes:
            first = next(iter(self._owners))
            oldest = self._owners[first]
            if len(oldest.text) > FIRST:
                self._change(oldest, oldest.forget)
            else:
                self.bytes -= self._owners.pop(first).bytes

    def _change(self, answered: Answered, change: Callable[[], None]) -> None:
        self.bytes -= answered.bytes
        change()
        self.bytes += answered.bytes
