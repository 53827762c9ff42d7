"""What a draw says beside its token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ranked:
    """How clearly a draw's token won, and which tokens were next. Plain numbers."""

    ids: tuple[int, ...]  # best first: the token drawn, then what would be drawn without those before it
    shares: tuple[float, ...]  # of each in the softmax of log p' + noise

    @property
    def possible(self) -> Ranked:
        """Returns the same without what can never be drawn."""
        count = max(1, sum(share > 0 for share in self.shares))
        return Ranked(self.ids[:count], self.shares[:count])
