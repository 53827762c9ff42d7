"""How recorded steps draw tokens by torch's own operations, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.engine.drawing import Numbers, draw_whole
from outrider.engine.group import Group
from outrider.sampling.noise import gumbel_of_ids
from outrider.sampling.shaping import MOST, Row

AT_ONCE = 64  # rows, which bounds the memory that their noise takes


class TorchDrawing:
    """Implements Drawing."""

    cutting = None

    def __init__(
        self, group: Group, rows: int, device: torch.device, vocabulary: torch.Tensor | None = None
    ) -> None:
        """`vocabulary`: the ids that logits are of, if not all; the first of them is always allowed."""
        ids = torch.arange(group.ids.start, group.ids.stop) if vocabulary is None else vocabulary
        self._group = group
        self._named = vocabulary is not None
        self._ids = ids.to(device)
        self.logits = torch.zeros(rows, len(ids), dtype=torch.float32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limit = torch.zeros(1, dtype=torch.int64, device=device)

    def take(self, given: torch.Tensor) -> None:
        logits = self.logits[: len(given)]
        logits.copy_(given)
        logits.masked_fill_(self._barred(), -torch.inf)
        self.tokens[: len(given)].copy_(self._group.likeliest(logits))

    def draw(self, numbers: Numbers) -> None:
        for first in range(0, numbers.shape[1], AT_ONCE):
            rows, keys, temperature = numbers[:, first : first + AT_ONCE]
            self.tokens.index_copy_(0, rows, self._group.likeliest(self._noisy(rows, keys, temperature)))

    def rank(self, numbers: Numbers, out: torch.Tensor) -> None:
        for first in range(0, numbers.shape[1], AT_ONCE):
            some = slice(first, first + AT_ONCE)
            rows, keys, temperature = numbers[:, some]
            greedy = temperature.view(torch.float64)[:, None] == 0
            noisy = self._noisy(rows, keys, temperature).clamp_(min=-MOST)
            scores = torch.where(greedy, self.logits.index_select(0, rows), noisy)
            scores.masked_fill_(self._barred(), -torch.inf)
            best = scores.topk(min(out.shape[2], scores.shape[1]))
            shares = (best.values - scores.logsumexp(-1, keepdim=True)).exp()
            places = slice(best.indices.shape[1])
            out[some, 0, places] = self._ids[best.indices].int()
            out[some, 1, places] = shares.view(torch.int32)

    def draw_whole(self, rows: Sequence[Row], at: Sequence[int], vocab_size: int) -> None:
        draw_whole(self, self._group, rows, at, vocab_size)

    def _barred(self) -> torch.Tensor:
        barred = self._ids >= self.limit
        if self._named:
            barred[:1] = False
        return barred

    def _noisy(self, rows: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Returns log p' + noise [r, w]; greedy rows have no meaning in it."""
        logits = self.logits.index_select(0, rows)
        most = self._group.greatest(logits)[:, None]
        shaped = (logits - most) / temperature.view(torch.float64).float()[:, None]
        return shaped + gumbel_of_ids(keys, self._ids)
