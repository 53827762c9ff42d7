"""Stop strings: text in as it comes, text out up to the first of them, and never any part of one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The stop strings of a request, and the tables by which they are found: made once, for all its prompts.

    Making them takes time that grows with the strings."""

    strings: tuple[str, ...] = ()  # none of them empty
    _tables: tuple[_Table, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tables", tuple(_Table(string) for string in self.strings))

    def matcher(self, included: bool = False) -> StopMatcher:
        """Returns a new matcher, for one output. If `included`, the text has the stop string that ends it."""
        return StopMatcher(self._tables, included)


class StopMatcher:
    """Withholds what may be the beginning of a stop string until it is one, or is not.

    The first stop string is the one that is complete first (of two that end together, the longer). How the
    text is cut into pieces does not matter.
    """

    def __init__(self, tables: Iterable[_Table], included: bool = False) -> None:
        self._patterns = [_Pattern(table) for table in tables]
        self._included = included
        self._held = ""
        self.stopped = False
        self.found = ""  # the stop string, once `stopped`

    def push(self, text: str, may_stop: bool = True) -> str:
        """Returns the text that is now safe to show. Must not be called once `stopped`. Unless it `may_stop`
        here, a stop string that is complete in this text is none."""
        if not self._patterns:
            return text
        buffer = self._held + text
        held = 0
        for end, character in enumerate(text, start=len(self._held) + 1):
            held, found = 0, ""
            for pattern in self._patterns:
                length, complete = pattern.advance(character)
                if complete and not may_stop:
                    length, complete = pattern.pass_over(), False
                held = max(held, length)
                if complete and length > len(found):
                    found = pattern.string
            if found:
                self.stopped, self.found, self._held = True, found, ""
                return buffer[: end if self._included else end - len(found)]
        if not text:
            return ""
        self._held = buffer[len(buffer) - held :]
        return buffer[: len(buffer) - held]

    def flush(self) -> str:
        """Returns what is still withheld at the end of the text: it was no stop string."""
        held, self._held = self._held, ""
        return held


class _Table:
    """Knuth, Morris, Pratt (1977): for each beginning of a stop string the next shorter one that ends it."""

    def __init__(self, string: str) -> None:
        self.string = string
        self._shorter = array("I", [0])  # [n - 1]: the next shorter beginning that also ends string[:n]
        for character in string[1:]:
            self._shorter.append(self.extended(self._shorter[-1], character))

    def shorter(self, length: int) -> int:
        """Returns the length of the next shorter beginning that also ends this one."""
        return self._shorter[length - 1]

    def extended(self, length: int, character: str) -> int:
        """Returns how many characters of the string a text ends with, from that number before its last
        character."""
        while length and self.string[length] != character:
            length = self._shorter[length - 1]
        return length + 1 if self.string[length] == character else 0


class _Pattern:
    """A stop string's place in one text."""

    def __init__(self, table: _Table) -> None:
        self._table = table
        self.string = table.string
        self._length = 0  # characters of the string that the text now ends with

    def advance(self, character: str) -> tuple[int, bool]:
        """Returns (characters matched, True if that is the whole string). Must not be called after a whole
        match."""
        self._length = self._table.extended(self._length, character)
        return self._length, self._length == len(self._table.string)

    def pass_over(self) -> int:
        """Goes on after a whole match. Returns how many characters of it may begin another."""
        self._length = self._table.shorter(self._length)
        return self._length
