"""What a draw says beside its token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_RANKED = 4  # tokens of a row that are ranked without waiting: a draft's and its alternatives


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


def ranked_of(found: npt.NDArray[np.int32], count: int) -> list[Ranked]:
    """Returns the first `count` of each row of [n, 2, most]: ids, and the bits of their float32 shares."""
    ids, shares = found[:, 0, :count].tolist(), found[:, 1, :count].view(np.float32).tolist()
    return [Ranked(tuple(of_row), tuple(chances)) for of_row, chances in zip(ids, shares, strict=True)]
