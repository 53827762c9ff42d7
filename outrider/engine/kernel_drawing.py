"""How recorded steps draw tokens on a GPU: by kernels, in two passes over the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.engine.drawing import Cutting, Numbers, draw_whole
from outrider.engine.group import Group
from outrider.sampling.kernel_draws import Columns, Drawn, best, change, cut, rank_into, score, take
from outrider.sampling.packed_rows import Fields, PackedRows
from outrider.sampling.shaping import Row
from outrider.uploading import uploaded


class KernelDrawing:
    """Implements Drawing and Cutting."""

    def __init__(
        self, group: Group, rows: int, device: torch.device, vocabulary: torch.Tensor | None = None
    ) -> None:
        """See TorchDrawing."""
        self._group = group
        width = group.ids.stop - group.ids.start
        self.logits = torch.zeros(rows, width, dtype=torch.float32, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.limit = torch.zeros(1, dtype=torch.int64, device=device)
        ids = None if vocabulary is None else vocabulary.to(device)
        self._columns = Columns(group.ids.start, width, self.limit, ids)
        tiles = self._columns.tiles
        self._parts = torch.zeros(rows, tiles, dtype=torch.int64, device=device)
        # What is best of each row, in parts: tiles, or the ranks' slices.
        self._best = self._parts if group.size == 1 else self._parts.new_zeros(rows, group.size)

    def take(self, given: torch.Tensor) -> None:
        rows = slice(len(given))
        take(self.logits[rows], self._parts[rows], self._columns, given)
        if self._group.size > 1:
            self._best[rows] = self._everyones(self._parts[rows])
        best(self._best[rows], self.tokens)

    def draw(self, numbers: Numbers) -> None:
        drawn = _drawn(numbers)
        found, _ = score(self.logits, self._best, self._columns, drawn)
        best(found if self._group.size == 1 else self._everyones(found), self.tokens, drawn.at)

    def rank(self, numbers: Numbers, out: torch.Tensor) -> None:
        rank_into(out, self.logits, self._best, self._columns, _drawn(numbers))

    @property
    def cutting(self) -> Cutting | None:
        return self if self._group.size == 1 else None

    def draw_whole(self, rows: Sequence[Row], at: Sequence[int], vocab_size: int) -> None:
        draw_whole(self, self._group, rows, at, vocab_size)

    def change(self, packed: PackedRows) -> None:
        views = packed.views(uploaded(packed.buffer, self.logits.device))
        change(self.logits, self._parts, self._columns, packed, views)

    def draw_cut(self, fields: Fields) -> None:
        drawn = cut(self.logits, self._parts, self._columns, fields)
        best(score(self.logits, self._parts, self._columns, drawn)[0], self.tokens, drawn.at)

    def rank_cut(self, fields: Fields, out: torch.Tensor) -> None:
        drawn = cut(self.logits, self._parts, self._columns, fields)
        rank_into(out, self.logits, self._parts, self._columns, drawn)

    def _everyones(self, parts: torch.Tensor) -> torch.Tensor:
        """Returns the best of each process's part of the rows [n, N], given those of its tiles."""
        own = parts.new_empty(len(parts))
        best(parts, own, keys=True)
        return self._group.everyones(own)


def _drawn(numbers: Numbers) -> Drawn:
    return Drawn(numbers[0], numbers[1], numbers[2].view(torch.float64))
