"""Log-probabilities of the model itself, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.sampling.shaping import Row
from outrider.wire.logprobs import Logprob


class Scores:
    """What a draw is to tell besides tokens, and what it told."""

    def __init__(self, counts: Sequence[int | None]) -> None:
        """`counts`, by row: of how many likeliest tokens it is told; None = of none, nor of the drawn one."""
        self.counts = counts
        self.found: dict[
            int, Logprob
        ] = {}  # by row: of those that count, as all drafts before them were drawn

    def find(self, logits: torch.Tensor, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """`logits` [R, V], as the model gave them. Each row is reckoned alone: in any company its numbers are
        the same."""
        counts = False
        for index, (row, count) in enumerate(zip(rows, self.counts, strict=True)):
            counts = row.after is None or (counts and chosen[index - 1] == row.after)
            if not counts or count is None:
                continue
            of = logits[index].double()  # [V]
            of -= of.logsumexp(-1)
            best = of.topk(min(count, len(of)))
            top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            self.found[index] = Logprob(float(of[chosen[index]]), tuple(top))
