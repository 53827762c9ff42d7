"""The pause before something is tried again: it doubles until there was a good stretch. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """All in seconds."""

    first: float
    most: float
    good: float  # that it must have gone well for the pause to begin anew: a success alone proves little
    _pause: float = 0.0

    def after(self, lasted: float) -> float:
        """Returns the pause, where it went well for so long since the last one."""
        self._pause = (
            self.first if lasted >= self.good or not self._pause else min(2 * self._pause, self.most)
        )
        return self._pause
