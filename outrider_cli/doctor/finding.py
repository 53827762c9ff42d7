"""What a check found: plain data."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import printable

MOST = 600  # characters


@dataclass(frozen=True, slots=True)
class Finding:
    """One line."""

    check: str  # what was looked at, in a word or two
    said: str  # what is the case
    todo: str = ""  # what to do about it; empty = it is as it should be

    @property
    def ok(self) -> bool:
        return not self.todo

    def __str__(self) -> str:
        told = f"{self.said}: {self.todo}" if self.todo else self.said
        return f"{'ok' if self.ok else 'WRONG':<6} {self.check:<13} {printable(told, MOST)}"
