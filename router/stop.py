"""Stop strings: text in as it comes, text out up to the first of them, and never any part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Withholds what may be the beginning of a stop string until it is one, or is not.

    The first stop string is the one that is complete first (of two that end together, the longer). How the
    text is cut into pieces does not matter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Returns the text that is now safe to show. Must not be called once `stopped`."""
        buffer = self._held + text
        held = 0
        for end, character in enumerate(text, start=len(self._held) + 1):
            held = matched = 0
            for pattern in self._patterns:
                length, complete = pattern.advance(character)
                held = max(held, length)
                matched = max(matched, length) if complete else matched
            if matched:
                self.stopped, self._held = True, ""
                return buffer[: end - matched]
        if not text:
            return ""
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """Returns what is still withheld at the end of the text: it was no stop string."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth, Morris, Pratt (1977): after each character, the longest end of the text that begins it."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._length = 0  # characters of the pattern that the text now ends with
        self._shorter = [0]  # [n - 1]: the next shorter beginning that also ends pattern[:n]
        for character in pattern[1:]:
            self._shorter.append(self._extend(self._shorter[-1], character))

    def advance(self, character: str) -> tuple[int, bool]:
        """Returns (characters matched, True if that is the whole pattern). Must not be called after a whole
        match."""
        self._length = self._extend(self._length, character)
        return self._length, self._length == len(self._pattern)

    def _extend(self, length: int, character: str) -> int:
        while length and self._pattern[length] != character:
            length = self._shorter[length - 1]
        return length + 1 if self._pattern[length] == character else 0
